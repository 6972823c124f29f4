//! A bounded queue of whole frames. They lie one after the other in one block of memory that is made once, so that no
//! frame allocates, and each is one slice.

use std::collections::VecDeque;

use super::{BUFFER_BYTES, BUFFER_FRAMES};

/// Where a frame lies.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: usize,
    length: usize,
}

/// Frames that wait to be taken, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Frames {
    /// Empty until there is a first frame.
    block: Vec<u8>,
    /// Frames start one after the other, and from the block's start again when its end is too near.
    spans: VecDeque<Span>,
    /// What [`space`](Self::space) gave out last. Frames that are removed in the meantime do not touch it.
    reserved: Option<Span>,
}

impl Frames {
    pub(super) fn first(&self) -> Option<&[u8]> {
        self.spans.front().and_then(|span| self.slice(*span))
    }

    /// Removes the oldest frame; `false` when there is none.
    pub(super) fn drop_first(&mut self) -> bool {
        self.spans.pop_front().is_some()
    }

    /// All frames, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.spans.iter().filter_map(|span| self.slice(*span))
    }

    /// Removes all frames; returns how many there were.
    pub(super) fn clear(&mut self) -> usize {
        let count = self.spans.len();
        self.spans.clear();
        count
    }

    /// Whether a frame of `length` bytes can be added.
    pub(super) fn has_room(&self, length: usize) -> bool {
        self.start_for(length).is_some()
    }

    /// The bytes where the next frame will lie, if the buffer has space for one of `length` bytes. They hold whatever was
    /// there before.
    pub(super) fn space(&mut self, length: usize) -> Option<&mut [u8]> {
        let start = self.start_for(length)?;
        if self.block.is_empty() {
            self.block = vec![0; BUFFER_BYTES];
            self.spans.reserve_exact(BUFFER_FRAMES);
        }
        self.reserved = Some(Span { start, length });
        self.block.get_mut(start..start.checked_add(length)?)
    }

    /// Adds the frame that was written to the first `length` bytes of the [`space`](Self::space) that was given out last;
    /// `false` when that was shorter, or holds a frame already.
    pub(super) fn commit(&mut self, length: usize) -> bool {
        let span = self.reserved.take().filter(|reserved| length <= reserved.length);
        self.spans.extend(span.map(|reserved| Span { length, ..reserved }));
        span.is_some()
    }

    /// Adds a copy of a frame; `false` when the buffer has no space for it.
    pub(super) fn push(&mut self, frame: &[u8]) -> bool {
        let Some(space) = self.space(frame.len()) else { return false };
        space.copy_from_slice(frame);
        self.commit(frame.len())
    }

    fn slice(&self, span: Span) -> Option<&[u8]> {
        self.block.get(span.start..span.start.checked_add(span.length)?)
    }

    /// Where a frame of `length` bytes would start.
    fn start_for(&self, length: usize) -> Option<usize> {
        if self.spans.len() >= BUFFER_FRAMES {
            return None;
        }
        let (Some(oldest), Some(newest)) = (self.spans.front(), self.spans.back()) else {
            // Starting over when there is nothing keeps the same few pages in use.
            return (length <= BUFFER_BYTES).then_some(0);
        };
        let end = newest.start.saturating_add(newest.length);
        let fits = |limit: usize, start: usize| limit.checked_sub(start).is_some_and(|room| room >= length);
        if newest.start < oldest.start {
            return fits(oldest.start, end).then_some(end);
        }
        fits(BUFFER_BYTES, end).then_some(end).or_else(|| fits(oldest.start, 0).then_some(0))
    }
}
