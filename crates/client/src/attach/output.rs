//! The destinations of a command's output.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;

use bathy_protocol::StdChannel;

/// Rewrites output before it is written, such as escaping for a terminal.
pub type Filter<'a> = Box<dyn FnMut(&[u8]) -> Vec<u8> + 'a>;

pub enum Sink<'a> {
    /// Written to a descriptor, unchanged.
    Descriptor(BorrowedFd<'a>),
    /// Written to a descriptor, through a filter.
    Filtered(BorrowedFd<'a>, Filter<'a>),
    /// Collected in memory up to a limit; the rest is only counted.
    Memory {
        buffer: Vec<u8>,
        /// The most bytes to collect.
        limit: usize,
        /// How many bytes arrived in total.
        total: u64,
    },
}

impl fmt::Debug for Sink<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Descriptor(fd) => write!(out, "Descriptor({fd:?})"),
            Self::Filtered(fd, _) => write!(out, "Filtered({fd:?})"),
            Self::Memory { buffer, limit, total } => {
                write!(out, "Memory({} of {limit}, {total} arrived)", buffer.len())
            }
        }
    }
}

impl<'a> Sink<'a> {
    /// Collects at most `limit` bytes in memory.
    pub fn memory(limit: usize) -> Self {
        Self::Memory { buffer: Vec::new(), limit, total: 0 }
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'a>> {
        match self {
            Self::Descriptor(fd) | Self::Filtered(fd, _) => Some(*fd),
            Self::Memory { .. } => None,
        }
    }
}

/// One output stream on its way to its sink.
pub(super) struct OutputWriter<'a> {
    pub which: StdChannel,
    pub sink: Sink<'a>,
    pub pending: VecDeque<u8>,
    /// Bytes that arrived and whose filtered form is not written yet.
    filtered: usize,
}

impl<'a> OutputWriter<'a> {
    pub fn new(which: StdChannel, sink: Sink<'a>) -> Self {
        Self { which, sink, pending: VecDeque::new(), filtered: 0 }
    }

    /// Accepts bytes that arrived. Returns how many of them are already dealt with.
    pub fn take(&mut self, bytes: &[u8]) -> usize {
        match &mut self.sink {
            Sink::Memory { buffer, limit, total } => {
                let space = limit.saturating_sub(buffer.len()).min(bytes.len());
                buffer.extend_from_slice(bytes.get(..space).unwrap_or_default());
                *total += bytes.len() as u64;
                bytes.len()
            }
            Sink::Descriptor(_) => {
                self.pending.extend(bytes);
                0
            }
            Sink::Filtered(_, filter) => {
                self.pending.extend(filter(bytes));
                self.filtered += bytes.len();
                if self.pending.is_empty() { std::mem::take(&mut self.filtered) } else { 0 }
            }
        }
    }

    /// Records that bytes were written. Returns how many of the received bytes that completes.
    pub fn written(&mut self, count: usize) -> usize {
        self.pending.drain(..count);
        match self.sink {
            Sink::Filtered(..) if self.pending.is_empty() => std::mem::take(&mut self.filtered),
            Sink::Filtered(..) => 0,
            _ => count,
        }
    }
}
