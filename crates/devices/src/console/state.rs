//! What a console has to save to go on in another process: its session, and the bytes that are in flight. The place in each
//! queue is part of the transport's state.

use serde::{Deserialize, Serialize};

use super::device::Console;
use super::request::MAX_MESSAGE_BYTES;
use super::session::{Hangup, MAX_WAITING, Session};
use super::{BUFFER_BYTES, ConsoleError};
use crate::device::VirtioDevice;

/// A console's state between rounds of work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleState {
    /// Data that the guest has not received yet.
    pub to_guest: Vec<u8>,
    /// Data that the host has not taken yet.
    pub from_guest: Vec<u8>,
    /// Control messages that the guest has not received yet.
    pub control: Vec<Vec<u8>>,
    /// Whether the guest's driver has set the port up.
    pub port_ready: bool,
    /// Whether a guest process has the port open.
    pub guest_open: bool,
    /// Whether the host's end was open according to the last control message.
    pub host_open: bool,
    /// The progress of a hang-up.
    pub hangup: Hangup,
    /// How often a guest process has opened the port.
    pub sessions: u64,
    /// The feature bits that the driver accepted.
    pub acked_features: u64,
}

impl Console {
    /// Makes the console that `state` describes again. All of its queues have work to do.
    ///
    /// # Errors
    /// When the state holds more than a console can.
    pub fn restore(state: ConsoleState) -> Result<Self, ConsoleError> {
        let ConsoleState { to_guest, from_guest, control, .. } = state;
        let full = to_guest.len() > BUFFER_BYTES || from_guest.len() > BUFFER_BYTES;
        if full
            || control.len() > MAX_WAITING
            || control.iter().any(|message| message.len() > MAX_MESSAGE_BYTES)
        {
            return Err(ConsoleError::State);
        }
        let mut console = Self::new();
        console.to_guest = to_guest.into();
        console.from_guest = from_guest.into();
        console.session = Session {
            waiting: control.into(),
            port_ready: state.port_ready,
            guest_open: state.guest_open,
            host_open: state.host_open,
            hangup: state.hangup,
            sessions: state.sessions,
            work: [true; 4],
        };
        console.acked_features = state.acked_features & console.features();
        Ok(console)
    }

    /// The state between rounds of work.
    pub fn save(&self) -> ConsoleState {
        // Every field is named, so that a new one is either saved or left out for a reason.
        let Self {
            to_guest,
            from_guest,
            session:
                Session {
                    waiting,
                    port_ready,
                    guest_open,
                    host_open,
                    hangup,
                    sessions,
                    // A restored console looks at all its queues.
                    work: _,
                },
            acked_features,
            // Empty between rounds of work.
            chain: _,
        } = self;
        ConsoleState {
            to_guest: to_guest.iter().copied().collect(),
            from_guest: from_guest.iter().copied().collect(),
            control: waiting.iter().cloned().collect(),
            port_ready: *port_ready,
            guest_open: *guest_open,
            host_open: *host_open,
            hangup: *hangup,
            sessions: *sessions,
            acked_features: *acked_features,
        }
    }
}
