//! Inbound peers at published ports.

use super::{address, policies, policy};
use crate::{Access, Policies, Preset, Protocol};

#[test]
fn published_ports_accept_every_peer_unless_a_rule_says_otherwise() {
    let table = [
        (Preset::Public, &[][..], "127.0.0.1", 80, true, "published port"),
        (Preset::AllowList, &[], "8.8.8.8", 80, true, "published port"),
        (Preset::None, &[], "127.0.0.1", 80, false, "preset none"),
        (Preset::Public, &["deny any"], "8.8.8.8", 80, true, "published port"),
        (Preset::Public, &["deny in public"], "8.8.8.8", 80, false, "deny in public"),
        (Preset::Public, &["deny in public"], "10.0.0.1", 80, true, "published port"),
        (Preset::Public, &["deny in public"], "::ffff:8.8.8.8", 80, false, "deny in public"),
        (Preset::Public, &["deny in 10.0.0.0/8"], "::ffff:10.0.0.1", 80, false, "deny in 10.0.0.0/8"),
        (Preset::Public, &["deny in any:80"], "10.0.0.1", 80, false, "deny in any:80"),
        (Preset::Public, &["deny in any:80"], "10.0.0.1", 81, true, "published port"),
        (Preset::Public, &["deny in udp://any"], "10.0.0.1", 80, true, "published port"),
        (
            Preset::Public,
            &["allow in 10.0.0.0/8", "deny in any"],
            "::ffff:10.0.0.1",
            80,
            true,
            "allow in 10.0.0.0/8",
        ),
        (Preset::Public, &["allow in 10.0.0.0/8", "deny in any"], "11.0.0.1", 80, false, "deny in any"),
        (Preset::Public, &["allow in host", "deny in any"], "127.0.0.1", 80, true, "allow in host"),
        (Preset::Public, &["allow in private", "deny in any"], "192.168.0.1", 80, true, "allow in private"),
        (Preset::Public, &["allow in private", "deny in any"], "64:ff9b::a00:1", 80, false, "deny in any"),
        (
            Preset::Public,
            &["allow in private", "deny in any"],
            "::ffff:192.168.0.1",
            80,
            true,
            "allow in private",
        ),
        (Preset::Public, &["allow in host", "deny in any"], "::ffff:127.0.0.1", 80, true, "allow in host"),
        (Preset::Public, &["deny in host"], "::1", 80, false, "deny in host"),
    ];
    for (preset, rules, peer, port, accepted, by) in table {
        let decision = policies(preset, rules).accept(address(peer), Protocol::Tcp, port, false);
        assert_eq!(
            (decision.allows(), decision.by.to_string().as_str()),
            (accepted, by),
            "{preset} {rules:?} {peer}"
        );
    }
    let own =
        policies(Preset::Public, &["deny in host"]).accept(address("10.0.0.1"), Protocol::Udp, 53, true);
    assert_eq!(own.access, Access::Deny);
}

#[test]
fn the_operator_can_close_published_ports() {
    let ceiling = policy(Preset::Public, &["deny in public"]);
    let policies = Policies::new(Some(ceiling), policy(Preset::Public, &["allow in any"]));
    let decision = policies.accept(address("8.8.8.8"), Protocol::Tcp, 80, false);
    assert_eq!(
        (decision.access, decision.by.to_string().as_str()),
        (Access::Deny, "operator: deny in public")
    );
    assert_eq!(policies.accept(address("10.0.0.1"), Protocol::Tcp, 80, false).by.to_string(), "allow in any");
}
