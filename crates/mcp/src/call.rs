//! One call of a tool: what it may use, how it tells what it is doing, and how it learns that nobody wants it any more.

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

/// How agents' sandboxes are told from others.
pub const LABEL: (&str, &str) = ("created-by", "mcp");
/// How long an agent's sandbox lives, unless it says otherwise.
pub const LIFETIME_SECONDS: u64 = 3600;
/// How long an agent's sandbox is kept without use, unless it says otherwise.
pub const IDLE_SECONDS: u64 = 900;
/// How much of the last line of output a progress message has.
const LAST_LINE: usize = 120;

/// Tells a call that nobody waits for it any more: a flag for code, and a descriptor for what polls.
#[derive(Debug)]
pub struct Cancel {
    flag: AtomicBool,
    event: OwnedFd,
}

impl Cancel {
    /// Nothing is cancelled yet.
    pub fn new() -> std::io::Result<Self> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { flag: AtomicBool::new(false), event })
    }

    /// Cancels.
    pub fn cancel(&self) {
        self.flag.store(true, Ordering::SeqCst);
        // It only fails when it is readable already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Whether it is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }

    /// Readable from when it is cancelled.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// What a call tells about itself while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// To whoever asked for progress.
    steps: Option<UnboundedSender<String>>,
    last_line: Mutex<String>,
}

impl Progress {
    /// Progress that goes to `steps`, if somebody asked for it.
    pub fn new(steps: Option<UnboundedSender<String>>) -> Self {
        Self { steps, last_line: Mutex::default() }
    }

    /// Something begins.
    pub fn step(&self, what: &str) {
        if let Some(steps) = &self.steps {
            // Whoever asked may be gone.
            let _ = steps.send(text::line(what, 2 * LAST_LINE));
        }
    }

    /// Output came. Only remembered if somebody asked.
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

    /// The last line of output.
    pub fn last_line(&self) -> Option<String> {
        let line = text::line(&self.lock(), LAST_LINE);
        (!line.is_empty()).then_some(line)
    }

    fn lock(&self) -> MutexGuard<'_, String> {
        self.last_line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One call.
pub struct Call {
    /// Everything that calls share.
    pub state: Arc<State>,
    /// Whether somebody still wants it.
    pub cancel: Arc<Cancel>,
    /// What it tells meanwhile.
    pub progress: Arc<Progress>,
    /// The sandbox that it is about, for the audit log.
    pub about: Mutex<Option<(String, Option<String>)>>,
}

impl Call {
    /// Does something with a manager.
    pub fn manager<T>(&self, act: impl FnOnce(&mut Manager) -> Result<T, ToolError>) -> Result<T, ToolError> {
        self.state.host.pool.with(act)
    }

    /// The sandbox that the caller means, if it may use it.
    pub fn sandbox(&self, wanted: &str) -> Result<Sandboxed, ToolError> {
        let found = self.manager(|manager| Ok(manager.find(wanted)?))?;
        self.allowed(found).ok_or_else(|| unknown_sandbox(wanted))
    }

    /// The same, ready to run something.
    pub fn running_sandbox(&self, wanted: &str) -> Result<Sandboxed, ToolError> {
        let found = self.sandbox(wanted)?;
        self.remember(&found);
        Ok(self.awake(found)?.0)
    }

    /// The same sandbox, running, with what there is to say if it had to be started.
    fn awake(&self, found: Sandboxed) -> Result<(Sandboxed, Vec<String>), ToolError> {
        if found.status == Status::Running {
            return Ok((found, Vec::new()));
        }
        self.manager(|manager| {
            let mut progress = |step: &str| self.progress.step(step);
            let sandbox = manager.wake(&found, &mut progress)?;
            Ok((sandbox, manager.take_warnings()))
        })
    }

    /// Agents see what agents made, unless the operator shows them everything.
    pub fn allowed(&self, sandbox: Sandboxed) -> Option<Sandboxed> {
        let (key, value) = LABEL;
        let theirs = sandbox.record.spec.labels.get(key).is_some_and(|label| label == value);
        (theirs || self.state.options.all_sandboxes).then_some(sandbox)
    }

    /// This call is about `sandbox`.
    pub fn remember(&self, sandbox: &Sandboxed) {
        let about = (sandbox.record.id.clone(), sandbox.record.name.clone());
        *self.about.lock().unwrap_or_else(PoisonError::into_inner) = Some(about);
    }

    /// What an agent's sandbox is, as far as the agent does not say: never more than the operator allows.
    pub fn defaults(manager: &Manager) -> Result<SandboxSpec, ToolError> {
        let operator = manager.operator();
        let mut spec = operator.defaults();
        // What is left open becomes the ceiling, if there is one.
        let most = operator.apply(spec.clone()).map_err(bathy_manager::ManagerError::from)?.spec;
        let least = |seconds: u64, most: Option<Seconds>| {
            let wanted = Seconds::from_millis(seconds * 1000);
            Some(most.map_or(wanted, |most| most.min(wanted)))
        };
        spec.max_duration = least(LIFETIME_SECONDS, most.max_duration);
        spec.idle_timeout = least(IDLE_SECONDS, most.idle_timeout);
        // Nobody tidies up after an agent.
        spec.auto_remove = true;
        Ok(spec)
    }

    /// The sandbox that the caller names, or a new one: whether it is new, and what else there is to know.
    pub fn sandbox_or_new(&self, wanted: Option<&str>) -> Result<(Sandboxed, bool, Vec<String>), ToolError> {
        match wanted {
            Some(wanted) => {
                let found = self.sandbox(wanted)?;
                self.remember(&found);
                let (sandbox, notes) = self.awake(found)?;
                Ok((sandbox, false, notes))
            }
            None => {
                let (sandbox, notes) = self.make_sandbox(None, |_| Ok(()))?;
                Ok((sandbox, true, notes))
            }
        }
    }

    /// Makes a sandbox and starts it. What the operator made stricter, and what else there is to know, comes with it.
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
            let (sandbox, mut notes) = manager.create(NewSandbox { name, spec }, &mut progress)?;
            self.state.host.made(&sandbox);
            self.progress.step("starting the sandbox");
            if let Err(error) = manager.start(&sandbox, &mut progress) {
                // Nobody knows its name yet.
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

    /// Removes a sandbox that nobody will ever hear of.
    pub fn discard(&self, sandbox: &Sandboxed) {
        self.state.host.pool.hang_up(sandbox);
        // If it stays, its idle time ends it.
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
