//! Whichever process is killed, and whenever: the list is right, what was reported as copied is there, the audit log is
//! whole, and nothing is left in the end.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use bathy_tests::kept::{Home, children, is_alive, signal, until};
use bathy_tests::random::{Random, seed_of};
use bathy_tests::{Engine, engine, pace, patience};
use rustix::process::Signal;
use serde_json::Value;

const ROUNDS: usize = 50;
/// A client whose sandbox is killed notices: it does not wait for its own deadline.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    Create,
    Start,
    Exec,
    Copy,
    Stop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Client,
    Monitor,
    Keeper,
    Guest,
}

/// The sandbox that this process is the monitor of, if it is one.
fn monitored(pid: u32) -> Option<String> {
    let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = line.split('\0').skip(1);
    (words.next()? == "monitor").then(|| words.next().unwrap_or_default().to_owned())
}

/// The monitors of this home's sandboxes that exist, by the sandbox's id.
fn monitors(home: &Home) -> BTreeMap<String, u32> {
    let alive = home.processes().into_iter().filter(|pid| is_alive(*pid));
    alive.filter_map(|pid| Some((monitored(pid)?, pid))).collect()
}

struct Trial {
    home: Home,
    random: Random,
    /// What finished copies reported: name and digest.
    copied: Vec<(String, String)>,
    /// Everything that was ever seen.
    ids: BTreeSet<String>,
    processes: BTreeSet<u32>,
    hit: BTreeMap<(Work, Victim), usize>,
}

impl Trial {
    fn new(seed: u64) -> Self {
        Self {
            home: Home::new(),
            random: Random::new(seed),
            copied: Vec::new(),
            ids: BTreeSet::new(),
            processes: BTreeSet::new(),
            hit: BTreeMap::new(),
        }
    }

    fn round(&mut self, round: usize) {
        let work =
            self.random.pick(&[Work::Create, Work::Start, Work::Exec, Work::Copy, Work::Copy, Work::Stop]);
        let victim = match engine() {
            Engine::Uml => {
                self.random.pick(&[Victim::Client, Victim::Monitor, Victim::Keeper, Victim::Guest])
            }
            Engine::Kvm => self.random.pick(&[Victim::Client, Victim::Monitor, Victim::Keeper]),
        };
        self.prepare(work);
        let file = format!("file-{round}");
        let content: Vec<u8> =
            (0..1_500_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 11).to_le_bytes()[0]).collect();
        fs::write(self.home.path().join(&file), [content.as_slice(), file.as_bytes()].concat()).unwrap();
        let new = format!("new-{round}");
        let from = self.home.path().join(&file).to_str().unwrap().to_owned();
        let to = format!("main:/home/user/{file}");
        let (arguments, typical_ms): (Vec<&str>, u64) = match work {
            Work::Create if victim == Victim::Client => (vec!["create", "--name", &new], 30),
            Work::Create => (vec!["create", "--start", "--name", &new], 250),
            Work::Start => (vec!["start", "main"], 200),
            Work::Exec => (vec!["exec", "main", "--", "sh", "-c", "seq 1 30000; sleep 0.05"], 150),
            Work::Copy => (vec!["cp", &from, &to], 150),
            Work::Stop => (vec!["stop", "-t", "1", "main"], 150),
        };
        let known = monitors(&self.home);
        let mut client = self.home.command(&arguments).spawn().unwrap();
        let delay = pace(Duration::from_micros(self.random.below(typical_ms * 1300)));
        sleep(delay);
        let fresh: BTreeMap<String, u32>;
        let running = if matches!(work, Work::Create | Work::Start) {
            fresh = monitors(&self.home).into_iter().filter(|(id, _)| !known.contains_key(id)).collect();
            &fresh
        } else {
            &known
        };
        let hit = self.kill(victim, client.id(), running);
        *self.hit.entry((work, hit)).or_default() += 1;
        let label = format!("round {round}: {work:?}, {hit:?} killed after {delay:?}");
        let code = wait(&mut client, &label);
        if work == Work::Copy && code == Some(0) {
            self.copied.push((file, sha256(&from)));
        }
        self.check(&label);
    }

    /// Brings the sandbox to where the work can begin.
    fn prepare(&mut self, work: Work) {
        let running = self.home.status("main") == "running";
        match work {
            Work::Create => {}
            Work::Start if running => drop(self.home.ok(&["kill", "main"])),
            Work::Start => {}
            _ if running => {}
            _ => drop(self.home.ok(&["start", "main"])),
        }
        self.processes.extend(self.home.all_processes());
    }

    /// Kills what it can of what was wanted; the client is always there.
    fn kill(&mut self, victim: Victim, client: u32, running: &BTreeMap<String, u32>) -> Victim {
        // Numbers are used again: only what is still the sandbox's is killed.
        let still = |(id, pid): (&String, &u32)| (monitored(*pid).as_ref() == Some(id)).then_some(*pid);
        let monitor = running.iter().find_map(still);
        let keeper = || children(monitor?).first().copied();
        let guest = || children(keeper()?).first().copied();
        let target = match victim {
            Victim::Client => None,
            Victim::Monitor => monitor,
            Victim::Keeper => keeper(),
            Victim::Guest => guest(),
        };
        self.processes.extend(target);
        signal(target.unwrap_or(client), Signal::KILL);
        if target.is_some() { victim } else { Victim::Client }
    }

    /// Everything that has to hold after each round.
    fn check(&mut self, label: &str) {
        let mut message = Value::Null;
        let mut reason = String::new();
        let deadline = Instant::now() + patience(Duration::from_secs(5));
        // Processes need a moment to go: the list has to become right, and stay so.
        while let Err(why) = self.is_true(&mut message) {
            reason = why;
            assert!(Instant::now() < deadline, "{label}: `ls` does not tell the truth: {reason}; {message}");
            sleep(Duration::from_millis(20));
        }
        self.home.ok(&["audit", "verify"]);
        for sandbox in message.as_array().unwrap() {
            let (id, status) = (sandbox["id"].as_str().unwrap(), sandbox["status"].as_str().unwrap());
            self.ids.insert(id.to_owned());
            if sandbox["name"] == "main" {
                continue;
            }
            // One that is listed can be used and removed, however far its making came.
            if status != "running" {
                self.home.ok(&["start", id]);
            }
            assert_eq!(self.home.exec(id, &["true"]).code, Some(0), "{label}");
            self.home.ok(&["rm", "-f", id]);
        }
        if self.copied.is_empty() {
            return;
        }
        if self.home.status("main") != "running" {
            self.home.ok(&["start", "main"]);
        }
        let names: Vec<&str> = self.copied.iter().map(|(name, _)| name.as_str()).collect();
        let sums = self.home.run(&[&["exec", "main", "--", "sha256sum"], names.as_slice()].concat());
        let expected: String = self.copied.iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect();
        assert_eq!(
            sums.stdout, expected,
            "{label}, {reason}: a file is lost that was reported: {}",
            sums.stderr
        );
    }

    /// Compares the output of `ls` with the processes that exist.
    fn is_true(&self, message: &mut Value) -> Result<(), String> {
        *message = self.home.json(&["ls", "--json"]);
        let monitors = monitors(&self.home);
        let mut running = BTreeSet::new();
        for sandbox in message.as_array().unwrap() {
            let id = sandbox["id"].as_str().unwrap().to_owned();
            let monitor = monitors.get(&id).copied();
            match sandbox["status"].as_str().unwrap() {
                "running" => {
                    let pid = sandbox["monitor_pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
                    if monitor.is_none() || pid != monitor {
                        return Err(format!("{id} runs, but its monitor is {monitor:?}"));
                    }
                    let keeper = sandbox["keeper_pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
                    if !keeper.is_some_and(is_alive) {
                        return Err(format!("{id} runs, but its keeper {keeper:?} does not"));
                    }
                    let exec = self.home.exec(&id, &["true"]);
                    if exec.code != Some(0) {
                        return Err(format!("{id} runs, but does not answer: {}", exec.stderr));
                    }
                    running.insert(id);
                }
                status => {
                    if let Some(pid) = monitor {
                        return Err(format!("{id} is {status}, but its monitor is {pid}"));
                    }
                }
            }
        }
        let extra: Vec<_> = monitors.keys().filter(|id| !running.contains(*id)).collect();
        if !extra.is_empty() {
            return Err(format!("these run and are not listed as running: {extra:?}"));
        }
        if running.is_empty() && !self.home.processes().is_empty() {
            return Err(format!("nothing runs, but there are {:?}", self.home.processes()));
        }
        Ok(())
    }

    /// Everything is removed: nothing may be left of it.
    fn check_leaks(&mut self) {
        let ids = self.home.ok(&["ls", "-q"]);
        for id in ids.split_whitespace() {
            self.home.ok(&["rm", "-f", id]);
        }
        // A `create` that was killed leaves its folder until it is old enough to be swept.
        let folders = self.home.state().join("sandboxes");
        let long_ago = SystemTime::now() - Duration::from_secs(120);
        for entry in fs::read_dir(&folders).unwrap().flatten() {
            self.ids.insert(entry.file_name().into_string().unwrap());
            fs::File::open(entry.path()).unwrap().set_modified(long_ago).unwrap();
        }
        assert_eq!(self.home.ok(&["ls", "-q"]), "");
        let left: Vec<_> = fs::read_dir(&folders).unwrap().flatten().map(|entry| entry.path()).collect();
        assert!(left.is_empty(), "folders are left: {left:?}");
        until("its processes are gone", 5, || {
            self.home.processes().is_empty() && self.processes.iter().all(|pid| !is_alive(*pid))
        });
        let path = self.home.path().to_str().unwrap();
        for table in ["/proc/net/unix", "/proc/self/mountinfo"] {
            let lines = fs::read_to_string(table).unwrap();
            assert!(!lines.contains(path), "{table} has something of it");
        }
        let groups = Command::new("find")
            .args(["/sys/fs/cgroup", "-maxdepth", "4", "-name", "bathysphere-*"])
            .output();
        let groups = String::from_utf8_lossy(&groups.unwrap().stdout).into_owned();
        let left: Vec<_> =
            groups.lines().filter(|line| self.ids.iter().any(|id| line.contains(id.as_str()))).collect();
        assert!(left.is_empty(), "cgroups are left: {left:?}");
        self.home.ok(&["audit", "verify"]);
    }
}

fn sha256(path: &str) -> String {
    let output = Command::new("sha256sum").arg(path).output().unwrap();
    String::from_utf8_lossy(&output.stdout).split_whitespace().next().unwrap().to_owned()
}

/// Waits for a client's end, which must not take long, and reads its output meanwhile.
fn wait(client: &mut Child, label: &str) -> Option<i32> {
    let mut output = client.stdout.take().unwrap();
    let reader = std::thread::spawn(move || output.read_to_end(&mut Vec::new()));
    let deadline = Instant::now() + patience(PATIENCE);
    let status = loop {
        if let Some(status) = client.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            let _ = client.kill();
            assert!(Instant::now() < deadline, "{label}: the client hangs");
        }
        sleep(Duration::from_millis(5));
    };
    // No other process holds the client's output: not even the monitor that it started.
    until(&format!("{label}: the client's output is closed"), 5, || reader.is_finished());
    status.code()
}

#[test]
fn fifty_kills_at_random_moments() {
    let seed = seed_of("BATHY_SEED");
    println!("BATHY_SEED={seed}");
    let mut trial = Trial::new(seed);
    trial.home.create("main", &["--memory", "256M"]);
    for round in 0..ROUNDS {
        trial.round(round);
    }
    let victims: BTreeSet<Victim> = trial.hit.keys().map(|(_, victim)| *victim).collect();
    println!("killed, by what was going on: {:?}; {} finished copies", trial.hit, trial.copied.len());
    // A virtual machine is no process of its own that could be killed.
    let kinds = if engine() == Engine::Uml { 4 } else { 3 };
    assert_eq!(victims.len(), kinds, "the seed left a kind of process out");
    assert!(!trial.copied.is_empty(), "the seed let no copy finish");
    trial.check_leaks();
}
