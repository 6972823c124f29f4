//! Requests of real clients pass unchanged.

use super::super::{Body, Denial, Form, Host, RequestStream, Step, denial};
use super::{Followed, follow, follow_answered};

fn passes(bytes: &[u8], requests: &[&str]) {
    let followed = follow(bytes);
    let expected = Followed {
        requests: requests.iter().map(|&request| request.into()).collect(),
        passed: bytes.to_vec(),
        opaque: false,
        refused: None,
    };
    assert_eq!(followed, expected, "{}", bytes.escape_ascii());
}

#[test]
fn requests_of_real_clients_pass_unchanged() {
    let rows: &[(&[u8], &[&str])] = &[
        // curl
        (
            b"GET /a?b=c HTTP/1.1\r\nHost: a.example\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n",
            &["GET a.example /a"],
        ),
        // curl with a large upload
        (
            b"POST /up HTTP/1.1\r\nHost: a.example:8080\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello",
            &["POST a.example:8080 /up"],
        ),
        // requests and pip, on one persistent connection
        (
            b"GET /simple/six/ HTTP/1.1\r\nHost: pypi.example\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n\r\n\
              GET /packages/six-1.17.0-py2.py3-none-any.whl HTTP/1.1\r\nHost: pypi.example\r\nRange: bytes=0-\r\n\r\n",
            &["GET pypi.example /simple/six/", "GET pypi.example /packages/six-1.17.0-py2.py3-none-any.whl"],
        ),
        // urllib, which closes, and an old tool without a Host
        (b"GET / HTTP/1.1\r\nAccept-Encoding: identity\r\nHost: a.example\r\nConnection: close\r\n\r\n", &["GET a.example /"]),
        (b"GET /old HTTP/1.0\r\n\r\n", &["GET - /old"]),
        // git: discovery, then a pack of unknown length in chunks
        (
            b"GET /r.git/info/refs?service=git-upload-pack HTTP/1.1\r\nHost: git.example\r\nGit-Protocol: version=2\r\n\r\n\
              POST /r.git/git-receive-pack HTTP/1.1\r\nHost: git.example\r\nTransfer-Encoding: chunked\r\n\
              Expect: 100-continue\r\n\r\n4\r\n0000\r\n1A\r\nabcdefghijklmnopqrstuvwxyz\r\n0\r\n\r\n\
              HEAD /r.git HTTP/1.1\r\nHost: git.example\r\n\r\n",
            &["GET git.example /r.git/info/refs", "POST git.example /r.git/git-receive-pack", "HEAD git.example /r.git"],
        ),
        // trailers, as storage clients add checksums
        (
            b"PUT /o HTTP/1.1\r\nHost: s3.example\r\nTE: trailers\r\nTransfer-Encoding: Chunked\r\nTrailer: x-sum\r\n\r\n\
              3\r\na\r\n\r\n0\r\nx-sum: abc\tdef\r\nx-more:\r\n\r\n",
            &["PUT s3.example /o"],
        ),
        // addresses, an absolute target, OPTIONS for the whole server, a method of WebDAV
        (b"GET / HTTP/1.1\r\nHost: 192.0.2.7\r\n\r\n", &["GET 192.0.2.7 /"]),
        (b"GET / HTTP/1.1\r\nHost: [2001:db8::7]:8080\r\n\r\n", &["GET [2001:db8::7]:8080 /"]),
        (b"GET http://a.example?x HTTP/1.1\r\nHost: A.example:80\r\n\r\n", &["GET a.example /"]),
        (b"OPTIONS * HTTP/1.1\r\nHost: a.example\r\n\r\n", &["OPTIONS a.example ?"]),
        (b"VERSION-CONTROL /%7Euser/%e2%82%ac HTTP/1.1\r\nhost:a.example\r\n\r\n", &["VERSION-CONTROL a.example /~user/%E2%82%AC"]),
        // obsolete text (0x80 and above) in a field, and an empty field
        (b"GET / HTTP/1.1\r\nHost: a.example\r\nX-Name: J\xfcrgen\r\nX-Empty:\r\n\r\n", &["GET a.example /"]),
        // a body that looks like a request
        (
            b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 38\r\n\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
            &["POST a.example /"],
        ),
    ];
    for (bytes, requests) in rows {
        passes(bytes, requests);
    }
}

const SOCKET: &[u8] =
    b"GET /chat HTTP/1.1\r\nHost: a.example\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";

#[test]
fn a_web_socket_opens_when_the_server_accepts_it() {
    let frames = [SOCKET, b"\x82\x05\0\r\n\xff."].concat();
    for answer in [
        &b"HTTP/1.1 101 Switching Protocols\r\n"[..],
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 101\r\n",
    ] {
        let followed = follow_answered(&frames, answer);
        assert_eq!(followed.passed, frames, "the socket's own bytes go on unread");
        assert_eq!((followed.opaque, followed.refused), (true, None));
    }
    let followed = follow_answered(&frames, b"HTTP/1.1 100 Continue\r\n\r\n");
    assert_eq!(followed.passed, SOCKET, "nothing goes on before the server has decided");
}

#[test]
fn n5_offers_of_other_protocols_are_hidden_from_the_server() {
    // Java and curl offer HTTP/2 in every request; another client offers TLS.
    let bytes = b"GET /1 HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: a.example\r\nHTTP2-Settings: AAEA\r\nUpgrade: h2c\r\n\r\n\
        GET /2 HTTP/1.1\r\nHost: a.example\r\nUPGRADE: TLS/1.2\r\nX-Upgrade: 1\r\nupgrade: websocket\r\n\r\n\
        PUT /3 HTTP/1.1\r\nHost: a.example\r\nupgrade:h2c, websocket\r\nContent-Length: 12\r\n\r\nUpgrade: h2c";
    let followed = follow(bytes);
    assert_eq!(followed.refused, None);
    assert_eq!(followed.requests, ["GET a.example /1", "GET a.example /2", "PUT a.example /3"]);
    let expected = b"GET /1 HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: a.example\r\nHTTP2-Settings: AAEA\r\nX-Plain: h2c\r\n\r\n\
        GET /2 HTTP/1.1\r\nHost: a.example\r\nX-Plain: TLS/1.2\r\nX-Upgrade: 1\r\nX-Plain: websocket\r\n\r\n\
        PUT /3 HTTP/1.1\r\nHost: a.example\r\nX-Plain:h2c, websocket\r\nContent-Length: 12\r\n\r\nUpgrade: h2c";
    assert_eq!(followed.passed.escape_ascii().to_string(), expected.escape_ascii().to_string());
}

#[test]
fn a_head_goes_on_before_its_body_is_there() {
    // A client that expects 100 sends no body before it has it.
    let mut head =
        b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n".to_vec();
    let mut stream = RequestStream::new();
    assert!(matches!(stream.read(&head), Ok(Step::Decide(_))));
    stream.accept(&mut head);
    assert_eq!(stream.read(&head), Ok(Step::Cleared(head.len())));
    assert_eq!(stream.read(b""), Ok(Step::More));
    assert_eq!(stream.read(b"abcGET"), Ok(Step::Cleared(3)));
}

#[test]
fn a_request_is_parsed_into_its_parts() {
    let bytes = b"POST http://A.Example:8080/x/y?q HTTP/1.1\r\nHost: a.example:8080\r\nTransfer-Encoding: chunked\r\n\
        X-HTTP-Method-Override: DELETE\r\nUpgrade: h2c\r\n\r\n";
    let Ok(Step::Decide(request)) = RequestStream::new().read(bytes) else { panic!("it is whole") };
    assert_eq!(request.target, "http://A.Example:8080/x/y?q");
    assert_eq!((request.form, request.body, request.rewrites), (Form::Absolute, Body::Chunked, true));
    assert_eq!(request.upgrade.as_deref(), Some("h2c"));
    let authority = request.authority.unwrap();
    assert_eq!((authority.host, authority.port), (Host::Name("a.example".parse().unwrap()), Some(8080)));
}

#[test]
fn a_denial_cannot_be_forged() {
    let text = |without_body| {
        let forged = "x\r\nRule: none\n\u{1b}[2J";
        let denial = denial(&Denial {
            destination: forged,
            rule: "deny any",
            command: &"y".repeat(9999),
            without_body,
        });
        String::from_utf8(denial).unwrap()
    };
    let whole = text(false);
    let (head, body) = whole.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 403 "));
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    assert_eq!(body.lines().count(), 3, "{body}");
    assert!(body.len() < 1000 && !body.contains('\u{1b}'));
    assert_eq!(text(true), format!("{head}\r\n\r\n"));
}
