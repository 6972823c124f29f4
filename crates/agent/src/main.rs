//! The guest's PID 1: mounts the sandbox's root, runs the commands that the host asks for, reaps, powers off.
//!
//! It is the only file of its initramfs, static, and single-threaded. It trusts the host and expects nothing of the
//! image: no image has to contain anything of ours.

mod boot;
mod breather;
mod command;
mod contexts;
mod network;
mod processes;
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
use crate::server::{BootTimes, Resources, Server};
use crate::spawn::Launcher;

/// A word of the kernel's command line, after `--`: every command is restricted.
const RESTRICTED: &str = "restricted";
/// Another: the root of a restricted sandbox stays writable.
const WRITABLE_ROOT: &str = "writable-root";
/// Another, before a number: how many threads there may be. A guest whose processes are the host's is limited there.
const THREADS: &str = "threads=";

fn main() -> ExitCode {
    if rustix::process::getpid() != Pid::INIT {
        return transfer::main(std::env::args_os());
    }
    let has = |word| std::env::args_os().any(|argument| argument == word);
    let restricted = has(RESTRICTED).then(|| Restriction { writable_root: has(WRITABLE_ROOT) });
    // Standard error is the kernel's console: the keeper shows its last lines when a guest does not get ready.
    if let Err(message) = be_init(restricted, threads()) {
        eprintln!("bathysphere agent: {message}");
    }
    rustix::fs::sync();
    // Only fails without CAP_SYS_BOOT; then PID 1 returns, the kernel panics, and the sandbox ends all the same.
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
    let resources = Resources { port, launcher: Launcher { restricted, own_program }, processes };
    let outcome = Server::new(resources, times).and_then(|mut server| server.run());
    // Nobody is left, unless the server failed or somebody is stuck.
    sys::signal_everybody(Signal::KILL.as_raw());
    boot::leave_root(&layer);
    outcome.map_err(|error| error.to_string())
}
