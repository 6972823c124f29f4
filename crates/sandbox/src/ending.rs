//! Why a sandbox or one of its processes ended, in words.

use std::os::fd::BorrowedFd;

use bathy_protocol::Cause;
use rustix::process::{WaitId, WaitIdOptions, waitid};

/// What a process of ours did last, as one clause. It is not waited for: one that only closed its connection is not gone.
pub fn of_process(pidfd: BorrowedFd<'_>) -> String {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let status = waitid(WaitId::PidFd(pidfd), options).ok().flatten();
    let signal = status.as_ref().and_then(|status| status.terminating_signal());
    match (signal, status.and_then(|status| status.exit_status())) {
        (Some(libc::SIGSYS), _) => "broke its own system call filter and was ended".to_owned(),
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, Some(code)) => format!("ended with code {code}"),
        (None, None) => "hung up".to_owned(),
    }
}

/// One clause about the cause. Parts of it may come from the guest: escape before showing.
pub fn describe(cause: &Cause) -> String {
    match cause {
        Cause::Killed => "the sandbox was ended".to_owned(),
        Cause::GuestExited(0) => "the guest powered itself off".to_owned(),
        Cause::GuestExited(status) => format!("the guest ended by itself (status {status})"),
        Cause::GuestCrashed(how) => how.clone(),
        Cause::NotReady(ms) => format!("the guest was not ready after {} s", *ms as f64 / 1000.0),
        Cause::Violation(what) => format!("the guest broke the rules and was ended: {what}"),
        Cause::Failed(what) => format!("the sandbox could not be kept: {what}"),
    }
}
