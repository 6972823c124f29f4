//! The answers to one request: records that wait until the host has room for them.

use bathy_protocol::cell::{self, Kind, MAX_RECORD};
use bathy_protocol::{
    Channel, Exit, MessageError, SendWindow, StdChannel, ToGuest, ToHost, WindowError, frame,
};

use crate::command::say;

/// Nothing is read for a stream while this much waits.
const ENOUGH: usize = 64 * 1024;

/// The most that one frame carries.
const FRAME: usize = 32 * 1024;

/// What is said on one stream.
pub struct Stream {
    pub number: u32,
    /// Nobody listens: only the end is still reported.
    abandoned: bool,
    /// The present conversation knows it.
    known: bool,
    records: Vec<u8>,
    window: SendWindow,
    exit: Option<Exit>,
}

impl Stream {
    /// A stream on which nothing was said yet.
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

    /// Whether more may be read for it.
    pub fn has_room(&self) -> bool {
        self.abandoned || self.records.len() < ENOUGH
    }

    /// Whether this is the stream that the host means by `number`.
    pub fn is(&self, number: u32) -> bool {
        self.known && self.number == number
    }

    pub fn put(&mut self, kind: Kind, payload: &[u8]) {
        if !self.abandoned {
            for part in payload.chunks(MAX_RECORD) {
                cell::put(kind, part, &mut self.records);
            }
        }
    }

    /// Adds a record of our own words, which `write` appends.
    pub fn put_with(&mut self, write: impl FnOnce(&mut Vec<u8>) -> Result<(), MessageError>) {
        if !self.abandoned && write(&mut self.records).is_err() {
            eprintln!("bathysphere agent: a record for stream {} could not be encoded", self.number);
        }
    }

    /// Nothing more is added; this follows the last record.
    pub fn end(&mut self, exit: Exit) {
        self.exit = Some(exit);
    }

    /// Nobody listens any more.
    pub fn abandon(&mut self) {
        self.abandoned = true;
        self.records = Vec::new();
    }

    /// The conversation that it belongs to is over.
    pub fn forget(&mut self) {
        self.abandon();
        self.known = false;
    }

    /// What the host may ask of the stream itself.
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

    /// Moves records to the outbox as far as the host takes them, until the outbox holds `limit` bytes.
    pub fn flush(&mut self, outbox: &mut Vec<u8>, limit: usize) {
        let mut sent = 0;
        while outbox.len() < limit {
            let rest = self.records.get(sent..).unwrap_or_default();
            let length = rest.len().min(self.window.open()).min(FRAME);
            let Some(part) = rest.get(..length).filter(|part| !part.is_empty()) else { break };
            frame::encode(self.number, Channel::Stdout, part, outbox);
            self.window.sent(length);
            sent += length;
        }
        self.records.drain(..sent);
    }

    /// Says how it ended, once everything else was sent. True if it is over.
    pub fn is_over(&mut self, outbox: &mut Vec<u8>) -> bool {
        let Some(exit) = self.exit.filter(|_| self.records.is_empty()) else { return false };
        if self.known {
            say(self.number, &ToHost::Exited(exit), outbox);
        }
        true
    }

    /// How many bytes wait.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.records.len()
    }
}
