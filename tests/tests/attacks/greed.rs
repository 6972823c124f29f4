//! U6 to U9 and J9: what no limit of a single process holds. As root, with the control groups that this machine has, and as an
//! ordinary user, who has none.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use bathy_tests::{Ran, patience};
use tempfile::TempDir;

use crate::run::{Run, probe, probe_as, run_command, set_up};
use crate::user::{OrdinaryUser, ordinary_user};

/// What a guest program calls the host's kernel through, and for what; see the files.
const THROUGH_THE_STUB: &str = concat!(include_str!("gate.py"), include_str!("stub.py"));
const FAR_PAGES: &str = concat!(include_str!("gate.py"), include_str!("far.py"));
/// How many kilobytes of page tables the host may have for a sandbox at any time; far pages take four times as many.
const MOST_TABLES: u64 = 1 << 20;
/// 200 processes that have read the memory of their parent: the host has page tables of it for each of them.
const MANY_PROCESSES: &str = "import os, sys\n\
    memory = bytearray(b'x') * (16 << 20)\n\
    print('begin', flush=True)\n\
    ended, ends = os.pipe()\n\
    for _ in range(200):\n\
    \x20if os.fork() == 0:\n\
    \x20 memory.count(b'y')\n\
    \x20 os.close(ends)\n\
    \x20 sys.stdin.read()\n\
    \x20 os._exit(0)\n\
    os.close(ends)\n\
    os.read(ended, 1)\n\
    print('all have read', flush=True)\n\
    sys.stdin.read()\n";
/// What it prints at its end.
const LAST_LINE: &str = "the guest goes on";
/// How many kilobytes of the host's memory a sandbox may have beyond its guest's.
const MOST_PRIVATE: u64 = 64 << 10;
/// How many different attacks it has.
const ATTACKS: usize = 10;
/// The name of a process that appears when a role has taken all it can.
const DONE: &str = "all-taken";
/// Users of their own for tests that use up what a user has: other tests run at the same time.
const USERS: [u32; 3] = [64_101, 64_102, 64_103];
/// How much longer a neighbour's commands may take.
const FACTOR: u32 = 3;
/// The machine has other work too: what does not hold fails in every round.
const ROUNDS: u32 = 3;

/// The address of the page that the guest kernel keeps in every program of the guest: the one executable page of guest memory that
/// lies above everything else.
fn stub_page(run: &mut Run) -> String {
    let family = run.when_printed("up");
    let maps = family.stubs.first().expect("a program runs").file("maps");
    let shared =
        maps.lines().filter(|line| line.contains(" r-xs ")).filter_map(|line| line.split('-').next());
    let highest = shared.max_by_key(|address| u64::from_str_radix(address, 16).expect("an address"));
    highest.unwrap_or_else(|| panic!("no stub in {maps}")).to_owned()
}

fn assert_nothing_of_the_hosts_memory(command: impl Fn(&[&str]) -> Command) {
    let mut scout = Run::of(&mut command(&["--", "sh", "-c", "echo up; sleep 60"]));
    let page = stub_page(&mut scout);
    drop(scout);
    let words = ["--memory", "128M", "--", "python3", "-c", THROUGH_THE_STUB, &page];
    let mut run = Run::with_input(&mut command(&words));
    run.when_printed("the gate: 0");
    let (mut most, deadline) = (0, Instant::now() + patience(Duration::from_secs(60)));
    while !run.printed().contains(LAST_LINE) && Instant::now() < deadline {
        most = most.max(run.look().private_memory());
    }
    // Whatever it took it still has.
    most = most.max(run.look().private_memory());
    println!("{most} kB beyond the guest's memory at most");
    assert!((1..MOST_PRIVATE).contains(&most), "{most} kB beyond the guest's memory");
    run.end_input();
    let ran = run.finish(patience(Duration::from_secs(60)));
    let refused = ran.stdout.lines().filter(|line| line.starts_with("refused: ")).count();
    assert_eq!(refused, ATTACKS, "{}\n{}", ran.stdout, ran.stderr);
    // 64 MiB each time, of twice the memory and 256 MiB.
    let mapped = ran.stdout.lines().find_map(|line| line.strip_prefix("mapped: ")?.parse::<u32>().ok());
    assert!(matches!(mapped, Some(1..=8)), "{}\n{}", ran.stdout, ran.stderr);
    assert!(ran.stdout.ends_with(&format!("{LAST_LINE}\n")), "{}", ran.stdout);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
}

#[test]
fn u6_guest_programs_get_no_memory_of_the_hosts() {
    set_up();
    assert_nothing_of_the_hosts_memory(run_command);
}

#[test]
fn u6_guest_programs_of_an_ordinary_user_get_no_memory_of_the_hosts() {
    let user = ordinary_user();
    assert_nothing_of_the_hosts_memory(|arguments| user.run_command(arguments));
}

/// Looks at the sandbox until it has printed `word` or ended. Returns the most kilobytes of page tables.
fn most_page_tables(run: &mut Run, word: &str) -> u64 {
    let (mut most, deadline) = (0, Instant::now() + patience(Duration::from_secs(90)));
    while !run.printed().contains(word) {
        assert!(Instant::now() < deadline, "it has neither printed {word:?} nor ended");
        let family = run.look();
        most = most.max(family.page_tables());
        if family.keeper.is_none() {
            return most;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    most.max(run.look().page_tables())
}

/// An ordinary user has no memory cgroup: the supervisor holds the guest to a limit.
#[test]
fn u6_page_tables_of_far_pages_end_the_sandbox_of_an_ordinary_user() {
    let user = ordinary_user();
    let mut scout = Run::of(&mut user.run_command(&["--", "sh", "-c", "echo up; sleep 60"]));
    let page = stub_page(&mut scout);
    drop(scout);
    let words = ["--", "python3", "-c", FAR_PAGES, &page];
    let mut run = Run::with_input(&mut user.run_command(&words));
    run.when_printed("begin");
    let most = most_page_tables(&mut run, "all is mapped");
    println!("{} MiB of page tables at most", most >> 10);
    run.end_input();
    let ran = run.finish(patience(Duration::from_secs(60)));
    assert!(most < MOST_TABLES, "{most} kB of page tables\n{}", ran.stdout);
    assert!(most > 64 << 10, "the attack took only {most} kB");
    assert_eq!(ran.code, Some(125), "{}\n{}", ran.stdout, ran.stderr);
    let cause = "The sandbox was ended: its guest made the host use ";
    assert!(ran.stderr.contains(cause) && ran.stderr.contains("the limit is 324 MiB"), "{}", ran.stderr);
    let events = user.bathy(&["events", "--json"]);
    assert!(events.stdout.contains("\"host memory\""), "{}\n{}", events.stdout, events.stderr);
}

#[test]
fn u6_page_tables_of_many_processes_are_no_reason_to_end_a_sandbox() {
    let user = ordinary_user();
    let mut run = Run::with_input(&mut user.run_command(&["--", "python3", "-c", MANY_PROCESSES]));
    run.when_printed("begin");
    let most = most_page_tables(&mut run, "all have read");
    println!("{} MiB of page tables at most", most >> 10);
    std::thread::sleep(bathy_tests::pace(Duration::from_secs(2)));
    run.end_input();
    let ran = run.finish(patience(Duration::from_secs(60)));
    assert_eq!((ran.code, ran.stdout.trim()), (Some(0), "begin\nall have read"), "{}", ran.stderr);
}

/// The same for a persistent sandbox, which its monitor ends.
#[test]
fn u6_page_tables_of_far_pages_end_a_persistent_sandbox() {
    let user = ordinary_user();
    let mut scout = Run::of(&mut user.run_command(&["--", "sh", "-c", "echo up; sleep 60"]));
    let page = stub_page(&mut scout);
    drop(scout);
    assert_ok("create", &user.bathy(&["create", "--name", "far-pages"]));
    assert_ok("start", &user.bathy(&["start", "far-pages"]));
    let ran = user.bathy(&["exec", "far-pages", "--", "python3", "-c", FAR_PAGES, &page]);
    let deadline = Instant::now() + patience(Duration::from_secs(30));
    let cause = "its guest made the host use ";
    let mut found = user.bathy(&["inspect", "far-pages"]);
    let is_over = ran.stdout.contains("all is mapped");
    while !is_over && !found.stdout.contains(cause) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
        found = user.bathy(&["inspect", "far-pages"]);
    }
    drop(user.bathy(&["rm", "-f", "far-pages"]));
    assert!(!is_over, "{}", ran.stdout);
    assert!(found.stdout.contains(cause), "{}\n{}", found.stdout, ran.stderr);
}

/// How many descriptors the guest kernel can have while guest programs run.
fn descriptors_of_a_running_kernel() -> u64 {
    let mut run = Run::start(&["--", "sh", "-c", "echo up; sleep 60"]);
    let guest = run.when_printed("up").guest.expect("the guest runs");
    let limits = guest.file("limits");
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).expect("a limit");
    line.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number")
}

/// A sandbox of this user whose kernel plays a role, once it has taken all it can.
fn greedy(user: &OrdinaryUser, role: &str) -> Run {
    let program = probe_as(role);
    let kernel = user.path(role);
    fs::copy(&program, &kernel).expect("the user's folder");
    fs::set_permissions(&kernel, fs::metadata(&program).expect("our own file").permissions())
        .expect("a file");
    let kernel = kernel.to_str().expect("temporary paths are text");
    let mut run = user.start(&["--kernel", kernel, "--ready-timeout", "300", "--", "true"]);
    let deadline = Instant::now() + patience(Duration::from_secs(60));
    let is_done = |run: &mut Run| {
        let family = run.look();
        let comm = |number: u32| fs::read_to_string(format!("/proc/{number}/comm")).unwrap_or_default();
        family.stubs.iter().chain(&family.guest).any(|process| comm(process.number).trim() == DONE)
    };
    while !is_done(&mut run) {
        assert!(Instant::now() < deadline, "{role}: it did not take what it was meant to take");
        std::thread::sleep(Duration::from_millis(50));
    }
    run
}

/// What a program of this user does on the host, with the usual limit of descriptors.
fn on_host(user: &OrdinaryUser, python: &str) -> Ran {
    let limits = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))\n";
    let mut command = Command::new("python3");
    command.arg("-c").arg(format!("{limits}{python}"));
    Run::of(user.becomes(&mut command)).finish(patience(Duration::from_secs(30)))
}

fn assert_ok(what: &str, ran: &Ran) {
    assert_eq!(ran.code, Some(0), "{what}: {}{}", ran.stdout, ran.stderr);
}

/// A persistent sandbox of the attacker's own user.
struct Neighbour<'a>(&'a OrdinaryUser);

impl<'a> Neighbour<'a> {
    const NAME: &'static str = "neighbour";

    fn of(user: &'a OrdinaryUser) -> Self {
        let neighbour = Self(user);
        assert_ok("create", &user.bathy(&["create", "--name", Self::NAME]));
        assert_ok("start", &user.bathy(&["start", Self::NAME]));
        neighbour
    }

    fn exec(&self) -> Ran {
        self.0.bathy(&["exec", Self::NAME, "--", "/bin/true"])
    }

    /// How long the slowest of 60 commands takes: with so few that is the 99th percentile.
    fn slowest_exec(&self) -> Duration {
        let timed = |_| {
            let begin = Instant::now();
            assert_ok("exec", &self.exec());
            begin.elapsed()
        };
        (0..60).map(timed).max().expect("sixty commands")
    }

    /// `beside` runs while a sandbox has taken all that the role can take.
    fn hardly_waits_beside(&self, role: &str, beside: impl Fn()) {
        let holds = |round: u32| {
            let before = self.slowest_exec();
            let attacker = greedy(self.0, role);
            let during = self.slowest_exec();
            beside();
            drop(attacker);
            println!("round {round}: {before:?} before, {during:?} beside {role}");
            during <= before * FACTOR
        };
        assert!((0..ROUNDS).any(holds), "the neighbour's commands take more than {FACTOR} times as long");
    }
}

impl Drop for Neighbour<'_> {
    fn drop(&mut self) {
        drop(self.0.bathy(&["rm", "-f", Self::NAME]));
    }
}

const WATCH: &str = "import os, select\n\
    e = select.epoll()\n\
    for n in range(900): e.register(os.eventfd(0))\n";

const PASS_A_DESCRIPTOR: &str = "import socket\n\
    a, b = socket.socketpair()\n\
    socket.send_fds(a, [b'x'], [a.fileno()])\n\
    assert len(socket.recv_fds(b, 1, 1)[1]) == 1\n";

/// Descriptors in flight on sockets that only they keep open are counted until the host kernel's collector has found them, some
/// time after the end of their process.
fn until_collected(user: &OrdinaryUser) {
    let deadline = Instant::now() + patience(Duration::from_secs(60));
    while on_host(user, PASS_A_DESCRIPTOR).code != Some(0) {
        assert!(Instant::now() < deadline, "descriptors in flight outlive their process");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn u7_descriptors_in_flight_hurt_no_neighbour_and_no_program_of_the_user() {
    let user = OrdinaryUser::with_number(USERS[0]);
    let neighbour = Neighbour::of(&user);
    neighbour.hardly_waits_beside(&format!("in-flight-{}", descriptors_of_a_running_kernel()), || {
        assert_ok("run", &user.bathy(&["run", "--", "true"]));
        assert_ok("a program that passes a descriptor", &on_host(&user, PASS_A_DESCRIPTOR));
    });

    // With the limit that a kernel has while it starts there are enough to be noticed: clients are refused, nothing ends.
    let attacker = greedy(&user, "in-flight-1024");
    let refused = on_host(&user, PASS_A_DESCRIPTOR);
    assert!(refused.stderr.contains("Too many references"), "{}", refused.stderr);
    let ran = neighbour.exec();
    assert!(ran.code == Some(125) && ran.stderr.contains("in flight"), "{ran:?}");
    drop(attacker);
    until_collected(&user);
    assert_ok("exec afterwards", &neighbour.exec());
}

#[test]
fn u9_the_tables_of_the_host_stay_usable() {
    let user = OrdinaryUser::with_number(USERS[2]);
    let open_files = || {
        let text = fs::read_to_string("/proc/sys/fs/file-nr").expect("Linux tells");
        let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        (numbers[0], numbers[2])
    };
    let unreclaimable = || {
        let text = fs::read_to_string("/proc/meminfo").expect("Linux tells");
        let line = text.lines().find_map(|line| line.strip_prefix("SUnreclaim:")).expect("a line");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") >> 10
    };
    let neighbour = Neighbour::of(&user);
    let (files, memory) = (open_files().0, unreclaimable());
    let role = format!("tables-{}", descriptors_of_a_running_kernel());
    neighbour.hardly_waits_beside(&role, || {
        let (files, memory) = (open_files().0.saturating_sub(files), unreclaimable().saturating_sub(memory));
        let most = open_files().1;
        println!("{files} of {most} open files, {memory} MiB of the kernel's memory");
        assert!(files > 10_000, "the attack took only {files} files");
        assert!(files < 70_000.min(most / 4), "{files} of {most} files");
        assert!(memory < 640, "{memory} MiB of the kernel's memory");
        assert_ok("a program with 900 watches", &on_host(&user, WATCH));
        assert_ok("run", &user.bathy(&["run", "--", "true"]));
    });
}

/// Beside a sandbox of this user whose kernel was taken over and spins in 400 processes.
fn assert_a_neighbour_keeps_its_share(user: &OrdinaryUser) {
    // On one processor, or there would be no competition for it.
    let user = user.on_one_processor();
    Neighbour::of(&user).hardly_waits_beside("sessions-400", || {});
}

#[test]
fn u8_four_hundred_spinning_processes_leave_a_neighbour_its_share() {
    assert_a_neighbour_keeps_its_share(&OrdinaryUser::with_number(USERS[1]));
}

/// Root can have control groups: there nothing depends on sessions.
#[test]
fn u8_four_hundred_spinning_processes_leave_a_neighbour_of_root_its_share() {
    assert_a_neighbour_keeps_its_share(&OrdinaryUser::with_number(0));
}

/// The host's handler of core dumps, for as long as this lives: it writes down which programs crashed.
struct CrashHandler {
    folder: TempDir,
    before: String,
}

const CORE_PATTERN: &str = "/proc/sys/kernel/core_pattern";

impl CrashHandler {
    fn install() -> Self {
        let folder = tempfile::tempdir().expect("there is room in /tmp");
        let handler = folder.path().join("handler");
        let script =
            format!("#!/bin/sh\ncat > /dev/null\necho \"$1\" >> {}/crashed\n", folder.path().display());
        fs::write(&handler, script).expect("our own folder");
        fs::set_permissions(&handler, fs::Permissions::from_mode(0o755)).expect("our own file");
        let before = fs::read_to_string(CORE_PATTERN).expect("Linux tells");
        let installed = Self { folder, before };
        fs::write(CORE_PATTERN, format!("|{} %e", handler.display())).expect("this test needs root");
        installed
    }

    fn crashed(&self, name: &str) -> usize {
        let text = fs::read_to_string(self.folder.path().join("crashed")).unwrap_or_default();
        text.lines().filter(|line| *line == name).count()
    }

    /// Crashes outside of any jail, and waits until the handler has seen it.
    fn crash_outside(&self) {
        let before = self.crashed("crash-outside");
        let ran = Run::of(Command::new(probe()).arg("crash")).finish(patience(Duration::from_secs(10)));
        assert_eq!(ran.code, None, "it did not crash");
        let deadline = Instant::now() + patience(Duration::from_secs(10));
        while self.crashed("crash-outside") == before {
            assert!(Instant::now() < deadline, "the handler was not started: the test shows nothing");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for CrashHandler {
    fn drop(&mut self) {
        let _ = fs::write(CORE_PATTERN, self.before.trim_end());
    }
}

#[test]
fn j9_a_crash_in_the_jail_starts_no_program_of_the_host() {
    let handler = CrashHandler::install();
    handler.crash_outside();
    let (run, _program) = Run::role("crashes", "30");
    let ran = run.finish(patience(Duration::from_secs(30)));
    assert!(ran.stderr.contains("(status 139)"), "it did not crash: {}", ran.stderr);
    // Handlers are started one after another: this one's comes after.
    handler.crash_outside();
    assert_eq!(handler.crashed("crash-in-jail"), 0);
}
