//! Responses: what of them the guest gets.

use std::net::IpAddr;
use std::time::Duration;

use bathy_policy::HostName;
use hickory_proto::rr::RData;

use super::super::{
    Answer, AnswerError, MAX_CHAIN, MAX_RECORDS, MAX_TTL, MIN_CACHE_TTL, Query, RecordType, ResponseCode,
    Transport, read_answer, read_query,
};
use super::{
    A, AAAA, ANSWERS, ASKS, CNAME, SOA, TXT, address, alias, edns, message, name, parsed, query, question,
    record,
};
use crate::hello::cuts::Numbers;

const ID: u16 = 0x4242;

/// A policy for the test: some addresses are public, all others are not.
fn is_public(_: &HostName, address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.octets()[0] == 192,
        IpAddr::V6(address) => address.segments()[0] == 0x2001 || address.to_ipv4_mapped().is_some(),
    }
}

fn read(query: &Query, bytes: &[u8]) -> Result<Answer, AnswerError> {
    read_answer(query, ID, bytes, is_public)
}

/// The response to an A query for `a.example` with these records.
fn answered(kind: u16, records: &[Vec<u8>]) -> Result<Answer, AnswerError> {
    let count = u16::try_from(records.len()).unwrap();
    let content = [&[question("a.example", kind)][..], records].concat();
    read(&query("a.example", kind), &message(ID, ANSWERS, [1, count, 0, 0], &content))
}

fn addresses(answer: &Answer) -> Vec<String> {
    answer.resolved.iter().map(|(address, _)| address.to_string()).collect()
}

/// The addresses in the message for the guest.
fn revealed(answer: &Answer) -> Vec<String> {
    let data = parsed(&answer.message).answers.into_iter().filter_map(|record| match record.data {
        RData::A(address) => Some(address.0.to_string()),
        RData::AAAA(address) => Some(address.0.to_string()),
        _ => None,
    });
    data.collect()
}

#[test]
fn a_response_reaches_the_guest_and_the_name_cache() {
    let bytes = message(
        ID,
        ANSWERS,
        [1, 3, 0, 1],
        &[
            question("a.example", A),
            alias("a.example", 30, "edge.cdn.example"),
            address("EDGE.cdn.example", 300, "192.0.2.1"),
            address("edge.cdn.example", 300, "192.0.2.2"),
            edns(1232, 0, &[]),
        ],
    );
    let original_name = message(7, ASKS, [1, 0, 0, 1], &[question("A.eXample", A), edns(1232, 0, &[])]);
    let answer = read(&read_query(&original_name, Transport::Udp).unwrap(), &bytes).unwrap();
    assert_eq!(addresses(&answer), ["192.0.2.1", "192.0.2.2"]);
    assert!(answer.resolved.iter().all(|(_, ttl)| *ttl == Duration::from_secs(30)), "the alias ends first");
    assert_eq!((answer.removed.len(), answer.code), (0, ResponseCode::NoError));
    let revealed = parsed(&answer.message);
    assert_eq!((revealed.metadata.id, revealed.answers.len(), revealed.edns.is_some()), (7, 3, true));
    assert_eq!(revealed.answers[0].name.to_string(), "A.eXample.");
    assert_eq!(revealed.queries[0].name.to_string(), "A.eXample.");
}

#[test]
fn n3_denied_addresses_are_removed() {
    let rows: &[(&str, u16, &[&str], &[&str])] = &[
        ("public", A, &["192.0.2.1"], &["192.0.2.1"]),
        ("public and private", A, &["10.0.0.1", "192.0.2.1", "127.0.0.1"], &["192.0.2.1"]),
        ("private", A, &["10.0.0.1", "169.254.169.254"], &[]),
        ("mapped and private", AAAA, &["::ffff:10.0.0.1", "::ffff:127.0.0.1"], &[]),
        ("mapped and public", AAAA, &["::ffff:192.0.2.1"], &["::ffff:192.0.2.1"]),
        ("IPv6", AAAA, &["2001:db8::1", "fd00:ec2::254", "::1", "fe80::1"], &["2001:db8::1"]),
    ];
    for (what, kind, given, left) in rows {
        let records: Vec<_> = given.iter().map(|given| address("a.example", 60, given)).collect();
        let answer = answered(*kind, &records).unwrap();
        assert_eq!(addresses(&answer), *left, "{what}");
        assert_eq!(revealed(&answer), *left, "{what}");
        assert_eq!(answer.removed.len(), given.len() - left.len(), "{what}");
    }
}

#[test]
fn n3_an_alias_into_a_denied_network_reveals_nothing() {
    let records =
        [alias("a.example", 60, "db.internal.example"), address("db.internal.example", 60, "10.0.0.1")];
    let answer = answered(A, &records).unwrap();
    assert_eq!(parsed(&answer.message).answers.len(), 0);
    assert!(!answer.message.windows(8).any(|part| part == b"internal"));
    assert_eq!(answer.removed, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
}

#[test]
fn n3_the_policy_is_asked_about_the_queried_name() {
    let records = [alias("a.example", 60, "b.example"), address("b.example", 60, "192.0.2.1")];
    let content = [&[question("a.example", A)][..], &records].concat();
    let mut names = Vec::new();
    let bytes = message(ID, ANSWERS, [1, 2, 0, 0], &content);
    read_answer(&query("a.example", A), ID, &bytes, |name, _| {
        names.push(name.to_string());
        true
    })
    .unwrap();
    names.dedup();
    assert_eq!(names, ["a.example"]);
}

#[test]
fn n3_records_that_were_not_queried_are_left_out() {
    let rows: &[(&str, Vec<u8>)] = &[
        ("another name", address("b.example", 60, "192.0.2.9")),
        ("a name below", address("x.a.example", 60, "192.0.2.9")),
        ("a name above", address("example", 60, "192.0.2.9")),
        ("another type", address("a.example", 60, "2001:db8::9")),
        ("text", record("a.example", TXT, 60, b"\x04evil")),
        ("keys for encrypted hellos", record("a.example", 65, 60, &[0, 1, 0])),
        ("another class", {
            let mut other = address("a.example", 60, "192.0.2.9");
            other[name("a.example").len() + 3] = 3;
            other
        }),
    ];
    for (what, record) in rows {
        let answer = answered(A, &[address("a.example", 60, "192.0.2.1"), record.clone()]).unwrap();
        assert_eq!(
            (addresses(&answer), revealed(&answer)),
            (vec!["192.0.2.1".to_owned()], vec!["192.0.2.1".to_owned()]),
            "{what}"
        );
        assert_eq!(parsed(&answer.message).answers.len(), 1, "{what}");
    }
    // Records in the other sections are no answer either.
    let content = [
        question("a.example", A),
        address("a.example", 60, "192.0.2.8"),
        address("a.example", 60, "192.0.2.9"),
    ];
    let answer = read(&query("a.example", A), &message(ID, ANSWERS, [1, 0, 1, 1], &content)).unwrap();
    assert!(answer.resolved.is_empty() && revealed(&answer).is_empty());
}

#[test]
fn n3_responses_to_other_queries_are_ignored() {
    let good = || [question("a.example", A), address("a.example", 60, "192.0.2.1")];
    let other = |original_name: Vec<u8>| [original_name, address("a.example", 60, "192.0.2.1")];
    let counts = [1, 1, 0, 0];
    let chaos = [name("a.example"), vec![0, 1, 0, 3]].concat();
    let rows: &[(&str, Vec<u8>)] = &[
        ("another id", message(ID + 1, ANSWERS, counts, &good())),
        ("a query", message(ID, ASKS, counts, &good())),
        ("another operation", message(ID, ANSWERS | 0x2000, counts, &good())),
        ("another name", message(ID, ANSWERS, counts, &other(question("b.example", A)))),
        ("another type", message(ID, ANSWERS, counts, &other(question("a.example", AAAA)))),
        ("another class", message(ID, ANSWERS, counts, &other(chaos))),
        ("no query", message(ID, ANSWERS, [0, 1, 0, 0], &good()[1..])),
        (
            "two queries",
            message(ID, ANSWERS, [2, 1, 0, 0], &[good()[0].clone(), good()[0].clone(), good()[1].clone()]),
        ),
        ("nothing", Vec::new()),
        ("half a header", vec![0x42; 11]),
    ];
    for (what, bytes) in rows {
        assert_eq!(read(&query("a.example", A), bytes), Err(AnswerError::Mismatched), "{what}");
    }
    assert!(read(&query("a.example", A), &message(ID, ANSWERS, counts, &good())).is_ok());
}

#[test]
fn n3_malformed_messages_are_refused() {
    let original_name = || question("a.example", A);
    let good = || address("a.example", 60, "192.0.2.1");
    let at = |place: u8| vec![0xc0, place, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 1];
    let end = u8::try_from(12 + original_name().len()).unwrap();
    let with_data = |data: &[u8]| record("a.example", A, 60, data);
    let rows: &[(&str, Vec<u8>)] = &[
        ("more answers than there are", message(ID, ANSWERS, [1, 2, 0, 0], &[original_name(), good()])),
        ("65535 answers", message(ID, ANSWERS, [1, 65535, 0, 0], &[original_name(), good()])),
        ("65535 authorities", message(ID, ANSWERS, [1, 1, 65535, 0], &[original_name(), good()])),
        ("a name that points at itself", message(ID, ANSWERS, [1, 1, 0, 0], &[original_name(), at(end)])),
        ("a name that points forward", message(ID, ANSWERS, [1, 1, 0, 0], &[original_name(), at(end + 3)])),
        (
            "an address of 3 bytes",
            message(ID, ANSWERS, [1, 1, 0, 0], &[original_name(), with_data(&[1, 2, 3])]),
        ),
        (
            "an address of 5 bytes",
            message(ID, ANSWERS, [1, 1, 0, 0], &[original_name(), with_data(&[1, 2, 3, 4, 5])]),
        ),
        ("an empty address", message(ID, ANSWERS, [1, 1, 0, 0], &[original_name(), with_data(&[])])),
        (
            "EDNS among the answers",
            message(ID, ANSWERS, [1, 1, 0, 0], &[original_name(), edns(1232, 0, &[])]),
        ),
    ];
    for (what, bytes) in rows {
        assert_eq!(read(&query("a.example", A), bytes), Err(AnswerError::Malformed), "{what}");
    }
    // Honest resolvers compress the name with a pointer to the query.
    let answer =
        read(&query("a.example", A), &message(ID, ANSWERS, [1, 1, 0, 0], &[original_name(), at(12)]))
            .unwrap();
    assert_eq!(revealed(&answer), ["192.0.2.1"]);
}

#[test]
fn resolvers_that_fail_are_distinguished_from_names_that_do_not_exist() {
    let original_name = [question("a.example", A)];
    let with = |flags: u16| read(&query("a.example", A), &message(ID, flags, [1, 0, 0, 0], &original_name));
    assert_eq!(with(ANSWERS | 0x0200), Err(AnswerError::Truncated));
    assert_eq!(with(ANSWERS | 2), Err(AnswerError::Failed(ResponseCode::ServFail)));
    assert_eq!(with(ANSWERS | 5), Err(AnswerError::Failed(ResponseCode::Refused)));
    let answer = with(ANSWERS | 3).unwrap();
    assert_eq!(answer.code, ResponseCode::NXDomain);
    assert_eq!(parsed(&answer.message).metadata.response_code, ResponseCode::NXDomain);
}

#[test]
fn a_negative_response_has_its_ttl() {
    let numbers: Vec<u8> = [1u32, 2, 3, 4, 5].iter().flat_map(|number| number.to_be_bytes()).collect();
    let soa = |owner: &str| {
        record(owner, SOA, 77, &[name("ns.example"), name("root.example"), numbers.clone()].concat())
    };
    for (owner, expected) in [("example", 1), ("a.example", 1), ("b.example", 0), ("other.org", 0)] {
        let bytes = message(ID, ANSWERS | 3, [1, 0, 1, 0], &[question("a.example", A), soa(owner)]);
        let answer = read(&query("a.example", A), &bytes).unwrap();
        assert_eq!(parsed(&answer.message).authorities.len(), expected, "{owner}");
    }
}

#[test]
fn n3_beside_a_negative_answer_nothing_else_is_passed_on() {
    let rows = [
        address("example", 60, "192.0.2.1"),
        record("example", TXT, 60, b"\x04data"),
        alias("example", 60, "b.org"),
    ];
    for extra in rows {
        let bytes = message(ID, ANSWERS | 3, [1, 0, 1, 0], &[question("a.example", A), extra]);
        let answer = parsed(&read(&query("a.example", A), &bytes).unwrap().message);
        assert_eq!((answer.answers.len(), answer.authorities.len(), answer.additionals.len()), (0, 0, 0));
    }
}

#[test]
fn n3_aliases_end_somewhere() {
    let step = |number: usize| format!("n{number}.example");
    let chain = |length: usize| {
        let mut records = vec![alias("a.example", 60, &step(0))];
        records.extend((1..length).map(|number| alias(&step(number - 1), 60, &step(number))));
        records.push(address(&step(length - 1), 60, "192.0.2.1"));
        // The order in the message does not matter.
        records.reverse();
        answered(A, &records)
    };
    assert_eq!(addresses(&chain(MAX_CHAIN).unwrap()), ["192.0.2.1"]);
    assert_eq!(chain(MAX_CHAIN + 1), Err(AnswerError::Chain));
    let itself = [alias("a.example", 60, "a.example")];
    assert_eq!(answered(A, &itself), Err(AnswerError::Chain));
    let circle = [alias("a.example", 60, "b.example"), alias("b.example", 60, "A.EXAMPLE")];
    assert_eq!(answered(A, &circle), Err(AnswerError::Chain));
    let fork = [
        alias("a.example", 60, "b.example"),
        alias("a.example", 60, "c.example"),
        address("b.example", 60, "192.0.2.1"),
    ];
    assert_eq!(answered(A, &fork), Err(AnswerError::Chain));
    let open = answered(A, &[alias("a.example", 60, "b.example")]).unwrap();
    assert_eq!((open.resolved.len(), parsed(&open.message).answers.len()), (0, 1));
    let original_name = answered(CNAME, &[alias("a.example", 60, "b.example")]).unwrap();
    assert_eq!(parsed(&original_name.message).answers[0].record_type(), RecordType::CNAME);
}

#[test]
fn n3_times_to_live_are_bounded() {
    let rows = [
        (0, 0, MIN_CACHE_TTL),
        (1, 1, 1),
        (MAX_TTL, MAX_TTL, MAX_TTL),
        (86400, MAX_TTL, MAX_TTL),
        (i32::MAX.unsigned_abs(), MAX_TTL, MAX_TTL),
        (1 << 31, 0, MIN_CACHE_TTL),
        (u32::MAX, 0, MIN_CACHE_TTL),
    ];
    for (given, revealed, kept) in rows {
        let answer = answered(A, &[address("a.example", given, "192.0.2.1")]).unwrap();
        assert_eq!(parsed(&answer.message).answers[0].ttl, revealed, "{given}");
        assert_eq!(answer.resolved[0].1, Duration::from_secs(kept.into()), "{given}");
    }
}

#[test]
fn r5_long_responses_are_truncated_to_what_the_guest_accepts() {
    let records: Vec<_> =
        (0..200).map(|number| address("a.example", 60, &format!("192.0.2.{number}"))).collect();
    let content = [&[question("a.example", A)][..], &records].concat();
    let bytes = message(ID, ANSWERS, [1, 200, 0, 0], &content);
    let over = |transport, size: Option<u16>| {
        let original_name: Vec<_> =
            [question("a.example", A)].into_iter().chain(size.map(|size| edns(size, 0, &[]))).collect();
        let query = message(7, ASKS, [1, 0, 0, u16::from(size.is_some())], &original_name);
        read(&read_query(&query, transport).unwrap(), &bytes).unwrap()
    };
    let answer = over(Transport::Tcp, None);
    assert_eq!((addresses(&answer), answer.resolved.len()), (revealed(&answer), MAX_RECORDS));
    for (size, limit) in [(None, 512), (Some(0), 512), (Some(100), 512), (Some(1000), 1000)] {
        let answer = over(Transport::Udp, size);
        assert!(answer.message.len() <= limit, "{size:?}");
        let revealed = parsed(&answer.message);
        assert_eq!(
            (revealed.metadata.truncation, revealed.answers.len()),
            (true, 0),
            "{size:?}: ask over TCP"
        );
    }
    assert!(over(Transport::Udp, Some(65535)).message.len() <= 4096);
}

#[test]
fn r5_aliases_count_among_the_records() {
    let mut records = vec![alias("a.example", 60, "b.example")];
    records.extend((0..200).map(|number| address("b.example", 60, &format!("192.0.2.{number}"))));
    let answer = answered(A, &records).unwrap();
    assert_eq!(parsed(&answer.message).answers.len(), MAX_RECORDS);
    assert_eq!(
        addresses(&answer),
        revealed(&answer),
        "the name cache has what was revealed to the guest, and nothing else"
    );
}

#[test]
fn damaged_responses_never_reveal_a_denied_address() {
    let content = [
        question("a.example", A),
        alias("a.example", 60, "b.example"),
        address("b.example", 60, "192.0.2.1"),
        address("b.example", 60, "10.0.0.1"),
    ];
    let bytes = message(ID, ANSWERS, [1, 3, 0, 0], &content);
    let query = query("a.example", A);
    let mut numbers = Numbers::new(11);
    for _ in 0..5000 {
        let mut damaged = bytes.clone();
        for _ in 0..=numbers.below(3) {
            let place = 2 + numbers.below(damaged.len() - 2);
            damaged[place] = u8::try_from(numbers.below(256)).unwrap();
        }
        let Ok(answer) = read(&query, &damaged) else { continue };
        assert_eq!(revealed(&answer), addresses(&answer));
        assert!(revealed(&answer).iter().all(|revealed| revealed.starts_with("192.")), "{answer:?}");
    }
}
