//! The answer to one request: records that are queued until the host accepts them.

use bathy_protocol::cell::{self, MAX_RECORD, RecordKind};
use bathy_protocol::{
    Channel, Exit, MessageError, SendWindow, StdChannel, ToGuest, ToHost, WindowError, frame,
};

use crate::command::send_message;

/// At this many queued bytes a stream's source is no longer read (backpressure).
const THROTTLE_AT: usize = 64 * 1024;

/// The maximum payload of one frame.
const MAX_FRAME: usize = 32 * 1024;

/// The records of one stream.
pub struct AnswerStream {
    pub number: u32,
    /// The client has left: only the end is still reported.
    abandoned: bool,
    /// The present session knows the stream.
    known: bool,
    records: Vec<u8>,
    window: SendWindow,
    exit: Option<Exit>,
}

impl AnswerStream {
    /// A stream without records.
    pub fn new(number: u32) -> Self {
        Self {
            number,
            abandoned: false,
            known: true,
            records: Vec::new(),
            window: SendWindow::default(),
            exit: None,
        }
    }

    /// Whether more may be read for this stream.
    pub fn has_capacity(&self) -> bool {
        self.abandoned || self.records.len() < THROTTLE_AT
    }

    /// Whether this is the stream that the host means by `number`.
    pub fn is(&self, number: u32) -> bool {
        self.known && self.number == number
    }

    pub fn put(&mut self, kind: RecordKind, payload: &[u8]) {
        if !self.abandoned {
            for part in payload.chunks(MAX_RECORD) {
                cell::put(kind, part, &mut self.records);
            }
        }
    }

    /// Adds a record of the agent, which `write` appends.
    pub fn put_with(&mut self, write: impl FnOnce(&mut Vec<u8>) -> Result<(), MessageError>) {
        if !self.abandoned && write(&mut self.records).is_err() {
            eprintln!("bathysphere agent: a record for stream {} could not be encoded", self.number);
        }
    }

    /// Ends the stream after its last record with this exit status.
    pub fn end(&mut self, exit: Exit) {
        self.exit = Some(exit);
    }

    /// The client has left: drops all records.
    pub fn abandon(&mut self) {
        self.abandoned = true;
        self.records = Vec::new();
    }

    /// The session has ended, so later messages of the host are not for this stream.
    pub fn forget(&mut self) {
        self.abandon();
        self.known = false;
    }

    /// Handles a message of the host for the stream itself.
    pub fn request(&mut self, message: &ToGuest) -> Result<(), WindowError> {
        match message {
            ToGuest::Grant { channel: StdChannel::Stdout, bytes } => self.window.grant(*bytes),
            ToGuest::Attach => {
                self.window = SendWindow::default();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Moves records to the outbox as far as the host's window allows, until the outbox holds `limit` bytes.
    pub fn flush(&mut self, outbox: &mut Vec<u8>, limit: usize) {
        let mut sent = 0;
        while outbox.len() < limit {
            let rest = self.records.get(sent..).unwrap_or_default();
            let length = rest.len().min(self.window.open()).min(MAX_FRAME);
            let Some(part) = rest.get(..length).filter(|part| !part.is_empty()) else { break };
            frame::encode(self.number, Channel::Stdout, part, outbox);
            self.window.sent(length);
            sent += length;
        }
        self.records.drain(..sent);
    }

    /// Sends the exit status once all records are sent. True if the stream has ended.
    pub fn is_over(&mut self, outbox: &mut Vec<u8>) -> bool {
        let Some(exit) = self.exit.filter(|_| self.records.is_empty()) else { return false };
        if self.known {
            send_message(self.number, &ToHost::Exited(exit), outbox);
        }
        true
    }

    /// How many bytes are queued.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.records.len()
    }
}
