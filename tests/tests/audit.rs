//! The audit log: changes are detected, and its text cannot control a terminal.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use bathy_tests::kept::{Home, until};
use bathy_tests::{bathy, finish};
use serde_json::Value;

/// A home with a dozen events, and where their file is.
fn recorded() -> (Home, PathBuf) {
    let home = Home::new();
    for number in 0..4 {
        let name = format!("box-{number}");
        home.create(&name, &["--disk", "16M"]);
        home.ok(&["rm", &name]);
    }
    home.create("box", &[]);
    home.ok(&["audit", "verify"]);
    let file = home.state().join("audit/audit.jsonl");
    (home, file)
}

/// What `audit verify` finds wrong: the line, and the whole report.
#[track_caller]
fn finding(home: &Home) -> (Option<usize>, Value) {
    let ran = home.run(&["audit", "verify", "--json"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["whole"], false);
    (report["line"].as_u64().and_then(|line| usize::try_from(line).ok()), report)
}

#[test]
fn a_flipped_bit_anywhere_is_found_and_its_line_named() {
    let (home, file) = recorded();
    let original = fs::read(&file).unwrap();
    let count = original.iter().filter(|byte| **byte == b'\n').count();
    assert_eq!(count, 9);
    let ends = original.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at);
    let places = (0..original.len()).step_by(11).chain(ends).chain([original.len() - 2]);
    for place in places.collect::<std::collections::BTreeSet<_>>() {
        let bit = 1 << (place % 7);
        let mut changed = original.clone();
        changed[place] ^= bit;
        fs::write(&file, &changed).unwrap();
        let line = 1 + original[..place].iter().filter(|byte| **byte == b'\n').count();
        let (named, report) = finding(&home);
        // Without its end, a line is one with the next, or is no line any more.
        let lines = if original[place] == b'\n' { line - 1..=line + 1 } else { line..=line };
        assert!(named.is_some_and(|named| lines.contains(&named)), "byte {place} of line {line}: {report}");
    }
    fs::write(&file, &original).unwrap();
    home.ok(&["audit", "verify"]);
    let mut changed = original;
    let place = changed.iter().position(|byte| *byte == b'4').unwrap();
    changed[place] = b'5';
    fs::write(&file, &changed).unwrap();
    let ran = home.run(&["audit", "verify"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stdout.contains("audit.jsonl line 1 was changed"), "{ran:?}");
}

#[test]
fn the_share_of_a_processor_is_recorded_for_every_kind_of_sandbox() {
    let home = Home::new();
    home.ok(&["run", "--cpu-quota", "0.9", "--", "true"]);
    home.ok(&["create", "--name", "kept", "--cpu-quota", "0.8", "--disk", "16M"]);
    let text = fs::read_to_string(home.state().join("audit/audit.jsonl")).unwrap();
    for share in ["0.9", "0.8"] {
        assert_eq!(text.matches(&format!("\"cpu\":\"{share}\"")).count(), 1, "{share}: {text}");
    }
}

#[test]
fn removed_moved_and_inserted_lines_are_found() {
    let (home, file) = recorded();
    let original = fs::read_to_string(&file).unwrap();
    let lines: Vec<&str> = original.lines().collect();
    let write = |lines: &[&str]| {
        fs::write(&file, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap()
    };
    for removed in 0..lines.len() {
        let mut left = lines.clone();
        left.remove(removed);
        write(&left);
        let (named, report) = finding(&home);
        // The line that is in its place now, or, after the last one, the one before.
        assert_eq!(named, Some((removed + 1).min(left.len())), "{report}");
    }
    for moved in 0..lines.len() - 1 {
        let mut order = lines.clone();
        order.swap(moved, moved + 1);
        write(&order);
        assert_eq!(finding(&home).0, Some(moved + 1));
    }
    let mut doubled = lines.clone();
    doubled.insert(4, lines[3]);
    write(&doubled);
    assert_eq!(finding(&home).0, Some(5));
    write(&[]);
    assert_eq!(finding(&home).0, Some(0));
    write(&lines);
    home.ok(&["audit", "verify"]);

    // The head has its length: the file has to be there.
    let head = home.state().join("audit/head.json");
    let kept = fs::read(&head).unwrap();
    fs::remove_file(&head).unwrap();
    assert!(finding(&home).1["error"].as_str().unwrap().contains("head.json was removed"));
    fs::write(&head, b"{}").unwrap();
    assert!(finding(&home).1["error"].as_str().unwrap().contains("head.json was changed"));
    fs::write(&head, kept).unwrap();
    home.ok(&["audit", "verify"]);
}

#[test]
fn an_older_log_is_no_replacement_for_one_that_was_noted_down() {
    let (home, file) = recorded();
    let head = home.state().join("audit/head.json");
    let (old_file, old_head) = (fs::read(&file).unwrap(), fs::read(&head).unwrap());
    home.create("later", &[]);
    let report = home.json(&["audit", "verify", "--json"]);
    let anchor = format!("{}:{}", report["last"], report["hash"].as_str().unwrap());
    home.ok(&["audit", "verify", "--anchor", &anchor]);
    fs::write(&file, old_file).unwrap();
    fs::write(&head, old_head).unwrap();
    home.ok(&["audit", "verify"]);
    assert_eq!(home.run(&["audit", "verify", "--anchor", &anchor]).code, Some(1));
    // The sandbox that is in no event is still there to be removed.
    home.ok(&["rm", "later"]);
}

/// What a program prints to a terminal, as bytes.
fn on_a_terminal(home: &Home, arguments: &str) -> String {
    let line = format!("'{}' {arguments}", bathy().display());
    let mut command = Command::new("script");
    command
        .args(["-qec", &line, "/dev/null"])
        .env("XDG_STATE_HOME", home.path())
        .env("TERM", "xterm-256color");
    let ran = finish(command.current_dir(home.path()), b"");
    assert_eq!(ran.code, Some(0), "{arguments}: {ran:?}");
    ran.stdout
}

/// Bytes that a terminal obeys: all control characters but those that only end lines and move to columns.
fn commands_in(text: &str) -> Vec<char> {
    text.chars().filter(|letter| letter.is_control() && !"\n\r\t".contains(*letter)).collect()
}

/// Undoes all attributes of text.
const RESET: &str = "\u{1b}[0m";

/// The attributes that the guest's harmless colour and our own tables consist of.
const EXPECTED: [&str; 7] = ["0", "1", "2", "31", "32", "33", "36"];

/// The text without the attributes of text that may pass to a terminal. Any other is a defect.
fn without_colours(text: &str) -> String {
    let mut pieces = text.split("\u{1b}[");
    let mut rest = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let numbers = piece.trim_start_matches(|letter: char| letter.is_ascii_digit() || letter == ';');
        let (numbers, after) = piece.split_at(piece.len() - numbers.len());
        match after.strip_prefix('m').filter(|_| EXPECTED.contains(&numbers)) {
            Some(after) => rest.push_str(after),
            None => rest.extend(["\u{1b}[", piece]),
        }
    }
    rest
}

#[test]
fn c1_no_escape_sequence_of_a_guest_reaches_a_terminal() {
    let home = Home::new();
    let evil = "\u{1b}]0;owned\u{7}\u{1b}[31m\u{1b}[8m\u{9b}2J\u{8}\u{202e}";
    // The main command's name, its arguments and what it prints.
    let script = format!("printf '%s\\n' 'main {evil}'; exec sleep 1000");
    home.started("box", &["--label", "plain=label", "--", "sh", "-c", &script, evil]);
    home.exec("box", &[evil]);
    home.exec("box", &["sh", "-c", "exit 3", evil]);
    home.ok(&["exec", "-d", "-e", "X=1", "box", "--", "sh", "-c", &script, evil]);
    home.sh("box", &format!("mkdir '{evil}'; echo x > '{evil}/{evil}'"));
    home.ok(&["cp", "-q", &format!("box:/home/user/{evil}"), home.path().join("copy").to_str().unwrap()]);
    home.run(&["cp", &format!("box:/home/user/no{evil}"), "copy"]);
    home.root_sh("box", &format!("printf '%s\\n' 'console {evil}' > /dev/console"));
    until("both have printed", 5, || home.ok(&["logs", "box"]).matches("main").count() == 2);

    // To a pipe, a command's output is what it is; everything else is text of ours.
    assert!(home.ok(&["logs", "box"]).contains(evil), "the guest did send it");
    for arguments in [
        vec!["events"],
        vec!["events", "--json"],
        vec!["jobs", "box"],
        vec!["jobs", "--json", "box"],
        vec!["ls"],
        vec!["ls", "--json"],
        vec!["inspect", "box"],
        vec!["stats", "box"],
        vec!["audit", "verify"],
    ] {
        let printed = home.ok(&arguments);
        assert_eq!(commands_in(&printed), [], "{arguments:?}: {printed:?}");
    }
    for arguments in [
        "events",
        "events --json",
        "events --sandbox box",
        "jobs box",
        "jobs --json box",
        "logs box",
        "logs -t box",
        "logs --json box",
        "logs --console box",
        "logs --tail 1 box",
        "ls",
        "ps",
        "inspect box",
        "stats box",
        "exec box -- sh -c 'cat /proc/[0-9]*/cmdline; ls'",
    ] {
        let printed = on_a_terminal(&home, arguments);
        assert!(!printed.is_empty(), "{arguments}");
        assert_eq!(commands_in(&without_colours(&printed)), [], "{arguments}: {printed:?}");
        // The guest's own colour ends with its output.
        if arguments.starts_with("logs") || arguments.starts_with("exec") {
            assert!(printed.rfind(RESET) >= printed.rfind("\u{1b}[31m"), "{arguments}: {printed:?}");
        }
    }
    let shown = on_a_terminal(&home, "logs box");
    assert!(shown.contains("owned") && shown.contains("\u{1b}[31m"), "text and colour are shown: {shown:?}");
    for failing in [
        vec!["exec", "box", "--", evil],
        vec!["inspect", evil],
        vec!["exec", "-w", evil, "box", "--", "true"],
    ] {
        let ran = home.run(&failing);
        assert_ne!(ran.code, Some(0));
        assert_eq!(commands_in(&ran.stderr), [], "{failing:?}: {ran:?}");
    }
}

#[test]
fn who_did_what_is_recorded() {
    let home = Home::new();
    let id = home.started("box", &[]);
    home.exec("box", &["sh", "-c", "exit 3"]);
    home.job("box", "sleep 1000");
    home.ok(&["kill", "box", "1"]);
    until("the job's end is recorded", 5, || {
        home.events("box").iter().filter(|event| event["event"] == "exec_ended").count() == 2
    });
    home.ok(&["kill", "box"]);
    home.ok(&["rm", "box"]);
    let events = home.events(&id);
    let find = |kind: &str| events.iter().filter(|event| event["event"] == kind).collect::<Vec<_>>();
    let me = rustix::process::geteuid().as_raw();
    for event in &events {
        assert!(event["actor"]["uid"] == me && event["actor"]["pid"].is_u64(), "{event}");
        assert_eq!((&event["sandbox"], &event["name"]), (&id.as_str().into(), &"box".into()));
    }
    let execs = find("exec_started");
    assert_eq!((&execs[0]["argv"][2], &execs[0]["user"]), (&"exit 3".into(), &"user".into()));
    assert_eq!(execs[0]["actor"]["program"], "bathy exec");
    let ended = find("exec_ended").into_iter().find(|event| event["exec"] == execs[0]["exec"]).unwrap();
    assert_eq!(ended["exit"], "code 3");
    let killed: Vec<_> = find("killed").iter().map(|event| event["target"].clone()).collect();
    assert_eq!(killed, ["job 1", "sandbox"]);
    assert_eq!(find("sandbox_removed").len(), 1);
    let later = home.json(&["events", "--json", "--since", "1h"]);
    assert_eq!(later.as_array().unwrap().len(), events.len());
    assert!(
        home.fails(&["events", "--json", "--sandbox", "other"], 125).contains("There is no sandbox other")
    );
}
