//! The gateway of a sandbox: it parses the frames that the guest sends, checks them against the policy, and
//! connects to what the policy allows.
//!
//! Every connection of the guest terminates here, in a TCP stack of its own, and is opened again from the host: no
//! packet of the guest is ever forwarded. The parsers ([`hello`], [`http`], [`dns`]) do no input or output; they
//! accept bytes in any segmentation.

mod closing;
mod connection;
mod counts;
pub mod dns;
mod event_log;
mod flows;
pub mod frame;
mod gateway;
pub mod hello;
mod host;
pub mod http;
pub mod inspect;
mod limits;
mod link;
mod policy_check;
mod process;
mod published;
mod queries;
mod recheck;
mod reply;
mod resolver;
mod stack;
mod sys;
mod table;
mod tcp;
mod udp;

pub use gateway::{Gateway, GatewayError};
pub use process::run;
