//! The group in the version 2 tree: one folder with the limits, and two below it, each with a weight of its own, of which one
//! can be frozen.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::hierarchy::Hierarchies;
use super::{
    Cgroup, CgroupError, CgroupFreezer, CgroupLimits, GUEST, HOST_SIDE, PARTS, PERIOD_US, Version, folder,
    is_held, make_folder, quota_us,
};

const HELD: &str = "cgroup v2";

/// The folders of a group.
#[derive(Debug)]
pub struct Layout {
    /// Has the limits, and no process of its own.
    pub top: PathBuf,
    /// The group of the guest, which can be frozen.
    pub guest: PathBuf,
    /// Of the keeper and the gateway. Is never frozen.
    pub host_side: PathBuf,
}

impl Layout {
    /// The folders below `top`.
    pub fn at(top: PathBuf) -> Self {
        Self { guest: top.join(GUEST), host_side: top.join(HOST_SIDE), top }
    }
}

/// What is asked of the version 2 tree: what version 1 trees have not given.
struct Wanted {
    cpu: Option<f64>,
    weight: bool,
    memory: Option<u64>,
    pids: Option<u64>,
}

impl Wanted {
    fn controllers(&self) -> Vec<&'static str> {
        let wanted =
            [("cpu", self.cpu.is_some()), ("memory", self.memory.is_some()), ("pids", self.pids.is_some())];
        wanted.into_iter().filter(|(_, is_wanted)| *is_wanted).map(|(name, _)| name).collect()
    }

    /// Below which group to make ours. A weight is not worth a limit: where both cannot be had, it is done without.
    fn parent(&self, own: &Path) -> Option<PathBuf> {
        let mut controllers = self.controllers();
        let limits = controllers.clone();
        if self.weight && self.cpu.is_none() {
            controllers.push("cpu");
        }
        nearest_with(own, &controllers).or_else(|| nearest_with(own, &limits))
    }
}

/// The nearest of a group and those above it that gives groups below it these controllers. A group that has processes of its own,
/// as ours has, gives none, unless it is the root; where the user's part of the tree begins further up, the group above ours may.
/// A group with a limit of memory, processor time, processors or disks is not left: it was set for us and for what we start.
fn nearest_with(own: &Path, controllers: &[&'static str]) -> Option<PathBuf> {
    for candidate in above(own) {
        let may_move = access(candidate.join("cgroup.procs"), Access::WRITE_OK).is_ok();
        if may_move && controllers.iter().all(|name| control(candidate, name, || Ok(())).is_ok()) {
            return Some(candidate.to_owned());
        }
        if is_limited(candidate) {
            return None;
        }
    }
    None
}

/// Whether a limit is set for a group. The number of processes is not looked at: service managers limit it everywhere.
fn is_limited(group: &Path) -> bool {
    let has = |file: &str, is_limit: fn(&str) -> bool| {
        folder::read(group, file).is_ok_and(|text| is_limit(text.trim()))
    };
    has("memory.max", |limit| limit != "max")
        || has("cpu.max", |limit| !limit.starts_with("max"))
        || has("cpuset.cpus", |processors| !processors.is_empty())
        || has("io.max", |limits| !limits.is_empty())
}

/// A group and all groups above it.
pub fn above(own: &Path) -> impl Iterator<Item = &Path> {
    own.ancestors().take_while(|path| path.join("cgroup.procs").exists())
}

/// Adds what the version 2 tree offers to `group`.
pub fn make(
    group: &mut Cgroup,
    trees: &Hierarchies,
    name: &str,
    limits: &CgroupLimits,
) -> Result<(), CgroupError> {
    let wanted = Wanted {
        cpu: limits.cpu_quota.filter(|_| !is_held(&group.enforced.cpu)),
        weight: (limits.cpu_weight || limits.cpu_quota.is_some()) && !is_held(&group.enforced.weight),
        memory: limits.memory.filter(|_| !is_held(&group.enforced.memory)),
        pids: limits.pids.filter(|_| !is_held(&group.enforced.processes)),
    };
    let Some(parent) = trees.v2() else { return Ok(()) };
    let made = match parent {
        Err(why) => Err(why),
        Ok(own) => {
            let parent = wanted.parent(&own).unwrap_or(own);
            make_folders(group, trees, &parent, name)?.map(|()| parent)
        }
    };
    match made {
        Err(why) => explain(group, &wanted, &why),
        Ok(parent) => hold(group, &wanted, &parent),
    }
    Ok(())
}

fn make_folders(
    group: &mut Cgroup,
    trees: &Hierarchies,
    parent: &Path,
    name: &str,
) -> Result<Result<(), String>, CgroupError> {
    // Moving a process from here to below needs this permission too; better to know it now than with a keeper half made.
    if let Err(error) = access(parent.join("cgroup.procs"), Access::WRITE_OK) {
        let error = io::Error::from(error);
        return Ok(Err(format!("cannot move processes out of {}: {error}", parent.display())));
    }
    let layout = Layout::at(parent.join(name));
    if let Err(why) = make_folder(trees.folders, &layout.top, &PARTS)? {
        return Ok(Err(why));
    }
    let below = [layout.guest.clone(), layout.host_side.clone()];
    // From here on the folders are the group's to remove.
    group.v2 = Some(layout);
    for path in below {
        if let Err(why) = make_folder(trees.folders, &path, &[])? {
            // Without both there is no place for processes.
            let _ = group.remove_once();
            group.v2 = None;
            return Ok(Err(why));
        }
    }
    Ok(Ok(()))
}

/// The reason why no limit can be had.
fn explain(group: &mut Cgroup, wanted: &Wanted, why: &str) {
    let enforced = &mut group.enforced;
    for (wanted, place) in [
        (wanted.cpu.is_some(), &mut enforced.cpu),
        (wanted.weight, &mut enforced.weight),
        (wanted.memory.is_some(), &mut enforced.memory),
        (wanted.pids.is_some(), &mut enforced.processes),
        (true, &mut enforced.freezer),
    ] {
        if wanted {
            record(place, Err(why.to_owned()));
        }
    }
}

fn hold(group: &mut Cgroup, wanted: &Wanted, parent: &Path) {
    let Some(layout) = &group.v2 else { return };
    let enforced = &mut group.enforced;
    if let Some(quota) = wanted.cpu {
        let value = format!("{} {PERIOD_US}", quota_us(quota));
        let limit = || folder::write(&layout.top, "cpu.max", &value);
        record(&mut enforced.cpu, control(parent, "cpu", limit));
    }
    if wanted.weight {
        // Without the second step guest and host side would be one group, whose processes compete one by one.
        let apart = || control(&layout.top, "cpu", || Ok(()));
        record(&mut enforced.weight, control(parent, "cpu", || Ok(())).and_then(|()| apart()));
    }
    if let Some(bytes) = wanted.memory {
        let limit = || {
            folder::write(&layout.top, "memory.max", &bytes.to_string())?;
            folder::write_if_there(&layout.top, "memory.swap.max", "0")
        };
        record(&mut enforced.memory, control(parent, "memory", limit));
    }
    if let Some(count) = wanted.pids {
        let limit = || folder::write(&layout.top, "pids.max", &count.to_string());
        record(&mut enforced.processes, control(parent, "pids", limit));
    }
    if layout.guest.join("cgroup.freeze").exists() {
        group.freezer = Some(CgroupFreezer { folder: layout.guest.clone(), version: Version::V2 });
        record(&mut enforced.freezer, Ok(()));
    } else {
        let why = "this kernel cannot freeze control groups of version 2 (it takes Linux 5.2)";
        record(&mut enforced.freezer, Err(why.to_owned()));
    }
}

/// Notes how it went; a version 1 tree that is there and refuses has the better reason.
fn record(place: &mut String, result: Result<(), String>) {
    match result {
        Ok(()) => HELD.clone_into(place),
        Err(why) if place.starts_with("none: this machine has no") => *place = format!("none: {why}"),
        Err(_) => {}
    }
}

/// Has the kernel control groups below `parent` by `controller`, and sets a limit.
fn control(parent: &Path, controller: &str, limit: impl FnOnce() -> io::Result<()>) -> Result<(), String> {
    let lists = |file| {
        let names = folder::read(parent, file).unwrap_or_default();
        names.split_whitespace().any(|name| name == controller)
    };
    if !lists("cgroup.controllers") {
        return Err(format!("no {controller} controller was given to {}", parent.display()));
    }
    if !lists("cgroup.subtree_control") {
        folder::write(parent, "cgroup.subtree_control", &format!("+{controller}")).map_err(|error| {
            format!("cannot have the {controller} controller below {}: {error}", parent.display())
        })?;
    }
    limit().map_err(|error| format!("the {controller} control group refuses the limit: {error}"))
}
