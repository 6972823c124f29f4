//! On this machine's own trees where they can be had, and on trees that are made up of plain files.

mod fake;
mod real;

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;

use super::priority::nice_for;
use super::session::{is_in_root_group, weight_by};
use super::{Cgroup, CgroupError, CgroupLimits, CgroupUsage, Enforcement, Entrance, Priority, put, quota_us};
use crate::cgroup::hierarchy::{Folders, Hierarchies};

/// Processes that exist, in the groups that a new one would enter.
impl Cgroup {
    fn add(&self, pid: u32) -> Result<(), CgroupError> {
        folders(&self.guest_entrance()?).iter().try_for_each(|folder| put(folder, pid))
    }

    fn add_host_side(&self, pid: u32) -> Result<(), CgroupError> {
        folders(&self.host_side_entrance()?).iter().try_for_each(|folder| put(folder, pid))
    }
}

/// The groups that an entrance leads to.
fn folders(entrance: &Entrance) -> Vec<PathBuf> {
    let path = |fd: BorrowedFd<'_>| fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
    let v1 = entrance.v1().map(|tasks| path(tasks).parent().unwrap().to_owned());
    v1.chain(entrance.v2().map(path)).collect()
}

#[test]
fn names_that_are_paths_are_refused() {
    for id in ["", "a/b", "../x", "a b", "ä", &"x".repeat(65)] {
        assert!(matches!(Cgroup::create(id, &CgroupLimits::default()), Err(CgroupError::Id(_))), "{id:?}");
        assert!(matches!(Cgroup::remove_stale(id), Err(CgroupError::Id(_))), "{id:?}");
    }
}

#[test]
fn quotas_that_are_no_share_are_refused() {
    for quota in [0.0, -1.0, 0.001, 5000.0, f64::NAN, f64::INFINITY] {
        let limits = CgroupLimits { cpu_quota: Some(quota), ..CgroupLimits::default() };
        assert!(matches!(Cgroup::create("quota", &limits), Err(CgroupError::Quota(_))), "{quota}");
    }
    assert_eq!(
        (quota_us(0.2), quota_us(1.0), quota_us(2.5), quota_us(0.01)),
        (20_000, 100_000, 250_000, 1_000)
    );
}

#[test]
fn a_smaller_quota_is_a_politer_process() {
    let table = [(4.0, 0), (1.0, 0), (0.55, 9), (0.5, 11), (0.2, 17), (0.1, 19), (0.01, 19)];
    for (quota, nice) in table {
        assert!((nice_for(quota) - nice).abs() <= 1, "{quota}: {}", nice_for(quota));
    }
    assert_eq!((nice_for(1.0), nice_for(0.1)), (0, 19));
}

#[test]
fn the_own_group_is_found_below_what_is_mounted() {
    let own = "12:cpu,cpuacct:/jobs/7\n5:freezer:/\n1:name=systemd:/x\n0::/user/a b\n";
    let mounts = "\
        30 1 0:9 / /proc rw - proc proc rw\n\
        31 1 0:1 /jobs /cg/cpu rw shared:4 - cgroup cgroup rw,cpu,cpuacct\n\
        32 1 0:2 /elsewhere /cg/freezer rw - cgroup cgroup rw,freezer\n\
        33 1 0:3 / /cg/un\\040ified rw - cgroup2 cgroup2 rw,nsdelegate\n";
    let trees = Hierarchies::parse(own, mounts, Folders::KERNEL);
    assert_eq!(trees.v1("cpu"), Some(Ok("/cg/cpu/7".into())));
    assert_eq!(trees.v1("cpuacct"), Some(Ok("/cg/cpu/7".into())));
    assert!(matches!(trees.v1("freezer"), Some(Err(why)) if why.contains("outside")));
    assert_eq!(trees.v1("memory"), None);
    assert_eq!(trees.v2(), Some(Ok("/cg/un ified/user/a b".into())));
}

#[test]
fn a_group_above_the_namespace_is_not_reached_by_dots() {
    let mounts = "33 1 0:3 / /cg rw - cgroup2 cgroup2 rw\n";
    let trees = Hierarchies::parse("0::/../secret\n", mounts, Folders::KERNEL);
    assert!(matches!(trees.v2(), Some(Err(_))));
}

#[test]
fn lines_that_make_no_sense_are_passed_over() {
    let trees =
        Hierarchies::parse("nonsense\n::\n7\n", "x\n - \n1 2 3 - cgroup2\n1 - cgroup a b\n", Folders::KERNEL);
    assert_eq!((trees.v1("cpu"), trees.v2()), (None, None));
}
