//! A sandbox in a world, and the probe that runs in it.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::World;
use crate::{Ran, finish, patience, promptly, slowness};
use serde_json::Value;

/// The probe that runs in the sandbox.
pub const PROBE: &str = include_str!("probe.py");
/// The gateway's address in the guest.
pub const GATEWAY: &str = "192.0.0.1";
/// How long a denial may take.
pub const AT_ONCE: Duration = Duration::from_secs(1);

/// For [`Guest::try_with`]: a time limit for rows that depend on a resolver.
pub const PATIENT: &str = "SECONDS = 20 * SLOWNESS";

/// The probe, scaled to the speed of this machine, with more Python before its rows.
pub fn probe(more: &str) -> String {
    PROBE.replacen("SLOWNESS = 1", &format!("SLOWNESS = {}", slowness()), 1).replacen(
        "if __name__",
        &format!("{more}\n\nif __name__"),
        1,
    )
}

pub struct Guest<'world> {
    pub world: &'world World,
    pub name: &'static str,
}

impl<'world> Guest<'world> {
    /// Creates and starts a sandbox.
    #[track_caller]
    pub fn start(world: &'world World, name: &'static str, options: &[&str]) -> Self {
        world.ok(&[&["create", "--name", name], options].concat());
        world.ok(&["start", name]);
        Self { world, name }
    }

    /// Runs a command as root.
    pub fn run(&self, command: &[&str]) -> Ran {
        self.world.bathy(&[&["exec", "-u", "root", self.name, "--"], command].concat())
    }

    /// Runs a command as the ordinary user, which has to succeed, and returns its output.
    #[track_caller]
    pub fn user(&self, command: &[&str]) -> String {
        self.world.ok(&[&["exec", self.name, "--"], command].concat())
    }

    /// Runs rows of the probe as root, with more Python before them, and returns their outcomes.
    #[track_caller]
    pub fn try_with(&self, more: &str, rows: &[Value]) -> Vec<Outcome> {
        let rows_text = Value::from(rows.to_vec()).to_string();
        let ran = self.run(&["python3", "-c", &probe(more), &rows_text]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let results: Vec<_> =
            ran.stdout.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
        assert_eq!(results.len(), rows.len(), "{ran:?}");
        rows.iter().zip(results).map(|(row, result)| Outcome { row: row.clone(), result }).collect()
    }

    /// As [`Guest::try_with`], without more Python.
    #[track_caller]
    pub fn try_all(&self, rows: &[Value]) -> Vec<Outcome> {
        self.try_with("", rows)
    }

    /// As [`Guest::try_all`], with one row.
    #[track_caller]
    pub fn try_one(&self, row: Value) -> Outcome {
        self.try_all(&[row]).remove(0)
    }

    /// Changes the policy with `bathy policy VERB`, and these arguments after the sandbox's name.
    #[track_caller]
    pub fn policy(&self, verb: &str, rest: &[&str]) -> String {
        self.world.ok(&[&["policy", verb, self.name], rest].concat())
    }

    /// The network events so far.
    #[track_caller]
    pub fn net_log(&self) -> Vec<Value> {
        let text = self.world.ok(&["net", "log", self.name, "--json"]);
        serde_json::from_str(&text).expect("a JSON document")
    }

    /// All events of one kind so far.
    #[track_caller]
    pub fn events(&self, kind: &str) -> Vec<Value> {
        let text = self.world.ok(&["events", "--json", "--sandbox", self.name]);
        let events: Vec<Value> = serde_json::from_str(&text).expect("a JSON document");
        events.into_iter().filter(|event| event["event"] == kind).collect()
    }

    /// Waits for a network event.
    #[track_caller]
    pub fn until_event(&self, what: &str, is_it: impl Fn(&Value) -> bool) {
        let deadline = Instant::now() + patience(Duration::from_secs(4));
        loop {
            let log = self.net_log();
            if log.iter().any(&is_it) {
                return;
            }
            assert!(Instant::now() < deadline, "no event of {what} in {log:#?}");
            sleep(Duration::from_millis(50));
        }
    }

    /// Asserts that ordinary traffic still works.
    #[track_caller]
    pub fn still_works(&self) {
        let row = serde_json::json!(["curl", "http://site.example/still"]);
        self.try_with(PATIENT, &[row])[0].is("status 200");
    }
}

/// The outcome of a row.
#[derive(Debug)]
pub struct Outcome {
    pub row: Value,
    /// What the probe printed.
    pub result: Value,
}

impl Outcome {
    pub fn word(&self) -> &str {
        self.result["outcome"].as_str().unwrap_or_default()
    }

    /// The data that was received.
    pub fn heard(&self) -> &str {
        self.result["heard"].as_str().unwrap_or_default()
    }

    /// Asserts that the outcome is this word.
    #[track_caller]
    pub fn is(&self, word: &str) -> &Self {
        assert_eq!(self.word(), word, "{self:?}");
        self
    }

    /// Whether it was denied, in any of the possible ways, without a delay.
    pub fn was_denied(&self) -> bool {
        self.tells_denial() && self.took() <= promptly(AT_ONCE)
    }

    fn tells_denial(&self) -> bool {
        let explained = self.heard().contains("HTTP/1.1 403 Forbidden") || self.word() == "status 403";
        let reported =
            ["refused", "unreachable", "reset", "alert", "unresolved", "code 5"].contains(&self.word());
        reported || explained
    }

    /// Asserts that it was denied, as [`Outcome::was_denied`] checks.
    #[track_caller]
    pub fn is_denied(&self) -> &Self {
        assert!(self.was_denied(), "{self:?}");
        self
    }

    /// How long it took.
    pub fn took(&self) -> Duration {
        Duration::from_millis(self.result["ms"].as_u64().unwrap_or(u64::MAX))
    }

    /// Asserts that it did not take longer.
    #[track_caller]
    pub fn took_at_most(&self, time: Duration) -> &Self {
        assert!(self.took() <= promptly(time), "{self:?}");
        self
    }

    /// Asserts that the detail contains this.
    #[track_caller]
    pub fn says(&self, text: &str) -> &Self {
        assert!(self.result.to_string().contains(text), "no {text:?} in {self:#?}");
        self
    }
}

/// Runs a command on the world's host.
pub fn on_host(world: &World, program: &str, arguments: &[&str]) -> Ran {
    finish(world.command(program).args(arguments), b"")
}
