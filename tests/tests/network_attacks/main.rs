//! Attacks on a sandbox's network: V9 and N1–N8, as tables. Every row has its attack's number, what is tried, and what has to
//! come of it: an error in the sandbox, and no contact anywhere that is not allowed. Where it is cheap, the same rows run again
//! with the defence taken away, and have to get through: so it is the defence that held, and not the row that was broken.
//!
//! `tests/network/table.py` shows the tables afterwards, with R5's, which is in `network_limits`.

// The helpers of tests are test code too: a panic there is the report.
#![allow(clippy::unwrap_used, clippy::panic)]

mod changes;
mod destinations;
mod frames;
mod greetings;
mod names;
mod others;
