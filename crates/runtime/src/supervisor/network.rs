//! Watches the network of a sandbox: records its gateway's reports and restarts a failed gateway. In between
//! the sandbox has no network.
//!
//! It fails closed: while events cannot be recorded, the gateway is held, nothing more is read from it, and
//! no other one is started. See `super::spool`.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_client::connection::Connection;
use bathy_client::wait::is_readable_before;
use bathy_policy::{Policies, PublishedPort};
use bathy_protocol::ToKeeper;
use bathy_protocol::network::FromGateway;

use super::changes::{Changes, SettledChange};
use super::journal::Journal;
use super::restarts::Restarts;
use super::spool::Sink;
use crate::gateway::{self, Incoming, LEAVE_TIME, Network, NetworkError, RunningGateway};
use crate::ledger::Ledger;
use crate::net_events::recorded;

/// The most messages that are handled at once, so that a gateway cannot starve other work.
const AT_ONCE: usize = 256;
/// How long to wait after a gateway saw its link closed, before another one is started.
const UNPLUGGED_PAUSE: Duration = Duration::from_secs(1);
/// The most characters of a reason that a gateway gives.
const MAX_REASON: usize = 500;
const GATEWAY_SILENT: &str = "the sandbox's gateway did not answer and was killed; the sandbox has no network until the next gateway starts with the new policy";
const GATEWAY_FAILED: &str = "the sandbox's gateway failed; the sandbox has no network until the next gateway starts with the new policy";

/// The gateways of one sandbox, one after the other.
pub trait Gateways {
    /// The control socket of the present gateway.
    fn control(&self) -> Option<BorrowedFd<'_>>;
    /// What is remembered over all gateways.
    fn ledger(&mut self) -> &mut Ledger;
    fn policies(&self) -> Option<&Policies>;
    /// Changes the policies of this gateway and later ones. False if there is none at present.
    ///
    /// # Errors
    /// The present gateway does not accept it.
    fn change(&mut self, policies: Policies) -> Result<bool, NetworkError>;
    /// Why the present gateway closed its control socket.
    fn describe_end(&self) -> String;
    /// Kills the present gateway. Returns messages that it had sent but that were not read.
    fn stop(&mut self) -> Vec<FromGateway>;
    /// Starts a gateway. The keeper gets a new link if its connection is given; otherwise the link of the
    /// last gateway is reused.
    ///
    /// # Errors
    /// The gateway cannot be started, or the keeper does not accept the link.
    fn start(&mut self, keeper: Option<&mut Connection>) -> Result<(), NetworkError>;
}

/// Gateways that run as processes.
#[derive(Debug)]
pub struct SandboxGateways {
    network: Network,
    gateway: Option<RunningGateway>,
}

impl SandboxGateways {
    /// Starts the first gateway.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(mut network: Network) -> Result<Self, NetworkError> {
        let gateway = Some(network.start()?);
        Ok(Self { network, gateway })
    }

    /// The published ports with their assigned numbers.
    pub fn ports(&self) -> Vec<PublishedPort> {
        self.network.ports.iter().map(|(port, _)| *port).collect()
    }
}

impl Gateways for SandboxGateways {
    fn control(&self) -> Option<BorrowedFd<'_>> {
        self.gateway.as_ref().map(RunningGateway::fd)
    }

    fn ledger(&mut self) -> &mut Ledger {
        &mut self.network.ledger
    }

    fn policies(&self) -> Option<&Policies> {
        Some(&self.network.policies)
    }

    fn change(&mut self, policies: Policies) -> Result<bool, NetworkError> {
        self.network.policies = policies;
        let Some(gateway) = &self.gateway else { return Ok(false) };
        gateway.change(&self.network.policies)?;
        Ok(true)
    }

    fn describe_end(&self) -> String {
        self.gateway.as_ref().map(RunningGateway::end).unwrap_or_default()
    }

    fn stop(&mut self) -> Vec<FromGateway> {
        self.gateway.take().map(RunningGateway::end_now).unwrap_or_default()
    }

    fn start(&mut self, keeper: Option<&mut Connection>) -> Result<(), NetworkError> {
        let Some(keeper) = keeper else {
            self.gateway = Some(self.network.start()?);
            return Ok(());
        };
        let (keepers, gateways) = gateway::link()?;
        self.network.link = gateways;
        let gateway = self.network.start()?;
        keeper.send_with_descriptor(&ToKeeper::Link, &keepers).map_err(NetworkError::Prepare)?;
        self.gateway = Some(gateway);
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct NetworkWatch<W, G = SandboxGateways> {
    gateways: G,
    restarts: Restarts,
    changes: Changes<W>,
    /// Whether the present gateway is held: it begins nothing new.
    is_held: bool,
    /// The sandbox is about to end, and its gateway with it.
    is_ending: bool,
    /// Whether a gateway whose link was closed is restarted, which needs a new link.
    can_relink: bool,
}

/// Why a gateway ended.
enum Loss {
    /// Its link was closed: the sandbox is ending, or only the link failed.
    Unplugged,
    Failed(String),
    AtEnd,
}

impl<W, G: Gateways> NetworkWatch<W, G> {
    pub fn new(gateways: G) -> Self {
        Self {
            gateways,
            restarts: Restarts::default(),
            changes: Changes::new(),
            is_held: false,
            is_ending: false,
            can_relink: true,
        }
    }

    /// For an owner without access to the keeper's connection: every gateway uses the same link.
    pub(crate) fn without_keeper(self) -> Self {
        Self { can_relink: false, ..self }
    }

    /// From now on the gateway's end is expected.
    pub fn expect_end(&mut self) {
        self.is_ending = true;
    }

    #[cfg(test)]
    fn has_gateway(&self) -> bool {
        self.gateways.control().is_some()
    }

    /// The descriptor to poll; none while messages are not read. While events are queued, messages are only
    /// read for the answer to a policy change, which overtakes a gateway's events, and at the end of a
    /// sandbox.
    pub fn fd<S: Sink>(&self, journal: &Journal<S>) -> Option<BorrowedFd<'_>> {
        let awaits_answer = !self.changes.is_empty() && journal.has_capacity();
        let reads = journal.is_empty() || self.is_ending || awaits_answer;
        self.gateways.control().filter(|_| reads)
    }

    /// When [`Self::keep_time`] has something to do. No gateway is started while events are queued, because
    /// it could begin something new before it can be held.
    pub fn due<S: Sink>(&self, journal: &Journal<S>) -> Option<Instant> {
        let may_restart = journal.is_empty() && !self.is_ending;
        let restart = self.restarts.due().filter(|_| may_restart);
        [restart, self.changes.due()].into_iter().flatten().min()
    }

    /// Handles the messages that the gateway has sent.
    pub(crate) fn on_messages<S: Sink>(&mut self, journal: &mut Journal<S>) -> Vec<SettledChange<W>> {
        let (mut events, mut settled, mut loss) = (Vec::new(), Vec::new(), None);
        for _ in 0..AT_ONCE {
            let Some(control) = self.gateways.control().filter(|_| loss.is_none()) else { break };
            match gateway::receive(control) {
                Incoming::Nothing => break,
                // Finding out how it ended takes a moment, which is not needed here.
                Incoming::Closed if self.is_ending => loss = Some(Loss::AtEnd),
                Incoming::Closed => loss = Some(Loss::Failed(self.gateways.describe_end())),
                Incoming::Message(FromGateway::Unplugged) => loss = Some(Loss::Unplugged),
                Incoming::Message(FromGateway::Failed(reason)) => {
                    loss = Some(Loss::Failed(reason.chars().take(MAX_REASON).collect()));
                }
                Incoming::Message(FromGateway::Changed { closed }) => {
                    let answered = self.changes.answered();
                    settled.extend(answered.map(|waiter| SettledChange { waiter, result: Ok(closed) }));
                }
                Incoming::Message(message) => events.extend(self.event_of(message)),
            }
        }
        journal.note_all(events);
        if let Some(loss) = loss {
            settled.extend(self.lose(loss, journal, Instant::now()));
        }
        settled
    }

    /// The event of a message, if there is one.
    fn event_of(&mut self, message: FromGateway) -> Option<What> {
        self.gateways.ledger().on_message(&message, Instant::now());
        match message {
            FromGateway::Event(event) => Some(recorded(event, self.gateways.policies())),
            _ => None,
        }
    }

    /// Records the end of the present gateway and of its connections. Outstanding policy changes fail.
    fn lose<S: Sink>(&mut self, loss: Loss, journal: &mut Journal<S>, now: Instant) -> Vec<SettledChange<W>> {
        let left = self.gateways.stop();
        let mut events: Vec<_> = left.into_iter().filter_map(|message| self.event_of(message)).collect();
        events.extend(self.gateways.ledger().close(now));
        self.is_held = false;
        match loss {
            Loss::Unplugged if self.can_relink => self.restarts.schedule(now + UNPLUGGED_PAUSE),
            Loss::Unplugged => self.is_ending = true,
            Loss::Failed(reason) if !self.is_ending => {
                self.restarts.on_failure(now);
                events.push(What::GatewayLost { reason, restarted: false });
            }
            Loss::Failed(_) | Loss::AtEnd => {}
        }
        journal.note_all(events);
        let abandoned = self.changes.abandon().into_iter();
        abandoned.map(|waiter| SettledChange { waiter, result: Err(GATEWAY_FAILED.to_owned()) }).collect()
    }

    /// Holds or releases the gateway, times out policy changes and restarts the gateway when it is time.
    pub fn keep_time<S: Sink>(
        &mut self,
        journal: &mut Journal<S>,
        keeper: Option<&mut Connection>,
        now: Instant,
    ) -> Vec<SettledChange<W>> {
        let mut settled = self.send_hold(journal, now);
        let late = self.changes.take_late(now);
        if !late.is_empty() {
            settled.extend(
                late.into_iter()
                    .map(|waiter| SettledChange { waiter, result: Err(GATEWAY_SILENT.to_owned()) }),
            );
            // It may still enforce the old policy.
            let reason = "it did not apply a new policy in time".to_owned();
            settled.extend(self.lose(Loss::Failed(reason), journal, now));
        }
        if !self.is_ending && journal.is_empty() && self.restarts.take_due(now) {
            match self.gateways.start(keeper) {
                Ok(()) => {
                    journal
                        .note(What::GatewayLost { reason: "it was restarted".to_owned(), restarted: true });
                }
                Err(error) => {
                    let reason = format!("it could not be restarted: {}", bathy_protocol::chain(&error));
                    settled.extend(self.lose(Loss::Failed(reason), journal, now));
                }
            }
        }
        settled
    }

    fn send_hold<S: Sink>(&mut self, journal: &mut Journal<S>, now: Instant) -> Vec<SettledChange<W>> {
        let hold = !journal.is_empty();
        let Some(control) = self.gateways.control().filter(|_| hold != self.is_held) else {
            return Vec::new();
        };
        match gateway::hold(control, hold) {
            Ok(()) => self.is_held = hold,
            // Its last messages are still to be read.
            Err(_) if self.is_ending => {}
            // It may continue as before.
            Err(_) => {
                return self.lose(Loss::Failed("it did not accept a message".to_owned()), journal, now);
            }
        }
        Vec::new()
    }

    /// Changes the policies. `waiter` is settled at once or by a later message.
    pub fn change<S: Sink>(
        &mut self,
        policies: Policies,
        waiter: W,
        journal: &mut Journal<S>,
    ) -> Vec<SettledChange<W>> {
        let failed = |waiter, reason: &str| vec![SettledChange { waiter, result: Err(reason.to_owned()) }];
        match self.gateways.change(policies) {
            Ok(true) => {
                self.changes.sent(waiter, Instant::now());
                Vec::new()
            }
            Ok(false) => failed(waiter, GATEWAY_FAILED),
            Err(NetworkError::Silent) => {
                let mut settled = failed(waiter, GATEWAY_SILENT);
                settled.extend(self.lose(
                    Loss::Failed("it did not accept a new policy".to_owned()),
                    journal,
                    Instant::now(),
                ));
                settled
            }
            Err(error) => failed(waiter, &error.to_string()),
        }
    }

    /// Records the gateway's last reports once its sandbox has ended: what was open, and how many bytes it
    /// carried.
    pub fn drain<S: Sink>(&mut self, journal: &mut Journal<S>) {
        self.is_ending = true;
        let until = Instant::now() + LEAVE_TIME;
        while let Some(control) = self.gateways.control() {
            if !is_readable_before(control, until) {
                break;
            }
            self.on_messages(journal);
        }
        self.lose(Loss::AtEnd, journal, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        Disk, Sockets, event, journal, next_to_gateway, send_as_gateway, try_send_as_gateway,
    };
    use super::*;
    use bathy_protocol::network::ToGateway;

    const SOON: Duration = Duration::from_millis(25);

    fn watch(count: usize) -> (NetworkWatch<&'static str, Sockets>, Vec<std::os::fd::OwnedFd>) {
        let (sockets, gateways, _) = Sockets::new(count);
        (NetworkWatch::new(sockets), gateways)
    }

    #[test]
    fn f1_no_gateway_is_started_while_events_wait_to_be_recorded() {
        let disk = Disk::default();
        let (mut watch, mut gateways) = watch(2);
        let mut journal = journal(&disk);
        disk.set_full(true);
        send_as_gateway(&gateways[0], &event(0));
        drop(gateways.remove(0));
        watch.on_messages(&mut journal);
        let later = Instant::now() + SOON;
        watch.keep_time(&mut journal, None, later);
        assert!(!watch.has_gateway() && watch.due(&journal).is_none());
        disk.set_full(false);
        journal.retry(later + Duration::from_secs(10));
        assert!(watch.due(&journal).is_some());
        watch.keep_time(&mut journal, None, later);
        assert!(watch.has_gateway());
        assert!(matches!(
            &disk.events()[..],
            [
                What::NetDropped { .. },
                What::GatewayLost { restarted: false, .. },
                What::GatewayLost { restarted: true, .. }
            ]
        ));
    }

    #[test]
    fn f1_while_events_wait_only_answers_are_read() {
        let disk = Disk::default();
        let (mut watch, gateways) = watch(1);
        let mut journal = journal(&disk);
        assert!(watch.fd(&journal).is_some());
        disk.set_full(true);
        send_as_gateway(&gateways[0], &event(0));
        watch.on_messages(&mut journal);
        watch.keep_time(&mut journal, None, Instant::now());
        assert_eq!(next_to_gateway(&gateways[0]), ToGateway::Hold(true));
        assert!(watch.fd(&journal).is_none());
        assert_eq!(watch.change(Policies::default(), "client", &mut journal), []);
        assert!(watch.fd(&journal).is_some());
        send_as_gateway(&gateways[0], &FromGateway::Changed { closed: 3 });
        assert_eq!(watch.on_messages(&mut journal), [SettledChange { waiter: "client", result: Ok(3) }]);
        assert!(watch.fd(&journal).is_none());
    }

    #[test]
    fn a_gateway_that_reports_without_end_is_not_read_for_ever() {
        let disk = Disk::default();
        let (mut watch, mut gateways) = watch(1);
        let gateway = gateways.remove(0);
        let sender = std::thread::spawn(move || {
            let end = Instant::now() + LEAVE_TIME * 20;
            // Until the reader has closed its end.
            while Instant::now() < end && try_send_as_gateway(&gateway, &event(1)) {}
            Instant::now() < end
        });
        watch.drain(&mut journal(&disk));
        drop(watch);
        assert!(sender.join().unwrap(), "it was read for as long as it sent");
    }

    #[test]
    fn a_gateway_that_takes_no_policy_is_replaced() {
        let disk = Disk::default();
        let (mut watch, _gateways) = watch(2);
        let mut journal = journal(&disk);
        assert_eq!(watch.change(Policies::default(), "client", &mut journal), []);
        let late = watch.due(&journal).unwrap();
        assert_eq!(watch.keep_time(&mut journal, None, late - Duration::from_millis(1)), []);
        let settled = watch.keep_time(&mut journal, None, late);
        assert!(
            matches!(&settled[..], [SettledChange { waiter: "client", result: Err(why) }] if why == GATEWAY_SILENT)
        );
        assert!(!watch.has_gateway());
        watch.keep_time(&mut journal, None, late + SOON);
        assert!(watch.has_gateway());
    }

    #[test]
    fn a_link_that_ends_is_replaced_a_while_later_if_there_can_be_another() {
        for can_relink in [true, false] {
            let disk = Disk::default();
            let (watch, gateways) = watch(2);
            let mut watch = if can_relink { watch } else { watch.without_keeper() };
            let mut journal = journal(&disk);
            watch.change(Policies::default(), "client", &mut journal);
            send_as_gateway(&gateways[0], &FromGateway::Unplugged);
            let settled = watch.on_messages(&mut journal);
            assert!(
                matches!(&settled[..], [SettledChange { waiter: "client", result: Err(why) }] if why == GATEWAY_FAILED)
            );
            let now = Instant::now();
            watch.keep_time(&mut journal, None, now);
            assert!(!watch.has_gateway());
            watch.keep_time(&mut journal, None, now + UNPLUGGED_PAUSE);
            assert_eq!(watch.has_gateway(), can_relink);
        }
    }
}
