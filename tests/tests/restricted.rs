//! `--security restricted`: each part of it is shown to hold a workload back that is not held back without it.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;

use bathy_tests::kept::Home;
use bathy_tests::{Engine, Ran, engine, finish};
use serde_json::Value;

/// What a command is asked to run as: in which sandbox, and with which options of `exec`.
struct Target<'a> {
    home: &'a Home,
    name: &'a str,
    options: &'a [&'a str],
}

impl Target<'_> {
    fn run(&self, options: &[&str], command: &[&str]) -> Ran {
        self.home.run(&[&["exec"], self.options, options, &[self.name, "--"], command].concat())
    }

    fn sh(&self, script: &str) -> Ran {
        self.run(&[], &["sh", "-c", script])
    }

    /// The hexadecimal or decimal number behind a word of `/proc/self/status`.
    fn status(&self, word: &str) -> u64 {
        let message = self.run(&[], &["cat", "/proc/self/status"]).stdout;
        let line = message.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(":\t"));
        u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
    }

    /// Every mount point with its options, the mount's own.
    fn mounts(&self) -> Vec<(String, Vec<String>)> {
        let message = self.run(&[], &["cat", "/proc/self/mountinfo"]).stdout;
        let fields = message.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        fields.map(|f| (f[4].to_owned(), f[5].split(',').map(str::to_owned).collect())).collect()
    }
}

/// The targets where a command is restricted, each with its home, beside one where it is not.
fn restricted_and_not(test: impl Fn(&Target<'_>, &Target<'_>)) {
    let home = Home::new();
    home.started("open", &[]);
    home.started("strict", &["--security", "restricted"]);
    let open = Target { home: &home, name: "open", options: &[] };
    test(&Target { home: &home, name: "strict", options: &[] }, &open);
    test(&Target { home: &home, name: "open", options: &["--security", "restricted"] }, &open);
}

#[test]
fn root_is_refused() {
    restricted_and_not(|restricted, open| {
        for root in ["root", "0", "0:0", "user:root", "1000:0", "4321"] {
            let ran = restricted.run(&["-u", root], &["id", "-u"]);
            assert_eq!(ran.code, Some(125), "{root}: {ran:?}");
            assert!(ran.stderr.contains("restricted"), "{root}: {ran:?}");
            assert_eq!(open.run(&["-u", root], &["true"]).code, Some(0), "{root}");
        }
        assert_eq!(restricted.run(&[], &["id", "-u"]).stdout, "1000\n");
        let other = restricted.run(&["-u", "4321:4321"], &["sh", "-c", "id -u; id -g; id -G"]);
        assert_eq!(other.stdout, "4321\n4321\n4321\n", "{other:?}");
        // Asked for less than the sandbox has, nothing changes.
        let less =
            restricted.home.run(&["exec", "--security", "default", "-u", "root", "strict", "--", "id"]);
        assert_eq!(less.code, Some(125), "{less:?}");
    });
}

#[test]
fn nothing_that_is_executed_gains_a_privilege() {
    // A copy of `id` that belongs to root and is set-user-id, on a disk where that might count.
    let own = "cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id";
    restricted_and_not(|restricted, open| {
        assert_eq!(open.sh("sudo -n id -u").stdout, "0\n");
        let sudo = restricted.sh("sudo -n id -u");
        assert_ne!(sudo.code, Some(0), "{sudo:?}");
        assert!(sudo.stderr.contains("no new privileges"), "{sudo:?}");
        assert_ne!(restricted.sh("su -c 'id -u' root </dev/null").code, Some(0));
        if restricted.name == "open" {
            restricted.home.root_sh("open", own);
            assert_eq!(open.sh("/tmp/id -u").stdout, "0\n");
            assert_eq!(restricted.sh("/tmp/id -u").stdout, "1000\n");
        }
        assert_eq!((restricted.status("NoNewPrivs"), open.status("NoNewPrivs")), (1, 0));
    });
}

#[test]
fn no_capability_is_left() {
    restricted_and_not(|restricted, open| {
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(restricted.status(set), 0, "{set} in {}", restricted.name);
        }
        assert_ne!(open.status("CapBnd"), 0);
        let root = Target { options: &["-u", "root"], ..*open };
        assert_ne!(root.status("CapEff"), 0);
        // What capabilities are for: each works for root, and fails here.
        for needs_one in
            ["mount -t tmpfs none /mnt", "hostname other", "chown root /tmp", "mknod /tmp/n c 1 3"]
        {
            assert_eq!(root.sh(needs_one).code, Some(0), "{needs_one}");
            assert_ne!(restricted.sh(needs_one).code, Some(0), "{needs_one}");
            root.sh("umount /mnt; rm -f /tmp/n");
        }
    });
}

#[test]
fn mounts_give_neither_owners_nor_devices() {
    restricted_and_not(|restricted, open| {
        let mounts = restricted.mounts();
        assert!(mounts.len() >= 7, "{mounts:?}");
        for (point, options) in &mounts {
            let has = |wanted: &str| options.iter().any(|option| option == wanted);
            assert!(has("nosuid"), "{point}: {options:?}");
            // Devices are for the folder that is made for them, and terminals.
            assert!(has("nodev") || ["/dev", "/dev/pts"].contains(&point.as_str()), "{point}: {options:?}");
        }
        let root =
            |target: &Target<'_>| target.mounts().into_iter().find(|(point, _)| point == "/").unwrap().1;
        assert!(root(restricted).contains(&"ro".to_owned()));
        assert!(!root(open).iter().any(|option| ["ro", "nosuid", "nodev"].contains(&option.as_str())));
        // They cannot be taken back, also not from a user namespace where one can be had.
        for back in ["mount -o remount,rw /", "unshare -Urm mount -o remount,rw,suid,dev /"] {
            assert_ne!(restricted.sh(back).code, Some(0), "{back}");
        }
    });
    // A device that is not in that folder: it opens where devices count, and does not where they do not.
    let home = Home::new();
    home.started("open", &[]);
    home.root_sh("open", "mknod -m 666 /tmp/zero c 1 5; mknod -m 666 /opt/zero c 1 5");
    let read = "head -c 3 /tmp/zero | wc -c; head -c 3 /opt/zero | wc -c";
    assert_eq!(home.sh("open", read), "3\n3\n");
    let restricted = home.ok(&["exec", "--security", "restricted", "open", "--", "sh", "-c", read]);
    assert_eq!(restricted, "0\n0\n");
}

#[test]
fn the_root_is_read_only_unless_asked() {
    restricted_and_not(|restricted, open| {
        let write = "echo 1 > \"$HOME/file\"";
        assert_eq!(open.sh(write).code, Some(0));
        let ran = restricted.sh(write);
        assert_ne!(ran.code, Some(0));
        assert!(ran.stderr.contains("Read-only file system"), "{ran:?}");
        // It begins where it can write.
        assert_eq!(restricted.sh("pwd && echo 1 > a.csv && rm a.csv").stdout, "/tmp\n");
        assert_eq!(open.sh("pwd").stdout, "/home/user\n");
        for still in ["/tmp/file", "/dev/shm/file"] {
            assert_eq!(restricted.sh(&format!("echo 1 > {still} && rm {still}")).code, Some(0), "{still}");
        }
    });
    let home = Home::new();
    home.started("strict", &["--security", "restricted", "--writable-root"]);
    home.started("open", &[]);
    let write = "echo kept > ~/file && cat ~/file";
    assert_eq!(home.sh("strict", write), "kept\n");
    let options = ["exec", "--security", "restricted", "--writable-root", "open", "--", "sh", "-c", write];
    assert_eq!(home.ok(&options), "kept\n");
    // The other parts still hold, and one command can be held back further than its sandbox.
    assert_ne!(home.exec("strict", &["sudo", "-n", "true"]).code, Some(0));
    let further = home.run(&["exec", "--security", "restricted", "strict", "--", "sh", "-c", write]);
    assert!(further.stderr.contains("Read-only"), "{further:?}");
}

/// Users inside are kept apart by the processor, or by the one mode of the uml engine that does it.
fn restricted_mode() -> Value {
    if engine() == Engine::Uml { "ptrace".into() } else { Value::Null }
}

#[test]
fn a_restricted_sandbox_keeps_its_users_apart() {
    let home = Home::new();
    home.started("strict", &["--security", "restricted"]);
    home.started("open", &[]);
    let inspected = home.inspect("strict");
    assert_eq!(inspected["spec"]["uml_mode"], restricted_mode(), "{inspected}");
    assert_eq!(inspected["spec"]["security"], "restricted");
    if engine() == Engine::Uml {
        assert_eq!(home.inspect("open")["spec"]["uml_mode"], "seccomp");
    }
    // One user's processes and files are not another's.
    home.ok(&[
        "exec",
        "-d",
        "-u",
        "2001:2001",
        "strict",
        "--",
        "sh",
        "-c",
        "umask 077; echo x > /tmp/own; sleep 99",
    ]);
    let spy = "pid=$(pgrep -u 2001 sleep) && ! cat /tmp/own && ! head -c 1 /proc/$pid/mem && ! ls /proc/$pid/root/ \
        && ! kill $pid && echo apart";
    let message = home.ok(&["exec", "-u", "2002:2002", "strict", "--", "sh", "-c", spy]);
    assert_eq!(message, "apart\n");
    // A user namespace would give anybody every capability in it.
    assert_ne!(home.exec("strict", &["unshare", "-Ur", "true"]).code, Some(0));
    assert_eq!(home.exec("open", &["unshare", "-Ur", "true"]).code, Some(0));
}

#[test]
fn the_operators_floor_holds_for_whatever_is_asked() {
    let home = Home::new();
    // Made before there was a floor.
    home.started("before", &[]);
    let floor = home.path().join("floor.toml");
    fs::write(&floor, "[floor]\nsecurity = \"restricted\"\n").unwrap();
    let under = |arguments: &[&str]| finish(home.command(arguments).env("BATHYSPHERE_CONFIG", &floor), b"");
    let held = |ran: &Ran, what: &str| {
        assert_eq!(ran.code, Some(0), "{what}: {ran:?}");
        assert_eq!(ran.stdout, "1\n0000000000000000\nro\n", "{what}: {ran:?}");
    };
    let look = "sed -n 's/^NoNewPrivs:.//p' /proc/self/status; sed -n 's/^CapBnd:.//p' /proc/self/status; \
        touch ~/x 2>/dev/null && echo rw || echo ro";
    assert_eq!(under(&["create", "--name", "after", "--start"]).code, Some(0));
    assert_eq!(home.inspect("after")["spec"]["security"], "restricted");
    assert_eq!(home.inspect("after")["spec"]["uml_mode"], restricted_mode());
    // It was made so: also without the floor.
    held(&home.exec("after", &["sh", "-c", look]), "a sandbox made under the floor");
    held(&under(&["exec", "before", "--", "sh", "-c", look]), "exec under the floor");
    held(&under(&["run", "--", "sh", "-c", look]), "run under the floor");
    for asked in [["--security", "default"].as_slice(), &[]] {
        held(&under(&[&["run"], asked, &["--", "sh", "-c", look]].concat()), "run that asks for less");
        held(
            &under(&[&["exec"], asked, &["before", "--", "sh", "-c", look]].concat()),
            "exec that asks for less",
        );
    }
    let root = under(&["exec", "-u", "root", "before", "--", "id"]);
    assert_eq!(root.code, Some(125), "{root:?}");
    // Without the floor none of it is so.
    let free = home.exec("before", &["sh", "-c", look]);
    assert!(free.stdout.starts_with("0\n") && free.stdout.ends_with("rw\n"), "{free:?}");
}

#[test]
fn r12_a_floor_that_is_raised_later_holds_for_contexts_that_exist() {
    let home = Home::new();
    home.started("before", &[]);
    let code =
        |context: &[&'static str], code| [&["code", "--sandbox", "before", "-c", code], context].concat();
    let look =
        "import os; kept = 1; print(open('/proc/self/status').read().split('NoNewPrivs:')[1].split()[0])";
    assert_eq!(home.ok(&code(&[], look)), "0\n");
    assert_eq!(home.ok(&code(&["--context", "mine"], look)), "0\n");
    let floor = home.path().join("floor.toml");
    fs::write(&floor, "[floor]\nsecurity = \"restricted\"\n").unwrap();
    let under = |arguments: &[&str]| finish(home.command(arguments).env("BATHYSPHERE_CONFIG", &floor), b"");
    for context in [&[][..], &["--context", "mine"]] {
        let ran = under(&code(context, look));
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(125), ""), "{ran:?}");
        assert!(ran.stderr.contains("fewer restrictions than apply now"), "{ran:?}");
    }
    let other = under(&code(&["--context", "new"], look));
    assert_eq!((other.code, other.stdout.as_str()), (Some(0), "1\n"), "{other:?}");
    // Without the floor the old ones still have their state.
    assert_eq!(home.ok(&code(&[], "print(kept)")), "1\n");
}
