//! Checks on a machine that was started after a power cut.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::thread;

use serde_json::Value;

use super::Shell;
use super::journal::{Expect, Facts, Journal, Known};
use crate::Ran;
use crate::random::Random;

/// Sandboxes that are started at the same time.
const AT_ONCE: usize = 3;
/// The number of sandboxes left for the next round.
const MOST: usize = 5;

/// How much was checked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Checked {
    /// Sandboxes that had to exist.
    pub sandboxes: u64,
    /// Sandboxes that were started and used.
    pub started: u64,
    /// Sandboxes that had to stay removed.
    pub removed: u64,
    /// Rules that had to exist, or had to stay removed.
    pub rules: u64,
    /// Files in guests that had to exist.
    pub files: u64,
}

impl Checked {
    /// Adds the counts of another round.
    pub fn add(&mut self, other: Self) {
        self.sandboxes += other.sandboxes;
        self.started += other.started;
        self.removed += other.removed;
        self.rules += other.rules;
        self.files += other.files;
    }
}

impl fmt::Display for Checked {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sandboxes, started, removed, rules, files } = self;
        write!(
            out,
            "{sandboxes} sandboxes there, {removed} removed, {started} started, {rules} rules, {files} synced files"
        )
    }
}

/// One check of one machine.
struct Check<'machine> {
    shell: &'machine Shell,
    journal: &'machine Journal,
    facts: Facts,
    found: Mutex<Found>,
}

#[derive(Default)]
struct Found {
    checked: Checked,
    problems: Vec<String>,
}

/// Checks everything, and resolves in the journal what could be either way. Returns counts and problems.
pub fn check(shell: &Shell, journal: &Journal, random: &mut Random) -> (Checked, Vec<String>) {
    let check = Check { shell, journal, facts: journal.facts(), found: Mutex::default() };
    if check.facts.is_used {
        // First of all, before any other command could repair or continue the log.
        check.ok("audit-at-once", &["audit", "verify"]);
        check.ok("events-at-once", &["events"]);
    }
    if let Some(listed) = check.listed() {
        check.compare(&listed);
        check.use_all(&listed);
        check.use_new();
        check.tidy(random);
    }
    check.ok("audit-after-use", &["audit", "verify"]);
    check.ok("events-after-use", &["events", "--json"]);
    journal.correct(|facts| facts.is_used = true);
    let found = check.found.into_inner().unwrap_or_else(PoisonError::into_inner);
    (found.checked, found.problems)
}

/// The records of `bathy ls`, by name.
type Listed = BTreeMap<String, Value>;

impl Check<'_> {
    /// Every problem begins with the name of its check, to be counted by.
    fn problem(&self, check: &str, details: impl AsRef<str>) {
        let problem = format!("{check}: {}", details.as_ref());
        self.journal.note("problem", &problem);
        self.found.lock().unwrap_or_else(PoisonError::into_inner).problems.push(problem);
    }

    fn count(&self, add: impl FnOnce(&mut Checked)) {
        add(&mut self.found.lock().unwrap_or_else(PoisonError::into_inner).checked);
    }

    /// The output of a command. A failure or a hang is a problem.
    fn ok(&self, check: &str, arguments: &[&str]) -> Option<String> {
        let Ran { code, stdout, stderr, took } = self.shell.bathy(arguments);
        if code == Some(0) {
            return Some(stdout);
        }
        let message = format!("{}{}", stdout.trim(), stderr.trim());
        let line = arguments.join(" ");
        self.problem(check, format!("`bathy {line}` has exit code {code:?} after {took:?}: {message}"));
        None
    }

    fn listed(&self) -> Option<Listed> {
        let output = self.ok("ls", &["ls", "--json"])?;
        let Ok(Value::Array(records)) = serde_json::from_str(&output) else {
            self.problem("ls", format!("it prints no list: {output}"));
            return None;
        };
        let named = |record: Value| {
            let name = record["name"].as_str().or_else(|| record["id"].as_str());
            Some((name?.to_owned(), record))
        };
        Some(records.into_iter().filter_map(named).collect())
    }

    /// Compares the list with what was reported.
    fn compare(&self, listed: &Listed) {
        for (name, known) in &self.facts.sandboxes {
            let id = listed.get(name).and_then(|record| record["id"].as_str());
            if known.expect == Expect::Present {
                self.count(|checked| checked.sandboxes += 1);
                if id.is_none() || id != known.id.as_deref() {
                    let expected = known.id.as_deref().unwrap_or_default();
                    self.problem(
                        "lost-sandbox",
                        format!("{name} ({expected}) was made, and is listed as {id:?}"),
                    );
                }
            }
        }
        let ids: BTreeSet<&str> = listed.values().filter_map(|record| record["id"].as_str()).collect();
        for id in &self.facts.removed {
            self.count(|checked| checked.removed += 1);
            if ids.contains(id.as_str()) {
                self.problem("back-again", format!("{id} was removed, and is listed"));
            }
        }
        for (name, record) in listed {
            let is_removed = self.facts.removed.iter().any(|id| record["id"] == **id);
            if !is_removed && !self.facts.sandboxes.contains_key(name) {
                self.problem("unknown-sandbox", format!("{name} is listed: {record}"));
            }
            let status = record["status"].as_str().unwrap_or_default();
            if !["created", "stopped", "dead"].contains(&status) {
                self.problem("status", format!("{name} is {status} on a machine that has just been started"));
            }
        }
    }

    /// Starts every listed sandbox, some at a time.
    fn use_all(&self, listed: &Listed) {
        let names = Mutex::new(listed.keys());
        let next = || names.lock().unwrap_or_else(PoisonError::into_inner).next();
        thread::scope(|scope| {
            for _ in 0..AT_ONCE {
                scope.spawn(|| {
                    while let Some(name) = next() {
                        self.use_one(name);
                    }
                });
            }
        });
        // A sandbox that is not listed does not exist: what could be either way is resolved.
        self.journal.correct(|facts| facts.sandboxes.retain(|name, _| listed.contains_key(name)));
        for (name, record) in listed {
            let id = record["id"].as_str().map(str::to_owned);
            self.journal.correct(|facts| {
                let known = facts.sandboxes.entry(name.clone()).or_insert_with(|| Known::asked(false));
                known.expect = Expect::Present;
                known.id = id;
            });
        }
    }

    fn use_one(&self, name: &str) {
        self.count(|checked| checked.started += 1);
        let unknown = Known::asked(false);
        let known = self.facts.sandboxes.get(name).unwrap_or(&unknown);
        self.check_rules(name, known);
        if self.ok("start", &["start", name]).is_none()
            || self.ok("exec", &["exec", name, "--", "true"]).is_none()
        {
            // The next rounds are about others.
            self.ok("rm-broken", &["rm", "-f", name]);
            return;
        }
        self.check_files(name, known);
        if known.is_repl && self.ok("repl", &["repl", "run", name, "-c", "print(6 * 7)"]).is_none() {
            self.ok("repl-rm", &["repl", "rm", name]);
        }
    }

    fn check_rules(&self, name: &str, known: &Known) {
        let Some(output) = self.ok("policy", &["policy", "show", "--json", name]) else { return };
        let shown: Value = serde_json::from_str(&output).unwrap_or_default();
        let Some(rules) = shown["policy"]["rules"].as_array() else {
            return self.problem("policy", format!("{name} has no list of rules: {output}"));
        };
        let rules: BTreeSet<&str> = rules.iter().filter_map(Value::as_str).collect();
        for (rule, expect) in &known.rules {
            let is_there = rules.contains(rule.as_str());
            self.count(|checked| checked.rules += u64::from(*expect != Expect::Either));
            match expect {
                Expect::Present if !is_there => {
                    self.problem("lost-rule", format!("{name} has no `{rule}`, which was reported as done"));
                }
                Expect::Absent if is_there => {
                    self.problem("rule-back", format!("{name} has `{rule}` again, which was taken back"));
                }
                _ => {}
            }
            let found = if is_there { Expect::Present } else { Expect::Absent };
            self.correct(name, |known| known.expect_rule(rule, found));
        }
    }

    fn check_files(&self, name: &str, known: &Known) {
        let certain: Vec<_> = known.files.iter().filter(|(_, file)| file.expect == Expect::Present).collect();
        self.correct(name, |known| known.files.retain(|_, file| file.expect == Expect::Present));
        if certain.is_empty() {
            return;
        }
        let paths: Vec<&str> = certain.iter().map(|(path, _)| path.as_str()).collect();
        let ran = self.shell.bathy(&[&["exec", name, "--", "sha256sum"], paths.as_slice()].concat());
        // It is 1 if a file is missing.
        if !matches!(ran.code, Some(0 | 1)) {
            return self.problem("exec", format!("the files of {name} cannot be read: {ran:?}"));
        }
        let found: BTreeMap<&str, &str> = ran
            .stdout
            .lines()
            .filter_map(|line| line.split_once("  ").map(|(sum, path)| (path, sum)))
            .collect();
        for (path, file) in certain {
            self.count(|checked| checked.files += 1);
            let digest = found.get(path.as_str()).copied();
            if digest != Some(file.digest.as_str()) {
                let expected = &file.digest;
                let details =
                    format!("{name}:{path} was synced as {expected}, now {digest:?}: {}", ran.stderr.trim());
                self.problem("lost-file", details);
                self.correct(name, |known| drop(known.files.remove(path)));
            }
        }
    }

    fn correct(&self, name: &str, change: impl FnOnce(&mut Known)) {
        self.journal.correct(|facts| facts.sandboxes.get_mut(name).map(change));
    }

    /// Checks that the next steps of a user work.
    fn use_new(&self) {
        let create =
            ["create", "--start", "--name", "after", "--memory", "64M", "--disk", "32M", "--log-size", "1M"];
        let all: [&[&str]; 4] =
            [&create, &["exec", "after", "--", "true"], &["stop", "-t", "1", "after"], &["rm", "after"]];
        for arguments in all {
            if self.ok("use-after", arguments).is_none() {
                // So that the next round can create it.
                self.shell.bathy(&["rm", "-f", "after"]);
                return;
            }
        }
    }

    /// Leaves some sandboxes for the next round, some of them running.
    fn tidy(&self, random: &mut Random) {
        let Some(listed) = self.listed() else { return };
        self.journal.correct(|facts| facts.sandboxes.retain(|name, _| listed.contains_key(name)));
        for (index, (name, record)) in listed.iter().enumerate() {
            let id = record["id"].as_str().unwrap_or_default();
            if index >= MOST {
                if self.ok("rm", &["rm", "-f", name]).is_some() {
                    self.journal.correct(|facts| {
                        facts.sandboxes.remove(name);
                        facts.removed.insert(id.to_owned());
                    });
                }
                continue;
            }
            let stays = random.chance(1, 2) || self.ok("stop", &["stop", "-t", "1", name]).is_none();
            self.correct(name, |known| known.is_running = stays);
        }
    }
}
