//! `bathy net log`: allowed and denied connections.

use std::error::Error;

use bathy_protocol::time::iso;
use serde_json::{Map, Value};

use crate::commands::events::{self, Selection};
use crate::ui::{escape, time};

/// What can be inspected.
#[derive(clap::Subcommand)]
pub enum Verb {
    /// Print allowed and denied connections: by which rule, how many bytes, for how long.
    Log(LogArgs),
}

/// Arguments of `bathy net log`.
#[derive(clap::Args)]
pub struct LogArgs {
    /// Only events of this sandbox, which may have been removed: its name or id.
    name: Option<String>,
    /// Follow new events.
    #[arg(short, long)]
    follow: bool,
    /// Only events since this time: an age such as 10m, a date, or seconds since 1970.
    #[arg(long, value_name = "TIME", value_parser = time::parse_since)]
    since: Option<time::Since>,
    /// Print as JSON: one array, or with --follow one event per line.
    #[arg(long)]
    json: bool,
}

/// The kinds of network events.
const KINDS: [&str; 8] = [
    "net_allowed",
    "net_denied",
    "net_closed",
    "name_resolved",
    "name_unresolved",
    "net_dropped",
    "gateway_lost",
    "policy_changed",
];

pub fn run(verb: &Verb) -> Result<u8, Box<dyn Error>> {
    let Verb::Log(args) = verb;
    events::print(&Selection {
        sandbox: args.name.as_deref(),
        follow: args.follow,
        since: args.since,
        json: args.json,
        wanted: is_of_network,
        // Lines of a single sandbox do not repeat its name.
        sentence: if args.name.is_some() { sentence } else { sentence_with_sandbox },
    })
}

fn is_of_network(event: &Map<String, Value>) -> bool {
    let kind = event.get("event").and_then(Value::as_str).unwrap_or_default();
    // Only the gateway's limits reject connections.
    KINDS.contains(&kind) || (kind == "limit_hit" && event.contains_key("turned_away"))
}

/// An event as one line: time, kind, peer, rule, bytes.
fn sentence(event: &Map<String, Value>) -> String {
    escape::word(&format!("{}{}", date(event), description(event)))
}

/// As [`sentence`], with the sandbox.
fn sentence_with_sandbox(event: &Map<String, Value>) -> String {
    escape::word(&format!("{} {}{}", date(event), sandbox(event), description(event)))
}

fn date(event: &Map<String, Value>) -> String {
    iso(event.get("time_unix_ns").and_then(Value::as_u64).unwrap_or_default())
}

/// As [`sentence`], without the time: for a client that has just seen it happen.
pub fn without_time(event: &Map<String, Value>) -> String {
    escape::word(description(event).trim_start())
}

/// What happened, without time and sandbox, after a space.
fn description(event: &Map<String, Value>) -> String {
    let fields = Fields(event);
    let (text, number) = (|key| fields.text(key), |key| fields.number(key));
    match text("event") {
        "net_allowed" => format!(" allowed {} by {}", fields.peer(), text("rule")),
        "net_denied" => {
            let times = match number("count") {
                0 | 1 => String::new(),
                count => format!(" ({count} times)"),
            };
            format!(" denied {} by {}{times}{}", fields.peer(), text("rule"), fields.hint())
        }
        "net_closed" => {
            let bytes = match event.get("sent") {
                Some(_) => format!("{} bytes sent, {} received", number("sent"), number("received")),
                None => "bytes unknown".to_owned(),
            };
            format!(" closed {} after {} ms, {bytes}: {}", fields.peer(), number("took_ms"), text("reason"))
        }
        "name_resolved" => {
            let removed = match fields.list("removed", " ").as_str() {
                "" => String::new(),
                removed => format!("; kept back: {removed}"),
            };
            format!(
                " resolved {} {} to {}{removed}",
                text("host"),
                text("kind"),
                fields.list("addresses", " ")
            )
        }
        "name_unresolved" => {
            let how = if event.get("denied") == Some(&Value::Bool(true)) { "denied" } else { "unresolved" };
            match text("host") {
                "" => format!(" {how} a DNS query: {}", text("reason")),
                host => format!(" {how} name {host} {}: {}{}", text("kind"), text("reason"), fields.hint()),
            }
        }
        "limit_hit" => format!(" limited: {}: {}", text("limit"), text("detail")),
        "net_dropped" => format!(" dropped {} frames: {}", number("count"), text("reason")),
        "gateway_lost" if event.get("restarted") == Some(&Value::Bool(true)) => " gateway is back".to_owned(),
        "gateway_lost" => format!(" gateway failed: {}", text("reason")),
        _ => match fields.list("rules", ", ").as_str() {
            "" => format!(" policy is {}", text("preset")),
            rules => format!(" policy is {rules}, otherwise {}", text("preset")),
        },
    }
}

/// The fields of an event; one that it does not have is empty or zero.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn text(&self, key: &str) -> &'a str {
        self.0.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    fn number(&self, key: &str) -> u64 {
        self.0.get(key).and_then(Value::as_u64).unwrap_or_default()
    }

    fn list(&self, key: &str, between: &str) -> String {
        let all = self.0.get(key).and_then(Value::as_array).into_iter().flatten();
        all.filter_map(Value::as_str).collect::<Vec<_>>().join(between)
    }

    /// The protocol and the other end of a connection.
    fn peer(&self) -> String {
        let (arrow, at) = if self.text("direction") == "in" { ("from", " at port ") } else { ("to", ":") };
        let host = match self.text("host") {
            "" => String::new(),
            host => format!("{host} "),
        };
        let address = self.text("address");
        let address = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
        let port = match self.number("port") {
            0 => String::new(),
            port => format!("{at}{port}"),
        };
        format!("{} {arrow} {host}{address}{port}", self.text("protocol"))
    }

    /// The option or command that would allow what was denied, if a rule can.
    fn hint(&self) -> String {
        match self.text("cure") {
            "" => String::new(),
            // An ephemeral sandbox no longer exists: the option is for the next one.
            target if !is_persistent(self.0) => {
                // The first rule that matches decides, so the new one has to precede the rule that denied it.
                let order = if by_rule(self.0) { ", before the other rules" } else { "" };
                format!("; to allow it: --allow {target}{order}")
            }
            target => format!("; to allow it: bathy policy allow {} {target}", sandbox(self.0)),
        }
    }
}

/// Whether a rule denied it, rather than the preset.
fn by_rule(event: &Map<String, Value>) -> bool {
    let text = |key: &str| event.get(key).and_then(Value::as_str);
    text("rule").or_else(|| text("reason")).is_some_and(|by| by.starts_with("deny "))
}

/// Whether the sandbox is persistent: events of ephemeral ones are recorded by their command.
fn is_persistent(event: &Map<String, Value>) -> bool {
    let program = event.get("actor").and_then(|actor| actor.get("program")).and_then(Value::as_str);
    !matches!(program, Some("bathy run" | "bathy code"))
}

fn sandbox(event: &Map<String, Value>) -> &str {
    let text = |key: &str| event.get(key).and_then(Value::as_str);
    text("name").or_else(|| text("sandbox")).unwrap_or("NAME")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_denial_has_its_rule_and_a_hint() {
        let event = json!({
            "time_unix_ns": 0, "event": "net_denied", "sandbox": "abc", "name": "web", "protocol": "tcp",
            "direction": "out", "address": "10.0.0.5", "port": 22, "rule": "preset public", "cure": "tcp://10.0.0.5:22",
            "count": 3,
        });
        assert_eq!(
            sentence(event.as_object().unwrap()),
            "1970-01-01T00:00:00.000Z denied tcp to 10.0.0.5:22 by preset public (3 times); to allow it: bathy policy allow web tcp://10.0.0.5:22"
        );
    }

    #[test]
    fn ephemeral_sandboxes_get_the_option_and_lines_of_several_have_names() {
        let event = json!({
            "time_unix_ns": 0, "event": "net_denied", "sandbox": "abc", "protocol": "tcp", "direction": "out",
            "address": "10.0.0.5", "port": 22, "rule": "preset public", "cure": "tcp://10.0.0.5:22",
            "actor": {"program": "bathy run"},
        });
        assert_eq!(
            sentence_with_sandbox(event.as_object().unwrap()),
            "1970-01-01T00:00:00.000Z abc denied tcp to 10.0.0.5:22 by preset public; to allow it: --allow tcp://10.0.0.5:22"
        );
    }

    #[test]
    fn a_hint_inserts_its_rule_before_the_one_that_denies() {
        let mut event = json!({
            "event": "net_denied", "protocol": "tcp", "direction": "out", "address": "10.0.0.5", "port": 22,
            "rule": "deny private", "cure": "tcp://10.0.0.5:22", "actor": {"program": "bathy run"},
        });
        let event = event.as_object_mut().unwrap();
        assert!(
            without_time(event).ends_with("to allow it: --allow tcp://10.0.0.5:22, before the other rules")
        );
        // `bathy policy allow` puts it there by itself.
        event.remove("actor");
        event.insert("name".to_owned(), json!("web"));
        assert!(without_time(event).ends_with("to allow it: bathy policy allow web tcp://10.0.0.5:22"));
    }

    #[test]
    fn a_denied_name_and_a_limit_are_described() {
        let name = json!({
            "time_unix_ns": 0, "event": "name_unresolved", "name": "web", "host": "a.example", "kind": "A",
            "reason": "preset allow-list", "denied": true, "cure": "a.example",
        });
        let line = sentence(name.as_object().unwrap());
        assert!(
            line.ends_with(
                " denied name a.example A: preset allow-list; to allow it: bathy policy allow web a.example"
            ),
            "{line}"
        );
        let mut limit = json!({
            "time_unix_ns": 0, "event": "limit_hit", "limit": "connections at once", "detail": "7 rejected",
            "turned_away": 7,
        });
        let limit = limit.as_object_mut().unwrap();
        assert!(is_of_network(limit));
        assert!(sentence(limit).ends_with(" limited: connections at once: 7 rejected"));
        limit.remove("turned_away");
        assert!(!is_of_network(limit), "the sandbox's time, say");
    }

    #[test]
    fn c1_names_of_a_guest_stay_in_their_line() {
        let event = json!({
            "time_unix_ns": 0, "event": "name_unresolved", "host": "a\n\u{1b}[2J", "kind": "A", "reason": "x", "denied": true,
        });
        let line = sentence(event.as_object().unwrap());
        assert!(!line.contains('\n') && !line.contains('\u{1b}'), "{line:?}");
    }
}
