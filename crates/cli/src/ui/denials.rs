//! Connections that an ephemeral sandbox was denied. They are printed at its end, because users do not look into its log first.

use std::sync::{Arc, Mutex, PoisonError};

use bathy_audit::{Event, What};
use serde_json::Value;

use crate::commands::net;

/// How many denials are printed one by one.
const MOST: usize = 3;

/// The first denials, and whether there were more: a guest can cause any number of them.
#[derive(Clone, Debug, Default)]
pub struct Denials(Arc<Mutex<Found>>);

#[derive(Debug, Default)]
struct Found {
    /// The option that would allow it, or the sentence itself; and the sentence.
    first: Vec<(String, String)>,
    others: bool,
}

impl Denials {
    /// Remembers an event if it is a denial.
    pub fn record(&self, event: &Event) {
        let is_denial =
            matches!(&event.what, What::NetDenied { .. } | What::NameUnresolved { denied: true, .. });
        if !is_denial {
            return;
        }
        let Ok(Value::Object(event)) = serde_json::to_value(event) else { return };
        let sentence = net::without_time(&event);
        let hint = event.get("cure").and_then(Value::as_str).unwrap_or(&sentence).to_owned();
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if found.first.iter().any(|(same, _)| *same == hint) {
            return;
        }
        if found.first.len() < MOST {
            found.first.push((hint, sentence));
        } else {
            found.others = true;
        }
    }

    /// The lines to print.
    pub fn lines(&self, sandbox: &str) -> Vec<String> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lines: Vec<String> = found.first.iter().map(|(_, sentence)| sentence.clone()).collect();
        if found.others {
            lines.push(format!("there were more denials: bathy net log {sandbox}"));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use bathy_audit::Actor;
    use bathy_audit::event::NetPeer;

    use super::*;

    fn name(host: &str, kind: &str, denied: bool) -> Event {
        let what = What::NameUnresolved {
            host: host.to_owned(),
            kind: kind.to_owned(),
            reason: "preset allow-list".to_owned(),
            denied,
            hint: denied.then(|| host.to_owned()),
        };
        Event::now(Actor::this_process("bathy run"), what)
    }

    fn address(port: u16) -> Event {
        let peer = NetPeer {
            protocol: "tcp".to_owned(),
            direction: "out".to_owned(),
            address: [10, 0, 0, 5].into(),
            port,
            host: None,
        };
        let what = What::NetDenied { peer, rule: "preset public".to_owned(), hint: None, count: 1 };
        Event::now(Actor::this_process("bathy run"), what)
    }

    #[test]
    fn a_name_is_reported_once_with_its_hint() {
        let denials = Denials::default();
        for kind in ["A", "AAAA"] {
            denials.record(&name("a.example", kind, true));
        }
        denials.record(&name("missing.example", "A", false));
        let lines = denials.lines("abc");
        assert_eq!(lines, ["denied name a.example A: preset allow-list; to allow it: --allow a.example"]);
    }

    #[test]
    fn of_many_the_first_are_printed() {
        let denials = Denials::default();
        assert_eq!(denials.lines("abc"), <[&str; 0]>::default());
        for port in 1..1000 {
            denials.record(&address(port));
        }
        let lines = denials.lines("abc");
        assert_eq!(lines.len(), MOST + 1);
        assert_eq!(lines[0], "denied tcp to 10.0.0.5:1 by preset public");
        assert!(lines[MOST].ends_with("bathy net log abc"));
    }
}
