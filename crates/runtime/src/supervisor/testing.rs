//! Gateways that are sockets, and an audit log that can be full.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bathy_audit::{Event, LogError, What};
use bathy_client::connection::Connection;
use bathy_client::wait::is_readable_before;
use bathy_policy::Policies;
use bathy_protocol::network::{FromGateway, NetEvent, NetworkLimits, Spent, ToGateway, decode, encode};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::journal::{Journal, Observer, Subject};
use super::network::Gateways;
use super::spool::Sink;
use crate::gateway::{self, Incoming, NetworkError};
use crate::ledger::Ledger;

/// A log that can be full.
#[derive(Clone, Default)]
pub struct Disk(Arc<Mutex<(bool, Vec<u64>)>>, Arc<Mutex<Vec<What>>>, Arc<AtomicUsize>);

impl Disk {
    /// Makes the log full or not.
    pub(crate) fn set_full(&self, is_full: bool) {
        self.0.lock().unwrap().0 = is_full;
    }

    /// Reserves space for so many events of sandboxes that end.
    pub(crate) fn reserve(&self, events: usize) {
        self.2.store(events, Ordering::Relaxed);
    }

    /// The counts of the recorded events, in order.
    pub fn recorded(&self) -> Vec<u64> {
        self.0.lock().unwrap().1.clone()
    }
}

impl Disk {
    pub fn events(&self) -> Vec<What> {
        self.1.lock().unwrap().clone()
    }
}

impl Sink for Disk {
    fn append(&self, events: &[Event]) -> Result<(), LogError> {
        if self.0.lock().unwrap().0 {
            return Err(LogError::Full(PathBuf::new()));
        }
        self.write(events);
        Ok(())
    }

    fn append_last(&self, events: &[Event]) -> Result<(), LogError> {
        let is_full = self.0.lock().unwrap().0;
        let left = self.2.load(Ordering::Relaxed).checked_sub(events.len());
        match left.filter(|_| is_full) {
            Some(left) => self.2.store(left, Ordering::Relaxed),
            None => return self.append(events),
        }
        self.write(events);
        Ok(())
    }
}

impl Disk {
    fn write(&self, events: &[Event]) {
        self.1.lock().unwrap().extend(events.iter().map(|event| event.what.clone()));
        let counts = events.iter().map(|event| match event.what {
            What::NetDropped { count, .. } => count,
            _ => u64::MAX,
        });
        self.0.lock().unwrap().1.extend(counts);
    }
}

/// The budgets that each gateway but the first was started with.
pub type Started = Arc<Mutex<Vec<Option<Spent>>>>;

/// Sockets in place of gateways, one after the other.
pub struct Sockets {
    control: Option<OwnedFd>,
    ledger: Ledger,
    next: Vec<OwnedFd>,
    started: Started,
}

impl Gateways for Sockets {
    fn control(&self) -> Option<BorrowedFd<'_>> {
        self.control.as_ref().map(AsFd::as_fd)
    }

    fn ledger(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    fn policies(&self) -> Option<&Policies> {
        None
    }

    fn change(&mut self, _policies: Policies) -> Result<bool, NetworkError> {
        Ok(self.control.is_some())
    }

    fn describe_end(&self) -> String {
        "it was closed".to_owned()
    }

    fn stop(&mut self) -> Vec<FromGateway> {
        let Some(control) = self.control.take() else { return Vec::new() };
        let next = || match gateway::receive(control.as_fd()) {
            Incoming::Message(message) => Some(message),
            _ => None,
        };
        std::iter::from_fn(next).collect()
    }

    fn start(&mut self, _keeper: Option<&mut Connection>) -> Result<(), NetworkError> {
        let control = self.next.pop().ok_or(NetworkError::Silent)?;
        self.started.lock().unwrap().push(self.ledger.carried_over(Instant::now()));
        self.control = Some(control);
        Ok(())
    }
}

impl Sockets {
    /// Creates `count` gateways. Also returns the other ends of their sockets, and the budgets they are
    /// started with.
    pub fn new(count: usize) -> (Self, Vec<OwnedFd>, Started) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let (mut next, gateways): (Vec<_>, Vec<_>) = std::iter::repeat_with(pair).take(count).unzip();
        next.reverse();
        let started = Arc::new(Mutex::new(Vec::new()));
        let control = next.pop();
        let ledger = Ledger::new(&NetworkLimits::default());
        (Self { control, ledger, next, started: Arc::clone(&started) }, gateways, started)
    }
}

/// A journal that is written to this disk.
pub fn journal(disk: &Disk) -> Journal<Disk> {
    let subject = Subject { program: "test", id: "abc".to_owned(), name: None };
    Journal::new(disk.clone(), subject, Box::new(NoObserver))
}

struct NoObserver;

impl Observer for NoObserver {
    fn on_event(&mut self, _event: &Event) {}
    fn on_backlog(&mut self, _failure: &str) {}
}

/// Sends a message as the gateway.
pub(crate) fn send_as_gateway(gateway: &OwnedFd, message: &FromGateway) {
    send(gateway, &encode(message).unwrap(), SendFlags::NOSIGNAL).unwrap();
}

/// Sends a message as the gateway, or waits a moment if there is no space; false if the other end is closed.
pub(crate) fn try_send_as_gateway(gateway: &OwnedFd, message: &FromGateway) -> bool {
    match send(gateway, &encode(message).unwrap(), SendFlags::NOSIGNAL) {
        Ok(_) => true,
        Err(rustix::io::Errno::AGAIN) => {
            std::thread::yield_now();
            true
        }
        Err(_) => false,
    }
}

/// An event that is recorded with this count.
pub fn event(count: u64) -> FromGateway {
    FromGateway::Event(NetEvent::Dropped { reason: String::new(), count })
}

/// The next message to the gateway.
pub(crate) fn next_to_gateway(gateway: &OwnedFd) -> ToGateway {
    assert!(is_readable_before(gateway.as_fd(), Instant::now() + Duration::from_secs(10)));
    let mut message = [0; 64];
    let (count, _) = recv(gateway, &mut message, RecvFlags::empty()).unwrap();
    decode(&message[..count]).unwrap()
}
