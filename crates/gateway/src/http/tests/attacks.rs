//! Ambiguous requests, and requests that would lead to another host.

use super::super::{HttpRefusal, MAX_FIELDS, MAX_HEAD, PathProblem, RequestStream, Step, rule_path};
use super::{Followed, follow, follow_answered, follow_pieces};

/// A valid request, so that each row is also tested as the second request.
const FIRST: &[u8] = b"GET /first HTTP/1.1\r\nHost: a.example\r\n\r\n";

/// The variant of a refusal, without its text.
fn kind(refused: &HttpRefusal) -> &'static str {
    match refused {
        HttpRefusal::NotHttp => "not http",
        HttpRefusal::Http2 => "http2",
        HttpRefusal::Version => "version",
        HttpRefusal::TooLong(_) => "too long",
        HttpRefusal::Malformed(_) => "malformed",
        HttpRefusal::Target(_) => "target",
        HttpRefusal::Host(_) => "host",
        HttpRefusal::Framing(_) => "framing",
        HttpRefusal::Connect => "connect",
        HttpRefusal::LateSwitch => "late switch",
        HttpRefusal::BadResponse => "answer",
        HttpRefusal::Changed => "changed",
    }
}

#[test]
fn s5_ambiguous_requests_are_refused_first_and_second() {
    let host = "Host: a.example\r\n";
    let rows: &[(&str, String, &str)] = &[
        (
            "length and chunks",
            format!("POST / HTTP/1.1\r\n{host}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"),
            "framing",
        ),
        (
            "chunks and length",
            format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n"),
            "framing",
        ),
        (
            "two lengths",
            format!("POST / HTTP/1.1\r\n{host}Content-Length: 4\r\nContent-Length: 5\r\n\r\n"),
            "framing",
        ),
        (
            "the same length twice",
            format!("POST / HTTP/1.1\r\n{host}Content-Length: 4\r\nContent-Length: 4\r\n\r\n"),
            "framing",
        ),
        ("a list of lengths", format!("POST / HTTP/1.1\r\n{host}Content-Length: 4, 4\r\n\r\n"), "framing"),
        ("a negative length", format!("POST / HTTP/1.1\r\n{host}Content-Length: -1\r\n\r\n"), "framing"),
        ("a length with a sign", format!("POST / HTTP/1.1\r\n{host}Content-Length: +4\r\n\r\n"), "framing"),
        (
            "a length in hexadecimal",
            format!("POST / HTTP/1.1\r\n{host}Content-Length: 0x4\r\n\r\n"),
            "framing",
        ),
        ("an empty length", format!("POST / HTTP/1.1\r\n{host}Content-Length:\r\n\r\n"), "framing"),
        (
            "a length beyond 64 bits",
            format!("POST / HTTP/1.1\r\n{host}Content-Length: 18446744073709551617\r\n\r\n"),
            "framing",
        ),
        ("xchunked", format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding: xchunked\r\n\r\n"), "framing"),
        (
            "chunked in a list",
            format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding: gzip, chunked\r\n\r\n"),
            "framing",
        ),
        (
            "chunked, identity",
            format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding: chunked, identity\r\n\r\n"),
            "framing",
        ),
        ("identity", format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding: identity\r\n\r\n"), "framing"),
        (
            "chunked in quotes",
            format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding: \"chunked\"\r\n\r\n"),
            "framing",
        ),
        (
            "two codings",
            format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n"),
            "framing",
        ),
        ("an empty coding", format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding:\r\n\r\n"), "framing"),
        (
            "chunks in HTTP/1.0",
            format!("POST / HTTP/1.0\r\n{host}Transfer-Encoding: chunked\r\n\r\n"),
            "framing",
        ),
        (
            "a coding with an underscore",
            format!("POST / HTTP/1.1\r\n{host}Transfer_Encoding: chunked\r\n\r\n"),
            "framing",
        ),
        (
            "a length with an underscore",
            format!("POST / HTTP/1.1\r\n{host}content_length: 4\r\n\r\n"),
            "framing",
        ),
        (
            "a hop that drops the length",
            format!("POST / HTTP/1.1\r\n{host}Connection: x, Content-Length\r\n\r\n"),
            "framing",
        ),
        (
            "a hop that drops the host",
            format!("POST / HTTP/1.1\r\n{host}Connection: HOST\r\n\r\n"),
            "framing",
        ),
        (
            "a space before the colon",
            format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding : chunked\r\n\r\n"),
            "malformed",
        ),
        (
            "a tab before the colon",
            format!("POST / HTTP/1.1\r\n{host}Content-Length\t: 4\r\n\r\n"),
            "malformed",
        ),
        ("a space in a name", format!("POST / HTTP/1.1\r\n{host}Content Length: 4\r\n\r\n"), "malformed"),
        (
            "a vertical tab before the value",
            format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding: \x0bchunked\r\n\r\n"),
            "malformed",
        ),
        ("NUL in a value", format!("POST / HTTP/1.1\r\n{host}X: a\0b\r\n\r\n"), "malformed"),
        ("NUL in a name", format!("POST / HTTP/1.1\r\n{host}X\0: a\r\n\r\n"), "malformed"),
        (
            "a name in odd letters",
            format!("POST / HTTP/1.1\r\n{host}Content-Length\u{a0}: 4\r\n\r\n"),
            "malformed",
        ),
        ("no colon", format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding\r\n\r\n"), "malformed"),
        ("no name", format!("POST / HTTP/1.1\r\n{host}: chunked\r\n\r\n"), "malformed"),
        (
            "a folded field",
            format!("POST / HTTP/1.1\r\n{host}X: a\r\n Transfer-Encoding: chunked\r\n\r\n"),
            "malformed",
        ),
        (
            "a folded coding",
            format!("POST / HTTP/1.1\r\n{host}Transfer-Encoding:\r\n\tchunked\r\n\r\n"),
            "malformed",
        ),
        ("a folded first field", format!("POST / HTTP/1.1\r\n Host: b.example\r\n{host}\r\n"), "malformed"),
        (
            "a line end without CR",
            format!("POST / HTTP/1.1\r\n{host}X: a\nContent-Length: 4\r\n\r\n"),
            "malformed",
        ),
        ("an end without CR", format!("POST / HTTP/1.1\r\n{host}\n"), "malformed"),
        ("a CR in a line", format!("POST / HTTP/1.1\r\n{host}X: a\rContent-Length: 4\r\n\r\n"), "malformed"),
        ("two CR", format!("POST / HTTP/1.1\r\n{host}X: a\r\r\n\r\n"), "malformed"),
        ("two hosts", "GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\n\r\n".into(), "host"),
        (
            "the same host twice",
            "GET / HTTP/1.1\r\nHost: a.example\r\nhOST: a.example\r\n\r\n".into(),
            "host",
        ),
        ("no host", "GET / HTTP/1.1\r\n\r\n".into(), "host"),
        ("an empty host", "GET / HTTP/1.1\r\nHost:\r\n\r\n".into(), "host"),
        ("hosts in a list", "GET / HTTP/1.1\r\nHost: a.example, b.example\r\n\r\n".into(), "host"),
        ("hosts with a space", "GET / HTTP/1.1\r\nHost: a.example b.example\r\n\r\n".into(), "host"),
        ("a host with a user", "GET / HTTP/1.1\r\nHost: a.example@b.example\r\n\r\n".into(), "host"),
        ("a host with a path", "GET / HTTP/1.1\r\nHost: a.example/x\r\n\r\n".into(), "host"),
        ("a host with a backslash", "GET / HTTP/1.1\r\nHost: a.example\\b\r\n\r\n".into(), "host"),
        ("a host with an encoded NUL", "GET / HTTP/1.1\r\nHost: a.example%00\r\n\r\n".into(), "host"),
        ("a host with an empty port", "GET / HTTP/1.1\r\nHost: a.example:\r\n\r\n".into(), "host"),
        ("a host with port 0", "GET / HTTP/1.1\r\nHost: a.example:0\r\n\r\n".into(), "host"),
        ("a host with a port too large", "GET / HTTP/1.1\r\nHost: a.example:65617\r\n\r\n".into(), "host"),
        ("a host with two ports", "GET / HTTP/1.1\r\nHost: a.example:80:81\r\n\r\n".into(), "host"),
        ("a host with a signed port", "GET / HTTP/1.1\r\nHost: a.example:+80\r\n\r\n".into(), "host"),
        ("a short address", "GET / HTTP/1.1\r\nHost: 127.1\r\n\r\n".into(), "host"),
        ("an address as a number", "GET / HTTP/1.1\r\nHost: 2130706433\r\n\r\n".into(), "host"),
        ("an octal address", "GET / HTTP/1.1\r\nHost: 0177.0.0.1\r\n\r\n".into(), "host"),
        ("an address with a zone", "GET / HTTP/1.1\r\nHost: [fe80::1%25eth0]\r\n\r\n".into(), "host"),
        ("an address without brackets", "GET / HTTP/1.1\r\nHost: ::1\r\n\r\n".into(), "host"),
        ("a host in other letters", "GET / HTTP/1.1\r\nHost: \u{430}.example\r\n\r\n".into(), "host"),
        (
            "an absolute target for another host",
            format!("GET http://b.example/ HTTP/1.1\r\n{host}\r\n"),
            "host",
        ),
        (
            "an absolute target for another port",
            format!("GET http://a.example:81/ HTTP/1.1\r\n{host}\r\n"),
            "host",
        ),
        (
            "an absolute target with a user",
            format!("GET http://a.example@b.example/ HTTP/1.1\r\n{host}\r\n"),
            "target",
        ),
        (
            "an absolute target of another scheme",
            format!("GET https://a.example/ HTTP/1.1\r\n{host}\r\n"),
            "target",
        ),
        ("an absolute target without a host", format!("GET http:///x HTTP/1.1\r\n{host}\r\n"), "target"),
        ("a target that is only a host", format!("GET b.example HTTP/1.1\r\n{host}\r\n"), "target"),
        ("a target with a fragment", format!("GET /#x HTTP/1.1\r\n{host}\r\n"), "target"),
        ("a star for another method", format!("GET * HTTP/1.1\r\n{host}\r\n"), "target"),
        ("CONNECT", "CONNECT b.example:443 HTTP/1.1\r\nHost: b.example:443\r\n\r\n".into(), "connect"),
        ("CONNECT to the same host", format!("CONNECT a.example:25 HTTP/1.1\r\n{host}\r\n"), "connect"),
        ("CONNECT with a path", format!("CONNECT / HTTP/1.1\r\n{host}\r\n"), "connect"),
        ("HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".into(), "http2"),
        ("HTTP/1.2", format!("GET / HTTP/1.2\r\n{host}\r\n"), "version"),
        ("HTTP/3", format!("GET / HTTP/3\r\n{host}\r\n"), "version"),
        (
            "a socket with a body",
            format!("GET / HTTP/1.1\r\n{host}Upgrade: websocket\r\nContent-Length: 1\r\n\r\n"),
            "framing",
        ),
        ("a socket by POST", format!("POST / HTTP/1.1\r\n{host}Upgrade: websocket\r\n\r\n"), "framing"),
    ];
    for (what, bytes, expected) in rows {
        let followed = follow(bytes.as_bytes());
        assert_eq!(followed.refused.as_ref().map(kind), Some(*expected), "{what}");
        assert!(followed.passed.is_empty() && followed.requests.is_empty(), "{what}: {followed:?}");

        let followed = follow(&[FIRST, bytes.as_bytes()].concat());
        assert_eq!(followed.refused.as_ref().map(kind), Some(*expected), "{what}, second");
        assert_eq!(followed.passed, FIRST, "{what}, second");
    }
}

#[test]
fn s5_what_a_lenient_server_accepts_as_a_request_is_no_other_protocol() {
    let rows: &[&str] = &[
        "GET  / HTTP/1.1",
        "GET / HTTP/1.1 ",
        " GET / HTTP/1.1",
        "\r\nGET / HTTP/1.1",
        "\n\r\n \tGET / HTTP/1.1",
        "GET\t/ HTTP/1.1",
        "GET\x0b/ HTTP/1.1",
        "GET\r/ HTTP/1.1",
        "GET /",
        "GET",
        "post /x",
        "GET / a b HTTP/1.1",
        "get / HTTP/1.1",
        "GET / http/1.1",
        "GET /\u{e9} HTTP/1.1",
        "GET /\0 HTTP/1.1",
        "G(T / HTTP/1.1",
        "GET /a\tb HTTP/1.1",
        "custom / HTTP/1.0",
        "FOO /\u{e9} HTTP/1.1",
        "FOO /\u{e9}",
        "FOO *",
        "THIS-METHOD-IS-LONGER-THAN-ANY-OTHER / HTTP/1.1",
    ];
    for line in rows {
        for end in ["\r\n", "\n"] {
            let bytes = format!("{line}{end}Host: a.example{end}{end}");
            let followed = follow(bytes.as_bytes());
            assert_eq!(followed.refused.as_ref().map(kind), Some("malformed"), "{line:?}");
            assert!(followed.passed.is_empty(), "{line:?}");
            let followed = follow(&[FIRST, bytes.as_bytes()].concat());
            assert_eq!(followed.refused.as_ref().map(kind), Some("malformed"), "{line:?}, second");
            assert_eq!(followed.passed, FIRST, "{line:?}, second");
        }
    }
    let blank = " ".repeat(2000);
    assert_eq!(follow(blank.as_bytes()).refused.as_ref().map(kind), Some("malformed"));
}

#[test]
fn other_protocols_are_distinguished_from_http() {
    let rows: &[&[u8]] = &[
        b"\x16\x03\x01\x02\0\x01",
        b"\0",
        b"\xff\xfe",
        b"0\x0c\x02\x01",
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
        b"EHLO guest.example\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"a001 LOGIN me secret\r\n",
        b"NICK guest\nUSER x\n",
        b"GETTING started\r\n",
    ];
    for bytes in rows {
        assert_eq!(follow(bytes).refused, Some(HttpRefusal::NotHttp), "{}", bytes.escape_ascii());
        // The same with everything that follows in one piece.
        let more = [bytes, &[0; 2000][..]].concat();
        assert_eq!(follow(&more).refused, Some(HttpRefusal::NotHttp), "{}, and more", bytes.escape_ascii());
    }
    // It could still become either.
    assert_eq!(follow(b"SSH-2.0").refused, None);
    assert_eq!(follow(b"FOO \xff").refused, None);
    assert_eq!(follow(b"\r\n").refused, None);
}

#[test]
fn s5_after_a_request_nothing_passes_for_another_protocol() {
    for bytes in [&b"SSH-2.0-x\r\n"[..], b"\x01", b"\r\n", b"get / HTTP/1.1\r\n", b"\xff\xff"] {
        let Followed { requests, passed, refused, .. } = follow(&[FIRST, bytes].concat());
        assert_eq!(refused.as_ref().map(kind), Some("malformed"), "{}", bytes.escape_ascii());
        assert_eq!((requests.len(), passed.as_slice()), (1, FIRST));
    }
}

#[test]
fn a_refusal_says_what_is_wrong() {
    let post = "POST / HTTP/1.1\r\nHost: a.example\r\n";
    for (fields, reason) in [
        ("Content-Length: 4\r\nContent-Length: 4\r\n", "there is more than one Content-Length"),
        ("Transfer-Encoding: gzip\r\n", "the Transfer-Encoding is not just chunked"),
        (
            "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
            "both Content-Length and Transfer-Encoding are there",
        ),
        ("X: y\n", "a line ends without CR"),
        ("X: y\rZ: z\r\n", "a CR is inside a line"),
        ("X: \u{7f}\r\n", "a control character is in the head"),
    ] {
        let refused = follow(format!("{post}{fields}\r\n").as_bytes()).refused.unwrap().to_string();
        assert!(refused.ends_with(reason), "{fields:?}: {refused}");
    }
}

#[test]
fn s5_chunks_have_one_reading() {
    let head = "POST /c HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n";
    let rows: &[(&str, &str)] = &[
        ("an extension", "5;a=b\r\nhello\r\n0\r\n\r\n"),
        ("an empty extension", "5;\r\nhello\r\n0\r\n\r\n"),
        ("a space behind the size", "5 \r\nhello\r\n0\r\n\r\n"),
        ("a sign", "+5\r\nhello\r\n0\r\n\r\n"),
        ("a prefix", "0x5\r\nhello\r\n0\r\n\r\n"),
        ("no size", "\r\nhello\r\n0\r\n\r\n"),
        ("a size that is no number", "g\r\nhello\r\n0\r\n\r\n"),
        ("a size beyond 64 bits", "10000000000000005\r\nhello\r\n0\r\n\r\n"),
        ("a size with many zeros", "00000000000000005\r\nhello\r\n0\r\n\r\n"),
        ("a size ended by LF", "5\nhello\r\n0\r\n\r\n"),
        ("a size ended by CR", "5\rhello\r\n0\r\n\r\n"),
        ("a chunk that is longer than it says", "4\r\nhello\r\n0\r\n\r\n"),
        ("a chunk ended by LF", "5\r\nhello\n0\r\n\r\n"),
        ("a trailer ended by LF", "0\r\nx: y\n\r\n"),
        ("an end of LF", "0\r\n\n"),
        ("a trailer with a host", "0\r\nHost: b.example\r\n\r\n"),
        ("a trailer with a length", "0\r\ncontent-length: 4\r\n\r\n"),
        ("a trailer with a coding", "0\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("a folded trailer", "0\r\nx: y\r\n z\r\n\r\n"),
        ("a trailer without a name", "0\r\nx y: z\r\n\r\n"),
        ("a request instead of a trailer", "0\r\nGET / HTTP/1.1\r\nHost: b.example\r\n\r\n"),
        ("NUL in a trailer", "0\r\nx: \0\r\n\r\n"),
    ];
    for (what, body) in rows {
        let followed =
            follow(format!("{head}{body}GET /next HTTP/1.1\r\nHost: b.example\r\n\r\n").as_bytes());
        let refused = followed.refused.as_ref().map(kind);
        assert!(matches!(refused, Some("framing" | "malformed")), "{what}: {refused:?}");
        assert_eq!(followed.requests, ["POST a.example /c"], "{what}");
    }
}

#[test]
fn s5_the_second_request_is_decided_like_the_first() {
    let second = "GET /evil HTTP/1.1\r\nHost: evil.example\r\n\r\n";
    for first in [
        "GET / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\n\r\nabc",
        "GET / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0003\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.example\r\nUpgrade: h2c\r\nConnection: close\r\n\r\n",
    ] {
        let mut pending = format!("{first}{second}").into_bytes();
        let mut stream = RequestStream::new();
        assert!(matches!(stream.read(&pending), Ok(Step::Decide(_))));
        stream.accept(&mut pending);
        // A request that is not accepted: nothing of it is cleared, however often the stream is read.
        while let Ok(Step::Cleared(count)) = stream.read(&pending) {
            pending.drain(..count);
        }
        assert_eq!(pending, second.as_bytes(), "{first}");
        assert_eq!(stream.read(&pending), Ok(Step::Held));
        stream.on_response(b"HTTP/1.1 101 Switching\r\n\r\n");
        assert_eq!(stream.read(&pending), Ok(Step::Held));
    }
}

#[test]
fn n5_a_socket_that_the_server_declines_leads_nowhere() {
    let socket = b"GET / HTTP/1.1\r\nHost: a.example\r\nUpgrade: websocket\r\n\r\n";
    let next = b"GET /evil HTTP/1.1\r\nHost: evil.example\r\n\r\n";
    let both = [&socket[..], next].concat();
    for status in [200, 204, 302, 400, 404, 426, 500] {
        let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n");
        let followed = follow_answered(&both, answer.as_bytes());
        assert_eq!(followed.requests, ["GET a.example /", "GET evil.example /evil"], "after {status}");
        assert!(!followed.opaque, "after {status}");
    }
    for answer in
        ["HTTP/2 101\r\n", "101\r\n", "HTTP/1.1 1010\r\n", "HTTP/1.1 999\r\n", "SSH-2.0\r\n", "\r\n"]
    {
        let followed = follow_answered(&both, answer.as_bytes());
        assert_eq!(followed.refused, Some(HttpRefusal::BadResponse), "{answer:?}");
        assert_eq!(followed.passed, socket, "{answer:?}");
    }
    let hints = b"HTTP/1.1 103 x\r\na: b\r\n\r\n".repeat(2000);
    let late = follow_answered(&both, &[&hints[..], b"HTTP/1.1 101 X\r\n"].concat());
    assert!(late.opaque, "some informational answers may come before it: {}", hints.len());
    let endless = follow_answered(&both, &b"HTTP/1.1 100 x\r\na: b\r\n\r\n".repeat(4000));
    assert_eq!(endless.refused, Some(HttpRefusal::BadResponse));
    // Behind another request, the first response would not be the one to this.
    let late = follow_answered(&[FIRST, &both].concat(), b"HTTP/1.1 101 X\r\n\r\n");
    assert_eq!((late.refused, late.passed), (Some(HttpRefusal::LateSwitch), FIRST.to_vec()));
}

#[test]
fn s5_the_head_that_is_forwarded_is_the_one_that_was_decided() {
    let head = b"GET / HTTP/1.1\r\nHost: a.example\r\nUpgrade: h2c\r\n\r\n";
    let mut stream = RequestStream::new();
    assert!(matches!(stream.read(head), Ok(Step::Decide(_))));
    stream.accept(&mut head[5..].to_vec());
    assert_eq!(stream.read(head), Err(HttpRefusal::Changed));
    // Nothing was returned yet, so there is nothing to accept.
    let mut stream = RequestStream::new();
    stream.accept(&mut head.to_vec());
    assert!(matches!(stream.read(head), Ok(Step::Decide(_))));
}

#[test]
fn r5_heads_and_trailers_have_limits() {
    let long = |length: usize| {
        format!("GET / HTTP/1.1\r\nHost: a.example\r\nX: {}\r\n\r\n", "x".repeat(length)).into_bytes()
    };
    let rest = long(0).len();
    let refused = |bytes: &[u8]| follow_pieces(&bytes.chunks(1000).collect::<Vec<_>>(), b"").refused;
    assert_eq!(refused(&long(MAX_HEAD - rest)), None);
    assert_eq!(refused(&long(MAX_HEAD - rest + 1)).as_ref().map(kind), Some("too long"));
    let endless = [b"GET /".to_vec(), vec![b'x'; MAX_HEAD]].concat();
    assert_eq!(refused(&endless).as_ref().map(kind), Some("too long"));
    let fields = |count: usize| {
        format!("GET / HTTP/1.1\r\nHost: a.example\r\n{}\r\n", "X: y\r\n".repeat(count)).into_bytes()
    };
    assert_eq!(refused(&fields(MAX_FIELDS - 1)), None);
    assert_eq!(refused(&fields(MAX_FIELDS)).as_ref().map(kind), Some("too long"));
    let chunked = "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n";
    let trailers = |count: usize| format!("{chunked}{}\r\n", "x: y\r\n".repeat(count)).into_bytes();
    // Six bytes each, and the two of the empty line: 8 KiB.
    assert_eq!(refused(&trailers(1365)), None);
    assert_eq!(refused(&trailers(1366)).as_ref().map(kind), Some("framing"));
    let one = format!("{chunked}x: {}", "y".repeat(10_000)).into_bytes();
    assert_eq!(refused(&one).as_ref().map(kind), Some("framing"));
}

#[test]
fn a_long_body_is_counted_and_not_kept() {
    let head = b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 9999999999999999999\r\n\r\n";
    let piece = vec![b'x'; 60_000];
    let mut pieces: Vec<&[u8]> = vec![head];
    pieces.extend(vec![&piece[..]; 20]);
    let Followed { passed, refused, .. } = follow_pieces(&pieces, b"");
    assert_eq!((passed.len(), refused), (head.len() + 20 * 60_000, None));
}

#[test]
fn s5_paths_that_servers_read_differently_match_no_rule() {
    let rows: &[(&str, Option<&str>)] = &[
        ("/", Some("/")),
        ("/a/b.c", Some("/a/b.c")),
        ("/a/", Some("/a/")),
        ("/%61%2D%7e", Some("/a-~")),
        ("/a%20b", Some("/a%20b")),
        ("/a%3Fb%23", Some("/a%3Fb%23")),
        ("/%c3%a9", Some("/%C3%A9")),
        ("/...", Some("/...")),
        ("", None),
        ("a", None),
        ("/a/../b", None),
        ("/a/./b", None),
        ("/a/..", None),
        ("/%2e%2E/b", None),
        ("/a/.%2e/b", None),
        ("//a", None),
        ("/a//b", None),
        ("/a%2fb", None),
        ("/a%5cb", None),
        ("/a\\b", None),
        ("/a;x=y", None),
        ("/a%3bx", None),
        ("/%252e", None),
        ("/%00", None),
        ("/%0d%0a", None),
        ("/%", None),
        ("/%4", None),
        ("/%zz", None),
        ("/%c0%ae", None),
        ("/%e0%80%af", None),
        ("/%ff", None),
        ("/\u{e9}", None),
    ];
    for (path, expected) in rows {
        assert_eq!(rule_path(path).ok().as_deref(), *expected, "{path}");
    }
    assert!(matches!(rule_path("/a//b"), Err(PathProblem::Ambiguous(_))));
}

#[test]
fn n7_bytes_above_ascii_in_a_target_do_not_make_it_another_protocol() {
    for line in [&b"FOO \xfc HTTP/1.1\r\n"[..], b"FOO \xfc\xfc HTTP/1.0\n", b"GET \xfc\r\n"] {
        let refused = follow(line).refused.expect("it is no plain request");
        assert_ne!(refused, HttpRefusal::NotHttp, "{}", line.escape_ascii());
    }
}

#[test]
fn n7_the_size_of_a_chunk_has_fifteen_digits_at_most() {
    let head = "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (digits, refused) in [(1, false), (15, false), (16, true)] {
        let bytes = format!("{head}{:0>digits$}\r\nhello\r\n0\r\n\r\n", 5);
        assert_eq!(follow(bytes.as_bytes()).refused.is_some(), refused, "{digits}");
    }
}
