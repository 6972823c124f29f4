//! V2, V6, V7, V13 and R4 with a whole virtual machine: kernels that are hostile from their first instruction, under the
//! product's own keeper. In the nested test bed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use bathy_tests::{Ran, patient_seconds, promptly, run};

const SOURCE: &str = include_str!("storm.S");
/// The messages of a keeper about a guest that it had to end: any other would be about the keeper itself.
const LATE: &str = "the guest was not ready after";
const WRONG: &str = "the guest violated the protocol and was killed";

/// What a kernel does; the numbers are the source's.
#[derive(Clone, Copy)]
enum Mode {
    Orderly = 0,
    Garbage = 1,
    Spins = 2,
    Halts = 3,
    Floods = 4,
}

fn tool(program: &str, arguments: &[&str]) {
    let ran = Command::new(program).args(arguments).output().expect("the assembler is installed");
    assert!(ran.status.success(), "{program}: {}", String::from_utf8_lossy(&ran.stderr));
}

fn kernel(folder: &Path, mode: Mode, seed: u32) -> PathBuf {
    let [source, object, kernel] = ["storm.S", "storm.o", "kernel"].map(|name| folder.join(name));
    fs::write(&source, SOURCE).expect("a temporary folder can be written");
    let [source_text, object_text, kernel_text] =
        [&source, &object, &kernel].map(|path| path.to_str().expect("a plain name"));
    let (mode, seed) = (format!("MODE={}", mode as u8), format!("SEED={seed}"));
    tool("as", &["--64", "--defsym", &mode, "--defsym", &seed, "-o", object_text, source_text]);
    let place = ["-m", "elf_x86_64", "-static", "-Ttext=0x1000000", "-e", "start"];
    tool("ld", &[&place[..], &["-o", kernel_text, object_text]].concat());
    kernel
}

/// Boots it with two processors and returns the message of `bathy` about its end.
fn boot(mode: Mode, seed: u32, seconds: u64) -> Ran {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let kernel = kernel(folder.path(), mode, seed);
    let limit = patient_seconds(seconds);
    let kernel = kernel.to_str().expect("a plain name");
    let options = ["run", "--engine", "kvm", "--cpus", "2", "--kernel", kernel, "--ready-timeout", &limit];
    let ran = run(&[&options[..], &["--", "true"]].concat());
    assert_eq!(ran.code, Some(125), "{ran:?}");
    let most = promptly(Duration::from_secs(seconds + 10));
    assert!(ran.took < most, "{ran:?}");
    assert!(ran.stderr.len() < 32 << 10, "{} bytes", ran.stderr.len());
    ran
}

#[test]
fn v6_v7_two_processors_set_up_and_reset_devices_under_the_keepers_hands() {
    let ran = boot(Mode::Orderly, 20_261_117, 3);
    // Neither the keeper nor a device was the worse for it, and both processors were there.
    assert!(ran.stderr.contains(LATE), "{}", ran.stderr);
    let (_, said) = ran.stderr.split_once("last lines:").expect("both say that they are there");
    for (letter, what) in [('F', "the first runs"), ('S', "the second runs"), ('U', "a device was up")] {
        assert!(said.contains(letter), "{what}: {}", ran.stderr);
    }
}

#[test]
fn v2_v6_v7_any_value_in_any_register_with_rings_of_garbage_ends_at_most_the_guest() {
    let mut caught = 0;
    for seed in 1..=12 {
        let ran = boot(Mode::Garbage, seed * 7919, 1);
        println!("seed {seed}: {}", ran.stderr);
        assert!(ran.stderr.contains(LATE) || ran.stderr.contains(WRONG), "seed {seed}: {}", ran.stderr);
        caught += usize::from(ran.stderr.contains(WRONG));
    }
    // Some rings were looked at before a reset took them away.
    assert!(caught > 0, "no device has seen any garbage");
}

#[test]
fn r4_v13_a_kernel_that_spins_halts_or_floods_is_ended_in_time() {
    for mode in [Mode::Spins, Mode::Halts, Mode::Floods] {
        let ran = boot(mode, 1, 1);
        assert!(ran.stderr.contains(LATE), "{}", ran.stderr);
        let flooded = ran.stderr.contains("AAAA");
        assert_eq!(flooded, matches!(mode, Mode::Floods), "{}", ran.stderr);
    }
}
