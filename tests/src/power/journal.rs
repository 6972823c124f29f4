//! A journal of requests to the product and of what it reported as done, stored where no power cut affects it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::json;

use super::Shell;
use crate::Ran;

/// Whether something has to exist after a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Either: a change was requested and not reported as done.
    Either,
    /// It was reported as done.
    Present,
    /// It was reported as removed.
    Absent,
}

/// A file in a guest.
#[derive(Clone, Debug)]
pub struct GuestFile {
    /// Its SHA-256, if it was reported as synced.
    pub digest: String,
    /// Whether it has to exist.
    pub expect: Expect,
}

#[derive(Clone, Debug)]
pub struct Known {
    /// Its id, once the product has reported it.
    pub id: Option<String>,
    /// Whether it is a REPL.
    pub is_repl: bool,
    /// Whether it runs, if nothing unexpected happened to it.
    pub is_running: bool,
    /// Whether it has to exist.
    pub expect: Expect,
    /// Rules of its policy, as `bathy policy show` prints them.
    pub rules: BTreeMap<String, Expect>,
    /// Its files, by their path.
    pub files: BTreeMap<String, GuestFile>,
}

impl Known {
    /// A sandbox that was requested.
    pub fn asked(is_repl: bool) -> Self {
        Self {
            id: None,
            is_repl,
            is_running: false,
            expect: Expect::Either,
            rules: BTreeMap::new(),
            files: BTreeMap::new(),
        }
    }

    /// What to expect of a rule.
    pub fn expect_rule(&mut self, rule: &str, expect: Expect) {
        self.rules.insert(rule.to_owned(), expect);
    }
}

/// The state according to the journal.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Sandboxes by their names.
    pub sandboxes: BTreeMap<String, Known>,
    /// Ids of sandboxes whose removal was reported.
    pub removed: BTreeSet<String>,
    /// A counter for unique names.
    pub counter: u64,
    /// The number of completed commands.
    pub done: u64,
    /// Whether the product has ever been used on this disk. On a new one there is no audit log.
    pub is_used: bool,
}

#[derive(Debug)]
pub struct Journal {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    began: Instant,
    /// Before the power is cut the journal is closed: what is reported later may have happened after the cut.
    is_closed: bool,
    facts: Facts,
    failures: Vec<String>,
}

impl Journal {
    /// Writes lines of JSON into this file.
    pub fn new(path: &Path) -> Self {
        let file = File::create(path).expect("the journal can be written");
        let facts = Facts::default();
        let began = Instant::now();
        Self { inner: Mutex::new(Inner { file, began, is_closed: false, facts, failures: Vec::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn facts(&self) -> Facts {
        self.lock().facts.clone()
    }

    /// Corrects the state by what was found.
    pub fn correct<T>(&self, change: impl FnOnce(&mut Facts) -> T) -> T {
        change(&mut self.lock().facts)
    }

    /// Writes a remark for readers of the file.
    pub fn note(&self, what: &str, details: &str) {
        self.lock().write(what, &[details], 0);
    }

    /// Ignores everything that is reported from now on.
    pub fn close(&self) {
        self.lock().is_closed = true;
    }

    /// Begins the next round. Returns the commands that failed in the last one.
    pub fn open(&self) -> Vec<String> {
        let mut inner = self.lock();
        inner.is_closed = false;
        std::mem::take(&mut inner.failures)
    }

    /// Runs a command of the product. `before` changes the state first, `after` if it succeeds. A failure is a finding, because
    /// each sandbox has one user. None if the journal is closed before or after.
    pub fn run(
        &self,
        shell: &Shell,
        arguments: &[&str],
        before: impl FnOnce(&mut Facts),
        after: impl FnOnce(&mut Facts, &Ran),
    ) -> Option<Ran> {
        {
            let mut inner = self.lock();
            if inner.is_closed {
                return None;
            }
            inner.write("asked", arguments, 0);
            before(&mut inner.facts);
        }
        let ran = shell.bathy(arguments);
        let mut inner = self.lock();
        if inner.is_closed {
            return None;
        }
        let code = ran.code.unwrap_or(-1);
        inner.write(if code == 0 { "done" } else { "failed" }, arguments, code);
        if code == 0 {
            inner.facts.done += 1;
            after(&mut inner.facts, &ran);
            Some(ran)
        } else {
            let failure = format!("`bathy {}` failed before the cut: {ran:?}", arguments.join(" "));
            inner.failures.push(failure);
            None
        }
    }

    /// Something else that failed.
    pub fn fail(&self, failure: String) {
        let mut inner = self.lock();
        if !inner.is_closed {
            inner.failures.push(failure);
        }
    }
}

impl Inner {
    fn write(&mut self, what: &str, arguments: &[&str], code: i32) {
        let line = json!({
            "ms": u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            "what": what,
            "arguments": arguments,
            "code": code,
        });
        writeln!(self.file, "{line}").expect("the journal can be written");
    }
}
