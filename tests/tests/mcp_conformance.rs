//! The public conformance suite of MCP against our server stack, with the suite's fixtures added (`mcp-fixtures`).

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use bathy_tests::kept::Home;
use bathy_tests::mcp::{Listening, node, programs, run_program};
use bathy_tests::repository;

const TOKEN: &str = "a-token-that-only-this-test-knows";
/// Seconds that a whole run of the suite may take. Alone it takes ten.
const PATIENCE: u32 = 280;

/// Scenarios of the extension for calls that go on in the background, which the server does not offer. The suite runs
/// them without counting them; `tasks-status-notifications` has no check that runs.
const TASKS: [&str; 10] = [
    "tasks-capability-negotiation",
    "tasks-dispatch-and-envelope",
    "tasks-lifecycle",
    "tasks-mrtr-composition",
    "tasks-mrtr-input",
    "tasks-request-headers",
    "tasks-request-state-removal",
    "tasks-required-task-error",
    "tasks-status-notifications",
    "tasks-wire-fields",
];

/// What every revision asks of a server.
const BOTH: [&str; 21] = [
    "completion-complete",
    "dns-rebinding-protection",
    "json-schema-2020-12",
    "prompts-get-embedded-resource",
    "prompts-get-simple",
    "prompts-get-with-args",
    "prompts-get-with-image",
    "prompts-list",
    "resources-list",
    "resources-read-binary",
    "resources-read-text",
    "resources-templates-read",
    "server-sse-multiple-streams",
    "tools-call-audio",
    "tools-call-embedded-resource",
    "tools-call-error",
    "tools-call-image",
    "tools-call-mixed-content",
    "tools-call-simple-text",
    "tools-call-with-progress",
    "tools-list",
];

const ONLY_2025_11_25: [&str; 12] = [
    "elicitation-sep1034-defaults",
    "elicitation-sep1330-enums",
    "logging-set-level",
    "ping",
    "resources-subscribe",
    "resources-unsubscribe",
    "server-initialize",
    "server-session-lifecycle",
    "server-sse-polling",
    "tools-call-elicitation",
    "tools-call-sampling",
    "tools-call-with-logging",
];

const ONLY_2026_07_28: [&str; 19] = [
    "caching",
    "http-custom-header-server-validation",
    "http-header-validation",
    "input-required-result-basic-elicitation",
    "input-required-result-basic-list-roots",
    "input-required-result-basic-sampling",
    "input-required-result-capability-check",
    "input-required-result-ignore-extra-params",
    "input-required-result-missing-input-response",
    "input-required-result-multi-round",
    "input-required-result-multiple-input-requests",
    "input-required-result-non-tool-request",
    "input-required-result-request-state",
    "input-required-result-result-type",
    "input-required-result-tampered-state",
    "input-required-result-unsupported-methods",
    "input-required-result-validate-input",
    "sep-2164-resource-not-found",
    "server-stateless",
];

/// Checks of one scenario that passed and that failed.
type Scenarios = BTreeMap<String, (usize, usize)>;

/// Runs the suite for one revision.
fn run_suite(revision: &str) -> (Scenarios, String) {
    let programs = programs();
    let home = Home::new();
    let mut fixtures = Command::new(env!("CARGO_BIN_EXE_mcp-fixtures"));
    fixtures
        .env("XDG_STATE_HOME", home.path())
        .env("BATHY_MCP_TOKEN", TOKEN)
        .env_remove("BATHYSPHERE_CONFIG");
    let server = Listening::start(fixtures.current_dir(home.path()));
    let suite = programs.join("node_modules/@modelcontextprotocol/conformance/dist/index.js");
    let token = repository().join("tests/mcp/with_token.mjs");
    let (token, suite) = (token.to_str().unwrap(), suite.to_str().unwrap());
    let asked = ["server", "--url", &server.url, "--requirements", revision, "--timeout", "60000"];
    let arguments = [&["--import", token, suite][..], &asked].concat();
    let ran = run_program(&home, PATIENCE, &node(&programs), &arguments, TOKEN);
    let output = format!("{}\n{}", ran.stdout, ran.stderr);
    (ran.stdout.lines().filter_map(scenario).collect(), output)
}

/// A line of the suite's summary, such as `✓ ping: 2 passed, 0 failed`.
fn scenario(line: &str) -> Option<(String, (usize, usize))> {
    let (name, counts) = line.strip_prefix("✓ ").or_else(|| line.strip_prefix("✗ "))?.split_once(": ")?;
    let (passed, failed) = counts.split_once(" passed, ")?;
    let failed = failed.split_whitespace().next()?;
    Some((name.to_owned(), (passed.parse().ok()?, failed.parse().ok()?)))
}

/// Runs the suite and expects exactly these scenarios to pass: one that begins to fail is found, and so is one that is
/// new or gone.
#[track_caller]
fn expect(revision: &str, passing: &[&str], others: &[&str]) {
    let (scenarios, output) = run_suite(revision);
    let names = |wanted: fn(&(usize, usize)) -> bool| -> BTreeSet<&str> {
        scenarios.iter().filter(|(_, counts)| wanted(counts)).map(|(name, _)| name.as_str()).collect()
    };
    let passed = names(|(passed, failed)| *passed > 0 && *failed == 0);
    let rest = names(|(passed, failed)| *passed == 0 || *failed > 0);
    assert_eq!(passed, passing.iter().copied().collect(), "{revision}: passing scenarios\n{output}");
    assert_eq!(rest, others.iter().copied().collect(), "{revision}: scenarios that do not pass\n{output}");
}

#[test]
fn conforms_to_2025_11_25() {
    let passing = [&BOTH[..], &ONLY_2025_11_25].concat();
    assert_eq!(passing.len(), 33);
    expect("2025-11-25", &passing, &[]);
}

#[test]
fn conforms_to_2026_07_28() {
    let passing = [&BOTH[..], &ONLY_2026_07_28].concat();
    assert_eq!(passing.len(), 40);
    expect("2026-07-28", &passing, &TASKS);
}
