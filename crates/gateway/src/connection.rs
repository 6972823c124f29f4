//! One TCP connection: the guest's end is a stack of its own, the other end is a socket of the host's. Nothing passes from one
//! to the other but bytes.

mod host_end;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_policy::HostName;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use crate::counts::Meter;
use crate::frame::Segment;
use crate::host;
use crate::inspect::{Found, Inspector, Next, Speech};
use crate::link::Link;
use crate::queries::Queries;
use crate::reply;
use crate::stack::{Clock, Ends, Stack};
use host_end::HostEnd;

/// How long the other side may take to answer. A guest gives up on its own after about as long.
const DIAL_TIME: Duration = Duration::from_secs(60);
/// How long the guest may take to complete what it began.
const HALF_OPEN_TIME: Duration = Duration::from_secs(10);
/// How long it may take to say what it wants, where that decides.
const READING_TIME: Duration = Duration::from_secs(10);
/// How long an answer of ours may take to be read.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// How long a stream of questions for names may be silent.
const QUESTIONS_TIME: Duration = Duration::from_secs(30);
/// How many bytes one connection moves each way before others have their turn.
const TURN: usize = 256 * 1024;

/// Where a connection stands.
#[derive(Debug)]
enum Stage {
    /// The host's socket is being connected. The guest has heard nothing yet; this is what it sent.
    Dialling(Vec<u8>),
    /// The guest's end stands, and what it says is read before anything is dialled.
    Reading,
    /// What it said was allowed, and the host's socket is being connected.
    DiallingRead,
    /// Both ends stand.
    Open,
    /// The guest gets an answer from here, and then it is over.
    Answering,
    /// Names are asked for.
    Queries(Queries),
}

/// What came of a turn.
#[derive(Debug)]
pub enum Pumped {
    /// Nothing can be moved now.
    Idle,
    /// There is more to do, after the others.
    More,
    /// This was read, and is to be judged.
    Decide(Found),
    /// What was said can be read in more than one way.
    Unreadable(String),
    /// The guest may be told that the connection stands: something to be written down.
    Opened,
    /// A question for names.
    Question(Vec<u8>),
    /// It is over, for this reason.
    Ended(String),
}

#[derive(Debug)]
pub struct Connection {
    /// The guest's end.
    pub ends: Ends,
    /// What is dialled, or who called.
    pub remote: SocketAddr,
    /// Whether the other side began.
    pub inbound: bool,
    /// Whether it is one of the host's own addresses.
    pub is_host: bool,
    /// The names that the address had when the connection began.
    pub names: Vec<HostName>,
    /// What was read of it last.
    pub found: Option<Found>,
    /// By what it is allowed.
    pub rule: String,
    /// When it began.
    pub started: Instant,
    /// Bytes from the guest and to it.
    pub moved: Meter,
    /// Whether it was written down as begun.
    pub is_noted: bool,
    /// When it wants its next turn, as it was last told.
    pub timer: Option<Instant>,
    /// Whether it waits for its turn.
    pub is_queued: bool,
    stage: Stage,
    stack: Option<Stack>,
    host: Option<HostEnd>,
    inspector: Option<Box<Inspector>>,
    answer: Vec<u8>,
    deadline: Option<Instant>,
    closed_guest: bool,
}

impl Connection {
    fn new(ends: Ends, stage: Stage, now: Instant, time: Duration) -> Self {
        Self {
            ends,
            remote: ends.remote,
            inbound: false,
            is_host: false,
            names: Vec::new(),
            found: None,
            rule: String::new(),
            started: now,
            moved: Meter::default(),
            is_noted: false,
            timer: None,
            is_queued: false,
            stage,
            stack: None,
            host: None,
            inspector: None,
            answer: Vec::new(),
            deadline: Some(now + time),
            closed_guest: false,
        }
    }

    /// One that is dialled at once. The guest hears of it when the other side has answered.
    pub fn dialling(ends: Ends, socket: OwnedFd, syn: Vec<u8>, now: Instant) -> Self {
        let mut connection = Self::new(ends, Stage::Dialling(syn), now, DIAL_TIME);
        connection.host = Some(HostEnd::new(socket));
        connection.inspector = Some(Box::new(Inspector::watching(ends.remote.ip())));
        connection
    }

    /// One whose client is heard before anything is dialled.
    pub fn reading(ends: Ends, stack: Stack, now: Instant) -> Self {
        let mut connection = Self::new(ends, Stage::Reading, now, READING_TIME);
        connection.stack = Some(stack);
        connection.inspect();
        connection
    }

    /// One that is answered from here.
    pub fn answering(ends: Ends, stack: Stack, answer: Vec<u8>, now: Instant) -> Self {
        let mut connection = Self::new(ends, Stage::Answering, now, READING_TIME);
        connection.stack = Some(stack);
        connection.answer = answer;
        connection
    }

    /// One that asks for names.
    pub fn asking(ends: Ends, stack: Stack, now: Instant) -> Self {
        let mut connection = Self::new(ends, Stage::Queries(Queries::new()), now, QUESTIONS_TIME);
        connection.stack = Some(stack);
        connection
    }

    /// One that somebody outside began, at a published port.
    pub fn inbound(ends: Ends, caller: SocketAddr, socket: OwnedFd, stack: Stack, now: Instant) -> Self {
        let mut connection = Self::new(ends, Stage::Open, now, HALF_OPEN_TIME);
        connection.remote = caller;
        connection.inbound = true;
        connection.host = Some(HostEnd::new(socket));
        connection.stack = Some(stack);
        connection
    }

    /// Reads and holds back what the client says, from its first byte on.
    pub fn inspect(&mut self) {
        self.inspector = Some(Box::new(Inspector::new(self.remote.ip())));
    }

    /// The host's socket, to be watched.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.host.as_ref().map(|host| host.socket.as_fd())
    }

    /// The host's socket may be ready.
    pub fn wake(&mut self) {
        if let Some(host) = &mut self.host {
            (host.readable, host.writable) = (true, true);
        }
    }

    /// A packet of the guest's.
    pub fn on_packet(&mut self, packet: &[u8], now: Instant, link: &mut Link) {
        if let Some(stack) = &mut self.stack {
            stack.on_packet(packet, now, link);
        }
    }

    /// When it wants a turn by itself.
    pub fn due(&mut self, now: Instant) -> Option<Instant> {
        let stack = self.stack.as_mut().and_then(|stack| stack.due(now));
        [stack, self.deadline].into_iter().flatten().min()
    }

    /// Whether it is still being judged: nothing of it has gone out.
    pub fn is_unjudged(&self) -> bool {
        matches!(self.stage, Stage::Reading)
    }

    /// Whether the client has not been able to say anything yet.
    pub fn is_dialling(&self) -> bool {
        matches!(self.stage, Stage::Dialling(_))
    }

    /// Whether what the client says next is still to be judged.
    pub fn is_read(&self) -> bool {
        self.inspector.as_ref().is_some_and(|inspector| inspector.is_judging())
    }

    /// What the client said, as far as somebody has read it.
    pub fn said(&self) -> Option<&Found> {
        self.found.as_ref().or_else(|| self.inspector.as_ref()?.noticed())
    }

    /// Whether it only asks for names, or is told of a denial.
    pub fn is_local(&self) -> bool {
        matches!(self.stage, Stage::Queries(_) | Stage::Answering)
    }

    /// Whether going on could make it begin, or ask for a name: that is, whether something would have to be recorded first.
    pub fn has_not_begun(&self) -> bool {
        !self.is_noted && !matches!(self.stage, Stage::Answering)
    }

    /// Whether somebody outside may have heard of a call that never stood.
    pub fn was_only_dialled(&self) -> bool {
        self.host.is_some() && !self.inbound && !self.is_noted
    }

    /// Lets through what was judged last. Whether something has to be dialled for it.
    pub fn accept(&mut self, found: Found) -> bool {
        if let Some(inspector) = &mut self.inspector {
            inspector.accept(&found);
        }
        self.found = Some(found);
        matches!(self.stage, Stage::Reading)
    }

    /// The socket that was wanted.
    pub fn dialled(&mut self, socket: OwnedFd, now: Instant) {
        self.host = Some(HostEnd::new(socket));
        self.stage = Stage::DiallingRead;
        self.deadline = Some(now + DIAL_TIME);
    }

    /// What the client speaks, as far as it was read.
    pub fn speech(&self) -> Speech {
        self.inspector.as_ref().map_or(Speech::Other, |inspector| inspector.speech())
    }

    /// Refuses what was judged last with an answer, or without a word. What the server still has to say to earlier requests
    /// comes first.
    pub fn deny(&mut self, answer: Vec<u8>, now: Instant) {
        let later = self.inspector.as_ref().is_some_and(|inspector| inspector.has_passed_requests());
        self.answer = answer;
        // What was let through before goes first. A server that is gone says so when it is read.
        let _ = self.send_cleared();
        self.inspector = None;
        self.deadline = Some(now + ANSWER_TIME);
        match &mut self.host {
            Some(host) if later => {
                host.shut = true;
                // One that is gone already says so when it is read.
                let _ = shutdown(&host.socket, Shutdown::Write);
            }
            _ => self.host = None,
        }
        if self.answer.is_empty() {
            self.abort();
        }
        self.stage = Stage::Answering;
    }

    /// Breaks it off, on both sides.
    pub fn abort(&mut self) {
        if let Some(stack) = &mut self.stack {
            stack.tcp().abort();
        }
        if let Some(host) = &mut self.host {
            host.break_off();
        }
    }

    /// The socket of one that has ended well, if the other side has not acknowledged all of it yet.
    pub fn into_closing(self) -> Option<OwnedFd> {
        self.host.and_then(HostEnd::into_closing)
    }

    /// Tells the guest that it was broken off, as the last thing.
    pub fn bury(&mut self, now: Instant, link: &mut Link) {
        if let Stage::Dialling(syn) = &self.stage {
            let (guest_port, remote) = (self.ends.guest_port, self.ends.remote);
            reply::reset(link, &Segment { guest_port, remote, opens: true, resets: false, packet: syn });
        }
        if let Some(stack) = &mut self.stack {
            stack.speak(now, link);
        }
    }

    /// An answer to a question for names.
    pub fn answer_question(&mut self, message: &[u8], now: Instant) {
        if let Stage::Queries(questions) = &mut self.stage {
            questions.answered();
            self.answer.extend(crate::dns::frame(message).unwrap_or_default());
            self.deadline = Some(now + QUESTIONS_TIME);
        }
    }

    /// Moves what can be moved. `down` says how many bytes may come from the host now, and is told how many did.
    pub fn pump(
        &mut self,
        now: Instant,
        clock: Clock,
        room: usize,
        link: &mut Link,
        down: &mut u64,
    ) -> Pumped {
        if let Some(pumped) = self.settle_dial(now, clock, room, link) {
            return pumped;
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            return self.expire();
        }
        let mut left = TURN;
        let pumped = self.pump_up(&mut left).or_else(|| self.pump_down(&mut left, down));
        if let Some(pumped) = pumped {
            return pumped;
        }
        self.pass_ends_on();
        let Some(stack) = &mut self.stack else { return Pumped::Idle };
        stack.speak(now, link);
        if stack.is_established() && matches!(self.stage, Stage::Open) {
            self.deadline = None;
            if !self.is_noted {
                return Pumped::Opened;
            }
        }
        // Who has used up its turn, or everybody's share, goes on when it is its turn again; so does a reader that has
        // room again for what the guest sent long ago.
        let is_cut_short = left == 0 || *down == 0 || self.could_read_on();
        self.look_for_end().unwrap_or(if is_cut_short { Pumped::More } else { Pumped::Idle })
    }

    /// Whether a reader that was full has room again for what waits in the guest's end.
    fn could_read_on(&mut self) -> bool {
        let (Some(stack), Some(inspector)) = (&mut self.stack, &self.inspector) else { return false };
        let writable = self.host.as_ref().is_some_and(|host| host.writable && !host.shut);
        writable && stack.tcp().recv_queue() > 0 && (inspector.is_done() || inspector.room() > 0)
    }

    /// What became of a dial, once it is known.
    fn settle_dial(&mut self, now: Instant, clock: Clock, room: usize, link: &mut Link) -> Option<Pumped> {
        let host = self.host.as_mut()?;
        if !matches!(self.stage, Stage::Dialling(_) | Stage::DiallingRead) {
            return None;
        }
        if !host.writable {
            if self.deadline.is_some_and(|deadline| deadline <= now) {
                return Some(self.expire());
            }
            // The guest's end, if it stands, has words of its own to send meanwhile, and may leave.
            if let Some(stack) = &mut self.stack {
                stack.speak(now, link);
                if stack.is_reset() {
                    return Some(Pumped::Ended("the client broke it off".to_owned()));
                }
            }
            return Some(Pumped::Idle);
        }
        if let Err(error) = host::dialled(&host.socket) {
            self.abort();
            return Some(Pumped::Ended(format!("not connected: {}", host::describe(error))));
        }
        if let Stage::Dialling(syn) = std::mem::replace(&mut self.stage, Stage::Open) {
            let Some(mut stack) = Stack::answering(self.ends, room, clock, link) else {
                return Some(Pumped::Ended("the gateway could not make a stack for it".to_owned()));
            };
            stack.on_packet(&syn, now, link);
            self.stack = Some(stack);
            self.deadline = Some(now + HALF_OPEN_TIME);
        } else {
            self.deadline = None;
        }
        None
    }

    fn expire(&mut self) -> Pumped {
        self.abort();
        Pumped::Ended(
            match self.stage {
                Stage::Dialling(_) | Stage::DiallingRead => "not connected: no answer in time",
                Stage::Reading => "the client did not say in time what it wants",
                Stage::Open => "the client did not complete the connection",
                Stage::Answering | Stage::Queries(_) => "silent for too long",
            }
            .to_owned(),
        )
    }

    /// From the guest.
    fn pump_up(&mut self, left: &mut usize) -> Option<Pumped> {
        let Some(stack) = &mut self.stack else { return None };
        match &mut self.stage {
            Stage::Queries(questions) => questions.take(stack, self.answer.len()),
            Stage::Answering => {
                // What it says is of no use any more, and must not fill anything.
                while stack.tcp().recv(|bytes| (bytes.len(), bytes.len())).is_ok_and(|count| count > 0) {}
                None
            }
            _ => match &mut self.inspector {
                Some(inspector) if !inspector.is_done() => {
                    let taken = read_into(inspector, stack);
                    self.moved.add_sent(taken);
                    match inspector.read_on() {
                        Next::Decide(found) => return Some(Pumped::Decide(found)),
                        Next::Refused(why) => return Some(Pumped::Unreadable(why)),
                        Next::More => {}
                    }
                    self.send_cleared()
                }
                _ => self.send_directly(left),
            },
        }
    }

    /// Sends what was judged.
    fn send_cleared(&mut self) -> Option<Pumped> {
        let (Some(inspector), Some(host)) = (&mut self.inspector, &mut self.host) else { return None };
        while host.writable && !inspector.cleared().is_empty() {
            match send(&host.socket, inspector.cleared(), SendFlags::NOSIGNAL) {
                Ok(count) => inspector.consume(count),
                Err(Errno::AGAIN) => host.writable = false,
                Err(Errno::INTR) => {}
                Err(error) => return Some(self.broken(error)),
            }
        }
        None
    }

    /// From the guest's stack to the host's socket, with nothing between.
    fn send_directly(&mut self, left: &mut usize) -> Option<Pumped> {
        let (Some(stack), Some(host)) = (&mut self.stack, &mut self.host) else { return None };
        while host.writable && !host.shut && *left > 0 && stack.tcp().recv_queue() > 0 {
            let sent = stack.tcp().recv(|bytes| {
                let part = bytes.get(..bytes.len().min(*left)).unwrap_or(bytes);
                let result = send(&host.socket, part, SendFlags::NOSIGNAL);
                (result.unwrap_or(0), result)
            });
            match sent {
                Ok(Ok(count)) => {
                    self.moved.add_sent(u64::try_from(count).unwrap_or(0));
                    *left = left.saturating_sub(count);
                }
                Ok(Err(Errno::AGAIN)) => host.writable = false,
                Ok(Err(Errno::INTR)) => {}
                Ok(Err(error)) => return Some(self.broken(error)),
                Err(_) => break,
            }
        }
        None
    }

    /// To the guest: what the host's socket has, and then what is answered from here.
    fn pump_down(&mut self, left: &mut usize, down: &mut u64) -> Option<Pumped> {
        let Some(stack) = &mut self.stack else { return None };
        if let Some(host) = &mut self.host {
            while host.readable && !host.ended && *left > 0 && *down > 0 && stack.tcp().can_send() {
                let most = (*left).min(usize::try_from(*down).unwrap_or(usize::MAX));
                let inspector = self.inspector.as_mut().filter(|inspector| inspector.wants_answers());
                let received = stack.tcp().send(|space| {
                    let length = space.len().min(most);
                    let space = space.get_mut(..length).unwrap_or_default();
                    let result = recv(&host.socket, &mut *space, RecvFlags::empty()).map(|(count, _)| count);
                    if let (Some(inspector), Ok(count)) = (inspector, result) {
                        inspector.push_answer(space.get(..count).unwrap_or_default());
                    }
                    (result.unwrap_or(0), result)
                });
                match received {
                    Ok(Ok(0)) => host.ended = true,
                    Ok(Ok(count)) => {
                        let bytes = u64::try_from(count).unwrap_or(0);
                        self.moved.add_received(bytes);
                        *down = down.saturating_sub(bytes);
                        *left = left.saturating_sub(count);
                    }
                    Ok(Err(Errno::AGAIN)) => host.readable = false,
                    Ok(Err(Errno::INTR)) => {}
                    Ok(Err(error)) => return Some(self.broken(error)),
                    Err(_) => break,
                }
            }
        }
        if self.host.as_ref().is_none_or(|host| host.ended)
            && !self.answer.is_empty()
            && stack.tcp().can_send()
        {
            let count = stack.tcp().send_slice(&self.answer).unwrap_or(0);
            self.answer.drain(..count);
        }
        None
    }

    /// An end of one side becomes one of the other.
    fn pass_ends_on(&mut self) {
        let Some(stack) = &mut self.stack else { return };
        let wants_more = match &self.stage {
            Stage::Queries(questions) => {
                if stack.guest_has_finished() && questions.is_idle() && self.answer.is_empty() {
                    stack.tcp().close();
                    self.closed_guest = true;
                }
                return;
            }
            Stage::Reading | Stage::DiallingRead | Stage::Dialling(_) => true,
            Stage::Open | Stage::Answering => false,
        };
        let host_ended = self.host.as_ref().is_none_or(|host| host.ended);
        if host_ended && !wants_more && self.answer.is_empty() && !self.closed_guest && stack.is_established()
        {
            stack.tcp().close();
            self.closed_guest = true;
        }
        let kept = self.inspector.as_ref().is_some_and(|inspector| !inspector.cleared().is_empty());
        if let Some(host) = self.host.as_mut().filter(|host| !host.shut && !kept && !wants_more)
            && stack.guest_has_finished()
        {
            host.shut = true;
            // One that is gone already says so when it is read.
            let _ = shutdown(&host.socket, Shutdown::Write);
        }
    }

    fn look_for_end(&mut self) -> Option<Pumped> {
        let stack = self.stack.as_mut()?;
        if matches!(self.stage, Stage::Reading) && stack.guest_has_finished() {
            self.abort();
            return Some(Pumped::Ended("the client left without saying what it wants".to_owned()));
        }
        if !stack.is_over() {
            return None;
        }
        let Some(host) = &mut self.host else { return Some(Pumped::Ended("ended".to_owned())) };
        let clean = host.ended && host.shut;
        if !clean && stack.is_reset() {
            host.break_off();
            let words = match (self.inbound, self.is_noted) {
                (false, _) => "the client broke it off",
                (true, true) => "the sandbox broke it off",
                (true, false) => "the sandbox does not listen there",
            };
            return Some(Pumped::Ended(words.to_owned()));
        }
        clean.then(|| Pumped::Ended("ended".to_owned()))
    }

    fn broken(&mut self, error: Errno) -> Pumped {
        self.abort();
        Pumped::Ended(format!("the other side broke it off: {}", host::describe(error)))
    }
}

fn read_into(inspector: &mut Inspector, stack: &mut Stack) -> u64 {
    let mut taken = 0;
    // Twice at most: what waits may go around the end of the stack's buffer.
    while inspector.room() > 0 && stack.tcp().recv_queue() > 0 {
        let room = inspector.room();
        let count = stack.tcp().recv(|bytes| {
            let part = bytes.get(..bytes.len().min(room)).unwrap_or(bytes);
            inspector.push(part);
            (part.len(), part.len())
        });
        match count {
            Ok(count) if count > 0 => taken += u64::try_from(count).unwrap_or(0),
            _ => break,
        }
    }
    taken
}
