//! The effects of a power failure on the log. The whole product is tested in `tests/tests/power.rs`.

use std::fs;

use super::*;
use crate::event::{Event, RecoveredFrom, What};
use crate::files::CURRENT;
use crate::follow::{Follower, LogFilter};
use crate::log::Log;
use crate::testing::{TestLog, event};

const LATER: &str = "another boot";

fn after_restart(scene: &TestLog) -> Result<Report, VerifyError> {
    verify_in_boot(scene.folder.path(), None, LATER)
}

/// The pids of the events in the log, which number them.
fn numbers(scene: &TestLog) -> Vec<u32> {
    let mut follower = Follower::open(scene.folder.path(), LogFilter::default()).unwrap();
    let all = std::iter::from_fn(|| follower.next().unwrap());
    all.filter(|entry| entry.event.sandbox.is_some()).map(|entry| entry.event.actor.pid).collect()
}

/// The end of the file is missing from any byte on, or replaced with zeros, as file systems do.
#[test]
fn lines_that_had_not_reached_the_disk_are_lost_and_counted() {
    let scene = TestLog::with_lines(5);
    let (text, head) = (scene.current(), scene.head());
    for zeros in [false, true] {
        // Every position near the end of a line, and some others: each costs a few flushes.
        let ends = |left: &usize| text[left.saturating_sub(2)..(left + 2).min(text.len())].contains(&b'\n');
        for left in (0..text.len()).filter(|left| left % 41 == 0 || ends(left)) {
            let mut cut = text.clone();
            cut.truncate(left);
            cut.resize(if zeros { text.len() } else { left }, 0);
            scene.put(&cut);
            scene.put_head(&head);
            assert!(scene.verify().is_err(), "in the same boot that is removal: {left} {zeros}");
            // A line that only lacks its line break is complete.
            let whole = text[..left].iter().filter(|byte| **byte == b'\n').count() as u64;
            let whole = whole + u64::from(!zeros && text.get(left) == Some(&b'\n'));
            let report = after_restart(&scene).unwrap();
            assert_eq!((report.lines, report.lost), (whole, 5 - whole), "{left} {zeros}");
            scene.append_in(LATER, 7);
            scene.append_in(LATER, 8);
            let report = after_restart(&scene).unwrap();
            let own = u64::from(whole < 5 || zeros);
            assert_eq!((report.lines, report.lost), (whole + own + 2, 5 - whole), "{left} {zeros}");
            assert_eq!((report.torn_bytes, report.last_seq), (0, 5 + own + 2));
            let found = numbers(&scene);
            assert_eq!(found[found.len() - 2..], [7, 8]);
            assert_eq!(found.len() as u64, whole + 2);
        }
    }
}

#[test]
fn a_head_that_is_behind_loses_no_line() {
    let scene = TestLog::with_lines(2);
    let head = scene.head();
    scene.append(2);
    let text = scene.current();
    scene.append(3);
    // Half of the fourth line, and a head that is not newer than the second.
    scene.put(&scene.current()[..text.len() + 100]);
    scene.put_head(&head);
    let report = after_restart(&scene).unwrap();
    assert_eq!((report.lines, report.lost, report.torn_bytes), (3, 0, 100));
    scene.append_in(LATER, 9);
    assert_eq!(numbers(&scene), [0, 1, 2, 9]);
    let report = after_restart(&scene).unwrap();
    assert_eq!((report.lines, report.lost, report.recovered, report.torn_bytes), (5, 0, 1, 0));
}

/// Twice in a row, and also when nothing of the file was left.
#[test]
fn a_log_survives_one_loss_after_the_other() {
    let scene = TestLog::with_lines(3);
    scene.put(b"");
    scene.append_in("second", 5);
    scene.append_in("second", 6);
    assert_eq!(numbers(&scene), [5, 6]);
    let text = scene.current();
    scene.put(&text[..text.len() - 10]);
    scene.append_in("third", 7);
    scene.append_in("third", 8);
    let report = verify_in_boot(scene.folder.path(), None, "third").unwrap();
    assert_eq!((report.lost, report.last_seq), (3 + 1, 9));
    assert_eq!(numbers(&scene), [5, 7, 8]);
    // The result of a recovery was flushed: the next power failure cannot have lost it.
    fs::remove_file(scene.path(CURRENT)).unwrap();
    assert!(verify_in_boot(scene.folder.path(), None, "fourth").is_err());
}

#[test]
fn lines_that_were_on_the_disk_are_not_lost_but_removed() {
    let scene = TestLog::with_lines(3);
    // As a writer leaves it after flushing the first three lines.
    let HeadState::Head(mut head) = Head::read(&LogFolder::open(scene.folder.path()).unwrap()).unwrap()
    else {
        panic!()
    };
    head.synced(crate::files::since_boot_ns());
    head.write(&LogFolder::open(scene.folder.path()).unwrap()).unwrap();
    for number in 3..6 {
        scene.append(number);
    }
    let text = scene.current();
    let lines: Vec<&[u8]> = text.split_inclusive(|byte| *byte == b'\n').collect();
    scene.put(&lines[..3].concat());
    assert_eq!(after_restart(&scene).unwrap().lost, 3);
    scene.put(&lines[..2].concat());
    let found = after_restart(&scene);
    assert!(matches!(found, Err(VerifyError::Bad { line: 2, fault: Fault::Truncated(6), .. })), "{found:?}");
    scene.append_in(LATER, 9);
    let found = after_restart(&scene);
    assert!(
        matches!(found, Err(VerifyError::Bad { fault: Fault::Removed { from: 3, to: 6 }, .. })),
        "{found:?}"
    );
}

/// The very first line of a log was not on the disk in time.
#[test]
fn the_first_line_of_a_log_can_be_lost_too() {
    let scene = TestLog::new();
    let mut head = Head::genesis();
    "first".clone_into(&mut head.boot);
    head.create(&LogFolder::open(scene.folder.path()).unwrap()).unwrap();
    scene.put(&[0; 200]);
    scene.append_in(LATER, 1);
    let report = after_restart(&scene).unwrap();
    assert_eq!((report.lines, report.recovered, numbers(&scene)), (2, 1, vec![1]));
}

/// A rotation of an earlier version was interrupted by a power failure: the file was renamed, and the head is
/// from before that. Every later rotation failed.
#[test]
fn a_head_from_before_a_rotation_finds_the_file_that_was_put_aside() {
    let scene = TestLog::with_lines(3);
    let head = scene.head();
    scene.append(3);
    fs::rename(scene.path(CURRENT), scene.path("audit-000000000001.jsonl")).unwrap();
    scene.put_head(&head);
    let log = Log::open(scene.folder.path()).unwrap().in_boot(LATER).rotate_at(1);
    for number in [4, 5, 6] {
        log.append(&[event(number)]).unwrap();
    }
    assert_eq!(numbers(&scene), [0, 1, 2, 3, 4, 5, 6]);
    let report = after_restart(&scene).unwrap();
    assert_eq!((report.files, report.lost, report.recovered), (4, 0, 0));
}

#[test]
fn only_the_line_that_tells_of_a_loss_may_follow_a_gap() {
    let recovered = |lost_from, from| What::Recovered {
        from,
        detail: "x".to_owned(),
        torn_bytes: None,
        torn_digest: None,
        lost_from,
    };
    let after_gap = |what: What| {
        let scene = TestLog::with_lines(2);
        let mut text = scene.current();
        line::encode(&mut text, 6, &"a".repeat(64), &Event { what, ..event(9) }).unwrap();
        scene.put(&text);
        scene.verify().map(|report| report.lost).map_err(|error| error.to_string())
    };
    assert_eq!(after_gap(recovered(Some(3), RecoveredFrom::PowerLoss)), Ok(3));
    for what in [
        recovered(Some(4), RecoveredFrom::PowerLoss),
        recovered(Some(2), RecoveredFrom::PowerLoss),
        recovered(None, RecoveredFrom::PowerLoss),
        recovered(Some(3), RecoveredFrom::LostLines),
        What::SandboxRemoved,
    ] {
        let found = after_gap(what.clone()).unwrap_err();
        assert!(found.contains("the events 3 to 5 were removed"), "{what:?}: {found}");
    }
}

#[test]
fn what_is_removed_after_a_loss_is_put_down_with_its_length_and_digest() {
    let scene = TestLog::with_lines(3);
    let text = scene.current();
    let whole = text.len() / 3;
    scene.put(&text[..whole + 100]);
    scene.append_in(LATER, 9);
    let mut follower = Follower::open(scene.folder.path(), LogFilter::default()).unwrap();
    let recorded = std::iter::from_fn(|| follower.next().unwrap()).nth(1).unwrap().event.what;
    let What::Recovered { from: RecoveredFrom::PowerLoss, torn_bytes, torn_digest, lost_from, .. } = recorded
    else {
        panic!("{recorded:?}")
    };
    let digest = crate::event::digest(&text[whole..whole + 100]);
    assert_eq!((torn_bytes, torn_digest, lost_from), (Some(100), Some(digest), Some(2)));
}

#[test]
fn a_last_line_that_was_replaced_is_found_after_a_restart_too() {
    let scene = TestLog::with_lines(3);
    let text = scene.current();
    let (two, third) = text.split_at(text.len() / 3 * 2);
    let Shape::Whole(link) = line::shape(third.trim_ascii_end()) else { panic!() };
    let mut forged = two.to_vec();
    line::encode(&mut forged, 3, &link.prev, &event(99)).unwrap();
    scene.put(&forged);
    let found = after_restart(&scene);
    assert!(matches!(found, Err(VerifyError::Bad { line: 3, fault: Fault::Changed, .. })), "{found:?}");
    scene.append_in(LATER, 9);
    let found = after_restart(&scene);
    assert!(matches!(found, Err(VerifyError::Bad { line: 4, fault: Fault::Replaced, .. })), "{found:?}");
}

#[test]
fn lines_from_before_a_rotation_are_not_what_a_restart_left_of_the_new_file() {
    let scene = TestLog::with_lines(2);
    let old = scene.current();
    Log::open(scene.folder.path()).unwrap().rotate_at(1).append(&[event(2)]).unwrap();
    scene.put(&old);
    scene.append_in(LATER, 9);
    let report = after_restart(&scene).unwrap();
    assert_eq!((report.files, report.lost), (2, 2));
    assert_eq!(numbers(&scene), [0, 1, 9]);
}
