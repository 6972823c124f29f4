//! Properties of all policies, tested on many that a seeded generator makes.

use super::{address, name};
use crate::{
    Access, Destination, HostName, Inspected, InspectedRequest, NetworkPolicy, Policies, Preset, Protocol,
    Reason, Rule, Target,
};

const ROUNDS: usize = 500;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 40).expect("24 bits") % limit
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn rule(&mut self) -> Rule {
        loop {
            let target = self.pick(&TARGETS);
            let scheme = self.pick(&[
                "",
                "",
                "",
                "tcp://",
                "udp://",
                "icmp://",
                "http://",
                "GET,HEAD http://",
                "POST http://",
            ]);
            let ports = self.pick(&["", "", ":443", ":80,443", ":1-1024", ":53", ":52,53,54", ":1-65535"]);
            let path =
                if scheme.ends_with("http://") { self.pick(&["", "/", "/v1/*", "/admin"]) } else { "" };
            let target = if target.contains(['[', '/'])
                && ports.is_empty()
                && path.is_empty()
                && !scheme.contains("http")
            {
                target.trim_matches(['[', ']'])
            } else {
                target
            };
            let action = self.pick(&["allow", "allow", "deny"]);
            let direction = self.pick(&["", "", "", "in ", "out "]);
            // Some combinations are not valid rules.
            if let Ok(rule) = format!("{action} {direction}{scheme}{target}{ports}{path}").parse() {
                return rule;
            }
        }
    }

    fn policy(&mut self) -> NetworkPolicy {
        let rules = (0..self.below(5)).map(|_| self.rule()).collect();
        NetworkPolicy {
            preset: self.pick(&[
                Preset::None,
                Preset::Public,
                Preset::Public,
                Preset::AllowList,
                Preset::AllowList,
                Preset::Open,
            ]),
            rules,
        }
    }

    /// A policy that often leaves the decision to others.
    fn ceiling(&mut self) -> NetworkPolicy {
        if self.below(2) == 0 {
            return self.policy();
        }
        NetworkPolicy { preset: Preset::Open, rules: Vec::new() }
    }

    fn names(&mut self) -> Vec<HostName> {
        (0..self.below(4)).map(|_| name(self.pick(&NAMES))).collect()
    }

    fn destination<'a>(&mut self, names: &'a [HostName]) -> Destination<'a> {
        Destination {
            protocol: self.pick(&[Protocol::Tcp, Protocol::Tcp, Protocol::Udp, Protocol::Icmp]),
            address: address(self.pick(&ADDRESSES)),
            port: self.pick(&[443, 443, 80, 80, 53, 22]),
            is_host: self.below(16) == 0,
            names,
        }
    }
}

const TARGETS: [&str; 22] = [
    "a.example",
    "*.example",
    "b.example",
    "public",
    "private",
    "loopback",
    "link-local",
    "metadata",
    "host",
    "any",
    "a.example",
    "*.example",
    "b.example",
    "hosts.",
    "93.184.216.34",
    "93.184.0.0/16",
    "10.0.0.0/8",
    "[2a00::/16]",
    "[2606:2800:220::1]",
    "[64:ff9b::/96]",
    "0.0.0.0/0",
    "[::/0]",
];

const NAMES: [&str; 5] = ["a.example", "b.example", "c.b.example", "hosts", "metadata.google.internal"];

const ADDRESSES: [&str; 20] = [
    "93.184.216.34",
    "2606:2800:220::1",
    "93.184.216.34",
    "2606:2800:220::1",
    "93.184.216.34",
    "2606:2800:220::1",
    "93.184.216.34",
    "2606:2800:220::1",
    "93.184.216.34",
    "2606:2800:220::1",
    "10.0.0.5",
    "127.0.0.1",
    "169.254.169.254",
    "169.254.1.1",
    "224.0.0.1",
    "::1",
    "64:ff9b::a00:5",
    "64:ff9b::5db8:d822",
    "::ffff:93.184.216.34",
    "fd00::5",
];

/// Everything that a client could send first.
fn readings(names: &[HostName]) -> Vec<Inspected<'_>> {
    let mut all = vec![Inspected::Other];
    for given in names.iter().map(Some).chain([None]) {
        for encrypted_hello in [false, true] {
            all.push(Inspected::Tls { name: given, encrypted_hello });
        }
        for (method, path) in
            [("GET", Some("/v1/x")), ("POST", Some("/admin")), ("GET", None), ("CONNECT", None)]
        {
            let request = InspectedRequest { method, path, rewrites: path.is_none() };
            all.push(Inspected::Http { host: given, host_is_address: given.is_none(), request });
        }
    }
    all
}

#[test]
fn every_rule_is_read_as_it_is_written() {
    let mut random = Random(1);
    for _ in 0..ROUNDS {
        let rule = random.rule();
        let text = rule.to_string();
        assert_eq!(text.parse::<Rule>().as_ref(), Ok(&rule), "{text}");
        assert_eq!(Rule::parse(rule.action(), &rule.after_action()).as_ref(), Ok(&rule), "{text}");
        let json = serde_json::to_string(&rule).expect("text");
        assert_eq!(serde_json::from_str::<Rule>(&json).expect("a rule"), rule);
    }
}

#[test]
fn a_ceiling_is_never_widened() {
    let all: Vec<HostName> = NAMES.iter().map(|text| name(text)).collect();
    let mut random = Random(2);
    let mut allowed = 0;
    for _ in 0..ROUNDS {
        let (ceiling, second, own, names) =
            (random.policy(), random.ceiling(), random.policy(), random.names());
        let to = random.destination(&names);
        let both = Policies::new([ceiling.clone(), second.clone()], own.clone());
        let alone = [ceiling, second, own].map(|policy| Policies::new(None, policy));
        let strictest =
            |ask: &dyn Fn(&Policies) -> Access| alone.iter().map(ask).max().expect("three verdicts");

        assert_eq!(both.connect(&to).access, strictest(&|one| one.connect(&to).access), "{both:?} {to:?}");
        for inspected in readings(&all) {
            let access = both.decide(&to, &inspected).access;
            assert_eq!(
                access,
                strictest(&|one| one.decide(&to, &inspected).access),
                "{both:?} {to:?} {inspected:?}"
            );
            allowed += usize::from(access == Access::Allow);
        }
        for name in &all {
            assert_eq!(both.resolve(name).access, strictest(&|one| one.resolve(name).access));
            let told = both.reveal(name, to.address, to.is_host);
            assert_eq!(told, alone.iter().all(|one| one.reveal(name, to.address, to.is_host)));
        }
        let accepts = |one: &Policies| one.accept(to.address, to.protocol, to.port, to.is_host).access;
        assert_eq!(accepts(&both), strictest(&accepts));
        assert_eq!(both.has_network(), alone.iter().all(Policies::has_network));
    }
    assert!(allowed > ROUNDS, "the generator makes policies that allow something: {allowed}");
}

#[test]
fn bytes_before_inspection_are_inspected_too() {
    let all: Vec<HostName> = NAMES.iter().map(|text| name(text)).collect();
    let mut random = Random(3);
    let mut counts = [0; 4];
    for _ in 0..ROUNDS {
        let policies = Policies::new(None, random.policy());
        let names = random.names();
        let to = random.destination(&names);
        let before = policies.connect(&to).access;
        counts[before as usize] += 1;
        for inspected in readings(&all) {
            let after = policies.decide(&to, &inspected).access;
            let kept = match (before, inspected) {
                (Access::Allow, _) | (Access::AllowAndInspect, Inspected::Other) => after == Access::Allow,
                (Access::Deny, _) | (Access::InspectFirst, Inspected::Other) => after == Access::Deny,
                _ => matches!(after, Access::Allow | Access::Deny),
            };
            assert!(kept, "{policies:?} {to:?}: {before:?}, {inspected:?}: {after:?}");
        }
    }
    assert!(counts.iter().all(|count| *count > ROUNDS / 200), "each decision is tried: {counts:?}");
}

#[test]
fn n8_a_denial_in_front_never_allows_more() {
    let all: Vec<HostName> = NAMES.iter().map(|text| name(text)).collect();
    let mut random = Random(4);
    for _ in 0..ROUNDS {
        let (policy, names, denial) = (random.policy(), random.names(), random.rule().after_action());
        let Ok(denial) = Rule::parse(crate::Action::Deny, &denial) else { continue };
        let to = random.destination(&names);
        let rules = std::iter::once(denial).chain(policy.rules.clone()).collect();
        let after = Policies::new(None, NetworkPolicy { preset: policy.preset, rules });
        let before = Policies::new(None, policy);
        assert!(after.connect(&to).access >= before.connect(&to).access, "{after:?} {to:?}");
        for inspected in readings(&all) {
            assert!(
                after.decide(&to, &inspected).access >= before.decide(&to, &inspected).access,
                "{after:?} {to:?} {inspected:?}"
            );
        }
    }
}

#[test]
fn n3_what_can_be_reached_by_a_name_is_resolved_and_revealed_and_nothing_else() {
    let mut random = Random(5);
    for _ in 0..ROUNDS {
        let policies = Policies::new(None, random.policy());
        let names = [name(random.pick(&NAMES))];
        let to = random.destination(&names);
        let decision = policies.connect(&to);
        if decision.access == Access::Deny {
            continue;
        }
        assert!(policies.reveal(&names[0], to.address, to.is_host), "{policies:?} {to:?}");
        let by_name =
            matches!(&decision.by.reason, Reason::Rule(rule) if matches!(rule.target(), Target::Name(_)));
        if by_name && decision.access == Access::InspectFirst {
            assert!(policies.resolve(&names[0]).allows(), "{policies:?} {to:?}");
        }
    }
}

#[test]
fn a_fix_is_a_rule_that_can_be_parsed() {
    let mut random = Random(6);
    for _ in 0..ROUNDS {
        let policies = Policies::new(Some(random.policy()), random.policy());
        let names = random.names();
        let to = random.destination(&names);
        let Some(fix) = policies.fix(&to, names.first()) else { continue };
        let rule = Rule::parse(crate::Action::Allow, &fix).expect("a rule");
        let rules = std::iter::once(rule).chain(policies.own().rules.iter().cloned()).collect();
        let own = NetworkPolicy { preset: policies.own().preset, rules };
        let cured = Policies::new(policies.ceilings().to_vec(), own);
        assert_ne!(cured.connect(&to).access, Access::Deny, "{policies:?} {to:?} {fix}");
    }
}
