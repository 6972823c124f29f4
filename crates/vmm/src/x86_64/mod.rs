//! What only an x86-64 guest has.

pub mod cpuid;
pub mod layout;
pub mod mptable;
pub mod registers;
