//! Where things are in the guest's physical memory.

use std::ops::Range;

use crate::mmio::WINDOW_BYTES;

/// Addresses without memory: our devices, and above them the interrupt controllers that KVM puts there.
pub const HOLE: Range<u64> = 0xd000_0000..0x1_0000_0000;

/// The registers of the first device; each has [`DEVICE_SIZE`] bytes of addresses.
pub const DEVICES: u64 = HOLE.start;
/// The addresses of one device.
pub const DEVICE_SIZE: u64 = WINDOW_BYTES;
/// The interrupt line of the first device. The lines below belong to the old devices of a PC.
pub const FIRST_LINE: u32 = 5;
/// How many interrupt lines there are.
pub const LINES: u32 = 24;
/// The most devices there can be.
pub const MOST_DEVICES: usize = 16;

/// The serial port, at the ports and on the interrupt line where every PC has its first one.
pub const SERIAL_PORTS: Range<u16> = 0x3f8..0x400;
/// The serial port's interrupt line.
pub const SERIAL_LINE: u32 = 4;
/// The keyboard controller's command port: all that is left of it is the reset line.
pub const RESET_PORT: u16 = 0x64;
/// What a kernel writes there to reset the machine.
pub const RESET_COMMAND: u8 = 0xfe;
/// Where Linux leaves the kind of a reset that it is about to ask for.
pub const RESET_KIND: u64 = 0x472;
/// The kind that we ask for after a panic (`reboot=…,panic_warm`); any other reset is cold.
pub const WARM_RESET: u16 = 0x1234;

/// Ordinary memory below the legacy area of a PC.
pub const LOW_MEMORY: Range<u64> = 0..0xa_0000;
/// Where ordinary memory goes on after the legacy area.
pub const HIGH_MEMORY: u64 = 0x10_0000;
/// The description of processors and interrupts, in the area that a kernel searches for it.
pub const MP_TABLE: u64 = 0xf_0000;

/// The structure that the kernel's first instruction is given the address of.
pub const START_INFO: u64 = 0x6000;
/// Where that structure has the address of the initramfs.
pub const MODULE_LIST: u64 = 0x6040;
/// Which addresses are memory.
pub const MEMORY_MAP: u64 = 0x7000;
pub const COMMAND_LINE: u64 = 0x2_0000;
/// How long they may be, with the zero at their end.
pub const COMMAND_LINE_SIZE: usize = 2048;

/// Three pages that KVM needs on some processors, away from everything else.
pub const TASK_STATE: u64 = 0xfffb_d000;
