//! Creates, starts, stops, pauses and removes sandboxes.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_image::{ImageCache, ImageConfig};
use bathy_protocol::unix_ns;
use bathy_runtime::assets::{self, Assets, KeptImage, Wanted};
use bathy_runtime::audit::sandbox_created;
use bathy_runtime::description::Description;
use bathy_runtime::folder::Folder;
use bathy_runtime::images::Pull;
use bathy_runtime::{disk, engine};
use bathy_spec::name;
use bathy_spec::{Choice, SandboxSpec, SpecError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Manager, ManagerError, Sandboxed, Status, force};
use crate::monitor::control::{self, ControlError, FromMonitor, ToMonitor};
use crate::monitor::{POWER_OFF, StartReport};
use crate::store::{self, Change, NewRecord, Record, StoreError};

/// How long a monitor may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The same, where the processes are killed if it does not answer.
pub(super) const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Moving a large guest's memory to disk or back takes time.
const PARKING_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a killed sandbox may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval for polling what cannot be waited for.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long to retry a lock that another process holds briefly.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// How long to wait for a sandbox that other commands start or stop.
const WAKING: Duration = Duration::from_secs(30);

/// The inputs of a new sandbox.
#[derive(Clone, Debug, Default)]
pub struct NewSandbox {
    pub name: Option<String>,
    /// The specification; its command becomes the main command, behind the image's entrypoint.
    pub spec: SandboxSpec,
    pub pull: Pull,
    /// Without a command, the image's own becomes the main command.
    pub with_image_command: bool,
}

/// The words of a new sandbox's main command.
fn main_command(
    spec: &SandboxSpec,
    image: &ImageConfig,
    or_images: bool,
) -> Result<Vec<String>, ManagerError> {
    if spec.command.is_empty() && !or_images {
        return Ok(Vec::new());
    }
    let words = spec.command.iter().map(|word| word.clone().into_bytes()).collect();
    // Both come from text.
    let text = |word| String::from_utf8(word).map_err(|_| SpecError::NulInCommand.into());
    image.command(words).into_iter().map(text).collect()
}

impl Manager {
    /// Creates a sandbox. Also returns sentences about what the operator made stricter.
    /// [`Self::take_warnings`] may have more.
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
            // Only for an early error: the insert decides.
            if self.store.by_name(name)?.is_some() {
                return Err(StoreError::NameTaken { name: name.clone() }.into());
            }
        }
        let cache = ImageCache::new(self.paths.cache.clone());
        let image = assets::keep_image(&self.paths, &spec, new.pull, progress)?;
        let command = main_command(&spec, &image.config, new.with_image_command)?;
        let spec = SandboxSpec { command, image_digest: image.digest.clone(), ..spec }.checked()?;
        assets::ensure_kernel(&cache, engine.engine, progress).map_err(assets::AssetsError::from)?;

        let id = name::new_id().map_err(|error| ManagerError::File("/dev/urandom".into(), error))?;
        let folder = Folder::of(&self.paths, &id);
        let record = NewRecord { id: id.clone(), name: new.name, spec, engine, created_ns: unix_ns() };
        match self.make(&folder, &record, &image) {
            Ok(()) => {}
            Err(error) => {
                // After a failure neither files nor a record stay behind.
                let _ = self.store.with_reserve(|store| store.delete(&id));
                let _ = folder.begin_removal().and_then(|removed| removed.remove());
                let _ = folder.unfinished().remove();
                return Err(error);
            }
        }
        let sandbox = self.find(&id)?;
        self.warn_of_shortage(&sandbox);
        Ok((sandbox, allowed.notes))
    }

    fn make(&mut self, folder: &Folder, new: &NewRecord, image: &KeptImage) -> Result<(), ManagerError> {
        let failed = |error| ManagerError::File(folder.path().to_owned(), error);
        let unfinished = folder.unfinished();
        unfinished.create().map_err(failed)?;
        // While this lock is held, the folder is not treated as abandoned.
        let life = store::take_life(unfinished.path()).map_err(failed)?;
        life.as_ref().map_or(Ok(()), store::life::forget_ending).map_err(failed)?;
        let config = serde_json::to_vec(&image.config).map_err(|error| failed(error.into()))?;
        fs::write(unfinished.image_config(), config).map_err(failed)?;
        let (id, name, spec, engine) =
            (new.id.clone(), new.name.clone(), new.spec.clone(), new.engine.clone());
        let description = Description::new(id, name, spec, engine, new.created_ns);
        let description = description.to_bytes().map_err(failed)?;
        fs::write(unfinished.description(), description).map_err(failed)?;
        disk::make_persistent(&self.paths.cache, &unfinished.disk(), new.spec.disk)?;
        unfinished.sync().map_err(failed)?;
        match self.store.insert_at_most(new, self.operator.sandboxes()) {
            Err(StoreError::TooMany { count }) => self.operator.admit(count)?,
            result => result?,
        }
        // If the process is killed here, the next command that lists sandboxes completes the creation.
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
        // Missing assets are built here, where the user sees the progress, not in the monitor.
        let spec = &sandbox.record.spec;
        // Chosen at every start: the machine may have changed, and disks work with both engines.
        let engine = engine::choose(spec.engine, &self.operator, &self.paths)?;
        spec.fits(&engine)?;
        let wanted = Wanted { engine: engine.engine, spec, kernel: None, pull: Pull::Missing };
        drop(Assets::ensure(&self.paths, &wanted, progress)?);
        let folder = self.folder(sandbox);
        let failed = |error| ManagerError::File(folder.path().to_owned(), error);
        let life = self.take_life(sandbox)?;
        // The monitor needs the store as well.
        self.store.require_shared()?;
        self.agree_with_description(sandbox, &engine)?;
        // The monitor reads the engine from the record.
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
            Ok(StartReport::Running) => {
                collect_later(monitor);
                return Ok(());
            }
            Ok(StartReport::Failed(reason)) => reason,
            Err(_) => "its monitor was killed".to_owned(),
        };
        // The monitor is our child, and it has sent its report.
        let _ = monitor.wait();
        Err(ManagerError::NotStarted { name, reason })
    }

    /// The description beside the disk takes precedence: the store may have been restored from a backup.
    fn agree_with_description(&mut self, sandbox: &Sandboxed, engine: &Choice) -> Result<(), ManagerError> {
        let folder = self.folder(sandbox);
        let failed = |error| ManagerError::File(folder.description(), error);
        let record = &sandbox.record;
        // Held so that no other command changes the sandbox meanwhile.
        let _lock = folder.lock().map_err(failed)?;
        if Description::read(&folder).map_err(failed)?.is_none() {
            // The sandbox was created by an earlier version.
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

    /// The sandbox with the settings from the description beside its disk. Errors in the description are
    /// reported when the sandbox is started.
    pub(super) fn as_described(&mut self, sandbox: Sandboxed) -> Result<Sandboxed, ManagerError> {
        let folder = self.folder(&sandbox);
        let differs = |spec: &SandboxSpec| {
            Description::read(&folder).ok().flatten().map(|found| found.spec).filter(|found| found != spec)
        };
        if self.is_without_operator || differs(&sandbox.record.spec).is_none() {
            return Ok(sandbox);
        }
        let operator = &self.operator;
        // Read again, now that no other command can change it.
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

    /// Makes a sandbox ready for connections and starts it if it has ended. A sandbox that was paused because
    /// it was idle stays paused until a client connects; one that was paused explicitly is an error.
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
                // Another command is starting it, or it is still shutting down.
                Err(ManagerError::Running(_) | ManagerError::Busy(_)) if Instant::now() < deadline => {
                    sleep(POLL_INTERVAL);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes the life lock, unless the sandbox is running.
    fn take_life(&mut self, sandbox: &Sandboxed) -> Result<File, ManagerError> {
        let folder = self.folder(sandbox);
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            match store::take_life(folder.path()) {
                Ok(Some(life)) => return Ok(life),
                Ok(None) => {}
                // The sandbox is being removed, which the next lookup reports, or just being created.
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
            sleep(POLL_INTERVAL);
        }
    }

    /// Shuts a sandbox down: its processes get `grace` to exit and are then killed. A sandbox that is not
    /// running is left as it is.
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
        self.end(sandbox, &ToMonitor::Stop { grace_ms }, grace + POWER_OFF + END_TIMEOUT)
    }

    /// Kills a sandbox, whether or not that can be recorded.
    pub fn kill(&mut self, sandbox: &Sandboxed) -> Result<(), ManagerError> {
        if !sandbox.is_alive() {
            return Err(self.not_running(sandbox));
        }
        let killed = || What::Killed { target: "sandbox".to_owned(), signal: libc::SIGKILL };
        let is_recorded = self.try_note_last(&sandbox.record, killed()).is_ok();
        self.end(sandbox, &ToMonitor::Kill, END_TIMEOUT)?;
        if !is_recorded {
            // Ending the sandbox may have freed some disk space.
            self.note_last(&sandbox.record, killed());
        }
        Ok(())
    }

    fn end(&mut self, sandbox: &Sandboxed, how: &ToMonitor, timeout: Duration) -> Result<(), ManagerError> {
        let folder = self.folder(sandbox);
        let is_kill = *how == ToMonitor::Kill;
        let asked = match control::ask(folder.path(), how, if is_kill { KILL_TIMEOUT } else { TIMEOUT }) {
            // It may have ended by itself meanwhile; the life lock shows whether it has.
            Ok(_) | Err(ControlError::NotRunning | ControlError::HungUp(_)) => Ok(()),
            Err(error) => Err(error),
        };
        if asked.is_ok() || !is_kill {
            asked?;
            if self.has_ended_within(sandbox, timeout)? {
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
        // `refresh` records the end.
        self.refresh_or_removed(sandbox)?;
        Ok(())
    }

    fn has_ended_within(&mut self, sandbox: &Sandboxed, timeout: Duration) -> Result<bool, ManagerError> {
        let deadline = Instant::now() + timeout;
        // A sandbox that was started again has ended in between.
        let is_it = |now: &Sandboxed| now.record.started_ns == sandbox.record.started_ns;
        while self.refresh_or_removed(sandbox)?.is_some_and(|now| now.is_alive() && is_it(&now)) {
            if Instant::now() > deadline {
                return Ok(false);
            }
            sleep(POLL_INTERVAL);
        }
        Ok(true)
    }

    /// The sandbox's present state; none if it was removed when it ended.
    fn refresh_or_removed(&mut self, sandbox: &Sandboxed) -> Result<Option<Sandboxed>, ManagerError> {
        match self.refresh(sandbox) {
            Err(error) if error.is_unknown_name() && sandbox.record.spec.auto_remove => Ok(None),
            found => found.map(Some),
        }
    }

    pub fn restart(
        &mut self,
        sandbox: &Sandboxed,
        grace: Duration,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(), ManagerError> {
        if sandbox.is_alive() && sandbox.record.spec.auto_remove {
            return Err(ManagerError::AutoRemove(sandbox.name().to_owned()));
        }
        self.stop(sandbox, grace)?;
        let stopped = self.refresh(sandbox)?;
        self.start(&stopped, progress)
    }

    /// Removes a sandbox with its disk and logs. A running sandbox is only removed with `force`.
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

    /// Removes everything of a sandbox. Files are removed before the record, so that it works on a full disk.
    /// If it is interrupted, the next command that lists sandboxes completes the removal.
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
            // Another process was faster; the lookup returns that error.
            self.find(&record.id)?;
        }
        self.note_last(record, What::SandboxRemoved);
        Ok(())
    }

    /// Waits until the monitor has removed a sandbox that ended. False if it does not.
    fn removed_itself(&mut self, sandbox: &Sandboxed) -> Result<bool, ManagerError> {
        let deadline = Instant::now() + END_TIMEOUT;
        let folder = self.folder(sandbox);
        while Instant::now() < deadline {
            if self.refresh_or_removed(sandbox)?.is_none() && !folder.path().exists() {
                return Ok(true);
            }
            sleep(POLL_INTERVAL);
        }
        Ok(false)
    }

    /// Freezes a sandbox. With `release_memory` its memory is moved to the host's disk.
    pub fn pause(&mut self, sandbox: &Sandboxed, release_memory: bool) -> Result<(), ManagerError> {
        self.ask_running(sandbox, &ToMonitor::Pause { release_memory }, PARKING_TIMEOUT)
    }

    /// Resumes a frozen sandbox.
    pub fn resume(&mut self, sandbox: &Sandboxed) -> Result<(), ManagerError> {
        self.ask_running(sandbox, &ToMonitor::Resume, PARKING_TIMEOUT)
    }

    fn ask_running(
        &mut self,
        sandbox: &Sandboxed,
        request: &ToMonitor,
        timeout: Duration,
    ) -> Result<(), ManagerError> {
        match control::ask(self.folder(sandbox).path(), request, timeout) {
            Ok((FromMonitor::Done, _)) => Ok(()),
            Ok(_) => Err(ControlError::Unexpected.into()),
            Err(error) => Err(self.not_answered(sandbox, error)),
        }
    }

    /// The error for a failed request to the monitor: that the sandbox is not running, if so.
    pub(super) fn not_answered(&mut self, sandbox: &Sandboxed, error: ControlError) -> ManagerError {
        match error {
            ControlError::NotRunning => self.not_running(sandbox),
            // The sandbox may have ended during the request.
            ControlError::HungUp(_) if !self.refresh(sandbox).is_ok_and(|now| now.is_alive()) => {
                self.not_running(sandbox)
            }
            error => error.into(),
        }
    }

    /// The error for a sandbox that is expected to run, with its present status.
    pub(super) fn not_running(&mut self, sandbox: &Sandboxed) -> ManagerError {
        match self.refresh(sandbox) {
            Ok(now) if now.status == Status::Lost => ManagerError::Lost(now.name().to_owned()),
            Ok(now) => ManagerError::NotRunning { name: now.name().to_owned(), status: now.status },
            Err(error) => error,
        }
    }

    /// Waits until a sandbox has ended.
    pub fn wait(
        &mut self,
        sandbox: &Sandboxed,
        interrupt: Option<BorrowedFd<'_>>,
    ) -> Result<Sandboxed, ManagerError> {
        loop {
            let Some(now) = self.refresh_or_removed(sandbox)? else {
                // The record, and with it the exit status, was removed.
                return Ok(Sandboxed { record: sandbox.record.clone(), status: Status::Stopped });
            };
            // A sandbox that was started again has ended in between.
            if !now.is_alive() || now.record.started_ns != sandbox.record.started_ns {
                return Ok(now);
            }
            let mut fds: Vec<_> =
                interrupt.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
            let pause = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            // If polling fails, this iteration was merely short.
            if poll(&mut fds, Some(&pause)).is_ok_and(|ready| ready > 0) {
                return Err(ManagerError::Interrupted);
            }
        }
    }
}

/// Monitors that this process started and has not reaped: each outlives the command that started it.
static STARTED: Mutex<Vec<Child>> = Mutex::new(Vec::new());

fn collect_later(monitor: Child) {
    collect_ended();
    STARTED.lock().unwrap_or_else(PoisonError::into_inner).push(monitor);
}

/// Reaps the monitors that have ended, for long-running processes.
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
            sleep(POLL_INTERVAL);
        }
        assert!(other.wait().unwrap().success(), "its parent waits for it");
    }
}
