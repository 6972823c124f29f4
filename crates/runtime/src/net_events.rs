//! Converts a gateway's reports into audit events. A gateway may be compromised by its guest: its texts are
//! cut and remain plain text.

use bathy_audit::What;
use bathy_audit::event::NetPeer;
use bathy_policy::{HostName, Policies};
use bathy_protocol::network::{NetEvent, Peer, Transport};

/// The most bytes of a text.
const MAX_TEXT: usize = 512;
/// The most addresses of an answer.
const MAX_ADDRESSES: usize = 32;

/// The audit event of a report by a gateway that enforces `policies`.
pub fn recorded(event: NetEvent, policies: Option<&Policies>) -> What {
    match event {
        NetEvent::Allowed { number: _, peer, rule } => What::NetAllowed { peer: of(peer), rule: cut(rule) },
        NetEvent::Denied { peer, rule, hint, count } => {
            What::NetDenied { peer: of(peer), rule: cut(rule), hint: hint.map(cut), count }
        }
        NetEvent::Closed { number: _, peer, sent, received, milliseconds, reason } => What::NetClosed {
            peer: of(peer),
            sent: Some(sent),
            received: Some(received),
            took_ms: milliseconds,
            reason: cut(reason),
        },
        NetEvent::Resolved { name, kind, mut addresses, mut removed } => {
            addresses.truncate(MAX_ADDRESSES);
            removed.truncate(MAX_ADDRESSES);
            What::NameResolved { host: cut(name), kind: cut(kind), addresses, removed }
        }
        NetEvent::Unresolved { name, kind, reason, denied } => {
            let hint = policies.filter(|_| denied).and_then(|policies| allow_rule(policies, &name)).map(cut);
            What::NameUnresolved { host: cut(name), kind: cut(kind), reason: cut(reason), denied, hint }
        }
        NetEvent::Dropped { reason, count } => What::NetDropped { reason: cut(reason), count },
        NetEvent::Limited { limit, count } => {
            let detail = format!("{count} rejected");
            What::LimitHit { limit: cut(limit), detail, rejected: Some(count) }
        }
    }
}

/// The end of a connection or flow that its gateway could not report, with the bytes from and to the guest if
/// known.
pub(crate) fn closed_by_failure(
    peer: NetPeer,
    moved: Option<(u64, u64)>,
    took_ms: u64,
    reason: &str,
) -> What {
    let (sent, received) = moved.unzip();
    What::NetClosed { peer, sent, received, took_ms, reason: reason.to_owned() }
}

/// The rule that would allow a name. None if the name is allowed and was refused for another reason.
fn allow_rule(policies: &Policies, name: &str) -> Option<String> {
    let name: HostName = name.parse().ok()?;
    if policies.resolve(&name).allows() { None } else { policies.fix_for_name(&name) }
}

/// Converts a peer and cuts its name.
pub fn of(peer: Peer) -> NetPeer {
    NetPeer {
        protocol: match peer.transport {
            Transport::Tcp => "tcp".to_owned(),
            Transport::Udp => "udp".to_owned(),
            Transport::Icmp => "icmp".to_owned(),
            Transport::Other(number) => number.to_string(),
        },
        direction: if peer.inbound { "in" } else { "out" }.to_owned(),
        address: peer.address,
        port: peer.port,
        host: peer.name.map(cut),
    }
}

fn cut(mut text: String) -> String {
    let end = (0..=MAX_TEXT.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    if end < text.len() {
        text.truncate(end);
        // It may be stored for long.
        text.shrink_to_fit();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use bathy_policy::NetworkPolicy;
    use serde_json::{Value, json};

    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(8, 8, 8, 8));

    fn written(event: NetEvent, policies: &Policies) -> Value {
        serde_json::to_value(recorded(event, Some(policies))).unwrap()
    }

    fn peer(transport: Transport) -> Peer {
        Peer { transport, inbound: false, address: ADDRESS, port: 443, name: Some("a.example".to_owned()) }
    }

    #[test]
    fn every_report_is_written_with_what_it_says() {
        let policies = Policies::default();
        let denied = NetEvent::Denied {
            peer: peer(Transport::Tcp),
            rule: "deny public".to_owned(),
            hint: Some("a.example:443".to_owned()),
            count: 2,
        };
        assert_eq!(
            written(denied, &policies),
            json!({
                "event": "net_denied", "protocol": "tcp", "direction": "out", "address": "8.8.8.8", "port": 443,
                "host": "a.example", "rule": "deny public", "cure": "a.example:443", "count": 2,
            })
        );
        let inward = Peer { inbound: true, name: None, ..peer(Transport::Other(47)) };
        let closed = NetEvent::Closed {
            number: 2,
            peer: inward,
            sent: 1,
            received: 2,
            milliseconds: 3,
            reason: "r".to_owned(),
        };
        let closed = written(closed, &policies);
        assert_eq!((&closed["protocol"], &closed["direction"]), (&json!("47"), &json!("in")));
        assert_eq!((&closed["sent"], &closed["took_ms"], closed.get("host")), (&json!(1), &json!(3), None));
        let limited = NetEvent::Limited { limit: "connections at once".to_owned(), count: 7 };
        let limited = written(limited, &policies);
        assert_eq!((&limited["event"], &limited["turned_away"]), (&json!("limit_hit"), &json!(7)));
    }

    #[test]
    fn a_name_that_the_policy_denies_comes_with_what_would_allow_it() {
        let own: NetworkPolicy = serde_json::from_value(json!({ "rules": ["allow b.example"] })).unwrap();
        let ceiling: NetworkPolicy = serde_json::from_value(json!({ "rules": ["deny c.example"] })).unwrap();
        let policies = Policies::new([ceiling], own);
        let hint = |name: &str, denied| {
            let (kind, reason) = ("A".to_owned(), "why".to_owned());
            let event = NetEvent::Unresolved { name: name.to_owned(), kind, reason, denied };
            written(event, &policies).get("cure").cloned()
        };
        assert_eq!(hint("a.example", true), Some(json!("a.example")));
        assert_eq!(hint("a.example", false), None, "there is no such name, allowed or not");
        assert_eq!(hint("b.example", true), None, "it is allowed, and asked for too often");
        assert_eq!(hint("c.example", true), None, "the operator denies it");
        assert_eq!(hint("", true), None, "the query was invalid");
    }

    #[test]
    fn long_texts_of_a_gateway_are_cut() {
        let policies = Policies::default();
        let long = "\u{e9}".repeat(1000);
        let event = NetEvent::Resolved {
            name: long.clone(),
            kind: "A".to_owned(),
            addresses: vec![ADDRESS; 1000],
            removed: vec![ADDRESS; 1000],
        };
        let event = written(event, &policies);
        assert_eq!(event["host"].as_str().map(str::len), Some(MAX_TEXT));
        assert_eq!(event["addresses"].as_array().map(Vec::len), Some(MAX_ADDRESSES));
        assert_eq!(event["removed"].as_array().map(Vec::len), Some(MAX_ADDRESSES));
        let dropped = written(NetEvent::Dropped { reason: format!("x{long}"), count: 1 }, &policies);
        assert_eq!(dropped["reason"].as_str().map(str::len), Some(MAX_TEXT - 1), "whole characters only");
    }
}
