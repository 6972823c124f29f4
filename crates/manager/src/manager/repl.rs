//! REPLs: interpreters with lasting state. They start, pause and resume automatically. A cell finds the state
//! of the earlier ones, or the user learns what was lost and why.

use std::fs;

use bathy_client::interpreter::{self, CellEvent, CellOptions, CellOutcome, CellRequest, Language};
use bathy_protocol::time;
use bathy_protocol::unix_ns;
use bathy_runtime::description::{Description, ReplDescription};
use bathy_runtime::images::Pull;
use bathy_spec::{SandboxSpec, Seconds, host};
use serde::{Serialize, Serializer};

use super::{KILLED, Manager, ManagerError, NewSandbox, Sandboxed, Status};
use crate::store::ReplRow;

/// The default idle time after which a REPL is paused.
pub(crate) const PAUSE_IDLE: Seconds = Seconds::from_millis(60_000);
/// The label that marks a sandbox as a REPL; its value is the language.
pub const LABEL: &str = "repl";
/// The only stream of a connection that is opened for one cell.
const STREAM: u32 = 1;
const STATE_LOST: &str = "all variables and other state are lost, files in the sandbox are preserved";

/// The inputs of a new REPL.
#[derive(Clone, Debug, Default)]
pub struct NewRepl {
    /// The name; by default the id of its sandbox.
    pub name: Option<String>,
    /// The sandbox's specification. It has no main command and is not removed when it ends: a REPL exists
    /// until it is removed.
    pub spec: SandboxSpec,
    pub pull: Pull,
}

/// The present status of a REPL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ReplStatus {
    /// Its interpreter is running or starts on demand.
    Running,
    /// Its sandbox is paused until the next cell.
    Paused,
    /// Its sandbox is not running; the next cell starts it.
    Stopped,
}

impl ReplStatus {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct Repl {
    pub name: String,
    pub status: ReplStatus,
    /// Its sandbox; serialised as its id.
    #[serde(serialize_with = "id_only")]
    pub sandbox: Sandboxed,
    pub language: Language,
    /// The context in the sandbox.
    pub context: String,
    #[serde(rename = "created_at", serialize_with = "time::serialize")]
    pub created_ns: u64,
    /// How many cells have run in it.
    pub cells: u64,
    /// When its last cell ended.
    #[serde(rename = "last_used_at", serialize_with = "time::serialize_option")]
    pub last_used_ns: Option<u64>,
    /// What the operator made stricter, for a new REPL.
    #[serde(skip)]
    pub notes: Vec<String>,
}

fn id_only<S: Serializer>(sandbox: &Sandboxed, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&sandbox.record.id)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplOutcome {
    pub outcome: CellOutcome,
    /// One sentence about what earlier cells left and is now lost. May hold text from the guest: escape it
    /// before printing.
    pub lost: Option<String>,
}

impl Manager {
    /// Creates and starts a REPL. If it cannot be started, it is removed.
    pub fn create_repl(
        &mut self,
        new: NewRepl,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Repl, ManagerError> {
        let language = Language::Python;
        let mut spec = new.spec;
        spec.pause_idle.get_or_insert(PAUSE_IDLE);
        spec.auto_remove = false;
        spec.command.clear();
        spec.labels.insert(LABEL.to_owned(), language.as_str().to_owned());
        let for_repls = self.operator.for_repls();
        let usual = std::mem::replace(&mut self.operator, for_repls);
        let created = self
            .create(NewSandbox { name: new.name, spec, pull: new.pull, ..NewSandbox::default() }, progress);
        self.operator = usual;
        let (sandbox, notes) = created?;
        let row = ReplRow {
            name: sandbox.name().to_owned(),
            sandbox: sandbox.record.id.clone(),
            language: language.as_str().to_owned(),
            context: language.default_context().to_owned(),
            created_ns: unix_ns(),
            cells: 0,
            last_used_ns: None,
            boot: None,
        };
        let made = self.store.insert_repl(&row).map_err(ManagerError::from);
        let made =
            made.and_then(|()| self.describe_repl(&sandbox)).and_then(|()| self.start(&sandbox, progress));
        if let Err(error) = made {
            // The first error is the one to report.
            let _ = self.remove(&sandbox, true);
            return Err(error);
        }
        let repl = self.find_repl(&row.name)?;
        Ok(Repl { notes, ..repl })
    }

    /// Records in the description beside the disk that a sandbox is a REPL.
    fn describe_repl(&self, sandbox: &Sandboxed) -> Result<(), ManagerError> {
        let folder = self.folder(sandbox);
        let repl = self.repl_description(&sandbox.record.id)?;
        let write = || match Description::read(&folder)? {
            Some(mut description) => {
                description.repl = repl;
                description.write(&folder)
            }
            None => Ok(()),
        };
        write().map_err(|error| ManagerError::File(folder.description(), error))
    }

    /// The REPL description of a sandbox, if it is a REPL.
    pub(super) fn repl_description(&self, id: &str) -> Result<Option<ReplDescription>, ManagerError> {
        let described =
            |row: ReplRow| ReplDescription { name: row.name, language: row.language, context: row.context };
        Ok(self.store.repl_of(id)?.map(described))
    }

    /// Whether a REPL has passed its maximum age. A restart does not extend it.
    pub fn is_expired(repl: &Repl) -> bool {
        let limit = repl.sandbox.record.spec.max_duration.map(|limit| limit.as_millis());
        let age_ms = unix_ns().saturating_sub(repl.sandbox.record.created_ns) / 1_000_000;
        limit.is_some_and(|limit| age_ms > limit)
    }

    /// Finds a REPL by its name, its sandbox's id or the beginning of that id.
    pub fn find_repl(&mut self, wanted: &str) -> Result<Repl, ManagerError> {
        let row = self.store.find_repl(wanted)?;
        let sandbox = self.find(&row.sandbox)?;
        repl(row, sandbox)
    }

    /// All REPLs, the oldest first.
    pub fn list_repls(&mut self) -> Result<Vec<Repl>, ManagerError> {
        let rows = self.store.repls()?;
        let mut sandboxes = self.list()?;
        let mut of = |row: ReplRow| {
            // A missing sandbox was removed between the two queries.
            let index = sandboxes.iter().position(|sandbox| sandbox.record.id == row.sandbox)?;
            Some(repl(row, sandboxes.swap_remove(index)))
        };
        rows.into_iter().filter_map(&mut of).collect()
    }

    /// Removes a REPL with its sandbox, even if it is running.
    pub fn remove_repl(&mut self, repl: &Repl) -> Result<(), ManagerError> {
        let sandbox = self.refresh(&repl.sandbox)?;
        self.remove(&sandbox, true)
    }

    /// Runs a cell in a REPL and starts or resumes it as needed. Concurrent cells run one after the other.
    /// The language and context are the REPL's; those of the request are ignored.
    pub fn run_in_repl(
        &mut self,
        repl: &Repl,
        request: CellRequest,
        options: &CellOptions<'_>,
        on_event: &mut dyn FnMut(CellEvent),
    ) -> Result<ReplOutcome, ManagerError> {
        let before = self.store.find_repl(&repl.sandbox.record.id)?;
        let found = self.refresh(&repl.sandbox)?;
        let sandbox = self.wake(&found, &mut |_| {})?;
        // Without a name the default context is created on demand.
        let request = CellRequest { language: repl.language, context: None, ..request };
        let mut connection = self.connect(&sandbox)?;
        let cell = self.begin_cell(&sandbox, &request)?;
        let result = interpreter::run_cell(&mut connection, STREAM, cell, options, on_event);
        let boot = host::boot_id();
        self.store.use_repl(&before.name, unix_ns(), &boot)?;
        let outcome = result?;
        let lost = (outcome.started.fresh && before.cells > 0).then(|| {
            let restarted = sandbox.record.started_ns > before.last_used_ns;
            let host_restarted = before.boot.as_ref().is_some_and(|then| *then != boot);
            let ended = found.record.end_cause.as_deref();
            what_was_lost(host_restarted, restarted, ended, outcome.started.lost.as_deref())
        });
        Ok(ReplOutcome { outcome, lost })
    }
}

fn repl(row: ReplRow, sandbox: Sandboxed) -> Result<Repl, ManagerError> {
    Ok(Repl {
        status: match sandbox.status {
            Status::Running => ReplStatus::Running,
            Status::Paused => ReplStatus::Paused,
            Status::Created
            | Status::Stopped
            | Status::Dead
            | Status::Orphaned
            | Status::Lost
            | Status::Unusable => ReplStatus::Stopped,
        },
        language: interpreter::language(&row.language)?,
        name: row.name,
        sandbox,
        context: row.context,
        created_ns: row.created_ns,
        cells: row.cells,
        last_used_ns: row.last_used_ns,
        notes: Vec::new(),
    })
}

/// One sentence on why an interpreter has no state. `ended` is how the sandbox ended, `interpreter` is the
/// agent's explanation.
fn what_was_lost(
    host_restarted: bool,
    restarted: bool,
    ended: Option<&str>,
    interpreter: Option<&str>,
) -> String {
    // A machine that restarts leaves no cause; a recorded cause is from before the restart.
    let unexplained = ended.is_none_or(|cause| cause == KILLED || cause.starts_with("its keeper"));
    if host_restarted && restarted && unexplained {
        let when = booted_at().map(|at| format!(" at {at}")).unwrap_or_default();
        return format!("The machine was restarted{when}: {STATE_LOST}");
    }
    match (ended, interpreter) {
        (Some(cause), _) => format!("The sandbox had ended ({cause}) and was started again: {STATE_LOST}"),
        (None, _) if restarted => format!("The sandbox was stopped and started again: {STATE_LOST}"),
        (None, Some(reason)) => {
            format!("The interpreter was restarted ({}): {STATE_LOST}", reason.trim_end_matches('.'))
        }
        (None, None) => format!("The interpreter was restarted: {STATE_LOST}"),
    }
}

/// When the host booted, as date and time.
fn booted_at() -> Option<String> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let seconds = stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(date(seconds))
}

/// Formats seconds since 1970 as `2026-02-28 23:59 UTC`.
fn date(seconds: u64) -> String {
    let iso = time::iso(seconds * 1_000_000_000);
    format!("{} UTC", iso.get(.."2026-02-28T23:59".len()).unwrap_or(&iso).replace('T', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_lost_is_reported_with_its_reason() {
        let sentences = [
            (what_was_lost(true, true, Some(KILLED), None), "The machine was restarted at 2"),
            (what_was_lost(true, true, None, None), "The machine was restarted at 2"),
            (
                what_was_lost(true, true, Some("it was stopped"), None),
                "The sandbox had ended (it was stopped) and",
            ),
            (
                what_was_lost(false, true, Some(KILLED), None),
                "The sandbox had ended (its processes were killed",
            ),
            (what_was_lost(false, true, None, None), "The sandbox was stopped and started again"),
            (
                what_was_lost(false, false, None, Some("it ended.")),
                "The interpreter was restarted (it ended):",
            ),
            (what_was_lost(true, false, None, None), "The interpreter was restarted:"),
        ];
        for (sentence, beginning) in sentences {
            assert!(sentence.starts_with(beginning) && sentence.ends_with(STATE_LOST), "{sentence}");
        }
    }

    #[test]
    fn moments_are_dates() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_399), "2000-02-28 23:59 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_798_761_540), "2026-12-31 23:59 UTC");
        assert_eq!(date(1_798_761_600), "2027-01-01 00:00 UTC");
    }

    #[test]
    fn the_host_has_a_boot() {
        assert_eq!(host::boot_id().len(), 36);
        assert!(booted_at().is_some());
    }
}
