//! R5: a sandbox that takes all the network it can get, and gateways that die. Each time the gateway is still there
//! afterwards, or a new one is, the sandbox's other traffic works, and what was rejected is recorded.

// The helpers of tests are test code too: a panic there is the report.
#![allow(clippy::unwrap_used, clippy::panic)]

mod connections;
mod datagrams;
mod gateways;
mod rates;
mod scene;
