//! Kernels that are none, and what a right one is given.

use std::io::Write;

use bathy_protocol::launch::{DiskLimits, Engine};

use super::*;

const MIB: u64 = 1 << 20;

fn file(content: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    file
}

/// The smallest image that can be loaded: one segment at 1 MiB, and the note with the entry.
fn kernel(entry: u32, with_note: bool) -> Vec<u8> {
    const HEADERS: u64 = 64 + 2 * 56;
    let mut note = Vec::new();
    for word in [4u32, 4, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(entry.to_le_bytes());
    let body = [0x90u8; 4096];

    let mut image = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    image.extend(2u16.to_le_bytes());
    image.extend(62u16.to_le_bytes());
    image.extend(1u32.to_le_bytes());
    image.extend((MIB).to_le_bytes());
    image.extend(64u64.to_le_bytes());
    image.extend(0u64.to_le_bytes());
    image.extend(0u32.to_le_bytes());
    for half in [64u16, 56, if with_note { 2 } else { 1 }, 0, 0, 0] {
        image.extend(half.to_le_bytes());
    }
    let mut header = |kind: u32, offset: u64, address: u64, size: u64| {
        image.extend(kind.to_le_bytes());
        image.extend(5u32.to_le_bytes());
        for word in [offset, address, address, size, size, 4096] {
            image.extend(word.to_le_bytes());
        }
    };
    header(1, HEADERS, MIB, body.len() as u64);
    header(4, HEADERS + body.len() as u64, 0, note.len() as u64);
    image.extend(body);
    image.extend(note);
    image
}

fn load_kernel(image: &[u8], memory: u64) -> Result<u64, BootError> {
    let ram = GuestRam::create_around(memory, layout::HOLE).unwrap();
    let (kernel, initramfs) = (file(image), file(&[7; 5000]));
    load(&ram, &Parts { kernel: &kernel, initramfs: &initramfs, command_line: "quiet", cpus: 2 })
}

#[test]
fn a_kernel_is_entered_where_it_says() {
    assert_eq!(load_kernel(&kernel(0x10_0040, true), 64 * MIB).unwrap(), 0x10_0040);
}

#[test]
fn what_is_no_kernel_of_ours_is_refused() {
    let refused = |image: &[u8]| load_kernel(image, 64 * MIB).unwrap_err();
    assert!(matches!(refused(b""), BootError::Kernel(_)));
    assert!(matches!(refused(b"#!/bin/sh\n"), BootError::Kernel(_)));
    assert!(matches!(refused(&kernel(0x10_0040, false)), BootError::NotForMachines));
    assert!(matches!(refused(&kernel(0x40, true)), BootError::Entry(0x40)));
    assert!(matches!(refused(&kernel(0x20_0000, true)), BootError::Entry(_)));
}

#[test]
fn a_kernel_that_is_cut_off_or_altered_is_refused_or_harmless() {
    let whole = kernel(0x10_0040, true);
    for length in 0..whole.len() {
        assert!(load_kernel(whole.get(..length).unwrap(), 64 * MIB).is_err(), "{length} bytes");
    }
    for at in 0..176 {
        let mut altered = whole.clone();
        *altered.get_mut(at).unwrap() ^= 0xff;
        // Whatever it is taken for: no panic, and if it is a kernel still, it is entered where it was.
        if let Ok(entry) = load_kernel(&altered, 64 * MIB) {
            assert_eq!(entry, 0x10_0040, "byte {at}");
        }
    }
}

/// An image whose first part has this field of its header replaced.
fn with_field(at: usize, value: u64) -> Vec<u8> {
    let mut image = kernel(0x10_0040, true);
    image.get_mut(64 + at..64 + at + 8).unwrap().copy_from_slice(&value.to_le_bytes());
    image
}

#[test]
fn a_kernel_with_parts_where_they_cannot_be_is_refused() {
    let refused = |image: &[u8]| load_kernel(image, 64 * MIB).unwrap_err();
    assert!(matches!(refused(&with_field(24, layout::MP_TABLE)), BootError::Segment(layout::MP_TABLE)));
    assert!(matches!(refused(&with_field(40, 16)), BootError::Segment(MIB)), "less memory than file");
    assert!(matches!(refused(&with_field(24, 2 * MIB)), BootError::Entry(_)), "the entry is in a gap");
    assert!(matches!(refused(&with_field(24, u64::MAX - 4096)), BootError::Kernel(_)));
    assert!(matches!(refused(&with_field(40, u64::MAX)), BootError::Kernel(_) | BootError::Memory { .. }));
}

#[test]
fn memory_that_is_too_small_is_said_to_be() {
    let image = kernel(0x10_0040, true);
    assert!(matches!(load_kernel(&image, MIB + 2 * 4096), Err(BootError::Memory { .. })));
}

#[test]
fn the_initramfs_is_whole_and_the_map_leaves_it_out_of_nothing() {
    let ram = GuestRam::create_around(64 * MIB, layout::HOLE).unwrap();
    let (kernel, initramfs) = (file(&kernel(0x10_0040, true)), file(&[7; 5000]));
    load(&ram, &Parts { kernel: &kernel, initramfs: &initramfs, command_line: "quiet", cpus: 1 }).unwrap();
    let info: hvm_start_info = ram.memory().read_obj(GuestAddress(layout::START_INFO)).unwrap();
    let module: hvm_modlist_entry = ram.memory().read_obj(GuestAddress(info.modlist_paddr)).unwrap();
    assert_eq!((info.magic, info.nr_modules, module.size), (XEN_HVM_START_MAGIC_VALUE, 1, 5000));
    let mut content = vec![0; 5000];
    ram.memory().read_slice(&mut content, GuestAddress(module.paddr)).unwrap();
    assert!(content.iter().all(|byte| *byte == 7));
}

#[test]
fn memory_above_the_hole_is_in_the_map() {
    let map = memory_map(layout::HOLE.start + 5 * MIB);
    let last = map.last().unwrap();
    assert_eq!((map.len(), last.addr, last.size), (3, layout::HOLE.end, 5 * MIB));
    assert_eq!(map.iter().map(|entry| entry.size).sum::<u64>(), layout::HOLE.start + 5 * MIB - 0x6_0000);
    assert_eq!(memory_map(64 * MIB).len(), 2);
}

#[test]
fn the_command_line_names_every_device_and_fits() {
    let restricted = Some(bathy_protocol::Restriction { writable_root: true });
    let launch = Launch {
        engine: Engine::Kvm { cpus: 1 },
        memory: 64 * MIB,
        processes: 32_768,
        ready_timeout_ms: 1,
        guest_user: false,
        persistent: false,
        log_capacity: 0,
        restricted,
        network: false,
        image: vec![0],
        disk_limits: DiskLimits { write_bandwidth: 1, read_bandwidth: None, flushes: 1 },
    };
    let words = command_line(&launch, layout::MOST_DEVICES);
    assert!(words.len() < layout::COMMAND_LINE_SIZE, "{}", words.len());
    assert!(words.contains("virtio_mmio.device=4096@0xd0000000:5 virtio_mmio.device=4096@0xd0001000:6"));
    assert!(words.ends_with("-- threads=32768 restricted writable-root"), "{words}");
}
