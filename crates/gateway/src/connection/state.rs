//! The states of a connection. Each owns exactly the parts that exist in it, so that an illegal combination cannot
//! be represented.
//!
//! ```text
//! Dialing ──────────────────► Open ◄── inbound peer
//! Reading ──► DialingRead ──► Open
//! Reading, Open ────────────► Answering
//! Resolving
//! ```

use std::os::fd::OwnedFd;
use std::time::Instant;

use super::answering::Answering;
use super::dialing::{Dialing, DialingRead};
use super::host_socket::HostSocket;
use super::open::Open;
use super::reading::Reading;
use super::resolving::Resolving;
use crate::inspect::Inspector;
use crate::stack::Stack;

#[derive(Debug, Default)]
pub(super) enum State {
    /// Owns nothing. Replaces a state that a transition consumes, until the next one is there.
    #[default]
    Closed,
    /// The host's socket is connecting. The guest's SYN is not answered before.
    Dialing(Dialing),
    /// The guest's side is established. Nothing is dialed before the policy has decided about the client's first
    /// bytes.
    Reading(Reading),
    /// The client's first bytes were allowed, and the host's socket is connecting.
    DialingRead(DialingRead),
    Open(Open),
    /// The gateway itself answers the client, and then closes.
    Answering(Answering),
    /// DNS over TCP to the gateway's resolver.
    Resolving(Resolving),
}

impl State {
    pub(super) fn stack(&mut self) -> Option<&mut Stack> {
        match self {
            Self::Closed | Self::Dialing(_) => None,
            Self::Reading(state) => Some(&mut state.stack),
            Self::DialingRead(state) => Some(&mut state.stack),
            Self::Open(state) => Some(&mut state.stack),
            Self::Answering(state) => Some(&mut state.stack),
            Self::Resolving(state) => Some(&mut state.stack),
        }
    }

    pub(super) fn host(&self) -> Option<&HostSocket> {
        match self {
            Self::Closed | Self::Reading(_) | Self::Resolving(_) => None,
            Self::Dialing(state) => Some(&state.host),
            Self::DialingRead(state) => Some(&state.host),
            Self::Open(state) => Some(&state.host),
            Self::Answering(state) => state.host.as_ref(),
        }
    }

    pub(super) fn host_mut(&mut self) -> Option<&mut HostSocket> {
        match self {
            Self::Closed | Self::Reading(_) | Self::Resolving(_) => None,
            Self::Dialing(state) => Some(&mut state.host),
            Self::DialingRead(state) => Some(&mut state.host),
            Self::Open(state) => Some(&mut state.host),
            Self::Answering(state) => state.host.as_mut(),
        }
    }

    pub(super) fn abort(&mut self) {
        if let Some(stack) = self.stack() {
            stack.tcp().abort();
        }
        if let Some(host) = self.host_mut() {
            host.abort();
        }
    }

    pub(super) fn into_closing(self) -> Option<OwnedFd> {
        match self {
            Self::Closed | Self::Reading(_) | Self::Resolving(_) => None,
            Self::Dialing(state) => state.host.into_closing(),
            Self::DialingRead(state) => state.host.into_closing(),
            Self::Open(state) => state.host.into_closing(),
            Self::Answering(state) => state.host.and_then(HostSocket::into_closing),
        }
    }

    pub(super) fn inspector(&self) -> Option<&Inspector> {
        match self {
            Self::Closed | Self::Answering(_) | Self::Resolving(_) => None,
            Self::Dialing(state) => Some(&state.inspector),
            Self::Reading(state) => Some(&state.inspector),
            Self::DialingRead(state) => Some(&state.inspector),
            Self::Open(state) => state.inspector.as_deref(),
        }
    }

    pub(super) fn inspector_mut(&mut self) -> Option<&mut Inspector> {
        match self {
            Self::Closed | Self::Answering(_) | Self::Resolving(_) => None,
            Self::Dialing(state) => Some(&mut state.inspector),
            Self::Reading(state) => Some(&mut state.inspector),
            Self::DialingRead(state) => Some(&mut state.inspector),
            Self::Open(state) => state.inspector.as_deref_mut(),
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Closed => None,
            Self::Dialing(state) => Some(state.deadline),
            Self::Reading(state) => Some(state.deadline),
            Self::DialingRead(state) => Some(state.deadline),
            Self::Open(state) => state.handshake_deadline,
            Self::Answering(state) => Some(state.deadline),
            Self::Resolving(state) => Some(state.deadline),
        }
    }

    /// The reason for which a connection ends at its deadline.
    pub(super) fn timeout_reason(&self) -> &'static str {
        match self {
            Self::Dialing(_) | Self::DialingRead(_) => "not connected: timed out",
            Self::Reading(_) => "the client sent no ClientHello or request in time",
            Self::Open(_) => "handshake not completed in time",
            Self::Answering(_) | Self::Resolving(_) | Self::Closed => "idle timeout",
        }
    }
}
