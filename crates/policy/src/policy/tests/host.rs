//! The host's own addresses.

use super::{SERVER, allow_list, tcp};
use crate::Destination;

/// An address, whether it is one of the host's, and whether it is allowed.
type Row = (&'static str, bool, bool);

#[track_caller]
fn reached(rules: &[&str], table: &[Row]) {
    for (address, is_host, expected) in table {
        let to = Destination { is_host: *is_host, ..tcp(address, 443, &[]) };
        let decision = allow_list(rules).connect(&to);
        assert_eq!(decision.allows(), *expected, "{rules:?} {address} {is_host}: {}", decision.by);
    }
}

#[test]
fn allow_host_opens_the_hosts_addresses_and_nothing_else() {
    let table = [
        ("10.0.0.5", true, true),
        (SERVER, true, true),
        ("10.0.0.5", false, false),
        (SERVER, false, false),
        ("127.0.0.1", true, false),
        ("169.254.169.254", true, false),
        ("::ffff:10.0.0.5", true, false),
    ];
    reached(&["allow host"], &table);
}

#[test]
fn deny_host_closes_the_hosts_addresses_and_loopback_only() {
    let table = [
        ("10.0.0.5", true, false),
        ("127.0.0.1", true, false),
        ("127.0.0.1", false, false),
        ("10.0.0.5", false, true),
        (SERVER, false, true),
    ];
    reached(&["deny host", "allow any", "allow loopback", "allow host"], &table);
}
