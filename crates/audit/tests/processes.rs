//! Appending from many processes, some of which are killed.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;

use bathy_audit::{Actor, Event, Follower, Log, LogError, LogFilter, What};

const FOLDER: &str = "BATHY_AUDIT_TEST_FOLDER";
const FULL: &str = "BATHY_AUDIT_TEST_FULL";
const COUNT: &str = "BATHY_AUDIT_TEST_COUNT";

fn append(folder: &Path, count: u32) {
    let log = Log::open(folder).unwrap().rotate_at(60_000);
    for number in 0..count {
        let what = What::limit_hit(&number.to_string(), "x".repeat(number as usize % 3000));
        let event = Event::now(Actor::this_process("test"), what).in_sandbox("s", None);
        log.append(&[event]).unwrap();
    }
}

/// Starts this test program again as a writer.
fn writer(folder: &Path, count: u32) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_appends", "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder)
        .env(COUNT, count.to_string())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

/// Run by the other tests in processes of their own; by itself, it appends a little.
#[test]
fn a_process_appends() {
    match (std::env::var_os(FOLDER), std::env::var(COUNT)) {
        (Some(folder), Ok(count)) => append(Path::new(&folder), count.parse().unwrap()),
        _ => {
            let folder = tempfile::tempdir().unwrap();
            append(folder.path(), 3);
            assert_eq!(Log::open(folder.path()).unwrap().verify().unwrap().lines, 3);
        }
    }
}

#[test]
fn eight_processes_make_one_chain() {
    let folder = tempfile::tempdir().unwrap();
    let writers: Vec<Child> = (0..8).map(|_| writer(folder.path(), 125)).collect();
    let pids: Vec<u32> = writers.iter().map(Child::id).collect();
    for mut writer in writers {
        assert!(writer.wait().unwrap().success());
    }
    let report = Log::open(folder.path()).unwrap().verify().unwrap();
    assert_eq!((report.lines, report.recovered), (1000 + report.files - 1, 0));
    let mut follower = Follower::open(folder.path(), LogFilter::default()).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| follower.next().unwrap()).map(|entry| entry.event).collect();
    for pid in pids {
        let own: Vec<&String> = all
            .iter()
            .filter(|event| event.actor.pid == pid)
            .filter_map(|event| match &event.what {
                What::LimitHit { limit, .. } => Some(limit),
                _ => None,
            })
            .collect();
        let wanted: Vec<String> = (0..125).map(|number: u32| number.to_string()).collect();
        assert_eq!(own, wanted.iter().collect::<Vec<_>>(), "each in its own order, nothing twice");
    }
}

#[test]
fn writers_that_are_killed_leave_a_whole_log() {
    let folder = tempfile::tempdir().unwrap();
    append(folder.path(), 1);
    let log = Log::open(folder.path()).unwrap();
    for round in 0..25u64 {
        let before = log.verify().unwrap().last_seq;
        let mut writers = [writer(folder.path(), 1_000_000), writer(folder.path(), 1_000_000)];
        while log.verify().unwrap().last_seq == before {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_micros(round * 777));
        for writer in &mut writers {
            writer.kill().unwrap();
            writer.wait().unwrap();
        }
        log.verify().unwrap();
    }
    append(folder.path(), 1);
    let report = log.verify().unwrap();
    assert!(report.lines > 25 && report.torn_bytes == 0, "{report:?}");
}

/// Fills a small file system of its own.
#[test]
fn a_full_disk_is_an_error_and_no_damage() {
    if let Some(folder) = std::env::var_os(FULL) {
        return fill(Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    let script =
        "mount -t tmpfs -o size=3m none \"$1\" && exec \"$2\" --exact a_full_disk_is_an_error_and_no_damage";
    let ended = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"])
        .args([folder.path(), &std::env::current_exe().unwrap()])
        .env(FULL, folder.path())
        .output()
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

fn fill(folder: &Path) {
    std::fs::write(folder.join("more"), [0; 600 << 10]).unwrap();
    std::fs::write(folder.join("ballast"), [0; 128 << 10]).unwrap();
    let folder = folder.join("audit");
    let log = Log::open(&folder).unwrap();
    let event = |number: u32| {
        let what = What::limit_hit("disk", "x".repeat(number as usize * 7 % 900));
        Event::now(Actor::this_process("test"), what)
    };
    let (mut recorded, mut refused) = (0, 0);
    for number in 0..10_000 {
        match log.append(&[event(number), event(number)]) {
            Ok(()) => recorded += 2,
            Err(error) => {
                assert!(matches!(error, LogError::Full(_)), "{error:?}");
                refused += 1;
            }
        }
        if refused == 10 {
            break;
        }
        if refused > 0 {
            let report = log.verify().unwrap();
            assert_eq!(
                (report.lines, report.torn_bytes),
                (recorded, 0),
                "what was refused is not there in part"
            );
        }
    }
    assert!(recorded > 1000 && refused == 10, "{recorded} recorded, {refused} refused");
    // The reserve is not affected by other programs: what has happened can still be recorded.
    let taken = std::fs::write(folder.join("../taken"), [1; 1 << 20]);
    assert!(taken.is_err(), "the disk is not full");
    for number in 0..500 {
        log.append_last(&[event(number)]).unwrap();
        recorded += 1;
    }
    assert!(matches!(log.append(&[event(1)]), Err(LogError::Full(_))), "no new operation may be started");
    std::fs::remove_file(folder.join("../taken")).unwrap();
    std::fs::remove_file(folder.join("../ballast")).unwrap();
    assert!(log.append(&[event(1)]).is_err(), "the reserve has to be filled first");
    std::fs::remove_file(folder.join("../more")).unwrap();
    log.append(&[event(1)]).unwrap();
    let report = log.verify().unwrap();
    assert_eq!((report.lines, report.recovered), (recorded + 1, 0));
}
