//! The test bed of power cuts is itself tested: it keeps what was synced, and truly loses what was not.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use bathy_tests::kept::{children, is_alive, until};
use bathy_tests::power::{Bed, FileSystem, Machine};
use rustix::process::geteuid;

const SERVER: &str = env!("CARGO_BIN_EXE_power-disk");
const SEEDS: u64 = 8;
/// The answer of a machine that does not start.
const UNMOUNTABLE: &str = "it cannot be mounted";

fn bed(kind: FileSystem) -> (Bed, PathBuf) {
    let bed = Bed::new(SERVER, kind);
    // The least that mkfs.xfs makes.
    let image = bed.format(if kind == FileSystem::Xfs { 300 } else { 64 });
    (bed, image)
}

#[track_caller]
fn needs_root() {
    assert!(geteuid().is_root(), "only root may mount a disk: run this test as root");
}

#[track_caller]
fn sh(machine: &Machine, script: &str) -> String {
    let ran = machine.shell().sh(script);
    assert_eq!(ran.code, Some(0), "{script}: {ran:?}");
    ran.stdout
}

/// Does something, cuts the power once, and asks the machines that start from any of its images.
fn after_cuts(kind: FileSystem, options: &str, before: &str, ask: &str) -> Vec<String> {
    let (bed, empty) = bed(kind);
    let mut machine = bed.boot(&empty, options);
    sh(&machine, before);
    let images: Vec<PathBuf> = (0..SEEDS).map(|seed| bed.path().join(format!("cut-{seed}"))).collect();
    for (seed, image) in (0..).zip(&images) {
        println!("{}", machine.cut(seed, image));
    }
    machine.off();
    let ask_one = |image: &PathBuf| {
        let Some(machine) = bed.try_boot(image, options) else { return UNMOUNTABLE.to_owned() };
        let answer = sh(&machine, ask);
        machine.off();
        answer
    };
    images.iter().map(ask_one).collect()
}

/// A file that is synced, with its folder, while others are written that are not.
const SYNCED: &str = "mkdir d && seq 1 5000 > d/synced && sync d/synced d . && \
    for i in $(seq 1 20); do seq 1 3000 > d/other-$i; dd if=d/other-$i iflag=nocache count=0 status=none; done";
const SUM: &str = "(sha256sum < d/synced) 2>&1";
/// The sum of those five thousand lines.
fn right_sum() -> String {
    let output = Command::new("bash").args(["-c", "seq 1 5000 | sha256sum"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn what_was_synced_is_there_after_every_cut() {
    needs_root();
    for kind in [FileSystem::Ext4, FileSystem::Xfs] {
        for options in kind.options() {
            let answers = after_cuts(kind, options, SYNCED, SUM);
            assert_eq!(answers, vec![right_sum(); answers.len()], "{kind:?}, {options}");
        }
    }
}

#[test]
fn a_disk_that_is_never_flushed_loses_even_what_was_synced() {
    needs_root();
    let answers = after_cuts(FileSystem::Ext4, "barrier=0", SYNCED, &format!("{SUM}; true"));
    let lost = answers.iter().filter(|answer| **answer != right_sum()).count();
    println!("{answers:?}");
    assert!(lost > 0, "{answers:?}");
}

#[test]
fn what_was_renamed_and_not_synced_is_lost_or_empty_after_some_cuts() {
    needs_root();
    let before = "echo old > file && sync file . && echo new > file.new && mv file.new file && \
        echo fresh > fresh.new && mv fresh.new fresh";
    let ask = "(cat file; cat fresh) 2>/dev/null; true";
    // At once, and after the name is in the journal and the content is not: then there is an empty file.
    let now = after_cuts(FileSystem::Ext4, "commit=1", before, ask);
    let later = after_cuts(
        FileSystem::Ext4,
        "commit=1,noauto_da_alloc",
        &format!("{before}; sleep 2.5"),
        &format!("[ -e fresh ] && [ ! -s fresh ] && echo empty; {ask}"),
    );
    println!("{now:?}\n{later:?}");
    assert!(now.iter().any(|answer| answer == "old\n"), "{now:?}");
    assert!(now.iter().all(|answer| answer.starts_with("old\n") || answer.starts_with("new\n")), "{now:?}");
    assert!(later.iter().any(|answer| answer.starts_with("empty")), "{later:?}");
}

/// Goes on making, writing, syncing and removing files in the folder that it is given.
const BUSY: &str = "cd $0; for i in $(seq 1 100000); do f=d$((i % 7))/f$((i % 31)); mkdir -p ${f%/*}; seq 1 $((i % 900)) > $f; \
    case $((i % 9)) in 0) sync $f;; 1) mv $f $f.renamed;; 2) rm -r d$((i % 5));; *) dd if=$f iflag=nocache count=0 status=none;; esac; done 2>/dev/null";

#[test]
fn the_file_system_is_whole_after_every_cut() {
    needs_root();
    let (bed, mut image) = bed(FileSystem::Ext4);
    for seed in 0..SEEDS {
        let mut machine = bed.boot(&image, "errors=remount-ro,commit=1");
        let mut busy =
            machine.shell().command("bash").args(["-c", BUSY]).arg(machine.shell().state()).spawn().unwrap();
        sleep(Duration::from_millis(30 + 40 * seed));
        image = bed.path().join(format!("whole-{seed}"));
        println!("{}", machine.cut(seed, &image));
        machine.off();
        busy.wait().unwrap();
        // What the journal of the cut image mends by itself, and nothing else.
        bed.boot(&image, "errors=remount-ro").off();
        let output = Command::new("/usr/sbin/e2fsck").args(["-f", "-n"]).arg(bed.disk()).output().unwrap();
        assert!(output.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn every_machine_has_a_boot_id_and_takes_its_processes_along() {
    needs_root();
    let (bed, image) = bed(FileSystem::Ext4);
    let ids = [(); 2].map(|()| {
        let machine = bed.boot(&image, "commit=1");
        let id = sh(&machine, "cat /proc/sys/kernel/random/boot_id");
        let mut sleeper = machine.shell().command("sleep").arg("1000").spawn().unwrap();
        until("it runs on the machine", 10, || !children(sleeper.id()).is_empty());
        let pid = children(sleeper.id())[0];
        // Not switched off by hand, as if the test had failed: its end checks what is left.
        drop(machine);
        assert!(!sleeper.wait().unwrap().success());
        assert!(!is_alive(pid));
        id
    });
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(host.len(), 37);
    assert!(ids[0] != ids[1] && !ids.contains(&host), "{ids:?}, {host}");
}
