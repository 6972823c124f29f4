//! Starts the Python driver.

#![allow(unused_imports, reason = "each file of tests uses what it needs")]

#[path = "../../src/contexts/python.rs"]
mod command;

use std::path::Path;

pub use command::{ARGV, SOURCE};

use super::{Driver, Requests, system_program};

/// A driver that was not greeted yet. BATHY_TEST_PYTHON overrides the system's Python.
pub fn start_in(home: &Path, env: &[(&str, &str)]) -> Driver {
    let program = std::env::var("BATHY_TEST_PYTHON").unwrap_or_else(|_| system_program(ARGV[0]));
    let mut argv = ARGV.to_vec();
    argv[0] = &program;
    Driver::start(&argv, SOURCE, Requests::Stream, home, env)
}

/// A driver that is ready.
pub fn start() -> Driver {
    let mut driver = start_in(Path::new("/"), &[]);
    driver.hello();
    driver
}
