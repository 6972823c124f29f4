//! Queries of a DNS-over-TCP connection.

use crate::connection::TurnOutcome;
use crate::dns::{FrameReader, MAX_QUERY};
use crate::stack::Stack;

/// How many queries of one connection may be unanswered.
const MAX_QUEUED: usize = 16;
/// How many bytes of responses may be unread by the guest.
const MAX_UNREAD: usize = 64 * 1024;
const CHUNK: usize = 4096;

/// The queries of one connection.
#[derive(Debug)]
pub struct Queries {
    reader: FrameReader,
    unanswered: usize,
}

impl Queries {
    pub fn new() -> Self {
        Self { reader: FrameReader::new(MAX_QUERY), unanswered: 0 }
    }

    pub fn answered(&mut self) {
        self.unanswered = self.unanswered.saturating_sub(1);
    }

    pub fn is_idle(&self) -> bool {
        self.unanswered == 0
    }

    /// The next complete query. Backpressure: none while too many are unanswered, or `unread` bytes of responses
    /// are too many.
    pub fn take(&mut self, stack: &mut Stack, unread: usize) -> Option<TurnOutcome> {
        loop {
            if self.unanswered >= MAX_QUEUED || unread >= MAX_UNREAD {
                return None;
            }
            match self.reader.next() {
                Ok(Some(query)) => {
                    self.unanswered += 1;
                    return Some(TurnOutcome::Query(query));
                }
                Ok(None) => {}
                Err(error) => {
                    stack.tcp().abort();
                    return Some(TurnOutcome::Ended(error.to_string()));
                }
            }
            let taken = stack.tcp().recv(|bytes| {
                let part = bytes.get(..bytes.len().min(CHUNK)).unwrap_or(bytes);
                self.reader.push(part);
                (part.len(), part.len())
            });
            if !taken.is_ok_and(|count| count > 0) {
                return None;
            }
        }
    }
}

impl Default for Queries {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::time::Instant;

    use smoltcp::wire::TcpControl;

    use super::*;
    use crate::stack::guest::Guest;
    use crate::stack::{Clock, FourTuple};

    #[test]
    fn r5_a_guest_with_64_kib_of_unread_responses_gets_no_more_queries() {
        let tuple = FourTuple { guest_port: 30000, remote: SocketAddr::from((Ipv4Addr::LOCALHOST, 53)) };
        let (mut guest, mut link) = Guest::new(tuple);
        let mut stack = Stack::listen(tuple, 4096, Clock::new(), &mut link).unwrap();
        let now = Instant::now();
        stack.on_packet(&guest.syn(), now, &mut link);
        stack.transmit(now, &mut link);
        guest.segments();
        stack.on_packet(&guest.ack(), now, &mut link);
        stack.on_packet(&guest.packet(TcpControl::Psh, &[0, 1, 9]), now, &mut link);

        let mut queries = Queries::new();
        assert!(queries.take(&mut stack, 65_536).is_none());
        assert!(matches!(queries.take(&mut stack, 65_535), Some(TurnOutcome::Query(_))));
    }
}
