//! Warnings of successful commands, such as an event that could not be recorded or a disk that is too small.

use std::path::PathBuf;

use bathy_audit::{Actor, Event, What};
use bathy_runtime::disk_space::Shortage;

use super::{Manager, Sandboxed};
use crate::store::Record;

/// Collected sentences for the user.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    said: Vec<String>,
    /// The sandbox with the last shortage warning: creating and starting it warns only once.
    shortage_of: Option<String>,
}

impl Warnings {
    pub(super) fn add(&mut self, sentence: String) {
        self.said.push(sentence);
    }
}

impl Manager {
    /// Whether a pool may hold this manager: other processes can use the store meanwhile.
    pub(crate) fn is_reusable(&self) -> bool {
        self.store.is_shared()
    }

    /// Returns and clears the collected warnings. They are not yet escaped for a terminal.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings.said)
    }

    /// Records an event that has already happened. A failure becomes a warning.
    pub(super) fn note_last(&mut self, sandbox: &Record, what: What) {
        if let Err(warning) = self.try_note_last(sandbox, what) {
            self.warnings.said.push(warning);
        }
    }

    /// Like [`Self::note_last`], but returns the warning, so that recording can be retried.
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

    /// Warns that the folder of a removed sandbox was a link, so that its target was not removed.
    pub(super) fn warn_of_link(&mut self, target: Option<PathBuf>, name: &str) {
        if let Some(target) = target {
            self.warnings.said.push(format!(
                "The folder of `{name}` was a link: its files stay in {}. Remove them by hand",
                target.display()
            ));
        }
    }

    /// Warns once if the host's disk has less free space than the sandbox may use.
    pub(super) fn warn_of_shortage(&mut self, sandbox: &Sandboxed) {
        let id = &sandbox.record.id;
        if self.warnings.shortage_of.as_ref() == Some(id) {
            return;
        }
        if let Some(shortage) = Shortage::of(&self.folder(sandbox), &sandbox.record.spec) {
            self.warnings.said.push(shortage.to_string());
            self.warnings.shortage_of = Some(id.clone());
        }
    }
}
