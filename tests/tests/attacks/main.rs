//! Attacks on the jails of a sandbox's processes. Every test's name begins with the attack that it runs.

mod engine;
mod filters;
mod golden;
mod jail;
mod process;
mod run;
mod state;
