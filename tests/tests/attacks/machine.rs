//! J1, J4, J8 for the kvm engine: the keeper of a virtual machine and its processors' threads. In the nested test bed.

mod storm;

use std::fmt::Write;
use std::fs;

use bathy_tests::kept::Home;

use crate::golden::{assert_golden, describe, field};
use crate::process::Process;
use crate::run::Run;

/// The properties by which the confinement of threads differs.
const OF_THREADS: [&str; 8] =
    ["Uid", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Seccomp_filters"];

fn describe_threads(keeper: Process) -> String {
    let ours = fs::read_to_string("/proc/self/status").expect("our own file");
    let our_filters = field(&ours, "Seccomp_filters").trim().parse::<u64>().unwrap_or(0);
    let folder = format!("/proc/{}/task", keeper.number);
    let mut threads: Vec<_> = fs::read_dir(folder)
        .expect("root may look")
        .flatten()
        .map(|entry| fs::read_to_string(entry.path().join("status")).expect("threads of a keeper do not end"))
        .collect();
    threads.sort_by_key(|status| field(status, "Name").trim().to_owned());
    let mut text = String::new();
    for status in &threads {
        let _ = writeln!(text, "thread {}", field(status, "Name").trim());
        for name in OF_THREADS {
            let value = match (name, field(status, name).trim()) {
                ("Seccomp_filters", count) => (count.parse::<u64>().unwrap_or(0) - our_filters).to_string(),
                ("Uid", users) => {
                    let first = users.split_whitespace().next().unwrap_or_default();
                    if users.split_whitespace().all(|user| user == first) && first != "0" {
                        "one, not root".to_owned()
                    } else {
                        users.to_owned()
                    }
                }
                (_, value) => value.to_owned(),
            };
            let _ = writeln!(text, "  {name}: {value}");
        }
    }
    text
}

#[test]
fn j1_j4_j8_a_machines_keeper_and_its_threads_are_confined_as_agreed() {
    let mut run = Run::start(&["--engine", "kvm", "--cpus", "2", "--", "sh", "-c", "echo up; sleep 600"]);
    let family = run.when_printed("up");
    let keeper = family.keeper.expect("the keeper runs");
    assert!(family.guest.is_none(), "a virtual machine has no process of its own: {family:?}");
    assert_golden("keeper-machine", &describe(keeper, run.number()));
    assert_golden("keeper-machine-threads", &describe_threads(keeper));
}

#[test]
fn j1_j4_j8_the_keeper_of_a_kept_machine_is_confined_as_agreed() {
    let home = Home::new();
    home.started("kept", &["--engine", "kvm"]);
    home.exec("kept", &["true"]);
    let keeper = Process::of(home.keeper("kept")).expect("it runs");
    assert_golden("keeper-machine-kept", &describe(keeper, home.monitor("kept")));
}
