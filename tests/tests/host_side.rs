//! The trusted side on the host: how many sandboxes there may be, whose users they run as, whose folders are used, and that
//! a process that stands still does not make the others do so.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bathy_tests::kept::{Home, descendants, until};
use bathy_tests::{Engine, Ran, engine, finish, promptly};

/// A home whose operator allows so many sandboxes.
struct Limited {
    home: Home,
    file: PathBuf,
}

impl Limited {
    fn to(most: u32) -> Self {
        let home = Home::new();
        let file = home.path().join("operator.toml");
        fs::write(&file, format!("[ceiling]\nsandboxes = {most}\n")).unwrap();
        Self { home, file }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.home.command(arguments);
        command.env("BATHYSPHERE_CONFIG", &self.file);
        command
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        finish(&mut self.command(arguments), b"")
    }

    #[track_caller]
    fn refuses(&self, arguments: &[&str]) {
        let ran = self.run(arguments);
        assert!(
            ran.code == Some(125) && ran.stderr.contains("the operator allows"),
            "{arguments:?}: {ran:?}"
        );
    }

    #[track_caller]
    fn allows(&self, arguments: &[&str]) {
        let ran = self.run(arguments);
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
    }

    /// An ephemeral sandbox that runs until its standard input closes.
    fn ephemeral(&self) -> Child {
        self.command(&["run", "--", "sh", "-c", "echo up; cat"]).stdin(Stdio::piped()).spawn().unwrap()
    }
}

/// Every way to a sandbox.
const WAYS: [&[&str]; 4] =
    [&["run", "--", "true"], &["code", "-c", "1"], &["create"], &["run", "-d", "--", "sleep", "600"]];

#[test]
fn the_operators_number_of_sandboxes_holds_for_ephemeral_ones_too() {
    let limited = Limited::to(1);
    let mut running = limited.ephemeral();
    let mut line = String::new();
    BufReader::new(running.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    for way in WAYS {
        limited.refuses(way);
    }
    // One that is killed has no time to give its place back.
    running.kill().unwrap();
    running.wait().unwrap();
    limited.allows(&["run", "--", "true"]);
    limited.allows(&["code", "-c", "1"]);
    limited.allows(&["create", "--name", "kept"]);
    for way in WAYS {
        limited.refuses(way);
    }
    limited.allows(&["rm", "kept"]);
    limited.allows(&["run", "--", "true"]);
}

#[test]
fn of_several_at_once_one_takes_the_last_place() {
    let limited = Limited::to(1);
    let mut children: Vec<_> = (0..4).map(|_| limited.ephemeral()).collect();
    // The one that runs waits for its input; the others end by themselves.
    until("all others are refused", 60, || {
        let ended = children.iter_mut().filter_map(|child| child.try_wait().unwrap()).count();
        assert!(ended < 4, "one gets it");
        ended == 3
    });
    for child in children {
        let output = child.wait_with_output().unwrap();
        let stderr_text = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.code() {
            Some(0) => assert_eq!(output.stdout, b"up\n"),
            code => assert!(
                code == Some(125) && stderr_text.contains("the operator allows 1"),
                "{code:?}: {stderr_text}"
            ),
        }
    }
}

#[test]
fn the_operators_processor_quota_holds_for_ephemeral_sandboxes_too() {
    let limited = Limited::to(9);
    fs::write(&limited.file, "[ceiling]\ncpu_quota = 0.7\n").unwrap();
    for arguments in [&["run", "true"][..], &["code", "-c", "1"]] {
        let ran = limited.run(arguments);
        assert!(
            ran.code == Some(0) && ran.stderr.contains("quota of 0.7 is set by"),
            "{arguments:?}: {ran:?}"
        );
    }
    let log = fs::read_to_string(limited.home.state().join("audit/audit.jsonl")).unwrap();
    assert_eq!(log.matches("\"cpu\":\"0.7\"").count(), 2, "{log}");
    let ran = limited.run(&["run", "--cpu-quota", "0.8", "true"]);
    assert!(ran.code == Some(125) && ran.stderr.contains("operator.toml"), "{ran:?}");
}

#[test]
fn the_operators_ceiling_holds_at_each_start() {
    let limited = Limited::to(9);
    limited.allows(&["create", "--name", "older", "--memory", "256M", "--disk", "64M", "--net", "none"]);
    fs::write(&limited.file, "[ceiling]\nmemory = \"128M\"\n").unwrap();
    let ran = limited.run(&["start", "older"]);
    let reported = ran.stderr.contains("Memory of 256M") && ran.stderr.contains("operator.toml");
    assert!(ran.code == Some(125) && reported, "{ran:?}");
    let ran = limited.run(&["create", "--disk", "64M"]);
    let reported = ran.stderr.contains("The default memory is 128M instead of 512M")
        && ran.stderr.contains("operator.toml");
    assert!(ran.code == Some(0) && reported, "{ran:?}");
    // A limit that was left open is set while the operator has one.
    fs::write(&limited.file, "[ceiling]\nmax_duration = 3\n").unwrap();
    limited.allows(&["start", "older"]);
    until("its time is up", 30, || limited.home.status("older") == "stopped");
    fs::write(&limited.file, "").unwrap();
    limited.allows(&["start", "older"]);
    limited.allows(&["rm", "--force", "older"]);
}

#[test]
fn a_mistake_in_the_operators_file_keeps_nobody_from_ending_sandboxes() {
    let limited = Limited::to(9);
    for name in ["one", "two"] {
        limited
            .allows(&["run", "-d", "--name", name, "--net", "none", "--disk", "64M", "--", "sleep", "600"]);
    }
    fs::write(&limited.file, "[ceiling\nsandboxes = 9\n").unwrap();
    // Nothing is started or entered without the operator's limits.
    for arguments in [
        &["run", "--", "true"][..],
        &["create"],
        &["exec", "one", "--", "true"],
        &["start", "one"],
        &["code", "--sandbox", "one", "-c", "1"],
        &["policy", "allow", "one", "private"],
    ] {
        let ran = limited.run(arguments);
        let reported = ran.stderr.contains("operator.toml");
        assert!(ran.code == Some(125) && reported, "{arguments:?}: {ran:?}");
    }
    let ran = limited.run(&["ls"]);
    let reported = ran.stderr.contains("operator.toml") && ran.stderr.contains("nothing is started");
    assert!(ran.code == Some(0) && ran.stdout.contains("one") && reported, "{ran:?}");
    for arguments in [
        &["inspect", "one"][..],
        &["logs", "one"],
        &["stats", "one"],
        &["jobs", "one"],
        &["port", "one"],
        &["repl", "ls"],
        &["events", "--sandbox", "one"],
    ] {
        let ran = limited.run(arguments);
        assert!(ran.code == Some(0) && ran.stderr.contains("operator.toml"), "{arguments:?}: {ran:?}");
    }
    for verb in ["pause", "resume", "stop", "rm"] {
        limited.allows(&[verb, "one"]);
    }
    limited.allows(&["rm", "--force", "two"]);
    let ran = limited.run(&["doctor"]);
    assert!(ran.code != Some(0) && ran.stdout.contains("operator's settings"), "{ran:?}");
}

#[test]
fn c8_a_request_that_a_monitor_does_not_understand_is_answered() {
    let home = Home::new();
    home.started("one", &["--memory", "128M", "--disk", "64M", "--net", "none"]);
    let sandboxes = fs::read_dir(home.state().join("sandboxes")).unwrap().flatten();
    let control =
        sandboxes.map(|entry| entry.path().join("control.sock")).find(|path| path.exists()).unwrap();
    // A control message of the connection: one that is longer than any request, and one that is none.
    for (length, body) in [(5000_u32, vec![0; 64]), (4, vec![255; 4])] {
        let mut socket = std::os::unix::net::UnixStream::connect(&control).unwrap();
        socket.write_all(&[&length.to_le_bytes()[..], &[0; 8], &body].concat()).unwrap();
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.contains("does not understand the request"), "{length}: {answer:?}");
    }
    assert_eq!(home.sh("one", "echo still there"), "still there\n");
}

/// The users of a process, by their numbers on the host.
fn users(pid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    line.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

#[test]
fn j10_sandboxes_of_several_state_folders_have_no_user_in_common() {
    // Those of systemd's containers and of /etc/subuid, and the first number behind them.
    let (others, end) = (0..=0x6fff_ffff, 0x7ffe_0000);
    let homes = [Home::new(), Home::new()];
    let mut owners: BTreeMap<u32, String> = BTreeMap::new();
    for (index, home) in homes.iter().enumerate() {
        for name in ["one", "two"] {
            home.started(name, &["--memory", "128M", "--disk", "64M"]);
            let sandbox = format!("{name} of {index}");
            let keeper = home.keeper(name);
            let gateway = home.gateway(name).expect("it has a network");
            let mut found = std::collections::BTreeSet::new();
            for pid in [keeper, gateway].into_iter().chain(descendants(keeper)) {
                found.extend(users(pid));
            }
            let expected = if engine() == Engine::Uml { 3 } else { 2 };
            assert_eq!(
                found.len(),
                expected,
                "the keeper, the guest and the gateway of {sandbox}: {found:?}"
            );
            for user in found {
                assert!(!others.contains(&user) && user < end, "{user} of {sandbox} can be another's");
                let other = owners.insert(user, sandbox.clone());
                assert_eq!(other, None, "{user} is of {sandbox}, too");
            }
        }
    }
}

#[test]
fn j10_root_of_a_container_without_the_numbers_is_refused_and_told_so() {
    let home = Home::new();
    let inside = |arguments: &[&str]| {
        // A container's user namespace has fewer numbers than the machine; this one has that of root only.
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--"]).arg(bathy_tests::bathy()).args(arguments);
        finish(command.env("XDG_STATE_HOME", home.path()).env_remove("BATHYSPHERE_CONFIG"), b"")
    };
    for way in WAYS.into_iter().filter(|way| *way != ["create"]) {
        let ran = inside(way);
        let reported = ran.stderr.contains("user numbers of its own") && ran.stderr.contains("2013265920");
        assert!(ran.code == Some(125) && reported, "{way:?}: {ran:?}");
    }
    let ran = inside(&["doctor"]);
    assert!(ran.code == Some(1) && ran.stdout.contains("FAIL  user numbers"), "{ran:?}");
}

fn cache() -> PathBuf {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map_or_else(|| Path::new(&std::env::var_os("HOME").unwrap()).join(".cache"), PathBuf::from);
    base.join("bathysphere")
}

#[test]
fn root_runs_nothing_from_the_folders_of_others() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    // As `sudo` that keeps HOME: a kernel and an image of the user's own making.
    fs::create_dir_all(at("home/.cache")).unwrap();
    fs::create_dir_all(at("home/.local/state/bathysphere")).unwrap();
    let copied = Command::new("cp").arg("-rs").arg(cache()).arg(at("home/.cache")).status().unwrap();
    assert!(copied.success());
    let run = |arguments: &[&str]| {
        let mut command = Command::new(bathy_tests::bathy());
        command.env_remove("XDG_CACHE_HOME").env_remove("XDG_STATE_HOME").env_remove("BATHYSPHERE_CONFIG");
        finish(command.args(arguments).env("HOME", at("home")).current_dir("/"), b"")
    };
    let refused = |path: &str, why: &str| {
        for verb in [&["run", "--", "true"][..], &["create"], &["ls"], &["setup"]] {
            let ran = run(verb);
            let named = ran.stderr.contains(at(path).to_str().unwrap()) && ran.stderr.contains(why);
            assert!(ran.code == Some(125) && named, "{path} {verb:?}: {ran:?}");
        }
    };
    let mode = |path: &str, mode| fs::set_permissions(at(path), PermissionsExt::from_mode(mode)).unwrap();
    for path in ["home", "home/.cache", "home/.cache/bathysphere", "home/.local/state/bathysphere"] {
        chown(at(path), Some(12345), None).unwrap();
        refused(path, "belongs to user 12345");
        chown(at(path), Some(0), None).unwrap();
        mode(path, 0o777);
        refused(path, "can be changed by other users");
        mode(path, 0o755);
    }
    let own = run(&["run", "--", "echo", "mine"]);
    assert_eq!((own.code, own.stdout.as_str()), (Some(0), "mine\n"), "{own:?}");
    // A kernel of theirs in a folder of ours.
    let kernel = fs::read_dir(at("home/.cache/bathysphere"))
        .unwrap()
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy() == format!("kernel-{}", engine().name()))
        .unwrap();
    chown(kernel.path(), Some(12345), None).unwrap();
    let theirs = run(&["run", "--", "true"]);
    assert!(theirs.code == Some(125) && theirs.stderr.contains("belongs to user 12345"), "{theirs:?}");
}

/// A process that holds the audit log's lock and is stopped, as a client that is stopped with Ctrl-Z can be.
struct StoppedHolder(Child);

impl StoppedHolder {
    fn of(home: &Home) -> Self {
        let lock = home.state().join("audit/audit.lock");
        let mut command = Command::new("flock");
        command.args(["--no-fork", "--exclusive"]).arg(&lock).args(["sh", "-c", "echo held; kill -STOP $$"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let holder = Self(child);
        let stat = format!("/proc/{}/stat", holder.0.id());
        until("it is stopped", 10, || fs::read_to_string(&stat).unwrap().contains(") T "));
        holder
    }
}

impl Drop for StoppedHolder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn one_stopped_process_at_the_audit_log_keeps_nobody_from_ending_sandboxes() {
    let home = Home::new();
    for name in ["one", "two"] {
        home.started(name, &["--memory", "128M", "--disk", "64M"]);
    }
    let job = home.job("one", "sleep 600");
    let holder = StoppedHolder::of(&home);
    let pid = format!("process {} holds its lock and is stopped", holder.0.id());
    // What is about to begin is refused, and the message names the process that holds the lock.
    let error = home.fails(&["exec", "one", "--", "true"], 125);
    assert!(error.contains("audit log") && error.contains(&pid), "{error}");
    let error = home.fails(&["run", "--", "true"], 125);
    assert!(error.contains(&pid), "{error}");
    // What ends something is done, soon, and reports what is not recorded. Each waits for a second once, and its monitor another.
    for arguments in
        [&["kill", "one", &job][..], &["kill", "one"], &["rm", "--force", "one"], &["stop", "two"]]
    {
        let began = Instant::now();
        let ran = home.run(arguments);
        let took = began.elapsed();
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        assert!(took < promptly(Duration::from_secs(8)), "{arguments:?} took {took:?}");
    }
    assert_eq!(home.status("two"), "stopped");
    drop(holder);
    home.ok(&["start", "two"]);
    assert_eq!(home.sh("two", "echo back"), "back\n");
    home.ok(&["audit", "verify"]);
}
