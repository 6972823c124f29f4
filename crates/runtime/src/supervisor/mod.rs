//! One life for every sandbox: it is started, what crosses its boundary is recorded, its network is watched, and it is
//! ended.
//!
//! The monitor of a persistent sandbox is a [`Supervisor`] behind a socket, in one event loop. `bathy run` and
//! `bathy code` have the same in their own process; their main thread talks to the guest, so a thread watches the network
//! ([`Background`]).

mod background;
mod changes;
mod journal;
pub mod network;
mod restarts;
mod spool;
#[cfg(test)]
mod testing;

use std::os::fd::BorrowedFd;
use std::time::Instant;

use bathy_policy::{Policies, PublishedPort};

use crate::gateway::GatewayError;
use crate::launch::Sandbox;
pub use background::Background;
pub use changes::Settled;
pub use journal::{Journal, Observer, Subject, Unrecorded};
use network::{NetworkWatch, SandboxGateways};
pub use spool::Sink;

/// A running sandbox with its network and its record. `W` is what waits for a new policy to take effect.
///
/// Dropping it ends the sandbox.
#[derive(Debug)]
pub struct Supervisor<W> {
    pub sandbox: Sandbox,
    pub journal: Journal,
    network: Option<NetworkWatch<W>>,
    ports: Vec<PublishedPort>,
}

impl<W> Supervisor<W> {
    /// Supervises a sandbox that has been [started](Sandbox::start).
    pub fn new((sandbox, network): (Sandbox, Option<SandboxGateways>), journal: Journal) -> Self {
        let ports = network.as_ref().map(SandboxGateways::ports).unwrap_or_default();
        Self { sandbox, journal, network: network.map(NetworkWatch::new), ports }
    }

    /// The published ports, with the numbers that they have.
    pub fn ports(&self) -> &[PublishedPort] {
        &self.ports
    }

    /// What to poll for messages of the gateway; none while they are not read.
    pub fn gateway_fd(&self) -> Option<BorrowedFd<'_>> {
        self.network.as_ref()?.fd(&self.journal)
    }

    /// When [`Self::keep_time`] has something to do.
    pub fn due(&self) -> Option<Instant> {
        let network = self.network.as_ref().and_then(|network| network.due(&self.journal));
        [network, self.journal.due()].into_iter().flatten().min()
    }

    /// Handles messages of the gateway.
    pub fn on_gateway_messages(&mut self) -> Vec<Settled<W>> {
        let Some(network) = &mut self.network else { return Vec::new() };
        network.on_messages(&mut self.journal)
    }

    /// Retries what could not be recorded, starts a gateway in place of one that was lost, and gives up on policy changes
    /// that take too long.
    pub fn keep_time(&mut self, now: Instant) -> Vec<Settled<W>> {
        self.journal.retry(now);
        let Some(network) = &mut self.network else { return Vec::new() };
        network.keep_time(&mut self.journal, Some(&mut self.sandbox.connection), now)
    }

    /// Changes what the sandbox may reach. `waiter` comes back as [`Settled`], at once or later.
    pub fn change_policy(&mut self, policies: Policies, waiter: W) -> Vec<Settled<W>> {
        match &mut self.network {
            Some(network) => network.change(policies, waiter, &mut self.journal),
            // Without a network nothing can be reached, before and after.
            None if !policies.has_network() => vec![Settled { waiter, result: Ok(0) }],
            None => vec![Settled { waiter, result: Err(GatewayError::NoNetwork.to_string()) }],
        }
    }

    /// Ends the sandbox, records what its gateway still has to report, and leaves the journal.
    pub fn end(self) -> Journal {
        let Self { sandbox, mut journal, mut network, .. } = self;
        // With the keeper ends everything of the sandbox; its gateway notices and reports what was open.
        if let Some(network) = &mut network {
            network.expect_end();
        }
        drop(sandbox);
        if let Some(network) = &mut network {
            network.drain(&mut journal);
        }
        journal
    }
}
