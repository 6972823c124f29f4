//! The table by which a PC without ACPI describes processors and interrupt lines to its kernel (Intel's MultiProcessor
//! Specification 1.4).

use super::layout::LINES;

/// Where the local interrupt controller of every processor is.
const LOCAL_CONTROLLER: u32 = 0xfee0_0000;
/// Where the shared interrupt controller is.
const SHARED_CONTROLLER: u32 = 0xfec0_0000;
/// Revision 1.4, as both structures write it.
const REVISION: u8 = 4;
/// The version that KVM's interrupt controllers report.
const CONTROLLER_VERSION: u8 = 0x14;

const PROCESSOR: u8 = 0;
const BUS: u8 = 1;
const CONTROLLER: u8 = 2;
const LINE: u8 = 3;
const LOCAL_LINE: u8 = 4;

const ENABLED: u8 = 1;
const FIRST_PROCESSOR: u8 = 2;
const ORDINARY: u8 = 0;
const NOT_MASKABLE: u8 = 1;
const FROM_OLD_CONTROLLER: u8 = 3;
const ALL: u8 = 0xff;

/// The table for `cpus` processors, as it is to lie at the guest's address `at`.
pub fn table(at: u64, cpus: u8) -> Vec<u8> {
    let controller = cpus;
    let mut entries = Vec::new();
    let mut count: u16 = 0;
    let mut add = |entry: &[u8]| {
        entries.extend_from_slice(entry);
        count += 1;
    };
    for cpu in 0..cpus {
        let flags = if cpu == 0 { ENABLED | FIRST_PROCESSOR } else { ENABLED };
        let mut entry = [0; 20];
        entry[..4].copy_from_slice(&[PROCESSOR, cpu, CONTROLLER_VERSION, flags]);
        add(&entry);
    }
    add(&[BUS, 0, b'I', b'S', b'A', b' ', b' ', b' ']);
    let mut entry = [CONTROLLER, controller, CONTROLLER_VERSION, ENABLED, 0, 0, 0, 0];
    entry[4..].copy_from_slice(&SHARED_CONTROLLER.to_le_bytes());
    add(&entry);
    for line in (0..LINES).filter_map(|line| u8::try_from(line).ok()) {
        add(&[LINE, ORDINARY, 0, 0, 0, line, controller, line]);
    }
    add(&[LOCAL_LINE, FROM_OLD_CONTROLLER, 0, 0, 0, 0, 0, 0]);
    add(&[LOCAL_LINE, NOT_MASKABLE, 0, 0, 0, 0, ALL, 1]);

    let header = header(&entries, count);
    let mut table = pointer(at + POINTER_SIZE as u64);
    table.extend_from_slice(&header);
    table.extend_from_slice(&entries);
    table
}

const POINTER_SIZE: usize = 16;
const HEADER_SIZE: usize = 44;

/// The structure that a kernel searches for; it has the address of the rest.
fn pointer(table: u64) -> Vec<u8> {
    let mut bytes = vec![0; POINTER_SIZE];
    bytes[..4].copy_from_slice(b"_MP_");
    bytes[4..8].copy_from_slice(&u32::try_from(table).unwrap_or_default().to_le_bytes());
    bytes[8] = 1;
    bytes[9] = REVISION;
    bytes[10] = checksum(&bytes);
    bytes
}

fn header(entries: &[u8], count: u16) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_SIZE];
    let length = u16::try_from(HEADER_SIZE + entries.len()).unwrap_or(u16::MAX);
    bytes[..4].copy_from_slice(b"PCMP");
    bytes[4..6].copy_from_slice(&length.to_le_bytes());
    bytes[6] = REVISION;
    bytes[8..16].copy_from_slice(b"BATHYSPH");
    bytes[16..28].copy_from_slice(b"ERE MICROVM ");
    bytes[34..36].copy_from_slice(&count.to_le_bytes());
    bytes[36..40].copy_from_slice(&LOCAL_CONTROLLER.to_le_bytes());
    let sum = checksum(&bytes).wrapping_add(checksum(entries));
    bytes[7] = sum;
    bytes
}

/// What makes all bytes add up to zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte))
    }

    #[test]
    fn both_structures_add_up_to_zero_and_find_each_other() {
        for cpus in [1, 2, 64] {
            let table = table(0xf_0000, cpus);
            let (pointer, rest) = table.split_at(POINTER_SIZE);
            assert_eq!((&pointer[..4], sum(pointer)), (&b"_MP_"[..], 0));
            assert_eq!(u32::from_le_bytes(pointer[4..8].try_into().unwrap()), 0xf_0010);
            assert_eq!((&rest[..4], sum(rest)), (&b"PCMP"[..], 0));
            assert_eq!(usize::from(u16::from_le_bytes(rest[4..6].try_into().unwrap())), rest.len());
        }
    }

    #[test]
    fn every_entry_is_of_the_length_that_its_kind_has() {
        let table = table(0xf_0000, 3);
        let rest = &table[POINTER_SIZE..];
        let mut entries = &rest[HEADER_SIZE..];
        let mut kinds = Vec::new();
        while let [kind, ..] = entries {
            kinds.push(*kind);
            entries = &entries[if *kind == PROCESSOR { 20 } else { 8 }..];
        }
        assert_eq!(kinds.len(), usize::from(u16::from_le_bytes(rest[34..36].try_into().unwrap())));
        assert_eq!(kinds.iter().filter(|kind| **kind == PROCESSOR).count(), 3);
        assert_eq!(kinds.iter().filter(|kind| **kind == LINE).count(), 24);
    }
}
