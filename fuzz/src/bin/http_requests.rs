//! The reader of HTTP requests: no input makes it panic, how the input is cut changes nothing, and what goes on is what came.
#![no_main]

use bathy_fuzz::Input;
use bathy_gateway::http::{HttpRefusal, RequestStream, Step};
use libfuzzer_sys::fuzz_target;

/// What servers answer to a WebSocket.
const ANSWERS: [&[u8]; 4] =
    [b"", b"HTTP/1.1 101 Yes\r\n", b"HTTP/1.1 100 Wait\r\n\r\nHTTP/1.1 200 No\r\n", b"\0\n"];

#[derive(Debug, Default, PartialEq)]
struct Followed {
    requests: Vec<String>,
    passed: Vec<u8>,
    opaque: bool,
    refused: Option<HttpRefusal>,
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let (answer, cut) = (input.choose(&ANSWERS), usize::from(input.u8()) + 1);
    let bytes = input.take(usize::MAX);
    let whole = follow([bytes].into_iter(), answer);
    assert_eq!(whole, follow(bytes.chunks(cut), answer));
    assert!(whole.passed.len() <= bytes.len());
    // Only the name of one header field is ever replaced, by one of the same length.
    let changed = whole.passed.iter().zip(bytes).filter(|(passed, given)| passed != given).count();
    assert!(changed <= 7 * bytes.len() / 9);
    assert!(!whole.requests.is_empty() || whole.passed.is_empty());
});

fn follow<'a>(pieces: impl Iterator<Item = &'a [u8]>, answer: &[u8]) -> Followed {
    let mut stream = RequestStream::new();
    let (mut pending, mut answered) = (Vec::new(), false);
    let mut followed = Followed::default();
    for piece in pieces {
        pending.extend_from_slice(piece);
        loop {
            match stream.read(&pending) {
                Ok(Step::Cleared(count)) => {
                    assert!(count > 0);
                    followed.passed.extend(pending.drain(..count));
                }
                Ok(Step::Decide(request)) => {
                    followed.requests.push(format!("{request:?}"));
                    stream.accept(&mut pending);
                }
                Ok(Step::Held) if !answered => {
                    answered = true;
                    stream.on_response(answer);
                }
                Ok(Step::More | Step::Held) => break,
                Err(refused) => {
                    followed.refused = Some(refused);
                    return followed;
                }
            }
        }
    }
    followed.opaque = stream.is_opaque();
    followed
}
