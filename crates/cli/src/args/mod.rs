//! Options that several verbs share.

pub mod choice;
pub mod disk;
pub mod env;
pub mod net;
pub mod spec;
