//! Images run as docker runs them.

use std::fs;

use crate::{Scene, busybox, file, layer, program};

#[test]
fn three_layers_run_by_tag_and_by_digest() {
    let scene = Scene::new();
    let upper = layer(|folder| {
        file(folder, "etc/motd", "from the third layer\n");
        file(folder, "etc/.wh.removed", "");
    });
    let middle = layer(|folder| file(folder, "etc/motd", "from the second layer\n"));
    let layers = vec![busybox(), middle, upper];
    let reference = scene.put("three:1", layers, r#"{"Cmd":["cat","/etc/motd"]}"#);
    let pulled = scene.pull(&reference);
    assert_eq!(pulled["layers"], 3);
    let digest = pulled["digest"].as_str().unwrap();
    assert_eq!(scene.home.ok(&["run", "--image", &reference]), "from the third layer\n");
    let by_digest = format!("{}@{digest}", scene.registry.reference("three"));
    let ran = scene.home.json(&["run", "--json", "--image", &by_digest, "--", "ls", "/etc"]);
    assert_eq!(
        ran["stdout"]["text"].as_str().unwrap().lines().filter(|name| *name != "resolv.conf").count(),
        1
    );
    assert_eq!(ran["image"], by_digest);
    // The tag was resolved, and everything that records a sandbox says to what.
    let ran = scene.home.json(&["run", "--json", "--image", &reference, "--", "true"]);
    assert_eq!(ran["image"], format!("{reference}@{digest}"));
    let events = scene.home.json(&["events", "--json"]);
    let created: Vec<_> =
        events.as_array().unwrap().iter().filter_map(|event| event["image"].as_str()).collect();
    assert!(!created.is_empty() && created.iter().all(|image| image.ends_with(digest)), "{created:?}");
}

#[test]
fn entrypoint_command_environment_folder_and_user_are_the_images() {
    let scene = Scene::new();
    let users = layer(|folder| {
        file(folder, "etc/passwd", "root:x:0:0::/root:/bin/sh\nweb:x:1234:99::/srv:/bin/sh\n");
        file(folder, "etc/group", "web:x:99:\nmore:x:77:web\n");
        file(folder, "srv/here", "");
    });
    let config = r#"{"Entrypoint":["/bin/sh","-c"],"Cmd":["id -u; id -G; pwd; echo $GREETING $HOME"],
        "Env":["GREETING=hello","PATH=/bin"],"WorkingDir":"/srv","User":"web","StopSignal":"SIGQUIT",
        "Labels":{"a":"b"},"ExposedPorts":{"80/tcp":{}}}"#;
    let reference = scene.put("web:1", vec![busybox(), users], config);
    scene.pull(&reference);
    let run = |arguments: &[&str]| scene.home.ok(&[&["run", "--image", &*reference], arguments].concat());
    assert_eq!(run(&[]), "1234\n99 77\n/srv\nhello /srv\n");
    assert_eq!(run(&["--", "echo words replace the command"]), "words replace the command\n");
    assert_eq!(
        run(&["-u", "0", "-w", "/etc", "-e", "GREETING=bye", "--", "id -u; pwd; echo $GREETING"]),
        "0\n/etc\nbye\n"
    );
    let inspected = scene.home.json(&["image", "inspect", &reference]);
    assert_eq!((&inspected["stop_signal"], &inspected["labels"]["a"]), (&"SIGQUIT".into(), &"b".into()));
    assert_eq!(inspected["exposed_ports"], serde_json::json!(["80/tcp"]));
    assert_eq!(inspected["platform"]["architecture"], "amd64");
}

#[test]
fn an_image_needs_nothing_of_ours() {
    let scene = Scene::new();
    // One program, and nothing else: no shell, no users, no folder to mount anything on.
    let config = r#"{"Entrypoint":["/busybox"],"Cmd":["echo","alone"]}"#;
    let reference = scene.put("scratch:1", vec![layer(|folder| program(folder, "busybox"))], config);
    scene.pull(&reference);
    let run = |arguments: &[&str]| scene.home.ok(&[&["run", "--image", &*reference], arguments].concat());
    assert_eq!(run(&[]), "alone\n");
    assert_eq!(run(&["--", "id", "-u"]), "0\n");
    let listed = run(&["--", "ls", "/", "/proc/self/fd", "/etc/resolv.conf", "/dev/null", "/tmp"]);
    assert!(listed.contains("/etc/resolv.conf\n") && listed.contains("busybox\n"), "{listed}");
    assert_eq!(run(&["--", "stat", "-c", "%a", "/etc"]), "755\n", "users of the guest write nothing there");
    let ran = scene.home.json(&[
        "run",
        "--json",
        "--security",
        "restricted",
        "-u",
        "1000:1000",
        "--image",
        &reference,
    ]);
    assert_eq!(ran["stdout"]["text"], "alone\n");
    let missing = scene.home.fails(&["code", "--image", &reference, "-c", "1"], 127);
    assert!(missing.contains("python3"), "{missing}");
}

#[test]
fn an_image_of_as_many_layers_as_there_can_be() {
    let scene = Scene::new();
    let small = |number: usize| layer(|folder| file(folder, &format!("n/{number}"), &format!("{number}\n")));
    let layers: Vec<_> = std::iter::once(busybox()).chain((1..128).map(small)).collect();
    let one_more: Vec<_> = layers.iter().cloned().chain([small(128)]).collect();
    let reference =
        scene.put("many:128", layers, r#"{"Cmd":["sh","-c","cat /n/1 /n/64 /n/127; ls /n | wc -l"]}"#);
    assert_eq!(scene.pull(&reference)["layers"], 128);
    assert_eq!(scene.home.ok(&["run", "--image", &reference]), "1\n64\n127\n127\n");
    scene.home.started("kept", &["--image", &reference]);
    assert_eq!(scene.home.sh("kept", "cat /n/127"), "127\n");
    let refused = scene.put("many:129", one_more, "{}");
    assert!(scene.home.fails(&["pull", "--insecure", &refused], 125).contains("at most 128"));
}

#[test]
fn what_is_in_the_place_of_a_mount_point_is_replaced() {
    let scene = Scene::new();
    let odd = layer(|folder| {
        for name in ["tmp", "run"] {
            std::os::unix::fs::symlink("/nowhere", folder.join(name)).unwrap();
        }
        fs::write(folder.join("proc"), "a file").unwrap();
        fs::write(folder.join("dev"), "a file").unwrap();
    });
    let reference =
        scene.put("odd:1", vec![busybox(), odd], r#"{"Cmd":["sh","-c","echo x > /tmp/y && cat /tmp/y"]}"#);
    scene.pull(&reference);
    assert_eq!(scene.home.ok(&["run", "--image", &reference]), "x\n");
}

#[test]
fn what_is_missing_is_named() {
    let scene = Scene::new();
    let reference = scene.busybox();
    let home = &scene.home;
    let missing = home.fails(&["run", "--image", &reference, "--", "python3"], 127);
    assert!(missing.contains("python3: no such program"), "{missing}");
    let none = scene.put("none:1", vec![busybox()], "{}");
    scene.pull(&none);
    assert!(home.fails(&["run", "--image", &none], 125).contains("The command is empty"));
    let other = scene.registry.reference("busy:2");
    let never = home.fails(&["run", "--pull", "never", "--image", &other, "--", "true"], 125);
    assert!(never.contains("is not on this machine") && never.contains("bathy pull"), "{never}");
    let absent = home.fails(&["pull", "--insecure", &other], 125);
    assert!(absent.contains("has nothing called 2 in busy:"), "{absent}");
    let outside = home.fails(&["pull", "--insecure", "registry.invalid/x"], 125);
    assert!(outside.contains("not on this machine"), "{outside}");
    let recipe = home.fails(&["pull", "default"], 125);
    assert!(recipe.contains("bathy setup"), "{recipe}");
    let arm = crate::image::Image::of_architecture(vec![crate::image::layer("x")], "arm64");
    let arm = scene.put_image("arm:1", &arm);
    let platform = home.fails(&["pull", "--insecure", &arm], 125);
    assert!(platform.contains("linux/amd64") && platform.contains("arm64"), "{platform}");
}
