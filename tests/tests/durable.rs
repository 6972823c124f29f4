//! Disks stay: whatever happens to the store, and whatever else lies in the folder of sandboxes, no command but `rm` removes one.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use bathy_tests::kept::{Home, is_alive, signal, until};
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use serde_json::Value;

/// Options of a sandbox that starts quickly.
const SMALL: [&str; 4] = ["--memory", "128M", "--disk", "64M"];

fn folders(home: &Home) -> PathBuf {
    home.state().join("sandboxes")
}

/// Makes a folder look old: whatever removed left-overs by their age would remove it now.
fn age(folder: &Path) {
    let long_ago = SystemTime::now() - Duration::from_secs(3600);
    File::open(folder).unwrap().set_times(FileTimes::new().set_modified(long_ago)).unwrap();
}

/// Everything that lists sandboxes. Each of these removed disks once.
fn list_in_every_way(home: &Home) {
    home.ok(&["ls"]);
    home.ok(&["ps"]);
    home.ok(&["stats"]);
    home.ok(&["repl", "ls"]);
    let requests = [
        r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#,
        r#"{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"sandbox_list","arguments":{}}}"#,
    ];
    let mut mcp = home.command(&["mcp"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut input = mcp.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, format!("{}\n", requests.join("\n")).as_bytes()).unwrap();
    let mut output = std::io::BufReader::new(mcp.stdout.take().unwrap());
    let mut answers = String::new();
    while !answers.contains("\"id\":2") {
        assert_ne!(std::io::BufRead::read_line(&mut output, &mut answers).unwrap(), 0, "{answers}");
    }
    assert!(answers.contains("sandboxes"), "{answers}");
    drop(input);
    mcp.wait().unwrap();
}

/// The line of `ls` for the sandbox with this id.
fn listed(home: &Home, id: &str) -> Option<Value> {
    let all = home.json(&["ls", "--json"]);
    all.as_array().unwrap().iter().find(|sandbox| sandbox["id"] == id).cloned()
}

/// A stopped sandbox `web` with a file on its disk and a denial; its id.
fn stopped_sandbox(home: &Home) -> String {
    let id = home.create("web", &[&SMALL[..], &["--label", "team=sea"]].concat());
    home.ok(&["start", "web"]);
    home.sh("web", "echo precious > ~/file && sync");
    home.ok(&["policy", "deny", "web", "evil.example"]);
    home.ok(&["stop", "-t", "1", "web"]);
    id
}

/// The sandbox `web` is as `stopped_sandbox` left it, and works.
fn is_as_it_was(home: &Home, name: &str) {
    let record = home.inspect(name);
    assert_eq!(record["spec"]["labels"]["team"], "sea");
    assert!(record["spec"]["network"].to_string().contains("deny evil.example"), "{record}");
    home.ok(&["start", name]);
    assert_eq!(home.sh(name, "cat ~/file"), "precious\n");
    home.ok(&["stop", "-t", "1", name]);
}

#[test]
fn a_store_that_was_moved_away_takes_no_disk_with_it() {
    let home = Home::new();
    let id = stopped_sandbox(&home);
    fs::rename(home.state().join("store.db"), home.state().join("moved")).unwrap();
    age(&folders(&home).join(&id));
    list_in_every_way(&home);
    assert_eq!(listed(&home, &id).unwrap()["status"], "orphaned");
    let ls = home.run(&["ls"]);
    assert!(ls.stdout.contains("orphaned") && ls.stderr.contains("bathy adopt web"), "{ls:?}");
    let refused = home.fails(&["start", "web"], 125);
    assert!(refused.contains("`bathy adopt web`"), "{refused}");
    assert_eq!(home.inspect("web")["status"], "orphaned");

    assert_eq!(home.ok(&["adopt", "web"]), "web\n");
    assert_eq!(listed(&home, &id).unwrap()["status"], "stopped");
    assert!(home.fails(&["adopt", "web"], 125).contains("already"));
    is_as_it_was(&home, "web");
    home.ok(&["rm", "web"]);
    assert_eq!(fs::read_dir(folders(&home)).unwrap().count(), 0);
    home.ok(&["audit", "verify"]);
    let events: Vec<_> = home.events(&id).iter().map(|event| event["event"].clone()).collect();
    assert!(events.contains(&"sandbox_adopted".into()), "{events:?}");
}

/// The commands in the message are run here to the letter.
#[test]
fn what_the_message_about_a_damaged_store_advises_works() {
    let home = Home::new();
    stopped_sandbox(&home);
    let store = home.state().join("store.db");
    fs::write(&store, vec![0x5a; 20_000]).unwrap();
    let message = home.fails(&["ls"], 125);
    assert!(
        message.contains(&format!("The store {} is damaged. Move it away", store.display())),
        "{message}"
    );
    for part in ["start with an empty one", "`bathy ls` lists them", "`bathy adopt` restores them"] {
        assert!(message.contains(part), "{message}");
    }
    fs::rename(&store, home.path().join("away")).unwrap();
    assert!(home.ok(&["ls"]).contains("web"));
    home.ok(&["adopt", "web"]);
    is_as_it_was(&home, "web");
}

/// The log that a store leaves when it is moved away belongs to no other store.
#[test]
fn the_log_of_a_store_that_was_moved_away_is_not_taken_for_the_new_ones() {
    let home = Home::new();
    let id = home.started("web", &SMALL);
    let store = home.state().join("store.db");
    assert!(home.state().join("store.db-wal").exists(), "a running sandbox has the store open");
    fs::rename(&store, home.path().join("away")).unwrap();
    assert_eq!(listed(&home, &id).unwrap()["status"], "orphaned");
    // It runs still, and can be taken back as it is.
    assert!(home.ok(&["ls"]).contains("orphaned, running"));
    let refused = home.fails(&["rm", "web"], 125);
    assert!(refused.contains("is running") && refused.contains("bathy rm -f web"), "{refused}");
    home.ok(&["adopt", "web"]);
    assert_eq!(home.status("web"), "running");
    assert_eq!(home.sh("web", "echo here"), "here\n");
    // Its monitor has the old store open, and takes what is denied from beside the disk.
    home.ok(&["policy", "deny", "web", "192.0.2.7"]);
    let script = "curl -sS --max-time 5 http://192.0.2.7/ 2>&1; true";
    home.sh("web", script);
    let denied = || {
        home.events("web")
            .iter()
            .any(|event| event["event"] == "net_denied" && event["rule"].to_string().contains("192.0.2.7"))
    };
    until("the denial is obeyed and recorded", 10, denied);
    home.ok(&["stop", "-t", "1", "web"]);
    assert_eq!(home.inspect("web")["end_cause"], "it was stopped");
    home.ok(&["start", "web"]);
    fs::rename(&store, home.path().join("away")).unwrap();
    home.ok(&["rm", "-f", "web"]);
    assert_eq!(fs::read_dir(folders(&home)).unwrap().count(), 0);
    assert!(home.processes().is_empty());
}

#[test]
fn an_older_store_that_was_brought_back_takes_no_disk_with_it() {
    let home = Home::new();
    let id = stopped_sandbox(&home);
    let gone = home.create("gone", &SMALL);
    let backup = home.path().join("backup");
    fs::copy(home.state().join("store.db"), &backup).unwrap();
    home.ok(&["rm", "gone"]);
    let young = home.create("young", &SMALL);
    home.ok(&["policy", "deny", "web", "private"]);
    // Nothing has the store open: all of it is in the one file.
    assert!(!home.state().join("store.db-wal").exists());
    fs::copy(&backup, home.state().join("store.db")).unwrap();
    age(&folders(&home).join(&young));
    list_in_every_way(&home);
    assert_eq!(listed(&home, &young).unwrap()["status"], "orphaned");
    assert_eq!(listed(&home, &gone).unwrap()["status"], "lost");
    let refused = home.fails(&["start", "gone"], 125);
    assert!(refused.contains("is missing") && refused.contains("bathy rm gone"), "{refused}");
    home.ok(&["rm", "gone"]);
    home.ok(&["adopt", "young"]);
    home.ok(&["start", "young"]);
    // The older store does not know the last denial. What stands beside the disk does.
    is_as_it_was(&home, "web");
    let policy = home.inspect("web")["spec"]["network"].to_string();
    assert!(policy.contains("deny private"), "{policy}");
    assert_eq!(home.status(&id), "stopped");
}

/// According to an older store the sandbox does not run, but it does.
#[test]
fn a_sandbox_that_runs_is_known_to_run_whatever_the_store_says() {
    let home = Home::new();
    home.create("web", &[&SMALL[..], &["--allow", "192.0.2.0/24"]].concat());
    let backup = home.path().join("backup");
    fs::copy(home.state().join("store.db"), &backup).unwrap();
    let bring_back = || {
        for end in ["-wal", "-shm"] {
            fs::remove_file(home.state().join(format!("store.db{end}"))).unwrap();
        }
        fs::copy(&backup, home.state().join("store.db")).unwrap();
    };
    home.ok(&["start", "web"]);
    home.ok(&["policy", "deny", "web", "192.0.2.1"]);
    bring_back();
    assert_eq!(home.status("web"), "running");
    assert_eq!(home.sh("web", "echo here"), "here\n");
    // A further denial goes on from what holds, not from what the older store knew.
    home.ok(&["policy", "deny", "web", "192.0.2.2"]);
    let policy = home.inspect("web")["spec"]["network"].to_string();
    assert!(policy.contains("deny 192.0.2.1") && policy.contains("deny 192.0.2.2"), "{policy}");
    bring_back();
    home.ok(&["stop", "-t", "1", "web"]);
    assert!(home.processes().is_empty());
    assert_eq!(home.status("web"), "stopped");
    home.ok(&["start", "web"]);
    bring_back();
    home.ok(&["rm", "-f", "web"]);
    assert!(home.processes().is_empty());
}

#[test]
fn a_denial_for_a_sandbox_without_a_network_holds_already() {
    let home = Home::new();
    home.started("web", &[&SMALL[..], &["--net", "none"]].concat());
    home.ok(&["policy", "deny", "web", "private"]);
    let refused = home.fails(&["policy", "set", "web", "public"], 125);
    assert!(refused.contains("without a network"), "{refused}");
}

#[test]
fn a_copy_in_the_folder_of_sandboxes_stays_and_can_become_one() {
    let home = Home::new();
    let id = stopped_sandbox(&home);
    let copy = folders(&home).join(format!("{id}.bak"));
    let copied = Command::new("cp").arg("-a").args([&folders(&home).join(&id), &copy]).status();
    assert!(copied.unwrap().success());
    fs::create_dir(folders(&home).join("abc.bak")).unwrap();
    fs::write(folders(&home).join("abc.bak/notes"), "mine").unwrap();
    for folder in ["abc.bak", &format!("{id}.bak")] {
        age(&folders(&home).join(folder));
    }
    list_in_every_way(&home);
    assert_eq!(fs::read(folders(&home).join("abc.bak/notes")).unwrap(), b"mine");
    assert!(copy.join("disk").exists());
    assert!(home.fails(&["adopt", "abc.bak"], 125).contains("There is no sandbox"), "it has no disk");

    // The copy has the name of the sandbox that it was made of. The commands in the hint apply to the copy.
    let name = format!("{id}.bak");
    let hints = [home.run(&["ls"]).stderr, home.fails(&["start", &name], 125)];
    for hint in hints {
        assert!(
            hint.contains(&format!("bathy adopt {name}")) && hint.contains(&format!("bathy rm {name}")),
            "{hint}"
        );
        assert!(!hint.contains("web"), "{hint}");
    }
    let adopted = home.run(&["adopt", &name]);
    assert_eq!(adopted.code, Some(0), "{adopted:?}");
    assert!(adopted.stderr.contains("there is a sandbox `web` already"), "{adopted:?}");
    let new = adopted.stdout.trim();
    assert_ne!(new, id);
    home.ok(&["start", &id]);
    home.sh(&id, "rm ~/file && sync");
    is_as_it_was(&home, new);
    home.ok(&["rm", "-f", &id]);
    assert_eq!(fs::read_dir(folders(&home)).unwrap().count(), 2, "the copy and what was never ours");
}

#[test]
fn one_folder_that_cannot_be_used_keeps_no_other_from_being_listed() {
    let home = Home::new();
    let other = home.create("other", &SMALL);
    let id = home.started("web", &SMALL);
    let (monitor, keeper) = (home.monitor("web"), home.keeper("web"));
    for pid in [monitor, keeper] {
        signal(pid, Signal::KILL);
    }
    until("both end", 10, || !is_alive(monitor) && !is_alive(keeper));
    let life = folders(&home).join(&id).join("life");
    fs::remove_file(&life).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &life).unwrap();
    let ls = home.run(&["ls"]);
    assert!(ls.stdout.contains("unusable") && ls.stdout.contains(&other), "{ls:?}");
    assert!(ls.stderr.contains("warning") && ls.stderr.contains(&id), "{ls:?}");
    fs::remove_file(&life).unwrap();
    assert_eq!(home.status("web"), "dead");
}

/// As a user does whose disk is too small for all of them.
#[test]
fn a_sandbox_that_was_moved_elsewhere_and_linked_works_and_its_disk_stays() {
    let home = Home::new();
    let id = stopped_sandbox(&home);
    let elsewhere = home.path().join("elsewhere");
    fs::rename(folders(&home).join(&id), &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, folders(&home).join(&id)).unwrap();
    is_as_it_was(&home, "web");
    let removed = home.run(&["rm", "web"]);
    assert_eq!(removed.code, Some(0), "{removed:?}");
    assert!(removed.stderr.contains(&format!("its files stay in {}", elsewhere.display())), "{removed:?}");
    assert!(elsewhere.join("disk").exists() && listed(&home, &id).is_none());
    assert_eq!(fs::read_dir(folders(&home)).unwrap().count(), 0);
}

/// What matters beside the disk is missing, as in the folders of earlier versions.
#[test]
fn a_disk_of_which_nothing_else_is_known_gets_no_network() {
    let home = Home::new();
    let id = stopped_sandbox(&home);
    fs::remove_file(folders(&home).join(&id).join("sandbox.json")).unwrap();
    fs::remove_file(home.state().join("store.db")).unwrap();
    let adopted = home.run(&["adopt", &id]);
    assert_eq!(adopted.code, Some(0), "{adopted:?}");
    assert!(adopted.stderr.contains("no network"), "{adopted:?}");
    let record = home.inspect(&id);
    assert_eq!(record["spec"]["network"]["preset"], "none", "{record}");
    assert_eq!(record["spec"]["disk"], 64 << 20, "{record}");
    home.ok(&["start", &id]);
    assert_eq!(home.sh(&id, "cat ~/file"), "precious\n");
    // From its next start on it is described again.
    assert!(folders(&home).join(&id).join("sandbox.json").exists());
}

#[test]
fn a_repl_is_adopted_as_one() {
    let home = Home::new();
    home.ok(&["repl", "new", "calc", "--memory", "128M"]);
    home.ok(&["repl", "run", "calc", "-c", "open('kept', 'w').write('1')"]);
    home.ok(&["stop", "-t", "1", "calc"]);
    fs::remove_file(home.state().join("store.db")).unwrap();
    assert!(!home.ok(&["repl", "ls"]).contains("calc"));
    home.ok(&["adopt", "calc"]);
    assert!(home.ok(&["repl", "ls"]).contains("calc"));
    assert!(home.ok(&["repl", "run", "calc", "-c", "print(open('kept').read())"]).contains('1'));
}

/// Only what has the name of something unfinished is swept, and only when no command is at work in it.
#[test]
fn what_interrupted_commands_leave_is_swept() {
    let home = Home::new();
    let id = home.create("web", &SMALL);
    let make = |name: &str| {
        let folder = folders(&home).join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("disk"), "x").unwrap();
        age(&folder);
        folder
    };
    let left = [make(".new-aaaaaaaaaaaa"), make(".removed-bbbbbbbbbbbb")];
    let at_work = [make(".new-cccccccccccc"), make(".removed-dddddddddddd")];
    let locks: Vec<_> = at_work
        .iter()
        .map(|folder| {
            let life = File::create(folder.join("life")).unwrap();
            flock(&life, FlockOperation::LockExclusive).unwrap();
            age(folder);
            life
        })
        .collect();
    home.ok(&["ls"]);
    assert!(left.iter().all(|folder| !folder.exists()));
    assert!(at_work.iter().all(|folder| folder.exists()));
    drop(locks);
    home.ok(&["ls"]);
    assert!(at_work.iter().all(|folder| !folder.exists()));
    assert_eq!(home.status(&id), "created");
}

/// A removal that was interrupted after the sandbox lost its name goes on by itself.
#[test]
fn a_removal_that_was_interrupted_is_finished() {
    let home = Home::new();
    let id = home.create("web", &SMALL);
    let folder = folders(&home).join(&id);
    fs::rename(&folder, folders(&home).join(format!(".removed-{id}"))).unwrap();
    assert_eq!(home.ok(&["ls", "-q"]), "");
    assert_eq!(fs::read_dir(folders(&home)).unwrap().count(), 0);
    let events = home.events(&id);
    assert_eq!(events.last().unwrap()["event"], "sandbox_removed");
    home.create("web", &SMALL);
}

/// A `create` that is killed at any moment leaves a whole sandbox or nothing, and what it leaves never turns into the other.
#[test]
fn a_create_that_is_killed_leaves_a_whole_sandbox_or_nothing() {
    let home = Home::new();
    home.create("first", &SMALL);
    for delay in 0..20 {
        let mut create = home.command(&[&["create"][..], &SMALL].concat()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        create.kill().unwrap();
        create.wait().unwrap();
    }
    for folder in fs::read_dir(folders(&home)).unwrap() {
        age(&folder.unwrap().path());
    }
    for sandbox in home.json(&["ls", "--json"]).as_array().unwrap() {
        let id = sandbox["id"].as_str().unwrap();
        assert_eq!(sandbox["status"], "created", "{sandbox}");
        home.ok(&["start", id]);
        home.ok(&["rm", "-f", id]);
    }
    assert_eq!(fs::read_dir(folders(&home)).unwrap().count(), 0);
}

/// How it ended is known although neither its monitor nor anything else could tell the store.
#[test]
fn an_ending_that_the_store_did_not_take_is_known_all_the_same() {
    let home = Home::new();
    home.started("web", &SMALL);
    let monitor = home.monitor("web");
    let backup = home.path().join("backup");
    // The row as it is while the sandbox runs.
    fs::create_dir(&backup).unwrap();
    for name in ["store.db", "store.db-wal"] {
        fs::copy(home.state().join(name), backup.join(name)).unwrap();
    }
    home.ok(&["stop", "-t", "1", "web"]);
    until("its monitor ends", 10, || !is_alive(monitor));
    for name in ["store.db", "store.db-wal"] {
        fs::copy(backup.join(name), home.state().join(name)).unwrap();
    }
    let record = home.inspect("web");
    assert_eq!((&record["status"], &record["end_cause"]), (&"stopped".into(), &"it was stopped".into()));
    home.ok(&["start", "web"]);
    // One that was killed cannot tell, and nothing of the last end is taken for its.
    let (monitor, keeper) = (home.monitor("web"), home.keeper("web"));
    for pid in [monitor, keeper] {
        signal(pid, Signal::KILL);
    }
    until("both end", 10, || !is_alive(monitor) && !is_alive(keeper));
    assert_eq!(home.status("web"), "dead");
}
