//! Resource limits of a process kind: both the soft and the hard one, so that they cannot be raised again.

use rustix::process::{Resource, Rlimit, setrlimit};
use thiserror::Error;

/// A limit could not be set.
#[derive(Debug, Error)]
#[error("Cannot limit {resource:?} to {value}: {source}")]
pub struct LimitsError {
    resource: Resource,
    value: u64,
    source: rustix::io::Errno,
}

/// A resource limit, soft and hard alike.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// The resource that is limited.
    pub resource: Resource,
    /// The limit, in the resource's own unit.
    pub value: u64,
}

/// Limits that every jailed process has: no core dump (J8), no locked memory, no message queues, no real-time priority.
///
/// A host that pipes core dumps to a program starts it at a limit of 0 all the same; 1 prevents that (J9).
pub const COMMON: &[Limit] = &[
    Limit { resource: Resource::Core, value: 1 },
    Limit { resource: Resource::Memlock, value: 0 },
    Limit { resource: Resource::Msgqueue, value: 0 },
    Limit { resource: Resource::Nice, value: 0 },
    Limit { resource: Resource::Rtprio, value: 0 },
];

/// Sets limits. A limit above the present hard limit is lowered to it: the operator's own limit holds.
pub fn apply(limits: &[Limit]) -> Result<(), LimitsError> {
    for &Limit { resource, value } in limits {
        let present = rustix::process::getrlimit(resource).maximum;
        let value = present.map_or(value, |present| present.min(value));
        let limit = Rlimit { current: Some(value), maximum: Some(value) };
        setrlimit(resource, limit).map_err(|source| LimitsError { resource, value, source })?;
    }
    Ok(())
}
