//! U8: the processes of a guest compete for a processor as one, and the host side of the sandbox does not compete with them.

use std::fs;
use std::process::Command;

use bathy_tests::kept::{Home, children};
use bathy_tests::{Engine, bathy, engine};

use crate::process::Process;
use crate::run::{Family, Run};

/// The group of the cpu controller that a process is in.
fn cpu_group(pid: u32) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it lives");
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.splitn(3, ':').collect()).collect();
    let v1 = lines.iter().find(|line| line[1].split(',').any(|name| name == "cpu"));
    let line = v1.or_else(|| lines.iter().find(|line| line[1].is_empty())).expect("Linux tells");
    line[2].to_owned()
}

/// The groups of a sandbox's processes: the guest's, and the host side's.
struct Groups {
    guest: Vec<String>,
    host_side: Vec<String>,
}

impl Groups {
    fn of(guest: &[u32], host_side: &[u32]) -> Self {
        let groups = |pids: &[u32]| pids.iter().map(|pid| cpu_group(*pid)).collect();
        Self { guest: groups(guest), host_side: groups(host_side) }
    }

    fn of_family(family: &Family) -> Self {
        let number = |process: &Process| process.number;
        let guest: Vec<_> = family.guest.iter().chain(&family.stubs).map(number).collect();
        let host_side: Vec<_> = family.keeper.iter().chain(&family.gateway).map(number).collect();
        assert!(guest.len() > 1 && host_side.len() == 2, "{family:?}");
        Self::of(&guest, &host_side)
    }

    fn of_kept(home: &Home, name: &str) -> Self {
        let (keeper, gateway) = (home.keeper(name), home.gateway(name).expect("it has a network"));
        let guest = home.guest(name);
        match engine() {
            Engine::Uml => Self::of(&[&[guest], children(guest).as_slice()].concat(), &[keeper, gateway]),
            // The processors of a virtual machine are threads of its keeper.
            Engine::Kvm => Self::of(&[guest], &[gateway]),
        }
    }

    /// All of the guest are in one group of this sandbox, and nothing else is in it.
    fn assert_parted(&self, what: &str) {
        let own = &self.guest[0];
        assert!(own.contains("/bathysphere-"), "{what}: the guest is in {own}");
        assert!(self.guest.iter().all(|group| group == own), "{what}: {:?}", self.guest);
        assert!(!self.host_side.contains(own), "{what}: the guest and its host side are in {own}");
        let first = &self.host_side[0];
        assert!(self.host_side.iter().all(|group| group == first), "{what}: {:?}", self.host_side);
    }
}

/// Whether a group can be made in the version 1 tree of the cpu controller, by making one.
fn can_make_a_group() -> bool {
    let mounts = fs::read_to_string("/proc/mounts").expect("Linux tells");
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let has_cpu = |line: &Vec<&str>| line[2] == "cgroup" && line[3].split(',').any(|name| name == "cpu");
    let Some(mount) = fields.filter(has_cpu).map(|line| line[1].to_owned()).next() else { return false };
    let folder = format!("{mount}{}/bathysphere-test-{}", cpu_group(std::process::id()), std::process::id());
    fs::create_dir(&folder).and_then(|()| fs::remove_dir(&folder)).is_ok()
}

/// Whether this machine gives us groups with a weight.
fn has_weight(home: &Home, name: &str) -> bool {
    let inspected = home.inspect(name);
    let how = inspected["enforcement"]["cpu_weight"].as_str().expect("it says by what").to_owned();
    println!("guests compete as one by: {how}");
    assert!(
        how.starts_with("cgroup v") || how.starts_with("session: ") || how.starts_with("none: "),
        "{how}"
    );
    assert!(!can_make_a_group() || how == "cgroup v1", "{how}, and a group can be made");
    how.starts_with("cgroup v")
}

#[test]
fn u8_every_guest_has_a_weight_of_its_own_and_the_host_side_has_no_part_in_it() {
    let home = Home::new();
    home.started("free", &[]);
    home.started("slow", &["--cpu-quota", "0.9"]);
    let script = ["sh", "-c", "echo up; sleep 60"];
    let mut run = Run::of(Command::new(bathy()).args(["run", "--"]).args(script));
    let mut limited = Run::of(Command::new(bathy()).args(["run", "--cpu-quota", "0.9", "--"]).args(script));
    let code = "import time; print('up', flush=True); time.sleep(60)";
    let mut cell = Run::of(Command::new(bathy()).args(["code", "-c", code]));
    let ephemeral = [&mut run, &mut limited, &mut cell].map(|run| run.when_printed("up"));
    if !has_weight(&home, "free") {
        assert!(ephemeral.iter().all(|family| family.keeper.is_some()));
        return;
    }
    for name in ["free", "slow"] {
        Groups::of_kept(&home, name).assert_parted(name);
    }
    for (what, family) in ["run", "run with a quota", "code"].into_iter().zip(&ephemeral) {
        Groups::of_family(family).assert_parted(what);
    }
    // A quota holds for both sides, so they share the group above.
    let slow = Groups::of_kept(&home, "slow");
    let above = |group: &str| group.rsplit_once('/').expect("a path").0.to_owned();
    assert!(above(&slow.guest[0]).contains("/bathysphere-"), "{:?}", slow.guest);
    assert_eq!(above(&slow.guest[0]), above(&slow.host_side[0]));
}

#[test]
fn u8_a_gateway_that_is_started_again_has_no_part_in_the_guests_weight() {
    let home = Home::new();
    home.started("web", &[]);
    let first = home.gateway("web").expect("it has a network");
    bathy_tests::kept::signal(first, rustix::process::Signal::KILL);
    bathy_tests::kept::until("another gateway", 20, || home.gateway("web").is_some_and(|now| now != first));
    if has_weight(&home, "web") {
        Groups::of_kept(&home, "web").assert_parted("web");
    }
}
