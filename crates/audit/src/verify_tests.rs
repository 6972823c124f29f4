use std::fs;

use super::*;
use crate::log::Log;
use crate::testing::{TestLog, event};

fn join(lines: &[&[u8]]) -> Vec<u8> {
    lines.iter().flat_map(|line| [line, &b"\n"[..]].concat()).collect()
}

fn lines(text: &[u8]) -> Vec<&[u8]> {
    text.strip_suffix(b"\n").unwrap().split(|byte| *byte == b'\n').collect()
}

#[test]
fn an_untouched_log_is_whole() {
    let report = TestLog::with_lines(5).verify().unwrap();
    assert_eq!((report.lines, report.files, report.first_seq, report.last_seq), (5, 1, 1, 5));
    assert_eq!((report.recovered, report.torn_bytes), (0, 0));
    let nothing = tempfile::tempdir().unwrap();
    assert!(matches!(verify(nothing.path(), None), Err(VerifyError::NoLog(_))));
    assert!(matches!(verify(&nothing.path().join("none"), None), Err(VerifyError::NoLog(_))));
}

#[test]
fn every_changed_byte_is_found_and_its_line_named() {
    let scene = TestLog::with_lines(3);
    let text = scene.current();
    for at in 0..text.len() {
        let line = 1 + text[..at].iter().filter(|byte| **byte == b'\n').count() as u64;
        for flip in [1, 0x80] {
            let mut changed = text.clone();
            changed[at] ^= flip;
            scene.put(&changed);
            assert_eq!(scene.bad(), ("audit.jsonl".into(), line, Fault::Changed), "byte {at} ^ {flip}");
        }
        let mut split = text.clone();
        split[at] = b'\n';
        if split != text {
            scene.put(&split);
            assert_eq!(scene.bad(), ("audit.jsonl".into(), line, Fault::Changed), "byte {at} a line break");
        }
    }
    scene.put(&text);
    scene.verify().unwrap();
}

#[test]
fn every_inserted_or_missing_byte_is_found() {
    let scene = TestLog::with_lines(3);
    let text = scene.current();
    for at in 0..text.len() {
        let line = 1 + text[..at].iter().filter(|byte| **byte == b'\n').count() as u64;
        let removed = [&text[..at], &text[at + 1..]].concat();
        scene.put(&removed);
        assert_eq!(scene.bad().1, line, "byte {at} removed");
        for extra in [b" ", b"\n", b"0"] {
            let inserted = [&text[..at], extra, &text[at..]].concat();
            scene.put(&inserted);
            // A line break before another one is an empty line, which comes after the line.
            let line = line + u64::from(extra == b"\n" && text[at] == b'\n');
            assert_eq!(scene.bad().1, line, "{extra:?} before byte {at}");
        }
    }
}

#[test]
fn removed_lines_are_found() {
    let scene = TestLog::with_lines(6);
    let text = scene.current();
    let all = lines(&text);
    for removed in 0..5 {
        let mut rest = all.clone();
        rest.remove(removed);
        scene.put(&join(&rest));
        let seq = removed as u64 + 1;
        assert_eq!(scene.bad(), ("audit.jsonl".into(), seq, Fault::Removed { from: seq, to: seq }));
    }
    scene.put(&join(&[&all[..1], &all[4..]].concat()));
    assert_eq!(scene.bad().2, Fault::Removed { from: 2, to: 4 });
}

#[test]
fn removed_ends_are_found() {
    let scene = TestLog::with_lines(6);
    let text = scene.current();
    for left in 0..text.len() {
        scene.put(&text[..left]);
        let (_, line, fault) = scene.bad();
        assert_eq!(fault, Fault::Truncated(6), "{left} bytes left");
        let whole = text[..left].iter().filter(|byte| **byte == b'\n').count() as u64;
        assert!(line == whole || line == whole + 1, "{left} bytes left, line {line}");
    }
    fs::remove_file(scene.path("audit.jsonl")).unwrap();
    assert_eq!(scene.bad(), ("audit.jsonl".into(), 0, Fault::Truncated(6)));
}

#[test]
fn lines_removed_from_the_end_stay_missing_when_the_log_goes_on() {
    let scene = TestLog::with_lines(6);
    let text = scene.current();
    let all = lines(&text);
    scene.put(&join(&all[..4]));
    scene.append(7);
    assert_eq!(scene.bad(), ("audit.jsonl".into(), 5, Fault::Removed { from: 5, to: 6 }));
    scene.put(&text[..text.len() - 40]);
    scene.append(8);
    assert_eq!((scene.bad().1, scene.bad().2), (6, Fault::Changed));
}

#[test]
fn reordered_lines_are_found() {
    let scene = TestLog::with_lines(5);
    let text = scene.current();
    for one in 0..5 {
        for other in one + 1..5 {
            let mut swapped = lines(&text);
            swapped.swap(one, other);
            scene.put(&join(&swapped));
            let fault = Fault::Reordered { found: other as u64 + 1, expected: one as u64 + 1 };
            assert_eq!(scene.bad(), ("audit.jsonl".into(), one as u64 + 1, fault));
        }
    }
}

#[test]
fn inserted_and_replaced_lines_are_found() {
    let scene = TestLog::with_lines(4);
    let text = scene.current();
    let all = lines(&text);
    scene.put(&join(&[all[0], all[1], all[0], all[2], all[3]]));
    assert_eq!(scene.bad(), ("audit.jsonl".into(), 3, Fault::Inserted(1)));
    // A line with a valid hash of its own in the place of the second one.
    let mut forged = vec![];
    let Shape::Whole(link) = line::shape(all[1]) else { panic!() };
    line::encode(&mut forged, 2, &link.prev, &event(999)).unwrap();
    scene.put(&join(&[all[0], forged.trim_ascii_end(), all[2], all[3]]));
    assert_eq!(scene.bad(), ("audit.jsonl".into(), 3, Fault::Replaced));
    // The last one is only followed by the head.
    let Shape::Whole(link) = line::shape(all[3]) else { panic!() };
    forged.clear();
    line::encode(&mut forged, 4, &link.prev, &event(999)).unwrap();
    scene.put(&join(&[all[0], all[1], all[2], forged.trim_ascii_end()]));
    assert_eq!(scene.bad(), ("audit.jsonl".into(), 4, Fault::Changed));
}

#[test]
fn junk_at_the_end_is_found_and_stays_found() {
    for junk in [&b"junk\n"[..], b"junk", b"\xff\xfe\0", b"{\"seq\":99,\"prev\":\"0\"}\n"] {
        let scene = TestLog::with_lines(3);
        scene.put(&[&scene.current()[..], junk].concat());
        assert_eq!(scene.bad(), ("audit.jsonl".into(), 4, Fault::Changed));
        scene.append(4);
        scene.append(5);
        assert_eq!(scene.bad(), ("audit.jsonl".into(), 4, Fault::Changed));
    }
}

#[test]
fn a_changed_or_missing_head_is_found_and_stays_found() {
    let scene = TestLog::with_lines(3);
    let head = scene.head();
    for at in 0..head.len() {
        let mut changed = head.clone();
        changed[at] ^= 1;
        scene.put_head(&changed);
        assert!(matches!(scene.verify(), Err(VerifyError::HeadChanged)));
    }
    for broken in [&b""[..], b"{}", &head[..300], &[&head[..], b" "].concat()] {
        let scene = TestLog::with_lines(3);
        scene.put_head(broken);
        assert!(matches!(scene.verify(), Err(VerifyError::HeadChanged)));
        scene.append(4);
        assert_eq!(scene.bad(), ("audit.jsonl".into(), 4, Fault::LostHead));
    }
    let scene = TestLog::with_lines(3);
    fs::remove_file(scene.path("head.json")).unwrap();
    assert!(matches!(scene.verify(), Err(VerifyError::NoHead)));
    scene.append(4);
    scene.append(5);
    assert_eq!(scene.bad(), ("audit.jsonl".into(), 4, Fault::LostHead));
}

#[test]
fn a_new_log_is_not_the_recorded_one() {
    let scene = TestLog::with_lines(4);
    let noted = scene.verify().unwrap();
    let anchor = Anchor { seq: noted.last_seq, hash: noted.head_hash };
    scene.append(5);
    verify(scene.folder.path(), Some(&anchor)).unwrap();
    let forged = TestLog::new();
    for number in [0, 1, 2, 99, 4] {
        forged.append(number);
    }
    forged.verify().unwrap();
    let found = verify(forged.folder.path(), Some(&anchor));
    assert!(matches!(found, Err(VerifyError::Bad { line: 4, fault: Fault::NotTheAnchor, .. })));
    let shorter = TestLog::with_lines(2);
    assert!(matches!(verify(shorter.folder.path(), Some(&anchor)), Err(VerifyError::NoAnchor(4))));
}

#[test]
fn rotated_files_are_one_chain() {
    let scene = TestLog::new();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(1500);
    for number in 0..30 {
        log.append(&[event(number)]).unwrap();
    }
    let report = scene.verify().unwrap();
    assert!(report.files > 5, "{report:?}");
    assert_eq!(report.lines, 30 + report.files - 1, "each new file begins with a line of its own");
    let second = rotated_name(scene_files(&scene)[1]);
    let third = rotated_name(scene_files(&scene)[2]);
    let text = fs::read(scene.path(&second)).unwrap();
    // One line of an old file is changed, its end removed, all of it removed.
    let mut changed = text.clone();
    changed[100] ^= 1;
    fs::write(scene.path(&second), &changed).unwrap();
    assert_eq!(scene.bad(), (second.clone(), 1, Fault::Changed));
    let all = lines(&text);
    fs::write(scene.path(&second), join(&all[..all.len() - 1])).unwrap();
    assert!(matches!(scene.bad(), (file, 1, Fault::Removed { .. }) if file == third));
    fs::remove_file(scene.path(&second)).unwrap();
    assert!(matches!(scene.bad(), (file, 1, Fault::Removed { .. }) if file == third));
    fs::write(scene.path(&second), &text).unwrap();
    scene.verify().unwrap();
    // The oldest file: nothing was pruned in this log.
    fs::remove_file(scene.path(&rotated_name(1))).unwrap();
    assert!(matches!(scene.bad(), (file, 1, Fault::Removed { from: 1, .. }) if file == second));
}

fn scene_files(scene: &TestLog) -> Vec<u64> {
    LogFolder::open(scene.folder.path()).unwrap().rotated().unwrap()
}

#[test]
fn pruning_keeps_the_chain_and_is_distinguished_from_removal() {
    let scene = TestLog::new();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(1500).keep(Some(2));
    for number in 0..60 {
        log.append(&[event(number)]).unwrap();
    }
    let report = scene.verify().unwrap();
    assert_eq!(report.files, 3);
    assert!(report.first_seq > 1 && report.first_seq == scene_files(&scene)[0], "{report:?}");
    assert_eq!(report.lines, report.last_seq - report.first_seq + 1);
    let oldest = rotated_name(scene_files(&scene)[0]);
    fs::remove_file(scene.path(&oldest)).unwrap();
    assert!(matches!(scene.bad().2, Fault::Removed { .. }));
    let none = TestLog::new();
    let log = Log::open(none.folder.path()).unwrap().rotate_at(1500).keep(Some(0));
    for number in 0..60 {
        log.append(&[event(number)]).unwrap();
        assert!(none.verify().unwrap().files == 1);
    }
}

#[test]
fn a_file_of_one_line_is_pruned_and_proves_nothing_when_it_is_still_there() {
    let scene = TestLog::with_lines(1);
    let text = scene.current();
    Log::open(scene.folder.path()).unwrap().rotate_at(1).keep(Some(0)).append(&[event(1)]).unwrap();
    assert_eq!(scene_files(&scene), [] as [u64; 0]);
    let report = scene.verify().unwrap();
    assert_eq!((report.first_seq, report.files), (2, 1));
    fs::write(scene.path(&rotated_name(1)), &text).unwrap();
    assert_eq!(scene.verify().unwrap(), report);
    // The last pruned line is still known by its hash.
    let Shape::Whole(link) = line::shape(lines(&text)[0]) else { panic!() };
    let anchored =
        |seq, hash: &str| verify(scene.folder.path(), Some(&Anchor { seq, hash: hash.to_owned() }));
    assert_eq!(anchored(1, &link.hash).unwrap(), report);
    assert!(matches!(anchored(1, line::GENESIS), Err(VerifyError::NoAnchor(1))));
    assert!(matches!(anchored(0, &link.hash), Err(VerifyError::NoAnchor(0))));
}

#[test]
fn a_log_is_looked_at_again_when_files_go_meanwhile() {
    let looks = |kind: io::ErrorKind, failing: usize| {
        let mut looks = 0;
        let found = again_if_files_go(|| {
            looks += 1;
            if looks > failing { Ok(()) } else { Err(VerifyError::Io(PathBuf::new(), kind.into())) }
        });
        (looks, found.is_ok())
    };
    assert_eq!(looks(io::ErrorKind::NotFound, 2), (3, true));
    assert_eq!(looks(io::ErrorKind::NotFound, 9), (3, false));
    assert_eq!(looks(io::ErrorKind::PermissionDenied, 1), (1, false));
}

#[test]
fn what_cannot_be_a_log_is_not_taken_for_none() {
    let scene = TestLog::new();
    let file = scene.path("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(verify(&file, None), Err(VerifyError::Io(..))));
}

#[test]
fn the_first_unaccounted_partial_line_is_named() {
    let scene = TestLog::with_lines(3);
    let text = scene.current();
    let all = lines(&text);
    scene.put(&join(&[all[0], all[1], b"{", b"{", all[2]]));
    assert_eq!(scene.bad(), ("audit.jsonl".into(), 3, Fault::Changed));
}

#[test]
fn a_file_that_was_put_aside_ends_with_a_whole_line() {
    let scene = TestLog::with_lines(3);
    Log::open(scene.folder.path()).unwrap().rotate_at(1).append(&[event(3)]).unwrap();
    let aside = rotated_name(1);
    let text = fs::read(scene.path(&aside)).unwrap();
    let line_break_removed = (text[..text.len() - 1].to_vec(), 3);
    let halves = [&b"{"[..], b"{\n", b"{\n{\n", b"{\n{"].map(|half| ([&text, half].concat(), 4));
    for (text, line) in [line_break_removed].into_iter().chain(halves) {
        fs::write(scene.path(&aside), &text).unwrap();
        assert_eq!(scene.bad(), (aside.clone(), line, Fault::Changed), "{}", text.escape_ascii());
    }
}
