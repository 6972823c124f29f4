//! One client over standard input and output.

use std::io;

use rmcp::service::ServiceExt;
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::{RoleServer, ServerHandler};
use thiserror::Error;

/// The longest message. A longer one cannot be answered, because its id is not known. This is well above what any tool
/// takes, so that a tool can refuse what is too long.
const MAX_LINE: usize = 64 << 20;

/// The server ended before its client.
#[derive(Debug, Error)]
pub enum StdioError {
    /// The client began with something else.
    #[error("The client did not begin as an MCP client does: {0}")]
    Beginning(String),
    #[error("The server broke")]
    Task(#[source] io::Error),
}

/// Serves until standard input ends. Calls that run then have a few seconds to be answered, and are cancelled.
pub async fn serve(handler: impl ServerHandler) -> Result<(), StdioError> {
    let (input, output) = rmcp::transport::stdio_pipes();
    let transport = AsyncRwTransport::<RoleServer, _, _>::new(input, output).with_max_line_length(MAX_LINE);
    let running = match handler.serve(transport).await {
        Ok(running) => running,
        // A client may disconnect before it sends anything.
        Err(rmcp::service::ServerInitializeError::ConnectionClosed(_)) => return Ok(()),
        Err(error) => return Err(StdioError::Beginning(error.to_string())),
    };
    running.waiting().await.map_err(|error| StdioError::Task(io::Error::other(error)))?;
    Ok(())
}
