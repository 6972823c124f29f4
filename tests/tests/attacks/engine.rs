//! U2, U4, U5, J7: guest kernels that misbehave, and processes that are stopped or killed. Every sandbox ends in bounded
//! time, with the reason in its message, and with nothing left; its neighbour notices nothing.

use std::thread::sleep;
use std::time::Duration;

use bathy_tests::{Ran, patience, promptly};
use rustix::process::Signal;

use crate::process::Process;
use crate::run::{Run, send};

/// What a sandbox may take to end after its deadline.
const GRACE: Duration = Duration::from_secs(2);

/// Runs a guest kernel in this role, which has `seconds` to get ready.
fn ends(role: &str, seconds: u64) -> Ran {
    let (run, _program) = Run::role(role, &seconds.to_string());
    let ran = run.finish(Duration::from_secs(seconds) + patience(GRACE));
    assert_eq!(ran.code, Some(125), "{role}: {}", ran.stderr);
    ran
}

fn assert_says(ran: &Ran, words: &str) {
    assert!(ran.stderr.contains(words), "{words:?} is not in: {}", ran.stderr);
}

#[test]
fn u4_a_kernel_that_says_nothing_is_ended() {
    let ran = ends("silent", 2);
    assert_says(&ran, "the guest was not ready after 2 s");
    assert!(ran.took >= Duration::from_secs(2));
}

#[test]
fn u4_a_kernel_that_spins_is_ended() {
    assert_says(&ends("spins", 2), "the guest was not ready after 2 s");
}

#[test]
fn u4_a_kernel_that_ends_is_told_of_at_once() {
    let ran = ends("exits", 10);
    assert_says(&ran, "the guest ended before its command did (status 3)");
    assert!(ran.took < promptly(GRACE), "{:?}", ran.took);
}

#[test]
fn u4_a_kernel_that_hangs_up_its_devices_is_ended() {
    assert_says(&ends("hangs-up", 2), "the guest was not ready after 2 s");
}

#[test]
fn u4_a_kernel_that_sends_half_a_message_is_ended() {
    assert_says(&ends("half-a-message", 2), "the guest was not ready after 2 s");
}

#[test]
fn u4_a_kernel_that_sends_garbage_to_a_device_is_ended_at_once() {
    for device in 0..4 {
        let ran = ends(&format!("garbage-{device}"), 10);
        assert_says(&ran, "the guest violated the protocol and was killed");
        assert!(ran.took < promptly(GRACE), "device {device}: {:?}", ran.took);
    }
}

#[test]
fn u4_r4_a_flood_on_the_console_is_bounded_in_time_and_memory() {
    let (mut run, _program) = Run::role("floods", "6");
    sleep(Duration::from_secs(3));
    let keeper = run.look().keeper.expect("the keeper runs");
    let kib = keeper.status_number("VmRSS");
    assert!(kib < 20 * 1024, "the keeper uses {kib} KiB");
    let ran = run.finish(Duration::from_secs(6) + patience(GRACE));
    assert_says(&ran, "the guest was not ready after 6 s");
    assert!(ran.stderr.len() < 20 * 1024, "{} bytes of it are shown", ran.stderr.len());
}

#[test]
fn u5_a_kernel_that_forks_stays_below_the_limit() {
    let (mut run, _program) = Run::role("forks", "6");
    sleep(Duration::from_secs(3));
    let count = run.look().stubs.len();
    assert!((100..1024 + 8).contains(&count), "{count} host processes");
    // A thousand processes take a moment to go, the more so on a busy machine.
    assert_says(&run.finish(Duration::from_secs(6) + patience(2 * GRACE)), "processes: ");
}

/// Starts a sandbox whose program prints when it runs, and again a little later.
fn neighbour() -> Run {
    let mut run = Run::start(&["--", "sh", "-c", "echo here; sleep 3; echo still here"]);
    run.when_printed("here");
    run
}

fn assert_unharmed(neighbour: Run) {
    let ran = neighbour.finish(Duration::from_secs(20));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "here\nstill here\n"), "{}", ran.stderr);
}

#[test]
fn u2_a_kernel_that_kills_everybody_ends_only_itself() {
    let neighbour = neighbour();
    assert_says(&ends("kills", 5), "the guest ended before its command did (status 9)");
    assert_unharmed(neighbour);
}

#[test]
fn u2_a_kernel_that_stops_everybody_ends_only_itself() {
    let neighbour = neighbour();
    assert_says(&ends("stops", 2), "the guest was not ready after 2 s");
    assert_unharmed(neighbour);
}

/// A sandbox with a real guest that works, one of whose processes is then sent a signal.
fn signalled(signal: Signal, choose: impl Fn(&Run, crate::run::Family) -> Process) -> Ran {
    let mut run = Run::start(&["--timeout", "4", "--", "sh", "-c", "echo up; while :; do :; done"]);
    let family = run.when_printed("up");
    send(choose(&run, family), signal);
    run.finish(Duration::from_secs(4 + 5))
}

#[test]
fn u2_a_stopped_kernel_is_ended_at_the_timeout() {
    let ran = signalled(Signal::STOP, |_, family| family.guest.expect("the guest runs"));
    assert_eq!(ran.code, Some(124), "{}", ran.stderr);
}

#[test]
fn u2_stopped_guest_programs_are_ended_at_the_timeout() {
    let ran = signalled(Signal::STOP, |_, family| *family.stubs.last().expect("a program runs"));
    assert_eq!(ran.code, Some(124), "{}", ran.stderr);
}

#[test]
fn u2_a_killed_kernel_ends_its_sandbox() {
    let ran = signalled(Signal::KILL, |_, family| family.guest.expect("the guest runs"));
    assert_eq!(ran.code, Some(125));
    assert_says(&ran, "the guest ended before its command did (status 137)");
}

#[test]
fn u2_a_killed_guest_process_ends_only_what_is_in_its_sandbox() {
    let neighbour = neighbour();
    let ran = signalled(Signal::KILL, |_, family| *family.stubs.last().expect("a program runs"));
    assert_ne!(ran.code, Some(0));
    assert_unharmed(neighbour);
}

#[test]
fn j7_a_killed_keeper_takes_its_sandbox_with_it() {
    let ran = signalled(Signal::KILL, |_, family| family.keeper.expect("the keeper runs"));
    assert_eq!(ran.code, Some(125), "{}", ran.stderr);
    assert!(!ran.stderr.is_empty(), "it was not told");
}

#[test]
fn j7_a_killed_client_leaves_nothing() {
    let mut run = Run::start(&["--", "sh", "-c", "echo up; sleep 60"]);
    let family = run.when_printed("up");
    assert!(family.keeper.is_some() && family.guest.is_some() && !family.stubs.is_empty(), "{family:?}");
    run.kill();
    run.assert_nothing_left();
}
