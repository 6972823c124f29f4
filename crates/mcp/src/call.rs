//! One call of a tool: the sandboxes it may use, its progress, and its cancellation.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bathy_manager::{Manager, NewSandbox, Sandboxed, Status};
use bathy_spec::{SandboxSpec, Seconds};
use rustix::event::EventfdFlags;
use tokio::sync::mpsc::UnboundedSender;

use crate::error::{ToolError, unknown_sandbox};
use crate::server::State;
use crate::{host, text};

/// The label of sandboxes that agents have made.
pub const LABEL: (&str, &str) = ("created-by", "mcp");
/// The default lifetime of an agent's sandbox.
pub const LIFETIME_SECONDS: u64 = 3600;
/// The default idle time after which an agent's sandbox is removed.
pub const IDLE_SECONDS: u64 = 900;
/// The longest line of output in a progress message, in characters.
const LAST_LINE: usize = 120;

/// The cancellation of a call: a flag for code, and a file descriptor for poll.
#[derive(Debug)]
pub struct Cancel {
    flag: AtomicBool,
    event: OwnedFd,
}

impl Cancel {
    pub fn new() -> std::io::Result<Self> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { flag: AtomicBool::new(false), event })
    }

    pub fn cancel(&self) {
        self.flag.store(true, Ordering::SeqCst);
        // It only fails when the descriptor is readable already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    pub fn is_cancelled(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }

    /// A descriptor that becomes readable with the cancellation.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// The progress of a running call.
#[derive(Debug, Default)]
pub struct Progress {
    /// For a client that asked for progress.
    steps: Option<UnboundedSender<String>>,
    last_line: Mutex<String>,
}

impl Progress {
    /// Progress that is sent to `steps`, if the client asked for it.
    pub fn new(steps: Option<UnboundedSender<String>>) -> Self {
        Self { steps, last_line: Mutex::default() }
    }

    /// Reports the beginning of a step.
    pub fn step(&self, what: &str) {
        if let Some(steps) = &self.steps {
            // The client may have disconnected.
            let _ = steps.send(text::line(what, 2 * LAST_LINE));
        }
    }

    /// Remembers the last line of output, if the client asked for progress.
    pub fn output(&self, bytes: &[u8]) {
        if self.steps.is_none() {
            return;
        }
        let mut line = self.lock();
        let end = bytes.len().saturating_sub(4 * LAST_LINE);
        line.push_str(&String::from_utf8_lossy(bytes.get(end..).unwrap_or_default()));
        let trimmed = line.trim_end_matches(['\n', '\r']);
        let start = trimmed.rfind(['\n', '\r']).map_or(0, |end| end + 1);
        let last = line.get(start..).unwrap_or_default().to_owned();
        *line = last
            .get(last.ceil_char_boundary(last.len().saturating_sub(8 * LAST_LINE))..)
            .unwrap_or_default()
            .to_owned();
    }

    /// The last line of output, cleaned and cut.
    pub fn last_line(&self) -> Option<String> {
        let line = text::line(&self.lock(), LAST_LINE);
        (!line.is_empty()).then_some(line)
    }

    fn lock(&self) -> MutexGuard<'_, String> {
        self.last_line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call of a tool.
pub struct Call {
    pub state: Arc<State>,
    pub cancel: Arc<Cancel>,
    pub progress: Arc<Progress>,
    /// The id and name of its sandbox, for the audit log.
    pub about: Mutex<Option<(String, Option<String>)>>,
}

impl Call {
    /// Runs `act` with a manager of the pool.
    pub fn manager<T>(&self, act: impl FnOnce(&mut Manager) -> Result<T, ToolError>) -> Result<T, ToolError> {
        self.state.host.pool.with(act)
    }

    /// The sandbox that the client names, if agents may use it.
    pub fn sandbox(&self, wanted: &str) -> Result<Sandboxed, ToolError> {
        let found = self.manager(|manager| Ok(manager.find(wanted)?))?;
        self.allowed(found).ok_or_else(|| unknown_sandbox(wanted))
    }

    /// The same, ready to run something.
    pub fn running_sandbox(&self, wanted: &str) -> Result<Sandboxed, ToolError> {
        let found = self.sandbox(wanted)?;
        self.remember(&found);
        Ok(self.wake(found)?.0)
    }

    /// Starts or resumes a sandbox if it is not running. Returns warnings too.
    fn wake(&self, found: Sandboxed) -> Result<(Sandboxed, Vec<String>), ToolError> {
        if found.status == Status::Running {
            return Ok((found, Vec::new()));
        }
        self.manager(|manager| {
            let mut progress = |step: &str| self.progress.step(step);
            let sandbox = manager.wake(&found, &mut progress)?;
            Ok((sandbox, manager.take_warnings()))
        })
    }

    /// The sandbox if agents may use it: one that agents made, or any with `--all-sandboxes`.
    pub fn allowed(&self, sandbox: Sandboxed) -> Option<Sandboxed> {
        let (key, value) = LABEL;
        let theirs = sandbox.record.spec.labels.get(key).is_some_and(|label| label == value);
        (theirs || self.state.options.all_sandboxes).then_some(sandbox)
    }

    /// Records for the audit log that this call is about `sandbox`.
    pub fn remember(&self, sandbox: &Sandboxed) {
        let about = (sandbox.record.id.clone(), sandbox.record.name.clone());
        *self.about.lock().unwrap_or_else(PoisonError::into_inner) = Some(about);
    }

    /// The defaults of an agent's sandbox, within the operator's ceiling.
    pub fn defaults(manager: &Manager) -> Result<SandboxSpec, ToolError> {
        let operator = manager.operator();
        let mut spec = operator.defaults();
        // Open settings become the ceiling, if there is one.
        let most = operator.apply(spec.clone()).map_err(bathy_manager::ManagerError::from)?.spec;
        let least = |seconds: u64, most: Option<Seconds>| {
            let wanted = Seconds::from_millis(seconds * 1000);
            Some(most.map_or(wanted, |most| most.min(wanted)))
        };
        spec.max_duration = least(LIFETIME_SECONDS, most.max_duration);
        spec.idle_timeout = least(IDLE_SECONDS, most.idle_timeout);
        // Agents do not clean up.
        spec.auto_remove = true;
        Ok(spec)
    }

    /// The sandbox that the client names, or a new one. Returns whether it is new, and notes.
    pub fn sandbox_or_new(&self, wanted: Option<&str>) -> Result<(Sandboxed, bool, Vec<String>), ToolError> {
        match wanted {
            Some(wanted) => {
                let found = self.sandbox(wanted)?;
                self.remember(&found);
                let (sandbox, notes) = self.wake(found)?;
                Ok((sandbox, false, notes))
            }
            None => {
                let (sandbox, notes) = self.make_sandbox(None, |_| Ok(()))?;
                Ok((sandbox, true, notes))
            }
        }
    }

    /// Makes a sandbox and starts it. Returns notes too, such as what the operator made stricter.
    pub fn make_sandbox(
        &self,
        name: Option<String>,
        change: impl FnOnce(&mut SandboxSpec) -> Result<(), ToolError>,
    ) -> Result<(Sandboxed, Vec<String>), ToolError> {
        self.progress.step("making a sandbox");
        let (sandbox, notes) = self.manager(|manager| {
            let mut spec = Self::defaults(manager)?;
            change(&mut spec)?;
            let (key, value) = LABEL;
            spec.labels.insert(key.to_owned(), value.to_owned());
            let mut progress = |step: &str| self.progress.step(step);
            let (sandbox, mut notes) =
                manager.create(NewSandbox { name, spec, ..NewSandbox::default() }, &mut progress)?;
            self.state.host.made(&sandbox);
            self.progress.step("starting the sandbox");
            if let Err(error) = manager.start(&sandbox, &mut progress) {
                // Its id has not been sent to the client.
                let _ = host::remove(manager, &sandbox);
                return Err(error.into());
            }
            notes.extend(manager.take_warnings());
            Ok((manager.refresh(&sandbox)?, notes))
        })?;
        self.remember(&sandbox);
        if self.cancel.is_cancelled() {
            self.discard(&sandbox);
            return Err(ToolError::Cancelled);
        }
        Ok((sandbox, notes))
    }

    /// Removes a sandbox whose id the client never receives.
    pub fn discard(&self, sandbox: &Sandboxed) {
        self.state.host.pool.hang_up(sandbox);
        // If this fails, its idle time ends it.
        let _ = self.manager(|manager| host::remove(manager, sandbox));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_remembered_without_its_past() {
        let (sender, _receiver) = tokio::sync::mpsc::unbounded_channel();
        let progress = Progress::new(Some(sender));
        assert_eq!(progress.last_line(), None);
        progress.output(b"one\ntwo\nthr");
        assert_eq!(progress.last_line().as_deref(), Some("thr"));
        progress.output(b"ee\n");
        assert_eq!(progress.last_line().as_deref(), Some("three"));
        progress.output("ü".repeat(100_000).as_bytes());
        assert!(progress.lock().len() <= 8 * LAST_LINE + 4);
        progress.output(b"\n\x1b[31mred\x1b[0m\r");
        assert_eq!(progress.last_line().as_deref(), Some("red"));
    }

    #[test]
    fn cancelling_is_seen_by_code_and_by_polls() {
        let cancel = Cancel::new().unwrap();
        let readable = || {
            let mut fds =
                [rustix::event::PollFd::from_borrowed_fd(cancel.fd(), rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
        };
        assert!(!cancel.is_cancelled() && readable() == 0);
        cancel.cancel();
        cancel.cancel();
        assert!(cancel.is_cancelled() && readable() == 1);
    }
}
