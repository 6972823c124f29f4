//! Parking: the guest is paused, its memory may be in a file, and only the owner is served.

use std::thread;

use bathy_protocol::{ToGuest, ToHost, Usage};
use vm_memory::{Bytes, GuestAddress};

use super::*;

const PARK: ToKeeper = ToKeeper::Park { release_memory: true };
/// A place in guest memory that no device uses.
const PLACE: GuestAddress = GuestAddress(6 << 20);

#[test]
fn parked_memory_is_free_and_comes_back() {
    let mut bench = Bench::ready(true);
    bench.guest.memory().write_slice(&[7; 1 << 20], PLACE).unwrap();
    let occupied = bench.keeper.parking.occupied_memory();
    for message in [PARK, ToKeeper::Usage, ToKeeper::Unpark] {
        bench.owner.send(CONNECTION, &message);
    }
    bench.settle();
    let messages = bench.sent_to_owner();
    let [FromKeeper::Parked { bytes: out }, FromKeeper::Usage(usage), FromKeeper::Parked { bytes: back }] =
        &messages[..]
    else {
        panic!("{messages:?}")
    };
    assert_eq!((*out, *back), (occupied, occupied));
    assert_eq!(usage, &Usage { memory: 0, disk: usage.disk, ..Usage::default() });
    let mut memory = vec![0; 1 << 20];
    bench.guest.memory().read_slice(&mut memory, PLACE).unwrap();
    assert!(memory.iter().all(|byte| *byte == 7));
}

#[test]
fn a_guest_goes_on_where_it_was_with_all_that_was_under_way() {
    let mut bench = Bench::ready(true);
    bench.owner.send(1, &start(7, None));
    bench.settle();
    // In the guest's queue when it is parked.
    bench.guest.send(1, &ToHost::Started { pid: 5 });
    bench.guest.output(1, Channel::Stdout, b"out");
    bench.owner.send(CONNECTION, &PARK);
    bench.owner.send(CONNECTION, &ToKeeper::Unpark);
    bench.settle();
    let answers: Vec<_> = bench
        .owner
        .receive()
        .into_iter()
        .filter(|received| !matches!(received, Received::Keeper(_)))
        .collect();
    let expected = [
        Received::Answer(1, Answer::Started { pid: 5 }),
        Received::Bytes(1, Channel::Stdout, b"out".to_vec()),
    ];
    assert_eq!(answers, expected);
    bench.owner.send(2, &start(8, None));
    bench.settle();
    let received = bench.guest.messages();
    assert!(matches!(received[..], [(1, ToGuest::Exec(_)), (2, ToGuest::Exec(_))]), "{received:?}");
}

#[test]
fn a_client_that_comes_while_the_guest_is_parked_is_served_afterwards() {
    let mut bench = Bench::ready(true);
    bench.owner.send(CONNECTION, &PARK);
    let mut client = bench.connect_unheeded();
    client.send(1, &start(7, None));
    bench.owner.send(CONNECTION, &ToKeeper::Unpark);
    bench.settle();
    assert!(matches!(client.receive()[..], [Received::Keeper(FromKeeper::Ready(_))]));
    assert!(matches!(bench.guest.messages()[..], [(1, ToGuest::Exec(_))]));
}

#[test]
fn a_guest_can_be_paused_without_moving_its_memory() {
    let mut bench = Bench::ready(true);
    bench.owner.send(CONNECTION, &ToKeeper::Park { release_memory: false });
    bench.owner.send(CONNECTION, &ToKeeper::Usage);
    bench.owner.send(CONNECTION, &ToKeeper::Unpark);
    bench.settle();
    let messages = bench.sent_to_owner();
    let [FromKeeper::Parked { bytes: 0 }, FromKeeper::Usage(usage), FromKeeper::Parked { bytes: 0 }] =
        &messages[..]
    else {
        panic!("{messages:?}")
    };
    assert!(usage.memory > 0);
}

#[test]
fn parking_twice_and_unparking_what_runs_change_nothing() {
    let mut bench = Bench::ready(true);
    for message in [ToKeeper::Unpark, PARK, PARK, ToKeeper::Unpark, ToKeeper::Unpark] {
        bench.owner.send(CONNECTION, &message);
    }
    bench.settle();
    let parked: Vec<_> = bench
        .sent_to_owner()
        .into_iter()
        .map(|message| match message {
            FromKeeper::Parked { bytes } => bytes > 0,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(parked, [false, true, false, true, false]);
}

#[test]
fn the_memory_of_an_ephemeral_sandbox_stays_where_it_is() {
    let mut bench = Bench::ready(false);
    bench.guest.memory().write_slice(&[7; 4096], PLACE).unwrap();
    bench.owner.send(CONNECTION, &PARK);
    bench.owner.send(CONNECTION, &ToKeeper::Unpark);
    bench.settle();
    let messages = bench.sent_to_owner();
    assert!(
        matches!(&messages[..], [FromKeeper::NotParked(reason), FromKeeper::Parked { bytes: 0 }] if reason.contains("not persistent")),
        "{messages:?}"
    );
    assert_eq!(bench.guest.memory().read_obj::<u8>(PLACE).unwrap(), 7);
}

#[test]
fn the_end_comes_while_the_guest_is_parked_too() {
    let mut killed = Bench::ready(true);
    killed.owner.send(CONNECTION, &PARK);
    killed.owner.send(CONNECTION, &ToKeeper::Kill);
    assert_eq!(killed.cause(), Cause::Killed);

    let mut left = Bench::ready(true);
    left.owner.send(CONNECTION, &PARK);
    left.owner.socket.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(matches!(left.end(), End::OwnerClosed));

    let mut exited = Bench::ready(true);
    exited.owner.send(CONNECTION, &PARK);
    let process = exited.guest.take_process();
    let exit = when_parked(&exited, move |_| process.exit(7));
    assert!(matches!(exited.end(), End::GuestExited));
    exit.join().unwrap();
    assert_eq!(exited.keeper.guest.cause(), Cause::GuestExited(7));
}

/// Does something in another thread when the guest is parked, while the loop of this one waits for it.
fn when_parked(bench: &Bench, act: impl FnOnce(&mut TestClient) + Send + 'static) -> thread::JoinHandle<()> {
    let socket = bench.owner.socket.try_clone().unwrap();
    let mut owner = TestClient { socket, decoder: Decoder::new(MAX_REQUEST) };
    thread::spawn(move || {
        while !owner.receive().iter().any(|it| matches!(it, Received::Keeper(FromKeeper::Parked { .. }))) {
            thread::yield_now();
        }
        act(&mut owner);
    })
}

#[test]
fn r11_the_time_for_which_a_guest_is_parked_is_no_silence_of_its_own() {
    let mut bench = Bench::ready(true);
    bench.owner.send(1, &start(7, None));
    bench.settle();
    bench.owner.send(CONNECTION, &PARK);
    let clock = bench.clock.clone();
    let unpark = when_parked(&bench, move |owner| {
        clock.set(clock.get() + Duration::from_secs(3600));
        owner.send(CONNECTION, &ToKeeper::Unpark);
    });
    bench.settle();
    unpark.join().unwrap();
    // From here on it counts again.
    bench.pass(Duration::from_secs(119)).unwrap();
    assert!(matches!(bench.pass(Duration::from_secs(1)), Err(End::Because(Cause::GuestCrashed(_)))));
}
