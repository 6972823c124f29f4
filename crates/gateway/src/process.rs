//! The gateway's process: what it was given, and what it gives up before it hears the first frame.

use std::error::Error;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use bathy_jail::filter::{Filter, GATEWAY};
use bathy_jail::limits::{self, COMMON, Limit};
use bathy_jail::{FilterError, LimitsError, PrivilegesError, privileges, root};
use bathy_protocol::network::{FromGateway, GatewayLaunch, MAX_MESSAGE, decode, encode, fd};
use rustix::net::SendFlags;
use rustix::process::Resource;
use thiserror::Error;

use crate::gateway::{Gateway, GatewayError};

/// Descriptors besides those of connections: questions for names, the event queue, what it was given.
const DESCRIPTORS: u64 = 512;
/// Memory besides that of connections, and what each of these may take on average.
const MEMORY: u64 = 256 << 20;
const MEMORY_EACH: u64 = 1 << 20;

/// What keeps a gateway from serving.
#[derive(Debug, Error)]
enum StartError {
    #[error("The gateway's configuration cannot be read")]
    Config(#[source] io::Error),
    #[error("The gateway's configuration is none")]
    Launch(#[from] bathy_protocol::MessageError),
    #[error("The gateway's root cannot be emptied")]
    Root(#[from] root::RootError),
    #[error("The gateway cannot be limited")]
    Limits(#[from] LimitsError),
    #[error("The gateway cannot drop its privileges")]
    Privileges(#[from] PrivilegesError),
    #[error("The gateway's system calls cannot be filtered")]
    Filter(#[from] FilterError),
    #[error(transparent)]
    Gateway(#[from] GatewayError),
}

/// The whole life of a gateway, with the descriptors that it was started with: its configuration, the control socket, the
/// link, and the published ports.
pub fn run(config: File, control: OwnedFd, link: OwnedFd, ports: impl Fn(i32) -> OwnedFd) -> ExitCode {
    let Ok(copy) = control.try_clone() else { return ExitCode::FAILURE };
    match start(config, control, link, ports) {
        Ok(gateway) => {
            drop(copy);
            if gateway.run().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            if let Ok(message) = encode(&FromGateway::Failed(chain(&error))) {
                // The socket is fresh and takes this at once; if nobody is there, there is nobody to tell.
                let _ = rustix::net::send(&copy, &message, SendFlags::NOSIGNAL);
            }
            ExitCode::FAILURE
        }
    }
}

fn start(
    config: File,
    control: OwnedFd,
    link: OwnedFd,
    ports: impl Fn(i32) -> OwnedFd,
) -> Result<Gateway, StartError> {
    let mut bytes = Vec::new();
    let most = u64::try_from(MAX_MESSAGE).unwrap_or(u64::MAX);
    config.take(most).read_to_end(&mut bytes).map_err(StartError::Config)?;
    let launch: GatewayLaunch = decode(&bytes)?;
    let ports: Vec<_> = (fd::FIRST_PORT..).take(launch.ports.len()).map(ports).collect();
    let connections = u64::from(launch.limits.connections);
    root::enter_empty_root()?;
    limits::apply(COMMON)?;
    limits::apply(&[
        Limit { resource: Resource::Nofile, value: connections + DESCRIPTORS },
        Limit { resource: Resource::As, value: MEMORY + connections * MEMORY_EACH },
        Limit { resource: Resource::Fsize, value: 0 },
        Limit { resource: Resource::Nproc, value: 1 },
    ])?;
    let gateway = Gateway::new(launch, control, link, ports)?;
    privileges::drop_all()?;
    Filter::install(&GATEWAY.compile()?)?;
    Ok(gateway)
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Error)]
    #[error("cannot start")]
    struct Outer(#[source] Inner);

    #[derive(Debug, Error)]
    #[error("no descriptors")]
    struct Inner(#[source] io::Error);

    #[test]
    fn a_failure_is_told_with_all_its_causes() {
        let error = Outer(Inner(io::Error::other("too many")));
        assert_eq!(chain(&error), "cannot start: no descriptors: too many");
    }
}
