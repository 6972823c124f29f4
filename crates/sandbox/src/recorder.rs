//! Records what the gateway of an ephemeral sandbox reports, beside everything else that the process does. The monitor does the
//! same for a persistent one.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bathy_audit::{Event, Log, What};
use bathy_policy::Policies;
use bathy_protocol::network::{FromGateway, NetEvent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::gateway::{self, Gateway, Word};
use crate::net_events::recorded;
use crate::spool::{Sink, Spool};

/// How many reports are recorded at once.
const AT_ONCE: usize = 256;
/// How long the end of the sandbox may go unnoticed while events wait to be recorded.
const LOOK: Duration = Duration::from_millis(100);

/// What is done with a report besides recording it.
pub struct Hooks {
    /// Makes the event of it.
    pub event: Box<dyn FnMut(What) -> Event + Send>,
    /// Is told why events cannot be recorded, each time when that begins.
    pub waits: Box<dyn FnMut(&str) + Send>,
}

/// Records what a gateway reports.
#[derive(Debug)]
pub struct Recorder {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Unrecorded>,
}

/// Events that could not be recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unrecorded {
    /// How many.
    pub events: u64,
    /// Why not.
    pub failure: String,
}

impl Recorder {
    /// Records until the gateway is gone, which serves by `policies`.
    ///
    /// # Errors
    /// When the host has no room for a thread.
    pub fn start(gateway: &Gateway, policies: Policies, log: Log, hooks: Hooks) -> std::io::Result<Self> {
        let (control, process) = gateway.listener()?;
        let is_over = Arc::new(AtomicBool::new(false));
        let expected = Arc::clone(&is_over);
        let mut listener =
            Listener { control, process, is_over: expected, held: false, events: Spool::new(log), hooks };
        let recorded = move |event| recorded(event, Some(&policies));
        let work = move || listener.listen(recorded);
        Ok(Self { is_over, thread: thread::Builder::new().name("network".to_owned()).spawn(work)? })
    }

    /// The gateway's end is expected from now on.
    pub fn expect_end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Waits until all of it is recorded that can be. The gateway is gone.
    pub fn finish(self) -> Unrecorded {
        // It ends with the gateway's last message, whatever it is. A panic would have ended the program.
        self.thread.join().unwrap_or_default()
    }
}

struct Listener<S> {
    control: OwnedFd,
    process: OwnedFd,
    is_over: Arc<AtomicBool>,
    /// Whether the gateway was told to begin nothing new.
    held: bool,
    events: Spool<S>,
    hooks: Hooks,
}

impl<S: Sink> Listener<S> {
    fn listen(&mut self, recorded: impl Fn(NetEvent) -> What) -> Unrecorded {
        loop {
            // While events wait, only a sandbox that ends is heard: what it says then is the last.
            let reads = self.events.is_empty() || self.is_over.load(Ordering::Relaxed);
            let is_gone = reads && self.read(&recorded);
            self.events.retry(Instant::now());
            self.tell_hold();
            if is_gone {
                let events = self.events.finish();
                return Unrecorded { events, failure: self.events.failure().to_owned() };
            }
            self.wait();
        }
    }

    /// Takes what the gateway has reported. Whether it is gone.
    fn read(&mut self, recorded: &impl Fn(NetEvent) -> What) -> bool {
        let mut events = Vec::new();
        let mut gone = None;
        while events.len() < AT_ONCE && gone.is_none() {
            match gateway::hear(&self.control) {
                Word::Said(FromGateway::Event(event)) => events.push(recorded(event)),
                Word::Said(FromGateway::Failed(reason)) => gone = Some(reason.chars().take(500).collect()),
                Word::Said(FromGateway::Ready | FromGateway::Changed { .. }) => {}
                // The sandbox is at its end, which is not the gateway's doing.
                Word::Said(FromGateway::Unplugged) => self.is_over.store(true, Ordering::Relaxed),
                Word::Gone if self.is_over.load(Ordering::Relaxed) => gone = Some(String::new()),
                Word::Gone => gone = Some(gateway::end_of(&self.process)),
                Word::Nothing => break,
            }
        }
        let is_gone = gone.is_some();
        if let Some(reason) = gone.filter(|_| !self.is_over.load(Ordering::Relaxed)) {
            events.push(What::GatewayLost { reason, restarted: false });
        }
        let was_empty = self.events.is_empty();
        self.events.record(events.into_iter().map(&mut self.hooks.event), Instant::now());
        if was_empty && !self.events.is_empty() {
            (self.hooks.waits)(self.events.failure());
        }
        is_gone
    }

    /// Tells the gateway whether something new may begin, whenever that changes.
    fn tell_hold(&mut self) {
        let hold = !self.events.is_empty();
        // One that does not take it has stopped, or is about to be noticed as gone; it is tried again.
        if hold != self.held && gateway::hold(&self.control, hold).is_ok() {
            self.held = hold;
        }
    }

    /// Waits for the gateway, or for the time to try again.
    fn wait(&self) {
        let Some(due) = self.events.due() else {
            // Interrupted or not: it is looked at again.
            let _ = poll(&mut [PollFd::new(&self.control, PollFlags::IN)], None);
            return;
        };
        let left = due.saturating_duration_since(Instant::now()).min(LOOK);
        if self.is_over.load(Ordering::Relaxed) {
            let wait = Timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().into() };
            let _ = poll(&mut [PollFd::new(&self.control, PollFlags::IN)], Some(&wait));
        } else {
            thread::sleep(left);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Mutex;

    use bathy_audit::{Actor, LogError};
    use bathy_protocol::network::{ToGateway, decode, encode};
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

    use super::*;

    /// A log that is full or not.
    #[derive(Clone, Default)]
    struct Disk(Arc<Mutex<(bool, Vec<u64>)>>);

    impl Disk {
        fn set_full(&self, is_full: bool) {
            self.0.lock().unwrap().0 = is_full;
        }

        fn recorded(&self) -> Vec<u64> {
            self.0.lock().unwrap().1.clone()
        }
    }

    impl Sink for Disk {
        fn append(&self, events: &[Event]) -> Result<(), LogError> {
            let (is_full, recorded) = &mut *self.0.lock().unwrap();
            if *is_full {
                return Err(LogError::Full(PathBuf::new()));
            }
            recorded.extend(events.iter().map(|event| match event.what {
                What::NetDropped { count, .. } => count,
                _ => u64::MAX,
            }));
            Ok(())
        }

        fn append_last(&self, events: &[Event]) -> Result<(), LogError> {
            self.append(events)
        }
    }

    /// A recorder, and the gateway's end of its socket.
    fn scene(disk: &Disk) -> (Recorder, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (control, gateway) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let event = |what| Event::now(Actor::this_process("test"), what);
        let hooks = Hooks { event: Box::new(event), waits: Box::new(|_| {}) };
        let mut listener = Listener {
            process: control.try_clone().unwrap(),
            control,
            is_over: Arc::clone(&is_over),
            held: false,
            events: Spool::new(disk.clone()),
            hooks,
        };
        let thread = thread::spawn(move || listener.listen(|event| recorded(event, None)));
        (Recorder { is_over, thread }, gateway)
    }

    fn tell(gateway: &OwnedFd, message: &FromGateway) {
        send(gateway, &encode(message).unwrap(), SendFlags::NOSIGNAL).unwrap();
    }

    fn event(count: u64) -> FromGateway {
        FromGateway::Event(NetEvent::Dropped { reason: String::new(), count })
    }

    /// What the gateway is told next.
    fn told(gateway: &OwnedFd) -> ToGateway {
        let wait = Timespec { tv_sec: 10, tv_nsec: 0 };
        poll(&mut [PollFd::new(gateway, PollFlags::IN)], Some(&wait)).unwrap();
        let mut message = [0; 64];
        let (count, _) = recv(gateway, &mut message, RecvFlags::empty()).unwrap();
        decode(&message[..count]).unwrap()
    }

    #[test]
    fn f1_the_gateway_of_an_ephemeral_sandbox_waits_until_its_events_are_recorded() {
        let disk = Disk::default();
        disk.set_full(true);
        let (recorder, gateway) = scene(&disk);
        tell(&gateway, &event(0));
        assert_eq!(told(&gateway), ToGateway::Hold(true));
        (1..40).for_each(|count| tell(&gateway, &event(count)));
        disk.set_full(false);
        assert_eq!(told(&gateway), ToGateway::Hold(false));
        tell(&gateway, &FromGateway::Unplugged);
        drop(gateway);
        assert_eq!(recorder.finish().events, 0);
        assert_eq!(disk.recorded(), (0..40).collect::<Vec<_>>());
    }

    #[test]
    fn f1_what_cannot_be_recorded_of_a_sandbox_that_ends_is_counted() {
        let disk = Disk::default();
        disk.set_full(true);
        let (recorder, gateway) = scene(&disk);
        tell(&gateway, &event(0));
        assert_eq!(told(&gateway), ToGateway::Hold(true));
        recorder.expect_end();
        (1..40).for_each(|count| tell(&gateway, &event(count)));
        tell(&gateway, &FromGateway::Unplugged);
        drop(gateway);
        let unrecorded = recorder.finish();
        assert_eq!(unrecorded.events, 40);
        assert!(unrecorded.failure.contains("full"), "{unrecorded:?}");
    }
}
