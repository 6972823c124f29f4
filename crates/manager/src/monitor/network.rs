//! Policy changes of a running sandbox: from its description to its gateway, and the answer back.

use std::os::fd::OwnedFd;

use bathy_runtime::description::Description;
use bathy_runtime::supervisor::SettledChange;
use bathy_spec::SandboxSpec;
use bathy_spec::operator::Operator;

use super::Monitor;
use super::control::FromMonitor;
use super::pending::{refuse, respond};

impl Monitor {
    /// The current settings, from the description beside the disk. The store may have been replaced since
    /// this process opened it.
    fn described_spec(&self) -> Result<SandboxSpec, String> {
        match Description::read(&self.folder) {
            Ok(Some(found)) => return Ok(found.spec),
            // Created and started by an earlier version.
            Ok(None) => {}
            Err(error) => return Err(error.to_string()),
        }
        match self.store.get(&self.record.id) {
            Ok(Some(record)) => Ok(record.spec),
            Ok(None) => Err("the sandbox has been removed".to_owned()),
            Err(error) => Err(bathy_protocol::chain(&error)),
        }
    }

    /// Sends the stored policy to the gateway.
    pub(super) fn change_policy(&mut self, socket: OwnedFd) {
        let spec = match self.described_spec() {
            Ok(spec) => spec,
            Err(reason) => return refuse(&socket, &reason),
        };
        let policies = match Operator::load() {
            Ok(operator) => spec.policies(operator.network()),
            Err(error) => return refuse(&socket, &bathy_protocol::chain(&error)),
        };
        self.record.spec.network = spec.network;
        answer_settled(self.supervisor.change_policy(policies, socket));
    }
}

/// Answers the clients of completed policy changes.
pub(super) fn answer_settled(settled: Vec<SettledChange<OwnedFd>>) {
    for SettledChange { waiter, result } in settled {
        match result {
            Ok(closed) => respond(&waiter, &FromMonitor::Changed { closed }),
            Err(reason) => refuse(&waiter, &reason),
        }
    }
}
