//! Other resolvers than the gateway's.

use super::{SERVER, allow_list, name, names, policies, tcp, tls, udp};
use crate::{Access, Destination, Preset, Protocol};

const PORTS: [(&str, u16); 4] = [("DNS", 53), ("DoT and DoQ", 853), ("mDNS", 5353), ("LLMNR", 5355)];

#[test]
fn n4_other_resolvers_are_denied_unless_their_port_is_mentioned() {
    for (id, port) in PORTS {
        for to in
            [tcp("8.8.8.8", port, &[]), udp("8.8.8.8", port, &[]), udp("2001:4860:4860::8888", port, &[])]
        {
            let by_preset = policies(Preset::Public, &[]).connect(&to);
            assert_eq!(by_preset.access, Access::Deny, "N4 {id} {to:?}");
            assert_eq!(by_preset.by.to_string(), "preset public: other resolvers");
            for wide in
                ["allow public", "allow any", "allow 8.8.8.8", "allow any:1-65535", "allow any:1-60000"]
            {
                let decision = allow_list(&[wide]).connect(&to);
                assert_eq!(decision.access, Access::Deny, "N4 {id}: {wide}");
                assert_eq!(decision.by.to_string(), "preset allow-list: other resolvers");
            }
            let mentioned = format!("allow {}://{}:{port}", to.protocol, bracketed(&to));
            assert!(allow_list(&[&mentioned]).connect(&to).allows(), "N4 {id}: {mentioned}");
            let listed = format!("allow any:52,{port},54,6000-7000");
            assert!(policies(Preset::Public, &[&listed]).connect(&to).allows(), "N4 {id}: {listed}");
            for edge in [format!("allow any:50-{port}"), format!("allow any:{port}-6000")] {
                assert!(allow_list(&[&edge]).connect(&to).allows(), "N4 {id}: {edge}");
            }
            assert!(policies(Preset::Open, &[]).connect(&to).allows(), "N4 {id}: preset open");
        }
    }
}

fn bracketed(to: &Destination<'_>) -> String {
    if to.address.is_ipv6() { format!("[{}]", to.address) } else { to.address.to_string() }
}

#[test]
fn n4_a_name_rule_opens_no_resolver() {
    let (resolver, known) = (name("dns.example"), names(&["dns.example"]));
    for (id, port) in PORTS {
        let to = tcp(SERVER, port, &known);
        let all_ports = allow_list(&["allow dns.example"]);
        assert_eq!(all_ports.connect(&to).access, Access::Deny, "N4 {id}");
        assert_eq!(all_ports.decide(&to, &tls(&resolver)).access, Access::Deny, "N4 {id}");
        let mentioned = allow_list(&[&format!("allow dns.example:{port}")]);
        assert!(mentioned.decide(&to, &tls(&resolver)).allows(), "N4 {id}");
    }
}

#[test]
fn n4_the_operators_guard_holds_for_an_open_sandbox() {
    use super::policy;
    let open =
        crate::Policies::new(Some(policy(Preset::Public, &[])), policy(Preset::Open, &["allow any:53"]));
    let decision = open.connect(&udp("8.8.8.8", 53, &[]));
    assert_eq!(decision.by.to_string(), "operator: preset public: other resolvers");
    let echo = Destination { protocol: Protocol::Icmp, ..tcp("8.8.8.8", 53, &[]) };
    assert!(open.connect(&echo).allows(), "ICMP has no ports");
}
