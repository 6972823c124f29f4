//! R5: a sandbox that takes all the network it can get, and gateways that die. Each time the gateway is still there
//! afterwards, or a new one is, the sandbox's other traffic works, and what was turned away is written down.

// The helpers of tests are test code too: a panic there is the report.
#![allow(clippy::unwrap_used, clippy::panic)]

mod connections;
mod datagrams;
mod gateways;
#[path = "../network_attacks/guest.rs"]
mod guest;
mod rates;
mod scene;
#[path = "../network_attacks/table.rs"]
mod table;
