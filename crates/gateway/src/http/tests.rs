//! Request streams as clients and as request smugglers send them.

mod attacks;
mod clients;

use super::{HttpRefusal, RequestStream, Step};
use crate::hello::cuts::cuts;

/// What came of a stream whose every request was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Followed {
    /// The requests, each as METHOD HOST PATH.
    requests: Vec<String>,
    /// The bytes that were forwarded.
    passed: Vec<u8>,
    opaque: bool,
    refused: Option<HttpRefusal>,
}

/// Acts as the gateway: buffers what is not cleared, and forwards what is. The server responds with `answer` as
/// soon as the first request has begun to arrive.
fn follow_pieces(pieces: &[&[u8]], answer: &[u8]) -> Followed {
    let mut stream = RequestStream::new();
    let (mut pending, mut answered) = (Vec::new(), false);
    let mut followed = Followed { requests: Vec::new(), passed: Vec::new(), opaque: false, refused: None };
    for piece in pieces {
        pending.extend_from_slice(piece);
        loop {
            match stream.read(&pending) {
                Ok(Step::Cleared(count)) => {
                    assert!(count > 0 && count <= pending.len());
                    followed.passed.extend(pending.drain(..count));
                }
                Ok(Step::Decide(request)) => {
                    assert_eq!(
                        stream.read(&pending),
                        Ok(Step::Held),
                        "nothing is cleared before it was accepted"
                    );
                    let host =
                        request.authority.map_or_else(|| "-".to_owned(), |authority| authority.to_string());
                    let path = request.path.unwrap_or_else(|_| "?".to_owned());
                    followed.requests.push(format!("{} {host} {path}", request.method));
                    stream.accept(&mut pending);
                }
                Ok(Step::Held) if !answered && stream.wants_response() => {
                    answered = true;
                    answer.chunks(1).for_each(|byte| stream.on_response(byte));
                }
                Ok(Step::More | Step::Held) => break,
                Err(refused) => {
                    assert_eq!(stream.read(&pending), Err(refused.clone()), "a refusal is final");
                    followed.refused = Some(refused);
                    return followed;
                }
            }
        }
        assert!(pending.len() <= super::MAX_HEAD, "{} bytes are kept", pending.len());
    }
    followed.opaque = stream.is_opaque();
    followed
}

/// The same for every segmentation, which must not matter.
fn follow_answered(bytes: &[u8], answer: &[u8]) -> Followed {
    let mut all: Vec<_> = cuts(bytes).iter().map(|pieces| follow_pieces(pieces, answer)).collect();
    all.dedup();
    assert_eq!(all.len(), 1, "the pieces decide: {all:#?}");
    all.remove(0)
}

fn follow(bytes: &[u8]) -> Followed {
    follow_answered(bytes, b"")
}
