//! Names: each question of the guest that the policy allows is asked anew, of the host's resolvers.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_policy::Verdict;
use bathy_protocol::network::{FromGateway, NetEvent, Spent, encode};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::dns::{
    self, Answer, BadAnswer, FrameReader, Handling, LimitFigures, MAX_MESSAGE, Query, QueryLimits,
    ResponseCode, Transport,
};
use crate::host;
use crate::policy_check::PolicyCheck;

/// How many questions wait for answers at once.
const MOST_WAITING: usize = 256;
/// How long one resolver has.
const TIME: Duration = Duration::from_secs(2);
/// How often a question is asked, of one resolver after the other.
const TRIES: usize = 4;

/// Who asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asker {
    /// A datagram from this port of the guest's, to this address of ours.
    Datagram(u16, SocketAddr),
    /// A connection.
    Connection(u64),
}

/// An answer for the guest.
#[derive(Debug)]
pub struct Reply {
    /// To whom.
    pub asker: Asker,
    /// What; nothing if it was no question.
    pub message: Option<Vec<u8>>,
    /// What is to be written down.
    pub event: Option<NetEvent>,
}

/// What came of a question.
#[derive(Debug)]
pub enum Asked {
    /// The answer is known.
    Now(Reply),
    /// It waits, under this number; its socket is to be watched.
    Waits(u64),
}

#[derive(Debug)]
struct Waiting {
    asker: Asker,
    query: Query,
    id: u16,
    tries: usize,
    deadline: Instant,
    socket: OwnedFd,
    /// The answer was too long for a datagram, and is asked for over a connection: what is still to be sent, and what came.
    stream: Option<(Vec<u8>, FrameReader)>,
}

/// Asks for names.
#[derive(Debug)]
pub struct Resolver {
    servers: Vec<SocketAddr>,
    limits: QueryLimits,
    waiting: BTreeMap<u64, Waiting>,
    last: u64,
    buffer: Vec<u8>,
    /// Who keeps what was used of the budgets for the next gateway, and what was last reported there.
    report: Option<(OwnedFd, Spent)>,
}

impl Resolver {
    /// Of these servers, so many questions in a second.
    pub fn new(servers: Vec<SocketAddr>, per_second: u32) -> Self {
        let figures =
            LimitFigures { rate: per_second, burst: per_second.saturating_mul(5), ..LimitFigures::default() };
        Self {
            servers,
            limits: QueryLimits::new(figures, Duration::ZERO),
            waiting: BTreeMap::new(),
            last: 0,
            buffer: vec![0; MAX_MESSAGE],
            report: None,
        }
    }

    /// Reports what is used over this socket, before it is used.
    pub fn reporting_to(mut self, socket: OwnedFd) -> Self {
        self.report = Some((socket, Spent::default()));
        self
    }

    /// Goes on with the budgets of gateways before this one.
    pub fn after(mut self, spent: Spent) -> Self {
        self.limits.carry_over(spent, Duration::ZERO);
        self
    }

    /// Reports what is used now. Whether that was taken: what is not known to have been used must not be used.
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

    /// A question of the guest's.
    pub fn ask(&mut self, bytes: &[u8], asker: Asker, policy_check: &PolicyCheck, now: Instant) -> Asked {
        let transport = match asker {
            Asker::Datagram(..) => Transport::Udp,
            Asker::Connection(_) => Transport::Tcp,
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
                return Asked::Now(Reply { asker, message: refused.answer, event: Some(event) });
            }
        };
        let now_reply = |message, event| Asked::Now(Reply { asker, message: Some(message), event });
        let decision = policy_check.resolve(&query.name);
        if decision.verdict != Verdict::Allow {
            let rule = decision.by.to_string();
            return now_reply(dns::answer_refused(&query, &rule), Some(unresolved(&query, rule, true)));
        }
        if query.reverse.is_some_and(|address| !policy_check.reveal(&query.name, address)) {
            let why = "the name of an address that the sandbox may not reach";
            return now_reply(
                dns::answer_refused(&query, why),
                Some(unresolved(&query, why.to_owned(), true)),
            );
        }
        if query.handling == Handling::Empty {
            return now_reply(dns::answer_empty(&query), None);
        }
        if let Err(limited) = self.limits.admit(&query.name, query.kind, policy_check.time(now)) {
            let why = limited.to_string();
            return now_reply(dns::answer_refused(&query, &why), Some(unresolved(&query, why, true)));
        }
        if !self.report_spent(policy_check.time(now)) {
            let why = "what is used of the sandbox's budgets cannot be recorded at present".to_owned();
            return now_reply(dns::answer_servfail(&query), Some(unresolved(&query, why, false)));
        }
        if self.waiting.len() >= MOST_WAITING {
            let why = format!("more than {MOST_WAITING} questions wait for answers");
            return now_reply(dns::answer_servfail(&query), Some(unresolved(&query, why, false)));
        }
        match self.send(&query, 0) {
            Some((socket, id, tries)) => {
                self.last += 1;
                let waiting = Waiting { asker, query, id, tries, deadline: now + TIME, socket, stream: None };
                self.waiting.insert(self.last, waiting);
                Asked::Waits(self.last)
            }
            None => {
                let why = "none of the host's resolvers can be reached".to_owned();
                now_reply(dns::answer_servfail(&query), Some(unresolved(&query, why, false)))
            }
        }
    }

    /// Asks the next server that can be asked, from a port and with a number that nobody can guess.
    fn send(&self, query: &Query, tries: usize) -> Option<(OwnedFd, u16, usize)> {
        for tries in tries..TRIES {
            let server = self.servers.get(tries % self.servers.len().max(1))?;
            let id = random_id()?;
            let Ok(socket) = host::datagrams(*server) else { continue };
            if send(&socket, &dns::question_for_upstream(query, id), SendFlags::NOSIGNAL).is_ok() {
                return Some((socket, id, tries + 1));
            }
        }
        None
    }

    /// The socket of a question.
    pub fn socket(&self, number: u64) -> Option<BorrowedFd<'_>> {
        self.waiting.get(&number).map(|waiting| waiting.socket.as_fd())
    }

    /// When the next question has waited for too long.
    pub fn due(&self) -> Option<Instant> {
        self.waiting.values().map(|waiting| waiting.deadline).min()
    }

    /// Queries that have waited for too long at one server.
    pub fn late(&self, now: Instant) -> Vec<u64> {
        self.waiting
            .iter()
            .filter(|(_, waiting)| waiting.deadline <= now)
            .map(|(number, _)| *number)
            .collect()
    }

    /// Forgets what a connection asked that is gone.
    pub fn forget(&mut self, connection: u64) {
        self.waiting.retain(|_, waiting| waiting.asker != Asker::Connection(connection));
    }

    /// Goes on with a question whose socket is ready, or whose time is over. The number of a new socket, or the answer.
    pub fn go_on(&mut self, number: u64, policy_check: &mut PolicyCheck, now: Instant) -> Option<Asked> {
        let mut waiting = self.waiting.remove(&number)?;
        let read = loop {
            let message = match waiting.read(&mut self.buffer) {
                Came::Nothing if waiting.deadline > now => {
                    self.waiting.insert(number, waiting);
                    return None;
                }
                Came::Nothing | Came::Lost => return Some(self.again(waiting, now)),
                Came::Message(length) => self.buffer.get(..length).unwrap_or_default(),
            };
            let read = dns::read_answer(&waiting.query, waiting.id, message, |name, address| {
                policy_check.reveal(name, address)
            });
            // Somebody who is not the server guesses, and the true answer may wait behind it; a stream has only one end.
            if !matches!(read, Err(BadAnswer::NotOurs)) || waiting.stream.is_some() {
                break read;
            }
        };
        match read {
            Ok(answer) => Some(Asked::Now(waiting.answered(answer, policy_check, now))),
            Err(BadAnswer::Truncated) if waiting.stream.is_none() => Some(self.over_connection(waiting, now)),
            Err(BadAnswer::Chain) => {
                let event = unresolved(&waiting.query, BadAnswer::Chain.to_string(), true);
                let message = Some(dns::answer_servfail(&waiting.query));
                Some(Asked::Now(Reply { asker: waiting.asker, message, event: Some(event) }))
            }
            Err(_) => Some(self.again(waiting, now)),
        }
    }

    fn again(&mut self, waiting: Waiting, now: Instant) -> Asked {
        let Waiting { asker, query, tries, .. } = waiting;
        if let Some((socket, id, tries)) = self.send(&query, tries) {
            return self.wait(Waiting {
                asker,
                query,
                id,
                tries,
                deadline: now + TIME,
                socket,
                stream: None,
            });
        }
        let why = "the host's resolvers gave no answer".to_owned();
        let event = Some(unresolved(&query, why, false));
        Asked::Now(Reply { asker, message: Some(dns::answer_servfail(&query)), event })
    }

    fn over_connection(&mut self, waiting: Waiting, now: Instant) -> Asked {
        let server = self.servers.get(waiting.tries.saturating_sub(1) % self.servers.len().max(1)).copied();
        let question = dns::frame(&dns::question_for_upstream(&waiting.query, waiting.id)).ok();
        match (server.and_then(|server| host::dial(server, None).ok()), question) {
            (Some(socket), Some(question)) => {
                let stream = Some((question, FrameReader::new(MAX_MESSAGE)));
                self.wait(Waiting { socket, stream, deadline: now + TIME, ..waiting })
            }
            _ => self.again(waiting, now),
        }
    }

    fn wait(&mut self, waiting: Waiting) -> Asked {
        self.last += 1;
        self.waiting.insert(self.last, waiting);
        Asked::Waits(self.last)
    }
}

enum Came {
    Nothing,
    Lost,
    Message(usize),
}

impl Waiting {
    fn read(&mut self, buffer: &mut [u8]) -> Came {
        let Some((question, reader)) = &mut self.stream else {
            return match recv(&self.socket, buffer, RecvFlags::empty()) {
                Ok((count, _)) => Came::Message(count),
                Err(Errno::AGAIN | Errno::INTR) => Came::Nothing,
                Err(_) => Came::Lost,
            };
        };
        while !question.is_empty() {
            match send(&self.socket, question, SendFlags::NOSIGNAL) {
                Ok(count) => drop(question.drain(..count)),
                Err(Errno::AGAIN | Errno::INTR) => return Came::Nothing,
                Err(_) => return Came::Lost,
            }
        }
        loop {
            match reader.next() {
                Ok(Some(message)) => {
                    let count = message.len().min(buffer.len());
                    buffer.iter_mut().zip(&message).for_each(|(to, from)| *to = *from);
                    return Came::Message(count);
                }
                Ok(None) => {}
                Err(_) => return Came::Lost,
            }
            match recv(&self.socket, &mut *buffer, RecvFlags::empty()) {
                Ok((0, _)) => return Came::Lost,
                Ok((count, _)) => reader.push(buffer.get(..count).unwrap_or_default()),
                Err(Errno::AGAIN | Errno::INTR) => return Came::Nothing,
                Err(_) => return Came::Lost,
            }
        }
    }

    fn answered(self, answer: Answer, policy_check: &mut PolicyCheck, now: Instant) -> Reply {
        for (address, ttl) in &answer.resolved {
            policy_check.learn(&self.query.name, *address, *ttl, now);
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
        Reply { asker: self.asker, message: Some(answer.message), event: Some(event) }
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
