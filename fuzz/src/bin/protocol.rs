//! The frame decoder, the messages and a gateway's counts: no input makes them panic, and what decodes encodes to the same meaning.
#![no_main]

use bathy_protocol::message::{decode, encode};
use bathy_protocol::{Channel, Decoder, FromKeeper, MAX_PAYLOAD, ToHost, counts};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut decoder = Decoder::new(MAX_PAYLOAD);
    // The first byte says how the rest is cut into pieces.
    let Some((cut, bytes)) = data.split_first() else { return };
    for piece in bytes.chunks(usize::from(*cut) + 1) {
        decoder.push(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => {
                    assert!(frame.payload.len() <= MAX_PAYLOAD as usize);
                    if frame.channel == Channel::Control {
                        let _ = decode::<FromKeeper>(frame.payload);
                    }
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
    assert!(counts::read(bytes).count() <= bytes.len() / 24);
    if let Ok(message) = decode::<ToHost>(bytes) {
        let mut wire = Vec::new();
        encode(1, &message, &mut wire).expect("what decodes encodes");
        let mut decoder = Decoder::new(MAX_PAYLOAD);
        decoder.push(&wire);
        let frame = decoder.next_frame().expect("it is well formed").expect("it is whole");
        assert_eq!(decode::<ToHost>(frame.payload), Ok(message));
    }
});
