//! What is inspected, what is held back for a decision, and what is cleared.

use std::net::{IpAddr, Ipv4Addr};

use bathy_policy::Inspected;

use super::{AppProtocol, Inspection, Inspector, MAX_BUFFERED, MAX_HEAD, ParsedTarget};

const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));
const FIRST: &[u8] = b"GET /a HTTP/1.1\r\nHost: one.example\r\n\r\n";
const SECOND: &[u8] = b"HEAD /b HTTP/1.1\r\nHost: two.example\r\n\r\n";
/// A record of encrypted data, whose content does not matter.
const ENCRYPTED: &[u8] = &[23, 3, 3, 0, 1, 0];

/// A TLS 1.3 ClientHello with this name.
fn hello(name: &str) -> Vec<u8> {
    let short = |length: usize| u16::try_from(length).unwrap().to_be_bytes();
    let server_name = [&short(name.len() + 3)[..], &[0], &short(name.len()), name.as_bytes()].concat();
    let mut extensions = [&[0, 0][..], &short(server_name.len()), &server_name].concat();
    extensions.extend([0, 43, 0, 3, 2, 3, 4]);
    let mut body = [&[3, 3][..], &[9; 32], &[0], &[0, 2, 0x13, 1], &[1, 0]].concat();
    body.extend([&short(extensions.len())[..], &extensions].concat());
    let message = [&[1, 0][..], &short(body.len()), &body].concat();
    [&[22, 3, 1][..], &short(message.len()), &message].concat()
}

fn tls(name: &str) -> ParsedTarget {
    ParsedTarget::Tls { name: Some(name.parse().unwrap()), encrypted_hello: false }
}

fn http(method: &str, host: &str, path: &str) -> ParsedTarget {
    ParsedTarget::Http {
        host: Some(host.parse().unwrap()),
        host_is_address: false,
        method: method.to_owned(),
        path: Some(path.to_owned()),
        rewrites: false,
    }
}

/// Removes and returns everything that is cleared.
fn passed(inspector: &mut Inspector) -> Vec<u8> {
    let cleared = inspector.cleared().to_vec();
    inspector.consume(cleared.len());
    assert_eq!(inspector.cleared(), b"", "it goes on once");
    cleared
}

#[test]
fn the_first_bytes_tell_the_protocol() {
    let table: [(&[u8], AppProtocol); 6] = [
        (b"", AppProtocol::Other),
        (b"\x16", AppProtocol::Tls),
        (b"\x80", AppProtocol::Tls),
        (b"\xff", AppProtocol::Tls),
        (b"GET", AppProtocol::Http),
        (b"\x15", AppProtocol::Http),
    ];
    for (bytes, app_protocol) in table {
        let mut inspector = Inspector::new(SERVER);
        inspector.push(bytes);
        inspector.parse();
        assert_eq!(inspector.app_protocol(), app_protocol, "{}", bytes.escape_ascii());
        assert!(inspector.is_enforcing(), "{}", bytes.escape_ascii());
        assert_eq!(inspector.cleared(), b"", "{}", bytes.escape_ascii());
    }
}

#[test]
fn a_hello_waits_until_its_name_is_accepted_and_encrypted_data_passes_after_it() {
    let hello = hello("good.example");
    let mut inspector = Inspector::new(SERVER);
    inspector.push(&hello[..20]);
    assert_eq!(inspector.parse(), Inspection::More);
    inspector.push(&hello[20..]);
    inspector.push(ENCRYPTED);
    assert_eq!(inspector.parse(), Inspection::Decide(tls("good.example")));
    assert_eq!(inspector.cleared(), b"", "nothing goes on before the decision");

    inspector.accept(&tls("good.example"));
    assert_eq!(passed(&mut inspector), hello, "what follows is still to be read");
    assert!(inspector.is_enforcing() && !inspector.is_done());
    assert_eq!(inspector.parse(), Inspection::More);
    assert_eq!(passed(&mut inspector), ENCRYPTED);
    assert!(inspector.is_done() && !inspector.is_enforcing());
    assert!(!inspector.has_passed_requests());
}

#[test]
fn n6_a_second_hello_with_another_name_is_not_forwarded() {
    for (name, refused) in [("good.example", false), ("bad.example", true)] {
        let mut inspector = Inspector::new(SERVER);
        inspector.push(&hello("good.example"));
        inspector.parse();
        inspector.accept(&tls("good.example"));
        passed(&mut inspector);
        inspector.push(&hello(name));
        let next = inspector.parse();
        assert_eq!(matches!(next, Inspection::Refused(_)), refused, "{name}: {next:?}");
        assert_eq!(inspector.cleared().is_empty(), refused, "{name}");
    }
}

#[test]
fn each_request_waits_for_its_own_decision() {
    let mut inspector = Inspector::new(SERVER);
    inspector.push(&[FIRST, SECOND].concat());
    assert_eq!(inspector.parse(), Inspection::Decide(http("GET", "one.example", "/a")));
    assert_eq!(inspector.cleared(), b"");
    assert!(!inspector.has_passed_requests());

    inspector.accept(&http("GET", "one.example", "/a"));
    assert!(inspector.has_passed_requests());
    assert_eq!(inspector.parse(), Inspection::Decide(http("HEAD", "two.example", "/b")));
    assert_eq!(inspector.space(), MAX_BUFFERED - FIRST.len() - SECOND.len());
    assert_eq!(passed(&mut inspector), FIRST);
    assert_eq!(inspector.space(), MAX_BUFFERED - SECOND.len());

    inspector.accept(&http("HEAD", "two.example", "/b"));
    assert_eq!(inspector.parse(), Inspection::More);
    assert_eq!(passed(&mut inspector), SECOND);
    assert!(inspector.is_enforcing() && !inspector.is_done(), "the next request is read, too");
}

#[test]
fn only_consumed_bytes_are_removed() {
    let mut inspector = Inspector::new(SERVER);
    inspector.push(FIRST);
    inspector.parse();
    inspector.consume(5);
    assert_eq!(inspector.space(), MAX_BUFFERED - FIRST.len(), "what is not cleared cannot be consumed");
    inspector.accept(&http("GET", "one.example", "/a"));
    inspector.parse();
    inspector.consume(4);
    assert_eq!(inspector.cleared(), &FIRST[4..]);
    inspector.consume(usize::MAX);
    assert_eq!((inspector.cleared(), inspector.space()), (&b""[..], MAX_BUFFERED));
}

#[test]
fn an_address_in_the_host_field_counts_only_if_it_is_dialed() {
    for (host, is_address) in [("192.0.2.7", true), ("192.0.2.8", false), ("one.example", false)] {
        let mut inspector = Inspector::new(SERVER);
        inspector.push(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
        let Inspection::Decide(target) = inspector.parse() else { unreachable!("{host} is a whole request") };
        assert_eq!(target.name().is_some(), host == "one.example", "{host}");
        let read = target.inspected();
        assert!(
            matches!(read, Inspected::Http { host_is_address, .. } if host_is_address == is_address),
            "{host}"
        );
    }
}

#[test]
fn another_protocol_is_decided_once_and_passes_whole() {
    let ssh = b"SSH-2.0-OpenSSH_9.2p1\r\n";
    let mut inspector = Inspector::new(SERVER);
    inspector.push(ssh);
    assert_eq!(inspector.parse(), Inspection::Decide(ParsedTarget::Other));
    assert_eq!(inspector.cleared(), b"");
    inspector.accept(&ParsedTarget::Other);
    assert!(!inspector.is_enforcing());
    assert!(!inspector.is_done(), "what was kept back has to go first");
    assert_eq!(passed(&mut inspector), ssh);
    assert!(inspector.is_done());
    assert_eq!(inspector.app_protocol(), AppProtocol::Other);
}

#[test]
fn another_protocol_behind_a_request_is_refused() {
    let mut inspector = Inspector::new(SERVER);
    inspector.push(&[FIRST, b"\x00\x01\x02\r\n"].concat());
    inspector.parse();
    inspector.accept(&http("GET", "one.example", "/a"));
    assert!(matches!(inspector.parse(), Inspection::Refused(_)));
    assert_eq!(passed(&mut inspector), FIRST);
}

#[test]
fn after_a_web_socket_request_the_response_decides_whether_bytes_pass_unparsed() {
    let head = b"GET / HTTP/1.1\r\nHost: one.example\r\nUpgrade: websocket\r\n\r\n";
    for (answer, goes_on) in [(&b"HTTP/1.1 101 Yes\r\n\r\n"[..], true), (b"HTTP/1.1 200 No\r\n\r\n", false)] {
        let mut inspector = Inspector::new(SERVER);
        inspector.push(head);
        inspector.parse();
        inspector.accept(&http("GET", "one.example", "/"));
        inspector.push(b"\x81\x05hello");
        assert_eq!(inspector.parse(), Inspection::More);
        assert_eq!(passed(&mut inspector), head);
        assert!(inspector.wants_response());
        inspector.on_response(answer);
        assert!(!inspector.wants_response());
        let next = inspector.parse();
        assert_eq!(next == Inspection::More, goes_on, "{next:?}");
        assert_eq!(inspector.cleared(), if goes_on { &b"\x81\x05hello"[..] } else { b"" });
    }
}

#[test]
fn answers_to_plain_requests_are_not_read() {
    let mut inspector = Inspector::new(SERVER);
    inspector.push(FIRST);
    inspector.parse();
    inspector.accept(&http("GET", "one.example", "/a"));
    assert!(!inspector.wants_response());
}

#[test]
fn passive_inspection_passes_everything_and_records_the_name() {
    let hello = hello("good.example");
    let mut inspector = Inspector::passive(SERVER);
    assert!(!inspector.is_enforcing());
    for part in [&hello[..30], &hello[30..]] {
        assert_eq!(inspector.observed(), None);
        inspector.push(part);
        assert_eq!(inspector.parse(), Inspection::More);
        assert_eq!(passed(&mut inspector), part);
    }
    assert_eq!(inspector.observed(), Some(&tls("good.example")));
    assert!(!inspector.is_done(), "there may be a second hello");
    inspector.push(ENCRYPTED);
    inspector.parse();
    assert_eq!(passed(&mut inspector), ENCRYPTED);
    assert!(inspector.is_done());
    assert_eq!(inspector.observed(), Some(&tls("good.example")));
}

#[test]
fn a_name_that_a_second_hello_changes_is_forgotten() {
    let first = hello("good.example");
    let both = [first.clone(), hello("bad.example")].concat();
    for cut in [0, 30, first.len(), first.len() + 1, both.len()] {
        let mut inspector = Inspector::passive(SERVER);
        let parts = both.split_at(cut);
        for part in [parts.0, parts.1] {
            inspector.push(part);
            assert_eq!(inspector.parse(), Inspection::More);
            assert_eq!(passed(&mut inspector), part);
        }
        assert_eq!(inspector.observed(), None);
        assert!(inspector.is_done());
    }
}

#[test]
fn passive_inspection_ends_with_the_first_bytes_that_are_no_hello() {
    let mut inspector = Inspector::passive(SERVER);
    inspector.push(FIRST);
    assert_eq!(inspector.parse(), Inspection::More);
    assert_eq!(passed(&mut inspector), FIRST);
    assert!(inspector.is_done());
    assert_eq!(inspector.observed(), None);
}

#[test]
fn what_follows_a_segmented_hello_is_parsed_from_its_own_first_byte() {
    let first = hello("good.example");
    let all = [&first, ENCRYPTED].concat();
    for cut in [1, 30, first.len() - 1] {
        let mut inspector = Inspector::passive(SERVER);
        let parts = all.split_at(cut);
        for part in [parts.0, parts.1] {
            inspector.push(part);
            assert_eq!(inspector.parse(), Inspection::More);
            assert_eq!(passed(&mut inspector), part);
        }
        assert!(inspector.is_done(), "the encrypted data was seen: {cut}");
        assert_eq!(inspector.observed(), Some(&tls("good.example")));
    }
}

#[test]
fn r5_at_most_the_longest_head_and_16_kib_are_buffered() {
    let mut inspector = Inspector::new(SERVER);
    assert_eq!(inspector.space(), MAX_HEAD + 16_384);
    inspector.push(FIRST);
    assert_eq!(inspector.space(), MAX_HEAD + 16_384 - FIRST.len());
}
