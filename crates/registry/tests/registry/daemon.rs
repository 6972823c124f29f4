//! Debian's docker-registry, on a port of its own.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::run;

const DEADLINE: Duration = Duration::from_secs(60);

pub struct Daemon {
    process: Child,
    pub folder: TempDir,
    /// `127.0.0.1:PORT`.
    pub address: String,
}

impl Daemon {
    /// Without TLS and logins.
    pub fn plain() -> Self {
        Self::start(tempfile::tempdir().unwrap(), "", "")
    }

    /// With more of `http:` (indented by two) and other sections.
    pub fn start(folder: TempDir, http: &str, sections: &str) -> Self {
        let path = folder.path();
        let config = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:0\n  secret: x\n{http}{sections}",
            path.join("data").display()
        );
        fs::write(path.join("config.yml"), config).unwrap();
        let log = path.join("log");
        let mut process = Command::new("docker-registry")
            .arg("serve")
            .arg(path.join("config.yml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .expect("docker-registry is a package that ./test installs");
        let began = Instant::now();
        let address = loop {
            let mut text = String::new();
            File::open(&log).unwrap().read_to_string(&mut text).unwrap();
            let found = text.split_once("listening on ").map(|(_, rest)| rest);
            // The port only if all of it is there.
            let found =
                found.and_then(|rest| rest.split_once([',', '"'])).map(|(address, _)| address.to_owned());
            if let Some(address) = found {
                break address;
            }
            let is_running = process.try_wait().unwrap().is_none();
            assert!(is_running && began.elapsed() < DEADLINE, "docker-registry does not start: {text}");
            sleep(Duration::from_millis(10));
        };
        Self { process, folder, address }
    }

    /// What a repository and tag are called in this registry.
    pub fn reference(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    /// Fills it by skopeo from an OCI layout.
    pub fn fill(&self, layout: &Path, source: &str, name: &str, options: &[&str]) {
        let from = format!("oci:{}:{source}", layout.display());
        let to = format!("docker://{}", self.reference(name));
        let mut arguments = vec!["--insecure-policy", "copy", "-q", "--dest-tls-verify=false"];
        arguments.extend(options);
        arguments.extend([from.as_str(), &to]);
        run("skopeo", &arguments);
    }

    /// Where it keeps a blob.
    pub fn blob(&self, hex: &str) -> PathBuf {
        let blobs = self.folder.path().join("data/docker/registry/v2/blobs/sha256");
        blobs.join(&hex[..2]).join(hex).join("data")
    }

    pub fn stop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop();
    }
}
