//! The gateway of a sandbox: it reads what the guest sends, asks the policy, and dials what the policy allows.
//!
//! Every connection of the guest ends here, in a stack of its own, and is made anew on the host's side: no packet of the guest's
//! ever leaves. The readers ([`hello`], [`http`], [`dns`]) do no input or output; they take bytes in any segmentation and say
//! what was in them.

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
