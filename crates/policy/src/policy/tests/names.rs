//! Names: what was resolved, what the client sends, and what the rules allow.

use super::{SERVER, SERVER_V6, address, allow_list, name, names, policies, rule, tcp, tls, udp};
use crate::{Access, Destination, HostName, Inspected, InspectedRequest, Policies, Preset, Protocol};

const RULE: &str = "allow api.example:443";

fn http(host: Option<&HostName>) -> Inspected<'_> {
    let request = InspectedRequest { method: "GET", path: Some("/"), rewrites: false };
    Inspected::Http { host, host_is_address: host.is_none(), request }
}

#[test]
fn n6_a_name_rule_needs_the_resolved_name_from_the_client() {
    let (api, other, evil) = (name("api.example"), name("other.example"), name("evil.example"));
    let known = names(&["api.example", "other.example"]);
    let policies = allow_list(&[RULE]);
    let to = tcp(SERVER, 443, &known);
    let before = policies.connect(&to);
    assert_eq!((before.access, before.by.to_string().as_str()), (Access::InspectFirst, RULE));

    let not_resolved = "the client's host name, evil.example, was not resolved to this address";
    let no_name = "the client sent no host name, allow api.example:443 does not apply";
    let table = [
        ("N6 the name", tls(&api), Access::Allow, RULE),
        ("N6 the name in HTTP", http(Some(&api)), Access::Allow, RULE),
        ("N6 no SNI", Inspected::Tls { name: None, encrypted_hello: false }, Access::Deny, no_name),
        ("N6 no Host, or an address", http(None), Access::Deny, no_name),
        ("N6 another name of the address", tls(&other), Access::Deny, "preset allow-list"),
        ("N6 a name of another address", tls(&evil), Access::Deny, not_resolved),
        ("N6 Host of another address", http(Some(&evil)), Access::Deny, not_resolved),
        (
            "N6 ECH",
            Inspected::Tls { name: Some(&api), encrypted_hello: true },
            Access::Deny,
            "the host name is encrypted, allow api.example:443 does not apply",
        ),
        (
            "N6 neither TLS nor HTTP",
            Inspected::Other,
            Access::Deny,
            "neither TLS nor HTTP, allow api.example:443 does not apply",
        ),
    ];
    for (id, inspected, access, by) in table {
        let decision = policies.decide(&to, &inspected);
        assert_eq!((decision.access, decision.by.to_string().as_str()), (access, by), "{id}");
    }
}

#[test]
fn n6_a_name_that_the_rule_means_counts_only_if_it_was_resolved_here() {
    let known = names(&["a.api.example"]);
    let policies = allow_list(&["allow *.api.example:443"]);
    let to = tcp(SERVER, 443, &known);
    assert!(policies.decide(&to, &tls(&name("a.api.example"))).allows());
    let decision = policies.decide(&to, &tls(&name("b.api.example")));
    assert_eq!(decision.access, Access::Deny, "N6: SNI allowed, address not from our answer");
    assert_eq!(
        decision.by.to_string(),
        "the client's host name, b.api.example, was not resolved to this address"
    );
}

#[test]
fn n6_a_name_rule_alone_opens_nothing_else() {
    let api = name("api.example");
    let known = names(&["api.example"]);
    let other = names(&["other.example"]);
    let table = [
        ("the address without the name", tcp(SERVER, 443, &[]), "preset allow-list"),
        ("another name's address", tcp(SERVER, 443, &other), "preset allow-list"),
        ("another port", tcp(SERVER, 80, &known), "preset allow-list"),
        (
            "QUIC",
            udp(SERVER, 443, &known),
            "names can only be checked in TCP, allow api.example:443 does not apply",
        ),
        ("ICMP", Destination { protocol: Protocol::Icmp, ..tcp(SERVER, 0, &known) }, "preset allow-list"),
        ("another address", tcp(SERVER_V6, 443, &[]), "preset allow-list"),
    ];
    for (id, to, by) in table {
        let decision = allow_list(&[RULE]).connect(&to);
        assert_eq!((decision.access, decision.by.to_string().as_str()), (Access::Deny, by), "N6 {id}");
        assert_eq!(allow_list(&[RULE]).decide(&to, &tls(&api)).access, Access::Deny, "N6 {id}");
    }
}

#[test]
fn n3_a_name_never_leads_inward() {
    let api = name("api.example");
    let known = names(&["api.example"]);
    for text in [
        "10.0.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "192.168.1.1",
        "100.64.0.1",
        "::1",
        "fd00::1",
        "fe80::1",
        "0.0.0.0",
        "::ffff:10.0.0.1",
        "::ffff:8.8.8.8",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "224.0.0.1",
        "192.0.2.1",
    ] {
        let to = tcp(text, 443, &known);
        for policies in [allow_list(&[RULE]), policies(Preset::Public, &[RULE])] {
            let decision = policies.connect(&to);
            assert_eq!(decision.access, Access::Deny, "N3 {text}");
            assert!(
                decision.by.to_string().starts_with("a name allows public addresses only"),
                "{}",
                decision.by
            );
            assert_eq!(policies.decide(&to, &tls(&api)).access, Access::Deny, "N3 {text}");
            assert!(!policies.reveal(&api, to.address, false), "N3 {text} is revealed");
        }
    }
    let both = allow_list(&[RULE, "allow 10.0.0.0/8:443"]);
    assert!(both.connect(&tcp("10.0.0.1", 443, &known)).allows());
    assert!(both.reveal(&api, address("10.0.0.1"), false));
}

#[test]
fn n3_names_are_compared_as_a_whole() {
    let policies = allow_list(&["allow allowed.com:443", "allow *.deep.example:443"]);
    let table = [
        ("allowed.com", true),
        ("ALLOWED.com.", true),
        ("evilallowed.com", false),
        ("allowed.com.evil.com", false),
        ("www.allowed.com", false),
        ("deep.example", false),
        ("a.deep.example", true),
        ("a.b.c.deep.example", true),
        ("evildeep.example", false),
        ("a.deep.example.evil.com", false),
        ("xn--llowed-2nf.com", false),
        ("_x.deep.example", true),
    ];
    for (text, allowed) in table {
        let given = name(text);
        let known = [given.clone()];
        let to = tcp(SERVER, 443, &known);
        assert_eq!(policies.decide(&to, &tls(&given)).allows(), allowed, "N3 {text}");
        assert_eq!(policies.resolve(&given).allows(), allowed, "N3 {text}");
        assert_eq!(policies.connect(&to).access == Access::InspectFirst, allowed, "N3 {text}");
    }
}

#[test]
fn a_denied_name_is_denied_where_it_can_be_inspected() {
    let (evil, good) = (name("evil.example"), name("good.example"));
    let (only, both) = (names(&["evil.example"]), names(&["evil.example", "good.example"]));
    let policies = policies(Preset::Public, &["deny evil.example"]);
    let nameless = Inspected::Tls { name: None, encrypted_hello: false };
    let hidden = Inspected::Tls { name: Some(&good), encrypted_hello: true };

    let at_once = policies.connect(&tcp(SERVER, 443, &only));
    assert_eq!((at_once.access, at_once.by.to_string().as_str()), (Access::Deny, "deny evil.example"));
    assert!(!policies.decide(&tcp(SERVER, 443, &only), &tls(&good)).allows(), "what was denied stays denied");

    let shared = tcp(SERVER, 443, &both);
    assert_eq!(policies.connect(&shared).access, Access::AllowAndInspect);
    assert!(policies.decide(&shared, &tls(&good)).allows());
    assert!(policies.decide(&shared, &Inspected::Other).allows());
    for inspected in [tls(&evil), http(Some(&evil)), nameless, http(None), hidden] {
        assert_eq!(policies.decide(&shared, &inspected).access, Access::Deny, "{inspected:?}");
    }
    assert!(!policies.connect(&udp(SERVER, 4433, &both)).allows(), "datagrams tell no name");

    let unknown = tcp(SERVER, 443, &[]);
    assert_eq!(policies.connect(&unknown).access, Access::AllowAndInspect);
    assert!(!policies.decide(&unknown, &tls(&evil)).allows(), "N6 by its address");
    for inspected in [nameless, hidden, http(None), Inspected::Other, tls(&good)] {
        assert!(policies.decide(&unknown, &inspected).allows(), "{inspected:?}");
    }
}

#[test]
fn n5_quic_is_denied_where_a_name_rule_decides() {
    let policies = policies(Preset::Public, &["deny evil.example"]);
    let decision = policies.connect(&udp(SERVER, 443, &[]));
    assert_eq!(decision.access, Access::Deny, "N5 QUIC");
    assert_eq!(decision.by.to_string(), "deny evil.example: names in QUIC cannot be inspected");
    assert!(policies.connect(&udp(SERVER, 4433, &[])).allows());
    assert!(super::policies(Preset::Public, &[]).connect(&udp(SERVER, 443, &[])).allows());
    assert!(
        super::policies(Preset::Public, &["deny tcp://evil.example"])
            .connect(&udp(SERVER, 443, &[]))
            .allows()
    );
}

#[test]
fn exceptions_come_before_the_rule() {
    let policies = allow_list(&["deny bad.example", "allow *.example:443"]);
    let (good, bad) = (name("good.example"), name("bad.example"));
    let both = names(&["good.example", "bad.example"]);
    let to = tcp(SERVER, 443, &both);
    assert_eq!(policies.connect(&to).access, Access::InspectFirst);
    assert!(policies.decide(&to, &tls(&good)).allows());
    assert_eq!(policies.decide(&to, &tls(&bad)).by.to_string(), "deny bad.example");
}

#[test]
fn n8_a_new_denial_holds_for_what_is_open() {
    let (api, known) = (name("api.example"), names(&["api.example"]));
    let to = tcp(SERVER, 443, &known);
    let table = [
        (policies(Preset::Public, &[]), "deny public"),
        (policies(Preset::Public, &[]), "deny api.example"),
        (policies(Preset::Public, &[]), "deny any:443"),
        (policies(Preset::Open, &[]), "deny tcp://93.184.216.0/24"),
        (allow_list(&[RULE]), "deny api.example"),
        (allow_list(&["allow *.example:443", RULE]), "deny *.example"),
        (allow_list(&["allow 93.184.216.34"]), "deny 93.184.216.34"),
    ];
    for (before, denial) in table {
        assert!(before.decide(&to, &tls(&api)).allows(), "N8 {denial}: before");
        let own = before.own().with_first(rule(denial)).expect("a policy");
        let after = Policies::new(None, own);
        assert_eq!(after.connect(&to).access, Access::Deny, "N8 {denial}");
        assert_eq!(after.decide(&to, &tls(&api)).by.to_string(), denial, "N8");
        assert_ne!(after.own(), before.own());
    }
}
