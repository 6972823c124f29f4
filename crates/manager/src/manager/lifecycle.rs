//! Making, starting, stopping, freezing and removing.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_image::Store as Cache;
use bathy_protocol::unix_ns;
use bathy_runtime::assets::{self, Assets};
use bathy_runtime::audit::sandbox_created;
use bathy_runtime::description::Description;
use bathy_runtime::folder::Folder;
use bathy_runtime::{disk, engine};
use bathy_spec::name::{self, NameError};
use bathy_spec::{Choice, SandboxSpec};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Manager, ManagerError, Sandboxed, Status, force};
use crate::monitor::control::{self, ControlError, FromMonitor, ToMonitor};
use crate::monitor::{POWER_OFF, Report};
use crate::store::{self, Change, NewRecord, Record, StoreError};

/// How long a monitor may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same where its processes are killed if it does not.
pub(super) const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// Moving a large guest's memory to disk and back takes its time.
const PARKING_PATIENCE: Duration = Duration::from_secs(120);
/// How long a killed sandbox may take to be gone.
const BURIAL: Duration = Duration::from_secs(10);
/// How often something is looked at that cannot be waited for.
pub(super) const PAUSE: Duration = Duration::from_millis(10);
/// For how long a lock that somebody holds for a moment is tried.
const LOCK_PATIENCE: Duration = Duration::from_millis(500);
/// For how long a sandbox that others start and stop is waited for.
const WAKING: Duration = Duration::from_secs(30);

/// A sandbox to be made.
#[derive(Clone, Debug, Default)]
pub struct NewSandbox {
    /// Its name, if it has one.
    pub name: Option<String>,
    /// What it is; its command is the main command.
    pub spec: SandboxSpec,
}

impl Manager {
    /// Makes a sandbox. Sentences for the caller come with it: what the operator made stricter. More are in
    /// [`Self::take_warnings`].
    pub fn create(
        &mut self,
        new: NewSandbox,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(Sandboxed, Vec<String>), ManagerError> {
        let allowed = self.operator.apply(new.spec)?;
        let spec = allowed.spec.checked()?;
        let engine = engine::choose(spec.engine, &self.operator, &self.paths)?;
        let spec = spec.checked_for(&engine)?;
        if let Some(name) = &new.name {
            name::check(name)?;
            // Only for a quick answer: inserting decides.
            if self.store.by_name(name)?.is_some() {
                return Err(StoreError::NameTaken { name: name.clone() }.into());
            }
        }
        let cache = Cache::new(self.paths.cache.clone());
        let image = assets::ensure_image(&cache, &spec.image, progress)?;
        assets::ensure_kernel(&cache, engine.engine, progress).map_err(assets::AssetsError::from)?;

        let id = name::new_id().map_err(|error| ManagerError::File("/dev/urandom".into(), error))?;
        let folder = Folder::of(&self.paths, &id);
        let record = NewRecord { id: id.clone(), name: new.name, spec, engine, created_ns: unix_ns() };
        match self.make(&folder, &record, &image) {
            Ok(()) => {}
            Err(error) => {
                // Nothing of a sandbox that is not there stays, nor its record.
                let _ = self.store.at_any_price(|store| store.delete(&id));
                let _ = folder.begin_removal().and_then(|removed| removed.remove());
                let _ = folder.unfinished().remove();
                return Err(error);
            }
        }
        let sandbox = self.find(&id)?;
        self.warn_of_shortage(&sandbox);
        Ok((sandbox, allowed.notes))
    }

    fn make(
        &mut self,
        folder: &Folder,
        new: &NewRecord,
        image: &assets::ImageParts,
    ) -> Result<(), ManagerError> {
        let failed = |error| ManagerError::File(folder.path().to_owned(), error);
        let unfinished = folder.unfinished();
        unfinished.create().map_err(failed)?;
        // While it is held, the folder is not taken for a left-over.
        let life = store::take_life(unfinished.path()).map_err(failed)?;
        life.as_ref().map_or(Ok(()), store::life::forget_ending).map_err(failed)?;
        fs::write(unfinished.image_config(), &image.config_text).map_err(failed)?;
        let (id, name, spec, engine) =
            (new.id.clone(), new.name.clone(), new.spec.clone(), new.engine.clone());
        let description = Description::new(id, name, spec, engine, new.created_ns);
        let description = description.to_bytes().map_err(failed)?;
        fs::write(unfinished.description(), description).map_err(failed)?;
        disk::make_kept(&self.paths.cache, &unfinished.disk(), new.spec.disk)?;
        unfinished.sync().map_err(failed)?;
        match self.store.insert_at_most(new, self.operator.sandboxes()) {
            Err(StoreError::TooMany { count }) => self.operator.admit(count)?,
            result => result?,
        }
        // If this is interrupted here, the next command that looks at it goes on: all of it is there.
        folder.finish(&unfinished).map_err(failed)?;
        let record = self.store.get(&new.id)?.ok_or_else(|| ManagerError::Busy(new.id.clone()))?;
        let created = sandbox_created(&record.spec, new.engine.engine, record.spec.idle_timeout);
        self.note(&record, created)
    }

    /// Starts a sandbox and returns when its guest answers.
    pub fn start(&mut self, sandbox: &Sandboxed, progress: &mut dyn FnMut(&str)) -> Result<(), ManagerError> {
        let name = sandbox.name().to_owned();
        if sandbox.status == Status::Lost {
            return Err(ManagerError::Lost(name));
        }
        self.warn_of_shortage(sandbox);
        // What is missing is built here, where somebody sees the progress, and not by the monitor.
        let cache = Cache::new(self.paths.cache.clone());
        let spec = &sandbox.record.spec;
        // Anew at every start: what the machine offers may have changed, and a disk is the same for both engines.
        let engine = engine::choose(spec.engine, &self.operator, &self.paths)?;
        spec.fits(&engine)?;
        drop(Assets::ensure(&cache, engine.engine, &spec.image, None, progress)?);
        let folder = self.folder(sandbox);
        let failed = |error| ManagerError::File(folder.path().to_owned(), error);
        let life = self.take_life(sandbox)?;
        // The monitor uses it, too.
        self.store.needs_room()?;
        self.agree_with_description(sandbox, &engine)?;
        // The monitor does as is written.
        self.store.update(&sandbox.record.id, &[Change::Engine(engine)])?;
        let program = assets::program("bathy")?;
        let mut log = File::options();
        log.create(true).truncate(true).write(true).mode(0o600);
        log.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let log = log.open(folder.monitor_log()).map_err(failed)?;
        let mut monitor = Command::new(program)
            .args(["monitor", &sandbox.record.id])
            .current_dir("/")
            .stdin(Stdio::from(life))
            .stdout(Stdio::piped())
            .stderr(Stdio::from(log))
            .spawn()
            .map_err(failed)?;
        let mut line = String::new();
        let read = monitor.stdout.take().map(|output| BufReader::new(output).read_line(&mut line));
        if let Some(Err(error)) = read {
            return Err(failed(error));
        }
        let reason = match serde_json::from_str(&line) {
            Ok(Report::Running) => {
                collect_later(monitor);
                return Ok(());
            }
            Ok(Report::Failed(reason)) => reason,
            Err(_) => "its monitor was killed".to_owned(),
        };
        // It is ours to collect: it has said its last word.
        let _ = monitor.wait();
        Err(ManagerError::NotStarted { name, reason })
    }

    /// What stands beside the disk holds: the store may be an older one that was brought back.
    fn agree_with_description(&mut self, sandbox: &Sandboxed, engine: &Choice) -> Result<(), ManagerError> {
        let folder = self.folder(sandbox);
        let failed = |error| ManagerError::File(folder.description(), error);
        let record = &sandbox.record;
        // While no other command changes it.
        let _lock = folder.lock().map_err(failed)?;
        if Description::read(&folder).map_err(failed)?.is_none() {
            // Made by an earlier version.
            let spec = self.store.get(&record.id)?.map_or_else(|| record.spec.clone(), |now| now.spec);
            let (id, name) = (record.id.clone(), record.name.clone());
            let mut description = Description::new(id, name, spec, engine.clone(), record.created_ns);
            description.repl = self.repl_description(&record.id)?;
            return description.write(&folder).map_err(failed);
        }
        let operator = &self.operator;
        self.store.change_spec(&record.id, |spec| match Description::read(&folder).map_err(failed)? {
            Some(found) if found.spec != spec => Ok(operator.apply(found.spec)?.spec.checked()?),
            _ => Ok::<_, ManagerError>(spec),
        })?;
        Ok(())
    }

    /// The same sandbox, with the settings that stand beside its disk. What is wrong with these is told when it is started.
    pub(super) fn as_described(&mut self, sandbox: Sandboxed) -> Result<Sandboxed, ManagerError> {
        let folder = self.folder(&sandbox);
        let differs = |spec: &SandboxSpec| {
            Description::read(&folder).ok().flatten().map(|found| found.spec).filter(|found| found != spec)
        };
        if self.is_without_operator || differs(&sandbox.record.spec).is_none() {
            return Ok(sandbox);
        }
        let operator = &self.operator;
        // Once more, while no other command changes it.
        let changed = self.store.change_spec(&sandbox.record.id, |spec| {
            let allowed = differs(&spec).and_then(|found| operator.apply(found).ok()?.spec.checked().ok());
            Ok::<_, StoreError>(allowed.unwrap_or(spec))
        });
        match changed {
            Ok(Some(spec)) => {
                let record = Record { spec, ..sandbox.record };
                Ok(Sandboxed { record, ..sandbox })
            }
            Ok(None) | Err(StoreError::Full(_)) => Ok(sandbox),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes sure that a sandbox can be connected to: one that has ended is started. One that is paused because nobody
    /// used it stays so until somebody connects; one that was paused by hand is refused.
    pub fn wake(
        &mut self,
        sandbox: &Sandboxed,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Sandboxed, ManagerError> {
        let deadline = Instant::now() + WAKING;
        loop {
            let now = self.refresh(sandbox)?;
            match now.status {
                Status::Running => return Ok(now),
                Status::Paused if now.record.idle_paused => return Ok(now),
                Status::Paused => return Err(ManagerError::Paused(now.name().to_owned())),
                Status::Created
                | Status::Stopped
                | Status::Dead
                | Status::Orphaned
                | Status::Lost
                | Status::Unusable => {}
            }
            match self.start(&now, progress) {
                Ok(()) => return self.refresh(&now),
                // Somebody else wakes it, or its last life is not quite over.
                Err(ManagerError::Running(_) | ManagerError::Busy(_)) if Instant::now() < deadline => {
                    sleep(PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The lock that says that a sandbox runs, unless it does.
    fn take_life(&mut self, sandbox: &Sandboxed) -> Result<File, ManagerError> {
        let folder = self.folder(sandbox);
        let deadline = Instant::now() + LOCK_PATIENCE;
        loop {
            match store::take_life(folder.path()) {
                Ok(Some(life)) => return Ok(life),
                Ok(None) => {}
                // Being removed, which finding it tells in a moment, or just being made.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let now = self.find(&sandbox.record.id)?;
                    if now.status == Status::Lost && Instant::now() > deadline {
                        return Err(ManagerError::Lost(sandbox.name().to_owned()));
                    }
                }
                Err(error) => return Err(ManagerError::File(folder.path().to_owned(), error)),
            }
            if self.find(&sandbox.record.id)?.is_alive() {
                return Err(ManagerError::Running(sandbox.name().to_owned()));
            }
            if Instant::now() > deadline {
                return Err(ManagerError::Busy(sandbox.name().to_owned()));
            }
            sleep(PAUSE);
        }
    }

    /// Shuts a sandbox down: its processes are asked to end, those that do not within `grace` are ended. One that does
    /// not run stays as it is.
    pub fn stop(&mut self, sandbox: &Sandboxed, grace: Duration) -> Result<(), ManagerError> {
        match sandbox.status {
            // A frozen guest cannot shut itself down.
            Status::Paused => self.resume(sandbox)?,
            Status::Running => {}
            Status::Created
            | Status::Stopped
            | Status::Dead
            | Status::Orphaned
            | Status::Lost
            | Status::Unusable => {
                return Ok(());
            }
        }
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        self.end(sandbox, &ToMonitor::Stop { grace_ms }, grace + POWER_OFF + BURIAL)
    }

    /// Ends a sandbox at once, whether or not that can be recorded.
    pub fn kill(&mut self, sandbox: &Sandboxed) -> Result<(), ManagerError> {
        if !sandbox.is_alive() {
            return Err(self.not_running(sandbox));
        }
        let killed = || What::Killed { target: "sandbox".to_owned(), signal: libc::SIGKILL };
        let is_recorded = self.try_note_last(&sandbox.record, killed()).is_ok();
        self.end(sandbox, &ToMonitor::Kill, BURIAL)?;
        if !is_recorded {
            // Its end may have freed some space.
            self.note_last(&sandbox.record, killed());
        }
        Ok(())
    }

    fn end(&mut self, sandbox: &Sandboxed, how: &ToMonitor, patience: Duration) -> Result<(), ManagerError> {
        let folder = self.folder(sandbox);
        let is_kill = *how == ToMonitor::Kill;
        let asked = match control::ask(folder.path(), how, if is_kill { KILL_PATIENCE } else { PATIENCE }) {
            // It may have ended by itself meanwhile, which is what was wanted. Whether it has is seen by its lock.
            Ok(_) | Err(ControlError::NotRunning | ControlError::HungUp(_)) => Ok(()),
            Err(error) => Err(error),
        };
        if asked.is_ok() || !is_kill {
            asked?;
            if self.has_ended_within(sandbox, patience)? {
                return Ok(());
            }
        }
        let failed = |error| ManagerError::File(folder.path().to_owned(), error);
        if !is_kill {
            return Err(ManagerError::DoesNotEnd(sandbox.name().to_owned()));
        }
        if !force::kill_processes(&sandbox.record, &folder).map_err(failed)? {
            return Err(ManagerError::NotKilled(sandbox.name().to_owned()));
        }
        // Looking at it records the end.
        self.refresh_or_gone(sandbox)?;
        Ok(())
    }

    fn has_ended_within(&mut self, sandbox: &Sandboxed, patience: Duration) -> Result<bool, ManagerError> {
        let deadline = Instant::now() + patience;
        // One that was started again has ended, too.
        let is_it = |now: &Sandboxed| now.record.started_ns == sandbox.record.started_ns;
        while self.refresh_or_gone(sandbox)?.is_some_and(|now| now.is_alive() && is_it(&now)) {
            if Instant::now() > deadline {
                return Ok(false);
            }
            sleep(PAUSE);
        }
        Ok(true)
    }

    /// The same sandbox, as it is now; none is left of one that is removed when it ends.
    fn refresh_or_gone(&mut self, sandbox: &Sandboxed) -> Result<Option<Sandboxed>, ManagerError> {
        match self.refresh(sandbox) {
            Err(ManagerError::Store(StoreError::Name(NameError::Unknown { .. })))
                if sandbox.record.spec.auto_remove =>
            {
                Ok(None)
            }
            found => found.map(Some),
        }
    }

    /// Stops and starts a sandbox.
    pub fn restart(
        &mut self,
        sandbox: &Sandboxed,
        grace: Duration,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(), ManagerError> {
        if sandbox.is_alive() && sandbox.record.spec.auto_remove {
            return Err(ManagerError::GoneWhenEnded(sandbox.name().to_owned()));
        }
        self.stop(sandbox, grace)?;
        let stopped = self.refresh(sandbox)?;
        self.start(&stopped, progress)
    }

    /// Removes a sandbox with its disk and its logs. One that runs is only removed by force.
    pub fn remove(&mut self, sandbox: &Sandboxed, force: bool) -> Result<(), ManagerError> {
        if sandbox.status == Status::Orphaned {
            return self.remove_orphan(sandbox, force);
        }
        if sandbox.is_alive() {
            if !force {
                return Err(ManagerError::NotRemoved(sandbox.name().to_owned()));
            }
            self.kill(sandbox)?;
            if sandbox.record.spec.auto_remove && self.removed_itself(sandbox)? {
                return Ok(());
            }
        }
        let folder = self.folder(sandbox);
        let _life = match sandbox.status {
            Status::Lost if !folder.path().exists() => None,
            _ => Some(self.take_life(sandbox)?),
        };
        self.remove_files_and_record(&sandbox.record, &folder)
    }

    /// Removes what there is of a sandbox. The files go first, so that it works on a full disk; whatever interrupts it, the next
    /// command that lists sandboxes goes on with it.
    pub(super) fn remove_files_and_record(
        &mut self,
        record: &Record,
        folder: &Folder,
    ) -> Result<(), ManagerError> {
        let failed = |error| ManagerError::File(folder.path().to_owned(), error);
        let elsewhere = folder.link_target();
        let rest = folder.begin_removal().map_err(failed)?;
        self.warn_of_link(elsewhere, record.display_name());
        let deleted = self.store.delete_removed(&record.id, &rest)?;
        rest.remove().map_err(failed)?;
        if !deleted {
            // Somebody else was faster; finding it says so.
            self.find(&record.id)?;
        }
        self.note_last(record, What::SandboxRemoved);
        Ok(())
    }

    /// Waits until a sandbox that has ended is removed by its monitor; false if it is not.
    fn removed_itself(&mut self, sandbox: &Sandboxed) -> Result<bool, ManagerError> {
        let deadline = Instant::now() + BURIAL;
        let folder = self.folder(sandbox);
        while Instant::now() < deadline {
            if self.refresh_or_gone(sandbox)?.is_none() && !folder.path().exists() {
                return Ok(true);
            }
            sleep(PAUSE);
        }
        Ok(false)
    }

    /// Freezes a sandbox; with `release_memory` its memory goes to the host's disk.
    pub fn pause(&mut self, sandbox: &Sandboxed, release_memory: bool) -> Result<(), ManagerError> {
        self.ask_running(sandbox, &ToMonitor::Pause { release_memory }, PARKING_PATIENCE)
    }

    /// Lets a frozen sandbox go on.
    pub fn resume(&mut self, sandbox: &Sandboxed) -> Result<(), ManagerError> {
        self.ask_running(sandbox, &ToMonitor::Resume, PARKING_PATIENCE)
    }

    fn ask_running(
        &mut self,
        sandbox: &Sandboxed,
        question: &ToMonitor,
        patience: Duration,
    ) -> Result<(), ManagerError> {
        match control::ask(self.folder(sandbox).path(), question, patience) {
            Ok((FromMonitor::Done, _)) => Ok(()),
            Ok(_) => Err(ControlError::Unexpected.into()),
            Err(error) => Err(self.not_answered(sandbox, error)),
        }
    }

    /// The error for a sandbox whose monitor did not do as it was asked: that it does not run, if that is so.
    pub(super) fn not_answered(&mut self, sandbox: &Sandboxed, error: ControlError) -> ManagerError {
        match error {
            ControlError::NotRunning => self.not_running(sandbox),
            // It may have ended while it was asked.
            ControlError::HungUp(_) if !self.refresh(sandbox).is_ok_and(|now| now.is_alive()) => {
                self.not_running(sandbox)
            }
            error => error.into(),
        }
    }

    /// The error for a sandbox that should run, with what it is now.
    pub(super) fn not_running(&mut self, sandbox: &Sandboxed) -> ManagerError {
        match self.refresh(sandbox) {
            Ok(now) if now.status == Status::Lost => ManagerError::Lost(now.name().to_owned()),
            Ok(now) => ManagerError::NotRunning { name: now.name().to_owned(), status: now.status },
            Err(error) => error,
        }
    }

    /// Waits until a sandbox does not run any more.
    pub fn wait(
        &mut self,
        sandbox: &Sandboxed,
        interrupt: Option<BorrowedFd<'_>>,
    ) -> Result<Sandboxed, ManagerError> {
        loop {
            let Some(now) = self.refresh_or_gone(sandbox)? else {
                // How it ended went with it.
                return Ok(Sandboxed { record: sandbox.record.clone(), status: Status::Stopped });
            };
            // One that was started again has ended, too.
            if !now.is_alive() || now.record.started_ns != sandbox.record.started_ns {
                return Ok(now);
            }
            let mut fds: Vec<_> =
                interrupt.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
            let pause = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            // A failed wait is a short one.
            if poll(&mut fds, Some(&pause)).is_ok_and(|ready| ready > 0) {
                return Err(ManagerError::Interrupted);
            }
        }
    }
}

/// Monitors that this process started and has not collected: each outlives the command that started it.
static STARTED: Mutex<Vec<Child>> = Mutex::new(Vec::new());

fn collect_later(monitor: Child) {
    collect_ended();
    STARTED.lock().unwrap_or_else(PoisonError::into_inner).push(monitor);
}

/// Collects the monitors that have ended, in a process that lives on.
pub fn collect_ended() {
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    started.retain_mut(|monitor| matches!(monitor.try_wait(), Ok(None)));
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn monitors_that_have_ended_are_collected_and_nothing_else_is() {
        let mut other = Command::new("true").spawn().unwrap();
        let monitor = Command::new("true").spawn().unwrap();
        let place = format!("/proc/{}", monitor.id());
        collect_later(monitor);
        let deadline = Instant::now() + Duration::from_secs(10);
        while Path::new(&place).exists() {
            assert!(Instant::now() < deadline, "it is still there");
            collect_ended();
            sleep(PAUSE);
        }
        assert!(other.wait().unwrap().success(), "somebody else waits for it");
    }
}
