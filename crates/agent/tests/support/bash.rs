//! Starts the Bash driver.

#![allow(unused_imports, reason = "each file of tests uses what it needs")]

#[path = "../../src/contexts/bash.rs"]
mod command;

use std::path::Path;

pub use command::ARGV;

use super::{Driver, Requests};

/// A driver that is ready.
pub fn start() -> Driver {
    let mut driver = Driver::start(&ARGV, "", Requests::File, Path::new("/"), &[]);
    driver.hello();
    driver
}
