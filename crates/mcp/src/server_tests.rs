//! The server as a client sees it, line by line.

use std::fs;

use rmcp::ServiceExt;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

use super::*;

/// Sends messages one after the other; the answers, and what the audit log holds afterwards.
fn exchange(messages: &[Value]) -> (Vec<Value>, String) {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::with_log(Options::default(), Log::open(folder.path()).unwrap());
    server.state.outputs.keep("kept", "stdout", "run_code", "a long output".to_owned());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answers = runtime.block_on(async {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        tokio::spawn(async move { server.serve(theirs).await.unwrap().waiting().await });
        let (input, mut output) = tokio::io::split(ours);
        let mut lines = BufReader::new(input).lines();
        let mut answers = Vec::new();
        for message in messages {
            output.write_all(format!("{message}\n").as_bytes()).await.unwrap();
            if message.get("id").is_some() {
                let line = tokio::time::timeout(Duration::from_secs(20), lines.next_line()).await.unwrap();
                answers.push(serde_json::from_str(&line.unwrap().unwrap()).unwrap());
            }
        }
        answers
    });
    let files = fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path());
    (answers, files.filter_map(|path| fs::read_to_string(path).ok()).collect())
}

fn old_client(messages: &[Value]) -> (Vec<Value>, String) {
    let client = json!({"name": "old", "version": "1"});
    let hello = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
    let mut all = vec![
        json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}),
        json!({"jsonrpc": "2.0", "method": "notifications/initialized"}),
    ];
    all.extend_from_slice(messages);
    exchange(&all)
}

fn call(tool: &str, arguments: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}})
}

#[test]
fn an_old_client_is_told_who_we_are_and_what_we_offer() {
    let (answers, _) = old_client(&[json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})]);
    let hello = &answers[0]["result"];
    assert_eq!(
        (&hello["protocolVersion"], &hello["serverInfo"]["name"]),
        (&json!("2025-11-25"), &json!("bathysphere"))
    );
    assert!(hello["instructions"].as_str().unwrap().contains("run_code"));
    assert_eq!(answers[1]["result"]["tools"].as_array().unwrap().len(), 13);
}

#[test]
fn a_new_client_needs_no_handshake_and_learns_how_long_lists_last() {
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "new", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let ask = |method: &str| json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": {"_meta": meta}});
    let (answers, _) = exchange(&[ask("server/discover"), ask("tools/list")]);
    let versions = answers[0]["result"]["supportedVersions"].as_array().unwrap();
    assert!(versions.contains(&json!("2026-07-28")) && versions.contains(&json!("2025-11-25")));
    assert_eq!(answers[1]["result"]["cacheScope"], "private");
    assert!(answers[1]["result"]["ttlMs"].as_u64().is_some_and(|ttl| ttl > 0));
}

#[test]
fn wrong_arguments_are_an_answer_that_helps_and_are_written_down() {
    let (answers, log) =
        old_client(&[call("run_code", json!({"lang": "python", "env": {"KEY": "hunter2"}}))]);
    let result = &answers[1]["result"];
    let text = result["content"][0]["text"].as_str().unwrap();
    assert!(result["isError"] == true && text.contains("did you mean `language`?"), "{text}");
    assert!(text.contains("`code` is missing"), "{text}");
    assert!(log.contains("\"event\":\"tool_called\"") && log.contains("\"tool\":\"run_code\""), "{log}");
    assert!(log.contains("\"client\":\"old 1\"") && log.contains("\"outcome\":\"error\""), "{log}");
    assert!(!log.contains("hunter2"), "{log}");
}

#[test]
fn host_paths_are_refused_before_anything_is_made() {
    let (answers, log) = old_client(&[call("sandbox_create", json!({"mounts": ["/etc"]}))]);
    let result = &answers[1]["result"];
    let text = result["content"][0]["text"].as_str().unwrap();
    assert!(result["isError"] == true && text.contains("there is no argument \"mounts\""), "{text}");
    assert!(text.contains("nothing was done"), "{text}");
    assert!(log.contains("\"outcome\":\"error\""), "{log}");
}

#[test]
fn the_rest_of_a_long_output_is_read_by_a_tool() {
    let (answers, _) = old_client(&[
        call("read_output", json!({"output": "kept/stdout", "limit": 6})),
        call("read_output", json!({"output": "bathysphere://output/kept/stdout", "offset": "6"})),
        call("read_output", json!({"output": "gone/stdout"})),
    ]);
    let part = &answers[1]["result"];
    assert_eq!(
        part["structuredContent"],
        json!({"output": "a long", "total_bytes": 13, "next_offset": 6}),
        "{part}"
    );
    assert!(part["content"][0]["text"].as_str().unwrap().contains("offset 6"), "{part}");
    let rest = &answers[2]["result"]["content"][0]["text"];
    assert_eq!(rest, " output\n[end of the output]");
    let gone = &answers[3]["result"];
    assert!(gone["isError"] == true && gone["content"][0]["text"].as_str().unwrap().contains("gone/stdout"));
}

#[test]
fn an_unknown_tool_and_an_unknown_resource_are_protocol_errors() {
    let read = json!({"jsonrpc": "2.0", "id": 2, "method": "resources/read", "params": {"uri": "bathysphere://output/0/stdout"}});
    let (answers, _) = old_client(&[call("run_cod", json!({})), read]);
    assert_eq!(answers[1]["error"]["code"], -32602);
    assert!(answers[1]["error"]["message"].as_str().unwrap().contains("run_code"));
    assert_eq!(answers[2]["error"]["code"], -32002);
}

#[test]
fn unknown_tools_and_the_reading_of_resources_are_written_down() {
    let read =
        |uri: &str| json!({"jsonrpc": "2.0", "id": 2, "method": "resources/read", "params": {"uri": uri}});
    let name = format!("evil\n\u{1b}[2J{}", "x".repeat(200));
    let (answers, log) = old_client(&[
        call(&name, json!({"command": "hunter2"})),
        read("bathysphere://output/0/stdout"),
        read("https://me:hunter2@example.com"),
        read("bathysphere://output/kept/stdout"),
    ]);
    assert_eq!(answers[4]["result"]["contents"][0]["text"], "a long output");
    let events: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let called: Vec<_> = events.iter().filter(|event| event["event"] == "tool_called").collect();
    assert_eq!(called.len(), 4, "{log}");
    let tool = called[0]["tool"].as_str().unwrap();
    assert!(tool.starts_with("evil xxx") && tool.chars().count() <= 81, "{tool}");
    assert!(called[0]["arguments"].as_str().unwrap().contains("[7 bytes]"), "{log}");
    assert!(called[1..].iter().all(|event| event["tool"] == "resources/read"), "{log}");
    let outcomes: Vec<_> = called.iter().map(|event| event["outcome"].as_str().unwrap()).collect();
    assert_eq!(outcomes, ["refused", "refused", "refused", "ok"]);
    assert!(called.iter().all(|event| event["client"] == "old 1"), "{log}");
    assert!(called[3]["answer_bytes"].as_u64().is_some_and(|bytes| bytes > 13), "{log}");
    assert!(called[1]["arguments"].as_str().unwrap().contains("bathysphere://output/0/stdout"), "{log}");
    assert!(!log.contains("hunter2"), "{log}");
}
