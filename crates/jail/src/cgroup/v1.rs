//! Groups in version 1 trees: a folder for each controller that is needed.

use std::io;
use std::path::{Path, PathBuf};

use super::hierarchy::Hierarchies;
use super::{
    Cgroup, CgroupError, CgroupFreezer, CgroupLimits, PERIOD_US, Version, folder, make_folder, quota_us,
};

/// The controllers that we use.
pub const CONTROLLERS: [&str; 5] = ["cpu", "cpuacct", "memory", "pids", "freezer"];

const HELD: &str = "cgroup v1";
const UNWANTED: &str = "none: no limit was asked for";

/// Adds the limits that version 1 trees offer to `group`.
pub fn make_limits(
    group: &mut Cgroup,
    trees: &Hierarchies,
    name: &str,
    limits: &CgroupLimits,
) -> Result<(), CgroupError> {
    // Without it CPU time is measured by other means: no limit depends on it.
    let _ = join(group, trees, "cpuacct", name)?;
    group.enforced.cpu = match limits.cpu_quota {
        None => UNWANTED.to_owned(),
        Some(quota) => hold(group, trees, "cpu", name, |folder| limit_cpu(folder, quota))?,
    };
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
    Ok(())
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
    if group.v1.contains(&path) {
        return Ok(Ok(path));
    }
    Ok(make_folder(trees.folders, &path, &[])?.map(|()| {
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
