//! Servers and connections that fail, and what of it is made good.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bathy_registry::{Cancel, Client, Digest, Event, Keychain, Options};

use crate::image::{Image, layer, noise};
use crate::server::{Asked, Reply, Server, Step, head, reply};
use crate::{assert_nothing, client, example, names, options, pull, refused, store_in};

const SIZE: usize = 3 << 20;
const CUT: usize = 1 << 20;
/// Longer than any test waits.
const LONG: Duration = Duration::from_secs(60);

fn image() -> Image {
    Image::new(vec![layer("one"), noise(1, SIZE)])
}

/// Sends `blob` from where it was asked for to `end`, and closes the connection.
fn cut_at(blob: &[u8], asked: &Asked, end: usize) -> Reply {
    let from = asked.from();
    let range = format!("bytes {from}-{}/{}", blob.len() - 1, blob.len());
    let (status, headers) = if from > 0 {
        ("206 Partial Content", vec![("Content-Range", range.as_str())])
    } else {
        ("200 OK", vec![])
    };
    let head = head(status, &headers, blob.len() - from);
    vec![Step::Send(head), Step::Send(blob[from..end].to_vec()), Step::Close]
}

fn is_large(asked: &Asked, image: &Image) -> bool {
    asked.target.ends_with(&Digest::of(&image.layers[1]).to_string())
}

#[test]
fn a_blob_is_continued_where_it_was_cut() {
    let image = image();
    let (hosted, cuts) = (image.clone(), AtomicUsize::new(0));
    let server = Server::hosting(&image, move |asked| {
        let cut = is_large(asked, &hosted) && cuts.fetch_add(1, Ordering::SeqCst) < 2;
        cut.then(|| cut_at(&hosted.layers[1], asked, asked.from() + CUT))
    });
    let folder = tempfile::tempdir().unwrap();
    pull(&client(), &store_in(folder.path()), &server.reference()).unwrap();
    let blobs: Vec<usize> =
        server.asked().iter().filter(|asked| is_large(asked, &image)).map(Asked::from).collect();
    assert_eq!(blobs, [0, CUT, 2 * CUT]);
}

#[test]
fn a_server_without_ranges_sends_it_once_more() {
    let image = image();
    let (hosted, cuts) = (image.clone(), AtomicUsize::new(0));
    let server = Server::hosting(&image, move |asked| {
        let first = is_large(asked, &hosted) && cuts.fetch_add(1, Ordering::SeqCst) == 0;
        let whole = || reply("200 OK", &[], &hosted.layers[1]);
        is_large(asked, &hosted).then(|| if first { cut_at(&hosted.layers[1], asked, CUT) } else { whole() })
    });
    let folder = tempfile::tempdir().unwrap();
    pull(&client(), &store_in(folder.path()), &server.reference()).unwrap();
    let blobs: Vec<usize> =
        server.asked().iter().filter(|asked| is_large(asked, &image)).map(Asked::from).collect();
    assert_eq!(blobs, [0, CUT]);
}

#[test]
fn a_part_that_was_not_asked_for_is_refused_and_wrong_parts_are_replaced_as_a_whole() {
    let image = image();
    let hosted = image.clone();
    let server = Server::hosting(&image, move |asked| {
        let wrong = || reply("206 Partial Content", &[("Content-Range", "bytes 5-9/10")], b"wrong");
        let is_rest = asked.from() > 0;
        is_large(asked, &hosted)
            .then(|| if is_rest { wrong() } else { cut_at(&hosted.layers[1], asked, CUT) })
    });
    let folder = tempfile::tempdir().unwrap();
    let error = refused(&client(), &store_in(folder.path()), &server.reference());
    assert!(error.contains("with another part"), "{error}");
    // What says to be the rest, and is not.
    let (hosted, count) = (image.clone(), AtomicUsize::new(0));
    let server = Server::hosting(&image, move |asked| {
        if !is_large(asked, &hosted) || count.fetch_add(1, Ordering::SeqCst) > 1 {
            return None;
        }
        let mut other = hosted.layers[1].clone();
        other[SIZE - 1] ^= 1;
        let end = if asked.from() == 0 { CUT } else { SIZE };
        Some(cut_at(&other, asked, end))
    });
    let folder = tempfile::tempdir().unwrap();
    pull(&client(), &store_in(folder.path()), &server.reference()).unwrap();
    let blobs: Vec<usize> =
        server.asked().iter().filter(|asked| is_large(asked, &image)).map(Asked::from).collect();
    assert_eq!(blobs, [0, CUT, 0]);
}

/// What is said of a registry that answers for the large layer as `answer` wants with how often it was asked, and where
/// each request began. It gives up before the test does.
fn refusal_of(
    answer: impl Fn(&Asked, &Image, usize) -> Reply + Send + Sync + 'static,
) -> (String, Vec<usize>) {
    let image = image();
    let (hosted, count) = (image.clone(), AtomicUsize::new(0));
    let server = Server::hosting(&image, move |asked| {
        let number = is_large(asked, &hosted).then(|| count.fetch_add(1, Ordering::SeqCst))?;
        (number < 30).then(|| answer(asked, &hosted, number))
    });
    let folder = tempfile::tempdir().unwrap();
    let store = store_in(folder.path());
    let error = refused(&client(), &store, &server.reference());
    assert!(!store.has(&Digest::of(&image.layers[1]), SIZE as u64).unwrap());
    (error, server.asked().iter().filter(|asked| is_large(asked, &image)).map(Asked::from).collect())
}

#[test]
fn c5_wrong_parts_are_replaced_once() {
    let (error, blobs) = refusal_of(|asked, image, _| {
        let mut other = image.layers[1].clone();
        other[SIZE - 1] ^= 1;
        cut_at(&other, asked, if asked.from() == 0 { CUT } else { SIZE })
    });
    assert!(error.contains("wrong content"), "{error}");
    assert_eq!(blobs, [0, CUT, 0, CUT]);
}

#[test]
fn c5_a_blob_is_not_sent_anew_without_end() {
    let (error, blobs) = refusal_of(|asked, image, number| {
        let whole = Asked::default();
        let from = if number % 2 == 0 { &whole } else { asked };
        cut_at(&image.layers[1], from, from.from() + CUT)
    });
    assert!(error.contains("was cut"), "{error}");
    // The first time, and as often anew as something is tried again.
    assert_eq!(blobs, [0, CUT, 2 * CUT, CUT, 2 * CUT, CUT, 2 * CUT, CUT, 2 * CUT]);
}

#[test]
fn a_killed_pull_is_continued_by_the_next() {
    let image = image();
    let (hosted, count) = (image.clone(), AtomicUsize::new(0));
    let server = Server::hosting(&image, move |asked| {
        let first = is_large(asked, &hosted) && count.fetch_add(1, Ordering::SeqCst) == 0;
        let mut steps = first.then(|| cut_at(&hosted.layers[1], asked, CUT))?;
        steps.insert(2, Step::Pause(LONG));
        Some(steps)
    });
    let folder = tempfile::tempdir().unwrap();
    let store = store_in(folder.path());
    let digest = Digest::of(&image.layers[1]);
    let partial = store.root().join("partial").join(format!("sha256-{}", digest.hex()));
    let mut child = std::process::Command::new(example())
        .args([store.root().to_str().unwrap(), &server.reference(), "--insecure"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while partial.metadata().map_or(0, |found| found.len()) < CUT as u64 {
        assert!(began.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none());
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(store.references().unwrap(), []);
    assert!(!store.has(&digest, SIZE as u64).unwrap());
    pull(&client(), &store, &server.reference()).unwrap();
    assert_eq!(server.asked().iter().rfind(|asked| is_large(asked, &image)).unwrap().from(), CUT);
    assert!(names(&store, "partial").is_empty());
}

#[test]
fn a_beginning_that_is_not_the_beginning_is_replaced() {
    let image = image();
    let server = Server::hosting(&image, |_| None);
    let folder = tempfile::tempdir().unwrap();
    let store = store_in(folder.path());
    let digest = Digest::of(&image.layers[1]);
    for length in [CUT, SIZE] {
        let partial = store.root().join("partial").join(format!("sha256-{}", digest.hex()));
        std::fs::write(partial, vec![0; length]).unwrap();
        pull(&client(), &store, &server.reference()).unwrap();
        store.discard(&digest).unwrap();
    }
}

#[test]
fn a_busy_server_is_left_alone_as_long_as_it_asks() {
    let (image, count) = (image(), AtomicUsize::new(0));
    let server = Server::hosting(&image, move |_| {
        let number = count.fetch_add(1, Ordering::SeqCst);
        let busy = |status, header: &[(&str, &str)]| Some(reply(status, header, b"{}"));
        match number {
            0 => busy("429 Too Many Requests", &[("Retry-After", "1")]),
            1 => busy("503 Service Unavailable", &[]),
            2 => busy("502 Bad Gateway", &[("Retry-After", "Wed, 21 Oct 2015 07:28:00 GMT")]),
            _ => None,
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let (began, mut pauses) = (Instant::now(), Vec::new());
    let on_event = &mut |event: &Event| {
        if let Event::Retrying { after, .. } = event {
            pauses.push(*after);
        }
    };
    client().pull(&store_in(folder.path()), &server.reference().parse().unwrap(), on_event).unwrap();
    assert_eq!(pauses, [Duration::from_secs(1), Duration::from_millis(20), Duration::ZERO]);
    assert!(began.elapsed() >= Duration::from_secs(1));
}

const LIMIT: &[u8] = br#"{"errors":[{"code":"TOOMANYREQUESTS","message":"your limit"}]}"#;

#[test]
fn too_many_requests_for_too_long_is_said_at_once() {
    let server = Server::start(|_| reply("429 Too Many Requests", &[("Retry-After", "3600")], LIMIT));
    let folder = tempfile::tempdir().unwrap();
    let began = Instant::now();
    let error = refused(&client(), &store_in(folder.path()), &server.reference());
    assert!(
        error.ends_with("gets too many requests from here: \"your limit\". It asks to try again in 3600 s"),
        "{error}"
    );
    assert_eq!(server.asked().len(), 1);
    let server = Server::start(|_| {
        reply(
            "500 Internal Server Error",
            &[],
            br#"{"errors":[{"code":"X","message":"out of \u001b[31m order"}]}"#,
        )
    });
    let error = refused(&client(), &store_in(folder.path()), &server.reference());
    assert!(
        error.contains("500")
            && error.contains("asked for /v2/name/manifests/tag")
            && error.contains("order")
            && !error.contains('\u{1b}'),
        "{error}"
    );
    assert_eq!(server.asked().len(), 5);
    assert!(began.elapsed() < Duration::from_secs(30));
}

/// A client that gives up soon.
fn impatient() -> Client {
    let mut options = options();
    options.timeouts.idle = Duration::from_millis(300);
    options.retries.count = 1;
    Client::new(options, Keychain::empty())
}

#[test]
fn silence_and_trickles_are_given_up() {
    let image = image();
    let drop_by_drop = |bytes: Vec<u8>| -> Reply {
        bytes
            .into_iter()
            .flat_map(|byte| [Step::Send(vec![byte]), Step::Pause(Duration::from_millis(20))])
            .collect()
    };
    let hosted = image.clone();
    type Change = Box<dyn Fn(&Asked) -> Option<Reply> + Send + Sync>;
    let changes: [Change; 3] = [
        Box::new(|_| Some(vec![Step::Pause(LONG), Step::Close])),
        Box::new(move |_| Some(drop_by_drop(head("200 OK", &[], 10)))),
        Box::new(move |asked| {
            let content = hosted.layers[1][..500].to_vec();
            let mut steps = vec![Step::Send(head("200 OK", &[], SIZE))];
            steps.extend(drop_by_drop(content));
            is_large(asked, &hosted).then_some(steps)
        }),
    ];
    for change in changes {
        let server = Server::hosting(&image, change);
        let (folder, began) = (tempfile::tempdir().unwrap(), Instant::now());
        let error = refused(&impatient(), &store_in(folder.path()), &server.reference());
        assert!(error.contains("sends nothing, or next to nothing"), "{error}");
        assert!(began.elapsed() < LONG / 2, "{:?}", began.elapsed());
    }
}

#[test]
fn a_pull_is_cancelled_at_once_also_while_it_waits() {
    let image = image();
    let hosted = image.clone();
    let server = Server::hosting(&image, move |asked| {
        let stuck = || vec![Step::Send(head("200 OK", &[], SIZE)), Step::Pause(LONG), Step::Close];
        is_large(asked, &hosted).then(stuck)
    });
    let folder = tempfile::tempdir().unwrap();
    let (store, cancel) = (store_in(folder.path()), Cancel::default());
    let client = Client::new(Options { cancel: cancel.clone(), ..options() }, Keychain::empty());
    let digest = Digest::of(&image.layers[1]);
    let mut cancelled_at = None;
    let on_event = &mut |event: &Event| {
        if matches!(event, Event::Progress { digest: found, .. } if *found == digest) {
            cancel.cancel();
            cancelled_at = Some(Instant::now());
        }
    };
    let error = client.pull(&store, &server.reference().parse().unwrap(), on_event).unwrap_err();
    assert!(error.source.is_cancelled(), "{error:?}");
    // So is whatever comes after it.
    assert!(client.resolve(&server.reference().parse().unwrap()).unwrap_err().is_cancelled());
    assert!(cancelled_at.unwrap().elapsed() < LONG / 2);
    assert_eq!(store.references().unwrap(), []);
}

#[test]
fn one_failed_layer_ends_the_others() {
    let image = Image::new(vec![noise(1, SIZE), layer("broken"), noise(2, SIZE)]);
    let broken = Digest::of(&image.layers[1]).to_string();
    let large: BTreeMap<_, _> = [0, 2].map(|index| (Digest::of(&image.layers[index]).to_string(), ())).into();
    let server = Server::hosting(&image, move |asked| {
        let last = asked.target.rsplit('/').next().unwrap_or_default();
        if last == broken {
            return Some(vec![
                Step::Pause(Duration::from_millis(200)),
                Step::Send(head("403 Forbidden", &[], 2)),
                Step::Send(b"{}".to_vec()),
            ]);
        }
        let stuck = || vec![Step::Send(head("200 OK", &[], SIZE)), Step::Pause(LONG), Step::Close];
        large.contains_key(last).then(stuck)
    });
    let (folder, began) = (tempfile::tempdir().unwrap(), Instant::now());
    let error = refused(&client(), &store_in(folder.path()), &server.reference());
    assert!(error.contains("denies access"), "{error}");
    assert!(began.elapsed() < LONG / 2, "{:?}", began.elapsed());
}

#[test]
fn a_token_that_expired_is_replaced_once() {
    let image = Arc::new(image());
    let (tokens, hosted) = (Arc::new(AtomicUsize::new(0)), image.clone());
    let issued = tokens.clone();
    let issuer = Server::start(move |_| {
        let number = issued.fetch_add(1, Ordering::SeqCst) + 1;
        reply("200 OK", &[], format!(r#"{{"access_token":"t{number}"}}"#).as_bytes())
    });
    let realm = format!("Bearer realm=\"http://{}/token\",service=\"s\"", issuer.address);
    let (valid, blobs) = (tokens.clone(), image.blobs());
    let server = Server::start(move |asked| {
        // The first token is good for manifests only.
        let newest = valid.load(Ordering::SeqCst);
        let token =
            asked.header("authorization").and_then(|value| value.strip_prefix("Bearer t")?.parse().ok());
        let is_good = token == Some(newest) && (newest > 1 || asked.target.contains("manifests"));
        if is_good {
            crate::server::serve_image(&hosted, &blobs, asked)
        } else {
            reply("401 Unauthorized", &[("WWW-Authenticate", &realm)], b"{}")
        }
    });
    let folder = tempfile::tempdir().unwrap();
    pull(&client(), &store_in(folder.path()), &server.reference()).unwrap();
    assert_eq!(tokens.load(Ordering::SeqCst), 2);
    // One that never accepts any is not asked again and again.
    let realm = format!("Bearer realm=\"http://{}/token\"", issuer.address);
    let server = Server::start(move |_| reply("401 Unauthorized", &[("WWW-Authenticate", &realm)], b"{}"));
    let error = refused(&client(), &store_in(folder.path()), &format!("{}/other:tag", server.address));
    assert!(error.contains("bathy login"), "{error}");
    assert_eq!(server.asked().len(), 2);
}

#[test]
fn a_blob_that_ends_early_is_not_taken_for_whole() {
    let image = image();
    let digest = Digest::of(&image.layers[1]);
    let hosted = image.clone();
    // Without a length, the end of the connection is the end of the blob.
    let server = Server::hosting(&image, move |asked| {
        let head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n".to_vec();
        is_large(asked, &hosted)
            .then(|| vec![Step::Send(head), Step::Send(hosted.layers[1][..CUT].to_vec()), Step::Close])
    });
    let folder = tempfile::tempdir().unwrap();
    let store = store_in(folder.path());
    let error = refused(&client(), &store, &server.reference());
    assert!(error.contains(&format!("{CUT} of {SIZE} bytes")), "{error}");
    assert!(!store.has(&digest, SIZE as u64).unwrap());
    store.sweep(&store.alone().unwrap(), |_| false).unwrap();
    assert_nothing(&store, digest.hex());
}
