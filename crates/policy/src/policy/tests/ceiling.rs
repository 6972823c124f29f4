//! The operator's ceiling narrows what a sandbox may reach.

use super::{SERVER, name, names, policy, tcp, tls, udp};
use crate::{Access, Author, Inspected, Policies, Preset};

#[test]
fn a_sandbox_cannot_widen_the_operators_policy() {
    let own = policy(
        Preset::Open,
        &["allow any", "allow host", "allow metadata", "allow loopback", "allow 10.0.0.5"],
    );
    let policies = Policies::new(Some(policy(Preset::Public, &["deny 93.0.0.0/8:22"])), own);
    let table = [
        (tcp("10.0.0.5", 443, &[]), "operator: preset public"),
        (tcp("169.254.169.254", 80, &[]), "operator: preset public"),
        (tcp(SERVER, 22, &[]), "operator: deny 93.0.0.0/8:22"),
        (udp("8.8.8.8", 53, &[]), "operator: preset public: other resolvers"),
    ];
    for (to, by) in table {
        let decision = policies.connect(&to);
        assert_eq!((decision.access, decision.by.to_string().as_str()), (Access::Deny, by));
        assert_eq!(decision.by.author, Author::Operator);
        assert_eq!(policies.fix(&to, None), None, "no rule of the sandbox helps");
    }
    assert_eq!(policies.connect(&tcp(SERVER, 443, &[])).by.to_string(), "allow any");
    assert_eq!(policies.ceilings(), [policy(Preset::Public, &["deny 93.0.0.0/8:22"])]);
}

#[test]
fn a_sandbox_can_narrow_it() {
    let policies =
        Policies::new(Some(policy(Preset::Open, &[])), policy(Preset::AllowList, &["allow 10.0.0.5"]));
    assert!(policies.connect(&tcp("10.0.0.5", 443, &[])).allows());
    let decision = policies.connect(&tcp(SERVER, 443, &[]));
    assert_eq!((decision.access, decision.by.author), (Access::Deny, Author::Sandbox));
    assert_eq!(policies.fix(&tcp(SERVER, 443, &[]), None).as_deref(), Some("tcp://93.184.216.34:443"));
}

#[test]
fn the_operators_names_hold_for_a_sandbox_that_allows_all() {
    let (api, evil, known) =
        (name("api.example"), name("evil.example"), names(&["api.example", "evil.example"]));
    let policies = Policies::new(
        Some(policy(Preset::AllowList, &["allow api.example:443"])),
        policy(Preset::Open, &["allow any"]),
    );
    let to = tcp(SERVER, 443, &known);
    let before = policies.connect(&to);
    assert_eq!(
        (before.access, before.by.to_string().as_str()),
        (Access::InspectFirst, "operator: allow api.example:443")
    );
    assert!(policies.decide(&to, &tls(&api)).allows());
    assert!(!policies.decide(&to, &tls(&evil)).allows());
    assert!(!policies.decide(&to, &Inspected::Other).allows());
    assert!(policies.resolve(&api).allows());
    assert_eq!(policies.resolve(&evil).by.to_string(), "operator: preset allow-list");
    assert_eq!(policies.fix(&to, Some(&evil)), None);
    assert_eq!(policies.fix_for_name(&evil), None);
}

#[test]
fn the_strictest_policy_decides_about_inspection() {
    let known = names(&["api.example"]);
    let to = tcp(SERVER, 443, &known);
    let by_name = policy(Preset::AllowList, &["allow api.example:443"]);
    let unless = policy(Preset::Public, &["deny evil.example"]);
    let free = policy(Preset::Public, &[]);
    let nothing = policy(Preset::AllowList, &[]);
    let table = [
        (&free, &free, Access::Allow),
        (&free, &unless, Access::AllowAndInspect),
        (&unless, &by_name, Access::InspectFirst),
        (&by_name, &free, Access::InspectFirst),
        (&by_name, &nothing, Access::Deny),
    ];
    for (one, other, access) in table {
        assert_eq!(Policies::new(Some(one.clone()), other.clone()).connect(&to).access, access);
        assert_eq!(Policies::new(Some(other.clone()), one.clone()).connect(&to).access, access);
    }
}

#[test]
fn every_one_of_the_operators_policies_has_to_agree() {
    let ceilings = [policy(Preset::Open, &["deny 93.0.0.0/8:22"]), policy(Preset::Public, &[])];
    let policies = Policies::new(ceilings, policy(Preset::Open, &[]));
    assert_eq!(policies.connect(&tcp(SERVER, 22, &[])).by.to_string(), "operator: deny 93.0.0.0/8:22");
    assert_eq!(policies.connect(&tcp("10.0.0.5", 80, &[])).by.to_string(), "operator: preset public");
    assert!(policies.connect(&tcp(SERVER, 443, &[])).allows());
}

#[test]
fn the_operator_can_take_the_network_away() {
    let none = policy(Preset::None, &[]);
    let open = policy(Preset::Open, &[]);
    assert!(!Policies::new(Some(none.clone()), open.clone()).has_network());
    assert!(!Policies::new(Some(open.clone()), none.clone()).has_network());
    assert!(!Policies::new(None, none).has_network());
    assert!(Policies::new(Some(open.clone()), open).has_network());
    assert!(Policies::new(None, policy(Preset::AllowList, &[])).has_network());
}
