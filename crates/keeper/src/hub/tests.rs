use bathy_protocol::cell::{Cell, ContextsRequest, Language};
use bathy_protocol::frame;
use bathy_protocol::message::decode;
use bathy_protocol::{
    Answer, CopyDirection, Exec, Exit, Ready, RefusalKind, Refused, Request, ToHost, ToKeeper, Transfer,
    Work, WorkEnd,
};

use super::*;

const NOW: u64 = 7;
/// A client besides the owner.
const OTHER: ClientId = 5;

fn message<M: Serialize>(stream: u32, message: &M) -> Vec<u8> {
    let mut wire = Vec::new();
    encode(stream, message, &mut wire).unwrap();
    wire
}

fn data(stream: u32, channel: Channel, length: usize) -> Vec<u8> {
    let mut wire = Vec::new();
    frame::encode(stream, channel, &vec![b'x'; length], &mut wire);
    wire
}

fn start(tag: u64, job: Option<u32>) -> Request {
    Request::Start { work: Work::Exec(Exec::default()), tag, job }
}

fn ready(epoch: u64) -> ToHost {
    ToHost::Ready(Ready {
        version: VERSION,
        epoch,
        kernel: "test".to_owned(),
        pid1_unix_ns: 1,
        mounted_unix_ns: 2,
        running: Vec::new(),
    })
}

fn ready_hub() -> Hub {
    let mut hub = Hub::new(Timeline::default(), None);
    hub.greet(NOW).unwrap();
    hub.on_guest_bytes(&message(CONNECTION, &ready(1)), NOW).unwrap();
    hub
}

/// A hub whose guest is ready and runs one command of the owner on stream 1.
fn hub() -> Hub {
    let mut hub = ready_hub();
    hub.on_client_bytes(OWNER, &message(1, &start(1, None))).unwrap();
    hub
}

/// Everything that waits for the guest, as messages.
fn sent(hub: &mut Hub) -> Vec<(u32, ToGuest)> {
    let mut decoder = Decoder::new(MAX_REQUEST);
    decoder.push(hub.for_guest());
    hub.guest_took(hub.for_guest().len());
    let mut messages = Vec::new();
    while let Some(frame) = decoder.next_frame().unwrap() {
        messages.push((frame.stream, decode(frame.payload).unwrap()));
    }
    messages
}

/// Everything that waits for a client, as answers and bytes; the keeper's own messages are left out.
fn answers(hub: &mut Hub, client: ClientId) -> Vec<(u32, Option<Answer>)> {
    let mut decoder = Decoder::new(MAX_REQUEST);
    decoder.push(hub.for_client(client));
    hub.client_took(client, hub.for_client(client).len());
    let mut messages = Vec::new();
    while let Some(frame) = decoder.next_frame().unwrap() {
        match (frame.stream, frame.channel) {
            (CONNECTION, _) => {}
            (stream, Channel::Control) => messages.push((stream, Some(decode(frame.payload).unwrap()))),
            (stream, _) => messages.push((stream, None)),
        }
    }
    messages
}

#[test]
fn requests_wait_for_the_greeting() {
    let mut hub = Hub::new(Timeline::default(), None);
    hub.on_client_bytes(OWNER, &message(1, &start(1, None))).unwrap();
    assert!(hub.for_guest().is_empty());
    hub.greet(NOW).unwrap();
    assert!(matches!(sent(&mut hub)[..], [(CONNECTION, ToGuest::Hello(_)), (1, ToGuest::Exec(_))]));
}

#[test]
fn c1_output_beyond_the_window_is_a_violation() {
    let mut hub = hub();
    hub.on_guest_bytes(&data(1, Channel::Stdout, INITIAL_WINDOW as usize), NOW).unwrap();
    let error = hub.on_guest_bytes(&data(1, Channel::Stdout, 1), NOW).unwrap_err();
    assert!(matches!(error, HubError::Window(_)), "{error}");
}

#[test]
fn each_output_has_a_window_of_its_own() {
    let mut hub = hub();
    hub.on_guest_bytes(&data(1, Channel::Stdout, INITIAL_WINDOW as usize), NOW).unwrap();
    hub.on_guest_bytes(&data(1, Channel::Stderr, INITIAL_WINDOW as usize), NOW).unwrap();
    let grant = Request::Grant { channel: StdChannel::Stdout, bytes: 10 };
    hub.on_client_bytes(OWNER, &message(1, &grant)).unwrap();
    hub.on_guest_bytes(&data(1, Channel::Stdout, 10), NOW).unwrap();
    assert!(hub.on_guest_bytes(&data(1, Channel::Stderr, 1), NOW).is_err());
}

#[test]
fn c1_wrong_streams_and_directions_are_violations() {
    let cases = [
        data(2, Channel::Stdout, 1),
        data(1, Channel::Stdin, 1),
        data(1, Channel::Stdout, 0),
        message(2, &ToHost::Exited(Exit::Code(0))),
        message(1, &ready(1)),
        message(1, &ToHost::Grant { bytes: 0 }),
        message(CONNECTION, &ToHost::Exited(Exit::Code(0))),
        // A second answer to the same greeting, and one to a greeting that never was.
        message(CONNECTION, &ready(1)),
        message(CONNECTION, &ready(9)),
    ];
    for (number, wire) in cases.into_iter().enumerate() {
        assert!(hub().on_guest_bytes(&wire, NOW).is_err(), "case {number}");
    }
}

#[test]
fn c1_a_stream_is_over_when_its_command_is() {
    let mut hub = hub();
    hub.on_guest_bytes(&message(1, &ToHost::Exited(Exit::Code(0))), NOW).unwrap();
    assert!(hub.on_guest_bytes(&message(1, &ToHost::Exited(Exit::Code(1))), NOW).is_err());
}

#[test]
fn c1_messages_that_no_window_counts_may_come_once() {
    for repeated in [ToHost::Started { pid: 1 }, ToHost::Eof(StdChannel::Stdout)] {
        let mut hub = hub();
        hub.on_guest_bytes(&message(1, &repeated), NOW).unwrap();
        let error = hub.on_guest_bytes(&message(1, &repeated), NOW).unwrap_err();
        assert!(matches!(error, HubError::Repeated(1)), "{error}");
    }
}

#[test]
fn another_version_is_refused() {
    let mut hub = Hub::new(Timeline::default(), None);
    hub.greet(NOW).unwrap();
    let ToHost::Ready(answer) = ready(1) else { unreachable!() };
    let other = ToHost::Ready(Ready { version: VERSION + 1, ..answer });
    assert!(matches!(hub.on_guest_bytes(&message(CONNECTION, &other), NOW), Err(HubError::Version(_))));
}

#[test]
fn a_client_cannot_open_more_streams_than_there_are() {
    let mut hub = hub();
    for stream in 2..=u32::try_from(MAX_STREAMS).unwrap() {
        hub.on_client_bytes(OWNER, &message(stream, &start(1, None))).unwrap();
    }
    hub.on_client_bytes(OWNER, &message(1000, &start(1, None))).unwrap();
    assert!(matches!(answers(&mut hub, OWNER)[..], [(1000, Some(Answer::Refused(_)))]));
    assert!(matches!(
        hub.on_client_bytes(OWNER, &message(1, &start(1, None))),
        Err(HubError::StreamInUse(1))
    ));
}

fn every_kind_of_work() -> [Work; 4] {
    let transfer =
        Transfer { direction: CopyDirection::OutOfGuest, path: vec![], name: vec![], user: String::new() };
    let cell = Cell {
        context: "python".into(),
        language: Language::Python,
        make: None,
        restricted: None,
        code: String::new(),
        env: Vec::new(),
        cwd: None,
        timeout_ms: 0,
        grace_ms: 0,
        max_output: 0,
    };
    let (exec, contexts) = (Work::Exec(Exec::default()), Work::Contexts(ContextsRequest::List));
    [exec, Work::Transfer(transfer), Work::Cell(cell), contexts]
}

#[test]
fn r11_an_answer_is_due_until_the_work_has_started_whatever_it_is() {
    for work in every_kind_of_work() {
        let mut hub = ready_hub();
        assert_eq!(hub.due(), Due::Nothing);
        let what = format!("{work:?}");
        hub.on_client_bytes(OWNER, &message(1, &Request::Start { work, tag: 1, job: None })).unwrap();
        assert_eq!(hub.due(), Due::Answer, "{what}");
        hub.on_guest_bytes(&message(1, &ToHost::Started { pid: 9 }), NOW).unwrap();
        assert_eq!(hub.due(), Due::SignOfLife, "{what}");
        hub.on_guest_bytes(&message(1, &ToHost::Exited(Exit::Code(0))), NOW).unwrap();
        assert_eq!(hub.due(), Due::Nothing, "{what}");
    }
}

#[test]
fn a_ping_is_sent_once_and_answered_once() {
    let mut hub = hub();
    hub.on_guest_bytes(&message(1, &ToHost::Started { pid: 9 }), NOW).unwrap();
    sent(&mut hub);
    hub.ping();
    hub.ping();
    assert_eq!(sent(&mut hub), [(CONNECTION, ToGuest::Ping)]);
    assert_eq!(hub.due(), Due::Answer);
    // Something else that is said is no answer to it.
    hub.on_guest_bytes(&data(1, Channel::Stdout, 1), NOW).unwrap();
    assert_eq!(hub.due(), Due::Answer);
    hub.on_guest_bytes(&message(CONNECTION, &ToHost::Pong), NOW).unwrap();
    assert_eq!(hub.due(), Due::SignOfLife);
    assert!(matches!(
        hub.on_guest_bytes(&message(CONNECTION, &ToHost::Pong), NOW),
        Err(HubError::Repeated(0))
    ));
}

#[test]
fn clients_choose_their_own_numbers_and_receive_only_their_own_streams() {
    let mut hub = hub();
    assert!(hub.add_client(OTHER));
    hub.on_client_bytes(OTHER, &message(1, &start(2, None))).unwrap();
    assert!(matches!(sent(&mut hub)[..], [(0, _), (1, ToGuest::Exec(_)), (2, ToGuest::Exec(_))]));
    hub.on_guest_bytes(&data(2, Channel::Stdout, 3), NOW).unwrap();
    hub.on_guest_bytes(&message(1, &ToHost::Started { pid: 9 }), NOW).unwrap();
    assert_eq!(answers(&mut hub, OTHER), [(1, None)]);
    assert_eq!(answers(&mut hub, OWNER), [(1, Some(Answer::Started { pid: 9 }))]);
}

#[test]
fn what_a_lost_client_started_is_ended_and_its_jobs_go_on() {
    let mut hub = ready_hub();
    assert!(hub.add_client(OTHER));
    hub.on_client_bytes(OTHER, &message(1, &start(1, None))).unwrap();
    hub.on_client_bytes(OTHER, &message(2, &start(2, Some(7)))).unwrap();
    hub.on_guest_bytes(&data(2, Channel::Stdout, 1000), NOW).unwrap();
    sent(&mut hub);
    hub.drop_client(OTHER);
    // What the client did not grant is granted for it, or the job would wait for ever.
    let grant = ToGuest::Grant { channel: StdChannel::Stdout, bytes: 1000 };
    assert_eq!(sent(&mut hub), [(1, ToGuest::Abandon), (2, grant)]);
    hub.on_guest_bytes(&data(2, Channel::Stdout, INITIAL_WINDOW as usize), NOW).unwrap();
    let logged: usize = hub.take_logged().iter().map(|logged| logged.bytes.len()).sum();
    assert_eq!(logged, INITIAL_WINDOW as usize + 1000);
}

#[test]
fn r4_a_job_that_nobody_reads_is_slowed_down_to_the_logs_rate() {
    let mut hub = ready_hub();
    hub.on_client_bytes(OWNER, &message(1, &start(1, Some(0)))).unwrap();
    hub.on_client_bytes(OWNER, &message(1, &Request::Detach)).unwrap();
    let mut taken = 0;
    while hub.on_guest_bytes(&data(1, Channel::Stdout, 4096), NOW).is_ok() {
        taken += 4096;
        assert!(taken <= 2 * LOGGED_PER_PERIOD, "the rate is exceeded");
    }
    assert!(taken >= LOGGED_PER_PERIOD && hub.owes_grants());
}

#[test]
fn c1_a_guests_longest_message_is_truncated_to_fit() {
    let mut hub = ready_hub();
    hub.on_client_bytes(OWNER, &message(1, &start(u64::MAX, Some(u32::MAX)))).unwrap();
    // Almost all that a frame can hold, of characters that are longer than a byte.
    let words = "é".repeat(32_760);
    let refused = Refused { kind: RefusalKind::NotFound, message: words };
    hub.on_guest_bytes(&message(1, &ToHost::Refused(refused)), NOW).unwrap();
    let received = answers(&mut hub, OWNER);
    let refusal = |(stream, answer): &(u32, Option<Answer>)| {
        *stream == 1 && matches!(answer, Some(Answer::Refused(refused)) if refused.message.len() == 4096)
    };
    assert!(received.iter().any(refusal), "{received:?}");
}

#[test]
fn one_client_at_a_time_holds_a_job() {
    let mut hub = ready_hub();
    hub.on_client_bytes(OWNER, &message(1, &start(1, Some(3)))).unwrap();
    hub.on_client_bytes(OWNER, &data(1, Channel::Stdin, 100)).unwrap();
    assert!(hub.add_client(OTHER));
    hub.on_client_bytes(OTHER, &message(4, &Request::Attach { job: 3 })).unwrap();
    hub.on_client_bytes(OTHER, &message(5, &Request::Attach { job: 99 })).unwrap();
    hub.on_guest_bytes(&data(1, Channel::Stdout, 1), NOW).unwrap();
    assert_eq!(answers(&mut hub, OWNER), [(1, Some(Answer::TakenOver))]);
    let input = INITIAL_WINDOW - 100;
    let received = answers(&mut hub, OTHER);
    assert!(
        matches!(&received[..], [(4, Some(Answer::Attached { input: open })), (5, Some(Answer::Refused(_))), (4, None)] if *open == input),
        "{received:?}"
    );
}

#[test]
fn only_the_owner_may_send_to_the_keeper_itself() {
    let mut hub = ready_hub();
    assert!(hub.add_client(OTHER));
    let kill = message(CONNECTION, &ToKeeper::Kill);
    assert!(matches!(hub.on_client_bytes(OTHER, &kill), Err(HubError::NotOwner)));
    assert_eq!(hub.on_client_bytes(OWNER, &kill).unwrap(), [Demand::Kill]);
    let power_off = message(CONNECTION, &ToKeeper::PowerOff { grace_ms: 7 });
    assert_eq!(hub.on_client_bytes(OWNER, &power_off).unwrap(), [Demand::PowerOff { grace_ms: 7 }]);
}

#[test]
fn the_owner_receives_how_all_work_ended() {
    let mut hub = ready_hub();
    assert!(hub.add_client(OTHER));
    hub.on_client_bytes(OTHER, &message(1, &start(77, Some(2)))).unwrap();
    hub.client_took(OWNER, hub.for_client(OWNER).len());
    hub.on_guest_bytes(&message(1, &ToHost::Exited(Exit::Code(3))), NOW).unwrap();
    let mut decoder = Decoder::new(MAX_PAYLOAD);
    decoder.push(hub.for_client(OWNER));
    let frame = decoder.next_frame().unwrap().unwrap();
    let end = WorkEnd::Exited(Exit::Code(3));
    let received: FromKeeper = decode(frame.payload).unwrap();
    assert_eq!(received, FromKeeper::WorkEnded { tag: 77, job: Some(2), end });
}

#[test]
fn a_restricted_sandbox_restricts_every_command() {
    let restriction = Restriction { writable_root: false };
    let mut hub = Hub::new(Timeline::default(), Some(restriction));
    hub.greet(NOW).unwrap();
    hub.on_client_bytes(OWNER, &message(1, &start(1, None))).unwrap();
    let received = sent(&mut hub);
    let [_, (1, ToGuest::Exec(exec))] = &received[..] else { panic!("{received:?}") };
    assert_eq!(exec.restricted, Some(restriction));
}

#[test]
fn a_command_can_be_restricted_further_than_its_sandbox_and_not_less() {
    let (writable, read_only) = (Restriction { writable_root: true }, Restriction { writable_root: false });
    for (own, asked) in [(writable, read_only), (read_only, writable), (read_only, read_only)] {
        let mut hub = Hub::new(Timeline::default(), Some(own));
        hub.greet(NOW).unwrap();
        let mut request = start(1, None);
        if let Request::Start { work: Work::Exec(exec), .. } = &mut request {
            exec.restricted = Some(asked);
        }
        hub.on_client_bytes(OWNER, &message(1, &request)).unwrap();
        let received = sent(&mut hub);
        let [_, (1, ToGuest::Exec(exec))] = &received[..] else { panic!("{received:?}") };
        assert_eq!(exec.restricted, Some(read_only));
    }
}

#[test]
fn the_state_survives_being_saved() {
    let mut hub = hub();
    hub.on_guest_bytes(&data(1, Channel::Stdout, 5), NOW).unwrap();
    let saved = postcard::to_allocvec(&hub.state).unwrap();
    let mut restored = Hub { state: postcard::from_bytes(&saved).unwrap(), ..hub };
    restored.on_guest_bytes(&data(1, Channel::Stdout, INITIAL_WINDOW as usize - 5), NOW).unwrap();
    assert!(restored.on_guest_bytes(&data(1, Channel::Stdout, 1), NOW).is_err());
}

/// One-byte frames of an output, many more than are handled at once.
fn small_frames(count: usize) -> Vec<u8> {
    (0..count).flat_map(|_| data(1, Channel::Stdout, 1)).collect()
}

#[test]
fn c7_a_guest_that_sends_small_frames_leaves_others_their_turn() {
    let mut hub = hub();
    let many = 3 * MAX_FRAMES + 7;
    assert!(hub.add_client(OTHER));
    answers(&mut hub, OWNER);
    assert_eq!(hub.on_guest_bytes(&small_frames(many), NOW).unwrap(), MAX_FRAMES);
    assert!(hub.has_guest_backlog());
    assert_eq!(answers(&mut hub, OWNER).len(), MAX_FRAMES);
    // Another client has its turn in between.
    sent(&mut hub);
    hub.on_client_bytes(OTHER, &message(1, &start(2, None))).unwrap();
    assert!(matches!(sent(&mut hub)[..], [(2, ToGuest::Exec(_))]));
    // Nothing is lost, and nothing is left.
    let mut handled = MAX_FRAMES;
    while hub.has_guest_backlog() {
        handled += hub.on_guest_bytes(&[], NOW).unwrap();
    }
    assert_eq!((handled, answers(&mut hub, OWNER).len()), (many, many - MAX_FRAMES));
}

#[test]
fn c7_a_client_that_sends_small_frames_leaves_others_their_turn() {
    let mut hub = ready_hub();
    assert!(hub.add_client(OTHER));
    hub.on_client_bytes(OTHER, &message(1, &start(1, None))).unwrap();
    sent(&mut hub);
    let many = 2 * MAX_FRAMES + 7;
    let wire: Vec<u8> = (0..many).flat_map(|_| message(1, &Request::Signal(2))).collect();
    hub.on_client_bytes(OTHER, &wire).unwrap();
    assert_eq!(sent(&mut hub).len(), MAX_FRAMES);
    assert!(hub.has_backlog(OTHER));
    hub.on_client_bytes(OWNER, &message(1, &start(2, None))).unwrap();
    assert!(matches!(sent(&mut hub)[..], [(2, ToGuest::Exec(_))]));
    let mut signals = MAX_FRAMES;
    while hub.has_backlog(OTHER) {
        hub.on_client_bytes(OTHER, &[]).unwrap();
        signals += sent(&mut hub).len();
    }
    assert_eq!(signals, many);
}

#[test]
fn c7_a_turn_that_ends_with_the_last_frame_leaves_nothing_to_wait_for() {
    let mut hub = hub();
    let part_of_a_frame = &data(1, Channel::Stdout, 1)[..3];
    for rest in [&[][..], part_of_a_frame] {
        let wire = [&small_frames(MAX_FRAMES), rest].concat();
        assert_eq!(hub.on_guest_bytes(&wire, NOW).unwrap(), MAX_FRAMES);
        assert!(!hub.has_guest_backlog(), "no more would be taken from the guest, and nothing else handled");
    }
    assert!(hub.add_client(OTHER));
    let wire: Vec<u8> = (0..MAX_FRAMES).flat_map(|_| message(1, &Request::Signal(2))).collect();
    hub.on_client_bytes(OTHER, &wire).unwrap();
    assert!(!hub.has_backlog(OTHER));
}

#[test]
fn c7_output_in_small_frames_is_logged_in_one_piece() {
    let mut hub = ready_hub();
    hub.on_client_bytes(OWNER, &message(1, &start(1, Some(4)))).unwrap();
    hub.on_guest_bytes(&small_frames(MAX_FRAMES - 2), NOW).unwrap();
    hub.on_guest_bytes(&data(1, Channel::Stderr, 3), NOW).unwrap();
    let logged = hub.take_logged();
    let lengths: Vec<_> = logged.iter().map(|it| (it.channel, it.bytes.len())).collect();
    assert_eq!(lengths, [(StdChannel::Stdout, MAX_FRAMES - 2), (StdChannel::Stderr, 3)]);
}
