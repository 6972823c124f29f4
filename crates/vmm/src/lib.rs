//! The kvm engine: a hardware virtual machine with our own devices, run by threads of the keeper.
//!
//! * [`boot`]: what is in the guest's memory before its first instruction.
//! * [`machine`]: the virtual machine, its processors and its interrupt lines.
//! * [`vcpu`]: one thread per virtual processor, and what it does when the guest leaves.
//! * [`bus`]: which device a port or an address belongs to.
//! * [`mmio`]: how the guest's drivers reach our device models.
//! * [`slot`]: one device in its place.
//! * [`serial`]: the port for the kernel's console output.
//!
//! What depends on the processor is in `x86_64`: registers, identification, tables, addresses. Of the rest, the way of booting and
//! the ports are x86's too; the machine, its threads, its devices and their transport would serve another one.

pub mod boot;
pub mod bus;
mod elf;
pub mod machine;
pub mod mmio;
pub mod serial;
pub mod slot;
mod sys;
pub mod vcpu;
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
use x86_64 as arch;

pub use arch::layout;
pub use machine::{Machine, MachineError};
pub use slot::{Slot, SlotError, Wiring};
pub use vcpu::{Processors, Stop};
