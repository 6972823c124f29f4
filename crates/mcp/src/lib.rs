//! The MCP server: sandboxes as tools for agents.
//!
//! * [`server`]: the server itself, and the path of every call.
//! * [`tools`]: the tools, one file per group.
//! * [`mod@run`]: a whole run of the server.
//! * [`stdio`] and [`http`]: how clients reach it. Both serve any handler, so that a test can put its own around ours.
//! * `schema`, `answer`, `shown`, `text`, `outputs`: arguments and answers.
//! * `host`, `call`: sandboxes, connections, progress and cancellation.
//! * `audit`: what is recorded of each call.

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
