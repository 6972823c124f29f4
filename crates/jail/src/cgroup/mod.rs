//! Control groups: limits that hold for all processes of a sandbox together, and stopping them all at once.
//!
//! Nothing here is a must. An ordinary user seldom may make groups, and a container may have none; so each limit states by
//! which mechanism it is held, or why by none, and the sandbox's other limits stand by themselves.
//!
//! The keeper enters the guest's part before its first instruction ([`Entrance`]), and everything it starts is born there. Then
//! [`Cgroup::leave_guest`] takes only the keeper out of what is the guest's alone: it answers while its guest is paused,
//! does not wait for a processor that its guest spins on, and still shares the guest's limits.

mod entrance;
mod folder;
mod freezer;
mod hierarchy;
mod priority;
mod session;
#[cfg(test)]
mod tests;
mod v1;
mod v2;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

pub use self::entrance::Entrance;
pub use self::freezer::CgroupFreezer;
use self::freezer::Version;
use self::hierarchy::{Folders, Hierarchies};
pub use self::priority::Priority;
pub use self::session::describe_weight;

/// How long processes have to stop, to go on, or to vanish.
const DEADLINE: Duration = Duration::from_secs(5);
/// How often that is looked at.
const PAUSE: Duration = Duration::from_millis(1);

/// The parts of a group that has any: the guest's processes, and the keeper with the gateway.
const GUEST: &str = "guest";
const HOST_SIDE: &str = "keeper";
const PARTS: [&str; 2] = [GUEST, HOST_SIDE];

/// How old an empty group is at least before it counts as abandoned.
const ABANDONED_AFTER: Duration = Duration::from_secs(60);

/// The smallest share of a CPU that can be asked for; the kernel does not deal in smaller ones.
pub const MIN_QUOTA: f64 = 0.01;
/// The largest share that makes sense to ask for.
pub const MAX_QUOTA: f64 = 1024.0;

/// What went wrong with a group.
#[derive(Debug, Error)]
pub enum CgroupError {
    /// A name that no control group may have.
    #[error("{0:?} cannot name a control group. Use up to 64 letters, digits, '-', '_' and '.'")]
    Id(String),
    /// A CPU quota outside of the possible range.
    #[error("A CPU quota of {0} is not possible. It is between {MIN_QUOTA} and {MAX_QUOTA} CPUs")]
    Quota(f64),
    /// A group of this name has processes.
    #[error("There is a control group {0} already, and processes are in it")]
    Taken(PathBuf),
    /// A group that a process could not be started in.
    #[error("Cannot start a process in the control group {0}")]
    Enter(PathBuf, #[source] io::Error),
    /// A process could not be moved.
    #[error("Cannot move process {pid} into the control group {folder}")]
    Move {
        /// The process that could not be moved.
        pid: u32,
        /// The folder of the control group.
        folder: PathBuf,
        /// The error of the kernel when the process was moved.
        source: io::Error,
    },
    /// There is nothing to freeze with.
    #[error("This sandbox's processes cannot be frozen by a control group ({0})")]
    NoFreezer(String),
    /// The freezer could not be written to.
    #[error("Cannot change whether the control group {0} is frozen")]
    Freezer(PathBuf, #[source] io::Error),
    /// The freezer did not do it in time.
    #[error("The processes of the control group {0} did not {1} within {DEADLINE:?}")]
    Slow(PathBuf, &'static str),
    /// No group holds the processes.
    #[error("No control group holds this sandbox's processes")]
    Unheld,
    /// Processes that do not end.
    #[error("{0} processes of the sandbox's control group do not end")]
    Alive(usize),
    /// A control group could not be removed.
    #[error("Cannot remove the control group {0}")]
    Remove(PathBuf, #[source] io::Error),
}

/// What a group is to limit. What is `None` is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CgroupLimits {
    /// CPUs' worth of time: 0.5 is half of one.
    pub cpu_quota: Option<f64>,
    /// Whether the guest's processes, however many, compete for a processor as one. A quota implies it.
    pub cpu_weight: bool,
    /// Bytes of memory, of all processes together and without swapping.
    pub memory: Option<u64>,
    /// The number of processes and threads.
    pub pids: Option<u64>,
}

/// By which mechanism each limit is held: `cgroup v1`, `cgroup v2`, or `none: why`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enforcement {
    /// The share of a CPU.
    pub cpu: String,
    /// That the guest's processes compete as one.
    pub weight: String,
    /// What enforces the memory limit.
    pub memory: String,
    /// What enforces the limit of processes.
    pub processes: String,
    /// What stops all processes at once.
    pub freezer: String,
}

/// What the group's processes use together, as far as the kernel reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupUsage {
    /// Nanoseconds of CPU time, of ended processes too.
    pub cpu_ns: Option<u64>,
    /// Bytes of memory in use.
    pub memory: Option<u64>,
    /// The number of processes and threads.
    pub pids: Option<u64>,
}

/// A sandbox's control group, in as many trees as it takes. Dropping it removes it if no process is left in it.
#[derive(Debug)]
pub struct Cgroup {
    folders: Folders,
    enforced: Enforcement,
    /// Groups in version 1 trees that all processes are in alike.
    v1: Vec<PathBuf>,
    cpu: Option<v1::CpuParts>,
    v2: Option<v2::Layout>,
    freezer: Option<CgroupFreezer>,
}

impl Cgroup {
    /// Makes the group `bathysphere-<id>` below this process's own groups. Only bad input and a group that is in use
    /// are errors; see [`Cgroup::enforced`] for everything that this machine does not let us have.
    ///
    /// A tree without a part in `limits` is left alone, except for those that measure CPU time and freeze.
    pub fn create(id: &str, limits: &CgroupLimits) -> Result<Self, CgroupError> {
        Self::create_in(&Hierarchies::of_this_process(), id, limits)
    }

    fn create_in(trees: &Hierarchies, id: &str, limits: &CgroupLimits) -> Result<Self, CgroupError> {
        let name = group_name(id)?;
        if let Some(quota) = limits.cpu_quota.filter(|quota| !(MIN_QUOTA..=MAX_QUOTA).contains(quota)) {
            return Err(CgroupError::Quota(quota));
        }
        let mut group = Self::empty(trees.folders);
        v1::make_limits(&mut group, trees, &name, limits)?;
        v2::make(&mut group, trees, &name, limits)?;
        if group.freezer.is_none() {
            v1::make_freezer(&mut group, trees, &name)?;
        }
        Ok(group)
    }

    fn empty(folders: Folders) -> Self {
        let none = || "none: this machine has no control groups".to_owned();
        let enforced =
            Enforcement { cpu: none(), weight: none(), memory: none(), processes: none(), freezer: none() };
        Self { folders, enforced, v1: Vec::new(), cpu: None, v2: None, freezer: None }
    }

    /// By which mechanism each limit is held.
    pub fn enforced(&self) -> &Enforcement {
        &self.enforced
    }

    /// Whether a group limits the memory of all processes together.
    pub fn limits_memory(&self) -> bool {
        is_held(&self.enforced.memory)
    }

    /// What stops and continues the processes, if this machine lets us have it.
    pub fn freezer(&self) -> Option<&CgroupFreezer> {
        self.freezer.as_ref()
    }

    /// The way under the limits for a process that is to be started, with everything that it will start, as a part of the guest.
    pub fn guest_entrance(&self) -> Result<Entrance, CgroupError> {
        let cpu = self.cpu.as_ref().map(|parts| &parts.guest);
        let freezer = self.freezer.as_ref().and_then(CgroupFreezer::own_folder);
        let v2 = self.v2.as_ref().map(|layout| layout.guest.as_path());
        Entrance::open(self.v1.iter().chain(cpu).chain(freezer), v2)
    }

    /// The same for a process of the host side. It is not frozen, and does not share the guest's weight.
    pub fn host_side_entrance(&self) -> Result<Entrance, CgroupError> {
        let nested = self.cpu.as_ref().filter(|parts| parts.top.is_some()).map(|parts| &parts.host_side);
        let v2 = self.v2.as_ref().map(|layout| layout.host_side.as_path());
        Entrance::open(self.v1.iter().chain(nested), v2)
    }

    /// Takes one process out of what is the guest's alone: the freezer, and the weight. The limits go on holding for it.
    pub fn leave_guest(&self, pid: u32) -> Result<(), CgroupError> {
        if let Some(freezer) = &self.freezer {
            freezer.leave(pid)?;
        }
        let cpu = self.cpu.as_ref().map(|parts| &parts.host_side);
        let host_side = self.v2.as_ref().map(|layout| &layout.host_side);
        cpu.into_iter().chain(host_side).try_for_each(|folder| put(folder, pid))
    }

    /// Stops all processes except those that left the freezer, and waits until they stand still.
    pub fn freeze(&self) -> Result<(), CgroupError> {
        self.freezer_or_why()?.freeze()
    }

    /// Lets the processes go on.
    pub fn thaw(&self) -> Result<(), CgroupError> {
        self.freezer_or_why()?.thaw()
    }

    fn freezer_or_why(&self) -> Result<&CgroupFreezer, CgroupError> {
        let why = || CgroupError::NoFreezer(self.enforced.freezer.trim_start_matches("none: ").to_owned());
        self.freezer.as_ref().ok_or_else(why)
    }

    /// Ends all processes, frozen or not, and waits until they have exited.
    pub fn kill(&self) -> Result<(), CgroupError> {
        if self.all_folders().is_empty() {
            return Err(CgroupError::Unheld);
        }
        match &self.freezer {
            Some(freezer) => freezer.while_frozen(|| self.end_processes()),
            None => self.end_processes(),
        }
        let begin = Instant::now();
        loop {
            let left = self.processes();
            if left.is_empty() {
                return Ok(());
            }
            if begin.elapsed() > DEADLINE {
                return Err(CgroupError::Alive(left.len()));
            }
            thread::sleep(PAUSE);
            self.end_processes();
        }
    }

    /// Kills the guest's processes all at once, where the kernel can do that in one step, and waits for nothing. Their keeper is
    /// being killed: by itself the kernel would end one after the other.
    pub fn kill_guest(&self) {
        if let Some(layout) = &self.v2 {
            // Where it fails they end with the keeper's namespace.
            let _ = folder::write(&layout.guest, "cgroup.kill", "1");
        }
    }

    fn end_processes(&self) {
        if let Some(layout) = &self.v2 {
            // Kernels before 5.14 lack it; then, and in version 1 trees, they are ended one by one.
            let _ = folder::write(&layout.top, "cgroup.kill", "1");
        }
        for folder in self.all_folders() {
            folder::end_processes(folder);
        }
    }

    /// What the group of another process uses, if it is that of the sandbox `id`.
    pub fn usage_of(id: &str, pid: u32) -> Result<CgroupUsage, CgroupError> {
        let name = group_name(id)?;
        let trees = Hierarchies::of_process(&pid.to_string());
        let mut group = std::mem::ManuallyDrop::new(Self::empty(trees.folders));
        for controller in v1::CONTROLLERS {
            let path = trees.v1(controller).and_then(Result::ok).unwrap_or_default();
            // It may be in a part of the group.
            let own = path.ancestors().take(2).find(|path| path.ends_with(&name));
            group.v1.extend(own.map(Path::to_owned));
        }
        let part = trees.v2().and_then(Result::ok);
        let top = part.as_deref().and_then(Path::parent).filter(|path| path.ends_with(&name));
        group.v2 = top.map(|top| v2::Layout::at(top.to_owned()));
        Ok(group.usage())
    }

    /// What the processes use together.
    pub fn usage(&self) -> CgroupUsage {
        let counted = || self.v1.iter().chain(self.cpu.as_ref().and_then(|parts| parts.top.as_ref()));
        let v1 = |file: &str| counted().find_map(|folder| folder::number(folder, file));
        let top = self.v2.as_ref().map(|layout| layout.top.as_path());
        let v2 = |file: &str| folder::number(top?, file);
        let v2_cpu_us = || folder::keyed_number(top?, "cpu.stat", "usage_usec");
        CgroupUsage {
            cpu_ns: v1("cpuacct.usage").or_else(|| Some(v2_cpu_us()?.saturating_mul(1000))),
            memory: v1("memory.usage_in_bytes").or_else(|| v2("memory.current")),
            pids: v1("pids.current").or_else(|| v2("pids.current")),
        }
    }

    /// The processes that are in the group now.
    pub fn processes(&self) -> BTreeSet<u32> {
        self.all_folders().into_iter().flat_map(folder::processes).collect()
    }

    /// Removes the group; its processes are ending. A group that does not exist any more is no error.
    pub fn remove(&mut self) -> Result<(), CgroupError> {
        let begin = Instant::now();
        loop {
            match self.remove_once() {
                Ok(()) => break,
                Err((folder, error)) if begin.elapsed() > DEADLINE => {
                    return Err(CgroupError::Remove(folder, error));
                }
                Err(_) => thread::sleep(PAUSE),
            }
        }
        (self.v1, self.cpu, self.v2, self.freezer) = (Vec::new(), None, None, None);
        Ok(())
    }

    fn remove_once(&self) -> Result<(), (PathBuf, io::Error)> {
        // All are tried, whatever becomes of one.
        let results: Vec<_> = self.all_folders().into_iter().map(|path| self.remove_folder(path)).collect();
        results.into_iter().collect()
    }

    fn remove_folder(&self, path: &Path) -> Result<(), (PathBuf, io::Error)> {
        match (self.folders.unmake)(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err((path.to_owned(), error)),
            _ => Ok(()),
        }
    }

    /// Removes what a killed monitor left of a sandbox that is not running any more: its groups, thawed, and processes
    /// in them that did not end. Returns whether there was anything.
    pub fn remove_stale(id: &str) -> Result<bool, CgroupError> {
        Self::remove_stale_in(&Hierarchies::of_this_process(), id)
    }

    fn remove_stale_in(trees: &Hierarchies, id: &str) -> Result<bool, CgroupError> {
        let found = trees.search(&group_name(id)?, &v1::CONTROLLERS);
        if found.v1.is_empty() && found.v2.is_empty() {
            return Ok(false);
        }
        for folder in &found.v1 {
            // What is frozen here cannot end, whichever group it is ended by.
            let _ = folder::write_if_there(folder, "freezer.state", "THAWED");
        }
        let mut group = Self::empty(trees.folders);
        group.v1 = found.v1.into_iter().flat_map(with_parts).collect();
        for folder in found.v2 {
            let mut group = Self::empty(trees.folders);
            group.v2 = Some(v2::Layout::at(folder));
            group.kill()?;
            group.remove()?;
        }
        if !group.v1.is_empty() {
            group.kill()?;
            group.remove()?;
        }
        Ok(true)
    }

    /// Removes empty groups, below this process's own and those above it, whose names begin with `bathysphere-` and `prefix`, and that have been there
    /// for longer than it takes to put a process in. The process that made them was killed.
    pub fn remove_abandoned(prefix: &str) {
        Self::remove_abandoned_in(&Hierarchies::of_this_process(), prefix, ABANDONED_AFTER);
    }

    fn remove_abandoned_in(trees: &Hierarchies, prefix: &str, age: Duration) {
        let Ok(prefix) = group_name(prefix) else { return };
        let v1 = v1::CONTROLLERS.iter().filter_map(|controller| trees.v1(controller)).flatten();
        let v2 = trees.v2().and_then(Result::ok);
        let v2 = v2.iter().flat_map(|own| v2::above(own)).map(Path::to_owned);
        for parent in v1.chain(v2).collect::<BTreeSet<_>>() {
            for path in folder::older_than(&parent, &prefix, age) {
                for folder in with_parts(path) {
                    // One with processes stays, and so do its other parts, which it still needs; not every group has parts.
                    let removed = (trees.folders.unmake)(&folder);
                    if removed.is_err_and(|error| error.kind() != io::ErrorKind::NotFound) {
                        break;
                    }
                }
            }
        }
    }

    /// Every folder, in an order in which they can be removed.
    fn all_folders(&self) -> Vec<&Path> {
        let mut all: Vec<&Path> = self.v1.iter().map(PathBuf::as_path).collect();
        all.extend(self.cpu.iter().flat_map(v1::CpuParts::own_folders));
        all.extend(self.freezer.as_ref().and_then(CgroupFreezer::own_folder).map(PathBuf::as_path));
        if let Some(layout) = &self.v2 {
            all.extend([layout.guest.as_path(), &layout.host_side, &layout.top]);
        }
        all
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // An error cannot be returned here; `remove` returns it.
        let _ = self.remove_once();
    }
}

fn put(folder: &Path, pid: u32) -> Result<(), CgroupError> {
    folder::put(folder, pid).map_err(|source| CgroupError::Move { pid, folder: folder.to_owned(), source })
}

fn is_held(mechanism: &str) -> bool {
    !mechanism.starts_with("none")
}

fn group_name(id: &str) -> Result<String, CgroupError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if id.is_empty() || id.len() > 64 || !id.chars().all(fits) {
        return Err(CgroupError::Id(id.to_owned()));
    }
    Ok(format!("bathysphere-{id}"))
}

/// A group's folder after those of the parts that it may have.
fn with_parts(top: PathBuf) -> [PathBuf; 3] {
    let [guest, host_side] = PARTS.map(|part| top.join(part));
    [guest, host_side, top]
}

/// Makes a group's folder. One that is there and has no processes was left behind, and is replaced. `Ok(Err(why))` is a
/// machine that does not let us.
fn make_folder(folders: Folders, path: &Path, below: &[&str]) -> Result<Result<(), String>, CgroupError> {
    let refused = |error: &io::Error| Ok(Err(format!("cannot make {}: {error}", path.display())));
    match (folders.make)(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            for name in below {
                // What matters is whether the folder itself can go.
                let _ = (folders.unmake)(&path.join(name));
            }
            if (folders.unmake)(path).is_err() {
                return Err(CgroupError::Taken(path.to_owned()));
            }
            (folders.make)(path).map_or_else(|error| refused(&error), |()| Ok(Ok(())))
        }
        Err(error) => refused(&error),
        Ok(()) => Ok(Ok(())),
    }
}

/// The quota of each period of [`PERIOD_US`], in microseconds.
fn quota_us(quota: f64) -> u64 {
    let time = Duration::try_from_secs_f64(quota * Duration::from_micros(PERIOD_US).as_secs_f64());
    time.ok().and_then(|time| u64::try_from(time.as_micros()).ok()).unwrap_or(PERIOD_US)
}

/// Over which time a quota is counted: the kernel's own choice.
const PERIOD_US: u64 = 100_000;
