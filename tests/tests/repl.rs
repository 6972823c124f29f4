//! Sandboxes that pause when they are not used, and REPLs, which are made of them: what is paused costs nothing, and what
//! was in it is there again.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use bathy_tests::kept::{Home, cpu_ticks, is_alive, signal, until};
use bathy_tests::{Engine, OnDrop, Ran, engine, finish, pace, patient_seconds};
use rustix::process::Signal;
use serde_json::Value;

/// Paused as soon as no client has been connected for a second.
const PAUSES: [&str; 2] = ["--pause-idle", "1s"];

#[track_caller]
fn until_paused(home: &Home, name: &str) {
    until("no client uses it, so it is paused", 30, || home.status(name) == "paused");
}

/// Processor time and the number of times that they gave up a processor of their own accord.
fn used(processes: &BTreeSet<u32>) -> (u64, u64) {
    let waits = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
        line.trim().parse::<u64>().unwrap()
    };
    (processes.iter().map(|pid| cpu_ticks(*pid)).sum(), processes.iter().map(waits).sum())
}

fn events(home: &Home, name: &str, wanted: &[&str]) -> Vec<String> {
    let events = home.events(name);
    let kinds = events.iter().map(|event| event["event"].as_str().unwrap().to_owned());
    kinds.filter(|kind| wanted.contains(&kind.as_str())).collect()
}

const PAUSE_EVENTS: [&str; 2] = ["sandbox_paused", "sandbox_resumed"];

#[test]
fn what_nobody_uses_is_paused_and_the_next_command_resumes_it() {
    let home = Home::new();
    home.started("lazy", &PAUSES);
    home.sh("lazy", "echo kept > /tmp/state");
    let job = home.job("lazy", "n=0; while :; do n=$((n+1)); echo $n > /tmp/n; done");
    // A connected client keeps it running, however little happens.
    assert_eq!(home.exec("lazy", &["sleep", &patient_seconds(2)]).code, Some(0));
    until_paused(&home, "lazy");
    assert_eq!(home.inspect("lazy")["idle_paused"], true);
    assert!(home.ok(&["ls"]).contains("paused"));
    let memory = home.json(&["stats", "--json", "lazy"])[0]["memory"].as_u64().unwrap();
    assert!(memory < 1 << 20, "its memory is on disk, and looking does not bring it back: {memory}");

    let processes = home.processes_of("lazy");
    let least = if engine() == Engine::Uml { 3 } else { 2 };
    assert!(processes.len() >= least, "{processes:?}");
    let before = used(&processes);
    sleep(Duration::from_secs(3));
    assert_eq!(used(&processes), before, "nothing of it uses a processor, or as much as wakes up");
    assert_eq!(home.status("lazy"), "paused");

    let resumed = home.exec("lazy", &["cat", "/tmp/state"]);
    assert_eq!((resumed.code, resumed.stdout.as_str()), (Some(0), "kept\n"), "{resumed:?}");
    assert_eq!(home.inspect("lazy")["idle_paused"], false);
    let count = || home.sh("lazy", "cat /tmp/n").trim().parse::<u64>().unwrap_or(0);
    let first = count();
    until("its job goes on", 20, || count() > first);
    home.ok(&["kill", "lazy", &job]);
    until_paused(&home, "lazy");
    let events = events(&home, "lazy", &PAUSE_EVENTS);
    assert_eq!(events, ["sandbox_paused", "sandbox_resumed", "sandbox_paused"]);
    assert_eq!(home.exec("lazy", &["true"]).code, Some(0));
}

#[test]
fn several_who_come_to_a_paused_sandbox_at_once_are_all_served() {
    let home = Home::new();
    home.started("lazy", &PAUSES);
    for round in 0..3 {
        until_paused(&home, "lazy");
        thread::scope(|scope| {
            let client = |number: u32| {
                let home = &home;
                move || {
                    let ran = home.exec("lazy", &["sh", "-c", &format!("echo {number}; exit {number}")]);
                    assert_eq!(ran.code, i32::try_from(number).ok(), "round {round}: {ran:?}");
                    assert_eq!(ran.stdout, format!("{number}\n"), "round {round}");
                }
            };
            let clients: Vec<_> = (0..8).map(|number| scope.spawn(client(number))).collect();
            for client in clients {
                client.join().unwrap();
            }
        });
    }
    until_paused(&home, "lazy");
    let events = events(&home, "lazy", &PAUSE_EVENTS);
    assert!(events.chunks(2).all(|pair| pair[0] == "sandbox_paused"), "one after the other: {events:?}");
}

#[test]
fn clients_that_come_while_it_falls_asleep_are_served() {
    let home = Home::new();
    home.started("lazy", &["--pause-idle", "100ms"]);
    // Something to carry to disk, so that it takes a moment.
    home.sh("lazy", "head -c 40M /dev/urandom > /dev/shm/x && sha256sum < /dev/shm/x > /tmp/sum");
    for round in 0..8_u64 {
        sleep(pace(Duration::from_millis(60 + 25 * round)));
        let ran = home.exec("lazy", &["sh", "-c", "sha256sum < /dev/shm/x | diff - /tmp/sum"]);
        assert_eq!(ran.code, Some(0), "round {round}: {ran:?}");
        home.ok(&["stats", "lazy"]);
    }
    let events = events(&home, "lazy", &PAUSE_EVENTS);
    assert!(events.len() > 2, "it fell asleep: {events:?}");
}

#[test]
fn a_pause_by_hand_ends_by_hand() {
    let home = Home::new();
    home.started("still", &PAUSES);
    home.ok(&["pause", "still"]);
    assert!(home.fails(&["exec", "still", "--", "true"], 125).contains("is paused"));
    sleep(Duration::from_millis(1500));
    assert!(home.fails(&["exec", "still", "--", "true"], 125).contains("is paused"), "nor does time end it");
    home.ok(&["resume", "still"]);
    assert_eq!(home.exec("still", &["true"]).code, Some(0));
    until_paused(&home, "still");
    // One that is paused for want of clients can be paused by hand as well, which then counts.
    home.ok(&["pause", "still"]);
    assert_eq!(home.inspect("still")["idle_paused"], false);
    assert!(home.fails(&["exec", "still", "--", "true"], 125).contains("is paused"));
    home.ok(&["resume", "still"]);
    assert_eq!(home.status("still"), "running");
    until_paused(&home, "still");
    home.ok(&["resume", "still"]);
    assert_eq!(home.status("still"), "running", "and resumed");
}

#[test]
fn a_paused_sandbox_can_be_stopped_and_removed() {
    let home = Home::new();
    home.started("lazy", &PAUSES);
    home.sh("lazy", "echo kept > file");
    until_paused(&home, "lazy");
    home.ok(&["stop", "-t", "2", "lazy"]);
    assert_eq!(home.inspect("lazy")["end_cause"], "it was stopped");
    home.ok(&["start", "lazy"]);
    assert_eq!(home.sh("lazy", "cat file"), "kept\n");
    until_paused(&home, "lazy");
    let processes = home.processes_of("lazy");
    home.ok(&["rm", "-f", "lazy"]);
    assert!(processes.iter().all(|pid| !is_alive(*pid)));
}

#[test]
fn time_limits_end_a_paused_sandbox_and_what_it_wrote_is_kept() {
    let home = Home::new();
    for (name, limit) in [("old", "--max-duration"), ("lonely", "--idle-timeout")] {
        home.create(name, &["--pause-idle", "300ms", limit, &patient_seconds(4)]);
        home.ok(&["start", name]);
        home.sh(name, "echo kept > file");
    }
    for (name, limit) in [("old", "max-duration"), ("lonely", "idle-timeout")] {
        until("its time is up", 20, || home.status(name) == "stopped");
        let cause = format!("the sandbox is stopped by its --{limit}");
        assert_eq!(home.inspect(name)["end_cause"], cause, "{name}: it went down in good order");
        assert!(events(&home, name, &PAUSE_EVENTS).contains(&"sandbox_paused".to_owned()));
        home.ok(&["start", name]);
        assert_eq!(home.sh(name, "cat file"), "kept\n", "{name}");
    }
}

#[test]
fn a_sandbox_with_rm_is_gone_when_it_has_ended() {
    let home = Home::new();
    let gone = |name: &str| {
        until("it is gone", 10, || home.ok(&["ls", "-q", "-a"]).is_empty());
        until("its folder, too", 10, || fs::read_dir(home.state().join("sandboxes")).unwrap().count() == 0);
        // The process that removes it records that afterwards.
        let kinds = ["sandbox_ended", "sandbox_removed"];
        until("that is recorded", 10, || events(&home, name, &kinds).len() >= kinds.len());
        assert_eq!(events(&home, name, &kinds), kinds, "{name}");
    };
    home.create("main", &["--rm", "--start", "--", "sleep", "0.2"]);
    gone("main");
    home.started("stopped", &["--rm"]);
    assert!(home.fails(&["restart", "stopped"], 125).contains("is removed when it ends"));
    home.ok(&["stop", "-t", "1", "stopped"]);
    gone("stopped");
    home.started("removed", &["--rm"]);
    home.ok(&["rm", "-f", "removed"]);
    gone("removed");
    home.started("killed", &["--rm"]);
    home.ok(&["kill", "killed"]);
    gone("killed");
    let id = home.started("shot", &["--rm"]);
    let (monitor, keeper) = (home.monitor("shot"), home.keeper("shot"));
    signal(monitor, Signal::KILL);
    signal(keeper, Signal::KILL);
    until("no process is left to remove it", 10, || !is_alive(monitor) && !is_alive(keeper));
    assert!(home.fails(&["exec", &id, "--", "true"], 125).contains("There is no sandbox"));
    gone("shot");
    home.started("waited", &["--rm", "--", "sleep", "1"]);
    assert_eq!(home.run(&["wait", "waited"]).code, Some(0));
    gone("waited");
    home.ok(&["audit", "verify"]);
}

/// Commands that look finish the removals that others left: not those that are under way.
#[test]
fn a_removal_is_recorded_once_however_many_commands_look() {
    const ROUNDS: usize = 8;
    let home = Home::new();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    home.ok(&["ls", "-a"]);
                }
            });
        }
        let _over = OnDrop(|| over.store(true, Ordering::Relaxed));
        for round in 0..ROUNDS {
            let name = format!("round-{round}");
            home.started(&name, &["--rm", "--memory", "64M", "--disk", "64M"]);
            home.ok(&["kill", &name]);
        }
        until("all are gone", 10, || home.ok(&["ls", "-q", "-a"]).is_empty());
    });
    for round in 0..ROUNDS {
        let name = format!("round-{round}");
        let kinds = ["sandbox_ended", "sandbox_removed"];
        until("that is recorded", 10, || events(&home, &name, &kinds).len() >= kinds.len());
        assert_eq!(events(&home, &name, &kinds), kinds, "{name}");
    }
}

#[test]
fn pauses_that_leave_no_time_are_refused() {
    let home = Home::new();
    assert!(home.fails(&["create", "--pause-idle", "0"], 125).contains("pause_idle is zero"));
    assert!(home.fails(&["create", "--pause-idle", "often"], 125).contains("is not a length of time"));
}

/// Runs code in a REPL.
fn cell(home: &Home, name: &str, code: &str) -> Ran {
    home.run(&["repl", "run", name, "-c", code])
}

#[track_caller]
fn value(home: &Home, name: &str, code: &str) -> String {
    let ran = cell(home, name, code);
    assert_eq!(ran.code, Some(0), "{code}: {ran:?}");
    ran.stdout.trim().to_owned()
}

fn listed(home: &Home, name: &str) -> Value {
    let all = home.json(&["repl", "ls", "--json"]);
    all.as_array().unwrap().iter().find(|repl| repl["name"] == name).cloned().unwrap_or_default()
}

#[test]
fn two_repls_sleep_without_a_processor_and_remember() {
    let home = Home::new();
    for name in ["one", "two"] {
        assert_eq!(home.ok(&["repl", "new", name, "--pause-idle", "1s"]).trim(), name);
    }
    for (name, number) in [("one", 1), ("two", 2)] {
        assert_eq!(value(&home, name, &format!("x = {number}; import os; data = os.urandom(1 << 20)")), "");
        assert_eq!(value(&home, name, "import hashlib; mark = hashlib.sha256(data).hexdigest()"), "");
    }
    for name in ["one", "two"] {
        until("it is paused", 30, || listed(&home, name)["status"] == "paused");
    }
    let all = &home.processes_of("one") | &home.processes_of("two");
    let before = used(&all);
    sleep(Duration::from_secs(4));
    assert_eq!(used(&all), before, "neither uses a processor, or as much as wakes up");
    for (name, number) in [("one", "1"), ("two", "2")] {
        let began = Instant::now();
        assert_eq!(value(&home, name, "x"), number);
        println!("{name}: resumed and answered in {:?}", began.elapsed());
        assert_eq!(value(&home, name, "hashlib.sha256(data).hexdigest() == mark"), "True");
        let repl = listed(&home, name);
        assert_eq!((&repl["cells"], &repl["language"]), (&4.into(), &"python".into()));
        assert!(repl["last_used_at"].as_str() > repl["created_at"].as_str(), "{repl}");
    }
}

#[test]
fn several_at_once_in_a_sleeping_repl_take_turns() {
    let home = Home::new();
    home.ok(&["repl", "new", "shared", "--pause-idle", "1s"]);
    value(&home, "shared", "seen = []");
    until("it is paused", 30, || listed(&home, "shared")["status"] == "paused");
    thread::scope(|scope| {
        let client = |number: u32| {
            let home = &home;
            let code = format!(
                "import time; n = len(seen); time.sleep(0.05); seen.append({number}); n == len(seen) - 1"
            );
            move || assert_eq!(value(home, "shared", &code), "True", "no other cell ran meanwhile")
        };
        let clients: Vec<_> = (0..6).map(|number| scope.spawn(client(number))).collect();
        for client in clients {
            client.join().unwrap();
        }
    });
    assert_eq!(value(&home, "shared", "sorted(seen)"), "[0, 1, 2, 3, 4, 5]");
}

#[test]
fn what_is_lost_is_told_once_and_files_are_kept() {
    let home = Home::new();
    let name = "old";
    home.ok(&["repl", "new", name, "--pause-idle", "1s"]);
    let first = cell(&home, name, "x = 1; import os; open('file', 'w').write('kept'); os.sync()");
    assert_eq!(first.code, Some(0), "{first:?}");
    let untold = |ran: &Ran| !ran.stderr.contains("are gone");
    assert!(untold(&first), "nothing was there to lose: {first:?}");
    let lost = |why: &str| {
        let ran = cell(&home, name, "'x' in globals(), open('file').read()");
        assert_eq!(ran.stdout.trim(), "(False, 'kept')", "{ran:?}");
        assert!(
            ran.stderr.contains(why) && ran.stderr.contains("files in the sandbox are preserved"),
            "{why}: {ran:?}"
        );
        let next = cell(&home, name, "x = 2");
        assert!(untold(&next), "told once: {next:?}");
    };

    home.ok(&["stop", "-t", "2", name]);
    assert_eq!(listed(&home, name)["status"], "stopped");
    lost("The sandbox had ended (it was stopped)");
    home.ok(&["kill", name]);
    lost("The sandbox had ended (it was killed)");
    let kill_all = || {
        let (monitor, keeper) = (home.monitor(name), home.keeper(name));
        signal(monitor, Signal::KILL);
        signal(keeper, Signal::KILL);
        until("it is dead", 10, || home.status(name) == "dead");
    };
    kill_all();
    lost("its processes were killed from outside");
    // As if all that had been in another boot of the host.
    kill_all();
    let mut store = bathy_manager::store::Store::open(&home.state()).unwrap();
    assert!(store.use_repl(name, 1, "another boot").unwrap());
    drop(store);
    lost("The machine was restarted at 20");
    // An interpreter that ends takes its variables along; its sandbox goes on.
    let ended = cell(&home, name, "os = __import__('os'); os._exit(3)");
    assert_ne!(ended.code, Some(0), "{ended:?}");
    lost("The interpreter was restarted");
}

#[test]
fn a_repl_has_a_name_and_an_end() {
    let home = Home::new();
    let id = home.ok(&["repl", "new"]).trim().to_owned();
    assert_eq!(value(&home, &id[..6], "40 + 2"), "42", "the beginning of its sandbox's id is enough");
    home.ok(&["repl", "new", "named"]);
    let record = home.inspect("named");
    assert_eq!(
        (&record["spec"]["pause_idle"], &record["spec"]["labels"]["repl"]),
        (&60.into(), &"python".into())
    );
    assert_eq!(record["spec"]["idle_timeout"], Value::Null);
    assert!(home.fails(&["repl", "new", "named"], 125).contains("already"));
    assert!(home.fails(&["repl", "run", "nmaed", "-c", "1"], 125).contains("did you mean `named`"));
    home.create("plain", &[]);
    assert!(home.fails(&["repl", "run", "plain", "-c", "1"], 125).contains("a sandbox without one"));
    home.ok(&["pause", "named"]);
    assert!(home.fails(&["repl", "run", "named", "-c", "1"], 125).contains("is paused"), "by hand");
    let removed = home.json(&["repl", "rm", "--json", "named"])[0].take();
    assert_eq!((&removed["name"], &removed["error"]), (&"named".into(), &Value::Null), "{removed}");
    home.ok(&["rm", "-f", &id]);
    assert_eq!(
        home.json(&["repl", "ls", "--json"]),
        Value::Array(Vec::new()),
        "a REPL goes with its sandbox"
    );
    assert_eq!(home.ok(&["ls", "-q", "-a"]).lines().count(), 1, "plain is left");
}

#[test]
fn the_operators_limits_hold_for_repls_and_images() {
    let home = Home::new();
    let file = home.path().join("operator.toml");
    fs::write(&file, "[ceiling]\nimages = [\"default\"]\nidle_timeout = \"1h\"\nmemory = \"256M\"\n")
        .unwrap();
    let run = |arguments: &[&str]| {
        finish(home.command(arguments).env("BATHYSPHERE_CONFIG", file.to_str().unwrap()), b"")
    };
    let image = run(&["create", "--image", "other"]);
    assert_eq!(image.code, Some(125));
    let message = &image.stderr;
    assert!(
        message.contains("image `other`")
            && message.contains("operator.toml")
            && message.contains("`images`"),
        "{message}"
    );
    let large = run(&["repl", "new", "-m", "512M"]);
    assert!(large.code == Some(125) && large.stderr.contains("`memory` in [ceiling] of"), "{large:?}");
    let made = run(&["repl", "new", "small"]);
    assert_eq!(made.code, Some(0), "{made:?}");
    let spec = home.inspect("small")["spec"].take();
    assert_eq!((&spec["idle_timeout"], &spec["memory"]), (&3600.into(), &(256 << 20).into()));
}
