//! Supervises a sandbox: starts it, records what crosses its boundary, watches its network and its host
//! memory, and ends it.
//!
//! The monitor of a persistent sandbox is a [`Supervisor`] behind a socket, in one event loop. `bathy run`
//! and `bathy code` do the same in their own process: their main thread talks to the guest, so another thread
//! watches the rest ([`BackgroundSupervisor`]).

mod background;
mod changes;
mod journal;
mod memory;
pub mod network;
mod restarts;
mod spool;
#[cfg(test)]
mod testing;

use std::os::fd::BorrowedFd;
use std::time::Instant;

use bathy_policy::{Policies, PublishedPort};

use crate::gateway::NetworkError;
use crate::launch::Sandbox;
pub use background::BackgroundSupervisor;
pub use changes::SettledChange;
pub use journal::{Journal, Observer, Subject, Unrecorded};
pub use memory::MemoryWatch;
use network::{NetworkWatch, SandboxGateways};
pub use spool::Sink;

/// A running sandbox with its network and journal. `W` is what waits for a new policy to take effect.
///
/// Dropping it kills the sandbox.
#[derive(Debug)]
pub struct Supervisor<W> {
    pub sandbox: Sandbox,
    pub journal: Journal,
    network: Option<NetworkWatch<W>>,
    memory: Option<MemoryWatch>,
    ports: Vec<PublishedPort>,
}

impl<W> Supervisor<W> {
    /// Supervises a sandbox that has been [started](Sandbox::start).
    pub fn new((sandbox, network): (Sandbox, Option<SandboxGateways>), journal: Journal) -> Self {
        let ports = network.as_ref().map(SandboxGateways::ports).unwrap_or_default();
        let memory = sandbox.memory_watch();
        Self { sandbox, journal, network: network.map(NetworkWatch::new), memory, ports }
    }

    /// The published ports with their assigned numbers.
    pub fn ports(&self) -> &[PublishedPort] {
        &self.ports
    }

    /// The descriptor to poll for gateway messages; none while they are not read.
    pub fn gateway_fd(&self) -> Option<BorrowedFd<'_>> {
        self.network.as_ref()?.fd(&self.journal)
    }

    /// When [`Self::keep_time`] has something to do.
    pub fn due(&self) -> Option<Instant> {
        let network = self.network.as_ref().and_then(|network| network.due(&self.journal));
        [network, self.journal.due()].into_iter().flatten().min()
    }

    /// Handles messages of the gateway.
    pub fn on_gateway_messages(&mut self) -> Vec<SettledChange<W>> {
        let Some(network) = &mut self.network else { return Vec::new() };
        network.on_messages(&mut self.journal)
    }

    /// Retries recording, restarts a failed gateway and times out policy changes.
    pub fn keep_time(&mut self, now: Instant) -> Vec<SettledChange<W>> {
        self.journal.retry(now);
        let Some(network) = &mut self.network else { return Vec::new() };
        network.keep_time(&mut self.journal, Some(&mut self.sandbox.connection), now)
    }

    /// When [`Self::check_memory`] has something to do, unless the sandbox is paused.
    pub fn memory_due(&self) -> Option<Instant> {
        self.memory.as_ref().map(MemoryWatch::due)
    }

    /// Kills the sandbox if its guest's processes have too much host memory, and returns the cause.
    pub fn check_memory(&mut self, now: Instant) -> Option<String> {
        let excess = self.memory.as_mut()?.check(now)?;
        self.journal.note(excess.event());
        self.sandbox.kill();
        Some(excess.to_string())
    }

    /// Changes the network policy. `waiter` is returned as [`SettledChange`], at once or later.
    pub fn change_policy(&mut self, policies: Policies, waiter: W) -> Vec<SettledChange<W>> {
        match &mut self.network {
            Some(network) => network.change(policies, waiter, &mut self.journal),
            // Without a network nothing can be reached, before and after.
            None if !policies.has_network() => vec![SettledChange { waiter, result: Ok(0) }],
            None => vec![SettledChange { waiter, result: Err(NetworkError::NoNetwork.to_string()) }],
        }
    }

    /// Ends the sandbox, records its gateway's last reports and returns the journal.
    pub fn end(self) -> Journal {
        let Self { sandbox, mut journal, mut network, .. } = self;
        // Everything of the sandbox ends with the keeper; its gateway notices and reports what was open.
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
