//! R13: a sandbox that writes and syncs without end, beside a neighbour whose fsyncs are timed.
//!
//! How much a neighbour suffers without the limits depends on the disk below; `BATHY_R13_UNLIMITED=1` measures that and
//! decides nothing by it. That the limits are held is tested whatever the disk is.

use std::thread;
use std::time::{Duration, Instant};

use bathy_tests::kept::{Home, until};
use bathy_tests::{pace, patience, promptly};

use crate::measure::{FACTOR, Latencies, ROUNDS, attack_time, percentile_compared};

const MIB: u64 = 1 << 20;
const NEIGHBOUR: &str = "neighbour";
const ATTACKER: &str = "attacker";
/// More than any disk does.
const UNLIMITED: [&str; 4] = ["--disk-write-bandwidth", "1T", "--disk-flushes", "1000000"];

/// Writes a page and syncs it, for as many seconds as in the argument; prints how long each took, in nanoseconds.
const TIMED_FSYNCS: &str = "import os, sys, time
f = os.open('/tmp/synced', os.O_RDWR | os.O_CREAT)
end = time.monotonic() + float(sys.argv[1])
n = 0
while time.monotonic() < end or n < 100:
    begin = time.monotonic_ns()
    os.pwrite(f, os.urandom(4096), n % 1024 * 4096)
    os.fsync(f)
    print(time.monotonic_ns() - begin)
    n += 1";

/// Writes and syncs as fast as it can, in pieces of as many bytes as in the first argument.
const STORM: &str = "import os, sys
size = int(sys.argv[1])
f = os.open('/tmp/storm', os.O_RDWR | os.O_CREAT)
data = os.urandom(size)
at = 0
while True:
    os.pwrite(f, data, at)
    os.fsync(f)
    at = (at + size) % (256 << 20)";

struct Pair {
    home: Home,
}

impl Pair {
    /// A neighbour that runs, and an attacker, on different processors where there are two: it is the disk that they share.
    fn new(attackers: &[&str]) -> Self {
        let home = Home::new();
        home.started(NEIGHBOUR, &["--memory", "256M"]);
        home.started(ATTACKER, &[&["--memory", "256M", "--disk", "1G"], attackers].concat());
        Self { home }
    }

    fn fsyncs(&self, time: Duration) -> Latencies {
        let seconds = time.as_secs_f64().to_string();
        let ran = self.home.exec(NEIGHBOUR, &["python3", "-c", TIMED_FSYNCS, &seconds]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        Latencies::new(ran.stdout.lines().map(|line| Duration::from_nanos(line.parse().unwrap())).collect())
    }

    fn storm(&self, size: u64) {
        self.home.ok(&["exec", "-d", ATTACKER, "--", "python3", "-c", STORM, &size.to_string()]);
    }

    fn written(&self) -> u64 {
        self.home.json(&["stats", "--json", ATTACKER])[0]["disk_written"].as_u64().unwrap()
    }
}

/// Times fsyncs and commands of a neighbour before and during a storm; returns whether both were quick enough.
fn storm_round(name: &str, size: u64, options: &[&str]) -> bool {
    let pair = Pair::new(options);
    let commands = |time| Latencies::of_commands(&pair.home, NEIGHBOUR, time);
    let (fsync_before, exec_before) = (pair.fsyncs(Duration::from_secs(3)), commands(Duration::from_secs(2)));
    pair.storm(size);
    // What counts is what goes on without end, and not the burst that everybody may have. A storm of small pieces has
    // used its flushes up by then.
    let begin = Instant::now();
    until("the burst is used up", 60, || pair.written() > 600 * MIB || begin.elapsed().as_secs() >= 8);
    let (from, began) = (pair.written(), Instant::now());
    let (fsync, exec) = (pair.fsyncs(attack_time()), commands(attack_time()));
    let rate = (pair.written() - from) as f64 / began.elapsed().as_secs_f64() / 1e6;
    println!(
        "{name:22} | fsync {fsync_before} | {fsync} | exec {exec_before} | {exec} | it writes {rate:.1} MB/s"
    );
    let quick = |before: &Latencies, during: &Latencies| {
        during.percentile(percentile_compared()) <= before.percentile(percentile_compared()) * FACTOR
    };
    quick(&fsync_before, &fsync) && quick(&exec_before, &exec)
}

#[test]
fn r13_a_neighbours_fsyncs_and_commands_during_storms() {
    println!("{:22} |       before p50 p95 p99 n | during | before | during (milliseconds)", "storm");
    for (name, size) in [("R13 16 MiB and fsync", 16 * MIB), ("R13 4 KiB and fsync", 4096)] {
        if std::env::var_os("BATHY_R13_UNLIMITED").is_some() {
            storm_round(&format!("{name}, free"), size, &UNLIMITED);
        }
        let quick = (0..ROUNDS).any(|_| storm_round(name, size, &[]));
        assert!(
            quick,
            "{name}: the neighbour takes more than {FACTOR} times as long (percentile {})",
            percentile_compared()
        );
    }
}

/// How much an attacker writes in a second, and how often it syncs, when its burst is used up.
fn rates(options: &[&str]) -> (f64, f64) {
    let home = Home::new();
    home.started(ATTACKER, &[&["--memory", "256M", "--disk", "1G"], options].concat());
    let count = "import os, sys, time
f = os.open('/tmp/storm', os.O_RDWR | os.O_CREAT)
data = os.urandom(int(sys.argv[1]))
def storm(seconds):
    begin, n = time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        os.pwrite(f, data, n % 64 * len(data))
        os.fsync(f)
        n += 1
    return n / (time.monotonic() - begin)
storm(6)
print(storm(5))";
    let per_second = |size: u64| -> f64 {
        let ran = home.exec(ATTACKER, &["python3", "-c", count, &size.to_string()]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.stdout.trim().parse().unwrap()
    };
    let large = per_second(2 * MIB);
    (large * 2.0, per_second(4096))
}

#[test]
fn r13_rates_are_held_and_only_by_the_limits() {
    // A file system flushes at least once for each fsync, ext4 twice; six seconds use up what was saved for four.
    let (written, fsyncs) = rates(&["--disk-write-bandwidth", "6M", "--disk-flushes", "20"]);
    println!("limited to 6 MiB and 20 flushes in a second: {written:.1} MiB, {fsyncs:.1} fsyncs");
    let (free_written, free_fsyncs) = rates(&UNLIMITED);
    println!("without limits: {free_written:.1} MiB, {free_fsyncs:.1} fsyncs");
    assert!(written <= 6.6 && fsyncs <= 22.0, "{written} {fsyncs}");
    assert!(written > 1.0 && fsyncs > 3.0, "it stands still: {written} {fsyncs}");
    let shown = free_written > written * 1.5 && free_fsyncs > fsyncs * 1.5;
    assert!(shown, "nothing is shown: {free_written} {free_fsyncs}");
}

#[test]
fn r13_a_volatile_disk_has_the_same_bandwidth() {
    let home = Home::new();
    let script = "import os, time
f = os.open('/tmp/storm', os.O_RDWR | os.O_CREAT)
data = os.urandom(4 << 20)
def storm(megabytes):
    begin = time.monotonic()
    for n in range(megabytes // 4):
        os.pwrite(f, data, n * len(data))
        os.fsync(f)
    return time.monotonic() - begin
storm(64)
print(storm(32))";
    let seconds = |options: &[&str]| -> f64 {
        let run = [&["run"], options, &["--", "python3", "-c", script]].concat();
        home.ok(&run).trim().parse().unwrap()
    };
    let limited = seconds(&["--disk-write-bandwidth", "8M"]);
    let free = seconds(&UNLIMITED);
    println!(
        "32 MiB of an ephemeral sandbox: {limited:.1} s at 8 MiB in a second, {free:.2} s without a limit"
    );
    assert!(limited > 3.0, "{limited}");
    assert!(free < limited / 2.0, "nothing is shown: {free}");
}

#[test]
fn r13_a_sandbox_that_waits_for_its_disk_answers_pauses_and_stops() {
    let home = Home::new();
    let slow = ["--memory", "1G", "--disk-write-bandwidth", "1M", "--disk-flushes", "10"];
    home.started(ATTACKER, &slow);
    home.ok(&["exec", "-d", ATTACKER, "--", "python3", "-c", STORM, "4194304"]);
    let written = || home.json(&["stats", "--json", ATTACKER])[0]["disk_written"].as_u64().unwrap();
    until("the burst is used up", 60, || written() > 16 * MIB);

    // Its keeper has one loop for everything.
    for _ in 0..5 {
        let ran = home.exec(ATTACKER, &["/bin/true"]);
        assert!(ran.code == Some(0) && ran.took < promptly(Duration::from_secs(2)), "{ran:?}");
    }
    let ticks = bathy_tests::kept::cpu_ticks(home.keeper(ATTACKER));
    thread::sleep(pace(Duration::from_secs(2)));
    let used = bathy_tests::kept::cpu_ticks(home.keeper(ATTACKER)) - ticks;
    println!("ticks of the keeper in two seconds of waiting: {used}");
    assert!(used < 40, "it does not wait but spin: {used} ticks");

    home.ok(&["pause", ATTACKER]);
    let before = written();
    home.ok(&["resume", ATTACKER]);
    until("it writes again", 60, || written() > before + MIB);
    home.ok(&["exec", ATTACKER, "--", "pkill", "python3"]);

    // What is not written yet when it stops would take a minute at that rate, and there is half of one. With less memory
    // the guest itself would hold the writer back.
    home.sh(ATTACKER, "head -c 60M /dev/urandom > /tmp/kept; sha256sum < /tmp/kept > /tmp/sum");
    let began = Instant::now();
    home.ok(&["stop", "-t", "2", ATTACKER]);
    println!("stopped in {:.1} s", began.elapsed().as_secs_f64());
    assert!(began.elapsed() < patience(Duration::from_secs(25)), "{:?}", began.elapsed());
    let cause = home.inspect(ATTACKER)["end_cause"].to_string();
    assert!(!cause.contains("did not go down"), "{cause}");
    home.ok(&["start", ATTACKER]);
    assert_eq!(home.sh(ATTACKER, "sha256sum < /tmp/kept | cmp - /tmp/sum && echo same"), "same\n");
}
