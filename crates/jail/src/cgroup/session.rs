//! What is left of a weight where there are no control groups: the scheduler's own groups, one for each session.
//!
//! A lower priority for every guest is no substitute. Beside 200 spinning processes, on a host without such groups, a neighbour's
//! slowest answers took about twice as long with it as without: guests compete with each other, and all of them had it.

use std::fs;
use std::os::unix::fs::MetadataExt;

use super::hierarchy::Hierarchies;
use super::{Cgroup, folder, v2};

/// Contains 1 where the scheduler has a group for each session.
const AUTOGROUP: &str = "/proc/sys/kernel/sched_autogroup_enabled";
/// The number of the first cgroup namespace. In any other, a group that is shown as the root may not be it.
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFB;

/// By which mechanism a guest's processes, however many, compete for a processor as one: the group's, `session: why not a group`,
/// or `none: why`. A guest is one session, and cannot begin another.
pub fn describe_weight(group: &Cgroup) -> String {
    let is_on = fs::read_to_string(AUTOGROUP).is_ok_and(|text| text.trim() == "1");
    let is_first = fs::metadata("/proc/self/ns/cgroup").is_ok_and(|found| found.ino() == FIRST_NAMESPACE);
    let by_session = is_on && is_first && is_in_root_group(&Hierarchies::of_this_process());
    weight_by(&group.enforced().weight, by_session)
}

pub(super) fn weight_by(group: &str, by_session: bool) -> String {
    match group.strip_prefix("none: ") {
        Some(why) if by_session => format!("session: {why}"),
        _ => group.to_owned(),
    }
}

/// Whether we are in the root of the cpu controller's groups: sessions are no groups anywhere else.
pub(super) fn is_in_root_group(trees: &Hierarchies) -> bool {
    if let Some(own) = trees.v1("cpu") {
        return own.is_ok_and(|own| trees.is_root(&own));
    }
    let has_cpu = |group: &std::path::Path| {
        let controllers = folder::read(group, "cgroup.controllers").unwrap_or_default();
        controllers.split_whitespace().any(|name| name == "cpu")
    };
    match trees.v2() {
        None => true,
        Some(Err(_)) => false,
        Some(Ok(own)) => !v2::above(&own).any(|group| !trees.is_root(group) && has_cpu(group)),
    }
}
