use std::fs;

use super::*;
use crate::event::What;
use crate::log::Log;
use crate::testing::{TestLog, event};

fn pids(follower: &mut Follower) -> Vec<u32> {
    std::iter::from_fn(|| follower.next().unwrap())
        .filter(|entry| entry.event.sandbox.is_some())
        .map(|entry| entry.event.actor.pid)
        .collect()
}

fn follow(scene: &TestLog, filter: LogFilter) -> Follower {
    Follower::open(scene.folder.path(), filter).unwrap()
}

#[test]
fn events_come_as_they_are_appended_across_rotations() {
    let scene = TestLog::new();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(1000);
    let mut early = follow(&scene, LogFilter::default());
    assert_eq!(early.next().unwrap(), None);
    let mut seen = vec![];
    for number in 0..50 {
        log.append(&[event(number)]).unwrap();
        // Sometimes several files are rotated between reads.
        if number % 13 == 0 {
            seen.extend(pids(&mut early));
        }
    }
    seen.extend(pids(&mut early));
    assert_eq!(seen, (0..50).collect::<Vec<_>>());
    assert_eq!(pids(&mut follow(&scene, LogFilter::default())), (0..50).collect::<Vec<_>>());
    assert_eq!(early.unreadable(), 0);
}

#[test]
fn a_follower_beside_writers_misses_nothing() {
    let scene = TestLog::new();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(3000);
    let mut follower = follow(&scene, LogFilter::default());
    thread::scope(|scope| {
        scope.spawn(|| (0..2000).for_each(|number| log.append(&[event(number)]).unwrap()));
        let mut seqs = vec![];
        let mut last = 0;
        while last < 1999 {
            let entry = follower.wait(Duration::from_secs(10)).unwrap().unwrap();
            seqs.push(entry.seq);
            if entry.event.sandbox.is_some() {
                last = entry.event.actor.pid;
            }
        }
        let wanted: Vec<u64> = (1..=seqs.len() as u64).collect();
        assert_eq!(seqs, wanted);
    });
}

#[test]
fn a_follower_misses_no_file_that_is_put_aside_while_it_looks() {
    let scene = TestLog::new();
    // One file for each event, so that it looks for the next file all the time.
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(1);
    let mut follower = follow(&scene, LogFilter::default());
    thread::scope(|scope| {
        let writer = scope.spawn(|| (0..1000).for_each(|number| log.append(&[event(number)]).unwrap()));
        let mut seqs = vec![];
        while !writer.is_finished() {
            seqs.extend(std::iter::from_fn(|| follower.next().unwrap()).map(|entry| entry.seq));
        }
        seqs.extend(std::iter::from_fn(|| follower.next().unwrap()).map(|entry| entry.seq));
        let missed = (1..).zip(&seqs).find(|(wanted, seq)| wanted != *seq);
        assert_eq!(missed, None);
        assert!(seqs.len() >= 1000);
    });
}

#[test]
fn filters_choose_by_id_name_and_time() {
    let scene = TestLog::new();
    let named = Event { name: Some("web".into()), sandbox: Some("s2".into()), ..event(3) };
    scene.log.append(&[event(1), event(2), named, event(4)]).unwrap();
    let by = |sandbox: &str| LogFilter { sandbox: Some(sandbox.into()), since_unix_ns: None };
    assert_eq!(pids(&mut follow(&scene, by("s1"))), [1, 2, 4]);
    assert_eq!(pids(&mut follow(&scene, by("s2"))), [3]);
    assert_eq!(pids(&mut follow(&scene, by("web"))), [3]);
    assert_eq!(pids(&mut follow(&scene, by("we"))), [] as [u32; 0]);
    let since = LogFilter { sandbox: None, since_unix_ns: Some(3) };
    assert_eq!(pids(&mut follow(&scene, since)), [3, 4]);
}

#[test]
fn old_files_are_not_read_for_new_events() {
    let scene = TestLog::new();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(1);
    log.append(&[event(1)]).unwrap();
    log.append(&[Event { time_unix_ns: u64::MAX - 1, ..event(2) }]).unwrap();
    // Lines that cannot be read would be counted.
    fs::write(scene.path(&rotated_name(1)), "x\n").unwrap();
    let mut follower = follow(&scene, LogFilter { sandbox: None, since_unix_ns: Some(u64::MAX - 1) });
    assert_eq!(pids(&mut follower), [2]);
    assert_eq!(follower.unreadable(), 0);
}

#[test]
fn half_a_line_is_waited_for_and_passed_over_when_it_stays_one() {
    let scene = TestLog::with_lines(3);
    let (text, head) = (scene.current(), scene.head());
    let mut follower = follow(&scene, LogFilter::default());
    scene.put(&text[..text.len() - 30]);
    assert_eq!(pids(&mut follower), [0, 1]);
    scene.put(&text);
    assert_eq!(pids(&mut follower), [2]);
    scene.append(3);
    let torn = scene.current();
    scene.put(&torn[..torn.len() - 30]);
    scene.put_head(&head);
    assert_eq!(pids(&mut follower), [] as [u32; 0]);
    scene.append(4);
    assert_eq!(pids(&mut follower), [4]);
    assert_eq!(follower.unreadable(), 1);
}

#[test]
fn hostile_files_neither_stop_nor_bloat_a_follower() {
    let scene = TestLog::with_lines(2);
    let text = scene.current();
    for junk in [vec![b'x'; 1 << 20], vec![b'\n'; 1000], vec![0xff; 300_000], b"{}\n[]\n".repeat(100)] {
        for first in [7, 8, 9] {
            fs::write(scene.path(&rotated_name(first)), &junk).unwrap();
        }
        scene.put(&[&text[..], &junk, b"\n", &text].concat());
        let mut follower = follow(&scene, LogFilter::default());
        assert_eq!(pids(&mut follower), [0, 1, 0, 1]);
        assert!(follower.unreadable() > 0);
        assert!(follower.buffer.capacity() < 4 * MAX_LINE);
    }
}

#[test]
fn the_longest_line_is_read_and_verified() {
    let scene = TestLog::new();
    let with = |last: String| {
        let (exec, user) = ("e".to_owned(), "u".to_owned());
        let argv = [vec!["x".repeat(8000); 16], vec![last]].concat();
        let what = What::ExecStarted {
            exec,
            argv,
            user,
            job: None,
            terminal: false,
            argv_bytes: 1,
            argv_digest: None,
        };
        Event { what, ..event(1) }
    };
    let mut text = vec![];
    line::encode(&mut text, 1, line::GENESIS, &with(String::new())).unwrap();
    let room = MAX_LINE - text.trim_ascii_end().len();
    assert!(scene.log.append(&[with("x".repeat(room + 1))]).is_err());
    scene.log.append(&[with("x".repeat(room)), event(2)]).unwrap();
    let mut follower = follow(&scene, LogFilter::default());
    assert_eq!(follower.next().unwrap().unwrap().line.len(), MAX_LINE);
    assert_eq!(pids(&mut follower), [2]);
    assert_eq!((follower.unreadable(), scene.verify().unwrap().lines), (0, 2));
}

#[test]
fn half_a_line_at_the_end_of_a_file_is_counted() {
    let scene = TestLog::with_lines(2);
    let text = scene.current();
    fs::write(scene.path(&rotated_name(1)), &text[..text.len() - 30]).unwrap();
    let mut follower = follow(&scene, LogFilter::default());
    assert_eq!(pids(&mut follower), [0, 0, 1]);
    assert_eq!(follower.unreadable(), 1);
}

#[test]
fn a_log_that_is_not_there_is_distinguished_from_an_unreadable_one() {
    let scene = TestLog::new();
    let open = |name| Follower::open(&scene.path(name), LogFilter::default());
    assert!(matches!(open("none"), Err(FollowError::NoLog(_))));
    fs::write(scene.path("file"), "").unwrap();
    assert!(matches!(open("file"), Err(FollowError::Io(..))));
}

#[test]
fn a_file_that_begins_with_what_was_read_is_not_read_again() {
    let scene = TestLog::with_lines(3);
    let text = scene.current();
    fs::write(scene.path(&rotated_name(1)), &text).unwrap();
    fs::write(scene.path(&rotated_name(3)), &text).unwrap();
    scene.put(b"");
    assert_eq!(pids(&mut follow(&scene, LogFilter::default())), [0, 1, 2]);
}

#[test]
fn a_file_is_too_old_a_minute_after_its_last_line() {
    let scene = TestLog::with_lines(1);
    let file = File::options().write(true).open(scene.path(CURRENT)).unwrap();
    file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1000)).unwrap();
    // Some file systems store times in whole seconds.
    let least = 1001 * 1_000_000_000 + CLOCK_DOUBT;
    for (since, too_old) in [(None, false), (Some(least), false), (Some(least + 1), true)] {
        let follower = follow(&scene, LogFilter { sandbox: None, since_unix_ns: since });
        assert_eq!(follower.is_too_old(&file).unwrap(), too_old, "{since:?}");
    }
}
