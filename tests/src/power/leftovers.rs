//! What a machine must not leave when it is switched off, and what it leaves because it was only a part of this one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

const GROUPS: &str = "/sys/fs/cgroup";
const PREFIX: &str = "bathysphere-";
/// Below a tree's root, a session has some levels of its own, and a sandbox two.
const DEPTH: usize = 6;

/// The names of the sandboxes' folders.
pub fn folders(sandboxes: &Path) -> BTreeSet<String> {
    let names = |entry: fs::DirEntry| entry.file_name().into_string().ok();
    fs::read_dir(sandboxes).into_iter().flatten().flatten().filter_map(names).collect()
}

/// The control groups of the sandboxes that had these folders, the innermost first.
fn groups_of(folders: &BTreeSet<String>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    if !folders.is_empty() {
        collect(Path::new(GROUPS), folders, false, DEPTH, &mut found);
    }
    found
}

fn collect(folder: &Path, ids: &BTreeSet<String>, is_inside: bool, depth: usize, found: &mut Vec<PathBuf>) {
    let Some(deeper) = depth.checked_sub(1) else { return };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let name = entry.file_name().into_string().unwrap_or_default();
        let id = name.strip_prefix(PREFIX).unwrap_or_default();
        // An incomplete folder may have a prefix before its id.
        let is_ours = is_inside || !id.is_empty() && ids.iter().any(|folder| folder.ends_with(id));
        collect(&entry.path(), ids, is_ours, deeper, found);
        if is_ours {
            found.push(entry.path());
        }
    }
}

/// Removes the control groups of killed sandboxes that had these folders. A real machine would have none after a reboot.
pub fn remove_groups(folders: &BTreeSet<String>) -> Result<(), String> {
    let deadline = Instant::now() + Duration::from_secs(5);
    for group in groups_of(folders) {
        while group.exists() {
            match fs::remove_dir(&group) {
                Err(error) if group.exists() && Instant::now() > deadline => {
                    return Err(format!("{} is left: {error}", group.display()));
                }
                Err(_) => sleep(Duration::from_millis(2)),
                Ok(()) => {}
            }
        }
    }
    Ok(())
}

/// Asserts that no loop device and no mount of this machine refers to this folder.
pub fn check_released(folder: &Path) -> Result<(), String> {
    for device in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
        if Path::new(file.trim_end()).starts_with(folder) {
            return Err(format!("{} still serves {file}", device.path().display()));
        }
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
    let name = folder.to_string_lossy();
    match mounts.lines().find(|line| line.contains(&*name)) {
        Some(line) => Err(format!("still mounted: {line}")),
        None => Ok(()),
    }
}
