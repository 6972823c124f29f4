//! The guard and the limits of the endpoint, as a client meets them.

use std::time::Instant;

use rmcp::model::ServerConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;

const SECRET: &str = "0123456789abcdef";
const HELLO: &str = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}"#;

#[derive(Clone)]
struct Silent;

impl ServerHandler for Silent {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::default()
    }
}

fn endpoint() -> Endpoint<Silent> {
    let guard = Guard::new(Token::new(SECRET), "127.0.0.1:8080".parse().unwrap())
        .allow_hosts(["box.example:8080".to_owned()])
        .allow_origins(["https://App.example/".to_owned()]);
    Endpoint::new(Silent, guard)
}

/// The status of a request with these headers, and the challenge of the answer.
fn status(path: &str, headers: &[(&str, &str)]) -> (u16, Option<String>) {
    let mut request = Request::builder().method(Method::POST).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .body(Full::new(Bytes::from_static(HELLO.as_bytes())))
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let response = runtime.block_on(endpoint().answer(request, || ()));
    let challenge = response.headers().get(WWW_AUTHENTICATE).map(|value| value.to_str().unwrap().to_owned());
    (response.status().as_u16(), challenge)
}

fn with(extra: &[(&str, &str)]) -> u16 {
    let bearer = format!("Bearer {SECRET}");
    let mut headers = vec![("authorization", bearer.as_str())];
    headers.extend(extra);
    status("/mcp", &headers).0
}

#[test]
fn c3_the_token_is_asked_for() {
    let host = ("host", "127.0.0.1:8080");
    assert_eq!(with(&[host]), 200);
    let (code, challenge) = status("/mcp", &[host]);
    assert_eq!((code, challenge.as_deref()), (401, Some("Bearer realm=\"bathysphere\"")));
    for wrong in
        ["Bearer wrong", "Bearer ", "Basic 0123456789abcdef", "0123456789abcdef", "Bearer 0123456789abcdeg"]
    {
        assert_eq!(status("/mcp", &[host, ("authorization", wrong)]).0, 401, "{wrong}");
    }
    assert_eq!(status("/mcp", &[host, ("authorization", "bearer 0123456789abcdef")]).0, 200);
    // A header that occurs twice does not count.
    let twice = [host, ("authorization", "Bearer 0123456789abcdef"), ("authorization", "Bearer x")];
    assert_eq!(status("/mcp", &twice).0, 401);
    let (code, challenge) = status("/mcp", &[host, ("authorization", "Bearer wrong")]);
    assert!(code == 401 && challenge.unwrap().contains("invalid_token"));
}

#[test]
fn c3_only_hosts_that_are_meant_pass() {
    for good in ["localhost", "LOCALHOST:9", "127.0.0.1", "[::1]:8080", "box.example:8080"] {
        assert_eq!(with(&[("host", good)]), 200, "{good}");
    }
    for evil in [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8080",
        "box.example:81",
        "box.example",
        "",
        "192.168.1.2",
        "[::1].evil.example",
    ] {
        assert_eq!(with(&[("host", evil)]), 403, "{evil}");
    }
    assert_eq!(with(&[]), 403, "without any");
    assert_eq!(with(&[("host", "localhost"), ("host", "evil.example")]), 403);
}

#[test]
fn c3_a_target_in_absolute_form_is_a_host_too() {
    let bearer = format!("Bearer {SECRET}");
    let authorization = ("authorization", bearer.as_str());
    let local = ("host", "localhost");
    for good in ["http://localhost:8080/mcp", "http://BOX.example:8080/mcp"] {
        assert_eq!(status(good, &[authorization, local]).0, 200, "{good}");
        assert_eq!(status(good, &[authorization]).0, 200, "{good} without a header");
        assert_eq!(status(good, &[authorization, ("host", "evil.example")]).0, 403, "{good}");
    }
    for evil in ["http://evil.example/mcp", "http://localhost@evil.example/mcp", "http://box.example:81/mcp"]
    {
        assert_eq!(status(evil, &[authorization, local]).0, 403, "{evil}");
        assert_eq!(status(evil, &[authorization]).0, 403, "{evil} without a header");
    }
}

#[test]
fn c3_only_pages_that_are_meant_pass() {
    let host = ("host", "127.0.0.1:8080");
    for good in ["http://localhost:5173", "https://127.0.0.1", "http://[::1]:3000", "https://app.example"] {
        assert_eq!(with(&[host, ("origin", good)]), 200, "{good}");
    }
    for evil in [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "http://localhost@evil.example",
        "http://127.0.0.1:80@evil.example",
        "file://localhost",
        "localhost",
        "https://app.example.evil",
        "https://app.example:444",
        "",
    ] {
        assert_eq!(with(&[host, ("origin", evil)]), 403, "{evil}");
    }
}

#[test]
fn refusals_come_before_the_token_and_other_paths_are_none() {
    assert_eq!(status("/mcp", &[("host", "evil.example")]).0, 403);
    assert_eq!(status("/", &[("host", "localhost")]).0, 404);
    assert_eq!(status("/mcp/../secret", &[("host", "localhost")]).0, 404);
}

#[test]
fn a_request_that_is_too_large_is_refused() {
    assert_eq!(status_of_body(vec![b' '; MAX_BODY + 1]), 413);
}

#[test]
fn c3_a_request_of_many_small_values_is_refused_before_it_is_parsed() {
    let call = |arguments: &str| {
        let text = format!(
            r#"{{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {{"name": "x", "arguments": {arguments}}}}}"#
        );
        status_of_body(text.into_bytes())
    };
    assert_eq!(call(&format!("{{\"a\": [{}0]}}", "0,".repeat(6 << 20))), 413);
    assert_ne!(call(&format!("{{\"a\": \"{}\"}}", "0,".repeat(6 << 20))), 413);
}

fn status_of_body(body: Vec<u8>) -> u16 {
    let request = Request::builder()
        .method(Method::POST)
        .uri("/mcp")
        .header("host", "localhost")
        .header("authorization", format!("Bearer {SECRET}"))
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(endpoint().answer(request, || ())).status().as_u16()
}

#[test]
fn other_machines_reach_it_only_if_that_is_meant() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(listen("0.0.0.0:0".parse().unwrap(), false)).unwrap_err().to_string();
    assert!(error.contains("--allow-remote"), "{error}");
    assert!(runtime.block_on(listen("127.0.0.1:0".parse().unwrap(), false)).is_ok());
}

/// The text of a request that begins a session.
fn hello(token: &str) -> String {
    format!(
        "POST /mcp HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\
         content-type: application/json\r\naccept: application/json, text/event-stream\r\n\
         content-length: {}\r\n\r\n{HELLO}",
        HELLO.len()
    )
}

#[tokio::test]
async fn c3_silent_strangers_keep_nobody_waiting_and_are_not_kept_for_long() {
    let listener = listen("127.0.0.1:0".parse().unwrap(), false).await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(serve(listener, endpoint()));
    let began = Instant::now();
    let mut silent = Vec::new();
    for _ in 0..MAX_CONNECTIONS + 50 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let mut client = TcpStream::connect(address).await.unwrap();
    let asked = Instant::now();
    client.write_all(hello(SECRET).as_bytes()).await.unwrap();
    let mut first = [0; 12];
    client.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    assert!(asked.elapsed() < AUTHENTICATION / 2, "{:?}", asked.elapsed());
    // The last one, whose slot no other connection needs, is closed too.
    let mut rest = Vec::new();
    let last = silent.last_mut().unwrap();
    // The server may also reset the connection.
    let _ = tokio::time::timeout(HEADERS, last.read_to_end(&mut rest)).await.unwrap();
    assert!(rest.is_empty() && began.elapsed() < HEADERS / 2, "{:?}", began.elapsed());
    serving.abort();
}

#[tokio::test]
async fn sessions_are_no_more_than_there_is_room_for() {
    let endpoint = endpoint();
    let ask = |session: Option<&str>| {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri("/mcp")
            .header("host", "localhost")
            .header("authorization", format!("Bearer {SECRET}"))
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream");
        if let Some(session) = session {
            request = request.header(SESSION_ID, session).header("mcp-protocol-version", "2025-11-25");
        }
        let text = if session.is_some() {
            r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#
        } else {
            HELLO
        };
        request.body(Full::new(Bytes::from_static(text.as_bytes()))).unwrap()
    };
    let mut ids = Vec::new();
    for _ in 0..MAX_SESSIONS {
        let response = endpoint.answer(ask(None), || ()).await;
        ids.push(response.headers().get(SESSION_ID).unwrap().to_str().unwrap().to_owned());
    }
    // The first is used again, so the second is evicted.
    assert_eq!(endpoint.answer(ask(Some(&ids[0])), || ()).await.status(), StatusCode::ACCEPTED);
    assert_eq!(endpoint.answer(ask(None), || ()).await.status(), StatusCode::OK);
    assert_eq!(endpoint.answer(ask(Some(&ids[1])), || ()).await.status(), StatusCode::NOT_FOUND);
    assert_eq!(endpoint.answer(ask(Some(&ids[0])), || ()).await.status(), StatusCode::ACCEPTED);
    assert_eq!(endpoint.answer(ask(Some(&ids[2])), || ()).await.status(), StatusCode::ACCEPTED);
}

#[tokio::test]
async fn the_end_of_a_session_is_answered_as_clients_expect() {
    let endpoint = endpoint();
    let ask = |method: Method, session: Option<&str>| {
        let mut request = Request::builder()
            .method(method)
            .uri("/mcp")
            .header("host", "localhost")
            .header("authorization", format!("Bearer {SECRET}"))
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream");
        if let Some(session) = session {
            request = request.header(SESSION_ID, session).header("mcp-protocol-version", "2025-11-25");
        }
        request.body(Full::new(Bytes::from_static(HELLO.as_bytes()))).unwrap()
    };
    let begun = endpoint.answer(ask(Method::POST, None), || ()).await;
    let id = begun.headers().get(SESSION_ID).unwrap().to_str().unwrap().to_owned();
    let ended = endpoint.answer(ask(Method::DELETE, Some(&id)), || ()).await;
    assert_eq!(ended.status(), StatusCode::NO_CONTENT);
    assert_eq!(endpoint.answer(ask(Method::POST, Some(&id)), || ()).await.status(), StatusCode::NOT_FOUND);
}
