//! The network part of a specification.

use bathy_policy::{NetworkPolicy, Policies, PublishedPort};

use super::{MAX_CONNECTIONS, MAX_PORTS, SandboxSpec, SpecError};

impl SandboxSpec {
    /// All policies that apply to the sandbox: the operator's ceilings, its creator's ceilings and its own
    /// policy.
    pub fn policies(&self, operators: Vec<NetworkPolicy>) -> Policies {
        Policies::new(operators.into_iter().chain(self.ceilings.iter().cloned()), self.network.clone())
    }

    pub(super) fn check_network(&self) -> Result<(), SpecError> {
        self.network.check_published(&self.ports)?;
        if self.ports.len() > MAX_PORTS {
            return Err(SpecError::Ports(self.ports.len()));
        }
        let same = |one: &PublishedPort, two: &PublishedPort| {
            (one.bind, one.host, one.protocol) == (two.bind, two.host, two.protocol) && one.host != 0
        };
        let mut earlier = self.ports.iter().enumerate().map(|(index, port)| (port, self.ports.get(..index)));
        if let Some((port, _)) =
            earlier.find(|(port, before)| before.unwrap_or_default().iter().any(|other| same(port, other)))
        {
            return Err(SpecError::PublishedTwice(*port));
        }
        let limits = &self.network_limits;
        if limits.connections > MAX_CONNECTIONS {
            return Err(SpecError::Connections(limits.connections));
        }
        let zeros = [
            ("connections", limits.connections == 0),
            ("new_connections", limits.new_connections == 0),
            ("bytes", limits.bytes == 0),
            ("packets", limits.packets == 0),
            ("queries", limits.queries == 0),
        ];
        match zeros.into_iter().find(|(_, zero)| *zero) {
            Some((name, _)) => Err(SpecError::NoNetwork(name)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use bathy_policy::Preset;

    use super::*;

    fn with(change: impl FnOnce(&mut SandboxSpec)) -> Result<(), SpecError> {
        let mut spec = SandboxSpec::default();
        change(&mut spec);
        spec.checked().map(drop)
    }

    fn ports(texts: &[&str]) -> Vec<PublishedPort> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn published_ports_need_a_network_and_places_of_their_own() {
        assert_eq!(
            with(|s| s.ports = ports(&["80:80", "80:80/udp", "127.0.0.2:80:80", "0:80", "0:80"])),
            Ok(())
        );
        let twice = with(|s| s.ports = ports(&["80:1", "81:1", "127.0.0.1:80:2"])).unwrap_err();
        assert_eq!(twice, SpecError::PublishedTwice("80:2".parse().unwrap()));
        let many: Vec<_> =
            (1..=MAX_PORTS + 1).map(|port| format!("{port}:{port}").parse().unwrap()).collect();
        assert_eq!(with(|s| s.ports = many), Err(SpecError::Ports(MAX_PORTS + 1)));
        let without = with(|s| {
            s.ports = ports(&["80:80"]);
            s.network.preset = Preset::None;
        });
        assert!(without.unwrap_err().to_string().contains("80:80"));
    }

    #[test]
    fn limits_leave_a_network_and_fit_a_gateway() {
        for (change, name) in [
            ((|s| s.network_limits.connections = 0) as fn(&mut SandboxSpec), "connections"),
            (|s| s.network_limits.new_connections = 0, "new_connections"),
            (|s| s.network_limits.bytes = 0, "bytes"),
            (|s| s.network_limits.packets = 0, "packets"),
            (|s| s.network_limits.queries = 0, "queries"),
        ] {
            let error = with(change).unwrap_err();
            assert_eq!(error, SpecError::NoNetwork(name));
            assert!(error.to_string().contains("--net none"));
        }
        assert_eq!(with(|s| s.network_limits.connections = MAX_CONNECTIONS), Ok(()));
        let error = with(|s| s.network_limits.connections = MAX_CONNECTIONS + 1).unwrap_err();
        assert_eq!(error, SpecError::Connections(MAX_CONNECTIONS + 1));
    }

    #[test]
    fn every_ceiling_and_the_policy_itself_decide() {
        let policy = |preset| NetworkPolicy { preset, rules: Vec::new() };
        let spec = SandboxSpec {
            network: policy(Preset::Open),
            ceilings: vec![policy(Preset::Public)],
            ..SandboxSpec::default()
        };
        let policies = spec.policies(vec![policy(Preset::AllowList)]);
        assert_eq!(policies.ceilings(), [policy(Preset::AllowList), policy(Preset::Public)]);
        assert_eq!(*policies.own(), policy(Preset::Open));
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<SandboxSpec>(&text).unwrap(), spec);
    }
}
