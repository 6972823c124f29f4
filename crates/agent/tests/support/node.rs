//! Starts the Node driver.

#![allow(unused_imports, reason = "each file of tests uses what it needs")]

#[path = "../../src/contexts/node.rs"]
mod command;

use std::path::Path;

pub use command::{ARGV, SOURCE};

use super::{Driver, Requests, system_program};

/// A driver that is ready, in this folder. BATHY_TEST_NODE overrides the system's Node.
pub fn start_in(home: &Path) -> Driver {
    let program = std::env::var("BATHY_TEST_NODE").unwrap_or_else(|_| system_program(ARGV[0]));
    let mut argv = ARGV.to_vec();
    argv[0] = &program;
    let mut driver = Driver::start(&argv, SOURCE, Requests::Stream, home, &[]);
    driver.hello();
    driver
}

/// A driver that is ready.
pub fn start() -> Driver {
    start_in(Path::new("/"))
}
