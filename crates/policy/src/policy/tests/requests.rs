//! Rules for methods and paths.

use super::{SERVER, allow_list, name, names, policies, tcp, tls, udp};
use crate::{Access, Destination, HostName, Inspected, InspectedRequest, Policies, Preset};

fn asks<'a>(host: Option<&'a HostName>, method: &'a str, path: &'a str) -> Inspected<'a> {
    let request = InspectedRequest { method, path: Some(path), rewrites: false };
    Inspected::Http { host, host_is_address: host.is_none(), request }
}

#[test]
fn each_request_is_decided() {
    let (api, other) = (name("api.example"), name("other.example"));
    let known = names(&["api.example", "other.example"]);
    let to = tcp(SERVER, 80, &known);
    let policies = allow_list(&["allow GET http://api.example/v1/*"]);
    assert_eq!(policies.connect(&to).access, Access::InspectFirst);
    let not_http = "the connection is not plain HTTP, allow GET http://api.example/v1/* does not apply";
    let table = [
        (asks(Some(&api), "GET", "/v1/x"), true, "allow GET http://api.example/v1/*"),
        (asks(Some(&api), "POST", "/v1/x"), false, "preset allow-list"),
        (asks(Some(&api), "GET", "/v2/x"), false, "preset allow-list"),
        (asks(Some(&api), "GET", "/v1/../v2"), false, "preset allow-list"),
        (asks(Some(&other), "GET", "/v1/x"), false, "preset allow-list"),
        (tls(&api), false, not_http),
    ];
    for (inspected, allowed, by) in table {
        let decision = policies.decide(&to, &inspected);
        assert_eq!((decision.allows(), decision.by.to_string().as_str()), (allowed, by), "{inspected:?}");
    }
    assert_eq!(policies.connect(&tcp(SERVER, 443, &known)).access, Access::Deny, "http:// is port 80");
    assert_eq!(policies.connect(&udp(SERVER, 80, &known)).access, Access::Deny);
}

#[test]
fn a_denied_request_is_denied_and_others_pass() {
    let api = name("api.example");
    let known = names(&["api.example"]);
    let to = tcp(SERVER, 80, &known);
    let policies = policies(Preset::Public, &["deny POST http://api.example"]);
    let before = policies.connect(&to);
    assert_eq!(
        (before.access, before.by.to_string().as_str()),
        (Access::AllowAndInspect, "deny POST http://api.example")
    );
    let table = [
        (asks(Some(&api), "GET", "/"), true),
        (asks(Some(&api), "POST", "/"), false),
        (asks(None, "POST", "/"), false),
        (tls(&api), true),
        (Inspected::Other, true),
    ];
    for (inspected, allowed) in table {
        assert_eq!(policies.decide(&to, &inspected).allows(), allowed, "{inspected:?}");
    }
}

#[test]
fn a_request_that_asks_to_be_rewritten_is_allowed_only_where_every_request_is() {
    let api = name("api.example");
    let known = names(&["api.example"]);
    let to = tcp(SERVER, 80, &known);
    let request = InspectedRequest { method: "GET", path: Some("/v1/x"), rewrites: true };
    let inspected = Inspected::Http { host: Some(&api), host_is_address: false, request };
    for (rule, allowed) in [
        ("allow http://api.example", true),
        ("allow GET http://api.example", false),
        ("allow http://api.example/v1/*", false),
        ("allow GET http://api.example/v1/*", false),
    ] {
        assert_eq!(allow_list(&[rule]).decide(&to, &inspected).allows(), allowed, "{rule}");
    }
}

#[test]
fn requests_to_an_address_need_no_name() {
    let evil = name("evil.example");
    let policies = allow_list(&["allow GET http://10.0.0.5/status", "allow 10.0.0.6:80"]);
    let restricted = tcp("10.0.0.5", 80, &[]);
    assert_eq!(policies.connect(&restricted).access, Access::InspectFirst);
    assert!(policies.decide(&restricted, &asks(None, "GET", "/status")).allows());
    assert!(policies.decide(&restricted, &asks(Some(&evil), "GET", "/status")).allows());
    assert!(!policies.decide(&restricted, &asks(None, "GET", "/")).allows());
    assert!(!policies.decide(&restricted, &Inspected::Other).allows());
    let free = tcp("10.0.0.6", 80, &[]);
    assert!(policies.connect(&free).allows());
    assert!(policies.decide(&free, &asks(None, "POST", "/")).allows());
}

#[test]
fn the_fix_for_a_denial_is_a_rule_that_works() {
    let api = name("api.example");
    let known = names(&["api.example"]);
    let ping = Destination { protocol: crate::Protocol::Icmp, ..tcp("10.0.0.5", 0, &[]) };
    let table = [
        ("by name", tcp(SERVER, 443, &known), Some(&api), Some("api.example:443")),
        ("no name was given", tcp(SERVER, 443, &known), None, Some("tcp://93.184.216.34:443")),
        ("not resolved", tcp(SERVER, 443, &[]), Some(&api), Some("tcp://93.184.216.34:443")),
        ("private", tcp("10.0.0.5", 5432, &known), Some(&api), Some("tcp://10.0.0.5:5432")),
        ("another resolver", udp("8.8.8.8", 53, &[]), None, Some("udp://8.8.8.8:53")),
        ("QUIC", udp(SERVER, 443, &known), Some(&api), Some("udp://93.184.216.34:443")),
        ("IPv6", tcp("fd00::5", 22, &[]), None, Some("tcp://[fd00::5]:22")),
        ("ICMP", ping, None, Some("icmp://10.0.0.5")),
        ("metadata", tcp("169.254.169.254", 80, &[]), None, Some("tcp://169.254.169.254:80")),
        ("mapped", tcp("::ffff:10.0.0.5", 80, &[]), None, None),
    ];
    for (id, to, given, fix) in table {
        let denied = allow_list(&["deny any"]);
        assert_eq!(denied.fix(&to, given).as_deref(), fix, "{id}");
        let Some(fix) = fix else { continue };
        let rule = crate::Rule::parse(crate::Action::Allow, fix).expect("a rule");
        let cured = Policies::new(None, denied.own().with_first(rule).expect("a policy"));
        let inspected = given.map_or(Inspected::Other, tls);
        assert!(cured.decide(&to, &inspected).allows(), "{id}: {fix}");
    }
    assert_eq!(policies(Preset::None, &[]).fix(&tcp(SERVER, 443, &[]), None), None);
}

#[test]
fn a_fix_for_a_name_that_looks_like_a_keyword_ends_in_a_dot() {
    let host = name("hosts");
    assert_eq!(allow_list(&[]).fix_for_name(&host).as_deref(), Some("hosts."));
    assert_eq!(
        policies(Preset::Public, &["deny *.example"]).fix_for_name(&name("a.example")).as_deref(),
        Some("a.example")
    );
}
