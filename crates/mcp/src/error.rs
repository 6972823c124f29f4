//! Why a tool did not do what it was asked.

use bathy_manager::store::StoreError;
use bathy_manager::{ManagerError, Status};
use bathy_spec::name::NameError;
use bathy_spec::operator::OperatorError;
use thiserror::Error;

use crate::text;

/// The longest message, in bytes.
const MOST: usize = 4096;

/// A call that failed.
#[derive(Debug, Error)]
pub enum ToolError {
    /// The operator does not allow it.
    #[error("{0}")]
    Refused(String),
    /// It cannot be done, or could not.
    #[error("{0}")]
    Failed(String),
    /// The client cancelled it.
    #[error("The call was cancelled")]
    Cancelled,
}

impl ToolError {
    /// A failure with a message of the server's own.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Failed(message.into())
    }

    /// What the audit log calls it.
    pub fn outcome(&self) -> &'static str {
        match self {
            Self::Refused(_) => "refused",
            Self::Failed(_) => "error",
            Self::Cancelled => "cancelled",
        }
    }

    /// The message for the client. Parts of it may come from a guest.
    pub fn message(&self) -> String {
        text::cut(&text::clean(&self.to_string()), MOST).text
    }
}

/// The error for an unknown sandbox, which is also that for one that agents may not use.
pub fn unknown_sandbox(wanted: &str) -> ToolError {
    ToolError::Failed(format!(
        "There is no sandbox {:?}, or not any more: sandboxes are removed when their lifetime or idle time is over, or by sandbox_delete. \
         Its files and state are lost. Call sandbox_list to see which sandboxes there are, or run_code without sandbox_id (or sandbox_create) for a new one.",
        text::line(wanted, 80)
    ))
}

impl From<ManagerError> for ToolError {
    fn from(error: ManagerError) -> Self {
        match error {
            ManagerError::Operator(OperatorError::Sandboxes { count, most, by }) => Self::Refused(format!(
                "There are {count} sandboxes, and the operator allows {most}, by {by} (sandboxes). Delete one that is not needed any more with sandbox_delete; sandbox_list shows those that agents have made."
            )),
            ManagerError::Operator(error) => Self::Refused(format!(
                "{}. This limit is the operator's and cannot be changed by a call.",
                bathy_protocol::chain(&error).trim_end_matches('.')
            )),
            ManagerError::Store(StoreError::Name(NameError::Unknown { wanted, .. }))
            | ManagerError::Name(NameError::Unknown { wanted, .. })
            | ManagerError::Store(StoreError::Removed(wanted)) => unknown_sandbox(&wanted),
            ManagerError::Store(StoreError::NameTaken { name }) => {
                Self::Failed(format!("There is a sandbox `{name}` already. Use another name, or none."))
            }
            ManagerError::NotRunning { name, status } => Self::Failed(match status {
                Status::Created => format!("The sandbox `{name}` has not been started."),
                _ => format!(
                    "The sandbox `{name}` has ended ({status}), and everything that ran in it with it. Make a new one with sandbox_create, or with run_code without sandbox_id."
                ),
            }),
            ManagerError::Paused(name) => Self::Failed(format!(
                "The sandbox `{name}` was paused by its owner, who has to resume it. Use another one."
            )),
            ManagerError::Interrupted => Self::Cancelled,
            other => Self::Failed(bathy_protocol::chain(&other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_that_is_gone_is_explained_with_what_to_do() {
        let error = NameError::Unknown { wanted: "abc".into(), hint: String::new() };
        let text = ToolError::from(ManagerError::from(StoreError::from(error))).message();
        assert!(text.contains("\"abc\"") && text.contains("sandbox_create"), "{text}");
        let ended = ManagerError::NotRunning { name: "abc".into(), status: Status::Stopped };
        assert!(ToolError::from(ended).message().contains("sandbox_create"));
    }

    #[test]
    fn a_full_house_is_answered_with_the_tool_that_makes_room() {
        let full = OperatorError::Sandboxes { count: 3, most: 3, by: "[mcp] of operator.toml".into() };
        let text = ToolError::from(ManagerError::Operator(full)).message();
        assert!(text.contains("sandbox_delete") && text.contains("[mcp]"), "{text}");
        assert!(!text.contains("bathy rm"), "{text}");
    }

    #[test]
    fn messages_are_harmless() {
        let error = ToolError::failed(format!("\u{1b}[2J{}", "x".repeat(100_000)));
        assert!(error.message().len() < 5000 && !error.message().contains('\u{1b}'));
    }
}
