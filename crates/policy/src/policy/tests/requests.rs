//! Rules for methods and paths.

use super::{SERVER, allow_list, name, names, policies, tcp, tls, udp};
use crate::{Destination, HostName, HttpSeen, Policies, Preset, Read, Verdict};

fn asks<'a>(host: Option<&'a HostName>, method: &'a str, path: &'a str) -> Read<'a> {
    let request = HttpSeen { method, path: Some(path), rewrites: false };
    Read::Http { host, host_is_address: host.is_none(), request }
}

#[test]
fn each_request_is_judged() {
    let (api, other) = (name("api.example"), name("other.example"));
    let known = names(&["api.example", "other.example"]);
    let to = tcp(SERVER, 80, &known);
    let policies = allow_list(&["allow GET http://api.example/v1/*"]);
    assert_eq!(policies.connect(&to).verdict, Verdict::IfRead);
    let not_http = "the connection is not plain HTTP, allow GET http://api.example/v1/* does not apply";
    let table = [
        (asks(Some(&api), "GET", "/v1/x"), true, "allow GET http://api.example/v1/*"),
        (asks(Some(&api), "POST", "/v1/x"), false, "preset allow-list"),
        (asks(Some(&api), "GET", "/v2/x"), false, "preset allow-list"),
        (asks(Some(&api), "GET", "/v1/../v2"), false, "preset allow-list"),
        (asks(Some(&other), "GET", "/v1/x"), false, "preset allow-list"),
        (tls(&api), false, not_http),
    ];
    for (read, allowed, by) in table {
        let decision = policies.judge(&to, &read);
        assert_eq!((decision.allows(), decision.by.to_string().as_str()), (allowed, by), "{read:?}");
    }
    assert_eq!(policies.connect(&tcp(SERVER, 443, &known)).verdict, Verdict::Deny, "http:// is port 80");
    assert_eq!(policies.connect(&udp(SERVER, 80, &known)).verdict, Verdict::Deny);
}

#[test]
fn a_denied_request_is_denied_and_others_pass() {
    let api = name("api.example");
    let known = names(&["api.example"]);
    let to = tcp(SERVER, 80, &known);
    let policies = policies(Preset::Public, &["deny POST http://api.example"]);
    let before = policies.connect(&to);
    assert_eq!(
        (before.verdict, before.by.to_string().as_str()),
        (Verdict::UnlessRead, "deny POST http://api.example")
    );
    let table = [
        (asks(Some(&api), "GET", "/"), true),
        (asks(Some(&api), "POST", "/"), false),
        (asks(None, "POST", "/"), false),
        (tls(&api), true),
        (Read::Other, true),
    ];
    for (read, allowed) in table {
        assert_eq!(policies.judge(&to, &read).allows(), allowed, "{read:?}");
    }
}

#[test]
fn a_request_that_asks_to_be_rewritten_is_allowed_only_where_every_request_is() {
    let api = name("api.example");
    let known = names(&["api.example"]);
    let to = tcp(SERVER, 80, &known);
    let request = HttpSeen { method: "GET", path: Some("/v1/x"), rewrites: true };
    let read = Read::Http { host: Some(&api), host_is_address: false, request };
    for (rule, allowed) in [
        ("allow http://api.example", true),
        ("allow GET http://api.example", false),
        ("allow http://api.example/v1/*", false),
        ("allow GET http://api.example/v1/*", false),
    ] {
        assert_eq!(allow_list(&[rule]).judge(&to, &read).allows(), allowed, "{rule}");
    }
}

#[test]
fn requests_to_an_address_need_no_name() {
    let evil = name("evil.example");
    let policies = allow_list(&["allow GET http://10.0.0.5/status", "allow 10.0.0.6:80"]);
    let restricted = tcp("10.0.0.5", 80, &[]);
    assert_eq!(policies.connect(&restricted).verdict, Verdict::IfRead);
    assert!(policies.judge(&restricted, &asks(None, "GET", "/status")).allows());
    assert!(policies.judge(&restricted, &asks(Some(&evil), "GET", "/status")).allows());
    assert!(!policies.judge(&restricted, &asks(None, "GET", "/")).allows());
    assert!(!policies.judge(&restricted, &Read::Other).allows());
    let free = tcp("10.0.0.6", 80, &[]);
    assert!(policies.connect(&free).allows());
    assert!(policies.judge(&free, &asks(None, "POST", "/")).allows());
}

#[test]
fn the_way_out_of_a_denial_is_a_rule_that_works() {
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
    for (id, to, given, cure) in table {
        let denied = allow_list(&["deny any"]);
        assert_eq!(denied.cure(&to, given).as_deref(), cure, "{id}");
        let Some(cure) = cure else { continue };
        let rule = crate::Rule::parse(crate::Action::Allow, cure).expect("a rule");
        let cured = Policies::new(None, denied.own().with_first(rule).expect("a policy"));
        let read = given.map_or(Read::Other, tls);
        assert!(cured.judge(&to, &read).allows(), "{id}: {cure}");
    }
    assert_eq!(policies(Preset::None, &[]).cure(&tcp(SERVER, 443, &[]), None), None);
}

#[test]
fn a_name_that_looks_like_a_keyword_is_cured_with_its_dot() {
    let host = name("hosts");
    assert_eq!(allow_list(&[]).cure_name(&host).as_deref(), Some("hosts."));
    assert_eq!(
        policies(Preset::Public, &["deny *.example"]).cure_name(&name("a.example")).as_deref(),
        Some("a.example")
    );
}
