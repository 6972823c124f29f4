//! The supervisor of an ephemeral sandbox: the main thread talks to the guest, another thread watches the
//! network and the host memory.

use std::convert::Infallible;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bathy_audit::{Log, LogError, What};
use bathy_client::wait::poll_until;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use super::journal::{Journal, Unrecorded};
use super::memory::MemoryWatch;
use super::network::{Gateways, NetworkWatch};
use super::spool::Sink;
use crate::sys;

/// The polling interval for the sandbox's end while events wait to be recorded.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The journal of a sandbox, and the thread that watches its network and memory, if either has to be.
#[derive(Debug)]
pub struct BackgroundSupervisor<S = Log> {
    journal: Arc<Mutex<Journal<S>>>,
    watcher: Option<Watcher>,
}

#[derive(Debug)]
struct Watcher {
    end: Arc<End>,
    thread: JoinHandle<()>,
}

/// The progress of the sandbox's end.
#[derive(Debug)]
struct End {
    is_expected: AtomicBool,
    /// The sandbox has ended, and its gateway is about to.
    has_come: AtomicBool,
    /// Why it was killed, if it had too much memory.
    excess: OnceLock<String>,
    wake: OwnedFd,
}

impl<S: Sink + Send + 'static> BackgroundSupervisor<S> {
    /// A sandbox that nothing is watched of, so far.
    pub fn new(journal: Journal<S>) -> Self {
        Self { journal: Arc::new(Mutex::new(journal)), watcher: None }
    }

    /// Records the start of an operation.
    ///
    /// # Errors
    /// Nothing was recorded, so the operation must not be done.
    pub fn begin(&self, what: impl IntoIterator<Item = What>) -> Result<(), LogError> {
        lock(&self.journal).begin(what)
    }

    /// Watches the sandbox's network, if it has one, and its memory, if no group limits it, until
    /// [`Self::finish`].
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn watch<G: Gateways + Send + 'static>(
        &mut self,
        network: Option<G>,
        memory: Option<MemoryWatch>,
    ) -> io::Result<()> {
        if network.is_some() || memory.is_some() {
            let network = network.map(|gateways| NetworkWatch::new(gateways).without_keeper());
            self.watcher = Some(Watcher::start(network, memory, Arc::clone(&self.journal))?);
        }
        Ok(())
    }

    /// Why the sandbox was killed, if its guest's processes had too much host memory.
    pub fn excess(&self) -> Option<&str> {
        self.watcher.as_ref()?.end.excess.get().map(String::as_str)
    }

    /// From now on the sandbox's end is expected.
    pub fn expect_end(&self) {
        if let Some(watcher) = &self.watcher {
            watcher.end.is_expected.store(true, Ordering::Relaxed);
        }
    }

    /// Waits until the gateway's reports are recorded, then records `last`. The sandbox must have ended.
    /// Returns what could not be recorded.
    pub fn finish(self, last: impl IntoIterator<Item = What>) -> Unrecorded {
        self.expect_end();
        if let Some(Watcher { end, thread }) = self.watcher {
            end.has_come.store(true, Ordering::Relaxed);
            // The counter is far from overflowing.
            let _ = rustix::io::write(&end.wake, &1_u64.to_ne_bytes());
            // A panic would have ended the program.
            let _ = thread.join();
        }
        lock(&self.journal).finish_with(last)
    }
}

impl Watcher {
    fn start<S: Sink + Send + 'static, G: Gateways + Send + 'static>(
        network: Option<NetworkWatch<Infallible, G>>,
        memory: Option<MemoryWatch>,
        journal: Arc<Mutex<Journal<S>>>,
    ) -> io::Result<Self> {
        let end = Arc::new(End::new()?);
        let work = Work { end: Arc::clone(&end), network, memory, journal };
        let builder = thread::Builder::new().name("supervisor".to_owned());
        let thread = sys::apart_from_signals(|| builder.spawn(move || work.run()))?;
        Ok(Self { end, thread })
    }
}

impl End {
    fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            is_expected: AtomicBool::new(false),
            has_come: AtomicBool::new(false),
            excess: OnceLock::new(),
            wake,
        })
    }
}

/// The state of the thread.
struct Work<S, G> {
    end: Arc<End>,
    network: Option<NetworkWatch<Infallible, G>>,
    memory: Option<MemoryWatch>,
    journal: Arc<Mutex<Journal<S>>>,
}

impl<S: Sink, G: Gateways> Work<S, G> {
    fn run(mut self) {
        while !self.end.has_come.load(Ordering::Relaxed) {
            if self.end.is_expected.load(Ordering::Relaxed) {
                self.memory = None;
                self.network.iter_mut().for_each(NetworkWatch::expect_end);
            }
            self.check_memory();
            let mut journal = lock(&self.journal);
            let now = Instant::now();
            if let Some(network) = &mut self.network
                && network.fd(&journal).is_some()
            {
                network.on_messages(&mut journal);
            }
            journal.retry(now);
            if let Some(network) = &mut self.network {
                network.keep_time(&mut journal, None, now);
            }
            let due = self.due(&journal);
            let fd = self.network.as_ref().and_then(|network| network.fd(&journal));
            drop(journal);
            wait(&self.end, fd, due);
        }
        if let Some(network) = &mut self.network {
            network.drain(&mut lock(&self.journal));
        }
    }

    /// Kills the sandbox if its guest's processes have too much host memory.
    fn check_memory(&mut self) {
        let Some(memory) = &mut self.memory else { return };
        let Some(excess) = memory.check(Instant::now()) else { return };
        lock(&self.journal).note(excess.event());
        // The main thread looks for it when the keeper has ended.
        let _ = self.end.excess.set(excess.to_string());
        memory.kill();
        self.memory = None;
    }

    /// When something is to be done without a wake-up.
    fn due(&self, journal: &Journal<S>) -> Option<Instant> {
        let network = self.network.as_ref().and_then(|network| network.due(journal));
        let memory = self.memory.as_ref().map(MemoryWatch::due);
        let due = [journal.due(), network, memory].into_iter().flatten().min();
        if journal.is_empty() {
            return due;
        }
        // An expected end is found by polling.
        let next_poll = Instant::now() + POLL_INTERVAL;
        Some(due.map_or(next_poll, |due| due.min(next_poll)))
    }
}

/// Waits for the gateway, the next retry or the sandbox's end.
fn wait(end: &End, gateway: Option<BorrowedFd<'_>>, due: Option<Instant>) {
    let mut fds = vec![PollFd::new(&end.wake, PollFlags::IN)];
    fds.extend(gateway.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    // Whatever woke it, everything is checked again.
    let _ = poll_until(&mut fds, due);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use bathy_protocol::network::{FromGateway, NetEvent, Peer, Spent, ToGateway, Transport};

    use super::super::testing::{Disk, Sockets, Started, event, journal, next_to_gateway, send_as_gateway};
    use super::*;

    /// A background with `count` gateways, the other ends of their sockets in order, and the budgets that
    /// each but the first was started with.
    fn scene_with(disk: &Disk, count: usize) -> (BackgroundSupervisor<Disk>, Vec<OwnedFd>, Started) {
        let (sockets, gateways, started) = Sockets::new(count);
        let mut background = BackgroundSupervisor::new(journal(disk));
        background.watch(Some(sockets), None).unwrap();
        (background, gateways, started)
    }

    /// A background with one gateway, and the other end of its socket.
    fn scene(disk: &Disk) -> (BackgroundSupervisor<Disk>, OwnedFd) {
        let (background, mut gateways, _) = scene_with(disk, 1);
        (background, gateways.remove(0))
    }

    #[test]
    fn f1_the_gateway_of_an_ephemeral_sandbox_waits_until_its_events_are_recorded() {
        let disk = Disk::default();
        disk.set_full(true);
        let (background, gateway) = scene(&disk);
        send_as_gateway(&gateway, &event(0));
        assert_eq!(next_to_gateway(&gateway), ToGateway::Hold(true));
        (1..40).for_each(|count| send_as_gateway(&gateway, &event(count)));
        disk.set_full(false);
        assert_eq!(next_to_gateway(&gateway), ToGateway::Hold(false));
        send_as_gateway(&gateway, &FromGateway::Unplugged);
        drop(gateway);
        assert_eq!(background.finish([]).events, 0);
        assert_eq!(disk.recorded(), (0..40).collect::<Vec<_>>());
    }

    #[test]
    fn f1_what_cannot_be_recorded_of_a_sandbox_that_ends_is_counted() {
        let disk = Disk::default();
        disk.set_full(true);
        let (background, gateway) = scene(&disk);
        send_as_gateway(&gateway, &event(0));
        assert_eq!(next_to_gateway(&gateway), ToGateway::Hold(true));
        background.expect_end();
        (1..40).for_each(|count| send_as_gateway(&gateway, &event(count)));
        send_as_gateway(&gateway, &FromGateway::Unplugged);
        drop(gateway);
        let unrecorded = background.finish([]);
        assert_eq!(unrecorded.events, 40);
        assert!(unrecorded.failure.contains("full"), "{unrecorded:?}");
    }

    #[test]
    fn f1_the_end_of_an_ephemeral_sandbox_is_recorded_before_its_oldest_queued_events() {
        const QUEUED: u64 = 600;
        let disk = Disk::default();
        disk.set_full(true);
        disk.reserve(300);
        let mut journal = journal(&disk);
        journal.note_all((0..QUEUED).map(|count| What::NetDropped { reason: String::new(), count }));
        let background = BackgroundSupervisor::new(journal);
        let unrecorded = background.finish([What::SandboxRemoved]);
        assert!(matches!(disk.events()[..], [.., What::SandboxRemoved]), "{:?}", disk.events());
        assert_eq!(usize::try_from(unrecorded.events).unwrap(), 601 - disk.events().len());
    }

    #[test]
    fn n9_an_ephemeral_sandbox_gets_another_gateway_and_no_new_budgets() {
        let disk = Disk::default();
        let (background, mut gateways, started) = scene_with(&disk, 2);
        let first = gateways.remove(0);
        let second = gateways.remove(0);
        let address = std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
        let peer = Peer { transport: Transport::Tcp, inbound: false, address, port: 80, name: None };
        send_as_gateway(
            &first,
            &FromGateway::Event(NetEvent::Allowed { number: 2, peer, rule: String::new() }),
        );
        send_as_gateway(&first, &FromGateway::Spent(Spent { age_ms: 10, total: 500, most: 400 }));
        drop(first);
        send_as_gateway(&second, &event(7));
        let until = Instant::now() + Duration::from_secs(60);
        while !disk.recorded().contains(&7) && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        background.expect_end();
        drop(second);
        assert_eq!(background.finish([]).events, 0);
        let spent = started.lock().unwrap().clone();
        assert!(matches!(spent[..], [Some(Spent { total: 500, most: 400, .. })]), "{spent:?}");
        let events = disk.events();
        let [opened, closed, lost, back, What::NetDropped { count: 7, .. }] = &events[..] else {
            panic!("{events:?}")
        };
        assert!(matches!(opened, What::NetAllowed { .. }), "{opened:?}");
        assert!(matches!(closed, What::NetClosed { sent: None, received: None, .. }), "{closed:?}");
        assert!(matches!(lost, What::GatewayLost { restarted: false, .. }), "{lost:?}");
        assert!(matches!(back, What::GatewayLost { restarted: true, .. }), "{back:?}");
    }

    #[test]
    fn a_gateway_that_does_not_exit_is_not_waited_for() {
        let (background, _gateway) = scene(&Disk::default());
        assert_eq!(background.finish([]).events, 0);
    }
}
