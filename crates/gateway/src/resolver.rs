//! The resolver: each query of the guest that the policy allows is sent anew to the host's resolvers.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_policy::Access;
use bathy_protocol::network::{FromGateway, NetEvent, Spent, encode};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::dns::{
    self, Answer, AnswerError, FrameReader, Handling, LimitConfig, MAX_MESSAGE, Query, QueryLimits,
    ResponseCode, Transport,
};
use crate::host;
use crate::policy_check::PolicyCheck;

/// How many queries may be unanswered.
const MAX_QUEUED: usize = 256;
/// How long one server may take to respond.
const SERVER_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a query is sent, to one server after the other.
const MAX_ATTEMPTS: usize = 4;

/// Where a query came from, and its response goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryOrigin {
    /// A datagram from this port of the guest, to this address of the gateway.
    Datagram(u16, SocketAddr),
    /// The number of a DNS-over-TCP connection.
    Connection(u64),
}

/// A response for the guest.
#[derive(Debug)]
pub struct Reply {
    pub origin: QueryOrigin,
    /// None if the guest did not send a query.
    pub message: Option<Vec<u8>>,
    pub event: Option<NetEvent>,
}

/// The progress of a query.
#[derive(Debug)]
pub enum Lookup {
    Done(Reply),
    /// Sent to a server, under this number; its socket is to be watched.
    Pending(u64),
}

#[derive(Debug)]
struct PendingQuery {
    origin: QueryOrigin,
    query: Query,
    id: u16,
    attempts: usize,
    deadline: Instant,
    socket: OwnedFd,
    /// The UDP response was truncated, so the query is retried over TCP: what is still to be sent, and the reader
    /// of the response.
    stream: Option<(Vec<u8>, FrameReader)>,
}

/// Forwards queries to the host's resolvers.
#[derive(Debug)]
pub struct Resolver {
    servers: Vec<SocketAddr>,
    limits: QueryLimits,
    pending: BTreeMap<u64, PendingQuery>,
    last: u64,
    buffer: Vec<u8>,
    /// The owner keeps the used budgets for the next gateway: its socket, and what was last reported.
    report: Option<(OwnedFd, Spent)>,
}

impl Resolver {
    pub fn new(servers: Vec<SocketAddr>, per_second: u32) -> Self {
        let config =
            LimitConfig { rate: per_second, burst: per_second.saturating_mul(5), ..LimitConfig::default() };
        Self {
            servers,
            limits: QueryLimits::new(config, Duration::ZERO),
            pending: BTreeMap::new(),
            last: 0,
            buffer: vec![0; MAX_MESSAGE],
            report: None,
        }
    }

    /// Reports used budgets to the owner, before the query is sent.
    pub fn reporting_to(mut self, socket: OwnedFd) -> Self {
        self.report = Some((socket, Spent::default()));
        self
    }

    /// Continues with the budgets of earlier gateways of this sandbox.
    pub fn continuing(mut self, spent: Spent) -> Self {
        self.limits.carry_over(spent, Duration::ZERO);
        self
    }

    /// Reports the used budgets. Returns whether the owner received them: a budget that is not recorded must not be
    /// used.
    fn report_spent(&mut self, now: Duration) -> bool {
        let spent = self.limits.spent(now);
        let Some((socket, last)) = &mut self.report else { return true };
        if (spent.total, spent.most) == (last.total, last.most) {
            return true;
        }
        let Ok(message) = encode(&FromGateway::Spent(spent)) else { return false };
        let is_sent = send(&*socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok();
        if is_sent {
            *last = spent;
        }
        is_sent
    }

    /// Handles a query of the guest.
    pub fn start(
        &mut self,
        bytes: &[u8],
        origin: QueryOrigin,
        policy_check: &PolicyCheck,
        now: Instant,
    ) -> Lookup {
        let transport = match origin {
            QueryOrigin::Datagram(..) => Transport::Udp,
            QueryOrigin::Connection(_) => Transport::Tcp,
        };
        let query = match dns::read_query(bytes, transport) {
            Ok(query) => query,
            Err(refused) => {
                let event = NetEvent::Unresolved {
                    name: String::new(),
                    kind: String::new(),
                    reason: refused.problem.to_string(),
                    denied: true,
                };
                return Lookup::Done(Reply { origin, message: refused.answer, event: Some(event) });
            }
        };
        let done = |message, event| Lookup::Done(Reply { origin, message: Some(message), event });
        let decision = policy_check.resolve(&query.name);
        if decision.access != Access::Allow {
            let rule = decision.by.to_string();
            return done(dns::answer_refused(&query, &rule), Some(unresolved(&query, rule, true)));
        }
        if query.reverse.is_some_and(|address| !policy_check.reveal(&query.name, address)) {
            let why = "the name of an address that the sandbox may not reach";
            return done(dns::answer_refused(&query, why), Some(unresolved(&query, why.to_owned(), true)));
        }
        if query.handling == Handling::Empty {
            return done(dns::answer_empty(&query), None);
        }
        if let Err(limited) = self.limits.admit(&query.name, query.kind, policy_check.time(now)) {
            let why = limited.to_string();
            return done(dns::answer_refused(&query, &why), Some(unresolved(&query, why, true)));
        }
        if !self.report_spent(policy_check.time(now)) {
            let why = "the used DNS budgets cannot be recorded at present".to_owned();
            return done(dns::answer_servfail(&query), Some(unresolved(&query, why, false)));
        }
        if self.pending.len() >= MAX_QUEUED {
            let why = format!("more than {MAX_QUEUED} queries are unanswered");
            return done(dns::answer_servfail(&query), Some(unresolved(&query, why, false)));
        }
        match self.send(&query, 0) {
            Some((socket, id, attempts)) => {
                let deadline = now + SERVER_TIMEOUT;
                self.wait(PendingQuery { origin, query, id, attempts, deadline, socket, stream: None })
            }
            None => {
                let why = "none of the host's resolvers can be reached".to_owned();
                done(dns::answer_servfail(&query), Some(unresolved(&query, why, false)))
            }
        }
    }

    /// Sends a query to the next server that can be reached, with a random port and id against spoofing.
    fn send(&self, query: &Query, attempts: usize) -> Option<(OwnedFd, u16, usize)> {
        for attempts in attempts..MAX_ATTEMPTS {
            let server = self.servers.get(attempts % self.servers.len().max(1))?;
            let id = random_id()?;
            let Ok(socket) = host::udp_socket(*server) else { continue };
            if send(&socket, &dns::upstream_query(query, id), SendFlags::NOSIGNAL).is_ok() {
                return Some((socket, id, attempts + 1));
            }
        }
        None
    }

    pub fn socket(&self, number: u64) -> Option<BorrowedFd<'_>> {
        self.pending.get(&number).map(|pending| pending.socket.as_fd())
    }

    /// When the next query times out.
    pub fn due(&self) -> Option<Instant> {
        self.pending.values().map(|pending| pending.deadline).min()
    }

    /// The queries whose server has timed out.
    pub fn expired(&self, now: Instant) -> Vec<u64> {
        self.pending
            .iter()
            .filter(|(_, pending)| pending.deadline <= now)
            .map(|(number, _)| *number)
            .collect()
    }

    /// Drops the queries of a connection that was removed.
    pub fn cancel(&mut self, connection: u64) {
        self.pending.retain(|_, pending| pending.origin != QueryOrigin::Connection(connection));
    }

    /// Handles a query whose socket is ready or whose server has timed out.
    pub fn resume(&mut self, number: u64, policy_check: &mut PolicyCheck, now: Instant) -> Option<Lookup> {
        let mut pending = self.pending.remove(&number)?;
        let read = loop {
            let message = match pending.read(&mut self.buffer) {
                ReadOutcome::WouldBlock if pending.deadline > now => {
                    self.pending.insert(number, pending);
                    return None;
                }
                ReadOutcome::WouldBlock | ReadOutcome::Failed => return Some(self.retry(pending, now)),
                ReadOutcome::Message(length) => self.buffer.get(..length).unwrap_or_default(),
            };
            let read = dns::read_answer(&pending.query, pending.id, message, |name, address| {
                policy_check.reveal(name, address)
            });
            // A spoofed datagram must not hide the real one behind it; a TCP stream comes from the server alone.
            if !matches!(read, Err(AnswerError::Mismatched)) || pending.stream.is_some() {
                break read;
            }
        };
        match read {
            Ok(answer) => Some(Lookup::Done(pending.answered(answer, policy_check, now))),
            Err(AnswerError::Truncated) if pending.stream.is_none() => {
                Some(self.retry_over_tcp(pending, now))
            }
            Err(AnswerError::Chain) => {
                let event = unresolved(&pending.query, AnswerError::Chain.to_string(), true);
                let message = Some(dns::answer_servfail(&pending.query));
                Some(Lookup::Done(Reply { origin: pending.origin, message, event: Some(event) }))
            }
            Err(_) => Some(self.retry(pending, now)),
        }
    }

    fn retry(&mut self, pending: PendingQuery, now: Instant) -> Lookup {
        let PendingQuery { origin, query, attempts, .. } = pending;
        if let Some((socket, id, attempts)) = self.send(&query, attempts) {
            let deadline = now + SERVER_TIMEOUT;
            return self.wait(PendingQuery { origin, query, id, attempts, deadline, socket, stream: None });
        }
        let why = "the host's resolvers did not respond".to_owned();
        let event = Some(unresolved(&query, why, false));
        Lookup::Done(Reply { origin, message: Some(dns::answer_servfail(&query)), event })
    }

    fn retry_over_tcp(&mut self, pending: PendingQuery, now: Instant) -> Lookup {
        let server =
            self.servers.get(pending.attempts.saturating_sub(1) % self.servers.len().max(1)).copied();
        let request = dns::frame(&dns::upstream_query(&pending.query, pending.id)).ok();
        match (server.and_then(|server| host::dial(server, None).ok()), request) {
            (Some(socket), Some(request)) => {
                let stream = Some((request, FrameReader::new(MAX_MESSAGE)));
                self.wait(PendingQuery { socket, stream, deadline: now + SERVER_TIMEOUT, ..pending })
            }
            _ => self.retry(pending, now),
        }
    }

    fn wait(&mut self, pending: PendingQuery) -> Lookup {
        self.last += 1;
        self.pending.insert(self.last, pending);
        Lookup::Pending(self.last)
    }
}

enum ReadOutcome {
    WouldBlock,
    Failed,
    Message(usize),
}

impl PendingQuery {
    fn read(&mut self, buffer: &mut [u8]) -> ReadOutcome {
        let Some((request, reader)) = &mut self.stream else {
            return match recv(&self.socket, buffer, RecvFlags::empty()) {
                Ok((count, _)) => ReadOutcome::Message(count),
                Err(Errno::AGAIN | Errno::INTR) => ReadOutcome::WouldBlock,
                Err(_) => ReadOutcome::Failed,
            };
        };
        while !request.is_empty() {
            match send(&self.socket, request, SendFlags::NOSIGNAL) {
                Ok(count) => drop(request.drain(..count)),
                Err(Errno::AGAIN | Errno::INTR) => return ReadOutcome::WouldBlock,
                Err(_) => return ReadOutcome::Failed,
            }
        }
        loop {
            match reader.next() {
                Ok(Some(message)) => {
                    let count = message.len().min(buffer.len());
                    buffer.iter_mut().zip(&message).for_each(|(to, from)| *to = *from);
                    return ReadOutcome::Message(count);
                }
                Ok(None) => {}
                Err(_) => return ReadOutcome::Failed,
            }
            match recv(&self.socket, &mut *buffer, RecvFlags::empty()) {
                Ok((0, _)) => return ReadOutcome::Failed,
                Ok((count, _)) => reader.push(buffer.get(..count).unwrap_or_default()),
                Err(Errno::AGAIN | Errno::INTR) => return ReadOutcome::WouldBlock,
                Err(_) => return ReadOutcome::Failed,
            }
        }
    }

    fn answered(self, answer: Answer, policy_check: &mut PolicyCheck, now: Instant) -> Reply {
        for (address, ttl) in &answer.resolved {
            policy_check.record_name(&self.query.name, *address, *ttl, now);
        }
        let event = if answer.code == ResponseCode::NXDomain {
            unresolved(&self.query, "there is no such name".to_owned(), false)
        } else {
            NetEvent::Resolved {
                name: self.query.name.to_string(),
                kind: self.query.kind.to_string(),
                addresses: answer.resolved.iter().map(|(address, _)| *address).collect(),
                removed: answer.removed,
            }
        };
        Reply { origin: self.origin, message: Some(answer.message), event: Some(event) }
    }
}

fn unresolved(query: &Query, reason: String, denied: bool) -> NetEvent {
    NetEvent::Unresolved { name: query.name.to_string(), kind: query.kind.to_string(), reason, denied }
}

fn random_id() -> Option<u16> {
    let mut bytes = [0; 2];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).ok()?;
    Some(u16::from_ne_bytes(bytes))
}
