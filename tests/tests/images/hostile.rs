//! What is damaged, cut off or hostile is refused by its name, and leaves nothing.

use std::fs;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use bathy_tests::kept::until;

use crate::image::{Image, noise};
use crate::{Scene, busybox, file, layer};

/// A tar header and its data, with a name that no tar program would write.
fn entry(name: &str, kind: u8, link: &str, content: &str) -> Vec<u8> {
    let mut archive = crate::image::layer(content);
    archive.truncate(archive.len() - 1024);
    archive[..100].fill(0);
    archive[..name.len()].copy_from_slice(name.as_bytes());
    archive[156] = kind;
    archive[157..157 + link.len()].copy_from_slice(link.as_bytes());
    archive[148..156].fill(b' ');
    let sum: u32 = archive[..512].iter().map(|byte| u32::from(*byte)).sum();
    archive[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    archive
}

fn assert_nothing(scene: &Scene) {
    assert_eq!(scene.home.json(&["image", "ls", "--json"]), serde_json::json!([]));
    for folder in ["layers", "trees", "roots"] {
        assert_eq!(scene.files(folder), Vec::<String>::new(), "{folder}");
    }
}

#[test]
fn c5_a_flipped_byte_is_refused_by_name_and_nothing_is_kept() {
    let scene = Scene::new();
    let image = Image::with_config(vec![busybox(), layer(|folder| file(folder, "a", "b"))], "amd64", "{}");
    let reference = scene.put_image("flipped:1", &image);
    let digest = bathy_registry::Digest::of(&image.layers[1]);
    let blob = scene.registry.blob(digest.hex());
    let mut content = fs::read(&blob).unwrap();
    content[600] ^= 1;
    fs::write(&blob, content).unwrap();
    let refused = scene.home.fails(&["pull", "--insecure", &reference], 125);
    assert!(refused.contains("Layer 2 of") && refused.contains(digest.hex()), "{refused}");
    assert_nothing(&scene);
    // What was begun of another layer stays for the next pull.
    for folder in ["blobs/sha256", "partial"] {
        assert!(scene.files(folder).iter().all(|name| !name.contains(digest.hex())), "{folder}");
    }
}

#[test]
fn c5_a_layer_that_is_not_what_the_config_names_is_refused() {
    let scene = Scene::new();
    let mut image = Image::with_config(vec![busybox()], "amd64", "{}");
    let other = Image::with_config(vec![layer(|folder| file(folder, "a", "b"))], "amd64", "{}");
    // The config of another image: its diff-id is that of another layer.
    image.config = other.config;
    let (config, layers) = (&image.config, &image.layers);
    let layer = crate::image::descriptor("application/vnd.oci.image.layer.v1.tar", &layers[0]);
    let config = crate::image::descriptor(bathy_registry::manifest::media::OCI_CONFIG, config);
    image.manifest = crate::image::manifest(&config, &layer);
    let reference = scene.put_image("lying:1", &image);
    let refused = scene.home.fails(&["pull", "--insecure", &reference], 125);
    assert!(refused.contains("Layer 1 of") && refused.contains("the image's config names"), "{refused}");
    assert_nothing(&scene);
}

#[test]
fn c4_a_hostile_archive_is_refused_with_its_entrys_name() {
    let scene = Scene::new();
    for (tag, archive, words) in [
        ("up", entry("../evil", b'0', "", "x"), ["../evil", "\"..\""]),
        ("below", [entry("a", b'2', "/etc", ""), entry("a/b", b'0', "", "x")].concat(), ["a/b", "is below"]),
        ("link", entry("l", b'1', "nowhere/../x", ""), ["\"l\"", "hard link"]),
        ("type", entry("t", b'?', "", ""), ["\"t\"", "type"]),
        ("cut", entry("c", b'0', "", &"x".repeat(4000))[..1024].to_vec(), ["\"c\"", "truncated"]),
        ("escape", entry("\x1b[2Jx", b'?', "", ""), ["Layer 1 of", "type"]),
    ] {
        let reference = scene.put(&format!("hostile:{tag}"), vec![archive], "{}");
        let refused = scene.home.fails(&["pull", "--insecure", &reference], 125);
        assert!(words.iter().all(|word| refused.contains(word)), "{tag}: {refused}");
        assert!(refused.contains("nothing of it was kept") && !refused.contains('\x1b'), "{tag}: {refused}");
        assert_nothing(&scene);
    }
    // The name of a lower layer's file does not exist in any.
    let reference = scene.put("hostile:missing", vec![busybox(), entry("l", b'1', "bin/none", "")], "{}");
    let refused = scene.home.fails(&["pull", "--insecure", &reference], 125);
    assert!(refused.contains("cannot be one root") && refused.contains("bin/none"), "{refused}");
}

#[test]
fn a_file_of_the_cache_that_was_changed_is_noticed_and_made_again() {
    let scene = Scene::new();
    let (reference, home) = (scene.busybox(), &scene.home);
    for folder in ["layers", "trees", "roots"] {
        let name = scene.files(folder).into_iter().find(|name| !name.ends_with(".seal")).unwrap();
        let path = home.state().join("images").join(folder).join(name);
        let mut content = fs::read(&path).unwrap();
        let middle = content.len() / 2;
        content[middle] ^= 1;
        crate::run("chmod", &["u+w", path.to_str().unwrap()]);
        fs::write(&path, content).unwrap();
        // A tree is only read when something else is missing.
        if folder == "trees" {
            fs::remove_dir_all(home.state().join("images/roots")).unwrap();
        }
        assert_eq!(home.ok(&["run", "--net", "none", "--image", &reference]), "its own\n", "{folder}");
    }
}

#[test]
fn two_pulls_of_one_image_at_once_both_succeed() {
    let scene = Scene::new();
    let big = layer(|folder| fs::write(folder.join("big"), noise(1, 20 << 20)).unwrap());
    let reference = scene.put("big:1", vec![busybox(), big], r#"{"Cmd":["echo","whole"]}"#);
    thread::scope(|scope| {
        let pulls: Vec<_> = (0..2).map(|_| scope.spawn(|| scene.pull(&reference))).collect();
        let digests: Vec<_> = pulls.into_iter().map(|pull| pull.join().unwrap()["digest"].clone()).collect();
        assert_eq!(digests[0], digests[1]);
    });
    assert_eq!(scene.home.ok(&["run", "--image", &reference]), "whole\n");
}

#[test]
fn a_pull_that_was_killed_is_resumed() {
    let scene = Scene::new();
    let big = layer(|folder| fs::write(folder.join("big"), noise(2, 64 << 20)).unwrap());
    let reference = scene.put("big:1", vec![busybox(), big], r#"{"Cmd":["echo","whole"]}"#);
    for folder in ["partial", "layers"] {
        let mut command = scene.home.command(&["pull", "--insecure", &reference]);
        let mut pull = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Where it can be killed in the middle; a quick one may have ended.
        until("it has begun, or ended", 60, || {
            !scene.files(folder).is_empty() || pull.try_wait().unwrap().is_some()
        });
        let _ = pull.kill();
        pull.wait().unwrap();
    }
    thread::sleep(Duration::from_millis(50));
    scene.pull(&reference);
    assert_eq!(scene.home.ok(&["run", "--image", &reference]), "whole\n");
    assert!(scene.files("partial").is_empty());
    assert!(scene.files("layers").iter().all(|name| !name.ends_with(".new")));
}

#[test]
fn a_full_disk_leaves_nothing_half_unpacked() {
    let scene = Scene { registry: crate::daemon::Daemon::plain(), home: bathy_tests::kept::Home::small(48) };
    // It fits once, as it is pulled, but not a second time, as it is unpacked.
    let big = layer(|folder| fs::write(folder.join("big"), noise(3, 26 << 20)).unwrap());
    let reference = scene.put("big:1", vec![big], "{}");
    let refused = scene.home.fails(&["pull", "--insecure", &reference], 125);
    assert!(refused.contains("no space left") && refused.contains("half-unpacked"), "{refused}");
    for folder in ["layers", "trees", "roots"] {
        assert_eq!(scene.files(folder), Vec::<String>::new(), "{folder}");
    }
}
