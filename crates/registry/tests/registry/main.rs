//! The client against Debian's docker-registry, filled by skopeo, and against servers that lie. Loopback only.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

mod attacks;
mod broken;
mod daemon;
mod image;
mod login;
mod proxy;
mod real;
mod server;
mod tls;
mod tokens;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use bathy_registry::{Client, Event, Keychain, Options, PullError, Pulled, Store};

/// Options for a registry of a test: plain HTTP, and short pauses.
pub fn options() -> Options {
    let mut options = Options { insecure: true, ..Options::default() };
    options.retries.first = std::time::Duration::from_millis(10);
    options
}

pub fn client() -> Client {
    Client::new(options(), Keychain::empty())
}

pub fn pull(client: &Client, store: &Store, reference: &str) -> Result<Pulled, PullError> {
    client.pull(store, &reference.parse().unwrap(), &mut |_: &Event| {})
}

/// The message of a failed pull, as it is shown: with all its causes.
pub fn refused(client: &Client, store: &Store, reference: &str) -> String {
    chain(&pull(client, store, reference).unwrap_err())
}

pub fn chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |error| (*error).source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Runs a program that has to succeed, and returns its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// The program in `examples/pull.rs`, which is built with the tests.
pub fn example() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().with_file_name("examples").join("pull")
}

/// The names in a folder of a store.
pub fn names(store: &Store, folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(store.root().join(folder)).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Nothing of a refused image is there: no reference, and no blob of this digest or beginning of one (of any, if it is
/// empty).
pub fn assert_nothing(store: &Store, hex: &str) {
    assert_eq!(store.references().unwrap(), []);
    assert!(names(store, "partial").iter().all(|name| !name.contains(hex)), "{:?}", names(store, "partial"));
    assert!(!names(store, "blobs/sha256").contains(&hex.to_owned()));
}

pub fn store_in(folder: &Path) -> Store {
    Store::open(&folder.join("store")).unwrap()
}
