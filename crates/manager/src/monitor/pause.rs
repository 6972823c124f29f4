//! Pause and resume: on request, or because the sandbox is idle.
//!
//! A pause on request ends on request. An idle pause ends with the next client, which only notices the delay.
//! While a guest is paused, neither the monitor nor its keeper wakes up by itself.
//!
//! While the memory is being moved, the keeper gets no other message: it reads messages only when the guest
//! runs again. So each move is completed before the opposite one is requested.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_protocol::ToKeeper;

use super::control::FromMonitor;
use super::pending::{refuse, respond};
use super::serve::{Loop, MAX_WAITING, POWER_OFF};
use super::{Monitor, log};
use crate::store::{Change, State};

/// How long a guest that is to be shut down may take to resume first.
const WAKING: Duration = Duration::from_secs(30);

/// The state of a guest between running and paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Motion {
    #[default]
    Runs,
    /// It is frozen, and its keeper is about to be; its memory may be on the way to disk.
    Parking,
    Still,
    /// It is frozen, and its memory, if it was moved, is on the way back.
    Unparking,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Pause,
    Resume,
    Connect,
}

/// The state of the event loop that concerns pauses.
#[derive(Default)]
pub(super) struct Pause {
    motion: Motion,
    /// The pause is an idle pause: the next client ends it.
    idle: bool,
    /// The clients that wait for the present move to end.
    waiting: Vec<(OwnedFd, Wanted)>,
    /// The pause failed because the memory could not be moved, so no resume is recorded.
    not_paused: bool,
    /// The last idle pause failed. It is not retried until the next client.
    failed: bool,
    /// The grace period in milliseconds for shutting the guest down as soon as it has resumed.
    power_off: Option<u32>,
}

impl Pause {
    /// Whether the guest is paused.
    pub fn frozen(&self) -> bool {
        self.motion != Motion::Runs
    }

    /// Whether its memory is being moved: then its keeper answers nothing else.
    pub fn moving(&self) -> bool {
        matches!(self.motion, Motion::Parking | Motion::Unparking)
    }

    pub(crate) fn on_client(&mut self) {
        self.failed = false;
    }
}

impl Monitor {
    /// When the sandbox will be paused if no client connects.
    pub(super) fn pause_due(&self, state: &Loop) -> Option<Instant> {
        let pause = &state.pause;
        if pause.frozen() || pause.failed || state.stopping.is_some() || !state.clients.is_empty() {
            return None;
        }
        if !self.supervisor.journal.has_capacity() {
            return None;
        }
        state.idle_since?.checked_add(self.record.spec.pause_idle?.into())
    }

    /// Starts an idle pause.
    pub(super) fn pause_idle(&mut self, state: &mut Loop) {
        if let Err(error) = self.freezer.freeze() {
            state.pause.failed = true;
            let detail = format!("the sandbox keeps running: {}", bathy_protocol::chain(&error));
            self.note(What::limit_hit("pause-idle", detail));
            return;
        }
        state.pause.idle = true;
        self.park(state, true);
    }

    /// Pauses the guest on request.
    pub(super) fn pause_by_hand(&mut self, socket: OwnedFd, release_memory: bool, state: &mut Loop) {
        if !self.supervisor.journal.has_capacity() {
            return refuse(&socket, self.supervisor.journal.failure());
        }
        match state.pause.motion {
            Motion::Runs => {}
            Motion::Unparking => return refuse(&socket, "the sandbox is being resumed; try again"),
            Motion::Parking | Motion::Still => return self.on_paused_already(socket, state),
        }
        if let Err(error) = self.freezer.freeze() {
            return refuse(&socket, &bathy_protocol::chain(&error));
        }
        state.pause.idle = false;
        self.wait_for_motion(socket, Wanted::Pause, state);
        self.park(state, release_memory);
    }

    /// The guest is paused already; from now on on request.
    fn on_paused_already(&mut self, socket: OwnedFd, state: &mut Loop) {
        let was_idle = std::mem::take(&mut state.pause.idle);
        if was_idle {
            let hopeful = |(_, wanted): &mut (OwnedFd, Wanted)| *wanted != Wanted::Pause;
            for (socket, _) in state.pause.waiting.extract_if(.., hopeful) {
                refuse(&socket, "the sandbox was paused just now");
            }
        }
        if state.pause.motion == Motion::Parking {
            return self.wait_for_motion(socket, Wanted::Pause, state);
        }
        if was_idle {
            self.write(&[State::Paused], State::Paused, false);
            self.note(What::SandboxPaused);
        }
        respond(&socket, &FromMonitor::Done);
    }

    /// Resumes the guest on request.
    pub(super) fn resume(&mut self, socket: OwnedFd, state: &mut Loop) {
        if !state.pause.frozen() {
            return respond(&socket, &FromMonitor::Done);
        }
        self.wait_for_motion(socket, Wanted::Resume, state);
        self.wake(state);
    }

    /// Connects a client, after resuming the guest from an idle pause.
    pub(super) fn admit_client(&mut self, socket: OwnedFd, state: &mut Loop) {
        match state.pause.motion {
            Motion::Runs => self.connect(socket, state),
            Motion::Parking | Motion::Still if !state.pause.idle => {
                refuse(&socket, "the sandbox is paused; `bathy resume` resumes it");
            }
            Motion::Parking | Motion::Still | Motion::Unparking => {
                self.wait_for_motion(socket, Wanted::Connect, state);
                self.wake(state);
            }
        }
    }

    /// Shuts down a guest in an idle pause: it is resumed first, so that unwritten data is not lost. False
    /// for any other guest.
    pub(super) fn stop_when_awake(&mut self, state: &mut Loop, why: &str, grace_ms: u32) -> bool {
        if !state.pause.frozen() || !state.pause.idle {
            return false;
        }
        if state.stopping.is_none() {
            let until = Instant::now() + WAKING + Duration::from_millis(grace_ms.into()) + POWER_OFF;
            state.stopping = Some((why.to_owned(), until));
            state.pause.power_off = Some(grace_ms);
            self.wake(state);
        }
        true
    }

    /// The keeper has moved the memory, or failed to.
    pub(super) fn moved(&mut self, failure: Option<&str>, state: &mut Loop) {
        match state.pause.motion {
            Motion::Parking => self.parked(failure, state),
            Motion::Unparking => self.unparked(state),
            // The keeper sent an unexpected report.
            Motion::Runs | Motion::Still => return,
        }
        if !state.pause.moving() && !state.waiting.is_empty() {
            // These clients asked during the move. Encoding this message does not fail.
            let _ = self.supervisor.sandbox.connection.queue_to_keeper(&ToKeeper::Usage);
        }
    }

    fn parked(&mut self, failure: Option<&str>, state: &mut Loop) {
        if let Some(reason) = failure.filter(|_| !state.pause.idle) {
            // Not left half paused: the guest resumes when its keeper reports so.
            state.pause.motion = Motion::Still;
            state.pause.not_paused = true;
            self.wake(state);
            let reason = format!("its memory cannot be moved to the host's disk: {reason}");
            self.answer_waiting(state, Wanted::Pause, Some(&reason));
        } else {
            // For an idle pause, freezing without moving the memory is better than nothing.
            state.pause.motion = Motion::Still;
            self.record_pause(state);
            self.answer_waiting(state, Wanted::Pause, None);
        }
        if state.pause.motion == Motion::Still
            && (!state.pause.waiting.is_empty() || state.pause.power_off.is_some())
        {
            self.wake(state);
        }
    }

    fn unparked(&mut self, state: &mut Loop) {
        if let Err(error) = self.freezer.thaw() {
            state.pause.motion = Motion::Still;
            let reason = bathy_protocol::chain(&error);
            for wanted in [Wanted::Resume, Wanted::Connect] {
                self.answer_waiting(state, wanted, Some(&reason));
            }
            return;
        }
        state.pause.motion = Motion::Runs;
        state.pause.idle = false;
        // The idle time starts over.
        state.idle_since = state.clients.is_empty().then(Instant::now);
        if !std::mem::take(&mut state.pause.not_paused) {
            self.write(&[State::Paused], State::Running, false);
            self.note(What::SandboxResumed);
        }
        self.awake(state);
    }

    /// The guest runs again: serves the clients that waited for that.
    fn awake(&mut self, state: &mut Loop) {
        self.answer_waiting(state, Wanted::Resume, None);
        let stopped = state.stopping.as_ref().map(|_| "the sandbox is being stopped");
        self.answer_waiting(state, Wanted::Connect, stopped);
        if let Some(grace_ms) = state.pause.power_off.take()
            && let Some((_, until)) = &mut state.stopping
        {
            *until = Instant::now() + Duration::from_millis(grace_ms.into()) + POWER_OFF;
            if self.supervisor.sandbox.connection.queue_to_keeper(&ToKeeper::PowerOff { grace_ms }).is_err() {
                self.supervisor.sandbox.kill();
            }
        }
    }

    fn answer_waiting(&mut self, state: &mut Loop, wanted: Wanted, refusal: Option<&str>) {
        let those = state.pause.waiting.extract_if(.., |(_, waits)| *waits == wanted);
        for (socket, _) in those.collect::<Vec<_>>() {
            match refusal {
                Some(reason) => refuse(&socket, reason),
                None if wanted == Wanted::Connect => self.connect(socket, state),
                None => respond(&socket, &FromMonitor::Done),
            }
        }
    }

    fn wait_for_motion(&self, socket: OwnedFd, wanted: Wanted, state: &mut Loop) {
        if state.pause.waiting.len() >= MAX_WAITING {
            return refuse(&socket, "too many clients are waiting for the sandbox");
        }
        state.pause.waiting.push((socket, wanted));
    }

    fn park(&mut self, state: &mut Loop, release_memory: bool) {
        state.pause.motion = Motion::Parking;
        // Encoding this message does not fail.
        let _ = self.supervisor.sandbox.connection.queue_to_keeper(&ToKeeper::Park { release_memory });
    }

    /// Starts moving the memory back. A move to disk has to complete first.
    fn wake(&mut self, state: &mut Loop) {
        if state.pause.motion == Motion::Still {
            state.pause.motion = Motion::Unparking;
            let _ = self.supervisor.sandbox.connection.queue_to_keeper(&ToKeeper::Unpark);
        }
    }

    fn record_pause(&mut self, state: &Loop) {
        self.write(&[State::Running], State::Paused, state.pause.idle);
        self.note(What::SandboxPaused);
    }

    fn write(&mut self, from: &[State], to: State, idle: bool) {
        let written = self.store.transition(&self.record.id, from, to, &[Change::IdlePaused(idle)]);
        if let Err(error) = written {
            log(bathy_protocol::chain(&error));
        }
    }
}
