//! Queries of the guest, the responses that need no resolver, and the query for the resolver.

use std::net::IpAddr;

use bathy_policy::HostName;
use hickory_proto::op::{self, Edns, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{DNSClass, Name, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};
use thiserror::Error;

use super::{MAX_MESSAGE, MAX_QUERY, MAX_UDP, MIN_UDP, Transport, UPSTREAM_UDP};

const HEADER: usize = 12;
/// Extended DNS errors (RFC 8914): the option, and the code for a name that a policy blocks.
const EXTENDED_ERROR: u16 = 15;
const BLOCKED: u16 = 15;
/// The longest explanation. With the longest name it still fits into [`MIN_UDP`].
const MAX_EXPLANATION: usize = 200;

/// A valid query of the guest.
#[derive(Clone, Debug)]
pub struct Query {
    /// The name in canonical form, as rules compare it.
    pub name: HostName,
    pub kind: RecordType,
    /// What to do if the policy allows the name.
    pub handling: Handling,
    /// The address of a name below `in-addr.arpa` or `ip6.arpa`. A sandbox that may not reach an address may not
    /// resolve its name either.
    pub reverse: Option<IpAddr>,
    /// The name in the guest's own case, which it may compare (0x20).
    pub(super) original_name: Name,
    id: u16,
    recursion_desired: bool,
    checking_disabled: bool,
    has_edns: bool,
    /// The longest response that the guest accepts.
    limit: usize,
}

/// What to do with a query that the policy allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handling {
    Forward,
    /// Answer that there are no records: HTTPS and SVCB would offer encrypted ClientHellos and other ports.
    Empty,
}

/// A query that is rejected without consulting the policy.
#[derive(Debug)]
pub struct RefusedQuery {
    pub problem: QueryProblem,
    /// The response. None if the message was not a query.
    pub answer: Option<Vec<u8>>,
}

#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum QueryProblem {
    /// Too short for a header, or a response.
    #[error("The message is not a DNS query")]
    NotQuery,
    #[error("The query is longer than {MAX_QUERY} bytes")]
    TooLong,
    /// Not exactly one query and at most one EDNS record.
    #[error("The DNS query is malformed")]
    Malformed,
    /// An update, a notification or the like.
    #[error("The DNS operation is not supported; only queries are")]
    Operation,
    #[error("The version of EDNS is not supported")]
    EdnsVersion,
    #[error("The DNS class is not supported; only IN is")]
    Class,
    /// A type that transfers zones, carries raw data, or is unknown.
    #[error("DNS records of type {0} are not resolved in a sandbox")]
    Kind(RecordType),
    /// A name that is not a valid host name.
    #[error("The DNS name is not a valid host name")]
    Name,
    /// A reverse name that is not that of a whole address.
    #[error("The DNS name is in the reverse tree, but has no whole address")]
    Reverse,
}

/// Parses a query of the guest.
///
/// # Errors
/// If it is never forwarded, whatever the policy says. The error holds the response.
pub fn read_query(bytes: &[u8], transport: Transport) -> Result<Query, RefusedQuery> {
    check_header(bytes)?;
    let malformed = || refuse_bare(bytes, QueryProblem::Malformed, ResponseCode::FormErr);
    let mut decoder = BinDecoder::new(bytes);
    let message = Message::read(&mut decoder).map_err(|_| malformed())?;
    let [question] = message.queries.as_slice() else { return Err(malformed()) };
    if !decoder.is_empty() || !message.additionals.is_empty() {
        return Err(malformed());
    }
    let limit = match (transport, &message.edns) {
        (Transport::Tcp, _) => MAX_MESSAGE,
        (Transport::Udp, Some(edns)) => edns.max_payload().clamp(MIN_UDP, MAX_UDP).into(),
        (Transport::Udp, None) => MIN_UDP.into(),
    };
    let refuse = |problem, code| {
        let mut answer = response(message.metadata.id, code);
        answer.metadata.recursion_desired = message.metadata.recursion_desired;
        answer.add_query(question.clone());
        answer.edns = message.edns.as_ref().map(|_| our_edns());
        RefusedQuery { problem, answer: Some(encode(&answer, limit)) }
    };
    if message.edns.as_ref().is_some_and(|edns| edns.version() != 0) {
        return Err(refuse(QueryProblem::EdnsVersion, ResponseCode::BADVERS));
    }
    if question.query_class != DNSClass::IN {
        return Err(refuse(QueryProblem::Class, ResponseCode::Refused));
    }
    let Some(handling) = handling(question.query_type) else {
        return Err(refuse(QueryProblem::Kind(question.query_type), ResponseCode::Refused));
    };
    let Some(name) = host_name(&question.name) else {
        return Err(refuse(QueryProblem::Name, ResponseCode::Refused));
    };
    let reverse =
        reverse_address(&question.name).map_err(|problem| refuse(problem, ResponseCode::Refused))?;
    Ok(Query {
        name,
        kind: question.query_type,
        handling,
        reverse,
        original_name: question.name.clone(),
        id: message.metadata.id,
        recursion_desired: message.metadata.recursion_desired,
        checking_disabled: message.metadata.checking_disabled,
        has_edns: message.edns.is_some(),
        limit,
    })
}

/// The record counts are checked before anything is parsed, so that they cannot drive the parser.
fn check_header(bytes: &[u8]) -> Result<(), RefusedQuery> {
    let Some(&[_, _, flags, _, counts @ ..]) = bytes.first_chunk::<HEADER>() else {
        return Err(RefusedQuery { problem: QueryProblem::NotQuery, answer: None });
    };
    if flags & 0x80 != 0 {
        return Err(RefusedQuery { problem: QueryProblem::NotQuery, answer: None });
    }
    if bytes.len() > MAX_QUERY {
        return Err(refuse_bare(bytes, QueryProblem::TooLong, ResponseCode::FormErr));
    }
    if flags & 0x78 != 0 {
        return Err(refuse_bare(bytes, QueryProblem::Operation, ResponseCode::NotImp));
    }
    let is_truncated = flags & 0x02 != 0;
    if is_truncated || !matches!(counts, [0, 1, 0, 0, 0, 0, 0, 0 | 1]) {
        return Err(refuse_bare(bytes, QueryProblem::Malformed, ResponseCode::FormErr));
    }
    Ok(())
}

/// Which record types are forwarded. All others are refused.
fn handling(kind: RecordType) -> Option<Handling> {
    match kind {
        RecordType::A
        | RecordType::AAAA
        | RecordType::CAA
        | RecordType::CNAME
        | RecordType::MX
        | RecordType::NAPTR
        | RecordType::NS
        | RecordType::PTR
        | RecordType::SOA
        | RecordType::SRV
        | RecordType::SSHFP
        | RecordType::TLSA
        | RecordType::TXT => Some(Handling::Forward),
        RecordType::HTTPS | RecordType::SVCB => Some(Handling::Empty),
        _ => None,
    }
}

/// The name without the root's dot. A dot inside a label would make it another name.
fn host_name(name: &Name) -> Option<HostName> {
    let mut text = String::new();
    for label in name.iter() {
        let label = str::from_utf8(label).ok().filter(|label| label.is_ascii() && !label.contains('.'))?;
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(label);
    }
    text.parse().ok()
}

fn reverse_address(name: &Name) -> Result<Option<IpAddr>, QueryProblem> {
    let labels: Vec<&[u8]> = name.iter().collect();
    let is_reverse = matches!(labels.as_slice(), [.., tree, arpa] if arpa.eq_ignore_ascii_case(b"arpa")
        && (tree.eq_ignore_ascii_case(b"in-addr") || tree.eq_ignore_ascii_case(b"ip6")));
    if !is_reverse {
        return Ok(None);
    }
    let network = name.parse_arpa_name().map_err(|_| QueryProblem::Reverse)?;
    let is_whole = network.prefix_len() == network.max_prefix_len();
    if is_whole { Ok(Some(network.addr())) } else { Err(QueryProblem::Reverse) }
}

/// The response for a name that the policy denies. A guest with EDNS also gets the reason.
#[must_use]
pub fn answer_refused(query: &Query, explanation: &str) -> Vec<u8> {
    let mut message = query.response(ResponseCode::Refused);
    if let Some(edns) = &mut message.edns {
        let text: String =
            explanation.chars().filter(|letter| !letter.is_control()).take(MAX_EXPLANATION).collect();
        let mut option = BLOCKED.to_be_bytes().to_vec();
        option.extend_from_slice(
            text.get(..text.floor_char_boundary(MAX_EXPLANATION)).unwrap_or(&text).as_bytes(),
        );
        edns.options_mut().insert(EdnsOption::Unknown(EXTENDED_ERROR, option));
    }
    encode(&message, query.limit)
}

/// The response that there are no records of this type.
#[must_use]
pub fn answer_empty(query: &Query) -> Vec<u8> {
    encode(&query.response(ResponseCode::NoError), query.limit)
}

/// The response when no resolver gave a usable one.
#[must_use]
pub fn answer_servfail(query: &Query) -> Vec<u8> {
    encode(&query.response(ResponseCode::ServFail), query.limit)
}

/// A new query: only the name and the type are the guest's.
#[must_use]
pub fn upstream_query(query: &Query, id: u16) -> Vec<u8> {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(op::Query::query(query.wire_name(), query.kind));
    message.edns = Some(our_edns());
    encode(&message, MAX_MESSAGE)
}

impl Query {
    /// The name as it is queried upstream.
    pub(super) fn wire_name(&self) -> Name {
        self.original_name.to_lowercase()
    }

    /// The response with these records. If the guest cannot accept it whole, it has none and is marked as
    /// truncated.
    pub(super) fn answer_with(
        &self,
        code: ResponseCode,
        answers: Vec<Record>,
        authority: Option<Record>,
    ) -> Vec<u8> {
        let mut message = self.response(code);
        message.answers = answers;
        message.authorities.extend(authority);
        encode(&message, self.limit)
    }

    fn response(&self, code: ResponseCode) -> Message {
        let mut message = response(self.id, code);
        message.metadata.recursion_desired = self.recursion_desired;
        message.metadata.checking_disabled = self.checking_disabled;
        message.add_query(op::Query::query(self.original_name.clone(), self.kind));
        message.edns = self.has_edns.then(our_edns);
        message
    }
}

fn response(id: u16, code: ResponseCode) -> Message {
    let mut message = Message::response(id, OpCode::Query);
    message.metadata.recursion_available = true;
    message.metadata.response_code = code;
    message
}

fn our_edns() -> Edns {
    let mut edns = Edns::new();
    edns.set_max_payload(UPSTREAM_UDP).set_version(0);
    edns
}

fn encode(message: &Message, limit: usize) -> Vec<u8> {
    let whole = message.to_vec().ok().filter(|bytes| bytes.len() <= limit);
    let fitting = whole.or_else(|| {
        let mut cut = message.clone();
        cut.answers.clear();
        cut.authorities.clear();
        cut.edns = cut.edns.map(|_| our_edns());
        cut.metadata.truncation = true;
        cut.to_vec().ok()
    });
    fitting.unwrap_or_else(|| bare(&message.metadata.id.to_be_bytes(), ResponseCode::ServFail))
}

fn refuse_bare(query: &[u8], problem: QueryProblem, code: ResponseCode) -> RefusedQuery {
    RefusedQuery { problem, answer: Some(bare(query, code)) }
}

/// Only a header, for queries that cannot be echoed. `query` begins with the id.
fn bare(query: &[u8], code: ResponseCode) -> Vec<u8> {
    const RESPONSE: u8 = 0x80;
    const RECURSION_AVAILABLE: u8 = 0x80;
    let mut answer: Vec<u8> = query.iter().copied().chain([0, 0]).take(2).collect();
    let flags = query.get(2).copied().unwrap_or_default();
    // The opcode and the RD flag are echoed.
    answer.push(RESPONSE | (flags & 0x79));
    answer.push(RECURSION_AVAILABLE | code.low());
    answer.resize(HEADER, 0);
    answer
}
