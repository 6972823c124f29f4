use std::thread;
use std::time::{Duration, Instant};

use bathy_protocol::archive::listing::{self, Entry, EntryType, Item, MAX_ENTRIES};
use bathy_protocol::archive::{ArchiveDecoder, ArchiveRecord, ItemPart, MAX_DATA};
use bathy_protocol::{Answer, Channel, CopyDirection, Transfer};

use super::run::{Guest, STREAM, Seen, connect, take_all};
use super::{data, enter, file, link, wire, written};
use crate::transfer::direct::{self, FileTarget, MAX_CONTENT, MAX_PATH};
use crate::transfer::run::{TransferOptions, TransferSession, receive};
use crate::transfer::{DirectError, EntryKind, FileContent, Listing, Summary, TransferError};

fn target() -> FileTarget {
    FileTarget { path: b"/there".into(), user: "user".into(), tag: 9 }
}

fn read<T: Send + 'static>(
    (offset, limit): (u64, u64),
    guest: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Result<FileContent, TransferError>, T) {
    let (mut connection, thread) = connect(guest);
    let outcome = direct::read(&mut connection, STREAM, target(), offset, limit);
    drop(connection);
    (outcome, thread.join().unwrap())
}

fn list<T: Send + 'static>(
    limit: usize,
    guest: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Result<Listing, TransferError>, T) {
    let (mut connection, thread) = connect(guest);
    let outcome = direct::list(&mut connection, STREAM, target(), limit);
    drop(connection);
    (outcome, thread.join().unwrap())
}

fn write<T: Send + 'static>(
    content: &[u8],
    guest: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Result<Summary, TransferError>, T) {
    let (mut connection, thread) = connect(guest);
    let outcome = direct::write(&mut connection, STREAM, target(), content);
    drop(connection);
    (outcome, thread.join().unwrap())
}

/// A guest that answers with `bytes` and reports success.
fn answer(bytes: Vec<u8>) -> impl FnOnce(&mut Guest) -> Transfer + Send + 'static {
    move |guest| {
        let asked = guest.started();
        guest.print_all(&bytes);
        guest.exit(0);
        asked
    }
}

/// A guest that prints `bytes`. Returns the client's next message.
fn stopped(bytes: Vec<u8>) -> impl FnOnce(&mut Guest) -> Seen + Send + 'static {
    move |guest| {
        guest.started();
        guest.print(Channel::Stdout, &bytes);
        let seen = guest.next();
        guest.exit(137);
        seen
    }
}

fn one_file(size: u64, content: &str) -> Vec<u8> {
    wire(&[file("", size), data(content), ArchiveRecord::FileEnd, ArchiveRecord::End])
}

fn entry(name: &str) -> Entry {
    Entry { name: name.into(), kind: EntryType::File, size: 3, mode: 0o640, modified_ns: 7, target: None }
}

fn items(items: &[Item]) -> Vec<u8> {
    let mut wire = Vec::new();
    for item in items {
        listing::encode(item, &mut wire).unwrap();
    }
    wire
}

fn is_direct(error: &TransferError, wanted: &str) -> bool {
    matches!(error, TransferError::Direct(_)) && error.to_string().contains(wanted)
}

#[test]
fn the_wanted_part_of_a_file_is_asked_for_and_kept() {
    let (outcome, asked) = read((3, 5), answer(one_file(1000, "hello")));
    assert_eq!(outcome.unwrap(), FileContent { bytes: b"hello".into(), total: 1000 });
    let name = ItemPart::Range { offset: 3, limit: 5 }.to_name();
    let (path, user) = (b"/there".into(), "user".into());
    assert_eq!(asked, Transfer { direction: CopyDirection::OutOfGuest, path, name, user });
    // The request is limited to what the client accepts.
    let (_, asked) = read((0, u64::MAX), answer(one_file(5, "hello")));
    assert_eq!(
        ItemPart::from_name(&asked.name),
        Some(ItemPart::Range { offset: 0, limit: MAX_CONTENT.try_into().unwrap() })
    );
}

#[test]
fn a_file_that_ends_early_is_as_long_as_it_is() {
    let empty = || wire(&[file("", 4096), ArchiveRecord::FileEnd, ArchiveRecord::End]);
    let total = |range, bytes| read(range, answer(bytes)).0.unwrap().total;
    assert_eq!(total((10, 100), one_file(4096, "hello")), 15, "it said 4096");
    assert_eq!(total((15, 100), empty()), 15, "it said 4096");
    assert_eq!(total((9000, 100), empty()), 4096, "the range is beyond the end");
    assert_eq!(total((0, 0), empty()), 4096, "nothing was asked for");
    assert_eq!(total((0, 5), one_file(1, "hello")), 5, "it grew");
}

#[test]
fn c1_a_file_of_more_than_was_asked_for_is_an_error() {
    for range in [(0, 4), (0, 0)] {
        let (outcome, seen) = read(range, stopped(one_file(5, "hello")));
        let error = outcome.unwrap_err();
        assert!(is_direct(&error, "more than was asked for"), "{error}");
        assert_eq!(seen, Seen::Request(bathy_protocol::Request::Signal(9)));
    }
    // The client closes the stream after the first byte too many.
    let (outcome, sent) = read((0, 100_000), |guest| {
        guest.started();
        guest.print(Channel::Stdout, &wire(&[file("", u64::MAX)]));
        let mut sent = 0;
        let content = wire(&[ArchiveRecord::Data(vec![0; 1000])]);
        let end = Instant::now() + Duration::from_secs(30);
        while Instant::now() < end && guest.print(Channel::Stdout, &content) {
            sent += 1000;
        }
        sent
    });
    assert!(outcome.is_err(), "after {sent} bytes");
}

#[test]
fn c1_answers_that_are_none_are_errors() {
    let folder =
        [&[enter("t")][..], &written("f", "x"), &[ArchiveRecord::Leave, ArchiveRecord::End]].concat();
    for (bytes, wanted) in [
        (wire(&folder), "did not send a file"),
        (wire(&[link("", "/etc/passwd"), ArchiveRecord::End]), "did not send a file"),
        (vec![0xff; 100], "invalid answer"),
        (wire(&[data("x")]), "invalid answer"),
    ] {
        let error = read((0, 10), stopped(bytes)).0.unwrap_err();
        assert!(is_direct(&error, wanted), "{error}");
    }
    for bytes in [vec![], wire(&[file("", 5)]), wire(&[file("", 5), data("hel")])] {
        let error = read((0, 10), answer(bytes)).0.unwrap_err();
        assert!(is_direct(&error, "stopped sending"), "{error}");
    }
    let error = read((0, 10), |guest: &mut Guest| {
        guest.started();
        guest.print(Channel::Stderr, b"/there: Permission denied\n");
        guest.exit(1);
    });
    assert_eq!(error.0.unwrap_err().to_string(), "/there: Permission denied");
}

#[test]
fn a_listing_is_sorted_whatever_the_guest_does_and_its_names_are_text() {
    let target = Some(b"/a\xff".to_vec());
    let link = Entry { kind: EntryType::Symlink, target, ..entry("b") };
    let odd = Entry { name: vec![b'a', 0xff], ..entry("") };
    let sent = [entry("c"), link, odd].map(Item::Entry);
    let sent = items(&[&sent[..], &[Item::End { total: 1 }]].concat());
    let (outcome, asked) = list(10, answer(sent));
    let listing = outcome.unwrap();
    assert_eq!(ItemPart::from_name(&asked.name), Some(ItemPart::Listing { limit: 10 }));
    assert_eq!(listing.total, 3, "there are at least those that came");
    let names: Vec<_> = listing.entries.iter().map(|entry| (entry.name.as_str(), entry.kind)).collect();
    assert_eq!(names, [("a\u{fffd}", EntryKind::File), ("b", EntryKind::Symlink), ("c", EntryKind::File)]);
    assert_eq!(listing.entries[1].target.as_deref(), Some("/a\u{fffd}"));
    let first = &listing.entries[0];
    assert_eq!((first.size, first.mode, first.modified_ns, &first.target), (3, 0o640, 7, &None));
}

#[test]
fn c1_listings_that_are_none_are_errors() {
    let two = [entry("a"), entry("b")].map(Item::Entry);
    let error = list(1, stopped(items(&two))).0.unwrap_err();
    assert!(is_direct(&error, "more than was asked for"), "{error}");
    for name in ["..", "a/b", ""] {
        let error = list(9, stopped(items(&[Item::Entry(entry(name))]))).0.unwrap_err();
        assert!(is_direct(&error, "invalid answer"), "{error}");
    }
    let error = list(9, answer(items(&two))).0.unwrap_err();
    assert!(is_direct(&error, "stopped sending"), "{error}");
    let (_, asked) = list(usize::MAX, answer(items(&[Item::End { total: 0 }])));
    assert_eq!(
        ItemPart::from_name(&asked.name),
        Some(ItemPart::Listing { limit: MAX_ENTRIES.try_into().unwrap() })
    );
}

#[test]
fn content_goes_into_the_guest_as_one_nameless_file() {
    for length in [0, 1, MAX_DATA, 300_000] {
        let content: Vec<u8> = (0..length).map(|number| (number % 251).to_le_bytes()[0]).collect();
        let (outcome, (asked, taken)) = write(&content, |guest| {
            let asked = guest.started();
            let taken = take_all(guest);
            guest.exit(0);
            (asked, taken)
        });
        let summary = outcome.unwrap();
        assert_eq!((summary.files, summary.bytes), (1, length as u64));
        assert_eq!(summary.digest, blake3::hash(&content).to_hex().to_string());
        assert_eq!((asked.direction, asked.name), (CopyDirection::IntoGuest, Vec::new()));
        let (mut decoder, mut received) = (ArchiveDecoder::default(), Vec::new());
        decoder.push(&taken);
        while let Some(record) = decoder.next_record().unwrap() {
            if let ArchiveRecord::Data(bytes) = record {
                received.extend(bytes);
            }
        }
        assert!(decoder.is_complete() && received == content, "{length}");
    }
}

#[test]
fn c1_a_forged_success_of_a_write_is_not_believed() {
    let (outcome, ()) = write(&vec![0; 200_000], |guest| {
        guest.started();
        guest.exit(0);
    });
    assert!(matches!(outcome, Err(TransferError::Incomplete)), "{outcome:?}");
}

#[test]
fn what_cannot_be_asked_is_refused_before_a_request_is_sent() {
    let (outcome, seen) = write(&vec![0; MAX_CONTENT + 1], |guest| guest.next());
    assert!(matches!(outcome, Err(TransferError::Direct(DirectError::TooLarge(_)))));
    assert_eq!(seen, Seen::HangUp);
    assert!(matches!(direct::check_path(""), Err(DirectError::EmptyPath)));
    assert!(matches!(direct::check_path("a\0b"), Err(DirectError::ZeroByte(_))));
    assert!(matches!(direct::check_path(&"x".repeat(MAX_PATH + 1)), Err(DirectError::LongPath(_))));
    assert!(direct::check_path(&"x".repeat(MAX_PATH)).is_ok());
}

#[test]
fn c1_a_guest_that_dribbles_times_out() {
    const ALL: Duration = Duration::from_millis(400);
    struct Patient;
    impl crate::transfer::run::Sink for Patient {
        type Whole = ();
        fn take(&mut self, _: &[u8]) -> Result<(), TransferError> {
            Ok(())
        }
        fn done(&self) -> u64 {
            0
        }
        fn total(&self) -> Option<u64> {
            None
        }
        fn finish(self) -> Result<(), TransferError> {
            Ok(())
        }
    }
    let (mut connection, thread) = connect(|guest| {
        guest.started();
        guest.answer(&Answer::Started { pid: 7 });
        let end = Instant::now() + ALL * 20;
        while Instant::now() < end && guest.print(Channel::Stdout, b"x") {
            thread::sleep(Duration::from_millis(20));
        }
    });
    let options =
        TransferOptions { progress: &mut |_, _| {}, interrupt: None, stall: Duration::from_secs(60) };
    let (direction, path, name) = (CopyDirection::OutOfGuest, Vec::new(), Vec::new());
    let transfer = Transfer { direction, path, name, user: String::new() };
    let begun = Instant::now();
    let session = TransferSession::start(&mut connection, STREAM, transfer, 9, options).unwrap().within(ALL);
    let outcome = receive(session, Patient);
    assert!(matches!(outcome, Err(TransferError::Stalled)), "{outcome:?}");
    assert!((ALL..ALL * 10).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    drop(connection);
    thread.join().unwrap();
}
