//! Commands and jobs in running sandboxes.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bathy_tests::kept::{Home, is_alive, signal, until};
use bathy_tests::{limit, patient_seconds, promptly};
use rustix::process::Signal;
use serde_json::Value;

/// Whether the guest has a process with this word among its arguments, which must end with a letter or digit.
fn guest_runs(home: &Home, name: &str, word: &str) -> bool {
    // The pattern does not match itself.
    let (head, tail) = word.split_at(word.len() - 1);
    let script = format!("grep -l '{head}[{tail}]' /proc/[0-9]*/cmdline 2>/dev/null; true");
    !home.root_sh(name, &script).trim().is_empty()
}

fn spawn(home: &Home, arguments: &[&str]) -> Child {
    home.command(arguments).stdin(Stdio::piped()).spawn().unwrap()
}

#[test]
fn exit_codes_pass() {
    let home = Home::new();
    home.started("box", &[]);
    for code in [0, 1, 42, 124, 255] {
        assert_eq!(home.exec("box", &["sh", "-c", &format!("exit {code}")]).code, Some(code));
    }
    assert_eq!(home.exec("box", &["sh", "-c", "kill -TERM $$"]).code, Some(143));
    let missing = home.exec("box", &["no-such-program"]);
    assert!(missing.code == Some(127) && missing.stderr.contains("no such program"), "{missing:?}");
    let folder = home.exec("box", &["/etc"]);
    assert_eq!(folder.code, Some(126), "{folder:?}");
    let report = home.run(&["exec", "--json", "box", "--", "sh", "-c", "echo out; echo err >&2; exit 5"]);
    assert_eq!(report.code, Some(5));
    let report: Value = serde_json::from_str(&report.stdout).unwrap();
    assert_eq!(report["exit_code"], 5);
    assert_eq!((&report["stdout"]["text"], &report["stderr"]["text"]), (&"out\n".into(), &"err\n".into()));
}

#[test]
fn standard_input_is_passed_and_closed() {
    let home = Home::new();
    home.started("box", &[]);
    let text = "a line\n".repeat(50_000);
    let ran = home.run_with(&["exec", "-i", "box", "--", "cat"], text.as_bytes());
    assert!(ran.code == Some(0) && ran.stdout == text, "{:?}, {} bytes", ran.code, ran.stdout.len());
    // Without -i there is no input, whatever is there on this side.
    let ran = home.run_with(&["exec", "box", "--", "sh", "-c", "cat; echo end"], b"not for you");
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "end\n"));
    // An open input without data does not keep a command that does not read it.
    let mut child = spawn(&home, &["exec", "-i", "box", "--", "echo", "done"]);
    let input = child.stdin.take();
    assert!(child.wait().unwrap().success());
    drop(input);
    // What comes later arrives later.
    let mut child = spawn(&home, &["exec", "-i", "box", "--", "cat"]);
    let (mut input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut lines = BufReader::new(output).lines();
    for word in ["one", "two"] {
        writeln!(input, "{word}").unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), word);
    }
    drop(input);
    assert!(lines.next().is_none());
    assert!(child.wait().unwrap().success());
}

#[test]
fn environment_folder_and_user() {
    let home = Home::new();
    home.started("box", &["-e", "FROM=sandbox", "-e", "BOTH=sandbox", "-w", "/usr"]);
    let show = ["--", "sh", "-c", "echo $FROM $BOTH $NEW; pwd; id -un; echo $HOME"];
    let ran = home.ok(&[&["exec", "box"], &show[..]].concat());
    assert_eq!(ran, "sandbox sandbox\n/usr\nuser\n/home/user\n");
    let options = ["exec", "-e", "BOTH=exec", "-e", "NEW=a=b c", "-w", "/tmp", "-u", "root", "box"];
    assert_eq!(home.ok(&[&options[..], &show[..]].concat()), "sandbox exec a=b c\n/tmp\nroot\n/root\n");
    assert_eq!(home.ok(&["exec", "-u", "1234:99", "box", "--", "sh", "-c", "id -u; id -g"]), "1234\n99\n");
    assert!(home.fails(&["exec", "-w", "/no/such", "box", "--", "true"], 125).contains("/no/such"));
    assert!(home.fails(&["exec", "-u", "nobody-knows", "box", "--", "true"], 125).contains("nobody-knows"));
    assert!(home.fails(&["exec", "-e", "=x", "box", "--", "true"], 125).contains("Write NAME=value"));
}

#[test]
fn a_command_that_takes_too_long_is_gone() {
    let home = Home::new();
    home.started("box", &[]);
    // It does not go by itself, and has a child that does not either.
    let script = "trap '' TERM INT HUP; sleep 5551 & sleep 5552; sleep 5553";
    let ran = home.run(&["exec", "--timeout", &patient_seconds(1), "box", "--", "sh", "-c", script]);
    assert!(ran.code == Some(124) && ran.stderr.contains("--timeout"), "{ran:?}");
    until("the command is gone", 5, || !guest_runs(&home, "box", "555"));
}

#[test]
fn the_command_of_a_killed_client_is_gone() {
    let home = Home::new();
    home.started("box", &[]);
    let mut client = spawn(&home, &["exec", "box", "--", "sh", "-c", "sleep 6661; sleep 6662"]);
    until("the command runs", 10, || guest_runs(&home, "box", "6661"));
    client.kill().unwrap();
    client.wait().unwrap();
    until("the command is gone", 5, || !guest_runs(&home, "box", "666"));
    until("its end is recorded", 5, || home.events("box").iter().any(|event| event["event"] == "exec_ended"));
}

#[test]
fn a_megabyte_of_arguments() {
    let home = Home::new();
    home.started("box", &[]);
    let long = "x".repeat(100_000);
    let arguments =
        [&["exec", "box", "--", "sh", "-c", "echo $# ${#5} ${#11}", "sh"], &[long.as_str(); 11][..]];
    assert_eq!(home.ok(&arguments.concat()), "11 100000 100000\n");
    let many = vec!["word"; 80_000];
    let arguments = [&["exec", "box", "--", "sh", "-c", "echo $#", "sh"], many.as_slice()].concat();
    assert_eq!(home.ok(&arguments), "80000\n");
    // Its event stays small, and has the number of bytes.
    let log = fs::read(home.state().join("audit/audit.jsonl")).unwrap();
    assert!(log.len() < 200_000, "{} bytes of audit log", log.len());
    let events = home.events("box");
    assert!(events.iter().any(|event| event["argv_bytes"].as_u64().is_some_and(|bytes| bytes > 1_000_000)));
    home.ok(&["audit", "verify"]);
}

#[test]
fn every_byte_passes_both_ways() {
    let home = Home::new();
    home.started("box", &[]);
    let all: Vec<u8> = (0..=255u8).cycle().take(256 * 1024).collect();
    let mut child = spawn(&home, &["exec", "-i", "box", "--", "cat"]);
    let mut input = child.stdin.take().unwrap();
    let sent = all.clone();
    let writer = std::thread::spawn(move || input.write_all(&sent).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success() && output.stdout == all, "{} bytes", output.stdout.len());

    let argument: Vec<u8> = (1..=255u8).collect();
    let mut command = home.command(&["exec", "box", "--", "printf", "%s"]);
    let output = command.arg(OsStr::from_bytes(&argument)).output().unwrap();
    assert_eq!(output.stdout, argument, "not text, and not changed");
    let mut command = home.command(&["exec"]);
    command.arg("-e").arg(OsStr::from_bytes(b"ODD=\xff\xfe")).args(["box", "--", "printenv", "ODD"]);
    let output = command.output().unwrap();
    // Either as it is, or a clear refusal; never a changed one.
    let refused = output.status.code() == Some(125) && !output.stderr.is_empty();
    assert!(output.stdout == b"\xff\xfe\n" || refused, "{output:?}");
    let odd = OsStr::from_bytes(b"\xffbox");
    let output = home.command(&[OsStr::new("inspect"), odd]).output().unwrap();
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert_eq!(home.exec("box", &["true"]).code, Some(0));
    home.ok(&["audit", "verify"]);
}

#[test]
fn jobs_outlive_their_client() {
    let home = Home::new();
    home.started("box", &[]);
    assert_eq!(
        home.job("box", "echo begun; while ! test -e go; do sleep 0.05; done; echo over; exit 9"),
        "1"
    );
    assert_eq!(home.job("box", "sleep 7771"), "2");
    until("the first one speaks", 5, || home.ok(&["logs", "box"]) == "begun\n");
    assert!(guest_runs(&home, "box", "7771"));
    let running = home.json(&["jobs", "--json", "box"]);
    assert_eq!((&running[0]["exit"], &running[1]["exit"]), (&Value::Null, &Value::Null));
    assert_eq!(running[1]["argv"][2], "sleep 7771");

    home.ok(&["kill", "box", "2", "-s", "TERM"]);
    until("the second one is gone", 5, || !guest_runs(&home, "box", "7771"));
    until("its end is known", 5, || home.json(&["jobs", "--json", "box"])[1]["exit"] == "signal 15");
    assert!(home.fails(&["kill", "box", "77"], 125).contains("77"));

    let mut attached = spawn(&home, &["attach", "box", "1"]);
    // The client is connected before the job goes on: what it prints then has to arrive.
    until("the client is connected", 5, || home.json(&["stats", "--json", "box"])[0]["clients"] != 0);
    sleep(limit(Duration::from_millis(200)));
    home.sh("box", "touch go");
    drop(attached.stdin.take());
    let output = attached.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(9), "an attached client gets the exit code: {output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("over\n"), "{output:?}");
    // The client gets the end at once; the store has it a moment later.
    until("its end is known", 5, || home.json(&["jobs", "--json", "box"])[0]["exit"] == "code 9");
    assert_eq!(home.ok(&["logs", "--job", "1", "box"]), "begun\nover\n");
    assert_eq!(home.ok(&["logs", "box", "1"]), "begun\nover\n");
    assert_eq!(home.ok(&["logs", "--job", "2", "box"]), "");
}

#[test]
fn logs_from_the_end_since_a_time_and_as_they_come() {
    let home = Home::new();
    home.started("box", &[]);
    home.job("box", "seq 1 100; while ! test -e on; do sleep 0.05; done; echo late; while ! test -e go; do sleep 0.05; done; echo last");
    until("the first part is there", 5, || home.ok(&["logs", "box"]).ends_with("100\n"));
    assert_eq!(home.ok(&["logs", "--tail", "3", "box"]), "98\n99\n100\n");
    assert_eq!(home.ok(&["logs", "--tail", "0", "box"]), "");
    assert_eq!(home.ok(&["logs", "box"]).lines().count(), 100);
    let records = home.json(&["logs", "--json", "box"]);
    let first = records[0]["time_unix_ns"].as_u64().unwrap();
    // Points in time are whole seconds.
    sleep(Duration::from_secs(2));
    home.sh("box", "touch on");
    until("the late part is there", 10, || home.ok(&["logs", "box"]).ends_with("late\n"));
    let since = format!("{}", first / 1_000_000_000 + 2);
    assert_eq!(home.ok(&["logs", "--since", &since, "box"]), "late\n");
    assert_eq!(home.ok(&["logs", "--since", "1h", "box"]).lines().count(), 101);
    assert!(home.fails(&["logs", "--since", "yesterday", "box"], 125).contains("yesterday"));

    let mut follower = spawn(&home, &["logs", "-f", "--tail", "1", "box"]);
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "late");
    home.sh("box", "touch go");
    assert_eq!(lines.next().unwrap().unwrap(), "last");
    home.ok(&["kill", "box"]);
    assert!(lines.next().is_none(), "following ends with the sandbox");
    follower.wait().unwrap();
}

#[test]
fn endless_output_of_a_job_stays_within_its_file() {
    let home = Home::new();
    home.started("box", &["--log-size", "1M"]);
    home.job("box", "yes $(seq 1 200)");
    let folder = home.state().join("sandboxes").join(home.inspect("box")["id"].as_str().unwrap());
    let sizes = || {
        ["output.ring", "console.ring"]
            .map(|name| fs::metadata(folder.join(name)).unwrap().len())
            .iter()
            .sum::<u64>()
    };
    until("there is much output", 30, || home.ok(&["logs", "box"]).len() > 200_000);
    // Long enough for several times as much as fits.
    let deadline = Instant::now() + limit(Duration::from_secs(3));
    while Instant::now() < deadline {
        assert!(sizes() <= (1 << 20) + (64 << 10), "{} bytes", sizes());
        sleep(Duration::from_millis(100));
    }
    let kept = home.ok(&["logs", "box"]);
    assert!(kept.len() > 200_000 && kept.len() <= 1 << 20, "{} bytes are kept", kept.len());
    assert!(kept.contains("199 200"), "the newest is kept");
    assert_eq!(home.exec("box", &["true"]).code, Some(0));
}

#[test]
fn a_sandbox_that_does_not_run_says_so() {
    let home = Home::new();
    home.create("box", &[]);
    let error = home.fails(&["exec", "box", "--", "true"], 125);
    assert!(error.contains("`box` is created") && error.contains("bathy start box"), "{error}");
    home.ok(&["start", "box"]);
    home.ok(&["stop", "-t", "1", "box"]);
    assert!(home.fails(&["exec", "box", "--", "true"], 125).contains("`box` is stopped"));
    assert!(home.fails(&["attach", "box"], 125).contains("no job 0"));
    assert!(home.fails(&["kill", "box"], 125).contains("stopped"));
    assert!(home.fails(&["pause", "box"], 125).contains("stopped"));
    assert!(home.fails(&["exec", "boxx", "--", "true"], 125).contains("did you mean `box`?"));
    assert_eq!(home.ok(&["logs", "box"]), "");
}

#[test]
fn a_full_guest_disk_is_named_and_the_sandbox_lives() {
    let home = Home::new();
    home.started("small", &["--disk", "16M"]);
    let filled = home.exec("small", &["sh", "-c", "cat /dev/zero > big"]);
    assert!(filled.code == Some(1) && filled.stderr.contains("No space left on device"), "{filled:?}");
    let file = home.path().join("file");
    fs::write(&file, vec![7u8; 4 << 20]).unwrap();
    let error = home.fails(&["cp", file.to_str().unwrap(), "small:/home/user/more"], 125);
    assert!(error.contains("disk is full"), "{error}");
    assert_eq!(home.exec("small", &["test", "-e", "more"]).code, Some(1), "nothing half is left");
    home.ok(&["restart", "-t", "1", "small"]);
    home.sh("small", "rm big; echo alive > word");
    assert_eq!(home.sh("small", "cat word"), "alive\n");
}

#[test]
fn a_guest_that_does_not_answer_is_reported_and_can_be_killed() {
    let home = Home::new();
    home.started("deaf", &[]);
    let guest = home.guest("deaf");
    signal(guest, Signal::STOP);
    let ran = home.exec("deaf", &["true"]);
    assert_eq!(ran.code, Some(125), "{ran:?}");
    assert!(ran.stderr.contains("answer"), "{ran:?}");
    assert!(
        ran.took > Duration::from_secs(5) && ran.took < promptly(Duration::from_secs(60)),
        "{:?}",
        ran.took
    );
    assert_eq!(home.status("deaf"), "running");
    let killed = home.json(&["kill", "--json", "deaf"])[0].take();
    assert_eq!((&killed["id"], &killed["name"]), (&home.inspect("deaf")["id"], &"deaf".into()), "{killed}");
    assert!(!is_alive(guest));
    home.ok(&["start", "deaf"]);
    assert_eq!(home.exec("deaf", &["true"]).code, Some(0));
}
