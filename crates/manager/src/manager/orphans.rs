//! Sandboxes without a readable record, and what interrupted commands left behind.
//!
//! A folder that has its final name is a user's disk and is only removed by name. When the store is lost,
//! damaged or replaced by an older one, the disks are listed as orphaned and can be adopted.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use bathy_audit::What;
use bathy_jail::cgroup::Cgroup;
use bathy_policy::{NetworkPolicy, Preset};
use bathy_protocol::unix_ns;
use bathy_runtime::description::{Description, ReplDescription};
use bathy_runtime::folder::{Folder, Leftover};
use bathy_spec::{Choice, Chosen, SandboxSpec, Size, name};

use super::lifecycle::{KILL_TIMEOUT, POLL_INTERVAL};
use super::{Manager, ManagerError, Sandboxed, Status, force};
use crate::monitor::control::{self, ToMonitor};
use crate::store::{self, Change, NewRecord, Record, ReplRow, State, StoreError};

/// A new folder is locked shortly after it is created: only older ones can be abandoned.
const LEFTOVER_AGE: Duration = Duration::from_secs(30);
/// The recorded end cause of an adopted sandbox.
const ADOPTED: &str = "its record was lost; it was adopted";

#[derive(Clone, Debug)]
pub struct Adopted {
    /// The sandbox with its new record.
    pub sandbox: Sandboxed,
    /// Sentences for the user about what could not be restored.
    pub notes: Vec<String>,
}

impl Manager {
    /// Sandboxes whose disks exist but that have no record. A name that is not unique is left out: it would
    /// lead to another sandbox.
    pub fn orphans(&self) -> Result<Vec<Sandboxed>, ManagerError> {
        let mut all = self.named_orphans()?;
        let names: Vec<_> = all.iter().filter_map(|orphan| orphan.record.name.clone()).collect();
        for orphan in &mut all {
            let name = orphan.record.name.take();
            let taken = |name: &String| {
                names.iter().filter(|other| *other == name).count() > 1 || self.store.find(name).is_ok()
            };
            orphan.record.name = name.filter(|name| !taken(name));
        }
        Ok(all)
    }

    /// All orphans, with the names that they had.
    fn named_orphans(&self) -> Result<Vec<Sandboxed>, ManagerError> {
        let all = Folder::all(&self.paths);
        let names = Folder::names(&self.paths).map_err(|error| ManagerError::File(all, error))?;
        let mut orphans = Vec::new();
        for name in names {
            // A folder without a disk is not a sandbox.
            if !self.store.knows(&name)? && Folder::of(&self.paths, &name).disk().exists() {
                orphans.push(self.orphan(&name));
            }
        }
        Ok(orphans)
    }

    /// Like [`Manager::find`], but also finds orphans.
    pub fn find_any(&mut self, wanted: &str) -> Result<Sandboxed, ManagerError> {
        match self.find(wanted) {
            Err(error @ ManagerError::Orphaned(_)) => self.find_orphan(wanted)?.ok_or(error),
            Err(ManagerError::Store(StoreError::Record { id, .. })) => Ok(self.orphan(&id)),
            found => found,
        }
    }

    /// Finds an orphan by its folder, its former name or the beginning of its id.
    pub(super) fn find_orphan(&self, wanted: &str) -> Result<Option<Sandboxed>, ManagerError> {
        let all = self.named_orphans()?;
        let fitting = |fits: &dyn Fn(&Record) -> bool| {
            let ids: Vec<_> =
                all.iter().filter(|it| fits(&it.record)).map(|it| it.record.id.clone()).collect();
            (!ids.is_empty()).then_some(ids)
        };
        let found = fitting(&|record| record.id == wanted)
            .or_else(|| fitting(&|record| record.name.as_deref() == Some(wanted)))
            .or_else(|| fitting(&|record| name::is_prefix(wanted) && record.id.starts_with(wanted)));
        match found.as_deref() {
            None => Ok(None),
            Some([id]) => Ok(self.orphans()?.into_iter().find(|orphan| orphan.record.id == *id)),
            Some(ids) => Err(StoreError::Name(name::ambiguous(wanted, ids.to_vec())).into()),
        }
    }

    /// What is known about an orphan.
    fn orphan(&self, folder_name: &str) -> Sandboxed {
        let folder = Folder::of(&self.paths, folder_name);
        // An unreadable description counts as missing here; `adopt` reports the error.
        let description = Description::read(&folder).ok().flatten();
        let (name, spec, engine, created_ns) = match description {
            Some(found) => (found.name, found.spec, Some(found.engine), found.created_ns),
            None => (None, unknown_spec(&folder), None, modified_ns(&folder)),
        };
        let (engine, engine_reason) = engine.map(|choice| (choice.engine, choice.reason)).unzip();
        let run = store::life::running(folder.path()).ok().flatten();
        let record = Record {
            id: folder_name.to_owned(),
            name,
            spec,
            engine,
            engine_reason,
            created_ns,
            state: if run.is_some() { State::Running } else { State::Stopped },
            started_ns: run.map(|run| run.started_ns),
            ended_ns: None,
            end_cause: None,
            exit_code: None,
            monitor_pid: run.map(|run| run.monitor_pid),
            keeper_pid: run.map(|run| run.keeper_pid),
            enforcement: None,
            idle_paused: false,
        };
        Sandboxed { record, status: Status::Orphaned }
    }

    /// Creates a new record for an orphan from the description beside its disk. Without a description it gets
    /// the default settings and no network.
    pub fn adopt(&mut self, orphan: &Sandboxed) -> Result<Adopted, ManagerError> {
        let folder = self.folder(orphan);
        let failed = |error| ManagerError::File(folder.path().to_owned(), error);
        if !folder.disk().try_exists().map_err(failed)? {
            return Err(ManagerError::Lost(orphan.name().to_owned()));
        }
        // Held so that no other command changes the sandbox meanwhile. A running sandbox holds its own lock.
        let _lock = folder.lock().map_err(failed)?;
        let life = store::take_life(folder.path()).map_err(failed)?;
        let runs = life.is_none();
        if runs && orphan.record.monitor_pid.is_none() || self.store.knows(&orphan.record.id)? {
            return Err(ManagerError::Busy(orphan.name().to_owned()));
        }
        let (described, notes) = self.plan_adoption(orphan, &folder, runs)?;
        let id = described.id.clone();
        let home = Folder::of(&self.paths, &id);
        // Replaces an unreadable record, if there is one.
        self.store.delete(&id)?;
        let (name, spec, engine) = (described.name.clone(), described.spec.clone(), described.engine.clone());
        let new = NewRecord { id: id.clone(), name, spec, engine, created_ns: described.created_ns };
        match self.store.insert_at_most(&new, self.operator.sandboxes()) {
            Err(StoreError::TooMany { count }) => self.operator.admit(count)?,
            result => result?,
        }
        if home.path() != folder.path() {
            // A copied disk may not have been flushed yet.
            let moved = folder.sync().and_then(|()| home.finish(&folder));
            if let Err(error) = moved {
                let _ = self.store.delete(&id);
                return Err(failed(error));
            }
        }
        self.settle_adopted(&id, &orphan.record)?;
        if let Some(repl) = &described.repl {
            self.store.insert_repl(&repl_row(repl, &described))?;
        }
        // Written last: until the record is in the store, the former description must not be lost.
        described.write(&home).map_err(failed)?;
        let sandbox = self.find(&id)?;
        self.note_last(&sandbox.record, What::SandboxAdopted { folder: orphan.record.id.clone() });
        Ok(Adopted { sandbox, notes })
    }

    /// Decides the settings of an adopted sandbox, and the notes for the user.
    fn plan_adoption(
        &mut self,
        orphan: &Sandboxed,
        folder: &Folder,
        runs: bool,
    ) -> Result<(Description, Vec<String>), ManagerError> {
        let found =
            Description::read(folder).map_err(|error| ManagerError::File(folder.description(), error))?;
        let mut notes = Vec::new();
        // The folder was copied or renamed: its name is not an id.
        let id = if name::is_id(&orphan.record.id) {
            orphan.record.id.clone()
        } else if runs {
            return Err(ManagerError::Running(orphan.name().to_owned()));
        } else {
            name::new_id().map_err(|error| ManagerError::File("/dev/urandom".into(), error))?
        };
        if found.is_none() {
            notes.push(format!(
                "there is no description of `{id}` beside its disk: it has the default settings now, and no network; `bathy policy set {id} public` gives it one"
            ));
        }
        let mut name = found.as_ref().and_then(|found| found.name.clone());
        // An invalid name could not be used to find it.
        name.take_if(|name| name::check(name).is_err());
        if let Some(taken) = name.take_if(|name| self.store.find(name).is_ok()) {
            notes.push(format!("there is a sandbox `{taken}` already: this one is now called {id}"));
        }
        let allowed = self.operator.apply(orphan.record.spec.clone())?;
        notes.extend(allowed.notes);
        let engine = match (orphan.record.engine, &orphan.record.engine_reason) {
            (Some(engine), Some(reason)) => Choice { engine, reason: reason.clone() },
            _ => Choice { engine: Chosen::Uml, reason: ADOPTED.to_owned() },
        };
        let spec = allowed.spec.checked()?;
        let mut described = Description::new(id, name, spec, engine, orphan.record.created_ns);
        described.repl = found.and_then(|found| found.repl);
        if let Some(repl) = &mut described.repl {
            repl.name = described.name.clone().unwrap_or_else(|| described.id.clone());
        }
        Ok((described, notes))
    }

    /// Sets the status of an adopted sandbox, which may still be running.
    fn settle_adopted(&mut self, id: &str, orphan: &Record) -> Result<(), ManagerError> {
        if let (Some(at_ns), Some(monitor_pid)) = (orphan.started_ns, orphan.monitor_pid) {
            let mut changes = vec![Change::Started { at_ns, monitor_pid }];
            changes.extend(orphan.keeper_pid.map(Change::Keeper));
            self.store.transition(id, &[State::Created], State::Running, &changes)?;
        } else {
            let ended = Change::Ended { at_ns: unix_ns(), cause: ADOPTED.to_owned(), exit_code: None };
            self.store.transition(id, &[State::Created], State::Stopped, &[ended])?;
        }
        Ok(())
    }

    /// Removes an orphan with all its files. A running one is only removed with `force`.
    pub(super) fn remove_orphan(&mut self, orphan: &Sandboxed, force: bool) -> Result<(), ManagerError> {
        let folder = self.folder(orphan);
        let failed = |error| ManagerError::File(folder.path().to_owned(), error);
        if store::alive(folder.path()).map_err(failed)? {
            if !force {
                return Err(ManagerError::NotRemoved(orphan.name().to_owned()));
            }
            end_orphan(&orphan.record, &folder)?;
        }
        let _life = match store::take_life(folder.path()) {
            Ok(Some(life)) => Some(life),
            Ok(None) => return Err(ManagerError::Busy(orphan.name().to_owned())),
            // Only an unreadable record exists.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        if self.store.knows(&orphan.record.id)? {
            // Adopted in the meantime.
            return Err(ManagerError::Busy(orphan.name().to_owned()));
        }
        let rest = folder.begin_removal().map_err(failed)?;
        rest.remove().map_err(failed)?;
        self.store.with_reserve(|store| store.delete(&orphan.record.id))?;
        self.note_last(&orphan.record, What::SandboxRemoved);
        Ok(())
    }

    /// Cleans up after interrupted commands: unfinished creations and removals. What fails is retried by the
    /// next command.
    pub(super) fn sweep(&mut self) {
        for leftover in Folder::leftovers(&self.paths).unwrap_or_default() {
            match leftover {
                // A sandbox with a record is complete: the next lookup finishes it.
                Leftover::Unfinished(folder, id)
                    if is_abandoned(folder.path())
                        && is_old(folder.path())
                        && matches!(self.store.get(&id), Ok(None)) =>
                {
                    let _ = folder.remove();
                }
                Leftover::Removed(folder, id) if is_abandoned(folder.path()) => {
                    self.finish_removal(&folder, &id);
                }
                Leftover::Unfinished(..) | Leftover::Removed(..) => {}
            }
        }
    }

    /// Completes an interrupted creation by giving the folder its final name. False if there is no such
    /// folder.
    pub(super) fn finish_making(&self, folder: &Folder) -> Result<bool, ManagerError> {
        let failed = |error| ManagerError::File(folder.path().to_owned(), error);
        let unfinished = folder.unfinished();
        if !unfinished.disk().try_exists().map_err(failed)? {
            return Ok(false);
        }
        if store::alive(unfinished.path()).map_err(failed)? {
            // The creating command is still running.
            return Ok(true);
        }
        match folder.finish(&unfinished) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) => {
                Ok(false)
            }
            finished => finished.map(|()| true).map_err(failed),
        }
    }

    fn finish_removal(&mut self, rest: &Folder, id: &str) {
        // Restored since by a copy or backup: the record belongs to that folder.
        if !Folder::of(&self.paths, id).path().exists()
            && let Ok(Some(record)) = self.store.get(id)
        {
            match self.store.with_reserve(|store| store.delete(id)) {
                Ok(true) => self.note_last(&record, What::SandboxRemoved),
                Ok(false) => {}
                // The folder stays until the record is removed.
                Err(_) => return rest.free_disk(),
            }
        }
        let _ = rest.remove();
        let _ = Cgroup::remove_stale(id);
    }
}

fn repl_row(repl: &ReplDescription, described: &Description) -> ReplRow {
    ReplRow {
        name: repl.name.clone(),
        sandbox: described.id.clone(),
        language: repl.language.clone(),
        context: repl.context.clone(),
        created_ns: described.created_ns,
        cells: 0,
        last_used_ns: None,
        boot: None,
    }
}

/// Whether no command is working in a folder.
fn is_abandoned(folder: &Path) -> bool {
    matches!(store::alive(folder), Ok(false))
}

fn is_old(folder: &Path) -> bool {
    let modified = folder.symlink_metadata().and_then(|data| data.modified());
    modified.is_ok_and(|at| SystemTime::now().duration_since(at).unwrap_or_default() > LEFTOVER_AGE)
}

/// Ends an orphan through its monitor, or by killing its processes.
fn end_orphan(orphan: &Record, folder: &Folder) -> Result<(), ManagerError> {
    // The life lock shows whether it has ended, whatever the monitor answers.
    let _ = control::ask(folder.path(), &ToMonitor::Kill, KILL_TIMEOUT);
    let failed = |error| ManagerError::File(folder.path().to_owned(), error);
    let deadline = Instant::now() + KILL_TIMEOUT;
    while store::alive(folder.path()).map_err(failed)? {
        if Instant::now() > deadline {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    match force::kill_processes(orphan, folder).map_err(failed)? {
        true => Ok(()),
        false => Err(ManagerError::NotKilled(orphan.display_name().to_owned())),
    }
}

/// The settings for a disk without a description. What the sandbox was denied is unknown, so everything is
/// denied.
fn unknown_spec(folder: &Folder) -> SandboxSpec {
    let mut spec = SandboxSpec {
        network: NetworkPolicy { preset: Preset::None, ..NetworkPolicy::default() },
        ..SandboxSpec::default()
    };
    if let Ok(data) = folder.disk().metadata() {
        spec.disk = Size(data.len());
    }
    spec
}

fn modified_ns(folder: &Folder) -> u64 {
    let modified = folder.path().metadata().and_then(|data| data.modified()).map_err(io::Error::other);
    let since = modified.ok().and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.and_then(|since| u64::try_from(since.as_nanos()).ok()).unwrap_or(0)
}

#[cfg(test)]
#[path = "orphans_tests.rs"]
mod tests;
