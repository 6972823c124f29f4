//! Attacks on the jails of a sandbox's processes. Every test's name begins with the attack that it runs.

// The helpers of tests are test code too: a panic there is the report.
#![allow(clippy::panic)]

mod engine;
mod filters;
mod golden;
mod greed;
mod jail;
mod machine;
mod places;
mod process;
mod run;
mod state;
mod user;
mod weight;
