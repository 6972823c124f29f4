use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bathy_protocol::archive::ArchiveRecord;
use bathy_protocol::message::{decode, encode};
use bathy_protocol::{
    Answer, CONNECTION, Cause, Channel, CopyDirection, Decoder, Exit, FromKeeper, INITIAL_WINDOW,
    MAX_REQUEST, RefusalKind, Refused, Request, StdChannel, Transfer, Work, frame,
};

use super::{data, enter, file, names, pack, sample, wire, written};
use crate::connection::{Connection, ConnectionError};
use crate::transfer::{
    Packer, Summary, TransferError, TransferOptions, TransferSession, UnpackError, UnpackLimits, Unpacker,
    into_guest, out_of_guest,
};

pub(super) const STREAM: u32 = 5;
/// The stall timeout for guests that stall.
const STALL: Duration = Duration::from_millis(300);
/// The stall timeout for guests that do not, on a machine that may be busy.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The sandbox's side of the socket.
pub(super) struct Guest {
    pub(super) socket: UnixStream,
    decoder: Decoder,
}

/// What the client sent.
#[derive(Debug, PartialEq)]
pub(super) enum Seen {
    Request(Request),
    Input(Vec<u8>),
    HangUp,
}

impl Guest {
    pub(super) fn next(&mut self) -> Seen {
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                assert_eq!(frame.stream, STREAM);
                return match frame.channel {
                    Channel::Control => Seen::Request(decode(frame.payload).unwrap()),
                    _ => Seen::Input(frame.payload.to_vec()),
                };
            }
            let mut buffer = [0; 4096];
            match self.socket.read(&mut buffer) {
                Ok(0) | Err(_) => return Seen::HangUp,
                Ok(count) => self.decoder.push(&buffer[..count]),
            }
        }
    }

    /// Waits for a grant of more output. False if the client closed the connection.
    fn is_granted(&mut self) -> bool {
        loop {
            match self.next() {
                Seen::Request(Request::Grant { .. }) => return true,
                Seen::HangUp => return false,
                _ => {}
            }
        }
    }

    /// The client's first message.
    pub(super) fn started(&mut self) -> Transfer {
        match self.next() {
            Seen::Request(Request::Start { work: Work::Transfer(transfer), tag: 9, job: None }) => transfer,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn answer(&mut self, answer: &Answer) {
        let mut out = Vec::new();
        encode(STREAM, answer, &mut out).unwrap();
        let _ = self.socket.write_all(&out);
    }

    pub(super) fn print(&mut self, channel: Channel, bytes: &[u8]) -> bool {
        let mut out = Vec::new();
        frame::encode(STREAM, channel, bytes, &mut out);
        self.socket.write_all(&out).is_ok()
    }

    pub(super) fn exit(&mut self, code: u8) {
        self.answer(&Answer::Exited(Exit::Code(code)));
        // Wait until the client has read it.
        while self.next() != Seen::HangUp {}
    }

    /// Prints `archive` as far as the client grants it.
    pub(super) fn print_all(&mut self, archive: &[u8]) {
        let mut open = INITIAL_WINDOW as usize;
        let mut rest = archive;
        while !rest.is_empty() {
            while open == 0 {
                match self.next() {
                    Seen::Request(Request::Grant { channel: StdChannel::Stdout, bytes }) => {
                        open += bytes as usize
                    }
                    other => panic!("{other:?}"),
                }
            }
            let (now, later) = rest.split_at(rest.len().min(open).min(10_000));
            self.print(Channel::Stdout, now);
            open -= now.len();
            rest = later;
        }
    }
}

/// A connection to `guest`.
pub(super) fn connect<T: Send + 'static>(
    guest: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Connection, JoinHandle<T>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = Connection::new(ours.into()).unwrap();
    let thread =
        thread::spawn(move || guest(&mut Guest { socket: theirs, decoder: Decoder::new(MAX_REQUEST) }));
    (connection, thread)
}

fn transfer(direction: CopyDirection) -> Transfer {
    Transfer { direction, path: b"/there".into(), name: b"tree".into(), user: "user".into() }
}

/// Runs a copy out of `guest` into `destination`.
fn fetch<T: Send + 'static>(
    destination: &Path,
    guest: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Result<Summary, TransferError>, T) {
    fetch_within(TIMEOUT, destination, guest)
}

fn fetch_within<T: Send + 'static>(
    stall: Duration,
    destination: &Path,
    guest: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Result<Summary, TransferError>, T) {
    let (mut connection, thread) = connect(guest);
    let unpacker = Unpacker::new(destination, OsStr::new("item"), UnpackLimits::default()).unwrap();
    let options = TransferOptions { progress: &mut |_, _| {}, interrupt: None, stall };
    let transfer = transfer(CopyDirection::OutOfGuest);
    let outcome = TransferSession::start(&mut connection, STREAM, transfer, 9, options)
        .and_then(|session| out_of_guest(session, unpacker));
    drop(connection);
    (outcome, thread.join().unwrap())
}

/// Runs a copy of `source` into `guest`.
fn send<T: Send + 'static>(
    source: &Path,
    guest: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Result<Summary, TransferError>, T) {
    send_within(TIMEOUT, source, guest)
}

fn send_within<T: Send + 'static>(
    stall: Duration,
    source: &Path,
    guest: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Result<Summary, TransferError>, T) {
    let (mut connection, thread) = connect(guest);
    let packer = Packer::open(source).unwrap();
    let options = TransferOptions { progress: &mut |_, _| {}, interrupt: None, stall };
    let transfer = transfer(CopyDirection::IntoGuest);
    let outcome = TransferSession::start(&mut connection, STREAM, transfer, 9, options)
        .and_then(|session| into_guest(session, packer));
    drop(connection);
    (outcome, thread.join().unwrap())
}

fn small_file(folder: &Path) -> PathBuf {
    let path = folder.join("small");
    fs::write(&path, "hello").unwrap();
    path
}

/// A correct guest: reads everything within its window and grants more.
pub(super) fn take_all(guest: &mut Guest) -> Vec<u8> {
    let (mut taken, mut open) = (Vec::new(), INITIAL_WINDOW as usize);
    loop {
        match guest.next() {
            Seen::Input(bytes) => {
                open = open.checked_sub(bytes.len()).expect("the client keeps to its window");
                taken.extend(bytes);
                if open < 20_000 {
                    guest.answer(&Answer::Grant { bytes: 40_000 });
                    open += 40_000;
                }
            }
            Seen::Request(Request::CloseStdin) => return taken,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_tree_goes_into_the_guest_within_its_window() {
    let source = sample();
    let tree = source.path().join("tree");
    let (outcome, (asked, taken)) = send(&tree, |guest| {
        let asked = guest.started();
        guest.answer(&Answer::Started { pid: 7 });
        let taken = take_all(guest);
        guest.exit(0);
        (asked, taken)
    });
    assert_eq!(asked, transfer(CopyDirection::IntoGuest));
    let target = tempfile::tempdir().unwrap();
    let mut unpacker = Unpacker::new(target.path(), OsStr::new("tree"), UnpackLimits::default()).unwrap();
    unpacker.take(&taken).unwrap();
    let received = unpacker.finish().unwrap();
    assert_eq!(outcome.unwrap(), received);
    assert_eq!(super::listing(source.path()), super::listing(target.path()));
}

#[test]
fn a_tree_comes_out_of_the_guest_within_the_hosts_window() {
    let source = sample();
    let (archive, sent) = pack(&source.path().join("tree"));
    let target = tempfile::tempdir().unwrap();
    let (outcome, asked) = fetch(&target.path().join("tree"), move |guest| {
        let asked = guest.started();
        guest.print_all(&archive);
        guest.exit(0);
        asked
    });
    assert_eq!(asked, transfer(CopyDirection::OutOfGuest));
    assert_eq!(outcome.unwrap(), sent);
    assert_eq!(super::listing(source.path()), super::listing(target.path()));
}

#[test]
fn progress_is_reported_with_a_total_where_there_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = small_file(folder.path());
    let (mut connection, thread) = connect(|guest| {
        guest.started();
        take_all(guest);
        guest.exit(0);
    });
    let mut reported = Vec::new();
    let mut progress = |done, total| reported.push((done, total));
    let options = TransferOptions { progress: &mut progress, interrupt: None, stall: TIMEOUT };
    let packer = Packer::open(&path).unwrap();
    TransferSession::start(&mut connection, STREAM, transfer(CopyDirection::IntoGuest), 9, options)
        .and_then(|session| into_guest(session, packer))
        .unwrap();
    drop(connection);
    thread.join().unwrap();
    assert_eq!(reported.last(), Some(&(5, Some(5))));
}

#[test]
fn the_guests_error_text_is_the_error_and_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let complain = |guest: &mut Guest| {
        guest.started();
        guest.print(Channel::Stderr, b"/there: no such file\n");
        guest.exit(1);
    };
    let target = folder.path().join("out");
    let error = fetch(&target, complain).0.unwrap_err();
    assert_eq!(error.to_string(), "/there: no such file");
    let error = send(&small_file(folder.path()), complain).0.unwrap_err();
    assert_eq!(error.to_string(), "/there: no such file");
    let error = fetch(&target, |guest| {
        guest.started();
        for _ in 0..30 {
            guest.print(Channel::Stderr, &[b'x'; 2000]);
        }
        guest.exit(1);
    });
    assert_eq!(error.0.unwrap_err().to_string().len(), 4096);
    let error = fetch(&target, |guest| {
        guest.started();
        guest.exit(3);
    });
    assert!(matches!(error.0, Err(TransferError::FailedSilently(3))));
}

#[test]
fn c1_a_forged_success_is_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out");
    let (outcome, ()) = fetch(&target, |guest| {
        guest.started();
        guest.print(Channel::Stdout, &wire(&[file("f", 5), data("hello"), ArchiveRecord::FileEnd]));
        guest.exit(0);
    });
    assert!(matches!(outcome, Err(TransferError::Unpack(UnpackError::Truncated))), "{outcome:?}");
    // Larger than a window: the guest cannot have received all of it.
    let path = folder.path().join("large");
    fs::write(&path, vec![0; 200_000]).unwrap();
    let (outcome, ()) = send(&path, |guest| {
        guest.started();
        guest.exit(0);
    });
    assert!(matches!(outcome, Err(TransferError::Incomplete)), "{outcome:?}");
}

#[test]
fn c1_a_guest_that_says_nothing_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let silent = |guest: &mut Guest| while guest.next() != Seen::HangUp {};
    let begun = Instant::now();
    let (outcome, ()) = fetch_within(STALL, &folder.path().join("out"), silent);
    assert!(matches!(outcome, Err(TransferError::Stalled)), "{outcome:?}");
    let (outcome, ()) = send_within(STALL, &small_file(folder.path()), silent);
    assert!(matches!(outcome, Err(TransferError::Stalled)), "{outcome:?}");
    assert!((STALL * 2..TIMEOUT).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    assert_eq!(names(folder.path()), ["small"]);
}

#[test]
fn c1_chatter_is_not_progress() {
    let folder = tempfile::tempdir().unwrap();
    let chatter = |guest: &mut Guest| {
        guest.started();
        let mut noise = Vec::new();
        encode(STREAM, &Answer::Grant { bytes: 0 }, &mut noise).unwrap();
        encode(STREAM, &Answer::Eof(StdChannel::Stdout), &mut noise).unwrap();
        encode(STREAM + 1, &Answer::Exited(Exit::Code(0)), &mut noise).unwrap();
        encode(CONNECTION, &FromKeeper::Warning("warm".into()), &mut noise).unwrap();
        frame::encode(STREAM, Channel::Stdout, b"", &mut noise);
        frame::encode(STREAM, Channel::Stderr, b"x", &mut noise);
        frame::encode(STREAM + 1, Channel::Stdout, b"x", &mut noise);
        let end = Instant::now() + STALL * 10;
        while Instant::now() < end && guest.socket.write_all(&noise).is_ok() {
            thread::sleep(Duration::from_millis(5));
        }
    };
    let (outcome, ()) = fetch_within(STALL, &folder.path().join("out"), chatter);
    assert!(matches!(outcome, Err(TransferError::Stalled)), "{outcome:?}");
    let (outcome, ()) = send_within(STALL, &small_file(folder.path()), chatter);
    assert!(matches!(outcome, Err(TransferError::Stalled)), "{outcome:?}");
}

#[test]
fn c1_a_grant_of_more_than_a_window_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in [u32::MAX, INITIAL_WINDOW] {
        let (outcome, ()) = send(&small_file(folder.path()), move |guest| {
            guest.started();
            guest.answer(&Answer::Grant { bytes });
            while guest.next() != Seen::HangUp {}
        });
        let window =
            |error: &TransferError| matches!(error, TransferError::Connection(ConnectionError::Window(_)));
        assert!(outcome.as_ref().is_err_and(window), "{outcome:?}");
    }
}

#[test]
fn c1_a_flood_on_the_wrong_channel_is_not_progress() {
    let folder = tempfile::tempdir().unwrap();
    let (outcome, sent) = send_within(STALL, &small_file(folder.path()), |guest| {
        guest.started();
        let end = Instant::now() + STALL * 10;
        let mut sent = 0;
        while Instant::now() < end && guest.print(Channel::Stdout, &[0; 60_000]) && guest.is_granted() {
            sent += 60_000;
        }
        sent
    });
    assert!(matches!(outcome, Err(TransferError::Stalled)), "after {sent} bytes: {outcome:?}");
}

#[test]
fn a_refusal_and_the_sandboxs_end_are_distinguished() {
    let folder = tempfile::tempdir().unwrap();
    let (outcome, ()) = fetch(&folder.path().join("out"), |guest| {
        guest.started();
        let message = "no such user".to_owned();
        guest.answer(&Answer::Refused(Refused { kind: RefusalKind::BadRequest, message }));
        while guest.next() != Seen::HangUp {}
    });
    assert!(
        matches!(&outcome, Err(error @ TransferError::Refused(_)) if error.to_string() == "no such user")
    );
    let (outcome, ()) = fetch(&folder.path().join("out"), |guest| {
        guest.started();
        let mut out = Vec::new();
        encode(CONNECTION, &FromKeeper::Ended { cause: Cause::Killed, console: String::new() }, &mut out)
            .unwrap();
        guest.socket.write_all(&out).unwrap();
    });
    assert!(matches!(outcome, Err(TransferError::SandboxEnded { cause: Cause::Killed, .. })));
    let (outcome, _) = fetch(&folder.path().join("out"), |guest| guest.started());
    assert!(matches!(outcome, Err(TransferError::Connection(ConnectionError::KeeperExited))));
}

#[test]
fn an_interrupt_ends_the_copy_and_the_guest_is_notified() {
    let folder = tempfile::tempdir().unwrap();
    let (reader, mut writer) = UnixStream::pair().unwrap();
    writer.write_all(b"!").unwrap();
    let interrupted = |direction| {
        let (mut connection, thread) = connect(|guest| {
            guest.started();
            loop {
                match guest.next() {
                    Seen::Request(request) => {
                        guest.exit(1);
                        return Some(request);
                    }
                    Seen::HangUp => return None,
                    Seen::Input(_) => {}
                }
            }
        });
        let options =
            TransferOptions { progress: &mut |_, _| {}, interrupt: Some(reader.as_fd()), stall: TIMEOUT };
        let outcome = match direction {
            CopyDirection::IntoGuest => {
                let path = folder.path().join("large");
                fs::write(&path, vec![0; 200_000]).unwrap();
                let packer = Packer::open(&path).unwrap();
                TransferSession::start(&mut connection, STREAM, transfer(direction), 9, options)
                    .and_then(|session| into_guest(session, packer))
            }
            CopyDirection::OutOfGuest => {
                let target = folder.path().join("out");
                let unpacker = Unpacker::new(&target, OsStr::new("x"), UnpackLimits::default()).unwrap();
                TransferSession::start(&mut connection, STREAM, transfer(direction), 9, options)
                    .and_then(|session| out_of_guest(session, unpacker))
            }
        };
        assert!(matches!(outcome, Err(TransferError::Interrupted)), "{outcome:?}");
        drop(connection);
        thread.join().unwrap()
    };
    assert_eq!(interrupted(CopyDirection::IntoGuest), Some(Request::CloseStdin));
    assert_eq!(interrupted(CopyDirection::OutOfGuest), Some(Request::Signal(9)));
}

#[test]
fn what_cannot_be_written_ends_the_copy_at_once_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (outcome, seen) = fetch(folder.path(), |guest| {
        guest.started();
        let escape = [&[enter("t")][..], &written("..", "x")].concat();
        guest.print(Channel::Stdout, &wire(&escape));
        let seen = guest.next();
        guest.exit(137);
        seen
    });
    assert!(matches!(outcome, Err(TransferError::Unpack(UnpackError::Archive(_)))), "{outcome:?}");
    assert_eq!(seen, Seen::Request(Request::Signal(9)));
    assert_eq!(names(folder.path()), ["item"]);
}
