use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::*;

fn begin(store: &Store, content: &[u8]) -> Result<Option<BlobWriter>, ContentError> {
    let give_up = || Err(ContentError::Missing(Digest::of(b"another process writes it")));
    store.begin(&Digest::of(content), content.len() as u64, "The blob", give_up)
}

fn names(store: &Store, folder: &str) -> Vec<String> {
    let entries = fs::read_dir(store.root().join(folder)).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn record(name: &str, content: &[u8]) -> Record {
    Record {
        reference: name.parse().unwrap(),
        manifest: Digest::of(content),
        manifest_size: content.len() as u64,
        media_type: crate::manifest::media::OCI_MANIFEST.into(),
        pinned: Digest::of(b"index"),
        pulled: std::time::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
    }
}

#[test]
fn the_store_is_for_this_user_alone() {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("a/images");
    let store = Store::open(&root).unwrap();
    store.put(&Digest::of(b"x"), b"x", "x").unwrap();
    store.set_reference(record("debian", b"x")).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    for folder in ["", "blobs", "blobs/sha256", "partial"] {
        assert_eq!(mode(&root.join(folder)), 0o700, "{folder}");
    }
    for file in ["index.json", "oci-layout"] {
        assert_eq!(mode(&root.join(file)), 0o600, "{file}");
    }
    assert_eq!(mode(&store.blob_path(&Digest::of(b"x"))), 0o600);
    fs::set_permissions(&root, Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(Store::open(&root), Err(ContentError::Trust(_))));
}

#[test]
fn stores_opened_at_once_are_one_store() {
    for _ in 0..50 {
        let home = tempfile::tempdir().unwrap();
        thread::scope(|scope| {
            for number in 0..8_u8 {
                let root = home.path();
                scope.spawn(move || {
                    let store = Store::open(root).unwrap();
                    store.put(&Digest::of(&[number]), &[number], "it").unwrap();
                });
            }
        });
        assert_eq!(fs::read(home.path().join("oci-layout")).unwrap(), LAYOUT);
        assert!(!home.path().join("oci-layout.new").exists());
    }
}

#[test]
fn a_layout_file_without_content_is_written_anew() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("oci-layout");
    for (found, wanted) in [("", LAYOUT), ("{}", LAYOUT), (r#"{"imageLayoutVersion": "1.0.0"}"#, b"")] {
        fs::write(&path, found).unwrap();
        Store::open(home.path()).unwrap();
        let wanted = if wanted.is_empty() { found.as_bytes() } else { wanted };
        assert_eq!(fs::read(&path).unwrap(), wanted);
    }
}

#[test]
fn a_blob_has_its_name_only_when_it_is_whole_and_right() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let (content, digest) = (b"hello world", Digest::of(b"hello world"));
    let mut writer = begin(&store, content).unwrap().unwrap();
    writer.write(b"hello ").unwrap();
    assert!(names(&store, "blobs/sha256").is_empty());
    drop(writer);
    let mut writer = begin(&store, content).unwrap().unwrap();
    assert_eq!((writer.length(), writer.is_resumed()), (6, true));
    assert!(matches!(begin(&store, content), Err(ContentError::Missing(_))), "one writer at a time");
    writer.write(b"world").unwrap();
    writer.finish().unwrap();
    assert!(names(&store, "partial").is_empty());
    assert!(store.has(&digest, 11).unwrap() && !store.has(&digest, 10).unwrap());
    assert_eq!(store.read(&digest, 11, "it").unwrap(), content);
    assert!(begin(&store, content).unwrap().is_none());
    assert!(matches!(store.read(&digest, 10, "it"), Err(ContentError::Size { .. })));
}

#[test]
fn what_is_wrong_or_too_long_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let mut writer = begin(&store, b"hello").unwrap().unwrap();
    writer.write(b"jello").unwrap();
    assert!(!writer.is_right());
    let error = writer.finish().unwrap_err().to_string();
    assert!(error.contains("The blob") && error.contains(&Digest::of(b"jello").to_string()), "{error}");
    assert!(names(&store, "partial").is_empty() && names(&store, "blobs/sha256").is_empty());
    let mut writer = begin(&store, b"hello").unwrap().unwrap();
    writer.write(b"hell").unwrap();
    assert!(matches!(writer.write(b"oo"), Err(ContentError::Size { found: 6, expected: 5, .. })));
    drop(writer);
    assert!(names(&store, "partial").is_empty());
    let mut writer = begin(&store, b"hello").unwrap().unwrap();
    writer.write(b"hell").unwrap();
    assert!(matches!(writer.finish(), Err(ContentError::Size { found: 4, .. })));
}

#[test]
fn a_longer_beginning_than_the_blob_is_forgotten() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    fs::write(store.partial_path(&Digest::of(b"hello")), b"hello and more").unwrap();
    let writer = begin(&store, b"hello").unwrap().unwrap();
    assert_eq!((writer.length(), writer.is_resumed()), (0, false));
    let outside = home.path().join("outside");
    fs::write(&outside, b"x").unwrap();
    std::os::unix::fs::symlink(&outside, store.partial_path(&Digest::of(b"link"))).unwrap();
    assert!(matches!(begin(&store, b"link"), Err(ContentError::Access(..))));
}

#[test]
fn a_blob_that_the_disk_changed_is_found_and_can_be_fetched_again() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let digest = Digest::of(b"hello");
    store.put(&digest, b"hello", "it").unwrap();
    fs::write(store.blob_path(&digest), b"jello").unwrap();
    assert!(matches!(store.read(&digest, 100, "it"), Err(ContentError::Mismatch { .. })));
    store.discard(&digest).unwrap();
    store.discard(&digest).unwrap();
    assert!(matches!(store.read(&digest, 100, "it"), Err(ContentError::Missing(_))));
    store.put(&digest, b"hello", "it").unwrap();
    assert!(store.put(&Digest::of(b"x"), b"hello", "it").is_err());
}

#[test]
fn the_second_writer_waits_and_uses_what_the_first_one_wrote() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    for round in 0..100_u8 {
        let content = vec![round; 1000];
        let written = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let wait = || {
                        thread::yield_now();
                        Ok::<_, ContentError>(())
                    };
                    let begun = store.begin(&Digest::of(&content), 1000, "it", wait).unwrap();
                    if let Some(mut writer) = begun {
                        content.chunks(100).for_each(|chunk| writer.write(chunk).unwrap());
                        writer.finish().unwrap();
                        written.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(written.into_inner(), 1);
        assert_eq!(store.read(&Digest::of(&content), 1000, "it").unwrap(), content);
    }
    assert!(names(&store, "partial").is_empty());
}

#[test]
fn references_lead_where_they_were_set_to() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    assert_eq!(store.references().unwrap(), []);
    let (one, other) = (record("debian", b"1"), record("alpine:3", b"2"));
    store.set_reference(one.clone()).unwrap();
    store.set_reference(other.clone()).unwrap();
    assert_eq!(store.references().unwrap(), [other.clone(), one.clone()]);
    let newer = Record { pinned: Digest::of(b"3"), manifest: Digest::of(b"3"), ..one };
    store.set_reference(newer.clone()).unwrap();
    assert_eq!(store.reference(&"debian:latest".parse().unwrap()).unwrap(), Some(newer));
    assert!(store.remove_reference(&"alpine:3".parse().unwrap()).unwrap());
    assert!(!store.remove_reference(&"alpine:3".parse().unwrap()).unwrap());
    assert_eq!(store.references().unwrap().len(), 1);
    fs::write(home.path().join("index.json"), "{").unwrap();
    assert!(matches!(store.set_reference(other), Err(ContentError::Index(..))), "nothing is lost by chance");
}

#[test]
fn what_other_programs_wrote_stays_and_so_do_its_blobs() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let put = |content: &str| {
        store.put(&Digest::of(content.as_bytes()), content.as_bytes(), "it").unwrap();
        Digest::of(content.as_bytes())
    };
    let (layer, lost, newer) = (put("layer"), put("lost"), put("newer"));
    let manifest = put(&format!(r#"{{"kind":"of tomorrow","parts":[{{"digest":"{layer}"}}]}}"#));
    let index = put(&format!(r#"{{"schemaVersion":2,"manifests":[{{"digest":"{manifest}"}}]}}"#));
    let unknown = [
        // Without a name, as skopeo does it.
        format!(r#"{{"mediaType":"m","digest":"{index}","size":1,"platform":{{"os":"linux"}}}}"#),
        format!(
            r#"{{"mediaType":"m","digest":"{newer}","size":1,"annotations":{{"{}":"::tomorrow::"}}}}"#,
            "org.opencontainers.image.ref.name"
        ),
        format!(r#"{{"mediaType":"m","digest":"sha999:12","size":1,"data":["{newer}"]}}"#),
        r#""no entry at all""#.to_owned(),
    ];
    let text =
        format!(r#"{{"schemaVersion":2,"manifests":[{}],"annotations":{{"a":"b"}}}}"#, unknown.join(","));
    fs::write(home.path().join("index.json"), &text).unwrap();
    store.set_reference(record("debian", b"x")).unwrap();
    store.set_reference(record("alpine", b"y")).unwrap();
    assert_eq!(store.references().unwrap().len(), 2);
    for name in ["debian", "alpine"] {
        assert!(store.remove_reference(&name.parse().unwrap()).unwrap());
    }
    let read = |text: &[u8]| serde_json::from_slice::<serde_json::Value>(text).unwrap();
    assert_eq!(read(&fs::read(home.path().join("index.json")).unwrap()), read(text.as_bytes()));
    assert_eq!(store.sweep(&store.alone().unwrap(), |_| false).unwrap(), 4);
    assert!(!store.has(&lost, 4).unwrap());
    for kept in [layer, newer, manifest, index] {
        assert!(store.blob_path(&kept).exists(), "{kept}");
    }
}

#[test]
fn references_set_at_once_are_all_there() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    thread::scope(|scope| {
        for number in 0..16 {
            let store = &store;
            scope.spawn(move || store.set_reference(record(&format!("image{number}"), b"x")).unwrap());
        }
    });
    assert_eq!(store.references().unwrap().len(), 16);
}

/// How much processor time this thread has used, in hundredths of a second.
fn processor_time() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields: Vec<&str> = text.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn waiting_takes_no_processor_and_is_cancelled() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let writer = begin(&store, b"hello").unwrap().unwrap();
    let (shared, alone) =
        (store.use_blobs().unwrap(), store.locked("lock", FlockOperation::NonBlockingLockShared));
    let (sender, ended) = std::sync::mpsc::channel();
    let cancel = Cancel::default();
    let wait = |work: fn(&Store) -> Result<(), ContentError>| {
        let (store, sender) = (store.clone().with_cancel(cancel.clone()), sender.clone());
        // Not scoped: what is never cancelled must not keep the test.
        thread::spawn(move || sender.send((work(&store), processor_time())));
    };
    wait(|store| store.put(&Digest::of(b"hello"), b"hello", "it"));
    wait(|store| store.alone().and_then(|alone| store.sweep(&alone, |_| true)).map(drop));
    wait(|store| store.set_reference(record("debian", b"x")));
    assert!(ended.recv_timeout(Duration::from_millis(500)).is_err(), "all of them wait");
    cancel.cancel();
    for _ in 0..3 {
        let (result, used) = ended.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(matches!(result, Err(ContentError::Cancelled)), "{result:?}");
        assert!(used < 15, "{used} hundredths of a second");
    }
    drop((writer, shared, alone));
    // Nobody else is in the way any more: what is cancelled and needs not wait, is done.
    store.with_cancel(cancel).put(&Digest::of(b"hello"), b"hello", "it").unwrap();
}

#[test]
fn a_sweep_keeps_what_is_wanted_and_waits_for_who_adds_blobs() {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let (kept, gone) = (Digest::of(b"kept"), Digest::of(b"gone"));
    store.put(&kept, b"kept", "it").unwrap();
    store.put(&gone, b"gone", "it").unwrap();
    begin(&store, b"partly").unwrap().unwrap().write(b"part").unwrap();
    fs::write(home.path().join("blobs/sha256/stranger"), "12").unwrap();
    let in_use = store.use_blobs().unwrap();
    thread::scope(|scope| {
        let swept = scope.spawn(|| store.sweep(&store.alone().unwrap(), |digest| *digest == kept).unwrap());
        thread::sleep(Duration::from_millis(50));
        assert!(!swept.is_finished() && store.has(&gone, 4).unwrap());
        drop(in_use);
        assert_eq!(swept.join().unwrap(), 4 + 4 + 2);
    });
    assert!(store.has(&kept, 4).unwrap() && !store.has(&gone, 4).unwrap());
    assert!(names(&store, "partial").is_empty());
}
