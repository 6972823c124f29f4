//! Where a command's output goes.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;

use bathy_protocol::StdChannel;

/// Changes bytes on their way out, such as for a terminal that must not obey them.
pub type Filter<'a> = Box<dyn FnMut(&[u8]) -> Vec<u8> + 'a>;

pub enum Sink<'a> {
    /// To a descriptor, as it comes.
    Descriptor(BorrowedFd<'a>),
    /// To a descriptor, through a filter.
    Filtered(BorrowedFd<'a>, Filter<'a>),
    /// Into memory, up to a limit; the rest is counted.
    Memory {
        kept: Vec<u8>,
        /// The most to keep.
        limit: usize,
        /// How much came in all.
        total: u64,
    },
}

impl fmt::Debug for Sink<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Descriptor(fd) => write!(out, "Descriptor({fd:?})"),
            Self::Filtered(fd, _) => write!(out, "Filtered({fd:?})"),
            Self::Memory { kept, limit, total } => {
                write!(out, "Memory({} of {limit}, {total} came)", kept.len())
            }
        }
    }
}

impl<'a> Sink<'a> {
    /// Keeps at most `limit` bytes in memory.
    pub fn memory(limit: usize) -> Self {
        Self::Memory { kept: Vec::new(), limit, total: 0 }
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'a>> {
        match self {
            Self::Descriptor(fd) | Self::Filtered(fd, _) => Some(*fd),
            Self::Memory { .. } => None,
        }
    }
}

/// One output on its way to the caller.
pub(super) struct Output<'a> {
    pub which: StdChannel,
    pub sink: Sink<'a>,
    pub pending: VecDeque<u8>,
    /// Bytes that came and whose filtered form waits.
    filtered: usize,
}

impl<'a> Output<'a> {
    pub fn new(which: StdChannel, sink: Sink<'a>) -> Self {
        Self { which, sink, pending: VecDeque::new(), filtered: 0 }
    }

    /// Takes bytes that came; returns how many of them are passed on already.
    pub fn take(&mut self, bytes: &[u8]) -> usize {
        match &mut self.sink {
            Sink::Memory { kept, limit, total } => {
                let room = limit.saturating_sub(kept.len()).min(bytes.len());
                kept.extend_from_slice(bytes.get(..room).unwrap_or_default());
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

    /// The caller took bytes; returns how many of those that came are passed on by that.
    pub fn written(&mut self, count: usize) -> usize {
        self.pending.drain(..count);
        match self.sink {
            Sink::Filtered(..) if self.pending.is_empty() => std::mem::take(&mut self.filtered),
            Sink::Filtered(..) => 0,
            _ => count,
        }
    }
}
