//! A sandbox from the host's side: what is asked for, what it is made of, how it is started and spoken to.
//!
//! * [`spec`]: the one description of a sandbox, for every face of the product.
//! * [`launch`]: from a description to a running keeper.
//! * [`connection`]: speaking to it.
//! * [`attach`]: one command with the caller's own standard input, output and error.
//! * [`doctor`]: what this machine offers, and what to do about what it does not.

pub mod assets;
pub mod attach;
pub mod connection;
pub mod disk;
pub mod doctor;
pub mod engine;
pub mod host;
pub mod kvm_probe;
pub mod launch;
pub mod paths;
pub mod slot;
pub mod spec;
mod sys;

pub use assets::Assets;
pub use attach::{Attach, AttachError, Outcome};
pub use connection::{Connection, ConnectionError};
pub use launch::{LaunchError, Sandbox};
pub use paths::Paths;
pub use spec::{CommandSpec, Engine, SandboxSpec, Size, SpecError};
