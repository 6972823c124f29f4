//! A guest that is silent: the watchdog in the loop.

use bathy_protocol::{Exit, ToGuest, ToHost};

use super::*;

const QUIET: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(120);
const MOMENT: Duration = Duration::from_secs(1);

/// A guest that was asked to start a command and has not answered.
fn owing() -> Bench {
    let mut bench = Bench::ready(false);
    bench.owner.send(1, &start(7, None));
    bench.settle();
    assert!(matches!(bench.guest.messages()[..], [(1, ToGuest::Exec(_))]));
    bench
}

/// A guest in which a command runs.
fn busy() -> Bench {
    let mut bench = owing();
    bench.guest.send(1, &ToHost::Started { pid: 5 });
    bench.settle();
    bench
}

fn assert_hung(end: &End) {
    assert!(matches!(end, End::Because(Cause::GuestCrashed(how)) if how.contains("hung")), "{end:?}");
}

#[test]
fn an_idle_guest_may_be_silent_for_ever_and_does_not_wake_the_loop() {
    let mut bench = Bench::ready(false);
    bench.pass(100 * PATIENCE).unwrap();
    assert_eq!(bench.keeper.timers.next(), None);
    assert_eq!(bench.guest.receive(), []);
}

#[test]
fn r11_a_guest_that_owes_an_answer_is_ended_after_two_minutes_of_silence_and_not_before() {
    let mut bench = owing();
    bench.pass(PATIENCE - MOMENT).unwrap();
    assert_hung(&bench.pass(MOMENT).unwrap_err());
}

#[test]
fn r11_a_guest_that_sends_anything_has_all_its_time_again() {
    let mut bench = busy();
    bench.owner.send(2, &start(8, None));
    bench.settle();
    bench.pass(PATIENCE - MOMENT).unwrap();
    bench.guest.output(1, Channel::Stdout, b"x");
    bench.settle();
    bench.pass(PATIENCE - MOMENT).unwrap();
    assert_hung(&bench.pass(MOMENT).unwrap_err());
}

#[test]
fn r11_a_guest_in_which_a_command_runs_is_pinged_once_and_ended_if_it_does_not_answer() {
    let mut bench = busy();
    bench.pass(QUIET - MOMENT).unwrap();
    assert_eq!(bench.guest.messages(), []);
    bench.pass(MOMENT).unwrap();
    assert_eq!(bench.guest.messages(), [(CONNECTION, ToGuest::Ping)]);
    bench.pass(PATIENCE - MOMENT).unwrap();
    assert_eq!(bench.guest.messages(), []);
    assert_hung(&bench.pass(MOMENT).unwrap_err());
}

#[test]
fn r11_a_guest_that_answers_its_pings_goes_on() {
    let mut bench = busy();
    for _ in 0..5 {
        bench.pass(QUIET).unwrap();
        assert_eq!(bench.guest.messages(), [(CONNECTION, ToGuest::Ping)]);
        bench.guest.send(CONNECTION, &ToHost::Pong);
        bench.settle();
    }
    bench.guest.send(1, &ToHost::Exited(Exit::Code(0)));
    bench.settle();
    bench.pass(10 * PATIENCE).unwrap();
}

#[test]
fn c1_an_answer_to_a_ping_that_was_not_sent_ends_the_sandbox() {
    let mut bench = busy();
    bench.guest.send(CONNECTION, &ToHost::Pong);
    assert!(matches!(bench.cause(), Cause::Violation(_)));
}
