//! Why a sandbox ended, in words.

use bathy_protocol::Cause;

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
