//! The reader of ClientHellos: no input makes it panic, and how the input is cut changes nothing.
#![no_main]

use bathy_fuzz::Input;
use bathy_gateway::hello::{Hello, HelloReader, SecondHello};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let (choice, cut) = (input.u8(), usize::from(input.u8()) + 1);
    let rest = input.take(usize::MAX);
    // As they are, or as the inside of a hello in records, which is further than most inputs would come.
    let bytes = if choice & 1 == 0 { rest.to_vec() } else { records(rest, usize::from(choice) + 1) };

    let whole = HelloReader::new().push(&bytes);
    let mut reader = HelloReader::new();
    let cut_up = bytes.chunks(cut).fold(Hello::More, |_, piece| reader.push(piece));
    assert_eq!(whole, cut_up);

    let Hello::Read(first) = whole else { return };
    let whole = SecondHello::new(&first).push(&bytes);
    let mut second = SecondHello::new(&first);
    let cut_up = bytes.chunks(cut).map(|piece| second.push(piece)).last();
    assert_eq!(Some(whole), cut_up);
    assert_eq!(whole, Ok(false), "the same hello again says the same");
});

fn records(body: &[u8], size: usize) -> Vec<u8> {
    let length = u32::try_from(body.len()).expect("inputs are short").to_be_bytes();
    let message = [&[1], &length[1..], body].concat();
    let record = |piece: &[u8]| {
        let length = u16::try_from(piece.len()).expect("a piece is short").to_be_bytes();
        [&[22, 3, 1], &length[..], piece].concat()
    };
    message.chunks(size).flat_map(record).collect()
}
