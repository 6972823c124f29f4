//! The gateway's process: what it inherits, and the privileges it drops before it reads the first frame.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::panic;
use std::process::ExitCode;

use bathy_jail::filter::{Filter, GATEWAY};
use bathy_jail::limits::{self, COMMON, Limit};
use bathy_jail::{FilterError, LimitsError, PrivilegesError, privileges, root};
use bathy_protocol::chain;
use bathy_protocol::descriptors::{CONFIG, GatewayDescriptors, OWNER};
use bathy_protocol::network::{FromGateway, GatewayLaunch, MAX_MESSAGE, decode, encode};
use rustix::net::SendFlags;
use rustix::process::Resource;
use thiserror::Error;

use crate::counts::Counts;
use crate::gateway::{Gateway, GatewayError};

/// Descriptors besides those of connections: DNS queries, epoll, what was inherited.
const DESCRIPTORS: u64 = 512;
/// Address space besides that of connections, and the average of each of these.
const MEMORY: u64 = 256 << 20;
const MEMORY_EACH: u64 = 1 << 20;

#[derive(Debug, Error)]
enum StartError {
    #[error("The gateway's configuration cannot be read")]
    Config(#[source] io::Error),
    #[error("The gateway's configuration is not valid")]
    Launch(#[from] bathy_protocol::MessageError),
    #[error("The gateway's root cannot be emptied")]
    Root(#[from] root::RootError),
    #[error("The gateway cannot be limited")]
    Limits(#[from] LimitsError),
    #[error("The memory for the gateway's byte counts cannot be mapped")]
    Counts(#[source] io::Error),
    #[error("The gateway cannot drop its privileges")]
    Privileges(#[from] PrivilegesError),
    #[error("The gateway's system calls cannot be filtered")]
    Filter(#[from] FilterError),
    #[error(transparent)]
    Gateway(#[from] GatewayError),
}

/// Runs a gateway. `inherit` takes over an inherited descriptor by its number.
pub fn run(inherit: impl Fn(i32) -> OwnedFd) -> ExitCode {
    let config = File::from(inherit(CONFIG));
    let launch = match configuration(&config) {
        Ok(launch) => launch,
        Err(error) => return fail(&inherit(OWNER), &error),
    };
    let descriptors = GatewayDescriptors::take_over(&launch, inherit);
    let Ok(control) = descriptors.control.try_clone() else { return ExitCode::FAILURE };
    drop(config);
    match start(launch, descriptors) {
        Ok(gateway) => {
            report_panics(control);
            if gateway.run().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => fail(&control, &error),
    }
}

/// Reports to the owner why the gateway cannot serve.
fn fail(control: &OwnedFd, error: &StartError) -> ExitCode {
    if let Ok(message) = encode(&FromGateway::Failed(chain(error))) {
        // The socket is fresh and takes this at once; an owner that has exited needs no report.
        let _ = rustix::net::send(control, &message, SendFlags::NOSIGNAL);
    }
    ExitCode::FAILURE
}

fn configuration(file: &File) -> Result<GatewayLaunch, StartError> {
    let mut bytes = Vec::new();
    let most = u64::try_from(MAX_MESSAGE).unwrap_or(u64::MAX);
    file.take(most).read_to_end(&mut bytes).map_err(StartError::Config)?;
    Ok(decode(&bytes)?)
}

/// Reports a panic to the owner. Writing it to the standard error would be killed by the seccomp filter, so that a
/// defect would look like an attack. The process aborts afterwards, as after any panic.
fn report_panics(control: OwnedFd) {
    panic::set_hook(Box::new(move |panic| {
        let message = panic.payload_as_str().unwrap_or("without a message");
        let place = panic.location().map(|place| format!("{}:{}", place.file(), place.line()));
        let place = place.unwrap_or_else(|| "an unknown place".to_owned());
        let report = FromGateway::Failed(format!("the gateway panicked at {place}: {message}"));
        if let Ok(bytes) = encode(&report) {
            // An owner that does not read learns it from the signal that ends the process.
            let _ = rustix::net::send(&control, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }));
}

fn start(launch: GatewayLaunch, descriptors: GatewayDescriptors<OwnedFd>) -> Result<Gateway, StartError> {
    let GatewayDescriptors { control, link, counts, ports } = descriptors;
    let connections = u64::from(launch.limits.connections);
    root::enter_empty_root()?;
    limits::apply(COMMON)?;
    limits::apply(&[
        Limit { resource: Resource::Nofile, value: connections + DESCRIPTORS },
        Limit { resource: Resource::As, value: MEMORY + connections * MEMORY_EACH },
        Limit { resource: Resource::Fsize, value: 0 },
        Limit { resource: Resource::Nproc, value: 1 },
    ])?;
    // Before the seccomp filter, which denies mapping files.
    let counts = Counts::map(counts).map_err(StartError::Counts)?;
    let gateway = Gateway::new(launch, control, link, ports)?.counting_in(counts);
    privileges::drop_all()?;
    Filter::install(&GATEWAY.compile()?)?;
    Ok(gateway)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

    use super::*;

    const PANICS: &str = "BATHY_TEST_PANICS";

    #[test]
    fn a_panic_is_reported_as_one_and_breaks_no_filter() {
        if std::env::var_os(PANICS).is_some() {
            report_panics(io::stdin().as_fd().try_clone_to_owned().unwrap());
            privileges::drop_all().unwrap();
            Filter::install(&GATEWAY.compile().unwrap()).unwrap();
            // Tests unwind where the gateway aborts.
            let _ = panic::catch_unwind(|| panic!("it was {} too many", 1));
            std::process::abort();
        }
        let (owner, its) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::tests::a_panic_is_reported_as_one_and_breaks_no_filter"])
            .env(PANICS, "1")
            .env_remove("RUST_BACKTRACE")
            .stdin(its)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(rustix::process::Signal::ABORT.as_raw()), "{status}");
        let mut message = vec![0; MAX_MESSAGE];
        let (length, _) = recv(&owner, &mut message[..], RecvFlags::DONTWAIT).unwrap();
        let FromGateway::Failed(reason) = decode(&message[..length]).unwrap() else {
            panic!("something else")
        };
        let place = "the gateway panicked at crates/gateway/src/process.rs:";
        assert!(reason.starts_with(place) && reason.ends_with(": it was 1 too many"), "{reason}");
    }
}
