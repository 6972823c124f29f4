//! Queries that a guest may send, and those that it may not.

use super::super::{
    Handling, MAX_QUERY, QueryProblem, RecordType, RefusedQuery, ResponseCode, Transport, answer_empty,
    answer_refused, answer_servfail, read_query, upstream_query,
};
use super::{A, AAAA, ASKS, IN, TXT, edns, message, name, parsed, plain_query, query, question};
use crate::hello::cuts::Numbers;

fn refused(bytes: &[u8]) -> RefusedQuery {
    read_query(bytes, Transport::Udp).unwrap_err()
}

#[test]
fn a_query_is_parsed_and_built_anew() {
    let cookie = [0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8];
    let bytes =
        message(0x1234, 0x0130, [1, 0, 0, 1], &[question("WwW.Example.ORG", AAAA), edns(1400, 0, &cookie)]);
    let query = read_query(&bytes, Transport::Udp).unwrap();
    assert_eq!((query.name.to_string().as_str(), query.kind), ("www.example.org", RecordType::AAAA));
    assert_eq!((query.handling, query.reverse), (Handling::Forward, None));

    let upstream = upstream_query(&query, 0x9999);
    let expected =
        message(0x9999, ASKS, [1, 0, 0, 1], &[question("www.example.org", AAAA), edns(1232, 0, &[])]);
    assert_eq!(upstream, expected, "nothing of the guest's message but name and type goes on");

    let answer = answer_servfail(&query);
    assert_eq!(parsed(&answer).metadata.response_code, ResponseCode::ServFail);
    assert_eq!(answer[..2], [0x12, 0x34]);
    assert!(answer.windows(7).any(|part| part == b"Example"), "the guest gets its own letters back");
}

#[test]
fn n4_messages_that_are_no_plain_query_are_refused() {
    let original_name = || question("a.example", A);
    let with_class =
        |class: u16| [name("a.example"), A.to_be_bytes().to_vec(), class.to_be_bytes().to_vec()].concat();
    let one = [1, 0, 0, 0];
    let rows: Vec<(&str, Vec<u8>, QueryProblem, Option<ResponseCode>)> = vec![
        ("nothing", Vec::new(), QueryProblem::NotQuery, None),
        ("half a header", vec![0; 11], QueryProblem::NotQuery, None),
        ("an answer", message(7, 0x8180, one, &[original_name()]), QueryProblem::NotQuery, None),
        (
            "a long query",
            [plain_query("a.example", A), vec![0; MAX_QUERY]].concat(),
            QueryProblem::TooLong,
            Some(ResponseCode::FormErr),
        ),
        (
            "a status query",
            message(7, 0x1000, one, &[original_name()]),
            QueryProblem::Operation,
            Some(ResponseCode::NotImp),
        ),
        (
            "a notification",
            message(7, 0x2000, one, &[original_name()]),
            QueryProblem::Operation,
            Some(ResponseCode::NotImp),
        ),
        (
            "an update",
            message(7, 0x2800, one, &[original_name()]),
            QueryProblem::Operation,
            Some(ResponseCode::NotImp),
        ),
        (
            "a cut query",
            message(7, 0x0300, one, &[original_name()]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        ("no query", message(7, ASKS, [0; 4], &[]), QueryProblem::Malformed, Some(ResponseCode::FormErr)),
        (
            "two queries",
            message(7, ASKS, [2, 0, 0, 0], &[original_name(), original_name()]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "65535 queries",
            message(7, ASKS, [65535, 0, 0, 0], &[original_name()]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "answers in it",
            message(7, ASKS, [1, 1, 0, 0], &[original_name(), original_name()]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "65535 more records",
            message(7, ASKS, [1, 0, 0, 65535], &[original_name()]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "a record that is not there",
            message(7, ASKS, [1, 0, 0, 1], &[original_name()]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "another record than EDNS",
            message(7, ASKS, [1, 0, 0, 1], &[original_name(), super::address("x.example", 1, "192.0.2.1")]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "bytes behind",
            [plain_query("a.example", A), vec![0]].concat(),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "half a name",
            message(7, ASKS, one, &[vec![5, b'a']]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "a name that points at itself",
            message(7, ASKS, one, &[vec![0xc0, 12, 0, 1, 0, 1]]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "a name that points in a circle",
            message(7, ASKS, one, &[vec![1, b'a', 0xc0, 12, 0, 1, 0, 1]]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "a name that points forward",
            message(7, ASKS, one, &[vec![0xc0, 18, 0, 1, 0, 1, 1, b'a', 0]]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "a label of an unknown kind",
            message(7, ASKS, one, &[vec![0x40, 1, b'a', 0, 0, 1, 0, 1]]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "a name of 300 bytes",
            message(7, ASKS, one, &[question(&["a".repeat(49).as_str(); 6].join("."), A)]),
            QueryProblem::Malformed,
            Some(ResponseCode::FormErr),
        ),
        (
            "a later EDNS",
            message(7, ASKS, [1, 0, 0, 1], &[original_name(), edns(1232, 1, &[])]),
            QueryProblem::EdnsVersion,
            Some(ResponseCode::BADVERS),
        ),
        (
            "the class CHAOS",
            message(7, ASKS, one, &[with_class(3)]),
            QueryProblem::Class,
            Some(ResponseCode::Refused),
        ),
        (
            "the class ANY",
            message(7, ASKS, one, &[with_class(255)]),
            QueryProblem::Class,
            Some(ResponseCode::Refused),
        ),
        (
            "multicast",
            message(7, ASKS, one, &[with_class(0x8000 | IN)]),
            QueryProblem::Class,
            Some(ResponseCode::Refused),
        ),
    ];
    for (what, bytes, problem, code) in rows {
        let refused = refused(&bytes);
        assert_eq!(refused.problem, problem, "{what}");
        let answer = refused.answer.map(|answer| parsed(&answer));
        // As numbers, because one code has two names.
        let given = answer.as_ref().map(|answer| u16::from(answer.metadata.response_code));
        assert_eq!(given, code.map(u16::from), "{what}");
        assert!(answer.is_none_or(|answer| answer.metadata.id == 7 && answer.answers.is_empty()), "{what}");
    }
}

#[test]
fn n4_types_that_carry_data_or_keys_are_not_forwarded() {
    let forwarded = [1, 2, 5, 6, 12, 15, 16, 28, 33, 35, 44, 52, 257];
    let empty = [64, 65];
    for kind in 0..600 {
        let read = read_query(&plain_query("a.example", kind), Transport::Udp);
        if forwarded.contains(&kind) {
            assert_eq!(read.unwrap().handling, Handling::Forward, "type {kind}");
        } else if empty.contains(&kind) {
            let query = read.unwrap();
            assert_eq!(query.handling, Handling::Empty, "type {kind}");
            let answer = parsed(&answer_empty(&query));
            assert_eq!((answer.metadata.response_code, answer.answers.len()), (ResponseCode::NoError, 0));
        } else {
            // Among them NULL (10), NSEC (47), DNSKEY (48), TKEY (249), IXFR (251), AXFR (252), ANY (255).
            assert!(matches!(read.unwrap_err().problem, QueryProblem::Kind(_)), "type {kind}");
        }
    }
}

#[test]
fn n3_names_that_cannot_be_compared_are_not_forwarded() {
    let label = |bytes: &[u8]| [&[u8::try_from(bytes.len()).unwrap()], bytes].concat();
    let rows: &[(&str, Vec<Vec<u8>>)] = &[
        ("the root", vec![]),
        ("a dot inside a label", vec![label(b"a.b"), label(b"example")]),
        ("an escaped dot", vec![label(b"a\\.b"), label(b"example")]),
        ("NUL", vec![label(b"allowed\0"), label(b"example")]),
        ("a space", vec![label(b"a b"), label(b"example")]),
        ("a percent sign", vec![label(b"a%00"), label(b"example")]),
        ("bytes above ASCII", vec![label("\u{430}".as_bytes()), label(b"example")]),
        ("bytes that are no text", vec![label(b"\xff\xfe"), label(b"example")]),
        ("a star", vec![label(b"*"), label(b"example")]),
        ("a hyphen in front", vec![label(b"-a"), label(b"example")]),
        ("a number at the end", vec![label(b"192"), label(b"168")]),
        ("an address", vec![label(b"127"), label(b"0"), label(b"0"), label(b"1")]),
        ("a slash", vec![label(b"a/b"), label(b"example")]),
    ];
    for (what, labels) in rows {
        let original_name = [labels.concat(), vec![0, 0, 1, 0, 1]].concat();
        let bytes = message(7, ASKS, [1, 0, 0, 0], &[original_name]);
        assert_eq!(refused(&bytes).problem, QueryProblem::Name, "{what}");
    }
    for fine in ["a", "_dmarc.example.org", "xn--bcher-kva.example", "a-b.c0.example"] {
        assert_eq!(query(fine, A).name.to_string(), fine);
    }
}

#[test]
fn n3_reverse_names_have_their_address() {
    let v6 = "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.IP6.arpa";
    let rows = [
        ("1.2.0.192.in-addr.arpa", Some("192.0.2.1")),
        ("254.169.254.169.IN-ADDR.ARPA", Some("169.254.169.254")),
        (v6, Some("2001:db8::1")),
        ("home.arpa", None),
        ("in-addr.arpa.example.org", None),
    ];
    for (text, expected) in rows {
        assert_eq!(query(text, 12).reverse, expected.map(|address| address.parse().unwrap()), "{text}");
    }
    for text in [
        "in-addr.arpa",
        "10.in-addr.arpa",
        "168.192.in-addr.arpa",
        "x.1.2.0.192.in-addr.arpa",
        "256.2.0.192.in-addr.arpa",
        "8.b.d.0.1.0.0.2.ip6.arpa",
    ] {
        assert_eq!(refused(&plain_query(text, 12)).problem, QueryProblem::Reverse, "{text}");
    }
}

#[test]
fn a_refusal_explains_itself_and_always_fits() {
    let long = [["a"; 60].join("."), "b".repeat(63), "c".repeat(63)].join(".");
    for original_name in ["a.example", &long] {
        let bytes = message(7, ASKS, [1, 0, 0, 1], &[question(original_name, A), edns(0, 0, &[])]);
        let query = read_query(&bytes, Transport::Udp).unwrap();
        let answer = answer_refused(&query, &format!("not\r\nallowed: {}", "\u{20ac}".repeat(1000)));
        assert!(answer.len() <= 512, "{}", answer.len());
        let read = parsed(&answer);
        assert_eq!((read.metadata.response_code, read.metadata.truncation), (ResponseCode::Refused, false));
        let text = b"notallowed: \xe2\x82\xac";
        assert!(answer.windows(text.len()).any(|part| part == text));
        assert!(String::from_utf8(answer[answer.len() - 30..].to_vec()).is_ok(), "no letter is cut");
    }
    let without = answer_refused(&query("a.example", A), "because");
    assert_eq!(without.len(), plain_query("a.example", A).len(), "a client without EDNS gets none");
}

#[test]
fn damaged_queries_are_refused_or_parsed_and_nothing_else() {
    let bytes =
        message(7, ASKS, [1, 0, 0, 1], &[question("a.example", TXT), edns(1232, 0, &[0, 10, 0, 2, 1, 2])]);
    let mut numbers = Numbers::new(3);
    for _ in 0..5000 {
        let mut damaged = bytes.clone();
        for _ in 0..=numbers.below(3) {
            let place = numbers.below(damaged.len());
            damaged[place] = u8::try_from(numbers.below(256)).unwrap();
        }
        damaged.truncate(numbers.below(damaged.len() * 4).max(1));
        let transport = [Transport::Udp, Transport::Tcp][numbers.below(2)];
        match read_query(&damaged, transport) {
            Ok(query) => assert!(parsed(&upstream_query(&query, 1)).queries.len() == 1),
            Err(refused) => assert!(refused.answer.is_none_or(|answer| answer[..2] == damaged[..2])),
        }
    }
}

#[test]
fn a_query_that_is_not_parsed_is_answered_with_its_id_and_opcode_only() {
    // A status query with the RD flag, and the flags of a truncated authoritative response.
    let refused = read_query(&message(0x0102, 0x1700, [1, 0, 0, 0], &[]), Transport::Udp).unwrap_err();
    assert_eq!(refused.answer, Some(vec![1, 2, 0x91, 0x84, 0, 0, 0, 0, 0, 0, 0, 0]));
}

#[test]
fn a_query_of_the_longest_length_is_parsed() {
    let mut bytes = plain_query("a.example", A);
    bytes.resize(MAX_QUERY, 0);
    assert_ne!(read_query(&bytes, Transport::Tcp).unwrap_err().problem, QueryProblem::TooLong);
    bytes.push(0);
    assert_eq!(read_query(&bytes, Transport::Tcp).unwrap_err().problem, QueryProblem::TooLong);
}
