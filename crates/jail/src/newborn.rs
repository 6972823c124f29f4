//! A child between its creation and its program: it shows that it lives, waits for the go-ahead, and executes its program.

use std::io::Write as _;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::spawn::{SpawnError, high_pipe};
use crate::sys::{self, Side, Transition};

/// What a child does, all of it prepared before it is created.
pub struct Plan<'a> {
    pub namespaces: i32,
    /// Of the version 1 groups that it enters.
    pub tasks: &'a [RawFd],
    pub descriptors: &'a [RawFd],
    /// What the program is given has lower numbers.
    pub first: RawFd,
    pub transition: &'a Transition<'a>,
}

/// A child that lives and waits.
pub struct Newborn {
    pub child: sys::Child,
    /// A byte lets it go.
    pub go: OwnedFd,
    /// Where the child writes its error.
    pub report: OwnedFd,
}

/// Creates a child in this version 2 group, and waits for its first sign of life.
pub fn newborn(plan: &Plan<'_>, group: Option<BorrowedFd<'_>>) -> Result<Newborn, SpawnError> {
    let (go_read, go) = high_pipe(plan.first)?;
    let (report, report_write) = high_pipe(plan.first)?;
    // SAFETY: the child only makes system calls (see `program_child`), as required of a process with many threads.
    let side = unsafe { sys::fork_into(plan.namespaces | libc::CLONE_NEWUSER, group) };
    match side.map_err(SpawnError::NoNamespaces)? {
        Side::Child => {
            // Only the parent may hold this end, or its death would go unnoticed below.
            drop(go);
            program_child(&go_read, &report_write, plan)
        }
        Side::Parent(child) => {
            drop((go_read, report_write));
            if sys::wait_for_byte(report.as_raw_fd()) {
                return Ok(Newborn { child, go, report });
            }
            let _ = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED);
            Err(SpawnError::Child("live: it was killed when it was created".to_owned()))
        }
    }
}

fn program_child(go: &OwnedFd, report: &OwnedFd, plan: &Plan<'_>) -> ! {
    // The sign of life.
    sys::write_report(report.as_raw_fd(), b"+");
    if sys::wait_for_byte(go.as_raw_fd()) {
        // Still as the user who started it, to whom the groups belong.
        let entered = plan.tasks.iter().try_for_each(|tasks| sys::enter_group(*tasks));
        let (what, errno) = match entered {
            Err(errno) => ("enter its control group", errno),
            Ok(()) => match sys::become_user(0) {
                Err(errno) => ("become the sandbox's user", errno),
                Ok(()) => match sys::arrange(plan.descriptors) {
                    Err(errno) => ("arrange its descriptors", errno),
                    Ok(()) => ("execute its program", sys::become_program(plan.transition)),
                },
            },
        };
        fail(what, errno.into(), |words| sys::write_report(report.as_raw_fd(), words));
    }
    sys::exit_now(125)
}

/// Reports what a child could not do. Allocates nothing.
pub fn fail(what: &str, errno: libc::c_long, report: impl FnOnce(&[u8])) {
    let mut words = [0; 64];
    let mut rest = words.as_mut_slice();
    // Sixty-four bytes are enough.
    let _ = write!(rest, "{what}: error {errno}");
    let length = 64 - rest.len();
    report(words.get(..length).unwrap_or_default());
}
