//! The sandbox's network, from its monitor: what the gateway reports is recorded, new policies are passed on, and a gateway that
//! is gone is started again. Until there is one the sandbox has no network, and nothing of it goes anywhere.
//!
//! While events cannot be recorded the gateway is told to begin nothing new, and nothing more is read from it: see
//! [`bathy_runtime::spool`].

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_protocol::network::FromGateway;
use bathy_runtime::description::Description;
use bathy_runtime::gateway::{Gateway, GatewayError, Received};
use bathy_runtime::net_events;
use bathy_runtime::restarts::Restarts;
use bathy_spec::SandboxSpec;
use bathy_spec::operator::Operator;

use super::Monitor;
use super::control::FromMonitor;
use super::pending::{refuse, say};
use super::serve::Loop;

/// How many reports are recorded at once.
const AT_ONCE: usize = 256;
/// How long a gateway has to say what was open when its sandbox ended.
const LAST_WORDS: Duration = Duration::from_millis(1500);
/// How long a sandbox may go on after its gateway saw the end of the keeper's link, before it gets another gateway.
const UNPLUGGED_PAUSE: Duration = Duration::from_secs(1);
/// How long somebody waits for a policy to hold.
const CHANGE_PATIENCE: Duration = Duration::from_secs(5);
const SILENT: &str = "the sandbox's gateway does not answer and was ended; nothing goes anywhere until there is another, which keeps to the new policy";
const GONE: &str = "the sandbox's gateway is gone; nothing goes anywhere until there is another, which keeps to the new policy";

/// What the monitor knows of the network.
#[derive(Default)]
pub(super) struct NetworkState {
    /// Those who wait for their policy to hold, in the order in which the gateway was told. One that has waited for too long
    /// leaves its place empty: the gateway's answer to it may still come, and is nobody else's.
    changing: VecDeque<(Option<OwnedFd>, Instant)>,
    /// When a gateway is started in place of one that is gone.
    restarts: Restarts,
    /// Whether the present gateway was told to begin nothing new.
    held: bool,
}

impl NetworkState {
    /// When it wants to be looked at. While events wait to be recorded no gateway is started, since it would begin something
    /// new before it could be told not to.
    pub(super) fn due(&self, may_restart: bool) -> Option<Instant> {
        let changing =
            self.changing.iter().filter(|(socket, _)| socket.is_some()).map(|(_, until)| *until).min();
        [self.restarts.due().filter(|_| may_restart), changing].into_iter().flatten().min()
    }

    /// Somebody's policy was told to the gateway.
    fn told(&mut self, socket: OwnedFd, now: Instant) {
        self.changing.push_back((Some(socket), now + CHANGE_PATIENCE));
    }

    /// The gateway says that the first of the policies that it was told holds. Who waits for that, if anybody does.
    fn holds(&mut self) -> Option<OwnedFd> {
        self.changing.pop_front()?.0
    }

    /// Those who have waited for too long.
    fn late(&mut self, now: Instant) -> Vec<OwnedFd> {
        let late = self.changing.iter_mut().filter(|(_, until)| *until <= now);
        late.filter_map(|(socket, _)| socket.take()).collect()
    }

    /// Nothing comes from the gateway any more. Those who wait for it.
    fn abandoned(&mut self) -> Vec<OwnedFd> {
        self.changing.drain(..).filter_map(|(socket, _)| socket).collect()
    }
}

impl Monitor {
    /// Whether more is read from the gateway now: not while events wait to be recorded, but for the answer to somebody who
    /// changes the policy. That one overtakes the gateway's events.
    pub(super) fn reads_gateway(&self, state: &Loop) -> bool {
        self.events.is_empty() || !state.network.changing.is_empty() && self.events.has_room()
    }

    /// Tells the gateway whether something new may begin, whenever that changes.
    fn tell_hold(&mut self, state: &mut Loop) {
        let hold = !self.events.is_empty();
        let Some(gateway) = &self.sandbox.gateway else { return };
        if hold == state.network.held {
            return;
        }
        if gateway.hold(hold).is_ok() {
            state.network.held = hold;
        } else {
            // It may go on as before.
            self.lose_gateway("it did not take what it was told".to_owned(), state);
        }
    }

    /// Records what the gateway reports.
    pub(super) fn on_gateway_messages(&mut self, state: &mut Loop) {
        let mut events = Vec::new();
        let mut gone = None;
        // Whatever it sends, others have their turn.
        for _ in 0..AT_ONCE {
            let Some(gateway) = &self.sandbox.gateway else { break };
            let received = gateway.receive();
            if let Received::Message(message) = &received {
                self.sandbox.on_gateway_message(message);
            }
            match received {
                Received::Nothing => break,
                Received::Closed => {
                    gone = self.sandbox.gateway.as_ref().map(Gateway::end);
                    break;
                }
                // The sandbox is at its end, which its keeper's connection tells as well; or only the link is.
                Received::Message(FromGateway::Unplugged) => {
                    self.sandbox.gateway = None;
                    state.network.held = false;
                    // The next one starts with the new policy, and answers for no change of the old one's.
                    for socket in state.network.abandoned() {
                        refuse(&socket, GONE);
                    }
                    state.network.restarts.want(Instant::now() + UNPLUGGED_PAUSE);
                    events.extend(self.sandbox.close_network());
                }
                Received::Message(FromGateway::Ready | FromGateway::Spent(_)) => {}
                Received::Message(FromGateway::Event(event)) => {
                    events.push(net_events::recorded(event, self.sandbox.policies()));
                }
                Received::Message(FromGateway::Changed { closed }) => {
                    if let Some(socket) = state.network.holds() {
                        say(&socket, &FromMonitor::Changed { closed });
                    }
                }
                Received::Message(FromGateway::Failed(reason)) => {
                    gone = Some(reason.chars().take(500).collect());
                    break;
                }
            }
        }
        self.note_all(events);
        if let Some(reason) = gone {
            self.lose_gateway(reason, state);
        }
    }

    /// Records what the gateway still has to say once its sandbox has ended: what was open, and how much it carried.
    pub(super) fn drain_gateway(&mut self) {
        let until = Instant::now() + LAST_WORDS;
        let mut is_over = false;
        while !is_over {
            let Some(gateway) = &self.sandbox.gateway else { break };
            let mut messages = Vec::new();
            while messages.len() < AT_ONCE && !is_over {
                match gateway.receive() {
                    Received::Nothing => break,
                    Received::Closed | Received::Message(FromGateway::Unplugged | FromGateway::Failed(_)) => {
                        is_over = true
                    }
                    Received::Message(message) => messages.push(message),
                }
            }
            is_over = is_over || Instant::now() >= until || !gateway.speaks_before(until);
            self.record_messages(messages);
        }
        let ends = self.sandbox.close_network();
        self.note_all(ends);
    }

    /// Records those of a gateway's messages that are events.
    fn record_messages(&mut self, messages: Vec<FromGateway>) {
        let mut events = Vec::new();
        for message in messages {
            self.sandbox.on_gateway_message(&message);
            if let FromGateway::Event(event) = message {
                events.push(net_events::recorded(event, self.sandbox.policies()));
            }
        }
        self.note_all(events);
    }

    fn lose_gateway(&mut self, reason: String, state: &mut Loop) {
        if let Some(gateway) = self.sandbox.gateway.take() {
            self.record_messages(gateway.end_now());
        }
        let ends = self.sandbox.close_network();
        self.note_all(ends);
        state.network.held = false;
        for socket in state.network.abandoned() {
            refuse(&socket, GONE);
        }
        state.network.restarts.lost(Instant::now());
        self.note(What::GatewayLost { reason, restarted: false });
    }

    /// Tries again what could not be recorded, starts the gateway again when it is time, and sends those away who have waited for
    /// too long.
    pub(super) fn keep_network(&mut self, state: &mut Loop, now: Instant) {
        self.events.retry(now);
        self.tell_hold(state);
        let late = state.network.late(now);
        for socket in &late {
            refuse(socket, SILENT);
        }
        if !late.is_empty() {
            // It may serve by the old policy still.
            self.lose_gateway("it did not take a new policy in time".to_owned(), state);
        }
        if !self.events.is_empty() || !state.network.restarts.take_due(now) {
            return;
        }
        match self.sandbox.restart_gateway() {
            Ok(()) => self.note(What::GatewayLost { reason: "it is back".to_owned(), restarted: true }),
            Err(error) => {
                let reason = format!("it could not be started again: {}", bathy_protocol::chain(&error));
                self.lose_gateway(reason, state);
            }
        }
    }

    /// The settings that hold now: what stands beside the disk. The store may have been replaced since this process opened it.
    fn described_spec(&self) -> Result<SandboxSpec, String> {
        match Description::read(&self.folder) {
            Ok(Some(found)) => return Ok(found.spec),
            // Made and started by an earlier version.
            Ok(None) => {}
            Err(error) => return Err(error.to_string()),
        }
        match self.store.get(&self.record.id) {
            Ok(Some(record)) => Ok(record.spec),
            Ok(None) => Err("the sandbox has been removed".to_owned()),
            Err(error) => Err(bathy_protocol::chain(&error)),
        }
    }

    /// Passes a new policy on, as it is written down.
    pub(super) fn change_policy(&mut self, socket: OwnedFd, state: &mut Loop) {
        let spec = match self.described_spec() {
            Ok(spec) => spec,
            Err(reason) => return refuse(&socket, &reason),
        };
        let policies = match Operator::load() {
            Ok(policy) => spec.policies(policy.network()),
            Err(error) => return refuse(&socket, &bathy_protocol::chain(&error)),
        };
        self.record.spec.network = spec.network;
        let wants_network = policies.has_network();
        match self.sandbox.change_policy(policies) {
            // Without a network nothing can be reached, before and after.
            Err(GatewayError::NoNetwork) if !wants_network => {
                say(&socket, &FromMonitor::Changed { closed: 0 })
            }
            Ok(true) => state.network.told(socket, Instant::now()),
            Ok(false) => refuse(&socket, GONE),
            Err(GatewayError::Silent) => {
                refuse(&socket, SILENT);
                self.lose_gateway("it did not take a new policy".to_owned(), state);
            }
            Err(error) => refuse(&socket, &error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, send, socketpair};

    use super::*;

    /// Somebody who waits, and the monitor's end.
    fn client() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
    }

    /// Whether `answer` is the other end of `asker`.
    fn is_for(asker: &OwnedFd, answer: Option<OwnedFd>) -> bool {
        let Some(answer) = answer else { return false };
        send(&answer, b"x", rustix::net::SendFlags::NOSIGNAL).unwrap();
        recv(asker, &mut [0; 1], RecvFlags::DONTWAIT).is_ok_and(|(count, _)| count == 1)
    }

    #[test]
    fn a_late_answer_is_nobody_elses() {
        let now = Instant::now();
        let mut state = NetworkState::default();
        let ((first, ours), (second, other)) = (client(), client());
        state.told(ours, now);
        assert_eq!(state.late(now).len(), 0);
        let late = now + CHANGE_PATIENCE;
        assert!(is_for(&first, state.late(late).pop()));
        state.told(other, late);
        assert_eq!(state.due(true), Some(late + CHANGE_PATIENCE), "the first one waits no more");
        assert!(state.holds().is_none(), "the answer to the first one, which is gone");
        assert!(is_for(&second, state.holds()));
        assert!(state.holds().is_none(), "a gateway that answers what nobody asked");
    }

    #[test]
    fn a_gateway_that_is_gone_owes_no_answers() {
        let now = Instant::now();
        let mut state = NetworkState::default();
        let ((_first, ours), (second, other)) = (client(), client());
        state.told(ours, now);
        drop(state.late(now + CHANGE_PATIENCE));
        state.told(other, now + CHANGE_PATIENCE);
        assert!(is_for(&second, state.abandoned().pop()));
        assert_eq!(state.due(true), None);
        let (third, last) = client();
        state.told(last, now);
        assert!(is_for(&third, state.holds()), "the next gateway's first answer is for its first question");
    }

    #[test]
    fn f1_no_gateway_is_started_while_events_wait_to_be_recorded() {
        let now = Instant::now();
        let mut state = NetworkState::default();
        state.restarts.want(now);
        assert_eq!((state.due(true), state.due(false)), (Some(now), None));
        let (_visitor, ours) = client();
        state.told(ours, now);
        assert_eq!(state.due(false), Some(now + CHANGE_PATIENCE), "a new policy is passed on all the same");
    }
}
