//! The keeper's side of the protocol: passes frames between a client and the agent, and holds the guest to its rules.
//!
//! The client's windows bound what the guest may have sent and the client not yet read; the keeper checks them, so its
//! buffers are bounded whatever the guest does. The guest's messages are decoded and checked here, in a process that
//! has nothing to lose, before a client sees them.

use std::collections::BTreeMap;

use bathy_protocol::frame::{self, Channel};
use bathy_protocol::message::{decode, encode};
use bathy_protocol::{
    CONNECTION, Cause, Decoder, FrameError, FromKeeper, Hello, INITIAL_WINDOW, MAX_PAYLOAD, MAX_REQUEST,
    MAX_STREAMS, MessageError, ReceiveWindow, SendWindow, StdChannel, Timeline, ToGuest, ToHost, ToKeeper,
    VERSION, WindowError,
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
    pub fn greet(&mut self, now_unix_ns: u64) -> Result<(), HubError> {
        self.state.epoch += 1;
        self.timeline.ready = 0;
        self.from_guest.reset();
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
                        return Err(WindowError::Overrun {
                            sent,
                            left: open.stdin.open().try_into().unwrap_or(0),
                        }
                        .into());
                    }
                    open.stdin.sent(frame.payload.len());
                }
                Channel::Control => match decode(frame.payload)? {
                    ToGuest::Exec(_) => {
                        if self.state.streams.len() >= MAX_STREAMS || self.state.streams.contains_key(&stream)
                        {
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
                    ToGuest::Hello(_) | ToGuest::PowerOff | ToGuest::Attach => {
                        return Err(HubError::NoStream(stream));
                    }
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
                let ToHost::Ready(ready) = decode(frame.payload)? else {
                    return Err(HubError::NoStream(stream));
                };
                if ready.version != VERSION {
                    return Err(HubError::Version(ready.version));
                }
                if !self.greeted || ready.epoch != self.state.epoch || self.timeline.ready != 0 {
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

#[cfg(test)]
mod tests {
    use bathy_protocol::{Exec, Exit, Ready};

    use super::*;

    const NOW: u64 = 7;

    fn message<M: Serialize>(stream: u32, message: &M) -> Vec<u8> {
        let mut wire = Vec::new();
        encode(stream, message, &mut wire).unwrap();
        wire
    }

    fn data(stream: u32, channel: Channel, length: usize) -> Vec<u8> {
        let mut wire = Vec::new();
        frame::encode(stream, channel, &vec![b'x'; length], &mut wire);
        wire
    }

    fn ready(epoch: u64) -> ToHost {
        ToHost::Ready(Ready {
            version: VERSION,
            epoch,
            kernel: "test".to_owned(),
            pid1_unix_ns: 1,
            mounted_unix_ns: 2,
            running: Vec::new(),
        })
    }

    /// A hub whose guest is ready and runs one command on stream 1.
    fn hub() -> Hub {
        let mut hub = Hub::new(Timeline::default());
        hub.greet(NOW).unwrap();
        hub.hear_client(&message(1, &ToGuest::Exec(Exec::default()))).unwrap();
        hub.hear_guest(&message(CONNECTION, &ready(1)), NOW).unwrap();
        hub
    }

    #[test]
    fn requests_wait_for_the_greeting() {
        let mut hub = Hub::new(Timeline::default());
        hub.hear_client(&message(1, &ToGuest::Exec(Exec::default()))).unwrap();
        assert!(hub.for_guest().is_empty());
        hub.greet(NOW).unwrap();
        let mut decoder = Decoder::new(MAX_REQUEST);
        decoder.push(hub.for_guest());
        let first: ToGuest = decode(decoder.next_frame().unwrap().unwrap().payload).unwrap();
        assert!(matches!(first, ToGuest::Hello(_)));
        let second: ToGuest = decode(decoder.next_frame().unwrap().unwrap().payload).unwrap();
        assert!(matches!(second, ToGuest::Exec(_)));
    }

    #[test]
    fn c1_output_beyond_the_window_is_a_violation() {
        let mut hub = hub();
        hub.hear_guest(&data(1, Channel::Stdout, INITIAL_WINDOW as usize), NOW).unwrap();
        let error = hub.hear_guest(&data(1, Channel::Stdout, 1), NOW).unwrap_err();
        assert!(matches!(error, HubError::Window(_)), "{error}");
    }

    #[test]
    fn each_output_has_a_window_of_its_own() {
        let mut hub = hub();
        hub.hear_guest(&data(1, Channel::Stdout, INITIAL_WINDOW as usize), NOW).unwrap();
        hub.hear_guest(&data(1, Channel::Stderr, INITIAL_WINDOW as usize), NOW).unwrap();
        hub.hear_client(&message(1, &ToGuest::Grant { channel: StdChannel::Stdout, bytes: 10 })).unwrap();
        hub.hear_guest(&data(1, Channel::Stdout, 10), NOW).unwrap();
        assert!(hub.hear_guest(&data(1, Channel::Stderr, 1), NOW).is_err());
    }

    #[test]
    fn c1_wrong_streams_and_directions_are_violations() {
        let cases = [
            data(2, Channel::Stdout, 1),
            data(1, Channel::Stdin, 1),
            message(2, &ToHost::Exited(Exit::Code(0))),
            message(1, &ready(1)),
            message(CONNECTION, &ToHost::Exited(Exit::Code(0))),
            // A second answer to the same greeting, and one to a greeting that never was.
            message(CONNECTION, &ready(1)),
            message(CONNECTION, &ready(9)),
        ];
        for (number, wire) in cases.into_iter().enumerate() {
            assert!(hub().hear_guest(&wire, NOW).is_err(), "case {number}");
        }
    }

    #[test]
    fn c1_a_stream_is_over_when_its_command_is() {
        let mut hub = hub();
        hub.hear_guest(&message(1, &ToHost::Exited(Exit::Code(0))), NOW).unwrap();
        assert!(hub.hear_guest(&message(1, &ToHost::Exited(Exit::Code(1))), NOW).is_err());
    }

    #[test]
    fn c1_a_flood_of_messages_that_no_window_counts_is_not_read_for_ever() {
        let mut hub = hub();
        let flood = message(1, &ToHost::Started { pid: 1 }).repeat(1000);
        let mut rounds = 0;
        while hub.takes_output() {
            hub.hear_guest(&flood, NOW).unwrap();
            rounds += 1;
            assert!(rounds < 10_000, "the hub never says that it has had enough");
        }
        assert!(hub.for_client().len() < UNREAD_LIMIT + flood.len());
    }

    #[test]
    fn another_version_is_refused() {
        let mut hub = Hub::new(Timeline::default());
        hub.greet(NOW).unwrap();
        let ToHost::Ready(answer) = ready(1) else { unreachable!() };
        let other = ToHost::Ready(Ready { version: VERSION + 1, ..answer });
        assert!(matches!(hub.hear_guest(&message(CONNECTION, &other), NOW), Err(HubError::Version(_))));
    }

    #[test]
    fn a_client_cannot_open_more_streams_than_there_are() {
        let mut hub = hub();
        let exec = |stream| message(stream, &ToGuest::Exec(Exec::default()));
        for stream in 2..=u32::try_from(MAX_STREAMS).unwrap() {
            hub.hear_client(&exec(stream)).unwrap();
        }
        assert!(hub.hear_client(&exec(1000)).is_err());
    }

    #[test]
    fn the_state_survives_being_saved() {
        let mut hub = hub();
        hub.hear_guest(&data(1, Channel::Stdout, 5), NOW).unwrap();
        let saved = postcard::to_allocvec(&hub.state).unwrap();
        let mut restored = Hub { state: postcard::from_bytes(&saved).unwrap(), ..hub };
        restored.hear_guest(&data(1, Channel::Stdout, INITIAL_WINDOW as usize - 5), NOW).unwrap();
        assert!(restored.hear_guest(&data(1, Channel::Stdout, 1), NOW).is_err());
    }
}
