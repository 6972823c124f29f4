//! A filter that decides by the address of the instruction that makes a system call.
//!
//! In seccomp mode a guest program and the stub that runs it are one host process, and both of them and the guest kernel have
//! one filter, from the jail (attack U11: a guest that could add one could add thousands). Only the address distinguishes their calls
//! apart, so the guest kernel keeps guest programs out of the first two places:
//!
//! - the kernel's text, where the stub's start-up code is linked too: the kernel's table;
//! - the stub's code page: the stub's table. A guest program can jump there, with registers of its own;
//! - anywhere else: a guest program's call, which is trapped, and so reaches the guest kernel.
//!
//! What a guest program can bring about by itself is refused by an error: each process that a filter kills is a line in the
//! host's audit log, which it could flood with them (attack U10).
//!
//! The tables are compiled by seccompiler, which cannot test addresses: what goes before them is written by hand.

use std::ops::Range;

use libc::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_IMM, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JGT, BPF_JMP, BPF_K, BPF_LD, BPF_MISC,
    BPF_RET, BPF_SUB, BPF_TAX, BPF_W, BPF_X, SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_LOG,
    SECCOMP_RET_TRAP, SYS_mmap,
};
use seccompiler::{BpfProgram, sock_filter};

use super::{Filter, FilterError, KILLS, Otherwise};

/// Where the guest kernel's code is, as its build checks. No guest program has anything there.
pub const KERNEL_TEXT: Range<u32> = 0x6000_0000..0x6080_0000;
/// The page of the stub's code.
pub const STUB_CODE: u64 = 0x7fff_ffff_c000;

/// `AUDIT_ARCH_X86_64`: guest programs' calls by the 32-bit entry are not trapped, but refused.
const X86_64: u32 = 0xc000_003e;
const PAGE: u32 = 0xffff_f000;

/// Offsets in the kernel's `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ADDRESS: Halves = Halves { low: 8, high: 12 };

/// A value of 64 bits, which a filter reads in halves.
struct Halves {
    low: u32,
    high: u32,
}

const fn argument(number: u32) -> Halves {
    Halves { low: 16 + 8 * number, high: 20 + 8 * number }
}

/// The tables by address.
#[derive(Clone, Copy, Debug)]
pub struct ByAddress {
    /// For calls from the guest kernel's text.
    pub kernel: Filter,
    /// For calls from the stub's page.
    pub stub: Filter,
}

impl ByAddress {
    /// The filter as a program for the kernel.
    pub fn compile(&self) -> Result<BpfProgram, FilterError> {
        let mut stub = keep_kernel_text_empty(self.stub.otherwise);
        stub.extend(self.stub.compile()?);
        let kernel = self.kernel.compile()?;
        // Both programs have jumps by distance only, none of which leads out of its own.
        let mut program = choose(length(&stub));
        program.extend(stub);
        program.extend(kernel);
        Ok(program)
    }
}

fn length(program: &[sock_filter]) -> u32 {
    // A longer one is refused by the kernel.
    u32::try_from(program.len()).unwrap_or(u32::MAX)
}

/// Goes on behind its end if the call comes from the stub, and `stub` instructions later if from the kernel.
///
/// The address is that of the next instruction: a call right before the kernel's text is not in it.
fn choose(stub: u32) -> BpfProgram {
    let [stub_high, stub_low] = halves(STUB_CODE);
    vec![
        load(ARCHITECTURE),
        jump(BPF_JEQ, X86_64, 1, 0),
        end(refused(libc::ENOSYS)),
        load(ADDRESS.high),
        jump(BPF_JEQ, 0, 2, 0),
        jump(BPF_JEQ, stub_high, 5, 0),
        end(SECCOMP_RET_TRAP),
        // 7: in the lowest 4 GiB.
        load(ADDRESS.low),
        jump(BPF_JGE, KERNEL_TEXT.end, 1, 0),
        jump(BPF_JGT, KERNEL_TEXT.start, 5, 0),
        end(SECCOMP_RET_TRAP),
        // 11: near the stub.
        load(ADDRESS.low),
        instruction(BPF_ALU | BPF_AND | BPF_K, 0, 0, PAGE),
        jump(BPF_JEQ, stub_low, 2, 0),
        end(SECCOMP_RET_TRAP),
        // 15: in the kernel's text.
        instruction(BPF_JMP | BPF_JA, 0, 0, stub),
    ]
}

/// Does not let the stub map anything where only the kernel's code may be: guest programs can jump to its calls. Else goes on
/// behind its end.
fn keep_kernel_text_empty(otherwise: Otherwise) -> BpfProgram {
    let (address, size) = (argument(0), argument(1));
    let mmap = u32::try_from(SYS_mmap).unwrap_or_default();
    vec![
        load(NUMBER),
        jump(BPF_JEQ, mmap, 0, 14),
        load(address.high),
        jump(BPF_JEQ, 0, 0, 12),
        load(address.low),
        jump(BPF_JGE, KERNEL_TEXT.end, 10, 0),
        jump(BPF_JGE, KERNEL_TEXT.start, 8, 0),
        // 7: below it, so it has to end there.
        instruction(BPF_MISC | BPF_TAX, 0, 0, 0),
        instruction(BPF_LD | BPF_IMM, 0, 0, KERNEL_TEXT.start),
        instruction(BPF_ALU | BPF_SUB | BPF_X, 0, 0, 0),
        instruction(BPF_MISC | BPF_TAX, 0, 0, 0),
        load(size.high),
        jump(BPF_JEQ, 0, 0, 2),
        load(size.low),
        instruction(BPF_JMP | BPF_JGT | BPF_X, 0, 1, 0),
        end(match otherwise {
            Otherwise::Refuse => refused(libc::EPERM),
            Otherwise::Kill if KILLS => SECCOMP_RET_KILL_PROCESS,
            Otherwise::Kill => SECCOMP_RET_LOG,
        }),
    ]
}

fn halves(value: u64) -> [u32; 2] {
    [value >> 32, value & u64::from(u32::MAX)].map(|half| u32::try_from(half).unwrap_or_default())
}

fn load(offset: u32) -> sock_filter {
    instruction(BPF_LD | BPF_W | BPF_ABS, 0, 0, offset)
}

/// Skips `yes` instructions if the comparison with `value` holds, else `no`.
fn jump(comparison: u32, value: u32, yes: u8, no: u8) -> sock_filter {
    instruction(BPF_JMP | comparison | BPF_K, yes, no, value)
}

/// The action that makes a call fail with this error.
fn refused(errno: i32) -> u32 {
    SECCOMP_RET_ERRNO | errno.unsigned_abs()
}

fn end(action: u32) -> sock_filter {
    instruction(BPF_RET | BPF_K, 0, 0, action)
}

fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: u16::try_from(code).unwrap_or_default(), jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The guest kernel's side of what is agreed.
    const PATCH: &str =
        include_str!("../../../../guest/kernel/uml/patches/0014-one-filter-from-the-launcher.patch");

    #[test]
    fn the_guest_kernel_knows_the_same_addresses() {
        for (name, value) in [
            ("STUB_FIXED_START", STUB_CODE),
            ("UM_TEXT_START", KERNEL_TEXT.start.into()),
            ("UM_TEXT_END", KERNEL_TEXT.end.into()),
        ] {
            let line = format!("\n+#define {name} {value:#x}UL\n");
            assert!(PATCH.contains(&line), "not in the patch: {line}");
        }
        let stub = format!("-Ttext-segment={:#x}\n", KERNEL_TEXT.start);
        assert!(PATCH.contains(&stub), "the stub's start-up code is linked elsewhere");
    }
}
