//! Groups in version 1 trees: a folder for each controller that is needed.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::hierarchy::Hierarchies;
use super::{
    Cgroup, CgroupError, CgroupFreezer, CgroupLimits, GUEST, HOST_SIDE, PARTS, PERIOD_US, Version, folder,
    make_folder, quota_us,
};

/// The controllers that we use.
pub const CONTROLLERS: [&str; 5] = ["cpu", "cpuacct", "memory", "pids", "freezer"];

const HELD: &str = "cgroup v1";
const UNWANTED: &str = "none: no limit was asked for";

/// Where a sandbox's processes are in the tree of the cpu controller. The guest's are apart from the host side: in one group
/// with its guest, a keeper waits for the processor that its guest spins on, and everything that the guest waits for with it.
#[derive(Debug)]
pub struct CpuParts {
    /// The group above both parts, if there is one: it has the quota, and what is counted for both.
    pub top: Option<PathBuf>,
    /// Of the guest's processes.
    pub guest: PathBuf,
    /// Of the keeper and the gateway. Without a group above it is not the sandbox's own.
    pub host_side: PathBuf,
}

impl CpuParts {
    /// The folders that are the sandbox's own, in an order in which they can be removed.
    pub fn own_folders(&self) -> impl Iterator<Item = &Path> {
        let host_side = self.top.is_some().then_some(&self.host_side);
        [Some(&self.guest), host_side, self.top.as_ref()].into_iter().flatten().map(PathBuf::as_path)
    }
}

/// Adds the limits that version 1 trees offer to `group`.
pub fn make_limits(
    group: &mut Cgroup,
    trees: &Hierarchies,
    name: &str,
    limits: &CgroupLimits,
) -> Result<(), CgroupError> {
    // Without it CPU time is measured by other means: no limit depends on it.
    let _ = join(group, trees, "cpuacct", name)?;
    group.enforced.memory = match limits.memory {
        None => UNWANTED.to_owned(),
        Some(bytes) => hold(group, trees, "memory", name, |folder| limit_memory(folder, bytes))?,
    };
    group.enforced.processes = match limits.pids {
        None => UNWANTED.to_owned(),
        Some(count) => {
            let limit = |folder: &Path| folder::write(folder, "pids.max", &count.to_string());
            hold(group, trees, "pids", name, limit)?
        }
    };
    make_cpu(group, trees, name, limits)
}

/// The quota, and a weight of the guest's own.
fn make_cpu(
    group: &mut Cgroup,
    trees: &Hierarchies,
    name: &str,
    limits: &CgroupLimits,
) -> Result<(), CgroupError> {
    (group.enforced.cpu, group.enforced.weight) = (UNWANTED.to_owned(), UNWANTED.to_owned());
    if !limits.cpu_weight && limits.cpu_quota.is_none() {
        return Ok(());
    }
    let is_with = |other: &str| trees.v1("cpu").is_some_and(|cpu| trees.v1(other) == Some(cpu));
    // Not every kernel counts the memory of groups below for the one above: then all processes stay in one group.
    group.enforced.weight = if let Some(other) = ["memory", "pids"].into_iter().find(|other| is_with(other)) {
        format!("none: cpu and {other} control groups are mounted as one on this machine")
    } else if limits.cpu_quota.is_some() || is_with("cpuacct") {
        make_nested(group, trees, name)?
    } else {
        make_guest_group(group, trees, name)?
    };
    if let Some(quota) = limits.cpu_quota {
        group.enforced.cpu = hold(group, trees, "cpu", name, |folder| limit_cpu(folder, quota))?;
    }
    Ok(())
}

/// A group of the guest's processes alone. Its weight is the one that new groups have.
fn make_guest_group(group: &mut Cgroup, trees: &Hierarchies, name: &str) -> Result<String, CgroupError> {
    let parent = match cpu_tree(trees) {
        Err(why) => return Ok(format!("none: {why}")),
        Ok(parent) => parent,
    };
    // The keeper goes back there once its guest has begun.
    if let Err(error) = access(parent.join("cgroup.procs"), Access::WRITE_OK) {
        let error = io::Error::from(error);
        return Ok(format!("none: cannot move processes out of {}: {error}", parent.display()));
    }
    let guest = parent.join(name);
    Ok(match make_folder(trees.folders, &guest, &PARTS)? {
        Err(why) => format!("none: {why}"),
        Ok(()) => {
            group.cpu = Some(CpuParts { top: None, guest, host_side: parent });
            HELD.to_owned()
        }
    })
}

/// A group with two below it, each with the weight that new groups have.
fn make_nested(group: &mut Cgroup, trees: &Hierarchies, name: &str) -> Result<String, CgroupError> {
    let top = match join(group, trees, "cpu", name)? {
        Err(why) => return Ok(format!("none: {why}")),
        Ok(top) => top,
    };
    let (guest, host_side) = (top.join(GUEST), top.join(HOST_SIDE));
    for path in [&guest, &host_side] {
        if let Err(why) = make_folder(trees.folders, path, &[])? {
            // A quota holds for all of them in one group too.
            let _ = (trees.folders.unmake)(&guest);
            return Ok(format!("none: {why}"));
        }
    }
    group.v1.retain(|path| *path != top);
    group.cpu = Some(CpuParts { top: Some(top), guest, host_side });
    Ok(HELD.to_owned())
}

fn cpu_tree(trees: &Hierarchies) -> Result<PathBuf, String> {
    trees.v1("cpu").unwrap_or_else(|| Err("this machine has no cpu control groups".to_owned()))
}

fn hold(
    group: &mut Cgroup,
    trees: &Hierarchies,
    controller: &str,
    name: &str,
    limit: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<String, CgroupError> {
    Ok(match join(group, trees, controller, name)? {
        Err(why) => format!("none: {why}"),
        Ok(folder) => match limit(&folder) {
            Err(error) => format!("none: the {controller} control group refuses the limit: {error}"),
            Ok(()) => HELD.to_owned(),
        },
    })
}

/// The group's folder in a controller's tree, made unless a controller of the same tree brought it about.
fn join(
    group: &mut Cgroup,
    trees: &Hierarchies,
    controller: &str,
    name: &str,
) -> Result<Result<PathBuf, String>, CgroupError> {
    let parent = match trees.v1(controller) {
        None => return Ok(Err(format!("this machine has no {controller} control groups"))),
        Some(Err(why)) => return Ok(Err(why)),
        Some(Ok(parent)) => parent,
    };
    let path = parent.join(name);
    let is_top = group.cpu.as_ref().is_some_and(|parts| parts.top.as_ref() == Some(&path));
    if is_top || group.v1.contains(&path) {
        return Ok(Ok(path));
    }
    Ok(make_folder(trees.folders, &path, &PARTS)?.map(|()| {
        group.v1.push(path.clone());
        path
    }))
}

/// Adds the freezer of the version 1 tree, which is second choice: what it has frozen cannot be ended, so that processes
/// would outlive a monitor that is killed.
pub fn make_freezer(group: &mut Cgroup, trees: &Hierarchies, name: &str) -> Result<(), CgroupError> {
    let parent = match trees.v1("freezer") {
        None => return Ok(()),
        Some(Err(why)) => {
            group.enforced.freezer = format!("none: {why}");
            return Ok(());
        }
        Some(Ok(parent)) => parent,
    };
    // Its folder must not be shared with a limit that the keeper is to stay under.
    let shares = |controller: &&str| trees.v1(controller).is_some_and(|other| other.as_ref() == Ok(&parent));
    if let Some(other) = CONTROLLERS.iter().find(|other| **other != "freezer" && shares(other)) {
        group.enforced.freezer =
            format!("none: freezer and {other} control groups are mounted as one on this machine");
        return Ok(());
    }
    let folder = parent.join(name);
    group.enforced.freezer = match make_folder(trees.folders, &folder, &[])? {
        Err(why) => format!("none: {why}"),
        Ok(()) => {
            group.freezer = Some(CgroupFreezer { folder, version: Version::V1 { outside: parent } });
            HELD.to_owned()
        }
    };
    Ok(())
}

fn limit_cpu(folder: &Path, quota: f64) -> io::Result<()> {
    folder::write(folder, "cpu.cfs_period_us", &PERIOD_US.to_string())?;
    folder::write(folder, "cpu.cfs_quota_us", &quota_us(quota).to_string())
}

fn limit_memory(folder: &Path, bytes: u64) -> io::Result<()> {
    let bytes = bytes.to_string();
    folder::write(folder, "memory.limit_in_bytes", &bytes)?;
    // Memory and swap together: as much as memory alone, so no swap. Kernels that do not count swap lack the file.
    folder::write_if_there(folder, "memory.memsw.limit_in_bytes", &bytes)?;
    folder::write_if_there(folder, "memory.swappiness", "0")
}
