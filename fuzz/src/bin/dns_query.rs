//! Queries of a guest: no input makes the reader panic, and what is asked upstream is a plain query for the same.
#![no_main]

use std::time::Duration;

use bathy_fuzz::Input;
use bathy_gateway::dns::{
    FrameReader, LimitConfig, MAX_QUERY, QueryLimits, Transport, answer_empty, answer_refused,
    answer_servfail, read_query, upstream_query,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let (choice, id) = (input.u8(), input.u16());
    let transport = if choice & 1 == 0 { Transport::Udp } else { Transport::Tcp };
    let bytes = match choice >> 6 {
        // As it is, or with a header that is in order.
        0 => input.take(usize::MAX).to_vec(),
        more => [&[1, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, more & 1], input.take(usize::MAX)].concat(),
    };
    frames(&bytes, usize::from(choice) + 1);
    let query = match read_query(&bytes, transport) {
        Ok(query) => query,
        Err(refused) => {
            assert!(refused.answer.is_none_or(|answer| answer[..2] == bytes[..2] && answer[2] & 0x80 != 0));
            return;
        }
    };
    for answer in [answer_empty(&query), answer_servfail(&query), answer_refused(&query, "why not")] {
        assert!(answer[..2] == bytes[..2] && answer[2] & 0x82 == 0x80, "it is an answer, and whole");
        assert!(answer.len() <= 512);
    }
    let upstream = upstream_query(&query, id);
    let again = read_query(&upstream, transport).expect("our own queries are plain");
    assert_eq!((again.name, again.kind, again.reverse), (query.name.clone(), query.kind, query.reverse));
    let mut limits = QueryLimits::new(LimitConfig::default(), Duration::ZERO);
    limits.admit(&query.name, query.kind, Duration::ZERO).expect("one query is within every limit");
});

/// The same frames are found however the stream is cut.
fn frames(bytes: &[u8], cut: usize) {
    let found = |size: usize| {
        let mut reader = FrameReader::new(MAX_QUERY);
        let mut found = Vec::new();
        for piece in bytes.chunks(size) {
            reader.push(piece);
            loop {
                match reader.next() {
                    Ok(Some(message)) => found.push(message),
                    Ok(None) => break,
                    Err(error) => return (found, Some(error)),
                }
            }
        }
        (found, None)
    };
    assert_eq!(found(bytes.len().max(1)), found(cut));
}
