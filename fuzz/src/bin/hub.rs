//! The keeper's relay: whatever bytes a guest sends, and in whatever pieces, its buffers stay bounded and its client
//! only ever sees frames that decode.
#![no_main]

use bathy_fuzz::Input;
use bathy_keeper::hub::Hub;
use bathy_protocol::message::{decode, encode};
use bathy_protocol::{
    CONNECTION, Channel, Decoder, Exec, FromKeeper, INITIAL_WINDOW, MAX_PAYLOAD, MAX_STREAMS, StdChannel, Timeline,
    ToGuest, ToHost,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let mut hub = Hub::new(Timeline::default());
    hub.greet(1).expect("a greeting encodes");
    let mut client = Decoder::new(MAX_PAYLOAD);
    while !input.is_empty() {
        let stream = u32::from(input.u8() % 4) + 1;
        let mut request = Vec::new();
        match input.u8() % 6 {
            0 => encode(stream, &ToGuest::Exec(Exec::default()), &mut request).expect("it encodes"),
            1 => {
                let channel = if input.u8() % 2 == 0 { StdChannel::Stdout } else { StdChannel::Stderr };
                let grant = ToGuest::Grant { channel, bytes: input.u16().into() };
                encode(stream, &grant, &mut request).expect("it encodes");
            }
            _ => {
                let length = usize::from(input.u8());
                let bytes: Vec<u8> = (0..length).map(|_| input.u8()).collect();
                if hub.hear_guest(&bytes, 1).is_err() {
                    return;
                }
            }
        }
        if hub.hear_client(&request).is_err() {
            return;
        }
        let windows = MAX_STREAMS * 2 * INITIAL_WINDOW as usize;
        assert!(hub.for_client().len() <= windows + data.len() * 2, "more is kept than the windows allow");
        client.push(hub.for_client());
        hub.client_took(hub.for_client().len());
        while let Some(frame) = client.next_frame().expect("the client gets whole frames") {
            match (frame.stream, frame.channel) {
                (CONNECTION, _) => drop(decode::<FromKeeper>(frame.payload).expect("a message of the keeper")),
                (_, Channel::Control) => drop(decode::<ToHost>(frame.payload).expect("a message of the agent")),
                (_, Channel::Stdin) => panic!("input came back"),
                _ => {}
            }
        }
    }
});
