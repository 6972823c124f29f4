//! Answers of resolvers: no input makes the reader panic, and no denied address gets through.
#![no_main]

use std::net::IpAddr;
use std::time::Duration;

use bathy_fuzz::Input;
use bathy_gateway::dns::{MAX_RECORDS, MAX_TTL, NameCache, Transport, read_answer, read_query};
use libfuzzer_sys::fuzz_target;

/// The labels of `a.test`.
const NAME: &[u8] = b"\x01a\x04test\0";
/// Addresses, aliases, texts, services.
const KINDS: [u8; 5] = [1, 28, 5, 16, 33];

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let question = [NAME, &[0, input.choose(&KINDS), 0, 1]].concat();
    let asked = [&[0, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0], &*question].concat();
    let transport = if input.u8() & 1 == 0 { Transport::Udp } else { Transport::Tcp };
    let query = read_query(&asked, transport).expect("it is in order");
    let bytes = match input.u8() {
        // As it is, or with a header and a query that fit.
        0..8 => input.take(usize::MAX).to_vec(),
        flags => {
            let counts = [0, 1, 0, input.u8() % 8, 0, input.u8() % 4, 0, 0];
            [&[0, 1, 0x81, flags & 0x83], &counts[..], &question, input.take(usize::MAX)].concat()
        }
    };
    let Ok(answer) = read_answer(&query, 1, &bytes, |_, address| is_allowed(address)) else { return };
    assert!(
        answer.resolved.iter().all(|(address, _)| is_allowed(*address) && is_allowed(address.to_canonical()))
    );
    assert!(answer.resolved.len() + answer.removed.len() <= MAX_RECORDS);
    assert!(answer.message.starts_with(&[0, 9]));
    assert!(transport == Transport::Tcp || answer.message.len() <= 512);
    let mut cache = NameCache::new();
    for (address, ttl) in answer.resolved {
        assert!(ttl >= Duration::from_secs(1) && ttl <= Duration::from_secs(MAX_TTL.into()));
        cache.insert(&query.name, address, ttl, Duration::ZERO);
        assert_eq!(cache.names(address, Duration::ZERO), [query.name.clone()]);
    }
});

fn is_allowed(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.octets()[0] < 128,
        IpAddr::V6(address) => address.octets()[15] < 200,
    }
}
