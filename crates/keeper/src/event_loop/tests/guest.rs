//! The guest: how it gets ready, what it sends, and how it ends.

use bathy_protocol::{Exit, Ready, StdChannel, ToGuest, ToHost, VERSION};
use bathy_uml::vhost::testing::SET_MEM_TABLE;

use super::*;

fn hello(bench: &mut Bench) -> bathy_protocol::Hello {
    let received = bench.guest.messages();
    let [(CONNECTION, ToGuest::Hello(hello))] = &received[..] else { panic!("{received:?}") };
    hello.clone()
}

/// The messages of the owner's stream 1, after whatever the loop does now.
fn on_stream_one(bench: &mut Bench) -> Vec<Received> {
    let received = bench.owner.receive();
    received.into_iter().filter(|received| !matches!(received, Received::Keeper(_))).collect()
}

#[test]
fn requests_wait_until_the_agent_opens_its_port_and_follow_the_greeting() {
    let mut bench = Bench::new(false);
    bench.owner.send(1, &start(7, None));
    bench.settle();
    bench.guest.find_devices();
    bench.settle();
    assert_eq!(bench.guest.receive(), []);
    bench.guest.open_port();
    bench.settle();
    let received = bench.guest.messages();
    assert!(matches!(received[..], [(CONNECTION, ToGuest::Hello(_)), (1, ToGuest::Exec(_))]), "{received:?}");
}

#[test]
fn a_command_runs_from_its_request_to_its_exit() {
    let mut bench = Bench::ready(false);
    bench.owner.send(1, &start(7, None));
    bench.settle();
    assert!(matches!(bench.guest.messages()[..], [(1, ToGuest::Exec(_))]));
    bench.guest.send(1, &ToHost::Started { pid: 5 });
    bench.guest.output(1, Channel::Stdout, b"out");
    bench.guest.output(1, Channel::Stderr, b"err");
    bench.guest.send(1, &ToHost::Exited(Exit::Code(3)));
    bench.settle();
    let expected = [
        Received::Answer(1, Answer::Started { pid: 5 }),
        Received::Bytes(1, Channel::Stdout, b"out".to_vec()),
        Received::Bytes(1, Channel::Stderr, b"err".to_vec()),
        Received::Answer(1, Answer::Exited(Exit::Code(3))),
    ];
    assert_eq!(on_stream_one(&mut bench), expected);
}

#[test]
fn a_guest_that_is_not_ready_in_time_is_ended_and_not_before() {
    let mut bench = Bench::new(false);
    bench.guest.find_devices();
    bench.pass(READY_TIMEOUT - Duration::from_secs(1)).unwrap();
    let end = bench.pass(Duration::from_secs(2)).unwrap_err();
    assert!(matches!(end, End::Because(Cause::NotReady(30_000))), "{end:?}");
}

#[test]
fn a_guest_that_is_ready_has_no_deadline_for_that_any_more() {
    let mut bench = Bench::ready(false);
    bench.pass(10 * READY_TIMEOUT).unwrap();
    assert_eq!(bench.keeper.timers.ready, None);
}

#[test]
fn c1_an_agent_of_another_version_ends_the_sandbox() {
    let mut bench = Bench::new(false);
    bench.guest.find_devices();
    bench.settle();
    bench.guest.open_port();
    bench.settle();
    let hello = hello(&mut bench);
    let ToHost::Ready(ready) = fake_guest::answer(&hello) else { unreachable!() };
    bench.guest.send(CONNECTION, &ToHost::Ready(Ready { version: VERSION + 1, ..ready }));
    let cause = bench.cause();
    assert!(matches!(&cause, Cause::Violation(how) if how.contains("version")), "{cause:?}");
}

#[test]
fn c1_bytes_that_are_no_frame_end_the_sandbox() {
    let mut bench = Bench::ready(false);
    bench.guest.write(&[0xff; 64]);
    assert!(matches!(bench.cause(), Cause::Violation(_)));
}

#[test]
fn c1_an_agent_that_opens_its_port_again_has_hung_up() {
    let mut bench = Bench::ready(false);
    bench.guest.open_port();
    let cause = bench.cause();
    assert!(matches!(&cause, Cause::Violation(how) if how.contains("hung up")), "{cause:?}");
}

#[test]
fn v1_a_driver_that_breaks_the_rules_ends_the_sandbox() {
    let mut bench = Bench::ready(false);
    // Without the file of the guest's memory.
    bench.guest.vhost(SET_MEM_TABLE, &[0; 40], &[]);
    assert!(matches!(bench.cause(), Cause::Violation(_)));
}

#[test]
fn a_closed_device_socket_is_no_violation_but_the_guests_end_is_its_exit_status() {
    let mut bench = Bench::ready(false);
    bench.guest.close_sockets();
    bench.settle();
    bench.guest.exit(7);
    assert!(matches!(bench.end(), End::GuestExited));
    assert_eq!(bench.keeper.guest.cause(), Cause::GuestExited(7));
}

#[test]
fn what_the_guest_sent_before_its_exit_reaches_the_client_whenever_that_is_noticed() {
    let mut bench = Bench::ready(false);
    bench.owner.send(1, &start(7, None));
    bench.settle();
    bench.guest.send(1, &ToHost::Started { pid: 5 });
    let last = vec![b'x'; 40_000];
    bench.guest.output(1, Channel::Stdout, &last);
    bench.guest.send(1, &ToHost::Exited(Exit::Code(0)));
    bench.guest.exit(0);
    assert!(matches!(bench.end(), End::GuestExited));
    let received = on_stream_one(&mut bench);
    let bytes: Vec<u8> = received
        .iter()
        .filter_map(|received| match received {
            Received::Bytes(1, Channel::Stdout, bytes) => Some(bytes.clone()),
            _ => None,
        })
        .flatten()
        .collect();
    assert_eq!(bytes, last);
    assert_eq!(received.last(), Some(&Received::Answer(1, Answer::Exited(Exit::Code(0)))));
}

#[test]
fn the_end_is_reported_to_every_client_with_the_last_lines_of_the_console() {
    let mut bench = Bench::ready(false);
    let mut client = bench.connect();
    bench.owner.receive();
    writeln!(bench.console, "the last line").unwrap();
    bench.guest.exit(7);
    assert!(matches!(bench.end(), End::GuestExited));
    let cause = bench.keeper.guest.cause();
    bench.keeper.report_end(cause);
    let ended = FromKeeper::Ended { cause: Cause::GuestExited(7), console: "the last line".to_owned() };
    assert_eq!(client.receive(), [Received::Keeper(ended.clone())]);
    assert_eq!(bench.sent_to_owner(), [ended]);
}

#[test]
fn a_client_that_reads_nothing_delays_the_end_by_a_second_and_no_more() {
    let mut bench = Bench::ready(false);
    let _client = bench.connect();
    // More than its socket takes.
    let long = FromKeeper::Warning("x".repeat(60_000));
    (0..20).for_each(|_| bench.keeper.hub.broadcast(&long));
    let begin = Instant::now();
    bench.keeper.report_end(Cause::Killed);
    let took = begin.elapsed();
    assert!(took >= FLUSH_TIMEOUT && took < 20 * FLUSH_TIMEOUT, "{took:?}");
}

#[test]
fn r4_a_guest_that_floods_its_console_is_read_again_later_and_served_meanwhile() {
    let mut bench = Bench::ready(false);
    let line = [b'x'; 4096];
    for _ in 0..64 {
        // A full pipe is the point: the guest kernel would wait here.
        let _ = bench.console.write(&line);
        if bench.keeper.timers.console.is_some() {
            break;
        }
        bench.turn().unwrap();
    }
    let again = bench.keeper.timers.console.expect("the rate limit is reached");
    bench.owner.send(1, &start(7, None));
    bench.settle();
    assert!(matches!(bench.guest.messages()[..], [(1, ToGuest::Exec(_))]));
    bench.pass(again.saturating_duration_since(bench.now())).unwrap();
    assert!(bench.keeper.timers.console.is_none_or(|at| at > again));
}

#[test]
fn a_closed_console_is_watched_no_more() {
    let mut bench = Bench::ready(false);
    bench.console = file();
    // A hang-up would be reported in every turn.
    bench.settle();
}

#[test]
fn output_of_jobs_is_logged_and_of_commands_is_not() {
    let mut bench = Bench::ready(true);
    bench.owner.send(1, &start(1, Some(4)));
    bench.owner.send(2, &start(2, None));
    bench.settle();
    bench.guest.send(1, &ToHost::Started { pid: 5 });
    bench.guest.output(1, Channel::Stdout, b"of the job");
    bench.guest.output(1, Channel::Stderr, b"its errors");
    bench.guest.output(2, Channel::Stdout, b"of the command");
    bench.settle();
    let logged: Vec<_> = bench
        .logged()
        .into_iter()
        .map(|record| (record.meta.source, record.meta.channel, record.bytes))
        .collect();
    let expected = [(4, STDOUT, b"of the job".to_vec()), (4, STDERR, b"its errors".to_vec())];
    assert_eq!(logged, expected);
}

#[test]
fn r4_a_job_without_a_client_is_slowed_down_to_the_logs_rate_and_goes_on_in_the_next_period() {
    let mut bench = Bench::ready(true);
    bench.owner.send(1, &start(1, Some(4)));
    bench.owner.send(1, &Request::Detach);
    bench.settle();
    bench.guest.receive();
    let (mut window, mut logged) = (64 * 1024, 0_usize);
    // A well-behaved agent: it sends what its window allows.
    while logged < 4 << 20 {
        if window < 4096 {
            bench.settle();
            let granted: usize = grants(&mut bench);
            if granted == 0 {
                break;
            }
            window += granted;
            continue;
        }
        bench.guest.output(1, Channel::Stdout, &[b'x'; 4096]);
        (window, logged) = (window - 4096, logged + 4096);
        bench.settle();
    }
    assert!((1 << 20..2 << 20).contains(&logged), "{logged} bytes in one period");
    bench.pass(LOG_PERIOD).unwrap();
    assert!(grants(&mut bench) > 0, "the job can go on");
}

fn grants(bench: &mut Bench) -> usize {
    let bytes = |message| match message {
        (1, ToGuest::Grant { channel: StdChannel::Stdout, bytes }) => bytes as usize,
        _ => 0,
    };
    bench.guest.messages().into_iter().map(bytes).sum()
}

#[test]
fn a_guest_that_shuts_down_has_its_disk_limits_lifted_at_the_deadline() {
    let mut bench = Bench::ready(false);
    bench.owner.send(CONNECTION, &ToKeeper::PowerOff { grace_ms: 5000 });
    bench.settle();
    assert_eq!(bench.guest.messages(), [(CONNECTION, ToGuest::PowerOff { grace_ms: 5000 })]);
    let deadline = bench.now() + Duration::from_secs(5);
    assert_eq!(bench.keeper.timers.disk_limits, Some(deadline));
    assert!(bench.keeper.devices.are_disks_limited());
    bench.pass(Duration::from_secs(5)).unwrap();
    assert_eq!(bench.keeper.timers.disk_limits, None);
    assert!(!bench.keeper.devices.are_disks_limited());
}
