//! Giving up every privilege, for good.

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits, set_no_new_privs,
};
use thiserror::Error;

/// A privilege could not be given up.
#[derive(Debug, Error)]
#[error("Cannot {step}: {source}")]
pub struct PrivilegesError {
    step: &'static str,
    source: rustix::io::Errno,
}

/// Drops all capabilities from all sets, forbids gaining any by execution, and hides the process's memory and files
/// from other processes of the same user.
pub fn drop_all() -> Result<(), PrivilegesError> {
    let failed = |step| move |source| PrivilegesError { step, source };
    let locked = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
    set_capabilities_secure_bits(locked).map_err(failed("lock the secure bits"))?;
    clear_ambient_capability_set().map_err(failed("clear the ambient capabilities"))?;
    for number in 0..u64::BITS {
        // Numbers that this kernel does not know are refused with EINVAL: there is nothing to drop.
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(source) => return Err(PrivilegesError { step: "empty the bounding set", source }),
        }
    }
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
        .map_err(failed("drop the capabilities"))?;
    set_no_new_privs(true).map_err(failed("set no_new_privs"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed("become undumpable"))
}
