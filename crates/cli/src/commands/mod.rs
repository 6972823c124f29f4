//! The verbs, a file for each kind: words become a description, and what comes of it is handed to [`crate::ui`].

pub mod code;
pub mod completion;
pub mod copy;
pub mod create;
pub mod doctor;
pub mod events;
pub mod exec;
pub mod jobs;
pub mod lifecycle;
pub mod list;
pub mod logs;
pub mod man;
pub mod mcp;
pub mod mcp_clients;
pub mod mcp_install;
pub mod net;
pub mod policy;
pub mod repl;
pub mod run;
pub mod setup;
pub mod stats;
pub mod top;
