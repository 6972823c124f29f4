//! The first processor's state at the kernel's first instruction: 32-bit protected mode without paging, as the PVH
//! protocol has it. The others wait to be started by the first one.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::{Error, VcpuFd};

use super::layout;

/// Protected mode, with the one bit that is always set on processors of this kind.
const CR0: u64 = 0x11;
/// The one flag that is always set.
const FLAGS: u64 = 0x2;

/// Switches of the processor, and the one for fast copies of memory. Firmware sets it; a kernel that finds it off on an Intel
/// processor does not use them.
const MISC_ENABLE: u32 = 0x1a0;
const FAST_STRINGS: u64 = 1;

/// A flat segment over all addresses.
fn segment(selector: u16, kind: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        dpl: 0,
        db: 1,
        s: 1,
        l: 0,
        g: 1,
        ..kvm_segment::default()
    }
}

/// Does what firmware would: string instructions are fast.
pub fn enable_fast_strings(cpu: &VcpuFd) -> Result<(), Error> {
    let entry = kvm_msr_entry { index: MISC_ENABLE, ..kvm_msr_entry::default() };
    let Ok(mut registers) = Msrs::from_entries(&[entry]) else { return Ok(()) };
    // A KVM that does not know the register reads none.
    if cpu.get_msrs(&mut registers)? == 1 {
        registers.as_mut_slice().iter_mut().for_each(|entry| entry.data |= FAST_STRINGS);
        cpu.set_msrs(&registers)?;
    }
    Ok(())
}

/// Sets the first processor's registers for a kernel that is entered at `entry`.
pub fn set_first(cpu: &VcpuFd, entry: u64) -> Result<(), Error> {
    let mut special = cpu.get_sregs()?;
    let data = segment(0x10, 0x3);
    special.cs = segment(0x8, 0xb);
    (special.ds, special.es, special.fs) = (data, data, data);
    (special.gs, special.ss) = (data, data);
    special.tr = kvm_segment { limit: 0x67, s: 0, g: 0, db: 0, ..segment(0x18, 0xb) };
    special.cr0 = CR0;
    special.cr4 = 0;
    special.efer = 0;
    cpu.set_sregs(&special)?;
    cpu.set_regs(&kvm_regs { rip: entry, rbx: layout::START_INFO, rflags: FLAGS, ..kvm_regs::default() })
}
