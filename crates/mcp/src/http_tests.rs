//! Who may speak, tried on the endpoint as a client would.

use http::Method;
use rmcp::model::ServerConfig;

use super::*;

const SECRET: &str = "0123456789abcdef";

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

/// The status of a request with these headers, and what it asks for.
fn status(path: &str, headers: &[(&str, &str)]) -> (u16, Option<String>) {
    let mut request = Request::builder().method(Method::POST).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}"#;
    let request = request
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .body(Full::new(Bytes::from_static(body.as_bytes())))
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let response = runtime.block_on(endpoint().answer(request));
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
    // Two answers to one question are none.
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
    let bearer = format!("Bearer {SECRET}");
    let request = Request::builder()
        .method(Method::POST)
        .uri("/mcp")
        .header("host", "localhost")
        .header("authorization", bearer)
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .body(Full::new(Bytes::from(vec![b' '; MAX_BODY + 1])))
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    assert_eq!(runtime.block_on(endpoint().answer(request)).status().as_u16(), 413);
}

#[test]
fn other_machines_reach_it_only_if_that_is_meant() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(listen("0.0.0.0:0".parse().unwrap(), false)).unwrap_err().to_string();
    assert!(error.contains("--allow-remote"), "{error}");
    assert!(runtime.block_on(listen("127.0.0.1:0".parse().unwrap(), false)).is_ok());
}
