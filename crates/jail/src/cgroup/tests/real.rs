//! On this machine. Where it has no groups for us, the same tests look at what stands in for them: none is skipped.

use std::fs;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use super::{Cgroup, CgroupError, CgroupLimits, Folders, Hierarchies, Priority};

/// A shell that waits for a line before it does what it is told, so that it is in its group by then.
struct Shell(Child);

impl Shell {
    fn new(script: &str) -> Self {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(format!("read go; {script}"));
        Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    fn spinning(group: &Cgroup) -> Self {
        let mut shell = Self::new("while :; do :; done");
        group.add(shell.0.id()).unwrap();
        shell.go();
        shell
    }

    fn go(&mut self) {
        self.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    }

    /// Field of /proc/N/stat, counted as in its manual page.
    fn stat(&self, field: usize) -> i64 {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        text.rsplit_once(") ").unwrap().1.split(' ').nth(field - 3).unwrap().parse().unwrap()
    }

    /// CPU time in hundredths of a second.
    fn ticks(&self) -> i64 {
        self.stat(14) + self.stat(15)
    }

    /// However busy the machine is, it gets some time in a minute.
    fn wait_until_it_runs(&self) {
        let runs = (0..600).any(|_| self.ticks_within(Duration::from_millis(100)) > 0);
        assert!(runs, "it does not run");
    }

    fn ticks_within(&self, time: Duration) -> i64 {
        let before = self.ticks();
        thread::sleep(time);
        self.ticks() - before
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn id(test: &str) -> String {
    format!("test-{test}-{}", std::process::id())
}

fn held(mechanism: &str) -> bool {
    mechanism.starts_with("cgroup v")
}

fn folders_of(id: &str) -> usize {
    let name = format!("bathysphere-{id}");
    let found = Hierarchies::of_this_process().search(&name, &crate::cgroup::v1::CONTROLLERS);
    found.v1.len() + found.v2.len()
}

#[test]
fn r1_a_spinning_process_gets_no_more_than_its_quota() {
    let limits = CgroupLimits { cpu_quota: Some(0.2), ..CgroupLimits::default() };
    let mut group = Cgroup::create(&id("quota"), &limits).unwrap();
    let shell = Shell::spinning(&group);
    let priority = Priority::for_quota(&group, limits.cpu_quota);
    let inherited = shell.stat(19);
    priority.apply(shell.0.id()).unwrap();
    if held(&group.enforced().cpu) {
        assert_eq!(shell.stat(19), inherited);
        assert_eq!(priority.describe(&group), group.enforced().cpu);
        let before = group.usage().cpu_ns.unwrap();
        let ticks = shell.ticks_within(Duration::from_secs(1));
        let counted = group.usage().cpu_ns.unwrap() - before;
        let asked = Cgroup::usage_of(&id("quota"), shell.0.id()).unwrap();
        assert!(asked.cpu_ns.unwrap() >= before + counted, "{asked:?}");
        let stranger = Cgroup::usage_of("another", shell.0.id()).unwrap();
        assert_eq!(stranger, super::CgroupUsage::default());
        assert!((5..=30).contains(&ticks), "{ticks} hundredths of a second");
        assert!(counted > 50_000_000 && counted < 300_000_000, "{counted} ns");
    } else {
        assert!(priority.describe(&group).starts_with("scheduler priority (nice 17): "), "{priority:?}");
        assert_eq!(shell.stat(19), 17);
    }
    drop(shell);
    group.remove().unwrap();
}

fn cpu_group(shell: &Shell) -> String {
    let text = fs::read_to_string(format!("/proc/{}/cgroup", shell.0.id())).unwrap();
    let line = text.lines().find(|line| line.contains(":cpu:") || line.contains(":cpu,"));
    line.or_else(|| text.lines().find(|line| line.starts_with("0:"))).unwrap().to_owned()
}

/// Eight against one on one processor. Without groups each would have a ninth.
#[test]
fn u8_many_spinning_processes_of_one_group_compete_as_one() {
    let limits = CgroupLimits { cpu_weight: true, ..CgroupLimits::default() };
    let [mut many, mut one] = ["many", "one"].map(|name| Cgroup::create(&id(name), &limits).unwrap());
    let usable = rustix::thread::sched_getaffinity(None).unwrap();
    let mut cpu = rustix::thread::CpuSet::new();
    cpu.set((0..).find(|number| usable.is_set(*number)).unwrap());
    let spin = |group: &Cgroup| {
        let shell = Shell::spinning(group);
        let pid = rustix::process::Pid::from_raw(shell.0.id().cast_signed());
        rustix::thread::sched_setaffinity(pid, &cpu).unwrap();
        shell
    };
    let (crowd, alone) = ((0..8).map(|_| spin(&many)).collect::<Vec<_>>(), spin(&one));
    if held(&many.enforced().weight) {
        assert!(crowd.iter().all(|shell| cpu_group(shell) == cpu_group(&crowd[0])));
        assert_ne!(cpu_group(&crowd[0]), cpu_group(&alone));
        let ticks = || crowd.iter().map(Shell::ticks).sum::<i64>();
        let before = ticks();
        let its = alone.ticks_within(Duration::from_secs(2));
        let theirs = ticks() - before;
        assert!(its * 3 > theirs, "{its} against {theirs} hundredths of a second");
        // One that leaves is with neither.
        many.leave_guest(crowd[0].0.id()).unwrap();
        assert_ne!(cpu_group(&crowd[0]), cpu_group(&crowd[1]));
    } else {
        assert!(many.enforced().weight.starts_with("none: "), "{:?}", many.enforced());
    }
    drop((crowd, alone));
    many.remove().unwrap();
    one.remove().unwrap();
}

#[test]
fn the_priority_that_stands_in_for_a_quota_is_inherited() {
    let limits = CgroupLimits { cpu_quota: Some(0.1), ..CgroupLimits::default() };
    let nowhere = Hierarchies::parse("", "", Folders::KERNEL);
    let group = Cgroup::create_in(&nowhere, "nowhere", &limits).unwrap();
    let mut shell = Shell::new("sh -c 'cut -d\" \" -f19 /proc/self/stat'; sleep 100");
    Priority::for_quota(&group, limits.cpu_quota).apply(shell.0.id()).unwrap();
    shell.go();
    let mut answer = [0; 3];
    shell.0.stdout.take().unwrap().read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"19\n");
    assert_eq!(shell.stat(19), 19);
}

#[test]
fn r2_a_process_cannot_fork_beyond_the_limit() {
    let limits = CgroupLimits { pids: Some(3), ..CgroupLimits::default() };
    let mut group = Cgroup::create(&id("pids"), &limits).unwrap();
    let mut shell = Shell::new("for n in 1 2 3 4 5 6; do sleep 0.2 & echo $n; done; wait");
    group.add(shell.0.id()).unwrap();
    shell.go();
    let (mut out, mut err) = (String::new(), String::new());
    shell.0.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    shell.0.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    if held(&group.enforced().processes) {
        assert_eq!(out, "1\n2\n", "the shell itself is one of three");
        assert!(err.to_lowercase().contains("fork"), "{err}");
    } else {
        assert!(group.enforced().processes.starts_with("none: "), "{:?}", group.enforced());
        assert_eq!(out, "1\n2\n3\n4\n5\n6\n");
    }
    drop(shell);
    group.remove().unwrap();
}

/// Freezing, as long as it lasts, stops one of two processes; the other left the freezer.
fn freezing_stops_only_those_inside(mut group: Cgroup) {
    let (inside, outside) = (Shell::spinning(&group), Shell::spinning(&group));
    group.leave_guest(outside.0.id()).unwrap();
    group.freeze().unwrap();
    let moment = Duration::from_millis(300);
    assert_eq!(inside.ticks_within(moment), 0);
    outside.wait_until_it_runs();
    group.thaw().unwrap();
    inside.wait_until_it_runs();

    // Frozen again, they still can be ended.
    group.freeze().unwrap();
    assert_eq!(group.processes().len(), 2);
    group.kill().unwrap();
    assert!(group.processes().is_empty());
    drop((inside, outside));
    group.remove().unwrap();
}

#[test]
fn a_frozen_group_uses_no_cpu_and_can_be_ended() {
    let id = id("freeze");
    let group = Cgroup::create(&id, &CgroupLimits::default()).unwrap();
    if group.freezer().is_some() {
        freezing_stops_only_those_inside(group);
        assert_eq!(folders_of(&id), 0);
    } else {
        assert!(group.enforced().freezer.starts_with("none: "), "{:?}", group.enforced());
        assert!(matches!(group.freeze(), Err(CgroupError::NoFreezer(_))));
    }
}

/// As on a machine that has only the trees of one version.
fn freezing_by(test: &str, system: &str, mechanism: &str) {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let kept: Vec<_> = mounts.lines().filter(|line| line.contains(system)).collect();
    let trees = Hierarchies::parse(&own, &kept.join("\n"), Folders::KERNEL);
    let group = Cgroup::create_in(&trees, &id(test), &CgroupLimits::default()).unwrap();
    if group.freezer().is_some() {
        assert_eq!(group.enforced().freezer, mechanism);
        freezing_stops_only_those_inside(group);
    } else {
        assert!(group.enforced().freezer.starts_with("none: "), "{:?}", group.enforced());
    }
}

#[test]
fn v1_a_frozen_group_uses_no_cpu_and_can_be_ended() {
    freezing_by("freeze1", " - cgroup ", "cgroup v1");
}

#[test]
fn v2_a_frozen_group_uses_no_cpu_and_can_be_ended() {
    freezing_by("freeze2", " - cgroup2 ", "cgroup v2");
}

#[test]
fn what_a_killed_monitor_leaves_is_removed_frozen_processes_too() {
    let id = id("stale");
    let limits = CgroupLimits { cpu_quota: Some(0.5), pids: Some(9), ..CgroupLimits::default() };
    let group = Cgroup::create(&id, &limits).unwrap();
    if group.freezer().is_none() {
        assert!(!Cgroup::remove_stale(&id).unwrap(), "{:?}", group.enforced());
        return;
    }
    let mut shell = Shell::spinning(&group);
    group.freeze().unwrap();
    assert!(matches!(Cgroup::create(&id, &limits), Err(CgroupError::Taken(_))));
    std::mem::forget(group);
    assert!(folders_of(&id) > 0);
    assert!(Cgroup::remove_stale(&id).unwrap());
    assert_eq!(folders_of(&id), 0);
    assert!(!shell.0.wait().unwrap().success());
    assert!(!Cgroup::remove_stale(&id).unwrap());
}

#[test]
fn a_group_goes_with_its_owner() {
    let id = id("drop");
    drop(Cgroup::create(&id, &CgroupLimits::default()).unwrap());
    assert_eq!(folders_of(&id), 0);
}

#[test]
fn a_process_that_is_gone_cannot_be_added() {
    let mut group = Cgroup::create(&id("gone"), &CgroupLimits::default()).unwrap();
    let mut child = Command::new("/bin/true").spawn().unwrap();
    child.wait().unwrap();
    let result = group.add(child.id());
    assert_eq!(result.is_err(), group.freezer().is_some(), "{result:?}");
    group.remove().unwrap();
}
