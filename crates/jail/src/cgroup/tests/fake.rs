//! Trees of plain files, for what this machine does not have.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use super::{
    Cgroup, CgroupError, CgroupLimits, Enforcement, Folders, Hierarchies, Priority, is_in_root_group,
    weight_by,
};

const LIMITS: CgroupLimits =
    CgroupLimits { cpu_quota: Some(0.5), cpu_weight: true, memory: Some(64 << 20), pids: Some(40) };

/// What the kernel puts into a new group, version 2 and version 1 alike: code that reads the wrong file finds a wrong
/// value.
const FILES: [(&str, &str); 24] = [
    ("cgroup.procs", ""),
    ("tasks", ""),
    ("cgroup.controllers", "cpu memory pids\n"),
    ("cgroup.subtree_control", ""),
    ("cpu.weight", "100\n"),
    ("cpu.shares", "1024\n"),
    ("cgroup.freeze", "0\n"),
    ("cgroup.events", "populated 0\nfrozen 0\n"),
    ("cgroup.kill", ""),
    ("cpu.max", "max 100000\n"),
    ("cpu.stat", "usage_usec 1500\nuser_usec 1000\n"),
    ("memory.max", "max\n"),
    ("memory.swap.max", "max\n"),
    ("memory.current", "4096\n"),
    ("pids.max", "max\n"),
    ("pids.current", "2\n"),
    ("cpu.cfs_period_us", "1\n"),
    ("cpu.cfs_quota_us", "-1\n"),
    ("cpuacct.usage", "777\n"),
    ("memory.limit_in_bytes", "0\n"),
    ("memory.memsw.limit_in_bytes", "0\n"),
    ("memory.swappiness", "60\n"),
    ("memory.usage_in_bytes", "8192\n"),
    ("freezer.state", "THAWED\n"),
];

fn make(path: &Path) -> io::Result<()> {
    fs::create_dir(path)?;
    FILES.iter().try_for_each(|(name, text)| fs::write(path.join(name), text))
}

/// Like the kernel: not while there are processes or groups below.
fn unmake(path: &Path) -> io::Result<()> {
    let busy = fs::read(path.join("cgroup.procs"))?.iter().any(u8::is_ascii_digit)
        || fs::read_dir(path)?.flatten().any(|entry| entry.path().is_dir());
    if busy { Err(io::ErrorKind::ResourceBusy.into()) } else { fs::remove_dir_all(path) }
}

struct Fake {
    root: PathBuf,
    mounts: String,
}

impl Fake {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("bathysphere-fake-{}-{number}", std::process::id()));
        fs::create_dir(&root).unwrap();
        Self { root, mounts: String::new() }
    }

    fn v2(mut self, controllers: &str) -> Self {
        self.v2_group("v2/own", controllers);
        self.mounts += &format!("1 1 0:1 / {} rw - cgroup2 none rw\n", self.root.join("v2").display());
        self
    }

    fn v2_group(&self, path: &str, controllers: &str) {
        let folder = self.root.join(path);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("cgroup.procs"), "").unwrap();
        fs::write(folder.join("cgroup.controllers"), controllers).unwrap();
        fs::write(folder.join("cgroup.subtree_control"), "").unwrap();
    }

    fn v1(mut self, controllers: &str) -> Self {
        let own = self.root.join(controllers).join("own");
        fs::create_dir_all(&own).unwrap();
        fs::write(own.join("cgroup.procs"), "").unwrap();
        let mount = self.root.join(controllers);
        self.mounts += &format!("1 1 0:1 / {} rw - cgroup none rw,{controllers}\n", mount.display());
        self
    }

    fn trees(&self) -> Hierarchies {
        let own = "9:cpu,cpuacct,memory,pids,freezer:/own\n0::/own\n";
        Hierarchies::parse(own, &self.mounts, Folders { make, unmake })
    }

    fn create(&self) -> Cgroup {
        Cgroup::create_in(&self.trees(), "x", &LIMITS).unwrap()
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap().trim().to_owned()
    }

    fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// The part of the kernel that reports a version 2 group as frozen, some time after it was told to freeze it.
fn freezing_kernel(guest: &Path, work: impl FnOnce()) {
    /// However the work ends, the kernel's part is over.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(5));
                let frozen = fs::read_to_string(guest.join("cgroup.freeze")).unwrap_or_default();
                if let Ok(frozen) = frozen.trim().parse::<u8>() {
                    // Renamed, so that no reader sees half of it.
                    fs::write(guest.join("new"), format!("populated 1\nfrozen {frozen}\n")).unwrap();
                    fs::rename(guest.join("new"), guest.join("cgroup.events")).unwrap();
                }
            }
        });
        let _over = Over(&over);
        work();
    });
}

#[test]
fn v2_limits_are_set_on_the_group_above_guest_and_keeper() {
    let fake = Fake::new().v2("cpuset cpu memory pids\n");
    let mut group = fake.create();
    let enforced = group.enforced();
    let Enforcement { cpu, weight, memory, processes, freezer } = enforced;
    for mechanism in [cpu, weight, memory, processes, freezer] {
        assert_eq!(mechanism, "cgroup v2");
    }
    let top = "v2/own/bathysphere-x";
    assert_eq!(fake.read(&format!("{top}/cpu.max")), "50000 100000");
    assert_eq!(fake.read(&format!("{top}/memory.max")), (64 << 20).to_string());
    assert_eq!(fake.read(&format!("{top}/memory.swap.max")), "0");
    assert_eq!(fake.read(&format!("{top}/pids.max")), "40");
    assert_eq!(fake.read(&format!("{top}/guest/pids.max")), "max");
    assert_eq!(fake.read("v2/own/cgroup.subtree_control"), "+pids");
    assert_eq!(fake.read(&format!("{top}/cgroup.subtree_control")), "+cpu", "the parts have weights");

    group.add(4321).unwrap();
    assert_eq!(fake.read(&format!("{top}/guest/cgroup.procs")), "4321");
    assert_eq!(fake.read(&format!("{top}/cgroup.procs")), "");
    group.leave_guest(4321).unwrap();
    assert_eq!(fake.read(&format!("{top}/keeper/cgroup.procs")), "4321");
    group.add_host_side(99).unwrap();
    assert_eq!(fake.read(&format!("{top}/keeper/cgroup.procs")), "99");

    let usage = group.usage();
    assert_eq!((usage.cpu_ns, usage.memory, usage.pids), (Some(1_500_000), Some(4096), Some(2)));
    for part in ["guest", "keeper"] {
        fs::write(fake.root.join(top).join(part).join("cgroup.procs"), "").unwrap();
    }
    group.remove().unwrap();
    assert!(!fake.exists(top));
}

#[test]
fn v2_freezing_waits_for_the_kernel_and_leaves_the_keeper_alone() {
    let fake = Fake::new().v2("cpu memory pids");
    let group = fake.create();
    let guest = fake.root.join("v2/own/bathysphere-x/guest");
    freezing_kernel(&guest, || {
        group.freeze().unwrap();
        assert!(fs::read_to_string(guest.join("cgroup.events")).unwrap().contains("frozen 1"));
        assert_eq!(fake.read("v2/own/bathysphere-x/keeper/cgroup.freeze"), "0");
        group.thaw().unwrap();
        assert!(fs::read_to_string(guest.join("cgroup.events")).unwrap().contains("frozen 0"));
    });
}

#[test]
fn v2_what_does_not_freeze_in_time_is_thawed_again() {
    let fake = Fake::new().v2("cpu memory pids");
    let group = fake.create();
    // Without the thread that acts as the kernel, nothing is ever frozen.
    assert!(matches!(group.freeze(), Err(CgroupError::Slow(_, "stand still"))));
    assert_eq!(fake.read("v2/own/bathysphere-x/guest/cgroup.freeze"), "0");
}

#[test]
fn v2_controllers_that_are_refused_are_named_and_the_rest_holds() {
    let fake = Fake::new().v2("cpu pids");
    // As for a group that has processes of its own: nothing can be enabled below it.
    fs::remove_file(fake.root.join("v2/own/cgroup.subtree_control")).unwrap();
    let group = fake.create();
    let enforced = group.enforced();
    assert!(enforced.cpu.starts_with("none: cannot have the cpu controller"), "{enforced:?}");
    assert!(enforced.memory.starts_with("none: no memory controller was given to "), "{enforced:?}");
    assert!(enforced.processes.starts_with("none: cannot have the pids controller"), "{enforced:?}");
    assert_eq!(enforced.freezer, "cgroup v2");
}

/// As for a program in a group of its own, with processes, below one that was given to its user.
fn below_a_users_group() -> (Fake, Hierarchies) {
    let mut fake = Fake::new();
    fake.v2_group("v2", "cpu memory pids");
    fs::remove_file(fake.root.join("v2/cgroup.subtree_control")).unwrap();
    fake.v2_group("v2/user", "cpu memory pids");
    fake.v2_group("v2/user/scope", "cpu memory pids");
    fs::remove_file(fake.root.join("v2/user/scope/cgroup.subtree_control")).unwrap();
    fake.mounts = format!("1 1 0:1 / {} rw - cgroup2 none rw\n", fake.root.join("v2").display());
    let trees = Hierarchies::parse("0::/user/scope\n", &fake.mounts, Folders { make, unmake });
    (fake, trees)
}

#[test]
fn v2_a_group_above_that_belongs_to_the_user_is_as_good() {
    let (fake, trees) = below_a_users_group();
    let group = Cgroup::create_in(&trees, "x", &LIMITS).unwrap();
    assert_eq!(group.enforced().memory, "cgroup v2");
    assert_eq!(fake.read("v2/user/bathysphere-x/memory.max"), (64 << 20).to_string());
    std::mem::forget(group);
    Cgroup::remove_abandoned_in(&trees, "x", Duration::ZERO);
    assert!(!fake.exists("v2/user/bathysphere-x"), "found there as well");
}

#[test]
fn v2_a_limit_of_the_callers_own_is_not_left() {
    for (file, limit, is_limit) in [
        ("memory.max", "1000000\n", true),
        ("memory.max", "max\n", false),
        ("cpu.max", "50000 100000\n", true),
        ("cpu.max", "max 100000\n", false),
        ("cpuset.cpus", "0-1\n", true),
        ("cpuset.cpus", "\n", false),
        ("io.max", "8:0 rbps=1000 wbps=max riops=max wiops=max\n", true),
        ("pids.max", "1000\n", false),
    ] {
        let (fake, trees) = below_a_users_group();
        fs::write(fake.root.join("v2/user/scope").join(file), limit).unwrap();
        let group = Cgroup::create_in(&trees, "x", &LIMITS).unwrap();
        let stays = group.enforced().memory.starts_with("none: cannot have the memory");
        assert_eq!(stays, is_limit, "{file} {limit}: {:?}", group.enforced());
        assert_eq!(fake.exists("v2/user/bathysphere-x"), !is_limit, "{file} {limit}");
    }
}

#[test]
fn v2_a_group_in_use_keeps_the_part_that_its_next_gateway_needs() {
    let (fake, trees) = below_a_users_group();
    std::mem::forget(Cgroup::create_in(&trees, "x", &LIMITS).unwrap());
    let guest = fake.root.join("v2/user/bathysphere-x/guest/cgroup.procs");
    fs::write(&guest, "4321\n").unwrap();
    Cgroup::remove_abandoned_in(&trees, "x", Duration::ZERO);
    assert!(fake.exists("v2/user/bathysphere-x/guest") && fake.exists("v2/user/bathysphere-x/keeper"));
    fs::write(&guest, "").unwrap();
    Cgroup::remove_abandoned_in(&trees, "x", Duration::ZERO);
    assert!(!fake.exists("v2/user/bathysphere-x"));
}

#[test]
fn v2_controllers_that_are_on_already_are_not_asked_for() {
    let fake = Fake::new().v2("cpu memory pids");
    fs::write(fake.root.join("v2/own/cgroup.subtree_control"), "cpu memory pids\n").unwrap();
    assert_eq!(fake.create().enforced().memory, "cgroup v2");
    assert_eq!(fake.read("v2/own/cgroup.subtree_control"), "cpu memory pids");
}

#[test]
fn v1_limits_are_set_in_each_tree() {
    let fake = Fake::new().v1("cpu,cpuacct").v1("memory").v1("pids").v1("freezer");
    let group = fake.create();
    let enforced = group.enforced();
    let Enforcement { cpu, weight, memory, processes, freezer } = enforced;
    for mechanism in [cpu, weight, memory, processes, freezer] {
        assert_eq!(mechanism, "cgroup v1");
    }
    let name = "own/bathysphere-x";
    assert_eq!(fake.read(&format!("cpu,cpuacct/{name}/cpu.cfs_quota_us")), "50000");
    assert_eq!(fake.read(&format!("cpu,cpuacct/{name}/cpu.cfs_period_us")), "100000");
    for file in ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"] {
        assert_eq!(fake.read(&format!("memory/{name}/{file}")), (64 << 20).to_string());
    }
    assert_eq!(fake.read(&format!("memory/{name}/memory.swappiness")), "0");
    assert_eq!(fake.read(&format!("pids/{name}/pids.max")), "40");
    let usage = group.usage();
    assert_eq!((usage.cpu_ns, usage.memory, usage.pids), (Some(777), Some(8192), Some(2)));

    group.add(4321).unwrap();
    for folder in ["memory/NAME", "pids/NAME", "freezer/NAME", "cpu,cpuacct/NAME/guest"] {
        assert_eq!(fake.read(&format!("{}/cgroup.procs", folder.replace("NAME", name))), "4321");
    }
    group.leave_guest(4321).unwrap();
    assert_eq!(fake.read("freezer/own/cgroup.procs"), "4321");
    assert_eq!(fake.read(&format!("cpu,cpuacct/{name}/keeper/cgroup.procs")), "4321");
    assert_eq!(fake.read("cpu,cpuacct/own/cgroup.procs"), "");
    group.add_host_side(99).unwrap();
    assert_eq!(fake.read(&format!("cpu,cpuacct/{name}/keeper/cgroup.procs")), "99");
    assert_eq!(fake.read(&format!("freezer/{name}/cgroup.procs")), "4321", "not the gateway");
}

/// The kernel takes a process out of where it was; files do not.
fn empty(folder: &Path) {
    for entry in fs::read_dir(folder).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
        empty(&entry.path());
    }
    fs::write(folder.join("cgroup.procs"), "").unwrap();
}

const WEIGHT: CgroupLimits = CgroupLimits { cpu_quota: None, cpu_weight: true, memory: None, pids: None };

#[test]
fn u8_v1_a_weight_is_the_guests_alone_and_the_host_side_stays_outside() {
    let fake = Fake::new().v1("cpu").v1("cpuacct").v1("memory");
    let mut group = Cgroup::create_in(&fake.trees(), "x", &WEIGHT).unwrap();
    assert_eq!(group.enforced().weight, "cgroup v1");
    assert_eq!(group.enforced().cpu, "none: no limit was asked for");
    group.add(4321).unwrap();
    assert_eq!(fake.read("cpu/own/bathysphere-x/cgroup.procs"), "4321");
    group.leave_guest(4321).unwrap();
    assert_eq!(fake.read("cpu/own/cgroup.procs"), "4321");
    group.add_host_side(99).unwrap();
    assert_eq!(fake.read("cpu/own/cgroup.procs"), "4321", "a gateway is never moved there");
    assert_eq!(fake.read("cpuacct/own/bathysphere-x/cgroup.procs"), "99", "but its time is counted");
    assert!(!fake.exists("cpu/own/bathysphere-x/guest"));
    empty(&fake.root.join("cpu/own"));
    empty(&fake.root.join("cpuacct/own"));
    group.remove().unwrap();
    assert!(!fake.exists("cpu/own/bathysphere-x") && fake.exists("cpu/own"));
}

#[test]
fn u8_v1_a_weight_does_not_cost_the_count_of_processor_time() {
    let fake = Fake::new().v1("cpu,cpuacct");
    let group = Cgroup::create_in(&fake.trees(), "x", &WEIGHT).unwrap();
    assert_eq!(group.enforced().weight, "cgroup v1");
    group.add(4321).unwrap();
    group.leave_guest(4321).unwrap();
    let top = "cpu,cpuacct/own/bathysphere-x";
    assert_eq!(fake.read(&format!("{top}/keeper/cgroup.procs")), "4321", "it is below what is counted");
    assert_eq!(fake.read(&format!("{top}/cpu.cfs_quota_us")), "-1");
    assert_eq!(group.usage().cpu_ns, Some(777));
}

#[test]
fn u8_v1_a_tree_that_counts_memory_too_is_not_parted() {
    let fake = Fake::new().v1("cpu,memory");
    let group = fake.create();
    assert_eq!((group.enforced().cpu.as_str(), group.enforced().memory.as_str()), ("cgroup v1", "cgroup v1"));
    assert!(group.enforced().weight.contains("cpu and memory control groups are mounted as one"));
    group.add(4321).unwrap();
    assert_eq!(fake.read("cpu,memory/own/bathysphere-x/cgroup.procs"), "4321");
    assert!(!fake.exists("cpu,memory/own/bathysphere-x/guest"));
}

#[test]
fn u8_v2_a_weight_that_cannot_be_had_costs_no_limit() {
    let fake = Fake::new().v2("memory pids");
    let limits = CgroupLimits { cpu_quota: None, ..LIMITS };
    let group = Cgroup::create_in(&fake.trees(), "x", &limits).unwrap();
    let enforced = group.enforced();
    assert_eq!((enforced.memory.as_str(), enforced.processes.as_str()), ("cgroup v2", "cgroup v2"));
    assert_eq!(enforced.cpu, "none: no limit was asked for");
    assert!(enforced.weight.starts_with("none: no cpu controller was given to "), "{enforced:?}");
}

#[test]
fn u8_v2_a_group_above_that_has_no_cpu_controller_is_taken_for_its_limits() {
    let (fake, trees) = below_a_users_group();
    fs::write(fake.root.join("v2/user/cgroup.controllers"), "memory pids").unwrap();
    let limits = CgroupLimits { cpu_quota: None, ..LIMITS };
    let group = Cgroup::create_in(&trees, "x", &limits).unwrap();
    assert_eq!(group.enforced().memory, "cgroup v2");
    assert!(fake.exists("v2/user/bathysphere-x"));
}

#[test]
fn u8_what_a_killed_command_left_goes_with_its_parts() {
    let fake = Fake::new().v1("cpu,cpuacct");
    let quota = CgroupLimits { cpu_quota: Some(0.5), ..CgroupLimits::default() };
    let top = "cpu,cpuacct/own/bathysphere-x";
    for remove in [
        |trees: &Hierarchies| assert!(Cgroup::remove_stale_in(trees, "x").unwrap()),
        |trees: &Hierarchies| Cgroup::remove_abandoned_in(trees, "x", Duration::ZERO),
        |trees: &Hierarchies| drop(Cgroup::create_in(trees, "x", &WEIGHT).unwrap()),
    ] {
        std::mem::forget(Cgroup::create_in(&fake.trees(), "x", &quota).unwrap());
        assert!(fake.exists(&format!("{top}/guest")) && fake.exists(&format!("{top}/keeper")));
        remove(&fake.trees());
        assert!(!fake.exists(top));
    }
}

#[test]
fn u8_sessions_are_groups_only_in_the_root_of_the_cpu_controller() {
    let root = |own: &str, fake: &Fake| {
        is_in_root_group(&Hierarchies::parse(own, &fake.mounts, Folders { make, unmake }))
    };
    let v1 = Fake::new().v1("cpu,cpuacct");
    assert!(root("9:cpu,cpuacct:/\n", &v1) && !root("9:cpu,cpuacct:/own\n", &v1));
    let (v2, below) = below_a_users_group();
    assert!(!is_in_root_group(&below), "the user's group has the controller");
    assert!(root("0::/\n", &v2));
    for group in ["v2/user", "v2/user/scope"] {
        fs::write(v2.root.join(group).join("cgroup.controllers"), "memory").unwrap();
    }
    assert!(is_in_root_group(&below), "no group on the way has it");
    assert!(root("", &Fake::new()));
    assert_eq!(weight_by("cgroup v1", true), "cgroup v1");
    assert_eq!(weight_by("none: why", true), "session: why");
    assert_eq!(weight_by("none: why", false), "none: why");
}

#[test]
fn v1_trees_without_a_part_in_the_limits_are_left_alone() {
    let fake = Fake::new().v1("cpu").v1("cpuacct").v1("memory").v1("pids").v1("freezer");
    let group = Cgroup::create_in(&fake.trees(), "x", &CgroupLimits::default()).unwrap();
    let made: Vec<_> = ["cpu", "cpuacct", "memory", "pids", "freezer"]
        .into_iter()
        .filter(|tree| fake.exists(&format!("{tree}/own/bathysphere-x")))
        .collect();
    assert_eq!(made, ["cpuacct", "freezer"]);
    assert_eq!(group.enforced().memory, "none: no limit was asked for");
}

#[test]
fn v1_a_freezer_that_is_mounted_with_a_limit_is_not_used() {
    let fake = Fake::new().v1("cpu,freezer");
    let group = fake.create();
    assert!(group.freezer().is_none());
    assert!(matches!(group.freeze(), Err(CgroupError::NoFreezer(why)) if why.contains("mounted as one")));
    assert_eq!(group.enforced().cpu, "cgroup v1");
}

#[test]
fn without_any_tree_the_priority_stands_in_and_the_rest_says_so() {
    let mut group = Fake::new().create();
    let enforced = group.enforced();
    let priority = Priority::for_quota(&group, LIMITS.cpu_quota).describe(&group);
    assert!(priority.starts_with("scheduler priority (nice 11): this machine has no cpu"), "{priority}");
    assert!(enforced.memory.starts_with("none: this machine has no memory"), "{enforced:?}");
    assert!(enforced.processes.starts_with("none: this machine has no pids"), "{enforced:?}");
    assert!(matches!(group.freeze(), Err(CgroupError::NoFreezer(_))));
    assert!(matches!(group.kill(), Err(CgroupError::Unheld)));
    group.remove().unwrap();
}

#[test]
fn an_empty_group_of_the_same_name_is_replaced_and_a_used_one_is_not() {
    let fake = Fake::new().v2("cpu memory pids");
    std::mem::forget(fake.create());
    let group = fake.create();
    group.add(4321).unwrap();
    let second = Cgroup::create_in(&fake.trees(), "x", &LIMITS);
    assert!(matches!(second, Err(CgroupError::Taken(path)) if path.ends_with("own/bathysphere-x")));
}

#[test]
fn what_was_left_behind_is_found_below_other_groups_too() {
    let fake = Fake::new().v1("pids").v1("freezer").v2("cpu");
    make(&fake.root.join("pids/other")).unwrap();
    for left in ["pids/other/bathysphere-x", "freezer/own/bathysphere-x", "v2/own/bathysphere-x"] {
        make(&fake.root.join(left)).unwrap();
    }
    make(&fake.root.join("v2/own/bathysphere-x/guest")).unwrap();
    make(&fake.root.join("pids/own/bathysphere-xy")).unwrap();
    assert!(Cgroup::remove_stale_in(&fake.trees(), "x").unwrap());
    assert!(!fake.exists("pids/other/bathysphere-x") && !fake.exists("freezer/own/bathysphere-x"));
    assert!(!fake.exists("v2/own/bathysphere-x"));
    assert!(fake.exists("pids/own/bathysphere-xy"), "another sandbox's group");
    assert!(!Cgroup::remove_stale_in(&fake.trees(), "x").unwrap());
}

#[test]
fn empty_groups_of_killed_commands_are_removed_once_they_are_old() {
    let fake = Fake::new().v1("pids").v2("cpu");
    for left in ["pids/own/bathysphere-run-1", "pids/own/bathysphere-run-2", "pids/own/bathysphere-kept"] {
        make(&fake.root.join(left)).unwrap();
    }
    for left in ["", "/guest", "/keeper"] {
        make(&fake.root.join(format!("v2/own/bathysphere-run-1{left}"))).unwrap();
    }
    fs::write(fake.root.join("pids/own/bathysphere-run-2/cgroup.procs"), "4321\n").unwrap();
    Cgroup::remove_abandoned_in(&fake.trees(), "run-", Duration::from_secs(60));
    assert!(fake.exists("pids/own/bathysphere-run-1"), "it may just be made");
    Cgroup::remove_abandoned_in(&fake.trees(), "run-", Duration::ZERO);
    assert!(!fake.exists("pids/own/bathysphere-run-1") && !fake.exists("v2/own/bathysphere-run-1"));
    assert!(fake.exists("pids/own/bathysphere-run-2"), "it has a process");
    assert!(fake.exists("pids/own/bathysphere-kept"), "another kind of group");
}

#[test]
fn of_two_freezers_the_one_is_used_whose_frozen_processes_can_be_ended() {
    let fake = Fake::new().v1("freezer").v1("pids").v2("");
    let group = fake.create();
    assert_eq!(group.enforced().freezer, "cgroup v2");
    assert_eq!(group.enforced().processes, "cgroup v1");
    assert!(!fake.exists("freezer/own/bathysphere-x"));
}
