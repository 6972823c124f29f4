//! What an agent may not have: the operator's limits, by name; and what the audit log keeps of what it asked and got.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout};
use std::time::{Duration, Instant};

use bathy_tests::kept::Home;
use bathy_tests::{limit, patience, patient_seconds};
use serde_json::{Value, json};

/// `bathy mcp`, spoken to by lines of JSON.
struct Agent {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    requests: u64,
}

impl Agent {
    /// An agent under an operator's settings.
    fn under(home: &Home, settings: &str) -> Self {
        let file = home.path().join("operator.toml");
        fs::write(&file, settings).unwrap();
        let mut command = home.command(&["mcp", "--toolsets", "contexts"]);
        let mut child =
            command.env("BATHYSPHERE_CONFIG", &file).stdin(std::process::Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut agent = Self { child, input, output, requests: 0 };
        let hello = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "limits", "version": "1"}});
        agent.ask("initialize", &hello);
        agent.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        agent
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.input.as_mut().unwrap(), "{message}").unwrap();
    }

    fn ask(&mut self, method: &str, parameters: &Value) -> Value {
        self.requests += 1;
        let id = self.requests;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": parameters}));
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the server hung up");
            let mut answer: Value = serde_json::from_str(&line).unwrap();
            if answer["id"] == id {
                assert!(answer.get("error").is_none(), "{method}: {answer:#}");
                return answer["result"].take();
            }
        }
    }

    fn call(&mut self, tool: &str, arguments: &Value) -> Value {
        self.ask("tools/call", &json!({"name": tool, "arguments": arguments}))
    }

    /// The message of a tool that has to refuse.
    #[track_caller]
    fn refusal(&mut self, tool: &str, arguments: &Value) -> String {
        let answer = self.call(tool, arguments);
        assert_eq!(answer["isError"], true, "{tool} {arguments}: {answer:#}");
        answer["content"][0]["text"].as_str().unwrap().to_owned()
    }

    /// The structured answer of a tool that has to succeed.
    #[track_caller]
    fn done(&mut self, tool: &str, arguments: &Value) -> Value {
        let mut answer = self.call(tool, arguments);
        assert_ne!(answer["isError"], true, "{tool} {arguments}: {answer:#}");
        answer["structuredContent"].take()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

#[test]
fn more_than_the_operator_allows_is_refused_with_the_limits_name() {
    let home = Home::new();
    let settings = "[ceiling]\nmemory = \"1G\"\n[mcp]\nmemory = \"256M\"\nmax_duration = \"10m\"\nimages = [\"default\"]\nsandboxes = 1\n";
    let mut agent = Agent::under(&home, settings);
    let rows = [
        (json!({"memory_mb": 512}), ["256M", "memory", "[mcp]"]),
        (json!({"lifetime_seconds": 86_000}), ["10m", "max_duration", "[mcp]"]),
        (json!({"image": "attacker/evil"}), ["attacker/evil", "images", "[mcp]"]),
        (json!({"mounts": ["/etc"]}), ["mounts", "no argument", "nothing was done"]),
        (json!({"labels": {"created-by": "me"}}), ["created-by", "mcp", "every sandbox"]),
    ];
    for (arguments, words) in rows {
        let refused = agent.refusal("sandbox_create", &arguments);
        assert!(words.iter().all(|word| refused.contains(word)), "{arguments}: {refused}");
    }
    let refused = agent.refusal("create_python_repl", &json!({"memory_mb": 512}));
    assert!(refused.contains("256M") && refused.contains("[mcp]"), "{refused}");
    assert_eq!(home.json(&["ls", "-a", "--json"]), json!([]), "a refusal made something");

    // What is within the limits is given; one more than there may be is not.
    let made = agent.done("sandbox_create", &json!({"memory_mb": 256, "lifetime_seconds": 600}));
    let spec = &home.inspect(made["sandbox_id"].as_str().unwrap())["spec"];
    assert_eq!((&spec["memory"], &spec["max_duration"]), (&json!(256 << 20), &json!(600)), "{spec:#}");
    let refused = agent.refusal("run_code", &json!({"language": "python", "code": "1"}));
    assert!(refused.contains("the operator allows 1") && refused.contains("sandbox_delete"), "{refused}");
}

#[test]
fn an_agent_narrows_its_network_and_never_widens_it() {
    let home = Home::new();
    let mut agent = Agent::under(&home, "");
    let rows = [
        (json!({"network": "open"}), ["open", "none, public, allow-list", "sandbox_create"]),
        (json!({"allow": ["private"]}), ["`allow private`", "`network` for agents", "[mcp]"]),
        (
            json!({"network": "public", "allow": ["host:80"]}),
            ["`allow host:80`", "`network` for agents", "[mcp]"],
        ),
        (json!({"allow": ["169.254.169.254"]}), ["169.254.169.254", "public addresses at most", "[mcp]"]),
        (json!({"allow": ["0.0.0.0/0"]}), ["0.0.0.0/0", "public addresses at most", "[mcp]"]),
        (json!({"network": "none", "allow": ["api.example"]}), ["api.example", "preset none", "allow-list"]),
        (json!({"allow": ["pubilc"]}), ["`allow`", "pubilc", "public"]),
    ];
    for (arguments, words) in rows {
        let refused = agent.refusal("sandbox_create", &arguments);
        assert!(words.iter().all(|word| refused.contains(word)), "{arguments}: {refused}");
    }
    let refused = agent.refusal("create_python_repl", &json!({"allow": ["private"]}));
    assert!(refused.contains("`allow private`") && refused.contains("[mcp]"), "{refused}");
    assert_eq!(home.json(&["ls", "-a", "--json"]), json!([]), "a refusal made something");

    let narrow = json!({"allow": ["*.example:443"], "deny": ["a.example"]});
    let made = agent.done("sandbox_create", &narrow);
    let id = made["sandbox_id"].as_str().unwrap().to_owned();
    let shown = home.json(&["policy", "show", &id, "--json"]);
    let own = json!({"preset": "allow-list", "rules": ["deny a.example", "allow *.example:443"]});
    assert_eq!(shown["policy"], own, "{shown:#}");
    assert_eq!(shown["ceilings"], json!([{"preset": "public", "rules": []}]), "{shown:#}");
    let none = agent.done("sandbox_create", &json!({"network": "none"}));
    let interfaces = json!({"sandbox_id": none["sandbox_id"], "command": "ls /sys/class/net"});
    assert_eq!(agent.done("run_command", &interfaces)["stdout"], "lo\n");
}

#[test]
fn what_agents_reach_is_the_operators_to_say() {
    let home = Home::new();
    let settings = "[mcp.network]\nrules = [\"allow api.example:443\"]\n";
    let mut agent = Agent::under(&home, settings);
    let made = agent.done("sandbox_create", &json!({}));
    assert!(made["notes"].to_string().contains("`network` in [mcp]"), "{made:#}");
    let id = made["sandbox_id"].as_str().unwrap();
    let shown = home.json(&["policy", "show", id, "--json"]);
    assert_eq!(shown["policy"]["preset"], "public", "{shown:#}");
    let bound = json!([{"preset": "allow-list", "rules": ["allow api.example:443"]}]);
    assert_eq!(shown["ceilings"], bound, "{shown:#}");
    let ask = "import socket\ntry:\n    socket.getaddrinfo('other.example', 443)\nexcept OSError:\n    print('denied')";
    let asked = agent.done("run_command", &json!({"sandbox_id": id, "argv": ["python3", "-c", ask]}));
    assert_eq!(asked["stdout"], "denied\n", "{asked:#}");
    let denied = until_logged(&home, id, "other.example");
    assert_eq!(denied["reason"], "operator: preset allow-list", "{denied:#}");
    assert!(denied.get("cure").is_none(), "no rule of the sandbox helps: {denied:#}");
}

/// The event of a sandbox's network about a name, which may take a moment to be written.
fn until_logged(home: &Home, sandbox: &str, name: &str) -> Value {
    let deadline = Instant::now() + patience(Duration::from_secs(5));
    loop {
        let log = home.json(&["net", "log", sandbox, "--json"]);
        if let Some(event) = log.as_array().unwrap().iter().find(|event| event["host"] == name) {
            return event.clone();
        }
        assert!(Instant::now() < deadline, "{log:#}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn what_is_not_there_or_not_right_is_explained() {
    let home = Home::new();
    let mut agent = Agent::under(&home, "");
    let made = agent.done("run_code", &json!({"language": "python", "code": "x = 1"}));
    let id = made["sandbox_id"].as_str().unwrap();
    let rows = [
        (
            "run_code",
            json!({"language": "python", "code": "1", "sandbox_id": id, "context_id": "nosuch"}),
            "nosuch",
        ),
        ("run_code", json!({"language": "python", "code": "1", "sandbox_id": "gone"}), "gone"),
        ("run_code", json!({"language": "cobol", "code": "1"}), "typescript"),
        ("run_code", json!({"language": "python"}), "code"),
        ("run_code", json!({"language": "python", "code": "1", "sandboxid": id}), "sandbox_id"),
        ("run_code", json!({"language": "python", "code": "#".repeat(9_000_000)}), "8388608"),
        ("read_file", json!({"sandbox_id": id, "path": "/nosuch"}), "No such file"),
        (
            "edit_file",
            json!({"sandbox_id": id, "path": "/etc/hostname", "old_text": "nosuch", "new_text": ""}),
            "does not occur",
        ),
        ("list_directory", json!({"sandbox_id": id, "path": "/etc/hostname"}), "folder"),
        ("run_python_in_repl", json!({"repl_id": "nosuch", "code": "1"}), "nosuch"),
        ("run_python_in_repl", json!({"repl_id": id, "code": "1"}), "run_code"),
    ];
    for (tool, arguments, word) in rows {
        let refused = agent.refusal(tool, &arguments);
        let shown: String = arguments.to_string().chars().take(200).collect();
        assert!(refused.contains(word), "{tool} {shown}: {refused}");
    }
    let answer = agent.done("run_code", &json!({"language": "python", "code": "x + 1", "sandbox_id": id}));
    assert_eq!(answer["results"][0]["data"]["text/plain"], "2");
}

#[test]
fn what_is_plainly_meant_is_done() {
    let home = Home::new();
    let mut agent = Agent::under(&home, "");
    let made = agent.done("run_code", &json!({"code": "x = 1"}));
    let id = made["sandbox_id"].as_str().unwrap();
    let answer = agent.done(
        "run_code",
        &json!({"language": "Py", "code": "x + 1", "sandbox_id": id, "timeout_seconds": "30"}),
    );
    assert_eq!(answer["results"][0]["data"]["text/plain"], "2", "{answer:#}");

    // A shell that fails is no failure of the tool, whichever tool it is.
    let failed = agent.done("run_code", &json!({"language": "sh", "code": "(exit 3)", "sandbox_id": id}));
    assert_eq!((&failed["exit_code"], &failed["ok"]), (&json!(3), &json!(false)), "{failed:#}");
    let failed = agent.done("run_command", &json!({"command": "exit 3", "sandbox_id": id}));
    assert_eq!(failed["exit_code"], 3, "{failed:#}");

    let html = agent.call(
        "run_code",
        &json!({"sandbox_id": id, "code": "from IPython.display import HTML\nHTML('<b>x</b>')"}),
    );
    let text = html["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("result:\n<b>x</b>\n"), "{text}");

    let info = agent.done("sandbox_info", &json!({"sandbox_id": id}));
    assert!(info["usage"]["memory_mb"].as_u64().is_some_and(|mib| mib < 10_000), "{info:#}");
    let listed = agent.done("sandbox_list", &json!({}));
    assert!(listed["sandboxes"][0].get("engine_reason").is_none(), "{listed:#}");
    for _ in 0..2 {
        agent.done("sandbox_delete", &json!({"sandbox_id": id}));
    }
    agent.refusal("sandbox_delete", &json!({"sandbox_id": "never-there"}));
}

#[test]
fn an_interpreter_that_code_has_broken_is_restarted() {
    let home = Home::new();
    let mut agent = Agent::under(&home, "");
    let breaking = "open('/tmp/kept', 'w').close()\nimport _ast\n_ast.Expression = None";
    let id = agent.done("run_code", &json!({"code": breaking}))["sandbox_id"].clone();
    let refused = agent.refusal("run_code", &json!({"sandbox_id": id, "code": "6 * 7"}));
    assert!(refused.contains("damaged its interpreter") && refused.contains("restart"), "{refused}");
    let code = "import os\n6 * 7, os.path.exists('/tmp/kept')";
    let answer = agent.done("run_code", &json!({"sandbox_id": id, "code": code, "restart": true}));
    assert_eq!(answer["results"][0]["data"]["text/plain"], "(42, True)", "{answer:#}");

    let repl = agent.done("create_python_repl", &json!({}))["repl_id"].clone();
    agent.done("run_python_in_repl", &json!({"repl_id": repl, "code": "import builtins\nx = 1"}));
    let patched = "builtins.__import__ = None\nimport json";
    let refused = agent.refusal("run_python_in_repl", &json!({"repl_id": repl, "code": patched}));
    assert!(refused.contains("__import__") && refused.contains("restart"), "{refused}");
    let fresh = json!({"repl_id": repl, "code": "import json\n'x' in globals()", "restart": true});
    let answer = agent.done("run_python_in_repl", &fresh);
    assert_eq!(answer["results"][0]["data"]["text/plain"], "False", "{answer:#}");
}

#[test]
fn a_repl_gets_no_more_time_by_being_used_again() {
    let home = Home::new();
    let mut agent = Agent::under(&home, &format!("[mcp]\nmax_duration = \"{}s\"\n", patient_seconds(4)));
    let repl = agent.done("create_python_repl", &json!({}))["repl_id"].clone();
    agent.done("run_python_in_repl", &json!({"repl_id": repl, "code": "x = 1"}));
    std::thread::sleep(limit(Duration::from_millis(4500)));
    let refused = agent.refusal("run_python_in_repl", &json!({"repl_id": repl, "code": "x"}));
    assert!(refused.contains("max_duration"), "{refused}");
    assert_eq!(home.json(&["ls", "-a", "--json"]), json!([]));
}

#[test]
fn an_edit_cannot_fill_the_hosts_memory() {
    let home = Home::new();
    let mut agent = Agent::under(&home, "");
    let id = agent.done("sandbox_create", &json!({}))["sandbox_id"].clone();
    let place = json!({"sandbox_id": id, "path": "/tmp/a"});
    let with = |more: Value| {
        let mut all = place.clone();
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    agent.done("write_file", &with(json!({"content": "a".repeat(100_000)})));
    let grow = with(json!({"old_text": "a", "new_text": "b".repeat(1_000_000), "replace_all": true}));
    let refused = agent.refusal("edit_file", &grow);
    assert!(refused.contains("100000 replacements") && refused.contains("nothing was changed"), "{refused}");
    assert_eq!(agent.done("read_file", &with(json!({"limit": 3})))["content"], "aaa");
}

#[test]
fn an_agent_has_only_its_own_sandboxes() {
    let home = Home::new();
    home.started("mine", &[]);
    let mut agent = Agent::under(&home, "");
    let refused =
        agent.refusal("run_code", &json!({"language": "python", "code": "1", "sandbox_id": "mine"}));
    assert!(refused.contains("mine"), "{refused}");
    assert_eq!(agent.done("sandbox_list", &json!({}))["sandboxes"], json!([]));
    agent.refusal("sandbox_delete", &json!({"sandbox_id": "mine"}));
    assert_eq!(home.status("mine"), "running");
}

#[test]
fn files_go_in_and_out_by_tools() {
    let home = Home::new();
    let mut agent = Agent::under(&home, "");
    let id = agent.done("sandbox_create", &json!({}))["sandbox_id"].clone();
    let path = "/home/user/new/folder/a.txt";
    agent.done("write_file", &json!({"sandbox_id": id, "path": path, "content": "one\ntwo\n"}));
    agent.done("edit_file", &json!({"sandbox_id": id, "path": path, "old_text": "two", "new_text": "zwei"}));
    let read = agent.done("read_file", &json!({"sandbox_id": id, "path": path}));
    assert_eq!(read["content"], "one\nzwei\n", "{read:#}");
    let listed = agent.done("list_directory", &json!({"sandbox_id": id, "path": "/home/user/new"}));
    assert_eq!(listed["entries"][0]["name"], "folder", "{listed:#}");
    let ran = agent.done("run_command", &json!({"sandbox_id": id, "command": format!("cat {path}; exit 3")}));
    assert_eq!((&ran["exit_code"], ran["stdout"].as_str()), (&json!(3), Some("one\nzwei\n")), "{ran:#}");
}

#[test]
fn what_an_agent_asks_and_gets_is_recorded() {
    let home = Home::new();
    let mut agent = Agent::under(&home, "");
    let secret = "a value that has to stay secret";
    let arguments = json!({"language": "python", "code": "6 * 7", "env": {"KEY": secret}});
    agent.done("run_code", &arguments);
    agent.refusal("sandbox_create", &json!({"labels": {"created-by": "me"}}));
    drop(agent);
    let events = home.json(&["events", "--json"]);
    let calls: Vec<&Value> =
        events.as_array().unwrap().iter().filter(|event| event["event"] == "tool_called").collect();
    let reported: Vec<(&str, &str)> = calls
        .iter()
        .map(|call| (call["tool"].as_str().unwrap(), call["outcome"].as_str().unwrap()))
        .collect();
    assert_eq!(reported, [("run_code", "ok"), ("sandbox_create", "refused")], "{calls:#?}");
    assert_eq!(calls[0]["client"], "limits 1");
    assert!(calls[0]["arguments"].as_str().unwrap().contains("6 * 7"));
    assert!(!events.to_string().contains(secret), "the value of a variable is in the log");
    assert!(calls[0]["answer_bytes"].as_u64() > Some(10));
    assert!(home.ok(&["audit", "verify"]).contains("events"));
}
