//! Tests of the recipes' shell functions, with stubs in place of programs that would download something.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use super::*;

/// An unpacked recipe, and a folder of stubs that precedes the system's programs in PATH.
struct Stubbed {
    folder: tempfile::TempDir,
}

impl Stubbed {
    fn new() -> Self {
        let stubbed = Self { folder: tempfile::tempdir().unwrap() };
        for name in ["recipe", "stubs", "scratch"] {
            fs::create_dir(stubbed.folder.path().join(name)).unwrap();
        }
        Recipe::uml_kernel().unpack(&stubbed.folder.path().join("recipe")).unwrap();
        // Programs that a build requires, but that are not run here.
        for name in ["gcc", "make", "flex", "bison", "bc", "xz", "patch"] {
            stubbed.stub(name, "exit 0");
        }
        stubbed.stub("apt-cache", "echo linux-source-7.2");
        stubbed.stub("dpkg-deb", "case $1 in -f) echo 7.2-1;; esac");
        stubbed
    }

    fn stub(&self, name: &str, script: &str) {
        let path = self.folder.path().join("stubs").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// A stub of apt with these sources, which downloads as `download` says.
    fn apt(&self, sources: &[&str], download: &str) {
        let lines: String = sources
            .iter()
            .map(|suite| format!("echo \"'http://archive.test/dists/$1{suite}/InRelease' x 0\"\n"))
            .collect();
        let release = ". /etc/os-release\nset -- \"${VERSION_CODENAME:-stable}\" \"$*\"";
        self.stub(
            "apt-get",
            &format!("{release}\ncase $2 in\n*print-uris*) {lines};;\n*download*) {download};;\nesac"),
        );
    }

    /// Runs a script as a recipe's build.sh would, after loading the shared functions.
    fn run(&self, script: &str) -> Output {
        let path = self.folder.path();
        let search = format!("{}:{}", path.join("stubs").display(), std::env::var("PATH").unwrap());
        let begin = "set -euo pipefail; . \"$here/../source.sh\"; DEBIAN_KEYRING=/dev/null";
        Command::new("bash")
            .args(["-c", &format!("{begin}\n{script}")])
            .current_dir(path.join("scratch"))
            .env("PATH", search)
            .env("here", path.join("recipe/guest/kernel/uml"))
            .output()
            .unwrap()
    }
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_download_that_fails_ends_the_build() {
    let stubbed = Stubbed::new();
    stubbed.apt(&[""], "exit 100");
    let output = stubbed.run("fetch_source; echo went on");
    let said = said(&output);
    assert_eq!(output.status.code(), Some(100), "{said}");
    assert!(said.contains("fetching linux-source-7.2 from trixie-backports"), "{said}");
    assert!(!said.contains("unpacking") && !said.contains("sid") && !said.contains("went on"), "{said}");
}

#[test]
fn a_suite_without_the_source_is_passed_over() {
    let stubbed = Stubbed::new();
    stubbed.apt(&[""], "exit 0");
    stubbed.stub("apt-cache", "echo linux-source-7; echo linux-source-7.2-extra");
    let output = stubbed.run("fetch_source");
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("no Linux 7 that the patches fit") && !said.contains("fetching"), "{said}");
}

#[test]
fn a_missing_security_archive_ends_the_build() {
    let stubbed = Stubbed::new();
    stubbed.apt(&["", "-security"], "exit 0");
    let script = "mirror=$(debian_mirror -security); echo \"$mirror\"";
    let output = stubbed.run(script);
    assert_eq!(said(&output), "http://archive.test\n");
    stubbed.apt(&[""], "exit 0");
    let output = stubbed.run(script);
    let said = said(&output);
    assert!(
        output.status.code() == Some(1) && said.contains("-security in the configuration of apt"),
        "{said}"
    );
}

#[test]
fn scripts_of_packages_never_run_as_the_machines_root() {
    if !rustix::process::geteuid().is_root() {
        // There is no other user to compare with.
        return;
    }
    let stubbed = Stubbed::new();
    stubbed.apt(&["", "-security"], "exit 0");
    stubbed.stub("df", "echo Avail; echo 9999M");
    stubbed.stub("npm", "echo package.tgz; : >\"$5/package.tgz\"");
    stubbed.stub("sha512sum", "exit 0");
    stubbed.stub("mkfs.erofs", "exit 0");
    // The stub that runs the scripts prints its user and writes where it has to.
    stubbed.stub("mmdebstrap", "cat /proc/self/uid_map /proc/self/gid_map; id -u; : >/var/tmp/tree; exit 7");
    let (path, out) = (stubbed.folder.path(), stubbed.folder.path().join("out"));
    // The unprivileged user has to reach the stub.
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    let script = Recipe::image("default").unwrap().unpack(&path.join("recipe")).unwrap();
    let search = format!("{}:{}", path.join("stubs").display(), std::env::var("PATH").unwrap());
    let mut build = Command::new("bash");
    let output =
        build.arg(script).arg(out).current_dir(path.join("scratch")).env("PATH", search).output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(7), "{said}");
    let ids: Vec<Vec<&str>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    let map = ["0", "2113929216", "65536"];
    assert!(ids.ends_with(&[map.to_vec(), map.to_vec(), vec!["0"]]), "{said}");
    assert!(path.join("scratch/tree/tree").exists() && !Path::new("/var/tmp/tree").exists());
}
