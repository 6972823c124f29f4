//! A new policy, and what is open: whatever it would not let begin is ended.

#[cfg(test)]
mod tests;

use bathy_policy::{Decision, Protocol, Verdict};

use crate::connection::Connection;
use crate::flows::{Flow, Way};
use crate::gateway::Gateway;
use crate::policy_check::PolicyCheck;

impl Gateway {
    /// Ends everything that the policies do not allow any more. How many that were.
    pub(crate) fn judge_all_again(&mut self) -> u32 {
        let mut connections = Vec::new();
        for (number, connection) in self.table.all_mut() {
            match again(&self.policy_check, connection) {
                Again::Stays => {}
                Again::IsRead => connection.inspect(),
                Again::Ends(decision) => connections.push((number, decision)),
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

/// What becomes of a connection.
enum Again {
    Stays,
    /// It stays, and what its client says is judged.
    IsRead,
    Ends(Decision),
}

fn again(policy_check: &PolicyCheck, connection: &Connection) -> Again {
    let ends_unless_allowed =
        |decision: Decision| if decision.allows() { Again::Stays } else { Again::Ends(decision) };
    if connection.is_local() {
        return Again::Stays;
    }
    if connection.inbound {
        let port = connection.ends.guest_port;
        return ends_unless_allowed(policy_check.accept(
            connection.endpoint.remote.ip(),
            Protocol::Tcp,
            port,
        ));
    }
    let place = &connection.endpoint;
    let decision = policy_check.connect(place);
    match (decision.verdict, connection.parsed_target()) {
        (Verdict::Allow, _) => Again::Stays,
        (Verdict::Deny, _) => Again::Ends(decision),
        _ if connection.is_undecided() => Again::Stays,
        // What was said first decides still.
        (_, Some(said)) => ends_unless_allowed(policy_check.decide(place, said)),
        (Verdict::UnlessRead, None) if connection.is_dialing() => Again::IsRead,
        (Verdict::UnlessRead, None) if connection.is_inspected() => Again::Stays,
        // It matters now what this connection carries, and nobody has read it.
        (_, None) => Again::Ends(decision),
    }
}

fn denial_of_flow(policy_check: &PolicyCheck, flow: &Flow) -> Option<Decision> {
    let decision = match flow.way {
        Way::Out(_) => policy_check.connect(&flow.place),
        Way::Back(_, _) => policy_check.accept(flow.place.remote.ip(), Protocol::Udp, flow.ends.guest_port),
    };
    (!matches!(decision.verdict, Verdict::Allow | Verdict::UnlessRead)).then_some(decision)
}
