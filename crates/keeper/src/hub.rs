//! The keeper's side of the protocol: passes frames between a client and the agent, and holds the guest to its rules.
//!
//! The client's windows bound what the guest may have sent and the client not yet read; the keeper checks them, so its
//! buffers are bounded whatever the guest does. The guest's messages are decoded and checked here, in a process that
//! has nothing to lose, before a client sees them.

use std::collections::BTreeMap;

use bathy_protocol::frame::{self, Channel};
use bathy_protocol::message::{decode, encode};
use bathy_protocol::{
    CONNECTION, Cause, Decoder, FrameError, FromKeeper, Hello, INITIAL_WINDOW, MAX_PAYLOAD, MAX_REQUEST, MAX_STREAMS,
    MessageError, ReceiveWindow, SendWindow, StdChannel, Timeline, ToGuest, ToHost, ToKeeper, VERSION, WindowError,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Requests are not read from the client while this much waits for the guest.
const TO_GUEST_LIMIT: usize = 64 * 1024;

/// The most that a client may leave unread: what its windows add up to. A guest that floods its client with messages,
/// which windows do not count, is not read beyond this.
const UNREAD_LIMIT: usize = MAX_STREAMS * 2 * INITIAL_WINDOW as usize;

/// How a peer broke the protocol.
#[derive(Debug, Error)]
pub enum HubError {
    /// A malformed frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A malformed message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A window was ignored.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// A frame for a stream that is not open.
    #[error("The peer used stream {0}, which is not open")]
    NoStream(u32),
    /// A channel that this side never sends.
    #[error("The peer sent {0:?} bytes, which only the other side sends")]
    WrongDirection(Channel),
    /// The agent speaks another version.
    #[error("The agent speaks version {0} of the protocol, this keeper {VERSION}")]
    Version(u16),
    /// The agent closed its port while nobody asked it to.
    #[error("The agent hung up")]
    HungUp,
    /// The agent answered a greeting that was not sent.
    #[error("The agent answered epoch {0}, which is not the present one")]
    Epoch(u64),
}

/// The windows of one open stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    stdin: SendWindow,
    stdout: ReceiveWindow,
    stderr: ReceiveWindow,
}

impl Stream {
    fn output(&mut self, channel: StdChannel) -> &mut ReceiveWindow {
        match channel {
            StdChannel::Stdout => &mut self.stdout,
            StdChannel::Stderr => &mut self.stderr,
        }
    }
}

/// What has to outlive the keeper when a sandbox is saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubState {
    /// Counts the conversations with the agent.
    pub epoch: u64,
    /// Open streams.
    pub streams: BTreeMap<u32, Stream>,
}

/// What the hub wants its owner to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Demand {
    /// Go on.
    None,
    /// A client wants the sandbox to end.
    Kill,
}

/// The relay.
pub struct Hub {
    state: HubState,
    timeline: Timeline,
    greeted: bool,
    from_client: Decoder,
    from_guest: Decoder,
    to_client: Vec<u8>,
    to_guest: Vec<u8>,
}

impl Hub {
    /// A hub for a guest that was let go at `timeline.jailed`.
    pub fn new(timeline: Timeline) -> Self {
        Self {
            state: HubState::default(),
            timeline,
            greeted: false,
            from_client: Decoder::new(MAX_REQUEST),
            from_guest: Decoder::new(MAX_PAYLOAD),
            to_client: Vec::new(),
            to_guest: Vec::new(),
        }
    }

    /// Whether the guest answered the present greeting.
    pub fn is_ready(&self) -> bool {
        self.timeline.ready != 0
    }

    /// The agent opened its port: begins a conversation.
    pub fn greet(&mut self) -> Result<(), HubError> {
        self.state.epoch += 1;
        self.from_guest.reset();
        let hello = ToGuest::Hello(Hello { version: VERSION, epoch: self.state.epoch });
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

    /// What waits for the client.
    pub fn for_client(&self) -> &[u8] {
        &self.to_client
    }

    /// The client took this much.
    pub fn client_took(&mut self, count: usize) {
        self.to_client.drain(..count);
    }

    /// Whether a conversation has begun.
    pub fn is_greeted(&self) -> bool {
        self.greeted
    }

    /// Whether the guest's output should be taken: not while a client leaves more unread than its windows allow.
    pub fn takes_output(&self) -> bool {
        self.to_client.len() < UNREAD_LIMIT
    }

    /// Whether the client's requests should be read.
    pub fn takes_requests(&self) -> bool {
        self.to_guest.len() < TO_GUEST_LIMIT
    }

    /// Says something to the client on the keeper's own behalf.
    pub fn tell_client(&mut self, message: &FromKeeper) {
        // Our own messages always encode; a failure would leave the client with the hang-up that follows.
        let _ = encode(CONNECTION, message, &mut self.to_client);
    }

    /// Tells the client how the sandbox ended.
    pub fn tell_end(&mut self, cause: Cause, console: String) {
        self.tell_client(&FromKeeper::Ended { cause, console });
    }

    /// Bytes arrived from the client.
    pub fn hear_client(&mut self, bytes: &[u8]) -> Result<Demand, HubError> {
        self.from_client.push(bytes);
        while let Some(frame) = self.from_client.next_frame()? {
            let stream = frame.stream;
            if stream == CONNECTION {
                match decode(frame.payload)? {
                    ToKeeper::Kill => return Ok(Demand::Kill),
                }
            }
            match frame.channel {
                Channel::Stdin => {
                    // A stream that ended while the bytes were on their way takes no more.
                    let Some(open) = self.state.streams.get_mut(&stream) else { continue };
                    if frame.payload.len() > open.stdin.open() {
                        let sent = u32::try_from(frame.payload.len()).unwrap_or(u32::MAX);
                        return Err(WindowError::Overrun { sent, left: open.stdin.open().try_into().unwrap_or(0) }.into());
                    }
                    open.stdin.sent(frame.payload.len());
                }
                Channel::Control => match decode(frame.payload)? {
                    ToGuest::Exec(_) => {
                        if self.state.streams.len() >= MAX_STREAMS || self.state.streams.contains_key(&stream) {
                            return Err(HubError::NoStream(stream));
                        }
                        self.state.streams.insert(stream, Stream::default());
                    }
                    ToGuest::Grant { channel, bytes } => {
                        let Some(open) = self.state.streams.get_mut(&stream) else { continue };
                        open.output(channel).granted(bytes)?;
                    }
                    ToGuest::Signal(_) | ToGuest::CloseStdin => {
                        if !self.state.streams.contains_key(&stream) {
                            continue;
                        }
                    }
                    ToGuest::Hello(_) | ToGuest::PowerOff | ToGuest::Attach => return Err(HubError::NoStream(stream)),
                },
                other => return Err(HubError::WrongDirection(other)),
            }
            frame::encode(stream, frame.channel, frame.payload, &mut self.to_guest);
        }
        Ok(Demand::None)
    }

    /// Bytes arrived from the guest: every one of them hostile.
    pub fn hear_guest(&mut self, bytes: &[u8], now: u64) -> Result<(), HubError> {
        self.from_guest.push(bytes);
        while let Some(frame) = self.from_guest.next_frame()? {
            let stream = frame.stream;
            if stream == CONNECTION {
                let ToHost::Ready(ready) = decode(frame.payload)? else { return Err(HubError::NoStream(stream)) };
                if ready.version != VERSION {
                    return Err(HubError::Version(ready.version));
                }
                if ready.epoch != self.state.epoch || self.timeline.ready != 0 {
                    return Err(HubError::Epoch(ready.epoch));
                }
                self.timeline.pid1 = ready.pid1_unix_ns;
                self.timeline.mounted = ready.mounted_unix_ns;
                self.timeline.kernel = ready.kernel;
                self.timeline.ready = now;
                encode(CONNECTION, &FromKeeper::Ready(self.timeline.clone()), &mut self.to_client)?;
                continue;
            }
            let open = self.state.streams.get_mut(&stream).ok_or(HubError::NoStream(stream))?;
            match frame.channel {
                Channel::Stdout => open.stdout.received(frame.payload.len())?,
                Channel::Stderr => open.stderr.received(frame.payload.len())?,
                Channel::Stdin => return Err(HubError::WrongDirection(Channel::Stdin)),
                Channel::Control => match decode(frame.payload)? {
                    ToHost::Grant { bytes } => open.stdin.grant(bytes)?,
                    ToHost::Exited(_) | ToHost::Refused(_) => {
                        self.state.streams.remove(&stream);
                    }
                    ToHost::Started { .. } | ToHost::Eof(_) => {}
                    ToHost::Ready(_) => return Err(HubError::NoStream(stream)),
                },
            }
            frame::encode(stream, frame.channel, frame.payload, &mut self.to_client);
        }
        Ok(())
    }
}
