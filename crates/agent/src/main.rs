//! The guest's PID 1: mounts the sandbox's root, runs the host's commands, reaps children, powers off.
//!
//! It is a static, single-threaded program and the only file of its initramfs. It trusts the host and
//! requires nothing of the image.

mod boot;
mod command;
mod contexts;
mod network;
mod processes;
mod read_throttle;
mod server;
mod shutdown;
mod spawn;
mod sys;
mod terminal;
mod transfer;
mod users;

use std::process::ExitCode;

use bathy_protocol::{Restriction, unix_ns};
use rustix::process::{Pid, Signal};
use rustix::system::RebootCommand;

use crate::boot::Booted;
use crate::server::{AgentResources, BootTimes, Server};
use crate::spawn::Launcher;

/// A kernel argument after `--`: every command is restricted.
const RESTRICTED: &str = "restricted";
/// A kernel argument: the root of a restricted sandbox stays writable.
const WRITABLE_ROOT: &str = "writable-root";
/// A kernel argument with a number: the maximum number of threads. Not used for uml, where the host limits
/// the guest's processes.
const THREADS: &str = "threads=";

fn main() -> ExitCode {
    if rustix::process::getpid() != Pid::INIT {
        return transfer::main(std::env::args_os());
    }
    let has = |word| std::env::args_os().any(|argument| argument == word);
    let restricted = has(RESTRICTED).then(|| Restriction { writable_root: has(WRITABLE_ROOT) });
    // Standard error is the kernel's console, whose last lines the keeper shows when a guest does not become
    // ready.
    if let Err(message) = be_init(restricted, threads()) {
        eprintln!("bathysphere agent: {message}");
    }
    rustix::fs::sync();
    // Only fails without CAP_SYS_BOOT. Then PID 1 returns, the kernel panics, and the sandbox ends all the
    // same.
    let _ = rustix::system::reboot(RebootCommand::PowerOff);
    ExitCode::FAILURE
}

fn threads() -> Option<u32> {
    let words = std::env::args_os().filter_map(|word| word.into_string().ok());
    words.filter_map(|word| word.strip_prefix(THREADS)?.parse().ok()).next()
}

fn be_init(restricted: Option<Restriction>, threads: Option<u32>) -> Result<(), String> {
    let pid1_unix_ns = unix_ns();
    sys::leave_faults_to_the_kernel();
    let Booted { port, own_program, layer, processes } =
        boot::prepare_root(restricted, threads).map_err(|error| error.to_string())?;
    let times = BootTimes { pid1_unix_ns, mounted_unix_ns: unix_ns() };
    let resources = AgentResources { port, launcher: Launcher { restricted, own_program }, processes };
    let outcome = Server::new(resources, times).and_then(|mut server| server.run());
    // No process is left, unless the server failed or a process cannot be killed.
    sys::signal_all(Signal::KILL.as_raw());
    boot::leave_root(&layer);
    outcome.map_err(|error| error.to_string())
}
