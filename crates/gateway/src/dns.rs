//! DNS messages: queries of the guest, and responses of the host's resolvers.
//!
//! A query of the guest is parsed and a new one is built for the resolver; the response is parsed and a new one is
//! built for the guest. No byte is copied through, so neither side can smuggle anything to the other, and the guest
//! learns exactly the addresses that [`NameCache`] records.

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

/// The longest query. A name takes up to 255 bytes, and no option is needed.
pub const MAX_QUERY: usize = 1024;
/// The longest message that TCP can carry.
pub const MAX_MESSAGE: usize = 65535;
/// The longest UDP response to a client without EDNS.
pub const MIN_UDP: u16 = 512;
/// The longest UDP response, whatever the client offers.
pub const MAX_UDP: u16 = 4096;
/// The size offered to resolvers: it fits into any path without fragments.
pub const UPSTREAM_UDP: u16 = 1232;
/// How many CNAME records are followed.
pub const MAX_CHAIN: usize = 16;
/// How many records a response to the guest has at most.
pub const MAX_RECORDS: usize = 128;
/// The longest TTL that a guest gets, in seconds. After it the policy is consulted again.
pub const MAX_TTL: u32 = 3600;
/// The shortest time, in seconds, for which an address counts as resolved: a TTL of zero is meant for the
/// connection that follows.
pub const MIN_CACHE_TTL: u32 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Udp,
    /// Behind a two-byte length in a stream.
    Tcp,
}
