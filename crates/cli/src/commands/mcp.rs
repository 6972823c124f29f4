//! `bathy mcp`: the server for AI agents.

use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;

use bathy_mcp::{HttpSettings, Options, Settings, Toolsets};
use clap::Subcommand;

use crate::commands::mcp_install;
use crate::ui::output;

/// Arguments of `bathy mcp`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    serve: Serve,
}

#[derive(Subcommand)]
enum Verb {
    /// Register this server in an MCP client's settings, or print the settings.
    Install(mcp_install::Args),
}

/// How the server runs.
#[derive(clap::Args)]
struct Serve {
    /// Serve over HTTP at this address, such as 127.0.0.1:8080, instead of standard input and output. Port 0 is any.
    #[arg(long, value_name = "ADDRESS")]
    http: Option<SocketAddr>,
    /// The file with the bearer token that HTTP clients have to send. [default: a generated one in the state folder]
    #[arg(long, value_name = "FILE", requires = "http")]
    token_file: Option<PathBuf>,
    /// Accept HTTP requests for this host name, too. Can be repeated.
    #[arg(long, value_name = "HOST", requires = "http")]
    allow_host: Vec<String>,
    /// Accept HTTP requests from pages of this origin, such as `https://example.com`, too. Can be repeated.
    #[arg(long, value_name = "ORIGIN", requires = "http")]
    allow_origin: Vec<String>,
    /// Allow an address that other machines can reach. The token crosses the network unencrypted.
    #[arg(long, requires = "http")]
    allow_remote: bool,
    /// Offer more tools: jobs, contexts, repls or all, separated by commas.
    #[arg(long, value_name = "SETS", default_value = "", hide_default_value = true)]
    toolsets: Toolsets,
    /// Give agents access to all sandboxes, not only to those that agents created.
    #[arg(long)]
    all_sandboxes: bool,
    /// Remove the sandboxes and REPLs that this server created when it exits.
    #[arg(long)]
    rm: bool,
}

/// Serves agents, or runs a verb.
pub fn run(args: Args) -> Result<u8, Box<dyn Error>> {
    if let Some(Verb::Install(install)) = args.verb {
        return mcp_install::run(install);
    }
    let serve = args.serve;
    let settings = Settings {
        options: Options { toolsets: serve.toolsets, all_sandboxes: serve.all_sandboxes, pictures: None },
        http: serve.http.map(|address| HttpSettings {
            address,
            token_file: serve.token_file,
            allow_hosts: serve.allow_host,
            allow_origins: serve.allow_origin,
            allow_remote: serve.allow_remote,
        }),
        remove: serve.rm,
    };
    bathy_mcp::run(&settings, &|text| output::note(text))?;
    Ok(0)
}
