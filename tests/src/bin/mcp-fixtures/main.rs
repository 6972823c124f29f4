//! The MCP server behind its own HTTP front, with the fixtures that the public conformance suite asks for.
//!
//! The bearer token is in `BATHY_MCP_TOKEN`. Prints the address and serves until standard input ends.

#![allow(deprecated, reason = "the suite also tests what the newer revision does away with")]

mod asking;
mod content;
mod handler;
mod tools;

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr};

use bathy_mcp::http::{self, Endpoint, Guard};
use bathy_mcp::token::Token;
use bathy_mcp::{Options, Server};
use handler::{Fixtures, Shared};

fn main() -> Result<(), Box<dyn Error>> {
    let token =
        std::env::var("BATHY_MCP_TOKEN").map_err(|_| "BATHY_MCP_TOKEN has to hold the bearer token")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(Token::new(&token)))
}

async fn serve(token: Token) -> Result<(), Box<dyn Error>> {
    let listener = http::listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), false).await?;
    let address = listener.local_addr()?;
    let handler = Fixtures::new(Server::new(Options::default())?, Shared::new()?);
    let endpoint = Endpoint::new(handler, Guard::new(token, address));
    println!("http://{address}{}", http::PATH);
    let (ended, end) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = ended.send(());
    });
    tokio::select! {
        () = http::serve(listener, endpoint) => {}
        _ = end => {}
    }
    Ok(())
}
