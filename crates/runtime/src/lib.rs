//! Everything that the trusted side does on the host, from a specification to a running sandbox and its end.
//!
//! * [`assets`], [`disk`], [`slot`], [`resource_group`], [`gateway`]: the parts of a sandbox.
//! * [`images`]: images from registries, unpacked.
//! * [`launch`]: starts the keeper.
//! * [`freeze`]: pauses and resumes the guest.
//! * [`supervisor`]: watches and records it, with [`ledger`], [`net_events`] and [`audit`].
//! * [`folder`], [`description`], [`ephemeral`]: its files on the host's disk.
//! * [`ending`], [`processes`]: its processes and how they ended.
//! * [`engine`], [`doctor`]: what this machine offers, and hints for what is missing.

pub mod addresses;
pub mod assets;
pub mod audit;
mod counts;
pub mod description;
pub mod disk;
pub mod disk_space;
pub mod doctor;
pub mod ending;
pub mod engine;
pub mod ephemeral;
pub mod folder;
pub mod freeze;
pub mod gateway;
mod identity;
pub mod images;
pub mod kvm_probe;
pub mod launch;
pub mod ledger;
pub mod net_events;
pub mod processes;
pub mod resource_group;

pub mod slot;
pub mod supervisor;
mod sys;

/// The CPU time of this thread, which does not depend on the load of the machine.
fn processor_time() -> std::time::Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let seconds = used.tv_sec.try_into().unwrap_or_default();
    std::time::Duration::new(seconds, used.tv_nsec.try_into().unwrap_or_default())
}
