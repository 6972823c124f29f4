//! Turns the end of a command into an exit code and a message.

use std::error::Error;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bathy_client::attach::{Outcome, Sink};
use bathy_protocol::{Cause, RefusalKind};
use serde_json::{Value, json};

use crate::sys;
use crate::ui::escape;

const TIMED_OUT: u8 = 124;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// The exit code of a command whose output pipe was closed.
pub const BROKEN_PIPE: u8 = 141;
/// How many bytes of each output `--json` collects.
pub const JSON_OUTPUT: usize = 16 * 1024 * 1024;

/// A time limit of a command, and the option that set it.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimit {
    /// The command is ended after this time.
    pub after: Duration,
    pub option: &'static str,
}

impl TimeLimit {
    /// The limit of `--timeout`.
    pub fn timeout(after: Duration) -> Self {
        Self { after, option: "--timeout" }
    }
}

/// The exit code, and a message if it is not the command's own.
pub fn of(
    outcome: &Outcome,
    limit: Option<TimeLimit>,
    stop: &OwnedFd,
) -> Result<(u8, Option<String>), Box<dyn Error>> {
    Ok(match outcome {
        Outcome::Exited(exit) => (exit.shell_code(), None),
        Outcome::Refused(refused) => {
            let code = match refused.kind {
                RefusalKind::NotFound => NOT_FOUND,
                RefusalKind::NotExecutable => NOT_EXECUTABLE,
                RefusalKind::BadRequest => crate::OUR_FAILURE,
            };
            (code, Some(escape::text(&refused.message)))
        }
        Outcome::TimedOut => {
            let told = limit.map(|limit| {
                format!("the command was ended after {} s, its {}", limit.after.as_secs_f64(), limit.option)
            });
            (TIMED_OUT, told)
        }
        Outcome::Interrupted => (128u8.saturating_add(sys::read_signal(stop)?), None),
        Outcome::BrokenPipe => (BROKEN_PIPE, None),
        Outcome::Detached => (0, None),
        Outcome::TakenOver => (crate::OUR_FAILURE, Some("another client has taken the job over".to_owned())),
        Outcome::NoAnswer => (
            crate::OUR_FAILURE,
            Some("the sandbox does not answer. `bathy kill` and `bathy rm -f` work nevertheless".to_owned()),
        ),
        Outcome::SandboxEnded { cause, console } => (crate::OUR_FAILURE, Some(describe_end(cause, console))),
    })
}

fn describe_end(cause: &Cause, console: &str) -> String {
    let what = match cause {
        Cause::Killed => "the sandbox was ended".to_owned(),
        Cause::GuestExited(status) => format!("the guest ended before its command did (status {status})"),
        Cause::GuestCrashed(how) => format!("{} before its command ended", escape::text(how)),
        Cause::NotReady(ms) => format!("the guest was not ready after {} s", *ms as f64 / 1000.0),
        Cause::Violation(what) => {
            format!("the guest violated the protocol and was killed: {}", escape::text(what))
        }
        Cause::Failed(what) => format!("the sandbox failed: {}", escape::text(what)),
    };
    if console.is_empty() {
        format!("{what}. The guest kernel printed nothing")
    } else {
        let lines: String = escape::text(console).lines().map(|line| format!("\n  | {line}")).collect();
        format!("{what}. The guest kernel's last lines:{lines}")
    }
}

/// The collected part of an output, for `--json`.
pub fn collected(sink: &Sink<'_>) -> Value {
    match sink {
        Sink::Memory { buffer: kept, total, .. } => {
            json!({ "text": String::from_utf8_lossy(kept), "bytes": total, "truncated": *total > kept.len() as u64 })
        }
        Sink::Descriptor(_) | Sink::Filtered(..) => Value::Null,
    }
}
