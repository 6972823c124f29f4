use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};

use bathy_protocol::cell::{
    self, Cell, CellEnd, CellEnded, CellStarted, ContextsRequest, Interrupter, Language, RecordKind,
};
use bathy_protocol::message::{decode, encode};
use bathy_protocol::{
    Answer, CONNECTION, Cause, Channel, Decoder, Exit, FromKeeper, INITIAL_WINDOW, MAX_REQUEST, RefusalKind,
    Refused, Request, StdChannel, Work, frame,
};

use super::{CellOptions, PreparedCell, run_cell, run_contexts};
use crate::connection::Connection;
use crate::interpreter::{CellEvent, CellOutcome, Collected, InterpreterError};

const STREAM: u32 = 3;

/// The sandbox's side of the socket.
struct Guest {
    socket: UnixStream,
    decoder: Decoder,
}

impl Guest {
    /// The client's next request; none when it has closed the connection.
    fn next(&mut self) -> Option<Request> {
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                assert_eq!((frame.stream, frame.channel), (STREAM, Channel::Control));
                return Some(decode(frame.payload).unwrap());
            }
            let mut buffer = [0; 4096];
            match self.socket.read(&mut buffer) {
                Ok(0) | Err(_) => return None,
                Ok(count) => self.decoder.push(&buffer[..count]),
            }
        }
    }

    fn answer(&mut self, answer: &Answer) {
        let mut out = Vec::new();
        encode(STREAM, answer, &mut out).unwrap();
        let _ = self.socket.write_all(&out);
    }

    /// Sends records as far as the client grants it.
    fn send(&mut self, records: &[u8]) {
        let mut open = INITIAL_WINDOW as usize;
        let mut rest = records;
        while !rest.is_empty() {
            while open == 0 {
                match self.next() {
                    Some(Request::Grant { channel: StdChannel::Stdout, bytes }) => open += bytes as usize,
                    // The client closed the connection.
                    None => return,
                    other => panic!("{other:?}"),
                }
            }
            let (now, later) = rest.split_at(rest.len().min(open).min(5000));
            let mut out = Vec::new();
            frame::encode(STREAM, Channel::Stdout, now, &mut out);
            if self.socket.write_all(&out).is_err() {
                return;
            }
            open -= now.len();
            rest = later;
        }
    }

    fn exit(&mut self) {
        self.answer(&Answer::Exited(Exit::Code(0)));
        while self.next().is_some() {}
    }
}

fn connect<T: Send + 'static>(
    guest: impl FnOnce(&mut Guest) -> T + Send + 'static,
) -> (Connection, JoinHandle<T>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = Connection::new(ours.into()).unwrap();
    let guest = move || {
        let mut side = Guest { socket: theirs, decoder: Decoder::new(MAX_REQUEST) };
        assert!(matches!(side.next(), Some(Request::Start { tag: 9, job: None, .. })));
        side.answer(&Answer::Started { pid: 0 });
        guest(&mut side)
    };
    (connection, thread::spawn(guest))
}

fn a_cell() -> PreparedCell {
    let cell = Cell {
        context: "python".into(),
        language: Language::Python,
        make: None,
        restricted: None,
        code: "1+1".into(),
        env: vec![],
        cwd: None,
        timeout_ms: 1000,
        grace_ms: 1000,
        max_output: 10,
    };
    PreparedCell { cell, tag: 9 }
}

fn run(
    guest: impl FnOnce(&mut Guest) + Send + 'static,
) -> (Result<CellOutcome, InterpreterError>, Vec<CellEvent>) {
    let (mut connection, thread) = connect(guest);
    let mut events = vec![];
    let outcome =
        run_cell(&mut connection, STREAM, a_cell(), &CellOptions::default(), &mut |e| events.push(e));
    drop(connection);
    thread.join().unwrap();
    (outcome, events)
}

fn ended(end: CellEnd) -> CellEnded {
    CellEnded {
        end,
        interrupted: None,
        state_lost: false,
        stdout_bytes: 0,
        stderr_bytes: 0,
        background_bytes: 0,
        stray_packets: 0,
        ran_ms: 1,
    }
}

fn finished() -> Vec<u8> {
    let mut out = vec![];
    let words = CellEnd::Finished(r#"{"status":"ok","count":4}"#.into());
    cell::put_message(RecordKind::Ended, &ended(words), &mut out).unwrap();
    out
}

#[test]
fn a_cells_events_come_in_their_order() {
    let (outcome, events) = run(|guest| {
        let mut out = vec![];
        let started = CellStarted { fresh: true, lost: None, waited_ms: 2 };
        cell::put_message(RecordKind::Started, &started, &mut out).unwrap();
        cell::put(RecordKind::Stdout, b"a\n", &mut out);
        cell::put(RecordKind::Piece, br#"{"data":{"text/pl"#, &mut out);
        cell::put(RecordKind::Display, br#"ain":"x"}}"#, &mut out);
        cell::put(RecordKind::Result, br#"{"data":{"text/plain":"2"},"omitted":[{"bytes":7}]}"#, &mut out);
        cell::put(RecordKind::Error, br#"{"name":"E","value":"v"}"#, &mut out);
        out.extend(finished());
        guest.send(&out);
        guest.exit();
    });
    let outcome = outcome.unwrap();
    assert_eq!((outcome.ok, outcome.count, outcome.started.fresh), (true, Some(4), true));
    assert_eq!(outcome.trouble(), None);
    let mut collected = Collected::default();
    events.into_iter().for_each(|event| collected.take(event));
    assert_eq!(collected.stdout.text(), "a\n");
    let texts: Vec<_> = collected.results.iter().map(|shown| shown.bundle.text("text/plain")).collect();
    assert_eq!(texts, [Some("x"), Some("2")]);
    assert_eq!(collected.results[1].bundle.omitted[0].bytes, 7);
    assert!(collected.error.is_some() && !collected.ok(&outcome));
}

#[test]
fn more_output_than_was_asked_for_is_not_kept() {
    let (outcome, events) = run(|guest| {
        let mut out = vec![];
        for _ in 0..200 {
            cell::put(RecordKind::Stdout, &[b'x'; 1000], &mut out);
        }
        out.extend(finished());
        guest.send(&out);
        guest.exit();
    });
    outcome.unwrap();
    assert_eq!(events, [CellEvent::Stdout(vec![b'x'; 10])]);
}

#[test]
fn c1_values_without_end_are_cut_off() {
    let (outcome, _) = run(|guest| {
        let mut out = vec![];
        cell::put(RecordKind::Piece, &vec![b' '; 60_000], &mut out);
        guest.send(&out.repeat(900));
    });
    assert!(matches!(outcome, Err(InterpreterError::TooMuch(_))), "{outcome:?}");
}

#[test]
fn c1_lies_of_the_guest_are_errors_and_no_panics() {
    type Expected = fn(&InterpreterError) -> bool;
    let garbage: [(&[u8], Expected); 5] = [
        (&[99, 0, 0, 0, 0], |error| matches!(error, InterpreterError::Record(_))),
        (&[2, 0xff, 0xff, 0xff, 0x7f], |error| matches!(error, InterpreterError::Record(_))),
        (&[7, 1, 0, 0, 0, b'{'], |error| matches!(error, InterpreterError::Json(..))),
        (&[9, 1, 0, 0, 0, 0xff], |error| matches!(error, InterpreterError::Record(_))),
        (&[], |error| matches!(error, InterpreterError::Unfinished)),
    ];
    for (bytes, expected) in garbage {
        let (outcome, _) = run(move |guest| {
            guest.send(bytes);
            guest.exit();
        });
        let error = outcome.unwrap_err();
        assert!(expected(&error), "{bytes:?}: {error:?}");
    }
    let deep = [b"[".repeat(10_000), b"]".repeat(10_000)].concat();
    let (outcome, _) = run(move |guest| {
        let mut out = vec![];
        cell::put(RecordKind::Result, &deep, &mut out);
        guest.send(&out);
        guest.exit();
    });
    assert!(matches!(outcome, Err(InterpreterError::Json(..))));
}

#[test]
fn an_interrupt_is_passed_on_once_and_the_end_is_waited_for() {
    let (mut connection, thread) = connect(|guest| {
        assert_eq!(guest.next(), Some(Request::Signal(libc::SIGINT)));
        let mut out = vec![];
        let end = CellEnded { interrupted: Some(Interrupter::Asked), ..ended(CellEnd::Killed) };
        cell::put_message(RecordKind::Ended, &end, &mut out).unwrap();
        guest.send(&out);
        guest.answer(&Answer::Exited(Exit::Code(1)));
        guest.next()
    });
    let (interrupt, mut raise) = UnixStream::pair().unwrap();
    raise.write_all(b"x").unwrap();
    let options = CellOptions { interrupt: Some(interrupt.as_fd()) };
    let outcome = run_cell(&mut connection, STREAM, a_cell(), &options, &mut |_| {}).unwrap();
    drop(connection);
    assert_eq!(thread.join().unwrap(), None, "no further request");
    assert!(!outcome.ok && outcome.trouble().unwrap().contains("did not react"));
}

#[test]
fn a_refusal_and_the_sandboxs_end_are_reported() {
    let (outcome, _) = run(|guest| {
        let message = "there is no context `x`".to_owned();
        guest.answer(&Answer::Refused(Refused { kind: RefusalKind::BadRequest, message }));
    });
    assert_eq!(outcome.unwrap_err().to_string(), "there is no context `x`");
    let (outcome, _) = run(|guest| {
        let mut out = Vec::new();
        let end = FromKeeper::Ended { cause: Cause::Killed, console: String::new() };
        encode(CONNECTION, &end, &mut out).unwrap();
        guest.socket.write_all(&out).unwrap();
    });
    assert!(matches!(outcome, Err(InterpreterError::SandboxEnded { .. })));
}

#[test]
fn contexts_are_listed() {
    let (mut connection, thread) = connect(|guest| {
        let mut out = vec![];
        let none: Vec<cell::ContextInfo> = vec![];
        cell::put_message(RecordKind::Contexts, &none, &mut out).unwrap();
        guest.send(&out);
        guest.exit();
    });
    assert_eq!(run_contexts(&mut connection, STREAM, ContextsRequest::List, 9).unwrap(), []);
    drop(connection);
    thread.join().unwrap();
}

#[test]
fn the_longest_code_fits_into_a_request() {
    let code = "x".repeat(cell::MAX_CODE);
    let cell = Cell { code, ..a_cell().cell };
    let mut wire = Vec::new();
    encode(1, &Request::Start { work: Work::Cell(cell), tag: 1, job: None }, &mut wire).unwrap();
    let mut decoder = Decoder::new(MAX_REQUEST);
    decoder.push(&wire);
    assert!(decoder.next_frame().unwrap().is_some());
}
