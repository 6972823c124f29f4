//! Images that skopeo put into a real registry.

use std::fs;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::SystemTime;

use bathy_registry::manifest::{Compression, media};
use bathy_registry::{Client, Digest, Event, Keychain, Options, Pulled, Record, Store};

use crate::daemon::Daemon;
use crate::image::{Image, layer, noise, write_multi_arch};
use crate::{assert_nothing, client, names, options, pull, refused, run, store_in};

fn three_layers() -> Image {
    Image::new(vec![layer("one"), layer("two"), layer("three")])
}

/// A registry with `image` as `name:tag`, and an empty store.
fn filled(image: &Image) -> (Daemon, Store) {
    let daemon = Daemon::plain();
    let layout = daemon.folder.path().join("layout");
    image.write_layout(&layout, "it");
    daemon.fill(&layout, "it", "name:tag", &["--preserve-digests", "--dest-compress=false"]);
    let store = store_in(daemon.folder.path());
    (daemon, store)
}

fn inspected(daemon: &Daemon, name: &str, format: &str) -> String {
    let reference = format!("docker://{}", daemon.reference(name));
    let text = run("skopeo", &["inspect", "--tls-verify=false", "--format", format, &reference]);
    text.trim().to_owned()
}

fn assert_complete(store: &Store, pulled: &Pulled) {
    for layer in &pulled.layers {
        let content = fs::read(&layer.path).unwrap();
        assert_eq!(Digest::of(&content), layer.blob.digest);
        assert_eq!(layer.path, store.blob_path(&layer.blob.digest));
    }
    assert!(names(store, "partial").is_empty());
}

#[test]
fn an_image_is_pulled_by_tag_and_by_digest() {
    let image = three_layers();
    let (daemon, store) = filled(&image);
    let reference = daemon.reference("name:tag");
    let mut events = Vec::new();
    let on_event = &mut |event: &Event| events.push(event.clone());
    let pulled = client().pull(&store, &reference.parse().unwrap(), on_event).unwrap();
    assert_eq!(pulled.record.pinned.to_string(), inspected(&daemon, "name:tag", "{{.Digest}}"));
    assert_eq!(pulled.record.manifest, image.digest());
    assert_eq!(pulled.layers.len(), 3);
    assert_eq!(pulled.layers[1].diff_id, Digest::of(&layer("two")));
    assert_eq!(pulled.config.config.cmd, ["/bin/true"]);
    assert_complete(&store, &pulled);
    let all = |digest: &Digest| Event::Progress { digest: digest.clone(), done: 2048 };
    for layer in &pulled.layers {
        let digest = &layer.blob.digest;
        assert!(events.contains(&all(digest)) && events.contains(&Event::Done(digest.clone())), "{events:?}");
    }
    assert_eq!(events[0], Event::Resolved(image.digest()));
    // By digest, into another store.
    let other = Store::open(&daemon.folder.path().join("other")).unwrap();
    let by_digest = format!("{}@{}", daemon.reference("name"), image.digest());
    let again = pull(&client(), &other, &by_digest).unwrap();
    assert_eq!((again.record.pinned, again.manifest), (pulled.record.pinned, pulled.manifest));
    assert_eq!(client().resolve(&reference.parse().unwrap()).unwrap(), image.digest());
}

#[test]
fn what_was_pulled_is_a_layout_that_skopeo_reads() {
    let image = three_layers();
    let (daemon, store) = filled(&image);
    pull(&client(), &store, &daemon.reference("name:tag")).unwrap();
    let from = format!("oci:{}:{}", store.root().display(), daemon.reference("name:tag"));
    let to = daemon.folder.path().join("copied");
    run("skopeo", &["--insecure-policy", "copy", "-q", &from, &format!("dir:{}", to.display())]);
    assert_eq!(fs::read(to.join("manifest.json")).unwrap(), image.manifest);
}

#[test]
fn dockers_own_manifests_and_compressed_layers_are_pulled() {
    let pulled_of = |options: &[&str]| {
        // Each its own: skopeo would use the layers of the other one.
        let daemon = Daemon::plain();
        let (store, layout) = (store_in(daemon.folder.path()), daemon.folder.path().join("layout"));
        three_layers().write_layout(&layout, "it");
        daemon.fill(&layout, "it", "name:tag", options);
        let pulled = pull(&client(), &store, &daemon.reference("name:tag")).unwrap();
        assert_complete(&store, &pulled);
        assert_ne!(pulled.layers[0].blob.digest, pulled.layers[0].diff_id);
        pulled.manifest
    };
    let docker = pulled_of(&["--format", "v2s2", "--dest-compress"]);
    assert_eq!(docker.media_type, media::DOCKER_MANIFEST);
    assert_eq!(docker.layers[0].media_type, "application/vnd.docker.image.rootfs.diff.tar.gzip");
    let zstd = pulled_of(&["--dest-compress", "--dest-compress-format", "zstd"]);
    assert_eq!(zstd.layers[0].compression(), Some(Compression::Zstd));
}

#[test]
fn what_is_there_is_not_fetched_again_and_a_moved_tag_is_followed() {
    let image = three_layers();
    let (mut daemon, store) = filled(&image);
    let reference = daemon.reference("name:tag");
    let first = pull(&client(), &store, &reference).unwrap();
    // Without its blobs the registry can still say where the tag leads.
    let blob = daemon.blob(first.layers[0].blob.digest.hex());
    let content = fs::read(&blob).unwrap();
    fs::write(&blob, "gone").unwrap();
    pull(&client(), &store, &reference).unwrap();
    fs::write(&blob, content).unwrap();
    let newer = Image::new(vec![layer("one"), layer("four")]);
    let layout = daemon.folder.path().join("newer");
    newer.write_layout(&layout, "it");
    daemon.fill(&layout, "it", "name:tag", &["--preserve-digests", "--dest-compress=false"]);
    let second = pull(&client(), &store, &reference).unwrap();
    assert_eq!(second.record.manifest, newer.digest());
    assert_eq!(store.references().unwrap().len(), 1);
    // What only the old image has goes: two layers, a config, a manifest.
    let before = names(&store, "blobs/sha256").len();
    assert!(store.sweep(&store.alone().unwrap(), |_| false).unwrap() > 0);
    assert_eq!(names(&store, "blobs/sha256").len(), before - 4);
    assert_complete(&store, &second);
    pull(&client(), &store, &reference).unwrap();
    // By digest the registry is not needed at all.
    let by_digest = format!("{}@{}", daemon.reference("name"), newer.digest());
    pull(&client(), &store, &by_digest).unwrap();
    daemon.stop();
    pull(&client(), &store, &by_digest).unwrap();
    assert!(refused(&client(), &store, &reference).contains("Cannot connect"));
}

#[test]
fn the_platform_is_chosen_from_an_index() {
    let daemon = Daemon::plain();
    let layout = daemon.folder.path().join("layout");
    let index = write_multi_arch(&layout, "it", &["arm64", "amd64", "s390x"]);
    daemon.fill(&layout, "it", "name:tag", &["--all", "--preserve-digests"]);
    let store = store_in(daemon.folder.path());
    let pulled = pull(&client(), &store, &daemon.reference("name:tag")).unwrap();
    assert_eq!(pulled.record.pinned, index);
    assert_ne!(pulled.record.manifest, index);
    assert_eq!(pulled.config.architecture, "amd64");
    assert_eq!(pulled.layers[0].diff_id, Digest::of(&layer("amd64")));
    let record = store.reference(&pulled.record.reference).unwrap().unwrap();
    assert_eq!(record.pinned, index);
    // Of another platform alone, with an index and without.
    let layout = daemon.folder.path().join("arm");
    write_multi_arch(&layout, "it", &["arm64", "s390x"]);
    daemon.fill(&layout, "it", "arm:index", &["--all"]);
    let error = refused(&client(), &store, &daemon.reference("arm:index"));
    assert!(error.contains("not for linux/amd64. It exists for: linux/arm64, linux/s390x"), "{error}");
    let arm = Image::of_architecture(vec![layer("arm")], "arm64");
    arm.write_layout(&layout, "it");
    daemon.fill(&layout, "it", "arm:single", &[]);
    let error = refused(&client(), &store, &daemon.reference("arm:single"));
    assert!(error.contains("not for linux/amd64. It exists for: linux/arm64"), "{error}");
    assert_eq!(store.references().unwrap().len(), 1);
}

#[test]
fn what_the_registry_does_not_have_is_named() {
    let (mut daemon, store) = filled(&three_layers());
    let error = refused(&client(), &store, &daemon.reference("name:other"));
    assert!(error.contains("has nothing called other in name:"), "{error}");
    let error = refused(&client(), &store, &daemon.reference("no/such:tag"));
    assert!(error.contains("no/such") && error.starts_with("Cannot pull 127.0.0.1"), "{error}");
    let error = refused(&client(), &store, &format!("{}@{}", daemon.reference("name"), Digest::of(b"x")));
    assert!(error.contains(&Digest::of(b"x").to_string()), "{error}");
    daemon.stop();
    let error = refused(&client(), &store, &daemon.reference("name:tag"));
    assert!(error.contains("Cannot connect to 127.0.0.1") && error.contains("refused"), "{error}");
}

#[test]
fn c5_one_flipped_byte_is_refused_and_named() {
    let image = Image::new(vec![layer("one"), noise(1, 1 << 20)]);
    let (daemon, store) = filled(&image);
    let digest = Digest::of(&image.layers[1]);
    let blob = daemon.blob(digest.hex());
    let mut content = fs::read(&blob).unwrap();
    content[500_000] ^= 1;
    fs::write(&blob, &content).unwrap();
    let error = refused(&client(), &store, &daemon.reference("name:tag"));
    assert!(error.contains("Layer 2 of") && error.contains(&digest.to_string()), "{error}");
    assert!(error.contains(&Digest::of(&content).to_string()), "{error}");
    assert_nothing(&store, digest.hex());
    content[500_000] ^= 1;
    fs::write(&blob, &content).unwrap();
    pull(&client(), &store, &daemon.reference("name:tag")).unwrap();
}

#[test]
fn two_pulls_at_once_share_what_they_fetch() {
    let image = Image::new((0..4).map(|number| noise(number, 3 << 20)).collect());
    let (daemon, store) = filled(&image);
    let (fetched, reference) = (AtomicUsize::new(0), daemon.reference("name:tag"));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut begun = std::collections::HashSet::new();
                let client = client();
                let on_event = &mut |event: &Event| {
                    if let Event::Progress { digest, .. } = event
                        && begun.insert(digest.clone())
                    {
                        fetched.fetch_add(1, Ordering::SeqCst);
                    }
                };
                let pulled = client.pull(&store, &reference.parse().unwrap(), on_event).unwrap();
                assert_complete(&store, &pulled);
            });
        }
    });
    // Four layers and the config, each by one of the four.
    assert_eq!(fetched.into_inner(), 5);
    assert_eq!(store.references().unwrap().len(), 1);
}

#[test]
fn an_image_is_pushed_and_what_is_there_is_not_sent_again() {
    let image = Image::new(vec![layer("one"), noise(2, 5 << 20)]);
    let (daemon, store) = filled(&image);
    let pulled = pull(&client(), &store, &daemon.reference("name:tag")).unwrap();
    let target = daemon.reference("copy/of:it").parse().unwrap();
    let push = |to| {
        let mut sent = 0_u64;
        let on_event = &mut |event: &Event| {
            if let Event::Progress { done, .. } = event {
                sent = sent.max(*done);
            }
        };
        (client().push(&store, &pulled.record, to, on_event).unwrap(), sent)
    };
    assert_eq!(push(&target), (image.digest(), 5 << 20));
    assert_eq!(push(&target), (image.digest(), 0));
    assert_eq!(inspected(&daemon, "copy/of:it", "{{.Digest}}"), image.digest().to_string());
    let to = daemon.folder.path().join("back");
    let from = format!("docker://{}", daemon.reference("copy/of:it"));
    let to_argument = format!("dir:{}", to.display());
    run("skopeo", &["--insecure-policy", "copy", "-q", "--src-tls-verify=false", &from, &to_argument]);
    assert_eq!(fs::read(to.join("manifest.json")).unwrap(), image.manifest);
    let other = Record { reference: target.pinned(&Digest::of(b"other")), ..pulled.record.clone() };
    let error = client().push(&store, &other, &other.reference, &mut |_: &Event| {}).unwrap_err();
    assert!(crate::chain(&error).contains("has the digest"), "{error}");
    fs::remove_file(&pulled.layers[1].path).unwrap();
    let error = client().push(&store, &pulled.record, &target, &mut |_: &Event| {}).unwrap_err();
    assert!(crate::chain(&error).contains("has no blob"), "{error}");
}

#[test]
fn a_full_disk_leaves_a_beginning_that_is_continued() {
    let image = Image::new(vec![layer("one"), noise(3, 6 << 20)]);
    let (daemon, _) = filled(&image);
    let disk = SmallDisk::new(daemon.folder.path().join("disk"), "4m");
    let store = Store::open(&disk.0.join("store")).unwrap();
    let error = refused(&client(), &store, &daemon.reference("name:tag"));
    assert!(error.contains("no space left"), "{error}");
    let digest = Digest::of(&image.layers[1]);
    assert_eq!(store.references().unwrap(), []);
    assert!(!store.has(&digest, 6 << 20).unwrap());
    assert!(names(&store, "partial").contains(&format!("sha256-{}", digest.hex())));
    disk.resize("16m");
    let mut first = None;
    let on_event = &mut |event: &Event| {
        if let Event::Progress { digest: found, done } = event
            && *found == digest
        {
            first.get_or_insert(*done);
        }
    };
    let pulled = client().pull(&store, &daemon.reference("name:tag").parse().unwrap(), on_event).unwrap();
    assert_complete(&store, &pulled);
    assert!(first.unwrap() > 1 << 20, "it began at {first:?}");
}

/// A file system of a few megabytes.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    fn new(path: std::path::PathBuf, size: &str) -> Self {
        fs::create_dir(&path).unwrap();
        let options = format!("size={size},mode=700");
        run("mount", &["-t", "tmpfs", "-o", &options, "tmpfs", path.to_str().unwrap()]);
        Self(path)
    }

    fn resize(&self, size: &str) {
        run("mount", &["-o", &format!("remount,size={size}"), self.0.to_str().unwrap()]);
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).stdin(Stdio::null()).status();
    }
}

#[test]
fn no_registry_elsewhere_is_reached_without_tls() {
    let folder = tempfile::tempdir().unwrap();
    let error = refused(&client(), &store_in(folder.path()), "registry.example.com/name");
    assert!(error.contains("only registries at localhost, 127.0.0.1 or [::1]"), "{error}");
    // And none at all unless that is asked for.
    let (daemon, store) = filled(&three_layers());
    let secure = Client::new(Options { insecure: false, ..options() }, Keychain::empty());
    let error = refused(&secure, &store, &daemon.reference("name:tag"));
    assert!(error.contains("TLS"), "{error}");
    let began = SystemTime::now();
    let pulled = pull(&client(), &store, &daemon.reference("name:tag")).unwrap();
    assert!(pulled.record.pulled >= began);
}
