//! The guest's PID 1: mounts the sandbox's root, runs the commands that the host asks for, reaps, powers off.
//!
//! It is the only file of its initramfs, static, and single-threaded. It trusts the host and expects nothing of the
//! image: no image has to contain anything of ours.

mod boot;
mod command;
mod server;
mod spawn;
mod sys;
mod users;

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::system::RebootCommand;

fn main() {
    let pid1_unix_ns = unix_ns();
    let outcome = boot::prepare_root().map_err(|error| error.to_string()).and_then(|port| {
        let boot = server::BootTimes { pid1_unix_ns, mounted_unix_ns: unix_ns() };
        server::Server::new(port, boot).and_then(|mut server| server.run()).map_err(|error| error.to_string())
    });
    if let Err(message) = outcome {
        // Standard error is the kernel's console: the keeper shows its last lines when a guest does not get ready.
        eprintln!("bathysphere agent: {message}");
    }
    rustix::fs::sync();
    // Only fails without CAP_SYS_BOOT; then PID 1 returns, the kernel panics, and the sandbox ends all the same.
    let _ = rustix::system::reboot(RebootCommand::PowerOff);
}

/// The wall clock, as nanoseconds since 1970.
fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
