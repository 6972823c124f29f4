//! What a command that succeeded has to say besides: an event that could not be recorded, a disk that is too small.

use std::path::PathBuf;

use bathy_audit::{Actor, Event, What};
use bathy_runtime::room::Shortage;

use super::{Manager, Sandboxed};
use crate::store::Record;

/// Sentences for the caller.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    said: Vec<String>,
    /// The sandbox whose lack of space was told last: to make one and start it is one thing to the caller.
    room_of: Option<String>,
}

impl Warnings {
    pub(super) fn add(&mut self, sentence: String) {
        self.said.push(sentence);
    }
}

impl Manager {
    /// Whether others can do their work while this manager is not used.
    pub fn may_be_kept(&self) -> bool {
        self.store.is_shared()
    }

    /// What there is to say about what was done since the last time. Not yet harmless for a terminal.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings.said)
    }

    /// Records what has happened whether or not it is recorded. If it is not, that is a warning.
    pub(super) fn note_last(&mut self, sandbox: &Record, what: What) {
        if let Err(warning) = self.try_note_last(sandbox, what) {
            self.warnings.said.push(warning);
        }
    }

    /// The same; the warning is the caller's, who may try again when there is more space.
    pub(super) fn try_note_last(&self, sandbox: &Record, what: What) -> Result<(), String> {
        let event = Event::now(Actor::this_process(self.program.clone()), what);
        let event = event.in_sandbox(&sandbox.id, sandbox.name.clone());
        self.audit.append_last(std::slice::from_ref(&event)).map_err(|error| {
            let written = serde_json::to_value(&event.what).unwrap_or_default();
            let kind = written.get("event").and_then(|kind| kind.as_str()).unwrap_or_default().to_owned();
            let name = sandbox.display_name();
            format!(
                "The event {kind} of the sandbox {name} is not recorded: {}",
                bathy_protocol::chain(&error)
            )
        })
    }

    /// Warns that a sandbox which was removed leaves its files, if its folder was a link: where that led to may hold more.
    pub(super) fn warn_of_link(&mut self, target: Option<PathBuf>, name: &str) {
        if let Some(target) = target {
            self.warnings.said.push(format!(
                "The folder of `{name}` was a link: its files stay in {}. Remove them by hand",
                target.display()
            ));
        }
    }

    /// Warns if the host's disk is too small for what a sandbox was promised, once.
    pub(super) fn warn_of_shortage(&mut self, sandbox: &Sandboxed) {
        let id = &sandbox.record.id;
        if self.warnings.room_of.as_ref() == Some(id) {
            return;
        }
        if let Some(shortage) = Shortage::of(&self.folder(sandbox), &sandbox.record.spec) {
            self.warnings.said.push(shortage.to_string());
            self.warnings.room_of = Some(id.clone());
        }
    }
}
