//! The session: which of the port's two ends are open, and how the host hangs up so that no byte of one session reaches the
//! next.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::request::{DriverMessage, HostMessage};
use super::{CONTROL_RX_QUEUE, CONTROL_TX_QUEUE, PORT_NAME, RX_QUEUE, TX_QUEUE};

/// The most control messages that wait for the guest.
pub(super) const MAX_WAITING: usize = 16;
/// Above this many, messages of the guest's wait: there has to be space for the two that answer one of them, and for
/// the two of a hang-up.
const MAX_BEFORE_ANSWERING: usize = MAX_WAITING - 4;

/// How far a hang-up has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hangup {
    /// None is under way.
    #[default]
    None,
    /// The guest was informed that the host closed its end, and has to close its own.
    AwaitClose,
    /// The guest closed its end; what it sent before is thrown away, then the host is back.
    Drain,
}

/// The control side of the console.
#[derive(Debug, Default)]
pub(super) struct Session {
    pub(super) waiting: VecDeque<Vec<u8>>,
    pub(super) port_ready: bool,
    pub(super) guest_open: bool,
    /// Whether the host's end was open according to the last message to the guest.
    pub(super) host_open: bool,
    pub(super) hangup: Hangup,
    pub(super) sessions: u64,
    /// Which queues have work to do.
    pub(super) work: [bool; 4],
}

impl Session {
    /// Whether data may flow.
    pub(super) fn is_open(&self) -> bool {
        self.guest_open && self.hangup == Hangup::None
    }

    /// Whether another control message of the guest's can be handled now.
    pub(super) fn accepts_control(&self) -> bool {
        // While old data is being discarded, an opening by the guest must wait: what it writes next is new data.
        self.hangup != Hangup::Drain && self.waiting.len() <= MAX_BEFORE_ANSWERING
    }

    pub(super) fn handle(&mut self, message: DriverMessage) {
        match message {
            DriverMessage::DeviceReady(true) => self.send(HostMessage::AddPort),
            DriverMessage::PortReady(true) => {
                self.port_ready = true;
                self.send(HostMessage::NamePort(PORT_NAME));
                self.set_host_open(true);
            }
            DriverMessage::DeviceReady(false) | DriverMessage::PortReady(false) => {
                self.port_ready = false;
                self.guest_open = false;
            }
            DriverMessage::PortOpen(true) => {
                self.guest_open = true;
                self.sessions = self.sessions.wrapping_add(1);
                self.mark(RX_QUEUE);
            }
            DriverMessage::PortOpen(false) => {
                self.guest_open = false;
                if self.hangup == Hangup::AwaitClose {
                    self.hangup = Hangup::Drain;
                    self.mark(TX_QUEUE);
                }
            }
        }
    }

    /// Starts a hang-up, unless one is under way or there is no port to hang up.
    pub(super) fn hang_up(&mut self) {
        if self.hangup != Hangup::None || !self.port_ready {
            return;
        }
        if self.guest_open {
            self.hangup = Hangup::AwaitClose;
            self.set_host_open(false);
        } else {
            self.hangup = Hangup::Drain;
        }
        self.mark(TX_QUEUE);
    }

    /// All data of the old session has been discarded: the host opens its end again.
    pub(super) fn drained(&mut self) {
        self.hangup = Hangup::None;
        if self.port_ready && !self.host_open {
            self.set_host_open(true);
        }
        self.mark(CONTROL_TX_QUEUE);
    }

    fn set_host_open(&mut self, open: bool) {
        self.host_open = open;
        self.send(HostMessage::SetOpen(open));
    }

    fn send(&mut self, message: HostMessage) {
        self.waiting.push_back(message.encode());
        self.mark(CONTROL_RX_QUEUE);
    }

    /// Notes that a queue has work to do.
    pub(super) fn mark(&mut self, queue: usize) {
        if let Some(flag) = self.work.get_mut(queue) {
            *flag = true;
        }
    }

    /// A queue that was marked, if any; old data goes before anything else.
    pub(super) fn take_marked(&mut self) -> Option<usize> {
        [TX_QUEUE, CONTROL_TX_QUEUE, CONTROL_RX_QUEUE, RX_QUEUE]
            .into_iter()
            .find(|queue| self.work.get_mut(*queue).is_some_and(std::mem::take))
    }
}
