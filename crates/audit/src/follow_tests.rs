use std::fs;

use super::*;
use crate::log::Log;
use crate::testing::{Scene, event};

fn pids(follower: &mut Follower) -> Vec<u32> {
    std::iter::from_fn(|| follower.next().unwrap())
        .filter(|entry| entry.event.sandbox.is_some())
        .map(|entry| entry.event.actor.pid)
        .collect()
}

fn follow(scene: &Scene, filter: Filter) -> Follower {
    Follower::open(scene.folder.path(), filter).unwrap()
}

#[test]
fn events_come_as_they_are_appended_across_rotations() {
    let scene = Scene::new();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(1000);
    let mut early = follow(&scene, Filter::default());
    assert_eq!(early.next().unwrap(), None);
    let mut seen = vec![];
    for number in 0..50 {
        log.append(&[event(number)]).unwrap();
        // Sometimes several files pass before it looks.
        if number % 13 == 0 {
            seen.extend(pids(&mut early));
        }
    }
    seen.extend(pids(&mut early));
    assert_eq!(seen, (0..50).collect::<Vec<_>>());
    assert_eq!(pids(&mut follow(&scene, Filter::default())), (0..50).collect::<Vec<_>>());
    assert_eq!(early.unreadable(), 0);
}

#[test]
fn a_follower_beside_writers_misses_nothing() {
    let scene = Scene::new();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(3000);
    let mut follower = follow(&scene, Filter::default());
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
fn filters_choose_by_id_name_and_time() {
    let scene = Scene::new();
    let named = Event { name: Some("web".into()), sandbox: Some("s2".into()), ..event(3) };
    scene.log.append(&[event(1), event(2), named, event(4)]).unwrap();
    let by = |sandbox: &str| Filter { sandbox: Some(sandbox.into()), since_unix_ns: None };
    assert_eq!(pids(&mut follow(&scene, by("s1"))), [1, 2, 4]);
    assert_eq!(pids(&mut follow(&scene, by("s2"))), [3]);
    assert_eq!(pids(&mut follow(&scene, by("web"))), [3]);
    assert_eq!(pids(&mut follow(&scene, by("we"))), [] as [u32; 0]);
    let since = Filter { sandbox: None, since_unix_ns: Some(3) };
    assert_eq!(pids(&mut follow(&scene, since)), [3, 4]);
}

#[test]
fn old_files_are_not_read_for_new_events() {
    let scene = Scene::new();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(1);
    log.append(&[event(1)]).unwrap();
    log.append(&[Event { time_unix_ns: u64::MAX - 1, ..event(2) }]).unwrap();
    // What cannot be read would be counted.
    fs::write(scene.path(&rotated_name(1)), "x\n").unwrap();
    let mut follower = follow(&scene, Filter { sandbox: None, since_unix_ns: Some(u64::MAX - 1) });
    assert_eq!(pids(&mut follower), [2]);
    assert_eq!(follower.unreadable(), 0);
}

#[test]
fn half_a_line_is_waited_for_and_passed_over_when_it_stays_one() {
    let scene = Scene::with_lines(3);
    let (text, head) = (scene.current(), scene.head());
    let mut follower = follow(&scene, Filter::default());
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
    let scene = Scene::with_lines(2);
    let text = scene.current();
    for junk in [vec![b'x'; 1 << 20], vec![b'\n'; 1000], vec![0xff; 300_000], b"{}\n[]\n".repeat(100)] {
        for first in [7, 8, 9] {
            fs::write(scene.path(&rotated_name(first)), &junk).unwrap();
        }
        scene.put(&[&text[..], &junk, b"\n", &text].concat());
        let mut follower = follow(&scene, Filter::default());
        assert_eq!(pids(&mut follower), [0, 1, 0, 1]);
        assert!(follower.unreadable() > 0);
        assert!(follower.buffer.capacity() < 4 * MAX_LINE);
    }
}
