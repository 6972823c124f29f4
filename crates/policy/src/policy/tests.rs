mod ceiling;
mod classes;
mod dns;
mod host;
mod inbound;
mod names;
mod options;
mod random;
mod requests;
mod resolvers;

use std::net::IpAddr;

use super::{Destination, Inspected, NetworkPolicy, Policies, Preset};
use crate::{HostName, Protocol, Rule};

/// Public-looking addresses that the names of the tests resolve to.
const SERVER: &str = "93.184.216.34";
const SERVER_V6: &str = "2606:2800:220::1";

fn rule(text: &str) -> Rule {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn name(text: &str) -> HostName {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn names(texts: &[&str]) -> Vec<HostName> {
    texts.iter().map(|text| name(text)).collect()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap_or_else(|_| panic!("{text} is not an address"))
}

fn policy(preset: Preset, rules: &[&str]) -> NetworkPolicy {
    NetworkPolicy { preset, rules: rules.iter().map(|text| rule(text)).collect() }
}

fn policies(preset: Preset, rules: &[&str]) -> Policies {
    Policies::new(None, policy(preset, rules))
}

fn allow_list(rules: &[&str]) -> Policies {
    policies(Preset::AllowList, rules)
}

fn tcp<'a>(to: &str, port: u16, names: &'a [HostName]) -> Destination<'a> {
    Destination { protocol: Protocol::Tcp, address: address(to), port, is_host: false, names }
}

fn udp<'a>(to: &str, port: u16, names: &'a [HostName]) -> Destination<'a> {
    Destination { protocol: Protocol::Udp, ..tcp(to, port, names) }
}

fn tls(name: &HostName) -> Inspected<'_> {
    Inspected::Tls { name: Some(name), encrypted_hello: false }
}
