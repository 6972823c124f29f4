//! A whole run of the server, for a program that is not asynchronous itself.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bathy_spec::paths::Paths;
use thiserror::Error;
use tokio::signal::unix::{SignalKind, signal};

use crate::http::{self, Endpoint, Guard, PATH};
use crate::server::{Options, Server, ServerError};
use crate::stdio::{self, StdioError};
use crate::token::{Token, TokenError};

/// How long cancelled calls may take to clean up at shutdown.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// The most base64 of pictures in one answer over HTTP, where some clients take no event of more than a mebibyte.
const HTTP_PICTURES: usize = 850_000;

#[derive(Debug, Error)]
pub enum RunError {
    #[error(transparent)]
    Server(#[from] ServerError),
    #[error(transparent)]
    Stdio(#[from] StdioError),
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error("Cannot listen on {0}")]
    Listen(SocketAddr, #[source] io::Error),
    #[error("Cannot start the server")]
    Start(#[source] io::Error),
}

/// How clients reach a server over HTTP.
#[derive(Clone, Debug)]
pub struct HttpSettings {
    /// The address to listen on; port 0 is any.
    pub address: SocketAddr,
    /// The file of the token. If absent, the one in the state folder, which is made if needed.
    pub token_file: Option<PathBuf>,
    /// Host names beyond this machine's own.
    pub allow_hosts: Vec<String>,
    /// Origins of pages beyond this machine's own.
    pub allow_origins: Vec<String>,
    /// Whether other machines may reach it.
    pub allow_remote: bool,
}

/// A run of the server.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub options: Options,
    /// HTTP instead of standard input and output.
    pub http: Option<HttpSettings>,
    /// Whether the sandboxes that it has made are removed at its end.
    pub remove: bool,
}

/// Serves until its client disconnects or a signal ends it. `report` receives sentences for the user: the address, and what
/// went wrong at the end.
pub fn run(settings: &Settings, report: &dyn Fn(&str)) -> Result<(), RunError> {
    let pictures = settings.http.is_some().then_some(HTTP_PICTURES);
    let server = Server::new(Options { pictures, ..settings.options.clone() })?;
    let result = match &settings.http {
        Some(http) => block_on(&server, serve_http(server.clone(), http, report)),
        None => block_on(&server, async { Ok(stdio::serve(server.clone()).await?) }),
    };
    if settings.remove {
        for failure in server.remove_made() {
            report(&failure);
        }
    }
    result
}

/// Runs until `serving` or a signal ends it, then cancels the running calls.
pub fn block_on(
    server: &Server,
    serving: impl Future<Output = Result<(), RunError>>,
) -> Result<(), RunError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(RunError::Start)?;
    let result = runtime.block_on(async {
        tokio::select! {
            result = serving => result,
            result = signalled() => result.map_err(RunError::Start),
            () = server.maintain() => Ok(()),
        }
    });
    server.cancel_all();
    runtime.shutdown_timeout(SHUTDOWN_GRACE);
    result
}

async fn signalled() -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = hang_up.recv() => {}
    }
    Ok(())
}

async fn serve_http(server: Server, settings: &HttpSettings, report: &dyn Fn(&str)) -> Result<(), RunError> {
    let (token, path) = match &settings.token_file {
        Some(path) => (Token::from_file(path)?, path.clone()),
        None => Token::of_folder(&Paths::of_user().map_err(ServerError::from)?.state)?,
    };
    let failed = |error| RunError::Listen(settings.address, error);
    let listener = http::listen(settings.address, settings.allow_remote).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let guard = Guard::new(token, address)
        .allow_hosts(settings.allow_hosts.iter().cloned())
        .allow_origins(settings.allow_origins.iter().cloned());
    report(&format!("listening on http://{address}{PATH}"));
    report(&format!("clients show the token in {}: Authorization: Bearer TOKEN", path.display()));
    http::serve(listener, Endpoint::new(server, guard)).await;
    Ok(())
}
