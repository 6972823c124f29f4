//! The workload of a machine until its power is cut.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::Shell;
use super::journal::{Expect, GuestFile, Journal, Known};
use crate::random::Random;

/// The most sandboxes of one worker.
const MOST: usize = 2;
const HOME: &str = "/home/user";
/// Memory of sandboxes, and of REPLs, in which a Python runs.
const SMALL: &str = "64M";
const REPL: &str = "128M";

/// One of several concurrent workers, each with sandboxes of its own.
#[derive(Debug)]
pub struct Worker<'round> {
    pub shell: Shell,
    /// The journal of its actions.
    pub journal: &'round Journal,
    /// The folder for files that are copied in and out.
    pub folder: &'round Path,
    /// Its sandboxes' names begin with this.
    pub prefix: String,
    pub random: Random,
}

/// What can be done with a sandbox.
#[derive(Clone, Copy, Debug)]
enum Work {
    WriteFile,
    ManyCommands,
    CopyIn,
    CopyOut,
    Deny,
    Allow,
    TakeBack,
    Start,
    Stop,
    Remove,
    Duplicate,
}

const RUNNING: [Work; 14] = [
    Work::WriteFile,
    Work::WriteFile,
    Work::WriteFile,
    Work::ManyCommands,
    Work::ManyCommands,
    Work::CopyIn,
    Work::CopyIn,
    Work::CopyOut,
    Work::Deny,
    Work::Deny,
    Work::Allow,
    Work::TakeBack,
    Work::Stop,
    Work::Remove,
];
const STOPPED: [Work; 8] = [
    Work::Start,
    Work::Start,
    Work::Start,
    Work::Deny,
    Work::Allow,
    Work::TakeBack,
    Work::Duplicate,
    Work::Remove,
];
const OF_REPL: [Work; 6] =
    [Work::WriteFile, Work::WriteFile, Work::WriteFile, Work::Deny, Work::TakeBack, Work::Remove];

impl Worker<'_> {
    /// Works until the journal is closed or something fails.
    pub fn run(mut self) {
        while self.step().is_some() {}
    }

    fn step(&mut self) -> Option<()> {
        let facts = self.journal.facts();
        let own: Vec<(&String, &Known)> =
            facts.sandboxes.iter().filter(|(name, _)| name.starts_with(&self.prefix)).collect();
        if own.len() < MOST && self.random.chance(1, 1 + own.len() as u64 * 3) {
            return self.create();
        }
        let (name, known) = *own.get(self.random.index(own.len()))?;
        let choices: &[Work] = match known {
            Known { is_repl: true, .. } => &OF_REPL,
            Known { is_running: true, .. } => &RUNNING,
            _ => &STOPPED,
        };
        match self.random.pick(choices) {
            Work::WriteFile if known.is_repl => self.write_in_repl(name),
            Work::WriteFile => self.write_file(name),
            Work::ManyCommands => self.many_commands(name),
            Work::CopyIn => self.copy_in(name),
            Work::CopyOut => self.copy_out(name, known),
            Work::Deny => self.rule(name, "deny"),
            Work::Allow => self.rule(name, "allow"),
            Work::TakeBack => self.take_back(name, known),
            Work::Start => self.start_or_stop(name, true),
            Work::Stop => self.start_or_stop(name, false),
            Work::Remove => self.remove(name, known),
            Work::Duplicate => self.duplicate(known),
        }
    }

    fn number(&self) -> u64 {
        self.journal.correct(|facts| {
            facts.counter += 1;
            facts.counter
        })
    }

    /// Does something to one sandbox.
    fn of(
        &self,
        name: &str,
        arguments: &[&str],
        before: impl FnOnce(&mut Known),
        after: impl FnOnce(&mut Known, &str),
    ) -> Option<String> {
        let ran = self.journal.run(
            &self.shell,
            arguments,
            |facts| before(facts.sandboxes.get_mut(name).expect("a worker knows its sandboxes")),
            |facts, ran| {
                let known = facts.sandboxes.get_mut(name).expect("a worker knows its sandboxes");
                after(known, &ran.stdout);
            },
        )?;
        Some(ran.stdout)
    }

    fn create(&mut self) -> Option<()> {
        // A free name may be used again.
        let number = if self.random.chance(1, 3) { self.random.below(3) } else { 100 + self.number() };
        let name = format!("{}{number}", self.prefix);
        if self.journal.facts().sandboxes.contains_key(&name) {
            return Some(());
        }
        let (is_repl, starts) = (self.random.chance(1, 5), self.random.chance(1, 2));
        // Sizes that were not used before need a new template.
        let disk = format!("{}M", 24 + 2 * self.random.below(20));
        let mut arguments = match (is_repl, starts) {
            (true, _) => vec!["repl", "new", &name, "--memory", REPL],
            (false, true) => vec!["create", "--start", "--name", &name, "--memory", SMALL],
            (false, false) => vec!["create", "--name", &name, "--memory", SMALL],
        };
        let target = format!("first-{number}.example");
        arguments.extend(["--log-size", "1M", "--disk", &disk, "--deny", &target, "--json"]);
        self.journal.run(
            &self.shell,
            &arguments,
            |facts| drop(facts.sandboxes.insert(name.clone(), Known::asked(is_repl))),
            |facts, ran| {
                let known = facts.sandboxes.get_mut(&name).expect("it was asked for");
                known.id = Some(id_in(&ran.stdout));
                known.is_running = starts || is_repl;
                known.expect = Expect::Present;
                known.expect_rule(&format!("deny {target}"), Expect::Present);
            },
        )?;
        Some(())
    }

    fn write_file(&mut self, name: &str) -> Option<()> {
        let path = format!("{HOME}/file-{}", self.number());
        let size = 1 + self.random.below(300_000);
        let sync = self.random.pick(&["sync FILE HOME", "sync"]).replace("FILE", &path).replace("HOME", HOME);
        let script = format!("head -c {size} /dev/urandom > {path} && {sync} && sha256sum {path}");
        self.of(
            name,
            &["exec", name, "--", "sh", "-c", &script],
            |known| expect_file(known, &path),
            |known, output| known_file(known, &path, output),
        )?;
        Some(())
    }

    fn write_in_repl(&mut self, name: &str) -> Option<()> {
        let path = format!("{HOME}/cell-{}", self.number());
        let code = format!(
            "import hashlib, os\ndata = os.urandom({})\nwith open('{path}', 'wb') as file:\n    file.write(data)\n    \
             file.flush()\n    os.fsync(file.fileno())\nos.sync()\nprint(hashlib.sha256(data).hexdigest())",
            1 + self.random.below(100_000)
        );
        self.of(
            name,
            &["repl", "run", name, "-c", &code],
            |known| expect_file(known, &path),
            |known, output| known_file(known, &path, output),
        )?;
        Some(())
    }

    fn many_commands(&mut self, name: &str) -> Option<()> {
        for _ in 0..5 {
            self.of(name, &["exec", name, "--", "true"], |_| (), |_, _| ())?;
        }
        Some(())
    }

    fn copy_in(&mut self, name: &str) -> Option<()> {
        let number = self.number();
        let path = format!("{HOME}/copy-{number}");
        let source = self.folder.join(format!("in-{number}"));
        let content: Vec<u8> =
            (0..1 + self.random.below(60_000)).map(|_| self.random.number().to_le_bytes()[0]).collect();
        fs::write(&source, content).expect("it is our own folder");
        let digest = sha256(&source);
        let source = source.to_str().expect("our paths are text").to_owned();
        self.of(
            name,
            &["cp", "-q", &source, &format!("{name}:{path}")],
            |known| expect_file(known, &path),
            |known, _| known_file(known, &path, &digest),
        )?;
        Some(())
    }

    /// Copies one of its files out and compares it with what was written last.
    fn copy_out(&mut self, name: &str, known: &Known) -> Option<()> {
        let certain: Vec<_> = known.files.iter().filter(|(_, file)| file.expect == Expect::Present).collect();
        if certain.is_empty() {
            return Some(());
        }
        let (path, file) = certain[self.random.index(certain.len())];
        let target = self.folder.join(format!("out-{}", self.number()));
        let to = target.to_str().expect("our paths are text").to_owned();
        self.of(name, &["cp", "-q", &format!("{name}:{path}"), &to], |_| (), |_, _| ())?;
        let digest = sha256(&target);
        if digest != file.digest {
            self.journal.fail(format!("{name}:{path} was {} and is copied out as {digest}", file.digest));
        }
        Some(())
    }

    fn rule(&mut self, name: &str, action: &str) -> Option<()> {
        let target = format!("{action}-{}.example", self.number());
        let rule = format!("{action} {target}");
        self.of(
            name,
            &["policy", action, name, &target],
            |known| known.expect_rule(&rule, Expect::Either),
            |known, _| known.expect_rule(&rule, Expect::Present),
        )?;
        Some(())
    }

    fn take_back(&mut self, name: &str, known: &Known) -> Option<()> {
        let certain: Vec<_> = known
            .rules
            .iter()
            .filter(|(_, expect)| **expect == Expect::Present)
            .map(|(rule, _)| rule)
            .collect();
        // The last rule stays, so that there is always a denial that has to hold.
        if certain.len() < 2 {
            return Some(());
        }
        let rule = certain[self.random.index(certain.len())];
        self.of(
            name,
            &["policy", "rm", name, rule],
            |known| known.expect_rule(rule, Expect::Either),
            |known, _| known.expect_rule(rule, Expect::Absent),
        )?;
        Some(())
    }

    fn start_or_stop(&mut self, name: &str, starts: bool) -> Option<()> {
        let arguments: &[&str] = if starts { &["start", name] } else { &["stop", "-t", "1", name] };
        self.of(name, arguments, |_| (), |known, _| known.is_running = starts)?;
        Some(())
    }

    fn remove(&mut self, name: &str, known: &Known) -> Option<()> {
        let arguments: &[&str] = if known.is_repl { &["repl", "rm", name] } else { &["rm", "-f", name] };
        self.journal.run(
            &self.shell,
            arguments,
            |facts| {
                let known = facts.sandboxes.get_mut(name).expect("a worker knows its sandboxes");
                known.expect = Expect::Either;
            },
            |facts, _| {
                let known = facts.sandboxes.remove(name);
                facts.removed.extend(known.and_then(|known| known.id));
            },
        )?;
        Some(())
    }

    /// Copies the folder of a sandbox that does not run to another place on the same disk, as a backup does.
    fn duplicate(&mut self, known: &Known) -> Option<()> {
        let Some(id) = &known.id else { return Some(()) };
        // Each worker has places of its own: another may be copying at the same time.
        let place = format!("copies/{}{}", self.prefix, self.random.below(2));
        let script = format!("rm -rf {place} && mkdir -p copies && cp -a bathysphere/sandboxes/{id} {place}");
        let ran = self.shell.sh(&script);
        if ran.code != Some(0) {
            self.journal.fail(format!("the folder of {id} cannot be copied: {ran:?}"));
            return None;
        }
        Some(())
    }
}

/// The id in the record of a new sandbox, or of a REPL's sandbox.
fn id_in(record: &str) -> String {
    let record: Value = serde_json::from_str(record).expect("the product prints the new record as JSON");
    let id = record["id"].as_str().or_else(|| record["sandbox"].as_str());
    id.expect("a record has an id").to_owned()
}

fn expect_file(known: &mut Known, path: &str) {
    known.files.insert(path.to_owned(), GuestFile { digest: String::new(), expect: Expect::Either });
}

fn known_file(known: &mut Known, path: &str, output: &str) {
    let digest = output.split_whitespace().next().unwrap_or_default().to_owned();
    known.files.insert(path.to_owned(), GuestFile { digest, expect: Expect::Present });
}

fn sha256(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().expect("coreutils are there");
    String::from_utf8_lossy(&output.stdout).split_whitespace().next().unwrap_or_default().to_owned()
}
