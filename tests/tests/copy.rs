//! Files into and out of sandboxes; a sandbox that wants more than its copy's destination gets nothing.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use bathy_tests::kept::Home;
use serde_json::Value;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

fn digest(path: &Path) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path).unwrap()).unwrap();
    hasher.finalize().to_hex().to_string()
}

/// Everything below a folder: path, kind and content, sorted.
fn listing(folder: &Path) -> Vec<String> {
    fn visit(folder: &Path, prefix: &str, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = format!("{prefix}{}", path.file_name().unwrap().to_string_lossy());
            let data = fs::symlink_metadata(&path).unwrap();
            if data.is_dir() {
                found.push(format!("{name}/"));
                visit(&path, &format!("{name}/"), found);
            } else if data.is_symlink() {
                found.push(format!("{name} -> {}", fs::read_link(&path).unwrap().display()));
            } else {
                assert!(data.is_file(), "{name} is {:?}", data.file_type());
                found.push(format!("{name}: {}", String::from_utf8_lossy(&fs::read(&path).unwrap())));
            }
        }
    }
    let mut found = Vec::new();
    visit(folder, "", &mut found);
    found.sort();
    found
}

fn events_of(home: &Home, name: &str, kind: &str) -> Vec<Value> {
    home.events(name).into_iter().filter(|event| event["event"] == kind).collect()
}

#[test]
fn a_file_both_ways_with_its_mode_and_digest() {
    let home = Home::new();
    home.started("box", &[]);
    let file = home.path().join("file");
    fs::write(&file, (0..=255u8).cycle().take(100_003).collect::<Vec<_>>()).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
    home.ok(&["cp", text(&file), "box:/home/user/in"]);
    assert_eq!(home.sh("box", "stat -c '%a %s %U' in"), "640 100003 user\n");
    // An existing folder receives it under its old name.
    home.ok(&["cp", text(&file), "box:/home/user"]);
    home.ok(&["cp", "-u", "root", text(&file), "box:/root/"]);
    assert_eq!(home.sh("box", "cmp in file && echo same"), "same\n");
    assert_eq!(home.root_sh("box", "stat -c %U /root/file; cmp /root/file /home/user/in"), "root\n");

    let back = home.path().join("back");
    home.sh("box", "chmod 751 in");
    home.ok(&["cp", "box:/home/user/in", text(&back)]);
    assert_eq!(fs::read(&back).unwrap(), fs::read(&file).unwrap());
    assert_eq!(mode(&back), 0o751);
    let wanted = digest(&file);
    for (kind, count) in [("file_in", 3), ("file_out", 1)] {
        let events = events_of(&home, "box", kind);
        assert_eq!(events.len(), count, "{kind}");
        for event in events {
            assert_eq!(
                (&event["digest"], &event["bytes"]),
                (&wanted.as_str().into(), &100_003.into()),
                "{event}"
            );
        }
    }
    // A relative path begins at the user's home; of several sources each keeps its name.
    home.ok(&["cp", text(&file), "box:below"]);
    home.ok(&["cp", "-u", "root", text(&file), "box:below"]);
    assert_eq!(home.root_sh("box", "cmp /root/below /home/user/below && echo same"), "same\n");
    home.sh("box", "mkdir both");
    home.ok(&["cp", text(&file), text(&back), "box:both"]);
    assert_eq!(home.sh("box", "ls both"), "back\nfile\n");
    home.ok(&["cp", "box:both/file", "box:below", text(home.path())]);
    assert_eq!(fs::read(home.path().join("below")).unwrap(), fs::read(&file).unwrap());
    // A file of the same name is replaced, as a whole.
    fs::write(&back, "short").unwrap();
    home.ok(&["cp", text(&back), "box:/home/user/in"]);
    assert_eq!(home.sh("box", "cat in"), "short");
}

#[test]
fn a_tree_both_ways() {
    let home = Home::new();
    home.started("box", &[]);
    let tree = home.path().join("tree");
    fs::create_dir_all(tree.join("deep/er/still")).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    fs::write(tree.join("deep/er/file"), "content").unwrap();
    fs::write(tree.join("öäü €"), "name").unwrap();
    symlink("deep/er/file", tree.join("link")).unwrap();
    for number in 0..300 {
        fs::write(tree.join(format!("deep/{number}")), format!("{number}")).unwrap();
    }
    fs::set_permissions(tree.join("empty"), Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(tree.join("deep/er/file"), Permissions::from_mode(0o501)).unwrap();
    home.ok(&["cp", text(&tree), "box:/home/user/"]);
    let back = home.path().join("back");
    home.ok(&["cp", "box:/home/user/tree", text(&back)]);
    assert_eq!(listing(&back), listing(&tree));
    assert!(listing(&back).len() > 300);
    assert_eq!((mode(&back.join("empty")), mode(&back.join("deep/er/file"))), (0o700, 0o501));
    let (sent, received) = (events_of(&home, "box", "file_in"), events_of(&home, "box", "file_out"));
    assert_eq!(sent[0]["digest"], received[0]["digest"], "the same tree has the same digest");
    assert_eq!(sent[0]["files"], 302);
    home.sh("box", "echo changed > tree/deep/7");
    home.ok(&["cp", "box:/home/user/tree", text(&home.path().join("again"))]);
    assert_ne!(events_of(&home, "box", "file_out")[1]["digest"], received[0]["digest"]);
}

#[test]
fn three_hundred_megabytes_both_ways() {
    let home = Home::new();
    home.started("box", &[]);
    let (large, back) = (home.path().join("large"), home.path().join("back"));
    let mut file = File::create(&large).unwrap();
    // Content of which no part is like another.
    let mut content = blake3::Hasher::new().update(b"large").finalize_xof();
    let mut block = vec![0u8; 1 << 20];
    for _ in 0..300 {
        content.fill(&mut block);
        file.write_all(&block).unwrap();
    }
    drop(file);
    home.ok(&["cp", "-q", text(&large), "box:/home/user/large"]);
    assert_eq!(home.sh("box", "stat -c %s large").trim(), (300u64 << 20).to_string());
    home.ok(&["cp", "-q", "box:/home/user/large", text(&back)]);
    assert_eq!(digest(&back), digest(&large));
    let limited = home.fails(&["cp", "--limit", "10M", "box:/home/user/large", text(&back)], 125);
    assert!(limited.contains("limit"), "{limited}");
    assert_eq!(digest(&back), digest(&large), "a copy that fails leaves what was there");
    let beside: Vec<_> = listing_names(home.path());
    assert!(beside.iter().all(|name| !name.contains("partial")), "{beside:?}");
}

fn listing_names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}

/// A destination, and beside it a place that must stay as it is.
fn destination(home: &Home) -> (PathBuf, PathBuf) {
    let (inside, outside) = (home.path().join("inside"), home.path().join("outside"));
    fs::create_dir(&inside).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("victim"), "untouched").unwrap();
    (inside, outside)
}

#[test]
fn c4_a_hostile_tree_stays_in_its_destination() {
    let home = Home::new();
    home.started("box", &[]);
    let (inside, outside) = destination(&home);
    let out = text(&outside);
    let script = format!(
        "mkdir -p t/sub && cd t && ln -s /etc abs && ln -s {out} out && ln -s ../../outside up && ln -s / root && \
         ln -s {out}/victim victim && ln -s sub within && \
         echo bad > sub/file && chmod 6777 sub/file && mkfifo sub/fifo && echo line > \"$(printf 'a\\nb')\" && \
         echo escape > \"$(printf 'c\\033]0;gotcha\\007')\" && chmod 1777 sub"
    );
    home.sh("box", &script);
    home.root_sh("box", "cd /home/user/t && mknod disk b 8 0 && mknod null c 1 3 && chmod 666 disk null");
    let ran = home.run(&["cp", "box:/home/user/t", text(&inside)]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(!ran.stderr.contains('\u{1b}') && !ran.stderr.contains('\u{7}'), "{ran:?}");
    for (name, why) in [("abs", "absolute"), ("up", "leads out"), ("disk", "device"), ("fifo", "fifo")] {
        let message =
            ran.stderr.lines().any(|line| line.contains(&format!("/{name}: ")) && line.contains(why));
        assert!(message, "{name}: {}", ran.stderr);
    }
    let expected =
        ["t/", "t/a\nb: line\n", "t/c\u{1b}]0;gotcha\u{7}: escape\n", "t/sub/", "t/sub/file: bad\n"];
    let found = listing(&inside);
    assert_eq!(found, [&expected[..], &["t/within -> sub"]].concat());
    assert_eq!((mode(&inside.join("t/sub/file")), mode(&inside.join("t/sub"))), (0o777, 0o777));
    assert_eq!(listing(&outside), ["victim: untouched"]);
}

#[test]
fn c4_a_link_from_an_earlier_copy_is_not_followed() {
    let home = Home::new();
    home.started("box", &[]);
    let (inside, outside) = destination(&home);
    // The second copy writes where the first one, or a user of the host, has put links.
    home.sh("box", "mkdir -p t/real && ln -s real t/sub && echo first > t/real/x");
    home.ok(&["cp", "box:/home/user/t", text(&inside)]);
    symlink(&outside, inside.join("t/planted")).unwrap();
    symlink(outside.join("victim"), inside.join("t/file")).unwrap();
    home.sh("box", "rm t/sub && mkdir t/sub t/planted && echo second > t/sub/y && echo bad > t/planted/new && echo bad > t/file");
    let ran = home.run(&["cp", "box:/home/user/t", text(&inside)]);
    assert_eq!(listing(&outside), ["victim: untouched"], "{ran:?}");
    assert!(!inside.join("t/real/y").exists(), "through the link of the first copy: {ran:?}");
    assert!(ran.code == Some(125) && ran.stderr.contains("in the way"), "{ran:?}");
}

#[test]
fn links_inside_the_sandbox_are_the_sandboxs_own() {
    let home = Home::new();
    home.started("box", &[]);
    home.sh("box", "mkdir real && ln -s real link && ln -s /etc config");
    let file = home.path().join("file");
    fs::write(&file, "content").unwrap();
    home.ok(&["cp", text(&file), "box:/home/user/link/new"]);
    assert_eq!(home.sh("box", "cat real/new"), "content");
    // It is the sandbox's user who writes, through a link as well.
    let refused = home.fails(&["cp", text(&file), "box:/home/user/config/new"], 125);
    assert!(refused.contains("Permission denied"), "{refused}");
    // The guest's /etc is what is read, not the host's.
    home.root_sh("box", "echo in the guest > /etc/only-here");
    let back = home.path().join("back");
    home.ok(&["cp", "box:/home/user/config/only-here", text(&back)]);
    assert_eq!(fs::read_to_string(&back).unwrap(), "in the guest\n");
}

#[test]
fn c4_a_planted_link_does_not_take_the_hosts_files_into_the_sandbox() {
    let home = Home::new();
    home.started("box", &[]);
    let project = home.path().join("project");
    fs::create_dir_all(project.join("code")).unwrap();
    fs::write(home.path().join("secret"), "of the host").unwrap();
    symlink("../secret", project.join("planted")).unwrap();
    symlink("..", project.join("folder")).unwrap();
    let [code, planted, folder] = ["code", "planted", "folder"].map(|name| project.join(name));
    home.ok(&["cp", text(&code), text(&planted), text(&folder), "box:/home/user/"]);
    assert_eq!(home.sh("box", "readlink planted folder"), "../secret\n..\n");
    home.ok(&["cp", "-L", text(&planted), "box:/home/user/wanted"]);
    assert_eq!(home.sh("box", "cat wanted"), "of the host");
}

#[test]
fn c4_the_limit_is_one_of_all_sources_together() {
    let home = Home::new();
    home.started("box", &[]);
    home.sh("box", "for name in a b c; do head -c 400000 /dev/zero > $name; done");
    let here = home.path().join("here");
    fs::create_dir(&here).unwrap();
    let sources = ["box:a", "box:b", "box:c"];
    let copy = |limit| [&["cp", "--limit", limit][..], &sources, &[text(&here)]].concat();
    let refused = home.fails(&copy("1M"), 125);
    assert!(refused.contains("--limit"), "{refused}");
    assert!(!here.join("c").exists());
    home.ok(&copy("2M"));
}

#[test]
fn what_cannot_be_copied_is_named() {
    let home = Home::new();
    home.started("box", &[]);
    let here = home.path().join("here");
    assert!(home.fails(&["cp", "/no/such", "box:/tmp/x"], 125).contains("/no/such"));
    assert!(home.fails(&["cp", "box:/no/such", text(&here)], 125).contains("/no/such"));
    assert!(!here.exists());
    assert!(home.fails(&["cp", "box:/etc/shadow", text(&here)], 125).contains("Permission denied"));
    assert!(home.fails(&["cp", "/etc/hostname", "box:/no/such/folder/x"], 125).contains("/no/such/folder"));
    assert!(home.fails(&["cp", "box:/etc/hostname", "/no/such/folder/x"], 125).contains("/no/such/folder"));
    assert!(home.fails(&["cp", "boxx:/etc/hostname", text(&here)], 125).contains("did you mean `box`?"));
    assert!(home.fails(&["cp", text(&here), text(&here)], 125).contains("NAME:PATH"));
    let failed = events_of(&home, "box", "file_failed");
    assert!(failed.iter().any(|event| event["path"] == "/no/such"), "failures are recorded: {failed:?}");
    // Neither a device nor a fifo holds anybody up.
    home.sh("box", "mkfifo pipe");
    assert!(home.fails(&["cp", "box:/home/user/pipe", text(&here)], 125).contains("fifo"));
    assert!(!here.exists());
    let fifo = home.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    assert!(home.fails(&["cp", text(&fifo), "box:/tmp/fifo"], 125).contains("neither a file nor a folder"));
    assert_eq!(home.exec("box", &["test", "-e", "/tmp/fifo"]).code, Some(1));
}
