//! The state of a sandbox's network over all its gateways. A guest that crashes its gateway gets another one,
//! but no new budgets, and its connections do not go missing in the log.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_audit::event::NetPeer;
use bathy_protocol::counts;
use bathy_protocol::network::{FromGateway, NEVER_BEGAN, NetEvent, NetworkLimits, Spent};

use crate::counts::ByteCounters;
use crate::net_events;

/// The reasons for the end of a connection whose gateway could not report it.
const REASON_COUNTED: &str = "its gateway failed; bytes as far as they had been counted";
const REASON_UNCOUNTED: &str = "its gateway failed; how many bytes it carried is not known";

/// Used budgets and open connections.
#[derive(Debug)]
pub struct Ledger {
    /// Whether there was a gateway before the present one.
    had_gateway: bool,
    /// The last reported budget, and when its window began.
    spent: Option<(Spent, Instant)>,
    open: BTreeMap<u64, (NetPeer, Instant)>,
    /// The byte counters of the present gateway.
    counts: Option<ByteCounters>,
    /// The most connections that a correct gateway has open at once.
    most_open: usize,
    /// How many more than that were reported.
    uncounted: u64,
}

impl Ledger {
    /// The ledger of a new sandbox.
    pub fn new(limits: &NetworkLimits) -> Self {
        let most_open = usize::try_from(limits.connections).unwrap_or(usize::MAX);
        Self { had_gateway: false, spent: None, open: BTreeMap::new(), counts: None, most_open, uncounted: 0 }
    }

    /// A gateway was started, which counts bytes here.
    pub fn begin(&mut self, counts: ByteCounters) {
        self.counts = Some(counts);
    }

    /// Updates the state from a gateway's message.
    pub fn on_message(&mut self, message: &FromGateway, now: Instant) {
        match message {
            FromGateway::Spent(spent) => {
                // A message that is delayed makes its window count for longer, not shorter.
                let began = now.checked_sub(Duration::from_millis(spent.age_ms)).unwrap_or(now);
                self.spent = Some((*spent, began));
            }
            FromGateway::Event(NetEvent::Allowed { number, peer, .. }) => {
                if self.open.len() < self.most_open {
                    self.open.insert(*number, (net_events::of(peer.clone()), now));
                } else {
                    self.uncounted += 1;
                }
            }
            FromGateway::Event(NetEvent::Closed { number, .. }) if *number != NEVER_BEGAN => {
                self.open.remove(number);
            }
            _ => {}
        }
    }

    /// The budget that the next gateway starts with; none for the first one.
    pub(crate) fn carried_over(&self, now: Instant) -> Option<Spent> {
        let spent = self.spent.map(|(spent, began)| {
            let age = now.saturating_duration_since(began).as_millis();
            Spent { age_ms: u64::try_from(age).unwrap_or(u64::MAX), ..spent }
        });
        self.had_gateway.then(|| spent.unwrap_or_default())
    }

    /// The gateway has ended and all of its messages were read. Returns the end events of its open
    /// connections.
    pub fn close(&mut self, now: Instant) -> Vec<What> {
        self.had_gateway = true;
        let moved = self.take_counts();
        let end = |(number, (peer, began)): (u64, (NetPeer, Instant))| {
            let took = now.saturating_duration_since(began).as_millis();
            let moved = moved.get(&number).copied();
            let reason = if moved.is_some() { REASON_COUNTED } else { REASON_UNCOUNTED };
            net_events::closed_by_failure(peer, moved, u64::try_from(took).unwrap_or(u64::MAX), reason)
        };
        let mut ends: Vec<_> = std::mem::take(&mut self.open).into_iter().map(end).collect();
        let uncounted = std::mem::take(&mut self.uncounted);
        if uncounted > 0 {
            let detail = format!("of {uncounted} the end is not known, since the gateway failed");
            ends.push(What::limit_hit("connections at once, reported by the gateway", &detail));
        }
        ends
    }

    /// The byte counts of open connections by number. A compromised gateway can count anything, but only for
    /// connections that it reported as open, and once for each.
    fn take_counts(&mut self) -> BTreeMap<u64, (u64, u64)> {
        let mut moved = BTreeMap::new();
        let Some(counts) = self.counts.take().filter(|_| !self.open.is_empty()) else { return moved };
        // If the memory cannot be read, the counts are unknown.
        for count in counts::read(&counts.read().unwrap_or_default()) {
            if self.open.contains_key(&count.number) {
                moved.entry(count.number).or_insert((count.sent, count.received));
            }
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::{IpAddr, Ipv4Addr};
    use std::os::unix::fs::FileExt;

    use bathy_protocol::network::{Peer, Transport};
    use serde_json::{Value, json};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn ledger() -> Ledger {
        Ledger::new(&NetworkLimits { connections: 3, ..NetworkLimits::default() })
    }

    fn peer(port: u16) -> Peer {
        let address = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));
        Peer { transport: Transport::Tcp, inbound: false, address, port, name: None }
    }

    fn allowed(number: u64, port: u16) -> FromGateway {
        FromGateway::Event(NetEvent::Allowed { number, peer: peer(port), rule: String::new() })
    }

    fn closed(number: u64, port: u16) -> FromGateway {
        let (sent, received, milliseconds, reason) = (1, 2, 3, String::new());
        let peer = peer(port);
        FromGateway::Event(NetEvent::Closed { number, peer, sent, received, milliseconds, reason })
    }

    fn written(events: Vec<What>) -> Vec<Value> {
        events.into_iter().map(|event| serde_json::to_value(event).unwrap()).collect()
    }

    #[test]
    fn n9_what_was_open_when_a_gateway_died_is_recorded_as_closed() {
        let (mut ledger, start) = (ledger(), Instant::now());
        for message in [allowed(2, 80), allowed(4, 443), closed(NEVER_BEGAN, 443), closed(2, 80)] {
            ledger.on_message(&message, start);
        }
        let ends = written(ledger.close(start + 2 * SECOND));
        assert_eq!(ends.len(), 1, "{ends:?}");
        let expected = json!({
            "event": "net_closed", "protocol": "tcp", "direction": "out", "address": "192.0.2.7", "port": 443,
            "took_ms": 2000, "reason": REASON_UNCOUNTED,
        });
        assert_eq!(ends[0], expected, "neither zero bytes nor any other number");
        assert!(ledger.close(start).is_empty(), "once");
    }

    /// The events after a gateway died with these connections open and these words in its counters: bytes
    /// from and to the guest.
    fn left(open: &[u64], words: &[u64]) -> Vec<(Value, Value)> {
        let (mut ledger, now) = (ledger(), Instant::now());
        let counts = ByteCounters::new(3).unwrap();
        let bytes: Vec<_> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        File::from(counts.fd().try_clone_to_owned().unwrap()).write_all_at(&bytes, 0).unwrap();
        ledger.begin(counts);
        open.iter().for_each(|number| ledger.on_message(&allowed(*number, 80), now));
        let ends = written(ledger.close(now));
        let is_known = |end: &Value| end["reason"] == REASON_COUNTED && end.get("sent").is_some();
        let is_unknown = |end: &Value| end["reason"] == REASON_UNCOUNTED && end.get("received").is_none();
        assert!(ends.iter().all(|end| is_known(end) || is_unknown(end)), "{ends:?}");
        assert!(ledger.close(now).is_empty() && ledger.counts.is_none(), "once");
        ends.iter().map(|end| (end["sent"].clone(), end["received"].clone())).collect()
    }

    #[test]
    fn n9_what_a_gateway_had_counted_is_recorded_when_it_died() {
        let known = |sent: u64, received: u64| (json!(sent), json!(received));
        let unknown = || (Value::Null, Value::Null);
        let counted = [4, 500_000, 300_000, 2, 10, 0, 6, 1, 2];
        assert_eq!(left(&[2, 4], &counted), [known(10, 0), known(500_000, 300_000)], "6 was closed");
        assert_eq!(left(&[2, 3], &counted), [known(10, 0), unknown()], "it had no slot");
        assert_eq!(left(&[4], &[]), [unknown()]);
        assert_eq!(left(&[], &counted), []);
    }

    #[test]
    fn n9_forged_counts_only_affect_the_gateways_own_connections() {
        let most = u64::MAX;
        assert_eq!(left(&[most], &[most; 9]), [(json!(most), json!(most))]);
        assert_eq!(left(&[4], &[4, 1, 2, 4, 3, 4, 4, 5, 6]), [(json!(1), json!(2))], "the first one holds");
        assert_eq!(
            left(&[NEVER_BEGAN], &[0; 9]),
            [(Value::Null, Value::Null)],
            "an empty slot belongs to no connection"
        );
        assert_eq!(left(&[2], &[3, 1, 1, 5, 1, 1, 7, 1, 1]), [(Value::Null, Value::Null)]);
    }

    #[test]
    fn n9_a_gateway_that_reports_more_than_it_may_have_open_costs_no_memory() {
        let (mut ledger, start) = (ledger(), Instant::now());
        (1..1000).for_each(|number| ledger.on_message(&allowed(number, 80), start));
        assert_eq!(ledger.open.len(), 3);
        let named = Peer { name: Some("n".repeat(100_000)), ..peer(80) };
        let named = NetEvent::Allowed { number: 1, peer: named, rule: String::new() };
        ledger.open.remove(&1);
        ledger.on_message(&FromGateway::Event(named), start);
        assert!(ledger.open[&1].0.host.as_ref().unwrap().capacity() < 1000, "texts are cut");
        let ends = written(ledger.close(start));
        assert_eq!((ends.len(), &ends[3]["event"]), (4, &json!("limit_hit")));
        assert!(ends[3]["detail"].as_str().unwrap().contains("996"), "{ends:?}");
    }

    #[test]
    fn n9_budgets_outlive_a_gateway_and_their_window_goes_on() {
        let (mut ledger, start) = (ledger(), Instant::now());
        assert_eq!(ledger.carried_over(start), None, "the first one has all of it");
        let spent = Spent { age_ms: 1500, total: 300, most: 200 };
        ledger.on_message(&FromGateway::Spent(spent), start + 4 * SECOND);
        ledger.close(start);
        let carried = Spent { age_ms: 3500, ..spent };
        assert_eq!(ledger.carried_over(start + 6 * SECOND), Some(carried));
        ledger.close(start);
        assert_eq!(ledger.carried_over(start + 6 * SECOND), Some(carried), "of one that reports nothing");
    }
}
