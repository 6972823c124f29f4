//! Options that several verbs share.

pub mod disk;
pub mod net;
pub mod spec;
