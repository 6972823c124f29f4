use std::fs;
use std::os::unix::fs::MetadataExt;
use std::thread;

use super::*;
use crate::follow::{Follower, LogFilter};
use crate::testing::{TestLog, event};

fn events(folder: &Path) -> Vec<Event> {
    let mut follower = Follower::open(folder, LogFilter::default()).unwrap();
    std::iter::from_fn(|| follower.next().unwrap()).map(|entry| entry.event).collect()
}

fn is_recovery(event: &Event) -> bool {
    matches!(event.what, What::Recovered { .. })
}

#[test]
fn files_are_private() {
    let scene = TestLog::with_lines(1);
    for name in ["audit.jsonl", "head.json", "audit.lock"] {
        assert_eq!(fs::metadata(scene.path(name)).unwrap().mode() & 0o777, 0o600, "{name}");
    }
    let inner = scene.path("a/b");
    Log::open(&inner).unwrap();
    assert_eq!(fs::metadata(&inner).unwrap().mode() & 0o777, 0o700);
}

#[test]
fn many_threads_make_one_chain() {
    let scene = TestLog::new();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(40_000);
    thread::scope(|scope| {
        for thread in 0..8 {
            let log = &log;
            scope.spawn(move || {
                for number in 0..125 {
                    log.append(&[event(thread * 1000 + number)]).unwrap();
                }
            });
        }
    });
    let report = scene.verify().unwrap();
    assert!(report.files > 1);
    let mut found: Vec<u32> = events(scene.folder.path())
        .iter()
        .filter(|event| event.sandbox.is_some())
        .map(|event| event.actor.pid)
        .collect();
    found.sort_unstable();
    let wanted: Vec<u32> =
        (0..8).flat_map(|thread| (0..125).map(move |number| thread * 1000 + number)).collect();
    assert_eq!(found, wanted);
}

/// A writer is killed after any number of bytes, before it could write the head.
#[test]
fn a_writer_killed_at_any_byte_costs_nothing_that_was_recorded() {
    let scene = TestLog::with_lines(2);
    let (before, head) = (scene.current(), scene.head());
    scene.log.append(&[event(2), event(3)]).unwrap();
    let after = scene.current();
    for size in before.len()..=after.len() {
        scene.put(&after[..size]);
        scene.put_head(&head);
        let whole = 2 + after[before.len()..size].iter().filter(|byte| **byte == b'\n').count();
        let torn = scene.verify().unwrap();
        let lacks_only_its_end = after.get(size) == Some(&b'\n') && size > before.len();
        let whole = whole + usize::from(lacks_only_its_end);
        assert_eq!(torn.lines, whole as u64, "{size}");
        scene.append(9);
        scene.append(10);
        let found = events(scene.folder.path());
        let recoveries = found.iter().filter(|event| is_recovery(event)).count();
        let clean = size == before.len() || after[size - 1] == b'\n';
        assert_eq!(recoveries, usize::from(!clean), "{size}");
        assert_eq!(found.len(), whole + recoveries + 2);
        let report = scene.verify().unwrap();
        assert_eq!((report.recovered, report.torn_bytes), (recoveries as u64, 0));
        assert!(scene.current().starts_with(&after[..size]), "nothing that was written is removed");
    }
}

/// The recovering writer is killed as well, at any byte; then every byte of what they left is changed.
#[test]
fn a_writer_killed_while_it_recovers_is_recovered_from() {
    let scene = TestLog::with_lines(1);
    let head = scene.head();
    let before = scene.current().len();
    scene.append(1);
    let torn = scene.current()[..before + 200].to_vec();
    scene.put(&torn);
    scene.put_head(&head);
    scene.append(2);
    let after = scene.current();
    for size in torn.len()..=after.len() {
        scene.put(&after[..size]);
        scene.put_head(&head);
        scene.verify().unwrap();
        scene.append(3);
        let report = scene.verify().unwrap();
        assert!(report.recovered >= 1, "{size}");
    }
    let text = scene.current();
    for at in before..text.len() {
        let mut changed = text.clone();
        changed[at] ^= 1;
        scene.put(&changed);
        assert!(scene.verify().is_err(), "byte {at}");
    }
}

/// Every intermediate state of a rotation.
#[test]
fn a_rotation_killed_anywhere_goes_on() {
    let scene = TestLog::with_lines(4);
    let (text, head) = (scene.current(), scene.head());
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(100);
    log.append(&[event(5)]).unwrap();
    let new = scene.current();
    for size in (0..=new.len()).map(Some).chain([None]) {
        for file in fs::read_dir(scene.folder.path()).unwrap() {
            fs::remove_file(file.unwrap().path()).unwrap();
        }
        fs::write(scene.path(&rotated_name(1)), &text).unwrap();
        scene.put_head(&head);
        if let Some(size) = size {
            scene.put(&new[..size]);
        }
        assert!(scene.verify().unwrap().lines >= 4);
        scene.append(6);
        scene.append(7);
        let report = scene.verify().unwrap();
        assert_eq!(report.files, 2);
        let found = events(scene.folder.path());
        let rotations = found.iter().filter(|event| matches!(event.what, What::Rotated { .. })).count();
        assert_eq!(rotations, 1, "{size:?}");
        assert_eq!(found.last().unwrap().actor.pid, 7);
        assert!(found.iter().any(|event| event.actor.pid == 6 && event.sandbox.is_some()));
    }
}

/// A really full disk is tested in `tests/processes.rs`.
#[test]
fn lines_without_a_head_are_taken_back() {
    let scene = TestLog::with_lines(3);
    let before = (scene.current(), scene.head());
    let file = File::options().append(true).open(scene.path("audit.jsonl")).unwrap();
    // The head cannot be written, because there is a folder in its place.
    fs::remove_file(scene.path("head.json")).unwrap();
    fs::create_dir(scene.path("head.json")).unwrap();
    let folder = LogFolder::open(scene.folder.path()).unwrap();
    let written = write_all_or_nothing(&folder, &file, b"half a line", &Head::genesis());
    assert!(written.is_err());
    assert_eq!(scene.current(), before.0);
    fs::remove_dir(scene.path("head.json")).unwrap();
    scene.put_head(&before.1);
    scene.verify().unwrap();
}

#[test]
fn an_event_that_cannot_be_put_down_takes_no_other_with_it() {
    let scene = TestLog::with_lines(1);
    let argv = vec!["x".to_owned(); 100_000];
    let (exec, user) = ("e".to_owned(), "u".to_owned());
    let what =
        What::ExecStarted { exec, argv, user, job: None, terminal: false, argv_bytes: 1, argv_digest: None };
    let refused = scene.log.append(&[event(1), Event { what, ..event(2) }]);
    assert!(matches!(refused, Err(LogError::Line(LineError::TooLong(_)))));
    assert_eq!(scene.verify().unwrap().lines, 1);
}

#[test]
fn links_are_not_followed() {
    let scene = TestLog::new();
    let target = scene.path("target");
    fs::write(&target, "precious").unwrap();
    std::os::unix::fs::symlink(&target, scene.path("audit.jsonl")).unwrap();
    assert!(matches!(scene.log.append(&[event(1)]), Err(LogError::Io(..))));
    assert_eq!(fs::read(&target).unwrap(), b"precious");
}

#[test]
fn what_has_happened_is_recorded_like_everything_else() {
    let scene = TestLog::with_lines(1);
    scene.log.append_last(&[event(1)]).unwrap();
    assert_eq!(events(scene.folder.path()), [event(0), event(1)]);
}

#[test]
fn the_head_is_written_in_place() {
    let scene = TestLog::with_lines(1);
    let file = || fs::metadata(scene.path("head.json")).unwrap().ino();
    let before = file();
    scene.append(1);
    assert_eq!(file(), before);
}

#[test]
fn failures_are_distinguished() {
    let of = |kind: io::ErrorKind| failure(Path::new("x"), kind.into());
    assert!(matches!(of(io::ErrorKind::StorageFull), LogError::Full(_)));
    assert!(matches!(of(io::ErrorKind::QuotaExceeded), LogError::Full(_)));
    assert!(matches!(of(io::ErrorKind::WouldBlock), LogError::Busy(..)));
    assert!(matches!(of(io::ErrorKind::NotFound), LogError::Io(..)));
}

#[test]
fn what_is_before_a_damaged_file_is_kept() {
    let scene = TestLog::new();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(1);
    for number in 0..4 {
        log.append(&[event(number)]).unwrap();
    }
    let folder = LogFolder::open(scene.folder.path()).unwrap();
    let before = folder.rotated().unwrap();
    // Complete lines, but later ones than the name of this file says.
    fs::write(scene.path(&rotated_name(before[2])), scene.current()).unwrap();
    log.keep(Some(2)).append(&[event(4)]).unwrap();
    let after = folder.rotated().unwrap();
    assert_eq!((before.len(), &after[..3]), (3, &before[..]));
    assert_eq!(after.len(), 4, "one more was put aside, and none removed");
}

#[test]
fn a_file_with_a_number_from_the_future_is_not_removed() {
    let scene = TestLog::with_lines(2);
    fs::write(scene.path(&rotated_name(999)), "whose?").unwrap();
    Log::open(scene.folder.path()).unwrap().rotate_at(1).keep(Some(0)).append(&[event(2)]).unwrap();
    assert_eq!(LogFolder::open(scene.folder.path()).unwrap().rotated().unwrap(), [1, 999]);
}

fn recoveries(scene: &TestLog) -> Vec<(RecoveredFrom, String)> {
    let of = |event: Event| match event.what {
        What::Recovered { from, detail, .. } => Some((from, detail)),
        _ => None,
    };
    events(scene.folder.path()).into_iter().filter_map(of).collect()
}

#[test]
fn a_writer_says_what_it_found() {
    let scene = TestLog::with_lines(3);
    let text = scene.current();
    let two = text.len() / 3 * 2;
    scene.put(&text[..two]);
    scene.append(3);
    let detail =
        format!("audit.jsonl had {two} bytes instead of {}: it should have ended with line 3", text.len());
    assert_eq!(recoveries(&scene), [(RecoveredFrom::LostLines, detail)]);
    let scene = TestLog::with_lines(3);
    scene.put(&[&text[..], b"junk\n"].concat());
    scene.append(3);
    let detail = "5 bytes at the end of audit.jsonl are foreign or incomplete".to_owned();
    assert_eq!(recoveries(&scene), [(RecoveredFrom::ForeignBytes, detail)]);
}

#[test]
fn a_head_from_before_two_rotations_finds_both_files() {
    let scene = TestLog::with_lines(2);
    let head = scene.head();
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(1);
    log.append(&[event(2)]).unwrap();
    log.append(&[event(3)]).unwrap();
    scene.put_head(&head);
    scene.append(4);
    let report = scene.verify().unwrap();
    assert_eq!((report.files, report.last_seq, report.recovered), (3, 7, 0));
}

#[test]
fn an_empty_file_that_seems_to_be_put_aside_is_not_looked_at_for_ever() {
    let scene = TestLog::new();
    Head::genesis().create(&LogFolder::open(scene.folder.path()).unwrap()).unwrap();
    fs::write(scene.path(&rotated_name(1)), "").unwrap();
    scene.append(0);
    assert_eq!(scene.verify().unwrap().files, 2);
}

#[test]
fn a_file_gets_the_name_of_its_first_line_also_when_the_head_was_lost() {
    for current_is_there in [true, false] {
        let scene = TestLog::with_lines(2);
        let log = Log::open(scene.folder.path()).unwrap().rotate_at(1);
        log.append(&[event(2)]).unwrap();
        fs::remove_file(scene.path("head.json")).unwrap();
        if !current_is_there {
            fs::remove_file(scene.path("audit.jsonl")).unwrap();
        }
        scene.append(3);
        log.append(&[event(4)]).unwrap();
        let files = LogFolder::open(scene.folder.path()).unwrap().rotated().unwrap();
        assert_eq!(files, [1, 3], "{current_is_there}");
    }
}

#[test]
fn what_the_log_does_to_itself_is_about_no_sandbox() {
    let scene = TestLog::with_lines(1);
    let named = event(1).in_sandbox("s2", Some("web".to_owned()));
    let log = Log::open(scene.folder.path()).unwrap().rotate_at(1);
    log.append(std::slice::from_ref(&named)).unwrap();
    let found = events(scene.folder.path());
    let own = Event { sandbox: None, name: None, what: found[1].what.clone(), ..named.clone() };
    assert!(matches!(own.what, What::Rotated { .. }));
    assert_eq!(found, [event(0), own, named]);
}

/// Another process that holds the lock of a log. It is killed on drop.
struct Holder(std::process::Child);

impl Holder {
    fn of(folder: &Path) -> Self {
        let mut command = std::process::Command::new("flock");
        let child =
            command.args(["--no-fork", "--exclusive"]).arg(folder.join("audit.lock")).args(["sleep", "1000"]);
        let holder = Self(child.spawn().unwrap());
        holder.until("has the lock", |holder| {
            let log = LogFolder::open(folder).unwrap();
            let file = log.file("audit.lock", OFlags::RDONLY).unwrap();
            file.is_some_and(|file| crate::holder::of(&file).is_some_and(|found| found.pid == holder.0.id()))
        });
        holder
    }

    fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let began = std::time::Instant::now();
        while !holds(self) {
            assert!(began.elapsed() < std::time::Duration::from_secs(60), "it never {what}");
            thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
        self.until("stops", |holder| {
            let stat = fs::read_to_string(format!("/proc/{}/stat", holder.0.id())).unwrap();
            stat.contains(") T ")
        });
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.0.id().cast_signed()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_writer_that_is_stopped_is_named_and_does_not_stop_the_others() {
    let scene = TestLog::with_lines(1);
    let holder = Holder::of(scene.folder.path());
    holder.stop();
    for _ in 0..3 {
        let error = scene.log.append(&[event(7)]).unwrap_err();
        let LogError::Busy(_, source) = &error else { panic!("{error:?}") };
        let pid = holder.0.id();
        let expected = format!("process {pid} holds its lock and is stopped; `kill -CONT {pid}` resumes it");
        assert!(source.to_string().starts_with(&expected), "{source}");
        assert!(scene.log.append_last(&[event(7)]).is_err());
    }
    drop(holder);
    scene.append(2);
    assert_eq!(events(scene.folder.path()).len(), 2, "nothing was recorded in between");
    scene.log.verify().unwrap();
}
