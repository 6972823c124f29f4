//! CPUID as the guest sees it: what KVM offers, less what a sandbox has no use for.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// Which of the guest's processors a table is for.
#[derive(Clone, Copy, Debug)]
pub struct ProcessorId {
    pub number: u8,
    /// How many there are.
    pub count: u8,
    /// KVM's timers can be set by the processor's own clock.
    pub deadline_timer: bool,
    /// The host is itself an emulation whose description of its extended state contradicts itself.
    pub no_extended_state: bool,
}

/// One register of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

/// Bits that are taken out of an answer: leaf, the part of it if only one, register, bits.
type Removal = (u32, Option<u32>, Register, u32);

use Register::{Eax, Ebx, Ecx, Edx};

/// Virtual machines in the virtual machine, performance counters and traces, waiting for memory, transactions, features
/// whose state has to be asked for, and what reveals the host's hardware.
const REMOVED: &[Removal] = &[
    // Monitor and wait, the debug store's 64-bit form and its qualification, VMX, SMX, speed steps, thermal, debug over the
    // bus, performance capabilities, DCA.
    (
        0x1,
        None,
        Ecx,
        1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 11 | 1 << 15 | 1 << 18,
    ),
    // Debug store, thermal sensors and monitors, pending break.
    (0x1, None, Edx, 1 << 21 | 1 << 22 | 1 << 29 | 1 << 31),
    (0x6, None, Eax, !(1 << 2)),
    (0x6, None, Ecx, u32::MAX),
    // Transactions, SGX, processor trace.
    (0x7, Some(0), Ebx, 1 << 2 | 1 << 4 | 1 << 11 | 1 << 25),
    // Waiting for user memory, SGX launch control.
    (0x7, Some(0), Ecx, 1 << 5 | 1 << 30),
    // Transactions' abort, tiles.
    (0x7, Some(0), Edx, 1 << 11 | 1 << 22 | 1 << 24 | 1 << 25),
    // Performance counters.
    (0xa, None, Eax, u32::MAX),
    (0xa, None, Ebx, u32::MAX),
    (0xa, None, Ecx, u32::MAX),
    (0xa, None, Edx, u32::MAX),
    // Tiles' state.
    (0xd, Some(0), Eax, 0b11 << 17),
    // SVM, extended performance counters.
    (0x8000_0001, None, Ecx, 1 << 2 | 1 << 10 | 1 << 23 | 1 << 24 | 1 << 28),
    (0x8000_000a, None, Eax, u32::MAX),
    (0x8000_000a, None, Ebx, u32::MAX),
    (0x8000_000a, None, Edx, u32::MAX),
    // Performance counters of later AMD processors.
    (0x8000_0022, None, Eax, u32::MAX),
    (0x8000_0022, None, Ebx, u32::MAX),
    (0x8000_0022, None, Ecx, u32::MAX),
];

/// Extended state, and the instructions that need it.
const EXTENDED_STATE: &[Removal] = &[
    // FMA, XSAVE, OSXSAVE, AVX, F16C.
    (0x1, None, Ecx, 1 << 12 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 29),
    // AVX2, MPX, all of AVX-512.
    (
        0x7,
        Some(0),
        Ebx,
        1 << 5 | 1 << 14 | 1 << 16 | 1 << 17 | 1 << 21 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 30 | 1 << 31,
    ),
    // AVX-512's later parts, protection keys, VAES, VPCLMULQDQ, shadow stacks.
    (
        0x7,
        Some(0),
        Ecx,
        1 << 1 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 14,
    ),
    (0x7, Some(0), Edx, 1 << 2 | 1 << 3 | 1 << 8 | 1 << 20 | 1 << 23),
    (0x7, Some(1), Eax, 1 << 4 | 1 << 5 | 1 << 23),
    // FMA4, XOP.
    (0x8000_0001, None, Ecx, 1 << 11 | 1 << 16),
];

const DEADLINE_TIMER: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
const SEVERAL_PROCESSORS: u32 = 1 << 28;

/// Leaves that describe the topology of processors; on some hosts they are empty.
const ARRANGEMENT: [u32; 2] = [0xb, 0x1f];

/// Turns what KVM offers into the table of the processor `who`.
pub fn filtered(offered: &CpuId, who: ProcessorId) -> Result<CpuId, vmm_sys_util::fam::Error> {
    let mut entries: Vec<kvm_cpuid_entry2> = Vec::new();
    for entry in offered.as_slice().iter().filter(|entry| !ARRANGEMENT.contains(&entry.function)) {
        let mut entry = *entry;
        remove(&mut entry, REMOVED);
        if who.no_extended_state {
            remove(&mut entry, EXTENDED_STATE);
            if entry.function == 0xd {
                (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
            }
        }
        identify(&mut entry, who);
        entries.push(entry);
    }
    let highest =
        entries.iter().filter(|entry| entry.function == 0).map(|entry| entry.eax).max().unwrap_or(0);
    for function in ARRANGEMENT.into_iter().filter(|function| *function <= highest) {
        entries.extend((0..3).map(|level| arrangement(function, level, who)));
    }
    CpuId::from_entries(&entries)
}

/// One level of how processors are arranged: threads of a core, cores of the package, and nothing above.
fn arrangement(function: u32, level: u32, who: ProcessorId) -> kvm_cpuid_entry2 {
    let count = u32::from(who.count);
    let (eax, ebx, kind) = match level {
        0 => (0, 1, 1),
        1 => (bits_for(count), count, 2),
        _ => (0, 0, 0),
    };
    kvm_cpuid_entry2 {
        function,
        index: level,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax,
        ebx,
        ecx: level | kind << 8,
        edx: who.number.into(),
        ..kvm_cpuid_entry2::default()
    }
}

fn remove(entry: &mut kvm_cpuid_entry2, removals: &[Removal]) {
    for (leaf, part, register, bits) in removals {
        if entry.function == *leaf && part.is_none_or(|part| part == entry.index) {
            let value = match register {
                Eax => &mut entry.eax,
                Ebx => &mut entry.ebx,
                Ecx => &mut entry.ecx,
                Edx => &mut entry.edx,
            };
            *value &= !bits;
        }
    }
}

/// Which processor it is, of how many: all of them cores of one package, one thread each.
fn identify(entry: &mut kvm_cpuid_entry2, who: ProcessorId) {
    let (number, count) = (u32::from(who.number), u32::from(who.count));
    match entry.function {
        0x1 => {
            entry.ebx = entry.ebx & 0x0000_ffff | number << 24 | count << 16;
            entry.ecx |= HYPERVISOR;
            if who.deadline_timer {
                entry.ecx |= DEADLINE_TIMER;
            }
            entry.edx = entry.edx & !SEVERAL_PROCESSORS | if count > 1 { SEVERAL_PROCESSORS } else { 0 };
        }
        // How many share each cache: keep the cache, correct the sharing.
        0x4 | 0x8000_001d if entry.eax & 0x1f != 0 => {
            let sharing = if (entry.eax >> 5) & 0x7 >= 3 { count - 1 } else { 0 };
            let cores = if entry.function == 0x4 { (count - 1).min(63) << 26 } else { 0 };
            entry.eax = entry.eax & 0x3fff | sharing << 14 | cores;
        }
        0x8000_0008 => entry.ecx = (count - 1) | (bits_for(count) << 12),
        0x8000_001e => {
            (entry.eax, entry.ebx, entry.ecx) = (number, number, 0);
        }
        _ => {}
    }
}

/// How many bits it takes to tell `count` processors apart.
fn bits_for(count: u32) -> u32 {
    u32::BITS - (count - 1).leading_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(function: u32, index: u32) -> kvm_cpuid_entry2 {
        let all = u32::MAX;
        kvm_cpuid_entry2 { function, index, eax: all, ebx: all, ecx: all, edx: all, ..Default::default() }
    }

    fn seen(function: u32, index: u32, who: ProcessorId) -> kvm_cpuid_entry2 {
        // As hosts do: the highest leaf, one entry of its own, and an arrangement that says nothing.
        let highest = kvm_cpuid_entry2 { eax: 0x1f, ..Default::default() };
        let silent = kvm_cpuid_entry2 { function: 0xb, ..Default::default() };
        let offered = CpuId::from_entries(&[highest, silent, answer(function, index)]).unwrap();
        let all = filtered(&offered, who).unwrap();
        *all.as_slice().iter().find(|entry| (entry.function, entry.index) == (function, index)).unwrap()
    }

    const SECOND_OF_TWO: ProcessorId =
        ProcessorId { number: 1, count: 2, deadline_timer: true, no_extended_state: false };

    #[test]
    fn no_guest_is_offered_to_run_guests_or_to_count_events() {
        let basic = seen(0x1, 0, SECOND_OF_TWO);
        assert_eq!(basic.ecx & (1 << 5), 0, "VMX");
        assert_eq!(seen(0x8000_0001, 0, SECOND_OF_TWO).ecx & (1 << 2), 0, "SVM");
        assert_eq!(seen(0xa, 0, SECOND_OF_TWO).eax, 0, "performance counters");
        assert_eq!(seen(0x8000_0001, 0, SECOND_OF_TWO).ecx & (1 << 23), 0, "AMD's performance counters");
        let later = seen(0x8000_0022, 0, SECOND_OF_TWO);
        assert_eq!((later.eax, later.ebx, later.ecx), (0, 0, 0), "AMD's later performance counters");
    }

    #[test]
    fn a_processor_knows_which_of_how_many_it_is() {
        let basic = seen(0x1, 0, SECOND_OF_TWO);
        assert_eq!((basic.ebx >> 24, basic.ebx >> 16 & 0xff), (1, 2));
        assert_ne!(basic.ecx & DEADLINE_TIMER, 0);
        let cores = seen(0xb, 1, SECOND_OF_TWO);
        assert_eq!((cores.eax, cores.ebx, cores.ecx, cores.edx), (1, 2, 0x201, 1));
        let threads = seen(0xb, 0, SECOND_OF_TWO);
        assert_eq!((threads.eax, threads.ebx, threads.ecx, threads.edx), (0, 1, 0x100, 1));
        assert_eq!(seen(0xb, 2, SECOND_OF_TWO).ecx, 2, "nothing above the package");
        let third_of_five = ProcessorId { number: 2, count: 5, ..SECOND_OF_TWO };
        assert_eq!(seen(0x1f, 1, third_of_five).eax, 3, "three bits tell five apart");
        let alone = ProcessorId { number: 0, count: 1, ..SECOND_OF_TWO };
        assert_eq!(seen(0xb, 1, alone).eax, 0);
        assert_eq!(seen(0x1, 0, alone).edx & SEVERAL_PROCESSORS, 0);
    }

    #[test]
    fn extended_state_goes_with_all_that_needs_it() {
        let who = ProcessorId { no_extended_state: true, ..SECOND_OF_TWO };
        assert_eq!(seen(0x1, 0, who).ecx & (1 << 26 | 1 << 28), 0, "XSAVE and AVX");
        assert_eq!(seen(0x7, 0, who).ebx & (1 << 5 | 1 << 16), 0, "AVX2 and AVX-512");
        assert_eq!(seen(0xd, 0, who).eax, 0);
        assert_ne!(seen(0x1, 0, SECOND_OF_TWO).ecx & (1 << 26), 0);
    }
}
