//! What a new policy does to connections and flows in each of their states.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Instant;

use bathy_policy::Protocol;

use super::{Recheck, denial_of_flow, recheck};
use crate::connection::Connection;
use crate::flows::{FlowSocket, Flows};
use crate::inspect::ParsedTarget;
use crate::link::Link;
use crate::policy_check::{Endpoint, PolicyCheck};
use crate::stack::{Clock, FourTuple, Stack};

const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(93, 184, 216, 34)), 443);
const TUPLE: FourTuple = FourTuple { guest_port: 30000, remote: SERVER };

fn policy_check(rules: &[&str]) -> PolicyCheck {
    let own = serde_json::json!({"preset": "allow-list", "rules": rules});
    let policies = serde_json::json!({"ceilings": [], "own": own});
    PolicyCheck::new(serde_json::from_value(policies).unwrap(), String::new())
}

fn socket() -> OwnedFd {
    std::os::unix::net::UnixDatagram::unbound().unwrap().into()
}

fn stack() -> Stack {
    Stack::listen(TUPLE, 4096, Clock::new(), &mut Link::new(socket())).unwrap()
}

fn reading() -> Connection {
    Connection::reading(TUPLE, stack(), Instant::now())
}

fn dialing() -> Connection {
    Connection::dialing(TUPLE, socket(), Vec::new(), Instant::now())
}

fn inbound() -> Connection {
    Connection::inbound(TUPLE, SERVER, socket(), stack(), Instant::now())
}

/// An established connection whose client was never inspected.
fn open() -> Connection {
    let mut connection = inbound();
    connection.inbound = false;
    connection
}

/// An established connection whose client is inspected from its first byte on, and has sent nothing yet.
fn open_and_read() -> Connection {
    let mut connection = open();
    connection.inspect();
    connection
}

/// An established connection whose client has sent this name.
fn named(name: &str) -> Connection {
    let mut connection = open();
    connection.target = Some(ParsedTarget::Tls { name: Some(name.parse().unwrap()), encrypted_hello: false });
    connection
}

fn fate(rules: &[&str], connection: &Connection) -> String {
    match recheck(&policy_check(rules), connection) {
        Recheck::Keep => "stays".to_owned(),
        Recheck::Inspect => "is read".to_owned(),
        Recheck::Close(decision) => format!("ends: {}", decision.by),
    }
}

#[test]
fn connections_that_the_new_policy_decides_without_reading() {
    let answering = Connection::answering(TUPLE, stack(), Vec::new(), Instant::now());
    let asking = Connection::resolving(TUPLE, stack(), Instant::now());
    let nothing: &[&str] = &[];
    let table = [
        ("an answer of the gateway", answering, nothing, "stays"),
        ("queries for names", asking, nothing, "stays"),
        ("allowed", dialing(), &["allow any"], "stays"),
        ("denied while dialing", dialing(), &["deny any"], "ends: deny any"),
        ("denied while it is read", reading(), &["deny any"], "ends: deny any"),
        ("denied whatever was sent", named("good.example"), &["deny any"], "ends: deny any"),
        ("a peer of a published port", inbound(), nothing, "stays"),
        ("a denied peer", inbound(), &["deny in any"], "ends: deny in any"),
        ("a peer of another port", inbound(), &["deny in any:80"], "stays"),
    ];
    for (what, connection, rules, expected) in table {
        assert_eq!(fate(rules, &connection), expected, "{what}");
    }
}

#[test]
fn n8_where_a_name_is_denied_what_the_client_sent_decides() {
    let rules = &["deny bad.example", "allow any"];
    let table = [
        ("nothing could be sent yet", dialing(), "is read"),
        ("the first bytes are inspected", reading(), "stays"),
        ("the next bytes are inspected", open_and_read(), "stays"),
        ("what was sent is not known", open(), "ends: deny bad.example"),
        ("another name", named("good.example"), "stays"),
        ("the denied name", named("bad.example"), "ends: deny bad.example"),
    ];
    for (what, connection, expected) in table {
        assert_eq!(fate(rules, &connection), expected, "{what}");
    }
}

#[test]
fn n8_where_a_name_is_allowed_only_a_client_that_sent_it_stays() {
    let rule = "allow good.example";
    let table = [
        ("the first bytes are inspected", reading(), true),
        ("it is dialed already, not inspected", dialing(), false),
        ("what was sent is not known", open(), false),
        ("it may have been established before it was read", open_and_read(), false),
        ("the allowed name", named("good.example"), true),
        ("another name", named("bad.example"), false),
    ];
    for (what, mut connection, stays) in table {
        connection.endpoint.names = vec!["good.example".parse().unwrap()];
        let fate = fate(&[rule], &connection);
        assert_eq!(fate == "stays", stays, "{what}: {fate}");
        assert_eq!(fate.starts_with("ends: "), !stays, "{what}: {fate}");
    }
}

#[test]
fn n8_a_flow_ends_when_the_policy_denies_it() {
    let now = Instant::now();
    let endpoint = |address: IpAddr| Endpoint {
        protocol: Protocol::Udp,
        remote: SocketAddr::new(address, 443),
        is_host: false,
        names: Vec::new(),
    };
    let peer = IpAddr::from([203, 0, 113, 9]);
    let table: [(&[&str], Option<&str>, Option<&str>); 5] = [
        (&["allow any"], None, None),
        (&["deny any"], Some("deny any"), None),
        (&["allow any", "deny in any"], None, Some("deny in any")),
        (&["allow any:443", "deny in any:443"], None, None),
        (
            &["allow any", "deny in udp://203.0.113.0/24:30000"],
            None,
            Some("deny in udp://203.0.113.0/24:30000"),
        ),
    ];
    for (rules, out, back) in table {
        let policy_check = policy_check(rules);
        let mut flows = Flows::new(now);
        let outward = flows.add(TUPLE, endpoint(SERVER.ip()), FlowSocket::Outbound(socket()), now);
        let inward = flows.add(TUPLE, endpoint(peer), FlowSocket::Inbound(0, SERVER), now);
        for (number, expected) in [(outward, out), (inward, back)] {
            let denial = denial_of_flow(&policy_check, flows.get_mut(number).unwrap());
            let by = denial.map(|decision| decision.by.to_string());
            assert_eq!(by.as_deref(), expected, "{rules:?}");
        }
    }
}
