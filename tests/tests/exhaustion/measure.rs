//! A neighbour whose commands are timed, and what an attack costs the host meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bathy_tests::kept::{Home, all_processes, is_alive, until};
use bathy_tests::{OnDrop, is_emulated, patience, patient_seconds};

/// What is not enough to tell a percentile by.
const LEAST_SAMPLES: usize = 60;
/// How long the neighbour is watched while nothing happens.
const CALM: Duration = Duration::from_secs(2);
/// How much longer a neighbour's commands may take.
pub const FACTOR: u32 = 3;
/// The machine has other work too: a round that went badly is measured again. What does not hold fails every round.
pub const ROUNDS: u32 = 3;
/// An attack that does not get what it wants in this time is none. A machine with other work is slow, and the end is not waited for.
const TIME_TO_TAKE: Duration = Duration::from_secs(60);
/// Between two looks at processes.
const LOOK_PAUSE: Duration = Duration::from_millis(500);
/// More than this, of its own, no keeper needs.
const KEEPER_MEMORY: u64 = 24 << 20;
/// Of the attacked sandbox.
const PROCESSES: u64 = 512;
const MEMORY: u64 = 256 << 20;
const DISK: u64 = 128 << 20;
const LOG_SIZE: u64 = 1 << 20;

/// How long each attack lasts: `BATHY_ATTACK_SECONDS`, or a few.
pub fn attack_time() -> Duration {
    let seconds = std::env::var("BATHY_ATTACK_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(5))
}

/// The percentile that is compared. In the nested test bed all processors take turns on one thread of
/// the emulator, in long slices: there the slowest of 60 commands shows its slices, and only the median shows our code.
pub fn percentile_compared() -> usize {
    if is_emulated() { 50 } else { 99 }
}

/// How long commands took, sorted.
pub struct Latencies(Vec<Duration>);

impl Latencies {
    /// Of any kind.
    pub fn new(mut all: Vec<Duration>) -> Self {
        all.sort_unstable();
        Self(all)
    }

    /// Times commands in a sandbox, one after another.
    pub fn of_commands(home: &Home, name: &str, time: Duration) -> Self {
        let begin = Instant::now();
        let mut all = Vec::new();
        while begin.elapsed() < time || all.len() < LEAST_SAMPLES {
            let started = Instant::now();
            let mut command = home.command(&["exec", name, "--", "/bin/true"]);
            let output = command.stdout(Stdio::null()).output().unwrap();
            assert!(output.status.success(), "the {name} does not answer: {output:?}");
            all.push(started.elapsed());
        }
        Self::new(all)
    }

    /// Of a hundred commands, so many were at least as quick.
    pub fn percentile(&self, percent: usize) -> Duration {
        self.0[(self.0.len() * percent / 100).min(self.0.len() - 1)]
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |percent| self.percentile(percent).as_secs_f64() * 1000.0;
        write!(f, "{:6.1} {:6.1} {:6.1} {:5}", ms(50), ms(95), ms(99), self.0.len())
    }
}

/// A neighbour, and beside it one sandbox after another that is attacked from inside.
pub struct Scene {
    /// Where they are.
    pub home: Home,
}

/// The sandbox that the attack is in.
pub struct Victim<'a> {
    /// Where it is.
    pub home: &'a Home,
    over: AtomicBool,
}

impl Victim<'_> {
    /// Its name.
    pub const NAME: &'static str = "victim";

    /// Whether an attack that goes on outside should stop.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Starts a shell script in it that goes on by itself.
    pub fn job(&self, script: &str) {
        self.home.ok(&["exec", "-d", Self::NAME, "--", "bash", "-c", script]);
    }

    /// As `job`, by root.
    pub fn root_job(&self, script: &str) {
        self.home.ok(&["exec", "-d", "-u", "root", Self::NAME, "--", "bash", "-c", script]);
    }

    /// Starts a Python program in it that goes on by itself.
    pub fn python(&self, program: &str) {
        self.home.ok(&["exec", "-d", Self::NAME, "--", "python3", "-c", program]);
    }
}

/// The most that was seen of the attacked sandbox on the host.
#[derive(Default)]
struct Seen {
    processes: AtomicU64,
    keeper_memory: AtomicU64,
}

/// What an attack took, which shows whether it was one.
pub struct Taken<'a> {
    /// The sandbox, which may have ended.
    pub victim: &'a Victim<'a>,
    /// The most host processes that there were.
    pub processes: u64,
    /// Bytes of its logs.
    pub logs: u64,
}

impl Scene {
    /// A neighbour that runs, on the same processor as all that will be attacked.
    pub fn new() -> Self {
        let home = Home::new();
        home.started("neighbour", &["--memory", "256M"]);
        // Sandboxes are spread over the processors. With one on each of the others, the next one goes where it can
        // hurt the neighbour most. Many processors are left alone.
        let processors = thread::available_parallelism().map_or(1, usize::from);
        for number in 1..processors.min(4) {
            home.started(&format!("far-{number}"), &["--memory", "64M"]);
        }
        println!(
            "{:24} | cpu   | before p50    p95    p99     n | during p50    p95    p99     n | processes | logs KiB | disk MiB | keeper MiB | afterwards",
            "attack"
        );
        Self { home }
    }

    /// Times commands in the neighbour, one after another.
    pub fn latencies(&self, time: Duration) -> Latencies {
        Latencies::of_commands(&self.home, "neighbour", time)
    }

    /// What commands take while nothing else happens.
    pub fn calm(&self) -> Latencies {
        self.latencies(CALM)
    }

    /// Attacks a fresh sandbox from inside, until the neighbour was seen not to suffer. `check` returns whether the
    /// attack took what it was meant to.
    pub fn attack(&self, name: &str, begin: impl Fn(&Victim<'_>) + Sync, check: impl Fn(&Taken<'_>) -> bool) {
        let mut rounds = 0;
        while !self.round(name, &begin, &check) {
            rounds += 1;
            assert!(
                rounds < ROUNDS,
                "{name}: the neighbour's commands take more than {FACTOR} times as long (percentile {})",
                percentile_compared()
            );
        }
    }

    /// One attack. Everything has to hold except that the neighbour does not suffer, which is returned.
    fn round(
        &self,
        name: &str,
        begin: &(impl Fn(&Victim<'_>) + Sync),
        check: &impl Fn(&Taken<'_>) -> bool,
    ) -> bool {
        let home = &self.home;
        let before_all = home.all_processes();
        let [memory, disk, log] = [MEMORY, DISK, LOG_SIZE].map(|size| format!("{}K", size >> 10));
        let processes = PROCESSES.to_string();
        let options = ["--memory", &memory, "--disk", &disk, "--log-size", &log, "--processes", &processes];
        let id = home.started(Victim::NAME, &options);
        let keeper = home.keeper(Victim::NAME);
        let place = if affinity(home.guest(Victim::NAME)) == affinity(home.guest("neighbour")) {
            "same"
        } else {
            "other"
        };
        let before = self.calm();

        let victim = Victim { home, over: AtomicBool::new(false) };
        let seen = Seen::default();
        let during = thread::scope(|scope| {
            // However this ends: a thread that goes on would be waited for.
            let _end = OnDrop(|| victim.over.store(true, Ordering::Relaxed));
            let attack = scope.spawn(|| begin(&victim));
            scope.spawn(|| seen.watch(keeper, &victim));
            thread::sleep(Duration::from_millis(500));
            let deadline = Instant::now() + patience(TIME_TO_TAKE);
            // What counts is how the neighbour fares when the attack has come to what it is meant to take.
            loop {
                let during = self.latencies(attack_time());
                let (processes, logs) = (seen.processes.load(Ordering::Relaxed), sizes(home, &id).0);
                if check(&Taken { victim: &victim, processes, logs }) {
                    victim.over.store(true, Ordering::Relaxed);
                    attack.join().unwrap();
                    return during;
                }
                assert!(Instant::now() < deadline, "{name}: it did not take what it was meant to take");
            }
        });

        let (logs, disk) = sizes(home, &id);
        let processes = seen.processes.load(Ordering::Relaxed);
        let afterwards = self.afterwards(name);
        let keeper_memory = seen.keeper_memory.load(Ordering::Relaxed);
        println!(
            "{name:24} | {place:5} | {before}  | {during}  | {processes:9} | {:8} | {:8} | {:10.1} | {afterwards}",
            logs >> 10,
            disk >> 20,
            megabytes(keeper_memory),
        );
        // The guest's processes, its kernel and what that needs for itself.
        assert!(processes <= PROCESSES + 16, "{name}: {processes} processes on the host");
        // What is kept, and the heads of the two files that it is kept in.
        assert!(logs <= LOG_SIZE + (32 << 10), "{name}: logs of {logs} bytes");
        assert!(disk <= DISK + (1 << 20), "{name}: a disk of {disk} bytes");
        assert!(keeper_memory <= KEEPER_MEMORY, "{name}: the keeper has {keeper_memory} bytes");

        let started = Instant::now();
        home.ok(&["rm", "-f", Victim::NAME]);
        assert!(
            started.elapsed() < patience(Duration::from_secs(20)),
            "{name}: removed in {:?}",
            started.elapsed()
        );
        until("the host has as many processes as before", 10, || {
            !is_alive(keeper) && home.all_processes().is_subset(&before_all)
        });
        assert!(!home.state().join("sandboxes").join(&id).exists(), "{name}: its files are left");
        home.ok(&["audit", "verify"]);
        during.percentile(percentile_compared()) <= before.percentile(percentile_compared()) * FACTOR
    }

    /// What becomes of the attacked sandbox: it answers, or reports in bounded time why it does not, or has ended with a
    /// reason.
    fn afterwards(&self, name: &str) -> String {
        let timeout = patient_seconds(10);
        let ran = self.home.run(&["exec", "--timeout", &timeout, Victim::NAME, "--", "/bin/echo", "alive"]);
        assert!(ran.took < patience(Duration::from_secs(45)), "{name}: {ran:?}");
        if ran.stdout == "alive\n" {
            return format!("answers in {} ms", ran.took.as_millis());
        }
        let record = self.home.inspect(Victim::NAME);
        if record["status"] == "running" {
            assert!(ran.stderr.starts_with("bathy: "), "{name}: no reason: {ran:?}");
            return format!("refuses: {}", ran.stderr.trim_end());
        }
        let cause = record["end_cause"].as_str().unwrap_or_default();
        assert!(!cause.is_empty(), "{name}: ended without a cause: {record}");
        format!("ended: {cause}")
    }
}

impl Seen {
    fn watch(&self, keeper: u32, victim: &Victim<'_>) {
        while !victim.is_over() {
            self.processes.fetch_max(count_below(keeper), Ordering::Relaxed);
            self.keeper_memory.fetch_max(own_memory(keeper), Ordering::Relaxed);
            thread::sleep(LOOK_PAUSE);
        }
    }
}

/// The processes that `top` started, and those that they started, with one look at the list: an attack makes many.
fn count_below(top: u32) -> u64 {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for pid in all_processes() {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // Behind the name, which may contain anything: the state, then the parent.
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(pid);
        }
    }
    let (mut found, mut next) = (BTreeSet::new(), vec![top]);
    while let Some(pid) = next.pop() {
        next.extend(children.get(&pid).into_iter().flatten().copied().filter(|child| found.insert(*child)));
    }
    u64::try_from(found.len()).unwrap()
}

/// Bytes of a process's anonymous memory, which is not the guest's.
fn own_memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// What the logs and the disk of a sandbox occupy, in bytes.
fn sizes(home: &Home, id: &str) -> (u64, u64) {
    let (mut logs, mut disk) = (0, 0);
    for entry in fs::read_dir(home.state().join("sandboxes").join(id)).unwrap().flatten() {
        let occupied = entry.metadata().unwrap().blocks() * 512;
        match entry.path().extension() {
            Some(end) if end == "ring" => logs += occupied,
            _ => disk += occupied,
        }
    }
    (logs, disk)
}

/// The processors that a process may use.
fn affinity(pid: u32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
}

fn megabytes(bytes: u64) -> f64 {
    Duration::from_micros(bytes).as_secs_f64() / 1.048_576
}
