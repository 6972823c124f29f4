//! Helpers for the tests of this crate.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::event::{Actor, Event, What};
use crate::files::CURRENT;
use crate::head;
use crate::log::Log;
use crate::verify::{Fault, Report, VerifyError, verify};

/// A log in a temporary folder.
pub(crate) struct TestLog {
    pub folder: TempDir,
    pub log: Log,
}

impl TestLog {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::open(folder.path()).unwrap();
        Self { folder, log }
    }

    /// A log with this many lines.
    pub fn with_lines(lines: u32) -> Self {
        let scene = Self::new();
        for number in 0..lines {
            scene.append(number);
        }
        scene
    }

    /// Appends an event in another boot of the machine.
    pub fn append_in(&self, boot: &str, number: u32) {
        Log::open(self.folder.path()).unwrap().in_boot(boot).append(&[event(number)]).unwrap();
    }

    pub fn append(&self, number: u32) {
        self.log.append(&[event(number)]).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn current(&self) -> Vec<u8> {
        fs::read(self.path(CURRENT)).unwrap()
    }

    pub fn put(&self, text: &[u8]) {
        fs::write(self.path(CURRENT), text).unwrap();
    }

    pub fn head(&self) -> Vec<u8> {
        fs::read(self.path(head::NAME)).unwrap()
    }

    pub fn put_head(&self, head: &[u8]) {
        fs::write(self.path(head::NAME), head).unwrap();
    }

    pub fn verify(&self) -> Result<Report, VerifyError> {
        verify(self.folder.path(), None)
    }

    /// The file, line and fault of a log that must be invalid.
    pub fn bad(&self) -> (String, u64, Fault) {
        bad(self.folder.path())
    }
}

pub(crate) fn bad(folder: &Path) -> (String, u64, Fault) {
    match verify(folder, None) {
        Err(VerifyError::Bad { file, line, fault }) => (file, line, fault),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn event(number: u32) -> Event {
    let actor = Actor { uid: 1000, user: Some("me".into()), pid: number, program: "bathy exec".into() };
    let what = What::ExecEnded { exec: format!("e{number}"), job: None, exit: "code 0".into() };
    Event { time_unix_ns: u64::from(number), sandbox: Some("s1".into()), name: None, actor, what }
}
