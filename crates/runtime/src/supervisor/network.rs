//! Watches the network of a sandbox: records what its gateway reports, and starts another gateway in place of one that is
//! lost. Until there is one the sandbox has no network, and nothing of it goes anywhere.
//!
//! It fails closed: while events cannot be recorded the gateway is told to begin nothing new, nothing more is read from
//! it, and no other one is started. See `super::spool`.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_client::connection::Connection;
use bathy_client::wait::is_readable_before;
use bathy_policy::{Policies, PublishedPort};
use bathy_protocol::ToKeeper;
use bathy_protocol::network::FromGateway;

use super::changes::{Changes, Settled};
use super::journal::Journal;
use super::restarts::Restarts;
use super::spool::Sink;
use crate::gateway::{self, Gateway, GatewayError, LEAVE_TIME, Network, Received};
use crate::ledger::Ledger;
use crate::net_events::recorded;

/// How many messages are handled at once: whatever a gateway sends, others have their turn.
const AT_ONCE: usize = 256;
/// How long a sandbox may go on after its gateway saw the end of the keeper's link, before it gets another gateway.
const UNPLUGGED_PAUSE: Duration = Duration::from_secs(1);
/// How much is kept of a reason that a gateway gives.
const MOST_REASON: usize = 500;
const SILENT: &str = "the sandbox's gateway does not answer and was ended; nothing goes anywhere until there is another, which keeps to the new policy";
const LOST: &str = "the sandbox's gateway is gone; nothing goes anywhere until there is another, which keeps to the new policy";

/// The gateways of one sandbox, one after the other.
pub trait Gateways {
    /// The control socket of the present one.
    fn control(&self) -> Option<BorrowedFd<'_>>;
    /// What is known from all of them.
    fn ledger(&mut self) -> &mut Ledger;
    /// What the sandbox may reach.
    fn policies(&self) -> Option<&Policies>;
    /// Changes what the sandbox may reach, also for gateways to come. False if there is none at present.
    ///
    /// # Errors
    /// When the present one does not take it.
    fn change(&mut self, policies: Policies) -> Result<bool, GatewayError>;
    /// Why the present one has closed its control socket.
    fn describe_end(&self) -> String;
    /// Ends the present one. What it had sent and was not read.
    fn stop(&mut self) -> Vec<FromGateway>;
    /// Starts another one. The keeper gets a new link if its connection is at hand; without it, the link of the last
    /// gateway is used again.
    ///
    /// # Errors
    /// When it cannot be started, or the keeper does not take the link.
    fn start(&mut self, keeper: Option<&mut Connection>) -> Result<(), GatewayError>;
}

/// Gateways that are processes.
#[derive(Debug)]
pub struct SandboxGateways {
    network: Network,
    gateway: Option<Gateway>,
}

impl SandboxGateways {
    /// Starts the first one.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(mut network: Network) -> Result<Self, GatewayError> {
        let gateway = Some(network.start()?);
        Ok(Self { network, gateway })
    }

    /// The published ports, with the numbers that they have.
    pub fn ports(&self) -> Vec<PublishedPort> {
        self.network.ports.iter().map(|(port, _)| *port).collect()
    }
}

impl Gateways for SandboxGateways {
    fn control(&self) -> Option<BorrowedFd<'_>> {
        self.gateway.as_ref().map(Gateway::fd)
    }

    fn ledger(&mut self) -> &mut Ledger {
        &mut self.network.ledger
    }

    fn policies(&self) -> Option<&Policies> {
        Some(&self.network.policies)
    }

    fn change(&mut self, policies: Policies) -> Result<bool, GatewayError> {
        self.network.policies = policies;
        let Some(gateway) = &self.gateway else { return Ok(false) };
        gateway.change(&self.network.policies)?;
        Ok(true)
    }

    fn describe_end(&self) -> String {
        self.gateway.as_ref().map(Gateway::end).unwrap_or_default()
    }

    fn stop(&mut self) -> Vec<FromGateway> {
        self.gateway.take().map(Gateway::end_now).unwrap_or_default()
    }

    fn start(&mut self, keeper: Option<&mut Connection>) -> Result<(), GatewayError> {
        let Some(keeper) = keeper else {
            self.gateway = Some(self.network.start()?);
            return Ok(());
        };
        let (keepers, gateways) = gateway::link()?;
        self.network.link = gateways;
        let gateway = self.network.start()?;
        keeper.tell_with(&ToKeeper::Link, &keepers).map_err(GatewayError::Prepare)?;
        self.gateway = Some(gateway);
        Ok(())
    }
}

/// Watches one sandbox's network.
#[derive(Debug)]
pub struct NetworkWatch<W, G = SandboxGateways> {
    gateways: G,
    restarts: Restarts,
    changes: Changes<W>,
    /// Whether the present gateway was told to begin nothing new.
    is_held: bool,
    /// The sandbox is about to end, and its gateway with it.
    is_ending: bool,
    /// Whether a gateway that saw the end of the link gets a successor: there has to be another link for it.
    can_relink: bool,
}

/// Why there is no gateway any more.
enum Loss {
    /// It saw the end of the keeper's link: the sandbox is at its end, or only the link is.
    Unplugged,
    Failed(String),
    /// The sandbox has ended.
    AtEnd,
}

impl<W, G: Gateways> NetworkWatch<W, G> {
    /// Watches from now on.
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

    /// The same where the keeper's connection is not at hand: every gateway has the same link.
    pub fn without_keeper(self) -> Self {
        Self { can_relink: false, ..self }
    }

    /// The gateway's end is expected from now on.
    pub fn expect_end(&mut self) {
        self.is_ending = true;
    }

    /// Whether there is a gateway.
    pub fn has_gateway(&self) -> bool {
        self.gateways.control().is_some()
    }

    /// What to poll; none while messages are not read. While events wait to be recorded that is only the case for the answer
    /// to a policy change, which overtakes a gateway's events, and for the last messages of a sandbox that ends.
    pub fn fd<S: Sink>(&self, journal: &Journal<S>) -> Option<BorrowedFd<'_>> {
        let awaits_answer = !self.changes.is_empty() && journal.has_room();
        let reads = journal.is_empty() || self.is_ending || awaits_answer;
        self.gateways.control().filter(|_| reads)
    }

    /// When [`Self::keep_time`] has something to do. No gateway is started while events wait to be recorded, since it would
    /// begin something new before it could be told not to.
    pub fn due<S: Sink>(&self, journal: &Journal<S>) -> Option<Instant> {
        let may_restart = journal.is_empty() && !self.is_ending;
        let restart = self.restarts.due().filter(|_| may_restart);
        [restart, self.changes.due()].into_iter().flatten().min()
    }

    /// Handles what the gateway has sent.
    pub fn on_messages<S: Sink>(&mut self, journal: &mut Journal<S>) -> Vec<Settled<W>> {
        let (mut events, mut settled, mut loss) = (Vec::new(), Vec::new(), None);
        for _ in 0..AT_ONCE {
            let Some(control) = self.gateways.control().filter(|_| loss.is_none()) else { break };
            match gateway::receive(control) {
                Received::Nothing => break,
                // Asking how it ended takes a moment, which nobody needs at the end.
                Received::Closed if self.is_ending => loss = Some(Loss::AtEnd),
                Received::Closed => loss = Some(Loss::Failed(self.gateways.describe_end())),
                Received::Message(FromGateway::Unplugged) => loss = Some(Loss::Unplugged),
                Received::Message(FromGateway::Failed(reason)) => {
                    loss = Some(Loss::Failed(reason.chars().take(MOST_REASON).collect()));
                }
                Received::Message(FromGateway::Changed { closed }) => {
                    let answered = self.changes.answered();
                    settled.extend(answered.map(|waiter| Settled { waiter, result: Ok(closed) }));
                }
                Received::Message(message) => events.extend(self.event_of(message)),
            }
        }
        journal.note_all(events);
        if let Some(loss) = loss {
            settled.extend(self.lose(loss, journal, Instant::now()));
        }
        settled
    }

    /// What is recorded of a message.
    fn event_of(&mut self, message: FromGateway) -> Option<What> {
        self.gateways.ledger().on_message(&message, Instant::now());
        match message {
            FromGateway::Event(event) => Some(recorded(event, self.gateways.policies())),
            _ => None,
        }
    }

    /// Records the end of the present gateway and of what it had open. Who waits for its answers gets none.
    fn lose<S: Sink>(&mut self, loss: Loss, journal: &mut Journal<S>, now: Instant) -> Vec<Settled<W>> {
        let left = self.gateways.stop();
        let mut events: Vec<_> = left.into_iter().filter_map(|message| self.event_of(message)).collect();
        events.extend(self.gateways.ledger().close(now));
        self.is_held = false;
        match loss {
            Loss::Unplugged if self.can_relink => self.restarts.want(now + UNPLUGGED_PAUSE),
            Loss::Unplugged => self.is_ending = true,
            Loss::Failed(reason) if !self.is_ending => {
                self.restarts.lost(now);
                events.push(What::GatewayLost { reason, restarted: false });
            }
            Loss::Failed(_) | Loss::AtEnd => {}
        }
        journal.note_all(events);
        let abandoned = self.changes.abandon().into_iter();
        abandoned.map(|waiter| Settled { waiter, result: Err(LOST.to_owned()) }).collect()
    }

    /// Tells the gateway whether something new may begin, gives up on policy changes that take too long, and starts another
    /// gateway when it is time.
    pub fn keep_time<S: Sink>(
        &mut self,
        journal: &mut Journal<S>,
        keeper: Option<&mut Connection>,
        now: Instant,
    ) -> Vec<Settled<W>> {
        let mut settled = self.send_hold(journal, now);
        let late = self.changes.take_late(now);
        if !late.is_empty() {
            settled.extend(late.into_iter().map(|waiter| Settled { waiter, result: Err(SILENT.to_owned()) }));
            // It may serve by the old policy still.
            let reason = "it did not take a new policy in time".to_owned();
            settled.extend(self.lose(Loss::Failed(reason), journal, now));
        }
        if !self.is_ending && journal.is_empty() && self.restarts.take_due(now) {
            match self.gateways.start(keeper) {
                Ok(()) => {
                    journal.note(What::GatewayLost { reason: "it is back".to_owned(), restarted: true });
                }
                Err(error) => {
                    let reason = format!("it could not be started again: {}", bathy_protocol::chain(&error));
                    settled.extend(self.lose(Loss::Failed(reason), journal, now));
                }
            }
        }
        settled
    }

    fn send_hold<S: Sink>(&mut self, journal: &mut Journal<S>, now: Instant) -> Vec<Settled<W>> {
        let hold = !journal.is_empty();
        let Some(control) = self.gateways.control().filter(|_| hold != self.is_held) else {
            return Vec::new();
        };
        match gateway::hold(control, hold) {
            Ok(()) => self.is_held = hold,
            // Its last messages are still to be read.
            Err(_) if self.is_ending => {}
            // It may go on as before.
            Err(_) => {
                return self.lose(Loss::Failed("it did not take what it was told".to_owned()), journal, now);
            }
        }
        Vec::new()
    }

    /// Changes what the sandbox may reach. `waiter` is settled at once, or by a later message.
    pub fn change<S: Sink>(
        &mut self,
        policies: Policies,
        waiter: W,
        journal: &mut Journal<S>,
    ) -> Vec<Settled<W>> {
        let failed = |waiter, reason: &str| vec![Settled { waiter, result: Err(reason.to_owned()) }];
        match self.gateways.change(policies) {
            Ok(true) => {
                self.changes.sent(waiter, Instant::now());
                Vec::new()
            }
            Ok(false) => failed(waiter, LOST),
            Err(GatewayError::Silent) => {
                let mut settled = failed(waiter, SILENT);
                settled.extend(self.lose(
                    Loss::Failed("it did not take a new policy".to_owned()),
                    journal,
                    Instant::now(),
                ));
                settled
            }
            Err(error) => failed(waiter, &error.to_string()),
        }
    }

    /// Records what the gateway still reports once its sandbox has ended: what was open, and how much it carried.
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
    use super::super::testing::{Disk, Sockets, event, journal, tell, told};
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
        tell(&gateways[0], &event(0));
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
        tell(&gateways[0], &event(0));
        watch.on_messages(&mut journal);
        watch.keep_time(&mut journal, None, Instant::now());
        assert_eq!(told(&gateways[0]), ToGateway::Hold(true));
        assert!(watch.fd(&journal).is_none());
        assert_eq!(watch.change(Policies::default(), "asker", &mut journal), []);
        assert!(watch.fd(&journal).is_some());
        tell(&gateways[0], &FromGateway::Changed { closed: 3 });
        assert_eq!(watch.on_messages(&mut journal), [Settled { waiter: "asker", result: Ok(3) }]);
        assert!(watch.fd(&journal).is_none());
    }

    #[test]
    fn a_gateway_that_takes_no_policy_is_replaced() {
        let disk = Disk::default();
        let (mut watch, _gateways) = watch(2);
        let mut journal = journal(&disk);
        assert_eq!(watch.change(Policies::default(), "asker", &mut journal), []);
        let late = watch.due(&journal).unwrap();
        assert_eq!(watch.keep_time(&mut journal, None, late - Duration::from_millis(1)), []);
        let settled = watch.keep_time(&mut journal, None, late);
        assert!(matches!(&settled[..], [Settled { waiter: "asker", result: Err(why) }] if why == SILENT));
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
            watch.change(Policies::default(), "asker", &mut journal);
            tell(&gateways[0], &FromGateway::Unplugged);
            let settled = watch.on_messages(&mut journal);
            assert!(matches!(&settled[..], [Settled { waiter: "asker", result: Err(why) }] if why == LOST));
            let now = Instant::now();
            watch.keep_time(&mut journal, None, now);
            assert!(!watch.has_gateway());
            watch.keep_time(&mut journal, None, now + UNPLUGGED_PAUSE);
            assert_eq!(watch.has_gateway(), can_relink);
        }
    }
}
