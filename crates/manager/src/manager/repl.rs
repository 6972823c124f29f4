//! REPLs: an interpreter with its state, for as long as somebody wants it. Nobody starts, pauses or resumes one; whoever
//! runs code in it finds it as it was left, or is told what is lost and why.

use std::fs;

use bathy_client::interpreter::{self, CellEvent, CellOptions, CellOutcome, CellRequest, Language};
use bathy_protocol::time;
use bathy_protocol::unix_ns;
use bathy_runtime::description::{Description, ReplDescription};
use bathy_spec::{SandboxSpec, Seconds, host};
use serde::{Serialize, Serializer};

use super::{KILLED, Manager, ManagerError, NewSandbox, Sandboxed, Status};
use crate::store::ReplRow;

/// After how long without anybody a REPL is paused, if its maker does not say.
pub const PAUSE_IDLE: Seconds = Seconds::from_millis(60_000);
/// The label of sandboxes that are REPLs; its value is the language.
pub const LABEL: &str = "repl";
/// The only stream of a connection that is made for one cell.
const STREAM: u32 = 1;
const KEPT: &str = "all variables and other state are gone, files in the sandbox are kept";

/// A REPL to be made.
#[derive(Clone, Debug, Default)]
pub struct NewRepl {
    /// Its name; its sandbox's id if it has none.
    pub name: Option<String>,
    /// Its sandbox. It has no main command and is not removed when it ends: a REPL lives until it is removed.
    pub spec: SandboxSpec,
}

/// What a REPL is right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ReplStatus {
    /// Its interpreter runs, or can at once.
    Running,
    /// It stands still until the next cell.
    Paused,
    /// It has no processes; the next cell starts it anew.
    Stopped,
}

impl ReplStatus {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        }
    }
}

/// A REPL. Times are nanoseconds since 1970.
#[derive(Clone, Debug, Serialize)]
pub struct Repl {
    /// What it is called.
    pub name: String,
    pub status: ReplStatus,
    /// Its sandbox; only the id in JSON.
    #[serde(serialize_with = "id_only")]
    pub sandbox: Sandboxed,
    pub language: Language,
    /// Its context in the sandbox.
    pub context: String,
    /// When it was made.
    #[serde(rename = "created_at", serialize_with = "time::serialize")]
    pub created_ns: u64,
    /// How many cells have run in it.
    pub cells: u64,
    /// When the last of them ended.
    #[serde(rename = "last_used_at", serialize_with = "time::serialize_option")]
    pub last_used_ns: Option<u64>,
    /// What the operator made stricter than asked for, of one that was just made.
    #[serde(skip)]
    pub notes: Vec<String>,
}

fn id_only<S: Serializer>(sandbox: &Sandboxed, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&sandbox.record.id)
}

/// How a cell of a REPL ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplOutcome {
    pub outcome: CellOutcome,
    /// What earlier cells had left and is lost, and why, in one sentence. May hold the guest's text: escape before
    /// showing on a terminal.
    pub lost: Option<String>,
}

impl Manager {
    /// Makes a REPL and starts it. One that cannot be started is not left behind.
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
        let created = self.create(NewSandbox { name: new.name, spec }, progress);
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
            // The first failure is the one to tell.
            let _ = self.remove(&sandbox, true);
            return Err(error);
        }
        let repl = self.find_repl(&row.name)?;
        Ok(Repl { notes, ..repl })
    }

    /// Writes beside the disk that a sandbox is a REPL.
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

    /// What makes a sandbox a REPL, if it is one.
    pub(super) fn repl_description(&self, id: &str) -> Result<Option<ReplDescription>, ManagerError> {
        let described =
            |row: ReplRow| ReplDescription { name: row.name, language: row.language, context: row.context };
        Ok(self.store.repl_of(id)?.map(described))
    }

    /// Whether a REPL is older than its sandbox may be: being started again gives it no more time.
    pub fn is_expired(repl: &Repl) -> bool {
        let limit = repl.sandbox.record.spec.max_duration.map(|limit| limit.as_millis());
        let age_ms = unix_ns().saturating_sub(repl.sandbox.record.created_ns) / 1_000_000;
        limit.is_some_and(|limit| age_ms > limit)
    }

    /// The REPL that somebody means by its name, or by the id of its sandbox or the beginning of it.
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
            // One that is not there was removed between the two looks.
            let index = sandboxes.iter().position(|sandbox| sandbox.record.id == row.sandbox)?;
            Some(repl(row, sandboxes.swap_remove(index)))
        };
        rows.into_iter().filter_map(&mut of).collect()
    }

    /// Removes a REPL with its sandbox and everything in it, whatever runs in it.
    pub fn remove_repl(&mut self, repl: &Repl) -> Result<(), ManagerError> {
        let sandbox = self.refresh(&repl.sandbox)?;
        self.remove(&sandbox, true)
    }

    /// Runs code in a REPL, which is started or resumed if it has to be. Of several cells at once, one runs and the others
    /// wait. The language and the context of the request are the REPL's, whatever it says.
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
        // Without a name: the default context is made when needed.
        let request = CellRequest { language: repl.language, context: None, ..request };
        let begun = self.begin_cell(&sandbox, &request)?;
        let mut connection = self.connect(&sandbox)?;
        let result = interpreter::run_cell(&mut connection, STREAM, begun.cell, begun.tag, options, on_event);
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

/// Why an interpreter remembers nothing, in one sentence. `ended` is how its sandbox had ended, `interpreter` the agent's
/// account of its last interpreter.
fn what_was_lost(
    host_restarted: bool,
    restarted: bool,
    ended: Option<&str>,
    interpreter: Option<&str>,
) -> String {
    // What ends with the machine is not told why; whatever else was written down happened before.
    let unexplained = ended.is_none_or(|cause| cause == KILLED || cause.starts_with("its keeper"));
    if host_restarted && restarted && unexplained {
        let when = booted_at().map(|at| format!(" at {at}")).unwrap_or_default();
        return format!("The machine was restarted{when}: {KEPT}");
    }
    match (ended, interpreter) {
        (Some(cause), _) => format!("The sandbox had ended ({cause}) and was started again: {KEPT}"),
        (None, _) if restarted => format!("The sandbox was stopped and started again: {KEPT}"),
        (None, Some(reason)) => {
            format!("The interpreter was started anew ({}): {KEPT}", reason.trim_end_matches('.'))
        }
        (None, None) => format!("The interpreter was started anew: {KEPT}"),
    }
}

/// When the host was started, as a date and time.
fn booted_at() -> Option<String> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let seconds = stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(date(seconds))
}

/// A point in time, in seconds since 1970, as `2026-02-28 23:59 UTC`.
fn date(seconds: u64) -> String {
    let iso = time::iso(seconds * 1_000_000_000);
    format!("{} UTC", iso.get(.."2026-02-28T23:59".len()).unwrap_or(&iso).replace('T', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_told_with_its_reason() {
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
                "The interpreter was started anew (it ended):",
            ),
            (what_was_lost(true, false, None, None), "The interpreter was started anew:"),
        ];
        for (sentence, beginning) in sentences {
            assert!(sentence.starts_with(beginning) && sentence.ends_with(KEPT), "{sentence}");
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
