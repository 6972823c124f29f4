//! What is in the guest's memory before its first instruction: the kernel, the initramfs, its command line, and the
//! tables that describe the machine to it. The kernel is entered by the PVH protocol, at an address that it names itself.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use bathy_devices::GuestRam;
use bathy_protocol::launch::Launch;
use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{self, BootConfigurator, BootParams};
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::{self, KernelLoader};
use linux_loader::start_info::{
    XEN_HVM_MEMMAP_TYPE_RAM, XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry,
    hvm_start_info,
};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::arch::{layout, mptable};
use crate::elf;
use crate::sys::FileAt;

const PAGE: u64 = 4096;
/// The most memory that is made ready at one place before the guest asks for it.
const MOST_PREPARED: u64 = 32 << 20;
/// More than the initramfs takes.
const INITRAMFS_ROOM: u64 = 2 << 20;

/// What keeps a guest from being booted.
#[derive(Debug, Error)]
pub enum BootError {
    #[error(
        "The guest kernel is not an ELF kernel image, or it is damaged. `bathy setup --engine kvm` builds the right one"
    )]
    Kernel(#[source] loader::Error),
    /// A kernel of another kind.
    #[error(
        "The guest kernel has no entry for virtual machines (PVH): it is not one for the kvm engine. `bathy setup --engine kvm` builds the right one"
    )]
    NotForMachines,
    /// A segment whose address is not usable.
    #[error(
        "The guest kernel has a part at {0:#x} that cannot be there: the image is damaged. `bathy setup --engine kvm` builds a new one"
    )]
    Segment(u64),
    /// An entry that is outside of it.
    #[error(
        "The guest kernel's entry {0:#x} is outside the kernel: the image is damaged. `bathy setup --engine kvm` builds a new one"
    )]
    Entry(u64),
    /// Not enough memory for kernel and initramfs.
    #[error(
        "The guest's {memory} bytes of memory do not hold its kernel and agent, which take {needed}. Use a larger --memory"
    )]
    Memory { memory: u64, needed: u64 },
    #[error("The agent's initramfs cannot be read")]
    Initramfs(#[source] io::Error),
    /// It cannot be copied.
    #[error("Guest memory cannot be written")]
    Write(#[from] GuestMemoryError),
    #[error("The guest's boot information cannot be written")]
    Tables(#[source] configurator::Error),
    #[error("The guest kernel's command line has {0} characters, more than fit")]
    CommandLine(usize),
}

/// What a guest is booted with.
pub struct Parts<'a> {
    pub kernel: &'a File,
    pub initramfs: &'a File,
    pub command_line: &'a str,
    /// How many processors the tables describe.
    pub cpus: u8,
}

/// Fills the memory and returns where the kernel is entered.
///
/// # Errors
/// When a part is not what it has to be, or does not fit.
pub fn load(ram: &GuestRam, parts: &Parts<'_>) -> Result<u64, BootError> {
    let memory = ram.memory();
    let segments = elf::segments(parts.kernel).map_err(BootError::Kernel)?;
    // Below that are the tables that describe the machine to the kernel.
    let misplaced = |part: &&elf::Segment| part.start < layout::HIGH_MEMORY || part.in_file > part.in_memory;
    if let Some(part) = segments.iter().find(misplaced) {
        return Err(BootError::Segment(part.start));
    }
    let low_end = ram.size().min(layout::HOLE.start);
    prepare_memory(ram, &segments, low_end);
    let mut image = FileAt { file: parts.kernel, at: 0 };
    let start = Some(GuestAddress(layout::HIGH_MEMORY));
    let kernel = Elf::load(memory, None, &mut image, start).map_err(BootError::Kernel)?;
    let PvhBootCapability::PvhEntryPresent(entry) = kernel.pvh_boot_cap else {
        return Err(BootError::NotForMachines);
    };
    let holds_entry =
        |part: &elf::Segment| entry.0.checked_sub(part.start).is_some_and(|at| at < part.in_file);
    if !segments.iter().any(holds_entry) {
        return Err(BootError::Entry(entry.0));
    }

    let initramfs_size = parts.initramfs.metadata().map_err(BootError::Initramfs)?.len();
    let needed = kernel.kernel_end.saturating_add(initramfs_size).saturating_add(PAGE);
    if needed > low_end {
        return Err(BootError::Memory { memory: ram.size(), needed });
    }
    let initramfs = (low_end - initramfs_size) / PAGE * PAGE;
    let length = usize::try_from(initramfs_size).unwrap_or(usize::MAX);
    memory.read_exact_volatile_from(
        GuestAddress(initramfs),
        &mut FileAt { file: parts.initramfs, at: 0 },
        length,
    )?;

    if parts.command_line.len() >= layout::COMMAND_LINE_SIZE {
        return Err(BootError::CommandLine(parts.command_line.len()));
    }
    memory.write_slice(parts.command_line.as_bytes(), GuestAddress(layout::COMMAND_LINE))?;
    memory.write_slice(&mptable::table(layout::MP_TABLE, parts.cpus), GuestAddress(layout::MP_TABLE))?;
    write_start_info(
        ram,
        hvm_modlist_entry { paddr: initramfs, size: initramfs_size, ..Default::default() },
    )?;
    Ok(entry.0)
}

/// A guest's first memory accesses are each a fault, of the guest's and of ours, unless the host has large pages there
/// already. What a kernel touches first is itself, and the top of low memory: the initramfs, and below it the description of
/// every page, 64 bytes each.
fn prepare_memory(ram: &GuestRam, segments: &[elf::Segment], low_end: u64) {
    let start = segments.iter().map(|part| part.start).min().unwrap_or(0);
    let end = segments.iter().map(|part| part.start.saturating_add(part.in_memory)).max().unwrap_or(0);
    ram.use_large_pages(start..end.min(start.saturating_add(MOST_PREPARED)));
    let descriptions = (ram.size() / PAGE).saturating_mul(64).min(MOST_PREPARED);
    ram.use_large_pages(low_end.saturating_sub(descriptions + INITRAMFS_ROOM)..low_end);
}

fn write_start_info(ram: &GuestRam, initramfs: hvm_modlist_entry) -> Result<(), BootError> {
    let map = memory_map(ram.size());
    let info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: 1,
        nr_modules: 1,
        modlist_paddr: layout::MODULE_LIST,
        cmdline_paddr: layout::COMMAND_LINE,
        memmap_paddr: layout::MEMORY_MAP,
        memmap_entries: u32::try_from(map.len()).unwrap_or(0),
        ..Default::default()
    };
    let mut params = BootParams::new(&info, GuestAddress(layout::START_INFO));
    params.set_sections(&map, GuestAddress(layout::MEMORY_MAP));
    params.set_modules(&[initramfs], GuestAddress(layout::MODULE_LIST));
    PvhBootConfigurator::write_bootparams(&params, ram.memory()).map_err(BootError::Tables)
}

/// Which addresses are memory: all there is, without the legacy area of a PC and without the hole.
fn memory_map(size: u64) -> Vec<hvm_memmap_table_entry> {
    let below = size.min(layout::HOLE.start);
    let mut ranges = vec![layout::LOW_MEMORY, layout::HIGH_MEMORY..below];
    if below < size {
        ranges.push(layout::HOLE.end..layout::HOLE.end + (size - below));
    }
    let entry = |range: std::ops::Range<u64>| hvm_memmap_table_entry {
        addr: range.start,
        size: range.end - range.start,
        type_: XEN_HVM_MEMMAP_TYPE_RAM,
        reserved: 0,
    };
    ranges.into_iter().map(entry).collect()
}

/// The kernel's command line. The keeper writes all of it; nothing comes from a client or from an image.
pub fn command_line(launch: &Launch, devices: usize) -> String {
    let mut words: Vec<String> = [
        "console=ttyS0",
        "quiet",
        // A reset asks the keyboard controller; one after a panic leaves another mark (see `layout::RESET_KIND`).
        "reboot=k,panic_warm",
        "panic=-1",
        "rdinit=/init",
        "random.trust_cpu=on",
        "8250.nr_uarts=1",
        // No device needs its data below 4 GiB.
        "iommu=off",
    ]
    .map(str::to_owned)
    .into();
    for (index, line) in (0..devices as u64).zip(layout::FIRST_LINE..) {
        let address = layout::DEVICES + index * layout::DEVICE_SIZE;
        words.push(format!("virtio_mmio.device={}@{address:#x}:{line}", layout::DEVICE_SIZE));
    }
    // What follows the dashes is for PID 1.
    words.push("--".to_owned());
    words.push(format!("threads={}", launch.processes));
    words.extend(launch.restriction_arguments().map(str::to_owned));
    words.join(" ")
}

impl Read for FileAt<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for FileAt<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let place = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.file.metadata()?.len().checked_add_signed(by),
        };
        self.at = place.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests;
