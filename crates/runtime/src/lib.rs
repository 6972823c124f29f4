//! From a description to a running sandbox, and to its end: everything that the trusted side does on the host.
//!
//! * [`assets`], [`disk`], [`slot`], [`resource_group`], [`gateway`]: what a sandbox is made of.
//! * [`launch`]: from a description to a running keeper.
//! * [`freeze`]: pausing it.
//! * [`supervisor`]: watching and recording it, with [`ledger`], [`net_events`] and [`audit`].
//! * [`folder`], [`description`], [`ephemeral`]: what stands on the disk for it.
//! * [`ending`], [`processes`]: how its processes end.
//! * [`engine`], [`doctor`]: what this machine offers, and what to do about what it does not.

pub mod addresses;
pub mod assets;
pub mod audit;
mod counts;
pub mod description;
pub mod disk;
pub mod doctor;
pub mod ending;
pub mod engine;
pub mod ephemeral;
pub mod folder;
pub mod freeze;
pub mod gateway;
mod identity;
pub mod kvm_probe;
pub mod launch;
pub mod ledger;
pub mod net_events;
pub mod processes;
pub mod resource_group;
pub mod room;
pub mod slot;
pub mod supervisor;
mod sys;

/// What this thread has used, which does not depend on what else the machine does.
#[cfg(test)]
fn processor_time() -> std::time::Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(used.tv_sec.try_into().unwrap(), used.tv_nsec.try_into().unwrap())
}
