//! Queries of a guest, and resolvers on the loopback interface that respond, or do not.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use bathy_policy::Protocol;
use bathy_protocol::network::{FromGateway, NetEvent, Spent, decode};
use hickory_proto::op::{self, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::rdata::{A, CNAME};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::{Lookup, MAX_ATTEMPTS, MAX_QUEUED, QueryOrigin, Reply, Resolver, SERVER_TIMEOUT, random_id};
use crate::dns;
use crate::policy_check::PolicyCheck;

const PUBLIC: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);
const DATAGRAM: QueryOrigin =
    QueryOrigin::Datagram(30000, SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 0, 1)), 53));
const CONNECTION: QueryOrigin = QueryOrigin::Connection(7);
const MANY: u32 = 1000;
const NO_ANSWER: &str = "the host's resolvers did not respond";
/// The timeout for what happens at once, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

fn policy_check(preset: &str, rules: &[&str]) -> PolicyCheck {
    let own = serde_json::json!({"preset": preset, "rules": rules});
    let policies = serde_json::json!({"ceilings": [], "own": own});
    PolicyCheck::new(serde_json::from_value(policies).unwrap(), String::new())
}

fn allowing() -> PolicyCheck {
    policy_check("allow-list", &["allow *.example"])
}

/// A query as a guest sends it.
fn query(name: &str, kind: RecordType) -> Vec<u8> {
    let mut message = Message::new(0x0707, MessageType::Query, OpCode::Query);
    message.add_query(op::Query::query(Name::from_ascii(name).unwrap(), kind));
    message.to_vec().unwrap()
}

/// A resolver of the host.
struct Upstream(UdpSocket);

impl Upstream {
    fn new() -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(socket)
    }

    /// A resolver that accepts TCP connections, too.
    fn with_listener() -> (Self, TcpListener) {
        loop {
            let upstream = Self::new();
            // The same port may be in use for TCP.
            if let Ok(listener) = TcpListener::bind(upstream.address()) {
                return (upstream, listener);
            }
        }
    }

    fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    /// The next query that the resolver received.
    fn lookup(&self) -> (Message, SocketAddr) {
        let mut buffer = [0; 1024];
        let (count, from) = self.0.recv_from(&mut buffer).unwrap();
        (Message::from_vec(&buffer[..count]).unwrap(), from)
    }

    fn answer(&self, answer: &Message, to: SocketAddr) {
        self.0.send_to(&answer.to_vec().unwrap(), to).unwrap();
    }

    fn assert_not_asked(&self) {
        self.0.set_nonblocking(true).unwrap();
        assert_eq!(self.0.recv_from(&mut [0; 1]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

/// A response to this query, with these records of its name.
fn answer(query: &Message, code: ResponseCode, data: &[RData]) -> Message {
    let mut answer = Message::response(query.metadata.id, OpCode::Query);
    answer.metadata.response_code = code;
    answer.queries.clone_from(&query.queries);
    let name = &query.queries[0].name;
    answer.answers = data.iter().map(|data| Record::from_rdata(name.clone(), 60, data.clone())).collect();
    answer
}

fn good_answer(query: &Message) -> Message {
    answer(query, ResponseCode::NoError, &[RData::A(A(PUBLIC))])
}

/// A response with the TC flag and without records.
fn cut_answer(query: &Message) -> Message {
    let mut answer = answer(query, ResponseCode::NoError, &[]);
    answer.metadata.truncation = true;
    answer
}

#[track_caller]
fn waits(lookup: Lookup) -> u64 {
    match lookup {
        Lookup::Pending(number) => number,
        Lookup::Done(reply) => unreachable!("{reply:?}"),
    }
}

#[track_caller]
fn replied(lookup: Lookup) -> Reply {
    match lookup {
        Lookup::Done(reply) => reply,
        Lookup::Pending(number) => unreachable!("query {number} waits"),
    }
}

/// The code of a reply, why a name was not resolved, and whether that is a denial.
#[track_caller]
fn failure(reply: Reply) -> (ResponseCode, String, bool) {
    let code = Message::from_vec(&reply.message.unwrap()).unwrap().metadata.response_code;
    match reply.event {
        Some(NetEvent::Unresolved { reason, denied, .. }) => (code, reason, denied),
        event => unreachable!("{event:?}"),
    }
}

#[track_caller]
fn until_ready(socket: impl AsFd, flags: PollFlags) {
    let patience = Timespec::try_from(PATIENCE).unwrap();
    assert_eq!(poll(&mut [PollFd::new(&socket, flags)], Some(&patience)), Ok(1), "its socket is ready");
}

#[track_caller]
fn accept(listener: &TcpListener) -> TcpStream {
    until_ready(listener, PollFlags::IN);
    listener.accept().unwrap().0
}

/// Resumes a query once its socket is readable or writable, at the moment at which it was sent: however long the
/// machine takes, it has not timed out.
#[track_caller]
fn resume(
    resolver: &mut Resolver,
    number: u64,
    flags: PollFlags,
    policy_check: &mut PolicyCheck,
    now: Instant,
) -> Option<Lookup> {
    until_ready(resolver.socket(number).unwrap(), flags);
    resolver.resume(number, policy_check, now)
}

#[test]
fn an_allowed_query_is_resolved_by_the_host_and_its_addresses_are_known_by_the_name() {
    let upstream = Upstream::new();
    let (mut policy_check, now) = (policy_check("public", &[]), Instant::now());
    let mut resolver = Resolver::new(vec![upstream.address()], MANY);
    let lookup = resolver.start(&query("api.example", RecordType::A), DATAGRAM, &policy_check, now);
    let number = waits(lookup);
    let (request, from) = upstream.lookup();
    assert_eq!(request.queries[0].name.to_ascii(), "api.example.");
    let data = [RData::A(A(PUBLIC)), RData::A(A(Ipv4Addr::LOCALHOST))];
    upstream.answer(&answer(&request, ResponseCode::NoError, &data), from);

    let reply = replied(resume(&mut resolver, number, PollFlags::IN, &mut policy_check, now).unwrap());
    assert_eq!(reply.origin, DATAGRAM);
    let message = Message::from_vec(&reply.message.unwrap()).unwrap();
    assert_eq!((message.metadata.id, message.answers.len()), (0x0707, 1));
    let Some(NetEvent::Resolved { name, kind, addresses, removed }) = reply.event else {
        unreachable!("{:?}", reply.event)
    };
    assert_eq!((name.as_str(), kind.as_str()), ("api.example", "A"));
    assert_eq!((addresses, removed), (vec![PUBLIC.into()], vec![Ipv4Addr::LOCALHOST.into()]));
    let endpoint = policy_check.endpoint(Protocol::Tcp, SocketAddr::new(PUBLIC.into(), 443), now);
    assert_eq!(endpoint.names, ["api.example".parse().unwrap()]);
    assert!(resolver.socket(number).is_none() && resolver.due().is_none(), "nothing waits any more");
}

#[test]
fn n4_denied_and_malformed_queries_are_not_forwarded() {
    let upstream = Upstream::new();
    let mut resolver = Resolver::new(vec![upstream.address()], MANY);
    let mut ask = |bytes: &[u8], policy_check: &PolicyCheck| {
        let reply = replied(resolver.start(bytes, CONNECTION, policy_check, Instant::now()));
        assert_eq!(reply.origin, CONNECTION);
        reply
    };
    let denied = ask(&query("secret.test", RecordType::A), &allowing());
    assert_eq!(failure(denied), (ResponseCode::Refused, "preset allow-list".to_owned(), true));

    let reverse = ask(&query("1.0.0.127.in-addr.arpa", RecordType::PTR), &policy_check("open", &[]));
    let why = "the name of an address that the sandbox may not reach";
    assert_eq!(failure(reverse), (ResponseCode::Refused, why.to_owned(), true));

    let malformed = [&query("api.example", RecordType::A)[..], &[0]].concat();
    let why = "The DNS query is malformed";
    assert_eq!(failure(ask(&malformed, &allowing())), (ResponseCode::FormErr, why.to_owned(), true));

    let no_query = ask(&[0; 11], &allowing());
    assert_eq!(no_query.message, None);
    assert!(matches!(no_query.event, Some(NetEvent::Unresolved { denied: true, .. })), "{no_query:?}");

    let hidden = ask(&query("api.example", RecordType::HTTPS), &allowing());
    let message = Message::from_vec(&hidden.message.unwrap()).unwrap();
    assert_eq!((message.metadata.response_code, message.answers.len()), (ResponseCode::NoError, 0));
    assert_eq!(hidden.event, None);
    upstream.assert_not_asked();
}

#[test]
fn the_reverse_name_of_a_reachable_address_is_resolved() {
    let upstream = Upstream::new();
    let mut resolver = Resolver::new(vec![upstream.address()], MANY);
    let bytes = query("34.216.184.93.in-addr.arpa", RecordType::PTR);
    waits(resolver.start(&bytes, DATAGRAM, &policy_check("open", &[]), Instant::now()));
    assert_eq!(upstream.lookup().0.queries[0].query_type, RecordType::PTR);
}

#[test]
fn r5_queries_have_a_rate_and_a_number_that_may_be_unanswered() {
    let (upstream, policy_check, now) = (Upstream::new(), allowing(), Instant::now());
    let bytes = query("api.example", RecordType::A);
    let mut slow = Resolver::new(vec![upstream.address()], 1);
    for _ in 0..5 {
        waits(slow.start(&bytes, DATAGRAM, &policy_check, now));
    }
    let why = "The sandbox sends more than 1 DNS queries per second".to_owned();
    let limited = replied(slow.start(&bytes, DATAGRAM, &policy_check, now));
    assert_eq!(failure(limited), (ResponseCode::Refused, why, true));

    let mut fast = Resolver::new(vec![upstream.address()], MANY);
    for _ in 0..MAX_QUEUED {
        waits(fast.start(&bytes, CONNECTION, &policy_check, now));
    }
    let why = "more than 256 queries are unanswered".to_owned();
    let one_more = replied(fast.start(&bytes, DATAGRAM, &policy_check, now));
    assert_eq!(failure(one_more), (ResponseCode::ServFail, why, false));
    fast.cancel(7);
    waits(fast.start(&bytes, DATAGRAM, &policy_check, now));
}

#[test]
fn n9_a_query_is_forwarded_only_after_its_budget_was_reported() {
    let (upstream, policy_check, now) = (Upstream::new(), allowing(), Instant::now());
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (report, owner) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let mut resolver =
        Resolver::new(vec![upstream.address()], MANY).reporting_to(report.try_clone().unwrap());
    let reported = || {
        let mut message = [0; 64];
        let (length, _) = recv(&owner, &mut message, RecvFlags::empty()).ok()?;
        let FromGateway::Spent(spent) = decode(&message[..length]).unwrap() else { unreachable!("no event") };
        Some((spent.total, spent.most))
    };
    waits(resolver.start(&query("api.example", RecordType::A), DATAGRAM, &policy_check, now));
    assert_eq!(reported(), Some((16, 2)));
    waits(resolver.start(&query("api.example", RecordType::A), DATAGRAM, &policy_check, now));
    assert_eq!(reported(), None, "asking for the same again takes nothing");
    waits(resolver.start(&query("long-name.api.example", RecordType::A), DATAGRAM, &policy_check, now));
    assert_eq!(reported(), Some((37, 12)));
    // The owner does not read.
    while send(&report, &[0; 64], SendFlags::DONTWAIT).is_ok() {}
    let unreported =
        replied(resolver.start(&query("other.example", RecordType::A), DATAGRAM, &policy_check, now));
    let why = "the used DNS budgets cannot be recorded at present".to_owned();
    assert_eq!(failure(unreported), (ResponseCode::ServFail, why, false));
    let lookup: Vec<_> = (0..3).map(|_| upstream.lookup().0.queries[0].name().to_string()).collect();
    assert!(lookup.iter().all(|name| name.contains("api.example")), "{lookup:?}");
    upstream.0.set_nonblocking(true).unwrap();
    assert!(upstream.0.recv(&mut [0; 64]).is_err(), "it was not forwarded");
}

#[test]
fn n9_a_later_gateway_goes_on_with_the_budgets_of_those_before() {
    let (upstream, policy_check, now) = (Upstream::new(), allowing(), Instant::now());
    let spent = Spent { age_ms: 0, total: 0, most: 4096 };
    let mut resolver = Resolver::new(vec![upstream.address()], MANY).continuing(spent);
    let later = now + Duration::from_secs(1);
    let limited =
        replied(resolver.start(&query("a.api.example", RecordType::A), DATAGRAM, &policy_check, later));
    let why = "The sandbox resolves too many different names below api.example within a minute".to_owned();
    assert_eq!(failure(limited), (ResponseCode::Refused, why, true));
    let window = now + Duration::from_secs(61);
    waits(resolver.start(&query("a.api.example", RecordType::A), DATAGRAM, &policy_check, window));
}

#[test]
fn a_query_without_a_response_is_sent_to_one_resolver_after_the_other() {
    let servers = [Upstream::new(), Upstream::new()];
    let addresses = servers.iter().map(Upstream::address).collect();
    let (mut policy_check, mut now) = (allowing(), Instant::now());
    let mut resolver = Resolver::new(addresses, MANY);
    let lookup = resolver.start(&query("api.example", RecordType::A), DATAGRAM, &policy_check, now);
    let mut number = waits(lookup);
    for attempts in 1..=MAX_ATTEMPTS {
        assert_eq!(servers[(attempts - 1) % 2].lookup().0.queries[0].name.to_ascii(), "api.example.");
        assert_eq!(resolver.due(), Some(now + SERVER_TIMEOUT), "try {attempts}");
        let early = now + SERVER_TIMEOUT - Duration::from_nanos(1);
        assert!(resolver.expired(early).is_empty());
        assert!(resolver.resume(number, &mut policy_check, early).is_none(), "it still waits");
        now += SERVER_TIMEOUT;
        assert_eq!(resolver.expired(now), [number]);
        let lookup = resolver.resume(number, &mut policy_check, now).unwrap();
        if attempts == MAX_ATTEMPTS {
            assert_eq!(failure(replied(lookup)), (ResponseCode::ServFail, NO_ANSWER.to_owned(), false));
        } else {
            number = waits(lookup);
        }
    }
    assert_eq!(resolver.due(), None);
    servers.iter().for_each(Upstream::assert_not_asked);
}

#[test]
fn a_resolver_that_fails_is_followed_by_the_next() {
    let servers = [Upstream::new(), Upstream::new()];
    let (mut policy_check, now) = (allowing(), Instant::now());
    let mut resolver = Resolver::new(servers.iter().map(Upstream::address).collect(), MANY);
    let bytes = query("api.example", RecordType::A);
    let first = waits(resolver.start(&bytes, DATAGRAM, &policy_check, now));
    let other = waits(resolver.start(&bytes, CONNECTION, &policy_check, now));
    let (request, from) = servers[0].lookup();
    servers[0].answer(&answer(&request, ResponseCode::ServFail, &[]), from);
    let second = waits(resume(&mut resolver, first, PollFlags::IN, &mut policy_check, now).unwrap());
    assert!(second != other && resolver.socket(other).is_some(), "the other query still waits");
    let (request, from) = servers[1].lookup();
    servers[1].answer(&good_answer(&request), from);
    let reply = replied(resume(&mut resolver, second, PollFlags::IN, &mut policy_check, now).unwrap());
    assert!(matches!(reply.event, Some(NetEvent::Resolved { .. })), "{reply:?}");
}

#[test]
fn hosts_without_a_resolver_and_resolvers_that_refuse_datagrams_resolve_nothing() {
    let (mut policy_check, now) = (allowing(), Instant::now());
    let bytes = query("api.example", RecordType::A);
    let none = Resolver::new(Vec::new(), MANY).start(&bytes, DATAGRAM, &policy_check, now);
    let why = "none of the host's resolvers can be reached".to_owned();
    assert_eq!(failure(replied(none)), (ResponseCode::ServFail, why, false));

    let closed = Upstream::new().address();
    let mut resolver = Resolver::new(vec![closed], MANY);
    let mut lookup = resolver.start(&bytes, DATAGRAM, &policy_check, now);
    for _ in 0..MAX_ATTEMPTS {
        let number = waits(lookup);
        lookup = resume(&mut resolver, number, PollFlags::IN, &mut policy_check, now).unwrap();
    }
    assert_eq!(failure(replied(lookup)), (ResponseCode::ServFail, NO_ANSWER.to_owned(), false));
}

#[test]
fn n4_a_spoofed_response_is_ignored_and_the_real_one_behind_it_is_used() {
    let upstream = Upstream::new();
    let (mut policy_check, now) = (allowing(), Instant::now());
    let mut resolver = Resolver::new(vec![upstream.address()], MANY);
    let lookup = resolver.start(&query("api.example", RecordType::A), DATAGRAM, &policy_check, now);
    let number = waits(lookup);
    let (request, from) = upstream.lookup();
    let mut guess = answer(&request, ResponseCode::NoError, &[RData::A(A(Ipv4Addr::new(198, 51, 100, 9)))]);
    guess.metadata.id = guess.metadata.id.wrapping_add(1);
    upstream.answer(&guess, from);
    assert!(resume(&mut resolver, number, PollFlags::IN, &mut policy_check, now).is_none(), "it still waits");
    upstream.answer(&guess, from);
    upstream.answer(&good_answer(&request), from);
    let lookup = resume(&mut resolver, number, PollFlags::IN, &mut policy_check, now)
        .or_else(|| resume(&mut resolver, number, PollFlags::IN, &mut policy_check, now));
    let Some(NetEvent::Resolved { addresses, .. }) = replied(lookup.unwrap()).event else {
        unreachable!("it was resolved")
    };
    assert_eq!(addresses, [IpAddr::from(PUBLIC)]);
}

#[test]
fn names_that_do_not_exist_are_distinguished_from_endless_aliases() {
    let upstream = Upstream::new();
    let (mut policy_check, now) = (allowing(), Instant::now());
    let mut resolver = Resolver::new(vec![upstream.address()], MANY);
    let circle = RData::CNAME(CNAME(Name::from_ascii("api.example.").unwrap()));
    let chain = "The DNS response has more than 16 aliases, or aliases that contradict each other";
    let table = [
        (ResponseCode::NXDomain, vec![], (ResponseCode::NXDomain, "there is no such name", false)),
        (ResponseCode::NoError, vec![circle], (ResponseCode::ServFail, chain, true)),
    ];
    for (code, data, (expected, reason, denied)) in table {
        let lookup = resolver.start(&query("api.example", RecordType::A), DATAGRAM, &policy_check, now);
        let (request, from) = upstream.lookup();
        upstream.answer(&answer(&request, code, &data), from);
        let lookup = resume(&mut resolver, waits(lookup), PollFlags::IN, &mut policy_check, now);
        assert_eq!(failure(replied(lookup.unwrap())), (expected, reason.to_owned(), denied));
    }
}

/// A query whose response was truncated, so that it is retried over TCP.
struct Cut {
    resolver: Resolver,
    policy_check: PolicyCheck,
    number: u64,
    upstream: Upstream,
    server: TcpStream,
    request: Message,
    now: Instant,
}

impl Cut {
    fn new() -> Self {
        let (upstream, listener) = Upstream::with_listener();
        let (mut policy_check, now) = (allowing(), Instant::now());
        let mut resolver = Resolver::new(vec![upstream.address()], MANY);
        let lookup = resolver.start(&query("api.example", RecordType::A), CONNECTION, &policy_check, now);
        let (request, from) = upstream.lookup();
        upstream.answer(&cut_answer(&request), from);
        let now = now + SERVER_TIMEOUT / 2;
        let number =
            waits(resume(&mut resolver, waits(lookup), PollFlags::IN, &mut policy_check, now).unwrap());
        assert!(
            resume(&mut resolver, number, PollFlags::OUT, &mut policy_check, now).is_none(),
            "it is retried"
        );
        assert_eq!(resolver.due(), Some(now + SERVER_TIMEOUT), "a connection has its own time");
        let mut server = accept(&listener);
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut length = [0; 2];
        server.read_exact(&mut length).unwrap();
        let mut bytes = vec![0; u16::from_be_bytes(length).into()];
        server.read_exact(&mut bytes).unwrap();
        let request = Message::from_vec(&bytes).unwrap();
        assert_eq!(request.queries[0].name.to_ascii(), "api.example.");
        Self { resolver, policy_check, number, upstream, server, request, now }
    }

    fn resume(&mut self) -> Option<Lookup> {
        resume(&mut self.resolver, self.number, PollFlags::IN, &mut self.policy_check, self.now)
    }

    fn frame(&self, answer: &Message) -> Vec<u8> {
        dns::frame(&answer.to_vec().unwrap()).unwrap()
    }
}

#[test]
fn a_truncated_response_is_retried_over_tcp() {
    let mut cut = Cut::new();
    let framed = cut.frame(&good_answer(&cut.request));
    let (first, second) = framed.split_at(5);
    cut.server.write_all(first).unwrap();
    assert!(cut.resume().is_none(), "half an answer");
    cut.server.write_all(second).unwrap();
    let reply = replied(cut.resume().unwrap());
    assert_eq!(reply.origin, CONNECTION);
    assert!(matches!(reply.event, Some(NetEvent::Resolved { .. })), "{reply:?}");
}

#[test]
fn a_truncated_response_is_retried_at_the_same_resolver() {
    let (first, (second, listener)) = (Upstream::new(), Upstream::with_listener());
    let (mut policy_check, now) = (allowing(), Instant::now());
    let mut resolver = Resolver::new(vec![first.address(), second.address()], MANY);
    let lookup = resolver.start(&query("api.example", RecordType::A), DATAGRAM, &policy_check, now);
    let (request, from) = first.lookup();
    first.answer(&answer(&request, ResponseCode::ServFail, &[]), from);
    let lookup = resume(&mut resolver, waits(lookup), PollFlags::IN, &mut policy_check, now).unwrap();
    let (request, from) = second.lookup();
    second.answer(&cut_answer(&request), from);
    let lookup = resume(&mut resolver, waits(lookup), PollFlags::IN, &mut policy_check, now).unwrap();
    waits(lookup);
    accept(&listener);
}

#[test]
fn a_tcp_query_without_a_usable_response_is_retried_over_udp() {
    type Change = fn(&mut Message);
    let bad = |cut: &Cut, change: Change| {
        let mut answer = good_answer(&cut.request);
        change(&mut answer);
        cut.frame(&answer)
    };
    let table: [(&str, Change); 2] = [
        ("another query's", |answer| answer.metadata.id = answer.metadata.id.wrapping_add(1)),
        ("cut again", |answer| answer.metadata.truncation = true),
    ];
    for (what, change) in table {
        let mut cut = Cut::new();
        let framed = bad(&cut, change);
        cut.server.write_all(&framed).unwrap();
        waits(cut.resume().unwrap());
        assert_eq!(cut.upstream.lookup().0.queries.len(), 1, "{what}");
    }
    let Cut { mut resolver, mut policy_check, number, upstream, server, now, .. } = Cut::new();
    drop(server);
    waits(resume(&mut resolver, number, PollFlags::IN, &mut policy_check, now).unwrap());
    assert_eq!(upstream.lookup().0.queries.len(), 1, "closed without an answer");
}

#[test]
fn only_the_queries_of_a_closed_connection_are_cancelled() {
    let upstream = Upstream::new();
    let mut resolver = Resolver::new(vec![upstream.address()], MANY);
    let bytes = query("api.example", RecordType::A);
    let [gone, other, datagram] = [CONNECTION, QueryOrigin::Connection(8), DATAGRAM]
        .map(|origin| waits(resolver.start(&bytes, origin, &allowing(), Instant::now())));
    resolver.cancel(7);
    assert!(resolver.socket(gone).is_none());
    assert!(resolver.socket(other).is_some() && resolver.socket(datagram).is_some());
    assert!(resolver.resume(gone, &mut allowing(), Instant::now()).is_none());
}

#[test]
fn n4_each_query_has_its_own_random_number() {
    let numbers: std::collections::BTreeSet<_> = (0..64).filter_map(|_| random_id()).collect();
    assert!(numbers.len() > 32, "{numbers:?}");
}
