//! A changed policy is applied to what is open: what it would not allow is closed.

#[cfg(test)]
mod tests;

use bathy_policy::{Access, Decision, Protocol};

use crate::connection::Connection;
use crate::flows::{Flow, FlowSocket};
use crate::gateway::Gateway;
use crate::policy_check::PolicyCheck;

impl Gateway {
    /// Closes every connection and flow that the policies no longer allow. Returns how many.
    pub(crate) fn recheck_all(&mut self) -> u32 {
        let mut connections = Vec::new();
        for (number, connection) in self.table.all_mut() {
            match recheck(&self.policy_check, connection) {
                Recheck::Keep => {}
                Recheck::Inspect => connection.inspect(),
                Recheck::Close(decision) => connections.push((number, decision)),
            }
        }
        let flows: Vec<_> = self
            .flows
            .all()
            .filter_map(|(number, flow)| Some((number, denial_of_flow(&self.policy_check, flow)?)))
            .collect();
        let closed = connections.len() + flows.len();
        for (number, decision) in connections {
            if let Some(connection) = self.table.get_mut(number) {
                connection.abort();
            }
            self.end(number, &reason(&decision));
        }
        for (number, decision) in flows {
            self.end_flow(number, &reason(&decision));
        }
        u32::try_from(closed).unwrap_or(u32::MAX)
    }
}

fn reason(decision: &Decision) -> String {
    format!("the policy was changed: {}", decision.by)
}

enum Recheck {
    Keep,
    /// It stays, and what the client sends next is inspected.
    Inspect,
    Close(Decision),
}

fn recheck(policy_check: &PolicyCheck, connection: &Connection) -> Recheck {
    let close_unless_allowed =
        |decision: Decision| if decision.allows() { Recheck::Keep } else { Recheck::Close(decision) };
    if connection.is_local() {
        return Recheck::Keep;
    }
    if connection.inbound {
        let port = connection.tuple.guest_port;
        return close_unless_allowed(policy_check.accept(
            connection.endpoint.remote.ip(),
            Protocol::Tcp,
            port,
        ));
    }
    let endpoint = &connection.endpoint;
    let decision = policy_check.connect(endpoint);
    match (decision.access, connection.parsed_target()) {
        (Access::Allow, _) => Recheck::Keep,
        (Access::Deny, _) => Recheck::Close(decision),
        _ if connection.is_undecided() => Recheck::Keep,
        // What the client asked for first still decides.
        (_, Some(target)) => close_unless_allowed(policy_check.decide(endpoint, target)),
        (Access::AllowAndInspect, None) if connection.is_dialing() => Recheck::Inspect,
        (Access::AllowAndInspect, None) if connection.is_inspected() => Recheck::Keep,
        // Its content decides now, and was never inspected: fail closed.
        (_, None) => Recheck::Close(decision),
    }
}

fn denial_of_flow(policy_check: &PolicyCheck, flow: &Flow) -> Option<Decision> {
    let decision = match flow.socket {
        FlowSocket::Outbound(_) => policy_check.connect(&flow.endpoint),
        FlowSocket::Inbound(_, _) => {
            policy_check.accept(flow.endpoint.remote.ip(), Protocol::Udp, flow.tuple.guest_port)
        }
    };
    (!matches!(decision.access, Access::Allow | Access::AllowAndInspect)).then_some(decision)
}
