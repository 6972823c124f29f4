//! Sandboxes from their making to their removal, as their users see them.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::{self, sleep};
use std::time::Duration;

use bathy_tests::kept::{Home, cpu_ticks, descendants, is_alive, signal, until};
use bathy_tests::{bathy, engine, finish, patient_seconds};
use rustix::process::Signal;
use serde_json::Value;

fn causes(home: &Home, name: &str) -> Vec<String> {
    let events = home.events(name);
    events.iter().map(|event| event["event"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_whole_life() {
    let home = Home::new();
    let id = home.create("whale", &[]);
    assert_eq!(home.status("whale"), "created");
    assert!(home.ok(&["ps", "-q"]).is_empty(), "nothing runs");
    assert_eq!(home.ok(&["start", "whale"]), "whale\n");
    assert_eq!(home.status("whale"), "running");
    assert_eq!(home.ok(&["ps", "-q"]).trim(), id);
    let processes = home.all_processes();
    assert!(processes.is_superset(&home.processes_of("whale")), "{processes:?}");

    home.ok(&["restart", "-t", "1", "whale"]);
    assert_eq!(home.status("whale"), "running");
    assert!(processes.iter().all(|pid| !is_alive(*pid)), "a restart leaves nothing of the first run");

    let processes = home.processes_of("whale");
    home.ok(&["stop", "-t", "1", "whale"]);
    assert_eq!(home.status("whale"), "stopped");
    assert!(processes.iter().all(|pid| !is_alive(*pid)), "a stop leaves nothing");
    assert_eq!(home.inspect("whale")["end_cause"], "it was stopped");
    home.ok(&["stop", "whale"]);

    assert_eq!(home.ok(&["rm", "whale"]), "whale\n");
    assert_eq!(home.ok(&["ls", "-q"]), "");
    assert_eq!(fs::read_dir(home.state().join("sandboxes")).unwrap().count(), 0);
    assert_eq!(home.processes(), BTreeSet::new());
    let expected = [
        "sandbox_created",
        "sandbox_started",
        "sandbox_ended",
        "sandbox_started",
        "sandbox_ended",
        "sandbox_removed",
    ];
    assert_eq!(causes(&home, &id), expected);
    let events = home.events(&id);
    let started = events.iter().find(|event| event["event"] == "sandbox_started").unwrap();
    assert_eq!(started["engine"], engine().name());
}

#[test]
fn a_running_sandbox_is_only_removed_by_force() {
    let home = Home::new();
    let id = home.started("whale", &[]);
    let all = home.all_processes();
    assert!(home.fails(&["rm", "whale"], 125).contains("is running. `bathy rm -f whale` ends it"));
    assert_eq!(home.status("whale"), "running");
    // Starting what runs changes nothing.
    let keeper = home.inspect("whale")["keeper_pid"].take();
    home.ok(&["start", "whale"]);
    assert_eq!(home.inspect("whale")["keeper_pid"], keeper);
    home.create("idle", &[]);
    // Neither does stopping what does not run.
    home.ok(&["stop", "idle"]);
    assert_eq!(home.status("idle"), "created");
    assert_eq!(home.ok(&["rm", "--all"]).lines().count(), 1, "the one that is not running");
    assert_eq!(home.status("whale"), "running");
    home.ok(&["rm", "--force", "--filter", "name=wh"]);
    assert!(all.iter().all(|pid| !is_alive(*pid)), "something of it is left");
    for hierarchy in ["unified", "pids", "memory", "freezer", "cpu", ""] {
        let folder = format!("/sys/fs/cgroup/{hierarchy}/bathysphere-{id}");
        assert!(!fs::exists(&folder).unwrap(), "{folder} is left");
    }
}

#[test]
fn names_ids_and_beginnings_of_ids() {
    let home = Home::new();
    let id = home.create("whale", &[]);
    let nameless = home.ok(&["create"]).trim().to_owned();
    assert_ne!(id, nameless);
    assert_eq!(home.inspect(&id)["name"], "whale");
    assert_eq!(home.inspect(&nameless)["name"], Value::Null);
    // Ids are random: this long a beginning is never shared.
    assert_eq!(home.inspect(&id[..8])["id"], *id);
    assert_eq!(home.inspect(&nameless[..8])["id"], *nameless);

    assert!(home.fails(&["create", "--name", "whale"], 125).contains("There is a sandbox `whale` already"));
    assert_eq!(home.ok(&["ls", "-q"]).lines().count(), 2, "the refused one is not there");
    assert!(home.fails(&["inspect", "whael"], 125).contains("did you mean `whale`?"));
    assert!(home.fails(&["inspect", "zzzzz"], 125).contains("There is no sandbox `zzzzz`"));
    for bad in ["", "a/b", "../x", "a b", "-x", "x\u{1b}[31m", &"n".repeat(300)] {
        let ran = home.run(&["create", &format!("--name={bad}")]);
        assert!(ran.code == Some(125), "{bad:?}: {ran:?}");
        assert!(!ran.stderr.contains('\u{1b}'), "{bad:?}: {ran:?}");
    }
    assert_eq!(home.ok(&["ls", "-q"]).lines().count(), 2);
}

#[test]
fn labels_and_filters() {
    let home = Home::new();
    let red = home.create("red", &["-l", "colour=red", "-l", "tier=one"]);
    let blue = home.create("blue", &["--label", "colour=blue"]);
    home.create("plain", &[]);
    home.ok(&["start", "blue"]);
    let list = |filters: &[&str]| {
        let filters: Vec<&str> = filters.iter().flat_map(|filter| ["--filter", filter]).collect();
        let ids = home.ok(&[&["ls", "-q"], filters.as_slice()].concat());
        ids.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(list(&["label=colour=red"]), [red.as_str()]);
    assert_eq!(list(&["label=colour"]), [red.as_str(), blue.as_str()]);
    assert_eq!(list(&["label=colour", "label=tier=one"]), [red.as_str()]);
    assert_eq!(list(&["status=running"]), [blue.as_str()]);
    assert_eq!(list(&["name=bl"]), [blue.as_str()]);
    assert_eq!(list(&["label=none"]), Vec::<String>::new());
    assert_eq!(list(&[]).len(), 3);
    assert!(home.fails(&["ls", "--filter", "colour=red"], 125).contains("label="));
    let listed = home.json(&["ls", "--json"]);
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["red", "blue", "plain"], "the oldest first");
    assert_eq!(listed[0]["spec"]["labels"]["tier"], "one");
    assert_eq!(home.json(&["ps", "--json"]).as_array().unwrap().len(), 1);
}

#[test]
fn bash_completes_the_names_of_sandboxes() {
    let home = Home::new();
    home.create("web", &[]);
    home.create("worker", &[]);
    // Whatever was typed, it is the installed program that completes: `./bathy` may be any file.
    let script = "source <(bathy completion bash)\n\
        try() { COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _bathy \"$1\"; echo \"${COMPREPLY[*]}\"; }\n\
        try \"$1\" exec ''; try \"$1\" policy deny wo; try \"$1\" run --net = pub";
    let completed = |home: &Home| {
        let mut bash = Command::new("bash");
        let program = bathy();
        let folder = Path::new(&program).parent().unwrap();
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
        bash.args(["-c", script, "bash", "./bathy"]).env("XDG_STATE_HOME", home.path()).env("PATH", path);
        finish(&mut bash, b"").stdout
    };
    assert_eq!(completed(&home), "web worker\nworker\npublic\n");
    assert_eq!(completed(&Home::new()), "\n\npublic\n");
}

#[test]
fn the_disk_survives_a_stop_and_also_a_kill() {
    let home = Home::new();
    home.started("whale", &[]);
    home.sh("whale", "echo kept > /home/user/file; mkdir -p d; ln -s /nowhere d/link");
    home.ok(&["stop", "-t", "1", "whale"]);
    home.ok(&["start", "whale"]);
    assert_eq!(home.sh("whale", "cat /home/user/file; readlink d/link"), "kept\n/nowhere\n");
    home.sh("whale", "echo more >> /home/user/file; sync");
    home.ok(&["kill", "whale"]);
    assert_eq!(home.inspect("whale")["end_cause"], "it was killed");
    home.ok(&["start", "whale"]);
    assert_eq!(home.sh("whale", "cat /home/user/file"), "kept\nmore\n");
}

#[test]
fn one_that_does_not_go_down_is_ended_and_that_is_said() {
    let home = Home::new();
    home.started("stuck", &[]);
    let keeper = home.keeper("stuck");
    signal(keeper, Signal::STOP);
    home.ok(&["stop", "-t", "0", "stuck"]);
    let cause = home.inspect("stuck")["end_cause"].as_str().unwrap().to_owned();
    assert!(cause.starts_with("it was stopped; it did not shut down in time and was killed"), "{cause}");
    assert!(!is_alive(keeper));
    home.ok(&["start", "stuck"]);
    assert_eq!(home.exec("stuck", &["true"]).code, Some(0));
}

#[test]
fn the_main_command_and_its_exit_code() {
    let home = Home::new();
    home.started(
        "main",
        &["--", "sh", "-c", "echo begun; read -r line < /home/user/pipe || sleep 0.2; exit 7"],
    );
    let waited = home.run(&["wait", "main"]);
    assert_eq!((waited.code, waited.stdout.as_str()), (Some(0), "7\n"), "{waited:?}");
    let record = home.inspect("main");
    assert_eq!((&record["status"], &record["exit_code"]), (&"stopped".into(), &7.into()));
    assert_eq!(record["end_cause"], "its main command ended: code 7");
    assert_eq!(home.ok(&["logs", "main"]).lines().next(), Some("begun"), "logs are kept after the end");
    let jobs = home.json(&["jobs", "--json", "main"]);
    assert_eq!((&jobs[0]["number"], &jobs[0]["exit"]), (&0.into(), &"code 7".into()));
    // Starting it only to copy a file leads nowhere, and the message explains it.
    let copy = home.path().join("hostname");
    let error = home.fails(&["cp", "main:/etc/hostname", copy.to_str().unwrap()], 125);
    assert!(error.contains("runs only as long as its main command"), "{error}");
    let error = home.fails(&["exec", "main", "true"], 125);
    assert!(error.contains("runs only as long as its main command"), "{error}");
    // It runs again at every start.
    home.ok(&["start", "main"]);
    assert_eq!(home.ok(&["wait", "main"]), "7\n");
    assert_eq!(home.ok(&["logs", "main"]).matches("begun").count(), 2);
}

#[test]
fn a_main_command_that_cannot_run_ends_its_sandbox() {
    let home = Home::new();
    home.create("main", &["--", "no-such-program"]);
    // Whether the start or the wait reports it, the cause is written down.
    home.run(&["start", "main"]);
    until("it has ended", 10, || home.status("main") == "stopped");
    let record = home.inspect("main");
    assert_eq!(record["exit_code"], 127);
    assert!(record["end_cause"].as_str().unwrap().contains("no such program"), "{record}");
}

#[test]
fn eight_clients_at_once() {
    let home = Home::new();
    home.started("busy", &[]);
    thread::scope(|scope| {
        let one = |number: usize| {
            let (home, text) = (&home, format!("client {number}\n").repeat(2000));
            move || {
                let mut command = home.command(&["exec", "-i", "busy", "--", "sh", "-c"]);
                command.arg(format!("cat; exit {number}"));
                let ran = finish(&mut command, text.as_bytes());
                assert_eq!(ran.code, Some(i32::try_from(number).unwrap()), "{}", ran.stderr);
                assert!(ran.stdout == text, "client {number} got {} bytes of others", ran.stdout.len());
            }
        };
        let clients: Vec<_> = (0..8).map(|number| scope.spawn(one(number))).collect();
        for client in clients {
            client.join().unwrap();
        }
    });
    assert_eq!(home.json(&["stats", "--json", "busy"])[0]["commands"], 0);
}

#[test]
fn a_paused_sandbox_uses_no_processor() {
    let home = Home::new();
    home.started("spin", &[]);
    let job = home.job("spin", "while :; do :; done");
    let keeper = home.keeper("spin");
    let used = || descendants(keeper).into_iter().chain([keeper]).map(cpu_ticks).sum::<u64>();
    // However busy the machine is, a job that spins gets a fifth of a second in the end.
    let spins = |when: &str| {
        let before = used();
        until(when, 30, || used() > before + 20);
    };
    spins("the job spins");
    home.ok(&["pause", "spin"]);
    assert_eq!(home.status("spin"), "paused");
    let before = used();
    sleep(Duration::from_secs(1));
    let paused = used() - before;
    assert!(paused <= 1, "a paused sandbox used {paused} ticks in a second");
    assert!(home.fails(&["exec", "spin", "--", "true"], 125).contains("is paused"));
    assert!(home.fails(&["cp", "/etc/hostname", "spin:/tmp/x"], 125).contains("is paused"));
    home.ok(&["pause", "spin"]);
    home.ok(&["resume", "spin"]);
    spins("the job goes on");
    assert_eq!(home.json(&["jobs", "--json", "spin"])[0]["exit"], Value::Null);
    home.ok(&["kill", "spin", &job]);
    let events = causes(&home, "spin");
    let states =
        events.iter().filter(|event| ["sandbox_paused", "sandbox_resumed"].contains(&event.as_str()));
    assert_eq!(states.collect::<Vec<_>>(), ["sandbox_paused", "sandbox_resumed"]);
    // A frozen guest cannot go down by itself; stopping it does not take its whole grace.
    home.ok(&["pause", "spin"]);
    home.ok(&["stop", "-t", "1", "spin"]);
    assert_eq!(home.status("spin"), "stopped");
    home.ok(&["start", "spin"]);
    home.ok(&["pause", "spin"]);
    home.ok(&["rm", "-f", "spin"]);
}

#[test]
fn a_paused_sandbox_gives_its_memory_back_and_gets_it_again() {
    let home = Home::new();
    home.started("holder", &[]);
    let script = "import hashlib,os,time\n\
        data=os.urandom(64<<20)\n\
        open('sum','w').write(hashlib.sha256(data).hexdigest())\n\
        while not os.path.exists('go'): time.sleep(0.05)\n\
        print(hashlib.sha256(data).hexdigest()==open('sum').read(),flush=True)\n";
    home.ok(&["exec", "-d", "holder", "--", "python3", "-c", script]);
    until("the job holds its memory", 20, || home.exec("holder", &["test", "-s", "sum"]).code == Some(0));
    let memory = || home.json(&["stats", "--json", "holder"])[0]["memory"].as_u64().unwrap();
    let before = memory();
    assert!(before > 64 << 20, "{before}");
    home.ok(&["pause", "--release-memory", "holder"]);
    assert!(memory() < 1 << 20, "{}", memory());
    home.ok(&["resume", "holder"]);
    home.sh("holder", "touch go");
    until("the job looks at its memory", 20, || !home.ok(&["logs", "holder"]).is_empty());
    assert_eq!(home.ok(&["logs", "holder"]), "True\n");
    // What is not paused has all its memory.
    assert!(memory() > 16 << 20);
}

#[test]
fn the_longest_duration_ends_it() {
    let home = Home::new();
    home.started("short", &["--max-duration", &patient_seconds(2)]);
    // A client is connected all the time: that does not help.
    let ran = home.exec("short", &["sleep", "600"]);
    assert_ne!(ran.code, Some(0), "{ran:?}");
    until("it is stopped", 10, || home.status("short") == "stopped");
    let cause = home.inspect("short")["end_cause"].as_str().unwrap().to_owned();
    assert!(cause.contains("max-duration"), "{cause}");
    let events = home.events("short");
    assert!(events.iter().any(|event| event["event"] == "limit_hit" && event["limit"] == "max-duration"));
}

#[test]
fn an_idle_sandbox_ends_however_much_it_writes() {
    let home = Home::new();
    home.started("idle", &["--idle-timeout", &patient_seconds(2)]);
    // A client keeps it: this takes longer than the limit.
    assert_eq!(home.exec("idle", &["sleep", &patient_seconds(3)]).code, Some(0));
    home.job("idle", "yes > /dev/null & yes");
    until("it is stopped", 15, || home.status("idle") == "stopped");
    let events = home.events("idle");
    assert!(events.iter().any(|event| event["event"] == "limit_hit" && event["limit"] == "idle-timeout"));
    assert!(home.inspect("idle")["end_cause"].as_str().unwrap().contains("idle-timeout"));
}

#[test]
fn a_description_in_a_file() {
    let home = Home::new();
    let file = home.path().join("box.toml");
    let config = file.to_str().unwrap();
    fs::write(&file, "memory = \"256M\"\nprocesses = 99\n[labels]\nfrom = \"file\"\n").unwrap();
    home.create("one", &["--config", config, "--processes", "55"]);
    let spec = home.inspect("one")["spec"].take();
    assert_eq!((&spec["memory"], &spec["processes"]), (&(256 << 20).into(), &55.into()), "options win");
    assert_eq!(spec["labels"]["from"], "file");

    fs::write(&file, "memroy = \"256M\"\n").unwrap();
    let error = home.fails(&["create", "--config", config], 125);
    assert!(error.contains("memroy") && error.contains("memory"), "{error}");
    fs::write(&file, "memory = \"lots\"\n").unwrap();
    assert!(home.fails(&["create", "--config", config], 125).contains("lots"));
    assert!(home.fails(&["create", "--config", "/no/such.toml"], 125).contains("/no/such.toml"));

    // The file of the folder that one is in.
    fs::write(home.path().join("bathysphere.toml"), "memory = \"128M\"\n").unwrap();
    let ran = home.run(&["create", "--name", "two"]);
    assert!(ran.stderr.contains("bathysphere.toml"), "it is said that it is used: {ran:?}");
    assert_eq!(home.inspect("two")["spec"]["memory"], 128 << 20);
    home.create("three", &["--no-config"]);
    assert_eq!(home.inspect("three")["spec"]["memory"], 512 << 20);
}

#[test]
fn c6_a_file_that_was_found_raises_nothing_and_stops_nothing() {
    let home = Home::new();
    let file = home.path().join("bathysphere.toml");
    for (text, key) in [
        ("memory = \"23G\"", "memory"),
        ("processes = 32000", "processes"),
        ("user = \"root\"", "user"),
        ("[network_limits]\nconnections = 2048", "network_limits.connections"),
    ] {
        fs::write(&file, text).unwrap();
        for verb in [&["run", "--", "true"][..], &["code", "-c", "1"], &["create"]] {
            let error = home.fails(verb, 125);
            assert!(error.contains(&format!("its `{key}` has")) && error.contains("--config"), "{error}");
        }
    }
    // Named, it counts; so does an option.
    fs::write(&file, "processes = 2000\n").unwrap();
    home.create("named", &["--config", "bathysphere.toml"]);
    home.create("option", &["--processes", "1999"]);
    let of = |name: &str| home.inspect(name)["spec"]["processes"].take();
    assert_eq!((of("named"), of("option")), (2000.into(), 1999.into()));

    // What would keep a reader waiting, or never end.
    fs::remove_file(&file).unwrap();
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    let operators = |path: &str| {
        finish(home.command(&["run", "--no-config", "--", "true"]).env("BATHYSPHERE_CONFIG", path), b"")
    };
    let error = home.fails(&["run", "--", "true"], 125);
    assert!(error.contains("a named pipe and not a regular file"), "{error}");
    let error = operators(file.to_str().unwrap());
    assert!(error.code == Some(125) && error.stderr.contains("a named pipe"), "{error:?}");
    for (made, kind) in [("/dev/zero", "a device"), ("/", "a directory")] {
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(made, &file).unwrap();
        assert!(home.fails(&["run", "--", "true"], 125).contains(kind), "{made}");
        assert!(operators(made).stderr.contains(kind), "{made}");
    }
    fs::remove_file(&file).unwrap();
    fs::File::create(&file).unwrap().set_len(1 << 30).unwrap();
    assert!(home.fails(&["run", "--", "true"], 125).contains("longer than"));
}

#[test]
fn the_operator_has_the_last_word() {
    let home = Home::new();
    let file = home.path().join("operator.toml");
    fs::write(&file, "[floor]\nsecurity = \"restricted\"\n[ceiling]\nmemory = \"256M\"\nsandboxes = 1\n")
        .unwrap();
    let run = |arguments: &[&str]| {
        finish(home.command(arguments).env("BATHYSPHERE_CONFIG", file.to_str().unwrap()), b"")
    };
    let large = run(&["create", "-m", "512M"]);
    assert_eq!(large.code, Some(125));
    assert!(large.stderr.contains("operator allows") && large.stderr.contains("256M"), "{large:?}");
    let raised = run(&["create", "-m", "128M", "--name", "a", "--security", "default"]);
    assert_eq!(raised.code, Some(0), "{raised:?}");
    assert_eq!(home.inspect("a")["spec"]["security"], "restricted");
    assert!(raised.stderr.contains("restricted"), "it is said: {raised:?}");
    let many = run(&["create", "-m", "128M"]);
    assert!(many.code == Some(125) && many.stderr.contains("operator allows 1"), "{many:?}");
    fs::write(&file, "[florr]\n").unwrap();
    let broken = run(&["create", "-m", "128M"]);
    assert!(broken.code == Some(125) && broken.stderr.contains("florr"), "not ignored: {broken:?}");
    let listed = run(&["ls"]);
    assert!(listed.code == Some(0) && listed.stderr.contains("florr"), "said: {listed:?}");
}

#[test]
fn of_two_removals_one_succeeds() {
    let home = Home::new();
    for round in 0..6 {
        let options: &[&str] = if round % 2 == 0 { &["--start"] } else { &[] };
        home.create("twice", options);
        let remove = || home.command(&["rm", "-f", "twice"]).spawn().unwrap();
        let both: Vec<_> =
            [remove(), remove()].into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        let succeeded = both.iter().filter(|output| output.status.success()).count();
        assert_eq!(succeeded, 1, "round {round}: {both:?}");
        let failed = both.iter().find(|output| !output.status.success()).unwrap();
        let printed = String::from_utf8_lossy(&failed.stderr);
        assert!(printed.contains("There is no sandbox"), "round {round}: {printed}");
        assert_eq!(home.ok(&["ls", "-q"]), "");
    }
    home.ok(&["audit", "verify"]);
    let removed = causes(&home, "twice").iter().filter(|event| *event == "sandbox_removed").count();
    assert_eq!(removed, 6, "each removal is recorded once");
}

#[test]
fn one_whose_keeper_or_monitor_was_killed_is_dead_and_starts_again() {
    let home = Home::new();
    let id = home.started("web", &["--memory", "128M", "--disk", "64M"]);
    for process in [Home::keeper, Home::monitor] {
        signal(process(&home, "web"), Signal::KILL);
        until("it is dead", 10, || home.status("web") == "dead");
        let record = home.inspect("web");
        assert!(record["end_cause"].as_str().is_some_and(|cause| !cause.is_empty()), "{record}");
        // The id is that of the record, whatever was typed.
        let started = home.json(&["start", "--json", &id[..6]])[0].take();
        assert_eq!((&started["id"], &started["name"]), (&id.as_str().into(), &"web".into()), "{started}");
    }
    let stopped = home.json(&["stop", "-t", "1", "--json", "web"])[0].take();
    assert_eq!((&stopped["id"], &stopped["error"]), (&id.as_str().into(), &Value::Null), "{stopped}");
    let listed = home.json(&["ls", "--json"])[0].take();
    assert!(listed["created_at"].as_str().is_some_and(|time| time.ends_with('Z')), "{listed}");
}

#[test]
fn one_whose_monitor_is_stuck_is_killed_and_removed_all_the_same() {
    let home = Home::new();
    for (name, keeper_too) in [("web", false), ("all", true)] {
        home.started(name, &["--memory", "128M", "--disk", "64M"]);
        let everything = home.processes_of(name);
        let (monitor, keeper) = (home.monitor(name), home.keeper(name));
        signal(monitor, Signal::STOP);
        if keeper_too {
            signal(keeper, Signal::STOP);
        }
        home.ok(&["kill", name]);
        until("its processes are gone", 10, || !everything.iter().any(|pid| is_alive(*pid)));
        assert_eq!(home.status(name), "dead");
        home.ok(&["start", name]);
        assert_eq!(home.sh(name, "echo again"), "again\n");
    }
    // Without the lock's file, and without the store.
    for (name, file) in [("web", "life"), ("all", "store.db")] {
        let everything = home.processes_of(name);
        let id = home.inspect(name)["id"].as_str().unwrap().to_owned();
        signal(home.monitor(name), Signal::STOP);
        match file {
            "life" => fs::remove_file(home.state().join("sandboxes").join(&id).join(file)).unwrap(),
            _ => fs::rename(home.state().join(file), home.path().join(file)).unwrap(),
        }
        home.ok(&["rm", "-f", &id]);
        until("its processes are gone", 10, || !everything.iter().any(|pid| is_alive(*pid)));
    }
    home.ok(&["audit", "verify"]);
}
