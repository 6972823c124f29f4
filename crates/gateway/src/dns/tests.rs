//! Messages built byte by byte, so that they can be malformed.

mod answers;
mod memory;
mod queries;

use std::net::IpAddr;

use hickory_proto::op::Message;

use super::{Query, Transport, read_query};

const A: u16 = 1;
const CNAME: u16 = 5;
const SOA: u16 = 6;
const TXT: u16 = 16;
const AAAA: u16 = 28;
const OPT: u16 = 41;
const IN: u16 = 1;

/// The flags of a query that asks for recursion.
const ASKS: u16 = 0x0100;
/// The flags of a response.
const ANSWERS: u16 = 0x8180;

/// A message with these counts, whatever its body is.
fn message(id: u16, flags: u16, counts: [u16; 4], content: &[Vec<u8>]) -> Vec<u8> {
    let header = [&[id, flags][..], &counts].concat();
    let mut bytes: Vec<u8> = header.iter().flat_map(|number| number.to_be_bytes()).collect();
    bytes.extend(content.concat());
    bytes
}

/// A dotted name as labels.
fn name(text: &str) -> Vec<u8> {
    let labels = text.split('.').filter(|label| !label.is_empty());
    let each = labels.map(|label| [&[u8::try_from(label.len()).unwrap()], label.as_bytes()].concat());
    [each.collect::<Vec<_>>().concat(), vec![0]].concat()
}

fn question(text: &str, kind: u16) -> Vec<u8> {
    [name(text), kind.to_be_bytes().to_vec(), IN.to_be_bytes().to_vec()].concat()
}

fn record(owner: &str, kind: u16, ttl: u32, data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(data.len()).unwrap();
    let fixed =
        [&kind.to_be_bytes()[..], &IN.to_be_bytes(), &ttl.to_be_bytes(), &length.to_be_bytes()].concat();
    [name(owner), fixed, data.to_vec()].concat()
}

fn address(owner: &str, ttl: u32, address: &str) -> Vec<u8> {
    match address.parse().unwrap() {
        IpAddr::V4(address) => record(owner, A, ttl, &address.octets()),
        IpAddr::V6(address) => record(owner, AAAA, ttl, &address.octets()),
    }
}

fn alias(owner: &str, ttl: u32, target: &str) -> Vec<u8> {
    record(owner, CNAME, ttl, &name(target))
}

/// The OPT record of EDNS, whose class is the UDP size.
fn edns(size: u16, version: u8, options: &[u8]) -> Vec<u8> {
    let length = u16::try_from(options.len()).unwrap();
    let fixed =
        [&[0][..], &OPT.to_be_bytes(), &size.to_be_bytes(), &[0, version, 0, 0], &length.to_be_bytes()];
    [&fixed.concat()[..], options].concat()
}

fn plain_query(text: &str, kind: u16) -> Vec<u8> {
    message(7, ASKS, [1, 0, 0, 0], &[question(text, kind)])
}

fn query(text: &str, kind: u16) -> Query {
    read_query(&plain_query(text, kind), Transport::Tcp).unwrap()
}

/// The message as a client parses it.
fn parsed(bytes: &[u8]) -> Message {
    Message::from_vec(bytes).unwrap()
}
