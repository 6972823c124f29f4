//! The keeper's relay: whatever bytes a guest sends, and in whatever pieces, its buffers stay bounded and its clients
//! only ever see frames that decode.
#![no_main]

use bathy_fuzz::Input;
use bathy_keeper::hub::{ClientId, Hub, OWNER};
use bathy_protocol::message::{decode, encode};
use bathy_protocol::{
    Answer, CONNECTION, Channel, Decoder, Exec, FromKeeper, INITIAL_WINDOW, MAX_PAYLOAD, MAX_STREAMS, Request,
    StdChannel, Timeline, Work,
};
use libfuzzer_sys::fuzz_target;

const OTHER: ClientId = 1;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let mut hub = Hub::new(Timeline::default(), None);
    hub.greet(1).expect("a greeting encodes");
    assert!(hub.add_client(OTHER));
    let mut decoders = [Decoder::new(MAX_PAYLOAD), Decoder::new(MAX_PAYLOAD)];
    while !input.is_empty() {
        let stream = u32::from(input.u8() % 4) + 1;
        let client = if input.u8() % 2 == 0 { OWNER } else { OTHER };
        let job = Some(u32::from(input.u8() % 3)).filter(|job| *job > 0);
        let request = match input.u8() % 9 {
            0 | 1 => Some(Request::Start { work: Work::Exec(Exec::default()), tag: 1, job }),
            2 => {
                let channel = if input.u8() % 2 == 0 { StdChannel::Stdout } else { StdChannel::Stderr };
                Some(Request::Grant { channel, bytes: input.u16().into() })
            }
            3 => job.map(|job| Request::Attach { job }),
            4 => Some(Request::Detach),
            _ => {
                let length = usize::from(input.u8());
                let bytes: Vec<u8> = (0..length).map(|_| input.u8()).collect();
                if hub.on_guest_bytes(&bytes, 1).is_err() {
                    return;
                }
                None
            }
        };
        if let Some(request) = request {
            let mut wire = Vec::new();
            encode(stream, &request, &mut wire).expect("it encodes");
            // A client that breaks the rules loses its connection.
            if hub.on_client_bytes(client, &wire).is_err() {
                return;
            }
        }
        hub.take_logged();
        hub.refill_log_budget();
        for (client, decoder) in [OWNER, OTHER].into_iter().zip(&mut decoders) {
            let windows = MAX_STREAMS * 2 * INITIAL_WINDOW as usize;
            let waiting = hub.for_client(client).len();
            assert!(waiting <= windows + data.len() * 16, "more is kept than the windows allow");
            decoder.push(hub.for_client(client));
            hub.client_took(client, waiting);
            while let Some(frame) = decoder.next_frame().expect("a client gets whole frames") {
                match (frame.stream, frame.channel) {
                    (CONNECTION, _) => drop(decode::<FromKeeper>(frame.payload).expect("a message of the keeper")),
                    (_, Channel::Control) => drop(decode::<Answer>(frame.payload).expect("an answer")),
                    (_, Channel::Stdin) => panic!("input came back"),
                    _ => {}
                }
            }
        }
    }
});
