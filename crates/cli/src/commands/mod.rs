//! The verbs, a file for each kind: words become a description, and what comes of it is handed to [`crate::ui`].

pub mod code;
pub mod completion;
pub mod copy;
pub mod create;
pub mod doctor;
pub mod events;
pub mod exec;
pub mod image;
pub mod jobs;
pub mod lifecycle;
pub mod list;
pub mod login;
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

use bathy_manager::{Manager, ManagerError};

use crate::ui::output;

/// Opens the store to look at sandboxes, and warns of an operator's file that cannot be used.
pub fn open_to_look(program: &str) -> Result<Manager, ManagerError> {
    let mut manager = Manager::open_to_end(program)?;
    output::warnings(&mut manager);
    Ok(manager)
}
