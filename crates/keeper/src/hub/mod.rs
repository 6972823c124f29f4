//! The keeper's side of the protocol: passes frames between clients and the agent, and enforces the protocol on both.
//!
//! The windows bound what the guest may have sent and a client not yet read. Every other message about a stream may be sent
//! once. So the keeper's buffers are bounded whatever the guest does. The guest's messages are
//! decoded and checked here, in a process that has nothing to lose, before a client sees them. A client that breaks
//! the rules loses its connection; a guest that does ends its sandbox.

mod from_client;
mod from_guest;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use bathy_protocol::message::encode;
use bathy_protocol::{
    CONNECTION, Channel, Decoder, FrameError, FromKeeper, Hello, INITIAL_WINDOW, MAX_PAYLOAD, MAX_REQUEST,
    MAX_STREAMS, MessageError, Restriction, StdChannel, Timeline, ToGuest, Usage, VERSION, WindowError,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use stream::Stream;

use crate::watchdog::Due;

/// Requests are not read from clients while this much waits for the guest.
const TO_GUEST_LIMIT: usize = 64 * 1024;

/// The most that a client may leave unread: what its windows add up to, and as much again for messages.
const UNREAD_LIMIT: usize = MAX_STREAMS * 4 * INITIAL_WINDOW as usize;

/// How many frames of one peer are handled before the others have their turn. Bytes alone would not bound the work: a frame of
/// one byte costs about as much as a long one.
pub const MAX_FRAMES: usize = 512;

/// How many clients one sandbox may have at once, the owner not counted.
pub const MAX_CLIENTS: usize = 64;

/// How much output of jobs without an attached client is accepted in one period.
const LOGGED_PER_PERIOD: u32 = 1024 * 1024;

/// How a peer broke the protocol.
#[derive(Debug, Error)]
pub enum HubError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A window was ignored.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// A frame for a stream that is not open.
    #[error("The peer used stream {0}, which is not open")]
    NoStream(u32),
    /// A stream that is open already, or the connection's own.
    #[error("The peer opened stream {0}, which is in use")]
    StreamInUse(u32),
    /// A channel that this side never sends.
    #[error("The peer sent {0:?} bytes, which only the other side sends")]
    WrongDirection(Channel),
    /// A message that may be sent once was sent twice.
    #[error("The peer repeated itself on stream {0}")]
    Repeated(u32),
    /// A client speaks to the keeper itself, which only the owner may.
    #[error("The client sent a message that only the sandbox's owner may send")]
    NotOwner,
    /// A client does not read what it asked for.
    #[error("The client left {0} bytes unread")]
    Unread(usize),
    /// The agent speaks another version.
    #[error("The agent speaks version {0} of the protocol, this keeper {VERSION}")]
    Version(u16),
    /// The agent closed its port without being asked to.
    #[error("The agent hung up")]
    HungUp,
    /// The agent answered a greeting that was not sent.
    #[error("The agent answered epoch {0}, which is not the present one")]
    Epoch(u64),
}

/// Names a client for as long as it is connected.
pub type ClientId = u64;

/// The process that started the keeper.
pub const OWNER: ClientId = 0;

/// What has to outlive the keeper when a sandbox is saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubState {
    /// Counts the conversations with the agent.
    pub epoch: u64,
    /// The number of the last stream that was opened.
    pub last_stream: u32,
    /// Open streams, by the agent's numbers.
    pub streams: BTreeMap<u32, Stream>,
}

/// What the owner wants the loop to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Demand {
    Kill,
    /// The guest was asked to shut itself down.
    PowerOff {
        /// Milliseconds that its processes have for that.
        grace_ms: u32,
    },
    /// Take a client's socket.
    Client,
    /// Take a new gateway's socket.
    Link,
    /// Report what the sandbox uses.
    Usage,
    Park {
        /// Move the guest's memory to the parking file.
        release_memory: bool,
    },
    Unpark,
}

/// Output of a job, to be written to the log.
#[derive(Debug, PartialEq, Eq)]
pub struct Logged {
    pub job: u32,
    pub channel: StdChannel,
    pub bytes: Vec<u8>,
}

struct Client {
    decoder: Decoder,
    /// The decoder has whole frames.
    backlog: bool,
    outbox: Vec<u8>,
    /// The client's stream numbers and the agent's.
    streams: BTreeMap<u32, u32>,
}

impl Client {
    fn new() -> Self {
        let decoder = Decoder::new(MAX_REQUEST);
        Self { decoder, backlog: false, outbox: Vec::new(), streams: BTreeMap::new() }
    }

    /// Our own messages always encode; a failure would leave the client with a stream that never ends, no more.
    fn send<M: Serialize>(&mut self, stream: u32, message: &M) {
        let _ = encode(stream, message, &mut self.outbox);
    }
}

pub struct Hub {
    state: HubState,
    timeline: Timeline,
    greeted: bool,
    /// A ping is not answered yet.
    pinged: bool,
    restricted: Option<Restriction>,
    clients: BTreeMap<ClientId, Client>,
    from_guest: Decoder,
    /// The decoder has whole frames.
    guest_backlog: bool,
    to_guest: Vec<u8>,
    to_log: Vec<Logged>,
    log_budget: u32,
}

impl Hub {
    /// A hub for a guest that was let go at `timeline.jailed`; its owner is connected from the beginning.
    pub fn new(timeline: Timeline, restricted: Option<Restriction>) -> Self {
        Self {
            state: HubState::default(),
            timeline,
            greeted: false,
            pinged: false,
            restricted,
            clients: BTreeMap::from([(OWNER, Client::new())]),
            from_guest: Decoder::new(MAX_PAYLOAD),
            guest_backlog: false,
            to_guest: Vec::new(),
            to_log: Vec::new(),
            log_budget: LOGGED_PER_PERIOD,
        }
    }

    /// What the agent owes. It starts or refuses commands, copies and cells, changes contexts and answers a ping as soon as it
    /// reads of them; programs that are held up it refuses before the watchdog's patience ends.
    pub fn due(&self) -> Due {
        let mut streams = self.state.streams.values();
        match self.is_ready() {
            true if self.pinged || streams.any(|stream| !stream.started) => Due::Answer,
            true if !self.state.streams.is_empty() => Due::SignOfLife,
            _ => Due::Nothing,
        }
    }

    /// Asks the agent for a sign of life.
    pub fn ping(&mut self) {
        if !std::mem::replace(&mut self.pinged, true) {
            self.send_to_guest(CONNECTION, &ToGuest::Ping);
        }
    }

    /// Whether the guest answered the present greeting.
    pub fn is_ready(&self) -> bool {
        self.timeline.ready != 0
    }

    /// Whether a conversation has begun.
    pub fn is_greeted(&self) -> bool {
        self.greeted
    }

    /// The agent opened its port: begins a conversation.
    pub fn greet(&mut self, now_unix_ns: u64) -> Result<(), HubError> {
        self.state.epoch += 1;
        self.timeline.ready = 0;
        self.pinged = false;
        self.from_guest.reset();
        self.guest_backlog = false;
        let hello = ToGuest::Hello(Hello { version: VERSION, epoch: self.state.epoch, now_unix_ns });
        let mut greeting = Vec::new();
        encode(CONNECTION, &hello, &mut greeting)?;
        // What a client asked for meanwhile follows the greeting.
        self.to_guest.splice(0..0, greeting);
        self.greeted = true;
        Ok(())
    }

    /// What waits for the guest; nothing before the greeting.
    pub fn for_guest(&self) -> &[u8] {
        if self.greeted { &self.to_guest } else { &[] }
    }

    /// The guest took this much.
    pub fn guest_took(&mut self, count: usize) {
        self.to_guest.drain(..count);
    }

    /// Whether frames of the guest wait to be handled. Until they are, no more bytes should be taken from it.
    pub fn has_guest_backlog(&self) -> bool {
        self.guest_backlog
    }

    /// Whether frames of a client wait to be handled. Until they are, no more bytes should be read from it.
    pub fn has_backlog(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|client| client.backlog)
    }

    /// What waits for a client.
    pub fn for_client(&self, client: ClientId) -> &[u8] {
        self.clients.get(&client).map(|client| client.outbox.as_slice()).unwrap_or_default()
    }

    /// A client took this much.
    pub fn client_took(&mut self, client: ClientId, count: usize) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.outbox.drain(..count);
        }
    }

    /// The connected clients, the owner among them.
    pub fn clients(&self) -> impl Iterator<Item = ClientId> {
        self.clients.keys().copied()
    }

    /// Whether clients' requests should be read.
    pub fn takes_requests(&self) -> bool {
        self.to_guest.len() < TO_GUEST_LIMIT
    }

    /// A client that left more unread than it may.
    pub fn slow_client(&self) -> Option<(ClientId, HubError)> {
        let slow = self.clients.iter().find(|(_, client)| client.outbox.len() > UNREAD_LIMIT);
        slow.map(|(id, client)| (*id, HubError::Unread(client.outbox.len())))
    }

    /// A client is there; `false` if there are too many.
    pub fn add_client(&mut self, id: ClientId) -> bool {
        if self.clients.len() > MAX_CLIENTS {
            return false;
        }
        let mut client = Client::new();
        if self.is_ready() {
            client.send(CONNECTION, &FromKeeper::Ready(self.timeline.clone()));
        }
        self.clients.insert(id, client);
        true
    }

    /// A client has disconnected: its jobs go on, everything else that it started is ended.
    pub fn drop_client(&mut self, id: ClientId) {
        let Some(client) = self.clients.remove(&id) else { return };
        for stream in client.streams.into_values() {
            self.release(stream);
        }
    }

    /// Releases a stream whose client has disconnected or detached.
    fn release(&mut self, number: u32) {
        let Some(stream) = self.state.streams.get_mut(&number) else { return };
        stream.holder = None;
        if stream.job.is_none() {
            stream.abandoned = true;
            self.send_to_guest(number, &ToGuest::Abandon);
            return;
        }
        self.reopen(number);
    }

    /// Resets the windows of a job, whose output goes to another client or to the log from now on.
    fn reopen(&mut self, number: u32) {
        let Some(stream) = self.state.streams.get_mut(&number) else { return };
        stream.owed = [0; 2];
        for channel in [StdChannel::Stdout, StdChannel::Stderr] {
            let Some(stream) = self.state.streams.get_mut(&number) else { return };
            if let Some(bytes) = stream.output(channel).reopen() {
                self.send_to_guest(number, &ToGuest::Grant { channel, bytes });
            }
        }
    }

    fn send_to_guest(&mut self, stream: u32, message: &ToGuest) {
        // Our own messages always encode.
        let _ = encode(stream, message, &mut self.to_guest);
    }

    /// Sends a message of the keeper's own to every client.
    pub fn broadcast(&mut self, message: &FromKeeper) {
        for client in self.clients.values_mut() {
            client.send(CONNECTION, message);
        }
    }

    /// Sends a message of the keeper's own to the owner.
    pub fn send_to_owner(&mut self, message: &FromKeeper) {
        if let Some(owner) = self.clients.get_mut(&OWNER) {
            owner.send(CONNECTION, message);
        }
    }

    /// What the hub knows about the sandbox's use.
    pub fn usage(&self) -> Usage {
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        Usage {
            commands: count(self.state.streams.len()),
            clients: count(self.clients.len().saturating_sub(1)),
            ..Usage::default()
        }
    }

    /// Output of jobs, to be written to the log.
    pub fn take_logged(&mut self) -> Vec<Logged> {
        std::mem::take(&mut self.to_log)
    }

    /// Whether a job waits for the next period of the log's rate.
    pub fn owes_grants(&self) -> bool {
        self.state.streams.values().any(|stream| stream.owed != [0; 2])
    }

    /// A period of the log's rate begins.
    pub fn refill_log_budget(&mut self) {
        self.log_budget = LOGGED_PER_PERIOD;
        let numbers: Vec<u32> = self.state.streams.keys().copied().collect();
        for number in numbers {
            for channel in [StdChannel::Stdout, StdChannel::Stderr] {
                let Some(stream) = self.state.streams.get_mut(&number) else { continue };
                let bytes = std::mem::take(stream.owed(channel));
                self.consume_logged(number, channel, bytes);
            }
        }
    }

    /// Output of a job without a client was logged: grants the agent as much again, as far as the log's rate allows.
    fn consume_logged(&mut self, number: u32, channel: StdChannel, bytes: u32) {
        let now = bytes.min(self.log_budget);
        self.log_budget -= now;
        let Some(stream) = self.state.streams.get_mut(&number) else { return };
        *stream.owed(channel) += bytes - now;
        if let Some(grant) = stream.output(channel).consumed(now as usize) {
            self.send_to_guest(number, &ToGuest::Grant { channel, bytes: grant });
        }
    }
}
