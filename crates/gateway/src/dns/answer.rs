//! Responses of the host's resolvers: which records answer the query, and which the policy lets the guest have.

use std::net::IpAddr;
use std::time::Duration;

use bathy_policy::HostName;
use hickory_proto::op::{self, Header, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};
use thiserror::Error;

use super::{MAX_CHAIN, MAX_RECORDS, MAX_TTL, MIN_CACHE_TTL, Query};

/// A response for the guest, and what the gateway has to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The message for the guest.
    pub message: Vec<u8>,
    /// The addresses that the name now has for this sandbox, each with its TTL: that of the shortest record on the
    /// way, at least [`MIN_CACHE_TTL`].
    pub resolved: Vec<(IpAddr, Duration)>,
    /// The addresses that the policy removed.
    pub removed: Vec<IpAddr>,
    /// Either [`ResponseCode::NoError`] or [`ResponseCode::NXDomain`].
    pub code: ResponseCode,
}

/// Why a message is not a usable response.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum AnswerError {
    /// It belongs to another query, or is spoofed. Wait for the real one.
    #[error("The DNS message is not a response to this query")]
    Mismatched,
    #[error("The DNS response is malformed")]
    Malformed,
    /// It did not fit into a datagram. Retry over TCP.
    #[error("The DNS response was truncated")]
    Truncated,
    /// The server failed or refuses. Try the next one.
    #[error("The DNS resolver answered {0}")]
    Failed(ResponseCode),
    /// The CNAME chain is too long or circular.
    #[error("The DNS response has more than {MAX_CHAIN} aliases, or aliases that contradict each other")]
    Chain,
}

/// Parses a response to [`super::upstream_query`] with the same `id`. `allows` is called with the query's name and
/// each address, and also with the IPv4 address inside an IPv6 one: whether the guest may have it.
///
/// # Errors
/// If the message is not a usable response to this query.
pub fn read_answer(
    query: &Query,
    id: u16,
    bytes: &[u8],
    mut allows: impl FnMut(&HostName, IpAddr) -> bool,
) -> Result<Answer, AnswerError> {
    let received = Received::read(query, id, bytes)?;
    let chain = Chain::follow(query, &received.answers)?;
    let mut answer =
        Answer { message: Vec::new(), resolved: Vec::new(), removed: Vec::new(), code: received.code };
    let mut records: Vec<Record> = chain.aliases.iter().map(|alias| for_guest(alias, query)).collect();
    for record in chain.records.iter().take(MAX_RECORDS - records.len()) {
        let Some(address) = address_of(&record.data) else {
            records.push(for_guest(record, query));
            continue;
        };
        if !(allows(&query.name, address) && allows(&query.name, address.to_canonical())) {
            answer.removed.push(address);
            continue;
        }
        let seconds = chain.aliases.iter().fold(ttl(record), |least, alias| least.min(ttl(alias)));
        answer.resolved.push((address, Duration::from_secs(seconds.max(MIN_CACHE_TTL).into())));
        records.push(for_guest(record, query));
    }
    let mut authority = None;
    if records.len() == chain.aliases.len() {
        if answer.removed.is_empty() {
            authority = received.authorities.iter().find(|record| denies(record, &chain.end));
        } else {
            // The aliases may name hosts inside the denied network.
            records.clear();
        }
    }
    let authority = authority.map(|record| for_guest(record, query));
    answer.message = query.answer_with(received.code, records, authority);
    Ok(answer)
}

/// The sections that matter. Additional records are not even parsed.
struct Received {
    code: ResponseCode,
    answers: Vec<Record>,
    authorities: Vec<Record>,
}

impl Received {
    fn read(query: &Query, id: u16, bytes: &[u8]) -> Result<Self, AnswerError> {
        let mut decoder = BinDecoder::new(bytes);
        let header = Header::read(&mut decoder).map_err(|_| AnswerError::Mismatched)?;
        let is_answer = header.message_type == MessageType::Response && header.op_code == OpCode::Query;
        if header.id != id || !is_answer || header.counts.queries != 1 {
            return Err(AnswerError::Mismatched);
        }
        let question = op::Query::read(&mut decoder).map_err(|_| AnswerError::Mismatched)?;
        if question != op::Query::query(query.wire_name(), query.kind) {
            return Err(AnswerError::Mismatched);
        }
        if header.truncation {
            return Err(AnswerError::Truncated);
        }
        if !matches!(header.response_code, ResponseCode::NoError | ResponseCode::NXDomain) {
            return Err(AnswerError::Failed(header.response_code));
        }
        let mut section = |count: u16| {
            let read = Message::read_records(&mut decoder, count.into(), false, OpCode::Query);
            read.map(|(records, _, _)| records).map_err(|_| AnswerError::Malformed)
        };
        let answers = section(header.counts.answers)?;
        let authorities = section(header.counts.authorities)?;
        Ok(Self { code: header.response_code, answers, authorities })
    }
}

/// The records that lead from the query's name to its data.
struct Chain<'a> {
    aliases: Vec<&'a Record>,
    records: Vec<&'a Record>,
    /// The name that the aliases lead to.
    end: Name,
}

impl<'a> Chain<'a> {
    fn follow(query: &Query, answers: &'a [Record]) -> Result<Self, AnswerError> {
        let mut chain = Self { aliases: Vec::new(), records: Vec::new(), end: query.wire_name() };
        loop {
            let own = |kind| {
                let end = &chain.end;
                answers.iter().filter(move |record| {
                    record.dns_class == DNSClass::IN && record.record_type() == kind && record.name == *end
                })
            };
            let records: Vec<_> = own(query.kind).collect();
            let aliases: Vec<_> = own(RecordType::CNAME).collect();
            if !records.is_empty() {
                chain.records = records;
                return Ok(chain);
            }
            let [alias] = aliases.as_slice() else {
                return if aliases.is_empty() { Ok(chain) } else { Err(AnswerError::Chain) };
            };
            let RData::CNAME(target) = &alias.data else { return Err(AnswerError::Malformed) };
            if chain.aliases.len() == MAX_CHAIN {
                return Err(AnswerError::Chain);
            }
            chain.end = target.0.clone();
            chain.aliases.push(alias);
        }
    }
}

fn address_of(data: &RData) -> Option<IpAddr> {
    match data {
        RData::A(address) => Some(address.0.into()),
        RData::AAAA(address) => Some(address.0.into()),
        _ => None,
    }
}

/// A TTL with its highest bit set counts as zero (RFC 2181).
fn ttl(record: &Record) -> u32 {
    if record.ttl > i32::MAX.unsigned_abs() { 0 } else { record.ttl.min(MAX_TTL) }
}

/// Whether the record gives the TTL of a negative response for `name`.
fn denies(record: &Record, name: &Name) -> bool {
    record.dns_class == DNSClass::IN && record.record_type() == RecordType::SOA && record.name.zone_of(name)
}

/// A new record, with the query's name in the guest's own case.
fn for_guest(record: &Record, query: &Query) -> Record {
    let name =
        if record.name == query.original_name { query.original_name.clone() } else { record.name.clone() };
    Record::from_rdata(name, ttl(record), record.data.clone())
}
