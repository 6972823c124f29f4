//! Images from a registry: Debian's docker-registry on a loopback port, filled by skopeo with images that are made here.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

#[path = "../../../crates/registry/tests/registry/daemon.rs"]
#[allow(dead_code, reason = "shared with the tests of the client")]
mod daemon;
mod hostile;
#[path = "../../../crates/registry/tests/registry/image.rs"]
#[allow(dead_code, reason = "shared with the tests of the client")]
mod image;
mod kept;
mod login;
mod run;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use bathy_tests::kept::Home;

use crate::daemon::Daemon;
use crate::image::Image;

const BUSYBOX: &str = "/bin/busybox";
const APPLETS: [&str; 13] =
    ["sh", "cat", "echo", "id", "ls", "sleep", "env", "pwd", "rm", "true", "touch", "mount", "wc"];

/// Runs a program that has to succeed, and returns its output. The shared parts use it as well.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// The archive of what `fill` puts into a folder.
fn layer(fill: impl FnOnce(&Path)) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path());
    let arguments = ["--numeric-owner", "--owner=0", "--group=0", "--sort=name", "-cf", "-", "-C"];
    let output = Command::new("tar").args(arguments).arg(folder.path()).arg(".").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

fn file(folder: &Path, name: &str, content: &str) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// A static program under this name.
fn program(folder: &Path, name: &str) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::copy(BUSYBOX, &path).expect("busybox-static is a package that ./test installs");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A shell and its usual programs.
fn busybox() -> Vec<u8> {
    layer(|folder| {
        program(folder, "bin/busybox");
        for applet in APPLETS {
            symlink("busybox", folder.join("bin").join(applet)).unwrap();
        }
        file(folder, "etc/motd", "from the first layer\n");
        file(folder, "etc/removed", "");
    })
}

/// A registry and a home of a test's own.
struct Scene {
    registry: Daemon,
    home: Home,
}

impl Scene {
    fn new() -> Self {
        Self { registry: Daemon::plain(), home: Home::new() }
    }

    /// Puts an image of these layers into the registry; returns what it is called there.
    fn put(&self, name: &str, layers: Vec<Vec<u8>>, config: &str) -> String {
        self.put_image(name, &Image::with_config(layers, "amd64", config))
    }

    fn put_image(&self, name: &str, image: &Image) -> String {
        let layout = tempfile::tempdir().unwrap();
        image.write_layout(layout.path(), "it");
        self.registry.fill(layout.path(), "it", name, &["--preserve-digests", "--dest-compress=false"]);
        self.registry.reference(name)
    }

    fn pull(&self, reference: &str) -> serde_json::Value {
        self.home.json(&["pull", "--insecure", "--json", reference])
    }

    /// Puts a busybox image there and pulls it.
    fn busybox(&self) -> String {
        let reference = self.put("busy:1", vec![busybox()], r#"{"Cmd":["echo","its own"]}"#);
        self.pull(&reference);
        reference
    }

    /// Files below the images' folder, of which a refused image must not leave any in these folders.
    fn files(&self, folder: &str) -> Vec<String> {
        let path = self.home.state().join("images").join(folder);
        let entries = fs::read_dir(path).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}
