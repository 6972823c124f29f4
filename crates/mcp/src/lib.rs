//! The MCP server: what agents do with sandboxes, as tools.
//!
//! * [`server`]: the server itself, and the one way that every call takes.
//! * [`tools`]: the tools, one file per group.
//! * [`mod@run`]: a whole run of it, from start to end.
//! * [`stdio`] and [`http`]: how clients reach it. Both serve any handler, so that a test can put its own around ours.
//! * `schema`, `answer`, `shown`, `text`, `outputs`: what goes in and out, and what is left of it.
//! * `host`, `call`: sandboxes, connections, progress and cancellation.
//! * `audit`: what is written down about it.

mod answer;
mod audit;
mod call;
mod error;
mod host;
pub mod http;
mod outputs;
pub mod run;
mod schema;
pub mod server;
mod shown;
pub mod stdio;
mod text;
pub mod token;
pub mod tools;

pub use run::{HttpSettings, RunError, Settings, run};
pub use server::{Options, Server, ServerError};
pub use tools::{ToolsetError, Toolsets};
