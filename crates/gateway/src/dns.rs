//! The resolver of a sandbox, as far as it is a function of messages.
//!
//! A guest's query is taken apart and a fresh question is asked upstream; the answer is taken apart and a fresh message
//! goes to the guest. Nothing is copied through, so that neither side can hide in a message what the other should not
//! see, and what the guest learns about addresses is exactly what [`NameBook`] knows.

mod answer;
mod frame;
mod limits;
mod name_cache;
mod query;
#[cfg(test)]
mod tests;

pub use answer::{Answer, AnswerError, read_answer};
pub use frame::{FrameReader, FrameTooLong, frame};
pub use hickory_proto::op::ResponseCode;
pub use hickory_proto::rr::RecordType;
pub use limits::{LimitConfig, LimitExceeded, QueryLimits};
pub use name_cache::NameCache;
pub use query::{
    Handling, Query, QueryProblem, RefusedQuery, answer_empty, answer_refused, answer_servfail, read_query,
    upstream_query,
};

/// The longest query that is read. A name takes up to 255 bytes, and no option of a query is needed here.
pub const MAX_QUERY: usize = 1024;
/// The longest message there is, which TCP can carry.
pub const MAX_MESSAGE: usize = 65535;
/// What a client without EDNS takes over UDP.
pub const MIN_UDP: u16 = 512;
/// The most that is sent in one UDP answer, whatever the client offers.
pub const MAX_UDP: u16 = 4096;
/// The size that is asked for upstream: it fits into any path without fragments.
pub const UPSTREAM_UDP: u16 = 1232;
/// How many CNAME records are followed from the question's name.
pub const MAX_CHAIN: usize = 16;
/// How many records an answer to the guest has at most.
pub const MAX_RECORDS: usize = 128;
/// The longest time to live that a guest is given, in seconds. After it the policy is asked again.
pub const MAX_TTL: u32 = 3600;
/// The shortest time, in seconds, for which an address counts as resolved: an answer with no time to live is meant for
/// the connection that follows it.
pub const MIN_CACHE_TTL: u32 = 1;

/// How a message came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// In a datagram.
    Udp,
    /// In a frame of a stream.
    Tcp,
}
