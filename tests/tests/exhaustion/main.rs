//! R1–R4, R6, R7, R13 and U5: a sandbox that takes all it can get, beside a neighbour whose commands are timed.
//!
//! `BATHY_ATTACK_SECONDS=30` makes each attack last that long; the table is shown with `--no-capture`.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

mod disk;
mod measure;

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bathy_tests::kept::Home;
use bathy_tests::{Engine, engine, patient_seconds};
use measure::{Scene, Taken, Victim, percentile_compared};

#[test]
fn r1_u5_processes_and_threads() {
    let scene = Scene::new();
    let threads = "import threading, time\n\
        while True:\n\
        \x20try: threading.Thread(target=time.sleep, args=(999,)).start()\n\
        \x20except RuntimeError: time.sleep(.01)";
    // Where they are so many that nothing else can be started, that is the same result.
    let counts = |taken: &Taken<'_>, script: &str| {
        let ran = taken.victim.home.exec(Victim::NAME, &["sh", "-c", script]);
        match ran.code {
            Some(0) => number(&ran.stdout) > 50,
            _ => ran.stderr.contains("fork") || ran.stderr.contains("out of processes"),
        }
    };
    let many_processes = |taken: &Taken<'_>| match engine() {
        Engine::Uml => taken.processes > 100,
        // The host sees none of them.
        Engine::Kvm => taken.processes == 0 && counts(taken, "ls -d /proc/[0-9]* | wc -l"),
    };
    scene.attack("R1 U5 fork bomb", |victim| victim.job(":(){ :|:& };:; :"), many_processes);
    let many_threads =
        |taken: &Taken<'_>| counts(taken, "sed -n 's/^Threads:.//p' /proc/$(pgrep -o python3)/status");
    scene.attack("R1 thread bomb", |victim| victim.python(threads), many_threads);
    let zombies = "import os, time\n\
        while True:\n\
        \x20try:\n\
        \x20 if os.fork() == 0: os._exit(0)\n\
        \x20except OSError: time.sleep(.01)";
    let many_zombies = |taken: &Taken<'_>| counts(taken, "ps -e -o stat= | grep -c ^Z");
    scene.attack("R7 zombie children", |victim| victim.python(zombies), many_zombies);
}

#[test]
fn r2_memory() {
    let scene = Scene::new();
    let bomb = "b = []\nwhile True: b.append(bytearray(b'x' * (1 << 20)))";
    // Not that the guest kernel has killed a process for it: it can also be busy for minutes with looking for memory.
    let used_up = |taken: &Taken<'_>| {
        let stats = taken.victim.home.json(&["stats", "--json", Victim::NAME]);
        let [used, limit] = ["memory", "memory_limit"].map(|name| stats[0][name].as_u64().unwrap());
        used > limit / 10 * 9
    };
    scene.attack(
        "R2 memory bomb",
        |victim| victim.job(&format!("while :; do python3 -c \"{bomb}\"; done")),
        used_up,
    );
    let read_much = "head -c 90M /dev/zero > /tmp/big; \
        while :; do cat /tmp/big /usr/bin/* /usr/lib/x86_64-linux-gnu/*.so* > /dev/null; done";
    let cached = |taken: &Taken<'_>| {
        let count = "sed -n 's/^Cached: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
        number(&taken.victim.home.sh(Victim::NAME, count)) > 64 << 10
    };
    scene.attack("R2 page-cache bomb", |victim| victim.job(read_much), cached);
}

#[test]
fn r3_disk() {
    let scene = Scene::new();
    let fill = "head -c 4M /dev/urandom > /tmp/seed; \
        while :; do while cat /tmp/seed; do :; done > /tmp/fill; touch /tmp/was-full; sync; done";
    // It begins anew when it is full, so its size at the end means nothing.
    let full = |taken: &Taken<'_>| {
        taken.victim.home.sh(Victim::NAME, "ls /tmp").lines().any(|name| name == "was-full")
    };
    scene.attack("R3 disk fill", |victim| victim.job(fill), full);
    let inodes = "import os, itertools, time\n\
        os.mkdir('/tmp/many'); os.chdir('/tmp/many')\n\
        for n in itertools.count():\n\
        \x20try: open(str(n), 'w').close()\n\
        \x20except OSError: time.sleep(.01)";
    let many_files = |taken: &Taken<'_>| {
        number(&taken.victim.home.sh(Victim::NAME, "df --output=iused /tmp | tail -n 1")) > 1000
    };
    scene.attack("R3 inode fill", |victim| victim.python(inodes), many_files);
    let storm = "import os\n\
        f = os.open('/tmp/storm', os.O_RDWR | os.O_CREAT)\n\
        while True: os.pwrite(f, os.urandom(4096), 0); os.fsync(f)";
    let written = |taken: &Taken<'_>| {
        let stats = taken.victim.home.json(&["stats", "--json", Victim::NAME]);
        stats[0]["disk_written"].as_u64().unwrap() > 1 << 20
    };
    scene.attack("R3 fsync storm", |victim| victim.python(storm), written);
}

#[test]
fn r4_floods() {
    let scene = Scene::new();
    let full_log = |taken: &Taken<'_>| taken.logs > 200 << 10;
    scene.attack("R4 yes as a job", |victim| victim.job("exec yes"), full_log);
    scene.attack("R4 yes, slow reader", read_slowly, |_| true);
    let line = "a line that is long enough to be worth something";
    scene.attack(
        "R4 console flood",
        |victim| victim.root_job(&format!("exec yes '{line}' > /dev/console")),
        full_log,
    );
    let kernel = format!(
        "echo 8 > /proc/sys/kernel/printk; echo on > /proc/sys/kernel/printk_devkmsg; \
        while :; do echo '<0>{line}'; done > /dev/kmsg"
    );
    scene.attack("R4 kernel log flood", |victim| victim.root_job(&kernel), full_log);
}

/// A client that reads a little of an endless output now and then.
fn read_slowly(victim: &Victim<'_>) {
    let mut client = victim.home.command(&["exec", Victim::NAME, "--", "yes"]).spawn().unwrap();
    let mut output = client.stdout.take().unwrap();
    let mut buffer = [0; 1024];
    while !victim.is_over() {
        output.read_exact(&mut buffer).unwrap();
        assert!(buffer.chunks(2).all(|chunk| chunk == b"y\n"));
        thread::sleep(Duration::from_millis(50));
    }
    client.kill().unwrap();
    client.wait().unwrap();
}

#[test]
fn r6_processor() {
    let scene = Scene::new();
    let busy = |taken: &Taken<'_>| {
        let stats = taken.victim.home.json(&["stats", "--json", Victim::NAME]);
        Duration::from_nanos(stats[0]["cpu_ns"].as_u64().unwrap()) > Duration::from_secs(1)
    };
    let spin = |victim: &Victim<'_>| (0..8).for_each(|_| victim.job("while :; do :; done"));
    scene.attack("R6 spin", spin, busy);
    let timers = "import signal\n\
        signal.signal(signal.SIGALRM, lambda *_: None)\n\
        signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)\n\
        while True: signal.pause()";
    scene.attack("R6 timer storm", |victim| (0..4).for_each(|_| victim.python(timers)), busy);
    scene.attack("R6 system call storm", |victim| victim.job("exec dd if=/dev/zero of=/dev/null bs=1"), busy);
}

#[test]
fn r7_commands() {
    let scene = Scene::new();
    // Clients are processes of the host, which share its processors with the neighbour's: more of them than processors make
    // everything slower by their number, whatever they start.
    let clients = 0..thread::available_parallelism().map_or(1, usize::from).min(4);
    let flood = |victim: &Victim<'_>| {
        let begin_and_end = || {
            while !victim.is_over() {
                victim.home.exec(Victim::NAME, &["true"]);
            }
        };
        thread::scope(|scope| clients.clone().for_each(|_| drop(scope.spawn(begin_and_end))));
    };
    scene.attack("R7 exec flood", flood, |_| true);

    // As many as there may be inside, and then as many as are let in.
    let inside = "import os, time\n\
        while True:\n\
        \x20try: os.openpty()\n\
        \x20except OSError: time.sleep(.01)";
    let terminals = |victim: &Victim<'_>| {
        (0..4).for_each(|_| victim.python(inside));
        let sleep = ["exec", "-d", "-t", Victim::NAME, "--", "sleep", "999"];
        for _ in (0..300).take_while(|_| !victim.is_over()) {
            let ran = victim.home.run(&sleep);
            let message = "bathy: ";
            assert!(ran.code == Some(0) || ran.stderr.starts_with(message), "{ran:?}");
        }
    };
    let many = |taken: &Taken<'_>| number(&taken.victim.home.sh(Victim::NAME, "ls /dev/pts | wc -l")) > 100;
    scene.attack("R7 terminals", terminals, |taken| taken.processes > 30 || many(taken));

    let huge = "x".repeat(100_000);
    let arguments = [&["exec", Victim::NAME, "--", "true"], [huge.as_str(); 10].as_slice()].concat();
    let inside = "x=$(head -c 100000 /dev/zero | tr '\\0' x); \
        while :; do y=$x /bin/true $x{0,1,2,3,4,5,6,7,8,9}; done";
    let huge = |victim: &Victim<'_>| {
        victim.job(inside);
        while !victim.is_over() {
            let ran = victim.home.run(&arguments);
            assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        }
    };
    scene.attack("R7 huge arguments", huge, |_| true);
}

fn number(text: &str) -> u64 {
    text.trim().parse().unwrap_or_else(|_| unreachable!("not a number: {text:?}"))
}

/// The measure itself: a neighbour that does suffer is noticed. It stands still for three quarters of the time, and each time for
/// much longer than its commands take, however busy the machine is.
#[test]
fn a_neighbour_that_suffers_is_noticed() {
    let scene = Scene::new();
    let before = scene.calm();
    let still = Duration::from_millis(150).max(before.percentile(99) * 5);
    let guest = scene.home.guest("neighbour");
    let over = AtomicBool::new(false);
    let during = thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                bathy_tests::kept::signal(guest, rustix::process::Signal::STOP);
                thread::sleep(still);
                bathy_tests::kept::signal(guest, rustix::process::Signal::CONT);
                thread::sleep(still / 3);
            }
        });
        let during = scene.latencies(Duration::from_secs(2));
        over.store(true, Ordering::Relaxed);
        during
    });
    println!("suffering: before {before}, during {during}");
    assert!(
        during.percentile(percentile_compared()) > before.percentile(percentile_compared()) * 3,
        "before {before}, during {during}"
    );
}

#[test]
fn a_quota_of_processor_time_is_held() {
    let home = Home::new();
    // It is held while the guest boots as well.
    home.started("slow", &["--cpu-quota", "0.2", "--ready-timeout", &patient_seconds(30)]);
    home.started("free", &[]);
    let how = home.inspect("slow")["enforcement"]["cpu"].as_str().unwrap().to_owned();
    println!("the quota is held by: {how}");
    let used = |name: &str| {
        home.job(name, "while :; do :; done");
        let look = || {
            let stats = home.json(&["stats", "--json", name])[0].take();
            (stats["cpu_ns"].as_f64().unwrap() / 1e9, stats["uptime"].as_f64().unwrap())
        };
        let (cpu, time) = look();
        thread::sleep(Duration::from_secs(3));
        let (cpu_later, time_later) = look();
        home.ok(&["kill", name]);
        (cpu_later - cpu) / (time_later - time)
    };
    let (slow, free) = (used("slow"), used("free"));
    println!("with a quota of 0.2: {slow:.2} processors, without: {free:.2}");
    assert!(free > 0.4, "a spin uses only {free}: nothing is shown");
    assert!(home.inspect("free")["enforcement"]["cpu"].as_str().unwrap().starts_with("none"));
    if how.starts_with("cgroup") {
        assert!(slow <= 0.35, "{slow}");
        assert!(slow > 0.02, "{slow}");
    } else {
        // No control group can be had: then it has to say by what else, or that by nothing.
        assert!(how.starts_with("none: ") || how.contains("priority"), "{how}");
    }
}
