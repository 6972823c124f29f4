//! What a sandbox's owner remembers of its network over all gateways that it has had. A guest that ends its gateway gets
//! another one, and neither new budgets nor connections that are missing in the log.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_protocol::network::{FromGateway, NEVER_BEGAN, NetEvent, NetworkLimits, Peer, Spent};

use crate::net_events;

/// Why a connection ended whose gateway did not say so.
const LOST: &str = "its gateway is gone; how many bytes it carried is not known";

/// What was used, and what is open.
#[derive(Debug)]
pub struct Ledger {
    /// Whether there has been a gateway before the present one.
    has_lost: bool,
    /// What was last reported as used, and when its window began.
    spent: Option<(Spent, Instant)>,
    open: BTreeMap<u64, (Peer, Instant)>,
    /// How many are open at most, of a gateway that keeps to its limits.
    most_open: usize,
    /// How many more were reported.
    uncounted: u64,
}

impl Ledger {
    /// Of a sandbox that has had no gateway.
    pub fn new(limits: &NetworkLimits) -> Self {
        let most_open = usize::try_from(limits.connections).unwrap_or(usize::MAX);
        Self { has_lost: false, spent: None, open: BTreeMap::new(), most_open, uncounted: 0 }
    }

    /// Takes note of a gateway's message.
    pub fn on_message(&mut self, message: &FromGateway, now: Instant) {
        match message {
            FromGateway::Spent(spent) => {
                // One that came late began earlier than this. It then counts for longer.
                let began = now.checked_sub(Duration::from_millis(spent.age_ms)).unwrap_or(now);
                self.spent = Some((*spent, began));
            }
            FromGateway::Event(NetEvent::Allowed { number, peer, .. }) => {
                if self.open.len() < self.most_open {
                    self.open.insert(*number, (peer.clone(), now));
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

    /// What the next gateway begins with; nothing if it is the first one.
    pub fn carried_over(&self, now: Instant) -> Option<Spent> {
        let spent = self.spent.map(|(spent, began)| {
            let age = now.saturating_duration_since(began).as_millis();
            Spent { age_ms: u64::try_from(age).unwrap_or(u64::MAX), ..spent }
        });
        self.has_lost.then(|| spent.unwrap_or_default())
    }

    /// The gateway is gone, and all of its messages were read. The ends of what it had open.
    pub fn close(&mut self, now: Instant) -> Vec<What> {
        self.has_lost = true;
        let end = |(peer, began): (Peer, Instant)| {
            let took = now.saturating_duration_since(began).as_millis();
            net_events::lost(peer, u64::try_from(took).unwrap_or(u64::MAX), LOST)
        };
        let mut ends: Vec<_> = std::mem::take(&mut self.open).into_values().map(end).collect();
        let uncounted = std::mem::take(&mut self.uncounted);
        if uncounted > 0 {
            let detail = format!("of {uncounted} the end is not known, since the gateway is gone");
            ends.push(What::limit_hit("connections at once, reported by the gateway", &detail));
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use bathy_protocol::network::Transport;
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
            "took_ms": 2000, "reason": LOST,
        });
        assert_eq!(ends[0], expected, "neither zero bytes nor any other number");
        assert!(ledger.close(start).is_empty(), "once");
    }

    #[test]
    fn n9_a_gateway_that_reports_more_than_it_may_have_open_costs_no_memory() {
        let (mut ledger, start) = (ledger(), Instant::now());
        (1..1000).for_each(|number| ledger.on_message(&allowed(number, 80), start));
        assert_eq!(ledger.open.len(), 3);
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
