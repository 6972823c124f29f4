//! Images under persistent sandboxes, and in the store.

use std::fs;

use bathy_tests::finish;

use crate::{Scene, busybox, file, layer};

#[test]
fn sandboxes_of_one_image_share_it_and_see_nothing_of_each_other() {
    let scene = Scene::new();
    let reference = scene.busybox();
    let home = &scene.home;
    let sums = || {
        let folder = home.state().join("images");
        let find =
            ["-c", "find \"$0\"/layers \"$0\"/roots -type f ! -name '*.seal' | sort | xargs sha256sum"];
        crate::run("sh", &[&find[..], &[folder.to_str().unwrap()]].concat())
    };
    let before = sums();
    for name in ["one", "two"] {
        home.started(name, &["--image", &reference, "--net", "none"]);
        home.sh(name, &format!("cat /etc/motd; echo {name} > /etc/motd; rm /bin/ls"));
    }
    for name in ["one", "two"] {
        assert_eq!(home.sh(name, "cat /etc/motd"), format!("{name}\n"));
        home.ok(&["restart", name]);
        assert_eq!(home.sh(name, "cat /etc/motd; test -e /bin/ls || echo gone"), format!("{name}\ngone\n"));
    }
    assert_eq!(sums(), before);
    assert_eq!(home.ok(&["run", "--image", &reference, "--", "cat", "/etc/motd"]), "from the first layer\n");
}

#[test]
fn a_moved_tag_does_not_change_a_sandbox_that_exists() {
    let scene = Scene::new();
    let reference = scene.busybox();
    let home = &scene.home;
    home.create("old", &["--image", &reference, "--net", "none"]);
    let digest = home.inspect("old")["spec"]["image_digest"].as_str().unwrap().to_owned();
    scene.put("busy:1", vec![busybox(), layer(|folder| file(folder, "etc/motd", "newer\n"))], "{}");
    let pulled = scene.pull(&reference);
    assert_ne!(pulled["digest"], digest);
    home.create("new", &["--image", &reference, "--net", "none"]);
    for (name, motd) in [("old", "from the first layer\n"), ("new", "newer\n")] {
        home.ok(&["start", name]);
        assert_eq!(home.sh(name, "cat /etc/motd"), motd);
    }
    // Neither a removal nor a prune takes what a sandbox needs.
    home.ok(&["image", "rm", &reference]);
    home.ok(&["image", "prune", "--all"]);
    for name in ["old", "new"] {
        home.ok(&["restart", name]);
    }
    let pinned = format!("{reference}@{digest}");
    let needed = home.fails(&["image", "rm", &pinned], 125);
    assert!(needed.contains("the sandbox `old`"), "{needed}");
    let listed = home.json(&["image", "ls", "--json"]);
    let of_old = listed.as_array().unwrap().iter().find(|image| image["digest"] == digest).unwrap();
    assert_eq!(of_old["sandboxes"], serde_json::json!(["old"]));
    home.ok(&["rm", "-f", "old", "new"]);
    let pruned = home.json(&["image", "prune", "--json"]);
    assert_eq!(pruned["removed"].as_array().unwrap().len(), 2);
    for folder in ["layers", "trees", "roots", "blobs/sha256"] {
        assert_eq!(scene.files(folder), Vec::<String>::new(), "{folder}");
    }
}

#[test]
fn the_main_command_is_the_images_for_a_detached_run_only() {
    let scene = Scene::new();
    let config = r#"{"Entrypoint":["/bin/sh","-c"],"Cmd":["echo started; sleep 1000"]}"#;
    let reference = scene.put("main:1", vec![busybox()], config);
    scene.pull(&reference);
    let home = &scene.home;
    home.ok(&["run", "-d", "--name", "run", "--net", "none", "--image", &reference]);
    let command = |name: &str| home.inspect(name)["spec"]["command"].clone();
    assert_eq!(command("run"), serde_json::json!(["/bin/sh", "-c", "echo started; sleep 1000"]));
    home.create("idle", &["--image", &reference]);
    assert_eq!(command("idle"), serde_json::json!([]));
    home.create("words", &["--image", &reference, "--", "echo words"]);
    assert_eq!(command("words"), serde_json::json!(["/bin/sh", "-c", "echo words"]));
}

#[test]
fn names_are_listed_given_and_removed() {
    let scene = Scene::new();
    let reference = scene.busybox();
    let home = &scene.home;
    assert!(home.ok(&["image", "ls"]).contains(&reference));
    assert_eq!(home.ok(&["image", "tag", &reference, "mine:1"]), "docker.io/library/mine:1\n");
    home.ok(&["image", "rm", &reference]);
    assert_eq!(home.ok(&["run", "--image", "mine:1"]), "its own\n");
    assert!(home.fails(&["image", "rm", &reference], 125).contains("no image"));
    home.ok(&["image", "rm", "mine:1"]);
    assert_eq!(scene.files("layers"), Vec::<String>::new());
}

#[test]
fn the_operator_says_which_images_there_are_and_a_found_file_names_none() {
    let scene = Scene::new();
    let (reference, home) = (scene.busybox(), &scene.home);
    let under = |settings: &str, arguments: &[&str]| {
        let file = home.path().join("operator.toml");
        fs::write(&file, settings).unwrap();
        finish(home.command(arguments).env("BATHYSPHERE_CONFIG", &file), b"")
    };
    let run = ["run", "--image", &reference, "--", "echo", "ran"];
    let registry = format!("[ceiling]\nimages = [\"{}/*\"]\n", scene.registry.address);
    assert_eq!(under(&registry, &run).stdout, "ran\n");
    let other = under("[ceiling]\nimages = [\"default\", \"ghcr.io/*\"]\n", &run);
    assert!(other.code == Some(125) && other.stderr.contains("`images` in [ceiling]"), "{other:?}");
    let pulled = under("[ceiling]\nimages = [\"default\"]\n", &["pull", "--insecure", &reference]);
    assert!(pulled.code == Some(125) && pulled.stderr.contains("`images` in [ceiling]"), "{pulled:?}");
    let wrong = under("[ceiling]\nimages = [\"*\"]\n", &run);
    assert!(wrong.stderr.contains("line 2") && wrong.stderr.contains("does not name images"), "{wrong:?}");
    fs::write(home.path().join("bathysphere.toml"), format!("image = \"{reference}\"\n")).unwrap();
    let found = home.fails(&["run", "--", "true"], 125);
    assert!(found.contains("its `image` has") && found.contains("--image"), "{found}");
}
