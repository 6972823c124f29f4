//! Standing still and going on: asked for by hand, or because nobody has been connected for a while.
//!
//! A pause by hand ends by hand. One for want of clients ends with the next client, which notices nothing but the time
//! that it takes. While a guest stands still nothing here or in its keeper wakes up by itself.
//!
//! The keeper is never told to move the memory one way before it has said that it moved it the other way, nor anything
//! else meanwhile: whatever reaches it in between, it may only look at when the guest goes on.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_protocol::ToKeeper;

use super::control::FromMonitor;
use super::pending::{refuse, say};
use super::serve::{Loop, MOST_WAITING, POWER_OFF};
use super::{Monitor, complain};
use crate::store::{Change, State};

/// How long a guest that is to be shut down may take to be awake first.
const WAKING: Duration = Duration::from_secs(30);

/// Where a guest is between running and standing still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Motion {
    #[default]
    Runs,
    /// It is frozen, and its keeper is about to stand still with it; its memory may be on the way to disk.
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

/// What the loop knows about pauses.
#[derive(Default)]
pub(super) struct Pause {
    motion: Motion,
    /// Nobody asked for it: the next client ends it.
    idle: bool,
    /// Who waits for the present motion to end.
    waiting: Vec<(OwnedFd, Wanted)>,
    /// It never stood still, because its memory could not be moved: nobody is told that it goes on.
    not_paused: bool,
    /// It did not work for want of clients, and is not tried again before somebody has been here.
    failed: bool,
    /// Milliseconds of grace with which the guest is shut down as soon as it is awake.
    power_off: Option<u32>,
}

impl Pause {
    /// Whether the guest stands still.
    pub fn frozen(&self) -> bool {
        self.motion != Motion::Runs
    }

    /// Whether its memory is being moved: then its keeper answers nothing else.
    pub fn moving(&self) -> bool {
        matches!(self.motion, Motion::Parking | Motion::Unparking)
    }

    pub fn on_client(&mut self) {
        self.failed = false;
    }
}

impl Monitor {
    /// When the sandbox is paused if nobody comes.
    pub(super) fn pause_due(&self, state: &Loop) -> Option<Instant> {
        let pause = &state.pause;
        if pause.frozen() || pause.failed || state.stopping.is_some() || !state.clients.is_empty() {
            return None;
        }
        if !self.supervisor.journal.has_room() {
            return None;
        }
        state.idle_since?.checked_add(self.record.spec.pause_idle?.into())
    }

    /// Nobody has been here for long enough.
    pub(super) fn pause_idle(&mut self, state: &mut Loop) {
        if let Err(error) = self.freezer.freeze() {
            state.pause.failed = true;
            let detail = format!("the sandbox goes on: {}", bathy_protocol::chain(&error));
            self.note(What::limit_hit("pause-idle", detail));
            return;
        }
        state.pause.idle = true;
        self.park(state, true);
    }

    /// Somebody wants it to stand still.
    pub(super) fn pause_by_hand(&mut self, socket: OwnedFd, release_memory: bool, state: &mut Loop) {
        if !self.supervisor.journal.has_room() {
            return refuse(&socket, self.supervisor.journal.failure());
        }
        match state.pause.motion {
            Motion::Runs => {}
            Motion::Unparking => return refuse(&socket, "the sandbox is being resumed; try again"),
            Motion::Parking | Motion::Still => return self.keep_still(socket, state),
        }
        if let Err(error) = self.freezer.freeze() {
            return refuse(&socket, &bathy_protocol::chain(&error));
        }
        state.pause.idle = false;
        self.wait_for_motion(socket, Wanted::Pause, state);
        self.park(state, release_memory);
    }

    /// It stands still already; from now on because somebody wants it to.
    fn keep_still(&mut self, socket: OwnedFd, state: &mut Loop) {
        let was_idle = std::mem::take(&mut state.pause.idle);
        if was_idle {
            let hopeful = |(_, wanted): &mut (OwnedFd, Wanted)| *wanted != Wanted::Pause;
            for (socket, _) in state.pause.waiting.extract_if(.., hopeful) {
                refuse(&socket, "the sandbox has just been paused");
            }
        }
        if state.pause.motion == Motion::Parking {
            return self.wait_for_motion(socket, Wanted::Pause, state);
        }
        if was_idle {
            self.write(&[State::Paused], State::Paused, false);
            self.note(What::SandboxPaused);
        }
        say(&socket, &FromMonitor::Done);
    }

    /// Somebody wants it to go on.
    pub(super) fn resume(&mut self, socket: OwnedFd, state: &mut Loop) {
        if !state.pause.frozen() {
            return say(&socket, &FromMonitor::Done);
        }
        self.wait_for_motion(socket, Wanted::Resume, state);
        self.wake(state);
    }

    /// Somebody wants to come in.
    pub(super) fn let_in(&mut self, socket: OwnedFd, state: &mut Loop) {
        match state.pause.motion {
            Motion::Runs => self.connect(socket, state),
            Motion::Parking | Motion::Still if !state.pause.idle => {
                refuse(&socket, "the sandbox is paused; `bathy resume` lets it go on");
            }
            Motion::Parking | Motion::Still | Motion::Unparking => {
                self.wait_for_motion(socket, Wanted::Connect, state);
                self.wake(state);
            }
        }
    }

    /// Shuts a guest down that is paused for want of clients: awake, so that what it has not written yet is not lost.
    /// The answer is false for any other guest.
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

    /// The keeper has moved the memory, or could not.
    pub(super) fn moved(&mut self, failure: Option<&str>, state: &mut Loop) {
        match state.pause.motion {
            Motion::Parking => self.parked(failure, state),
            Motion::Unparking => self.unparked(state),
            // It makes that up.
            Motion::Runs | Motion::Still => return,
        }
        if !state.pause.moving() && !state.waiting.is_empty() {
            // They asked meanwhile. It does not fail to encode.
            let _ = self.supervisor.sandbox.connection.tell_keeper(&ToKeeper::Usage);
        }
    }

    fn parked(&mut self, failure: Option<&str>, state: &mut Loop) {
        if let Some(reason) = failure.filter(|_| !state.pause.idle) {
            // Not half paused: it goes on, as soon as its keeper says that it does.
            state.pause.motion = Motion::Still;
            state.pause.not_paused = true;
            self.wake(state);
            let reason = format!("its memory cannot be moved to the host's disk: {reason}");
            self.answer_waiting(state, Wanted::Pause, Some(&reason));
        } else {
            // For want of clients, standing still alone is better than nothing.
            state.pause.motion = Motion::Still;
            self.stands_still(state);
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
        // Its idle time begins anew.
        state.idle_since = state.clients.is_empty().then(Instant::now);
        if !std::mem::take(&mut state.pause.not_paused) {
            self.write(&[State::Paused], State::Running, false);
            self.note(What::SandboxResumed);
        }
        self.awake(state);
    }

    /// It runs: those who waited for that get what they want.
    fn awake(&mut self, state: &mut Loop) {
        self.answer_waiting(state, Wanted::Resume, None);
        let stopped = state.stopping.as_ref().map(|_| "the sandbox is being stopped");
        self.answer_waiting(state, Wanted::Connect, stopped);
        if let Some(grace_ms) = state.pause.power_off.take()
            && let Some((_, until)) = &mut state.stopping
        {
            *until = Instant::now() + Duration::from_millis(grace_ms.into()) + POWER_OFF;
            if self.supervisor.sandbox.connection.tell_keeper(&ToKeeper::PowerOff { grace_ms }).is_err() {
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
                None => say(&socket, &FromMonitor::Done),
            }
        }
    }

    fn wait_for_motion(&self, socket: OwnedFd, wanted: Wanted, state: &mut Loop) {
        if state.pause.waiting.len() >= MOST_WAITING {
            return refuse(&socket, "too many wait for the sandbox");
        }
        state.pause.waiting.push((socket, wanted));
    }

    fn park(&mut self, state: &mut Loop, release_memory: bool) {
        state.pause.motion = Motion::Parking;
        // It does not fail to encode.
        let _ = self.supervisor.sandbox.connection.tell_keeper(&ToKeeper::Park { release_memory });
    }

    /// Begins to bring the memory back. What is on its way to disk has to arrive first.
    fn wake(&mut self, state: &mut Loop) {
        if state.pause.motion == Motion::Still {
            state.pause.motion = Motion::Unparking;
            let _ = self.supervisor.sandbox.connection.tell_keeper(&ToKeeper::Unpark);
        }
    }

    fn stands_still(&mut self, state: &Loop) {
        self.write(&[State::Running], State::Paused, state.pause.idle);
        self.note(What::SandboxPaused);
    }

    fn write(&mut self, from: &[State], to: State, idle: bool) {
        let written = self.store.transition(&self.record.id, from, to, &[Change::IdlePaused(idle)]);
        if let Err(error) = written {
            complain(bathy_protocol::chain(&error));
        }
    }
}
