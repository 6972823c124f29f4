//! What a guest says about a cell of code: no input makes the host panic, wait, or pass on more than it was asked to.
#![no_main]

use std::io::Write;
use std::os::unix::net::UnixStream;

use bathy_protocol::cell::{Cell, Language};
use bathy_protocol::message::encode;
use bathy_protocol::{Answer, Channel, Exit, frame};
use bathy_client::connection::Connection;
use bathy_client::interpreter::{CellEvent, CellOptions, PreparedCell, run_cell};
use libfuzzer_sys::fuzz_target;

const STREAM: u32 = 1;
const MAX_OUTPUT: u64 = 100;

fuzz_target!(|data: &[u8]| {
    // The first byte says how the rest is cut into frames.
    let Some((cut, bytes)) = data.split_first() else { return };
    let (ours, mut theirs) = UnixStream::pair().expect("there are sockets");
    let mut wire = Vec::new();
    encode(STREAM, &Answer::Started { pid: 1 }, &mut wire).expect("our own message encodes");
    for piece in bytes.chunks(usize::from(*cut) + 1) {
        frame::encode(STREAM, Channel::Stdout, piece, &mut wire);
    }
    encode(STREAM, &Answer::Exited(Exit::Code(0)), &mut wire).expect("our own message encodes");
    theirs.write_all(&wire).expect("it fits into the socket");
    let cell = Cell {
        context: "python".into(),
        language: Language::Python,
        make: None,
        restricted: None,
        code: String::new(),
        env: vec![],
        cwd: None,
        timeout_ms: 1,
        grace_ms: 1,
        max_output: MAX_OUTPUT,
    };
    let mut connection = Connection::new(ours.into()).expect("a socket can be made non-blocking");
    let mut output = 0;
    let _ = run_cell(&mut connection, STREAM, PreparedCell { cell, tag: 1 }, &CellOptions::default(), &mut |event| {
        if let CellEvent::Stdout(bytes) = event {
            output += bytes.len() as u64;
        }
    });
    assert!(output <= MAX_OUTPUT);
});
