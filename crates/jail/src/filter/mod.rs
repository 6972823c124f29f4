//! System call filters: one table per process kind, everything that is not in it is refused.
//!
//! A table is data, so that tests can walk it rule by rule (attack J2) and a reader can see the whole of it.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use thiserror::Error;

/// A call in the given forms only. Its number and its name both come from its constant in libc, so that neither can be wrong.
macro_rules! only {
    ($call:ident, $forms:expr $(,)?) => {
        $crate::filter::Rule {
            call: libc::$call,
            name: $crate::filter::without_prefix(stringify!($call)),
            forms: $forms,
        }
    };
}

/// A call in any form.
macro_rules! any {
    ($call:ident) => {
        only!($call, &[])
    };
}

mod address;
mod gateway;
mod guest;
mod keeper;
mod unpacker;

pub use address::{ByAddress, KERNEL_TEXT, STUB_CODE};
pub use gateway::GATEWAY;
pub use guest::{GUEST_PTRACE, GUEST_SECCOMP, GuestFilter};
pub use keeper::{KEEPER, KEEPER_KVM, KICK_SIGNAL, VCPU};
pub use unpacker::UNPACKER;

/// Kinds of private memory that `RLIMIT_DATA` does not count, or that come out of a pool of the host's.
const UNCOUNTED: i32 = libc::MAP_GROWSDOWN | libc::MAP_HUGETLB;

/// A filter could not be made or installed.
#[derive(Debug, Error)]
pub enum FilterError {
    /// A table has a mistake.
    #[error("The filter of the {0} does not compile: {1}")]
    Compile(&'static str, BackendError),
    /// The kernel refused it.
    #[error("The kernel refused the system call filter: {0}")]
    Install(seccompiler::Error),
}

/// The comparison that a condition makes with an argument. Arguments are compared in the width that the kernel reads: 32 bits
/// but for addresses and lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// Exactly this 32-bit value.
    Is(u32),
    /// None of these bits.
    Without(u32),
    /// These bits, of those in the mask.
    Masked {
        /// Which bits are looked at.
        mask: u32,
        /// What they have to be.
        value: u32,
    },
    /// These bits, of those in the mask, of the whole 64-bit value: an address or a length in a range.
    Wide {
        /// Which bits are looked at.
        mask: u64,
        /// What they have to be.
        value: u64,
    },
}

/// A demand on one argument of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Which argument, from 0.
    pub argument: u8,
    /// What it has to be.
    pub test: Test,
}

/// One allowed system call.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The call's number on x86-64.
    pub call: i64,
    /// The call's name, for people who review the table.
    pub name: &'static str,
    /// Allowed if all conditions of any of these sets hold; allowed in any form if there is no set.
    pub forms: &'static [&'static [Condition]],
}

/// Calls that belong together, with the reason why they are needed.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// What the process needs them for.
    pub purpose: &'static str,
    /// The system calls of this group.
    pub rules: &'static [Rule],
}

/// What happens to a call that is not in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// It fails with EPERM.
    Refuse,
    /// The process dies: it would only make such a call if it were no longer ours. With the feature `log-filter` the call
    /// is logged and made.
    Kill,
}

/// Whether filters kill, as they have to. A build with the feature `log-filter` logs instead.
pub const KILLS: bool = !cfg!(feature = "log-filter");

/// The system call filter of one kind of process.
#[derive(Clone, Copy, Debug)]
pub struct Filter {
    /// Which process kind it is for.
    pub name: &'static str,
    /// The calls that are allowed.
    pub groups: &'static [Group],
    /// What happens to any other call.
    pub otherwise: Otherwise,
}

impl Filter {
    /// All rules of all groups.
    pub fn rules(&self) -> impl Iterator<Item = &'static Rule> {
        self.groups.iter().flat_map(|group| group.rules)
    }

    /// The filter as a program for the kernel.
    pub fn compile(&self) -> Result<BpfProgram, FilterError> {
        let failed = |error| FilterError::Compile(self.name, error);
        let mut table: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
        for rule in self.rules() {
            let forms = table.entry(rule.call).or_default();
            for form in rule.forms {
                let conditions =
                    form.iter().map(Condition::compile).collect::<Result<Vec<_>, _>>().map_err(failed)?;
                forms.push(SeccompRule::new(conditions).map_err(failed)?);
            }
        }
        let otherwise = match self.otherwise {
            Otherwise::Refuse => SeccompAction::Errno(libc::EPERM.cast_unsigned()),
            Otherwise::Kill if KILLS => SeccompAction::KillProcess,
            Otherwise::Kill => SeccompAction::Log,
        };
        let filter =
            SeccompFilter::new(table, otherwise, SeccompAction::Allow, TargetArch::x86_64).map_err(failed)?;
        BpfProgram::try_from(filter).map_err(failed)
    }

    /// Installs a compiled filter in this thread and all it creates, for good.
    pub fn install(program: &BpfProgram) -> Result<(), FilterError> {
        seccompiler::apply_filter(program).map_err(FilterError::Install)
    }
}

impl Condition {
    fn compile(&self) -> Result<SeccompCondition, BackendError> {
        let (width, op, value) = match self.test {
            Test::Is(value) => (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value.into()),
            Test::Without(mask) => (SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask.into()), 0),
            Test::Masked { mask, value } => {
                (SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask.into()), value.into())
            }
            Test::Wide { mask, value } => (SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(mask), value),
        };
        SeccompCondition::new(self.argument, width, op, value)
    }
}

/// The name of a call, from that of its constant.
const fn without_prefix(constant: &'static str) -> &'static str {
    constant.split_at("SYS_".len()).1
}

/// Argument `argument` has exactly this value.
const fn is(argument: u8, value: i32) -> Condition {
    Condition { argument, test: Test::Is(value.cast_unsigned()) }
}

/// Argument `argument` has none of these bits.
const fn without(argument: u8, bits: i32) -> Condition {
    Condition { argument, test: Test::Without(bits.cast_unsigned()) }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::Errno;
    use rustix::pipe::{PipeFlags, pipe_with};
    use rustix::process::{getpriority_process, getpriority_user};

    use super::*;

    #[test]
    fn every_table_compiles_and_names_no_call_twice() {
        GUEST_SECCOMP.compile().unwrap();
        let kernels = guest_kernels();
        for filter in [KEEPER, KEEPER_KVM, VCPU, GATEWAY, UNPACKER, stub()].into_iter().chain(kernels) {
            filter.compile().unwrap();
            let mut calls: Vec<_> = filter.rules().map(|rule| rule.call).collect();
            calls.sort_unstable();
            let before = calls.len();
            calls.dedup();
            assert_eq!(calls.len(), before, "{} names a call twice", filter.name);
        }
    }

    #[test]
    fn a_table_that_kills_does_so_unless_this_is_a_developers_build_that_logs() {
        // What the compiled table returns for a call that is in none of its rules.
        let otherwise = |filter: &Filter| filter.compile().unwrap().last().unwrap().k;
        let (kill, log) = (libc::SECCOMP_RET_KILL_PROCESS, libc::SECCOMP_RET_LOG);
        for filter in [KEEPER, KEEPER_KVM, VCPU, GATEWAY, UNPACKER] {
            assert_eq!(filter.otherwise, Otherwise::Kill);
            let expected = if cfg!(feature = "log-filter") { log } else { kill };
            assert_eq!(otherwise(&filter), expected, "{}", filter.name);
            let refusing = Filter { otherwise: Otherwise::Refuse, ..filter };
            assert_eq!(otherwise(&refusing), libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned());
        }
    }

    #[test]
    fn a_rule_has_the_name_of_its_call() {
        let rule = GATEWAY.rules().find(|rule| rule.call == libc::SYS_connect).unwrap();
        assert_eq!(rule.name, "connect");
        let named = |rule: &Rule| !rule.name.is_empty() && !rule.name.starts_with("SYS_");
        assert!(GUEST_PTRACE.kernel().rules().all(named));
    }

    /// One call for each kind of condition, and what the thread needs to end.
    const EACH_KIND: Filter = Filter {
        name: "each kind of condition",
        otherwise: Otherwise::Refuse,
        groups: &[
            Group {
                purpose: "try",
                rules: &[
                    only!(SYS_getpriority, &[&[is(0, 0)]]),
                    only!(SYS_pipe2, &[&[without(1, libc::O_NONBLOCK)]]),
                    only!(
                        SYS_eventfd2,
                        &[&[Condition {
                            argument: 1,
                            test: Test::Masked {
                                mask: (libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).cast_unsigned(),
                                value: libc::EFD_CLOEXEC.cast_unsigned(),
                            },
                        }]],
                    ),
                ],
            },
            Group { purpose: "close what was made", rules: &[any!(SYS_close), any!(SYS_fcntl)] },
            keeper::MEMORY,
            keeper::RUN,
            keeper::END,
        ],
    };

    #[test]
    fn a_call_passes_only_in_a_form_that_meets_its_conditions() {
        let program = EACH_KIND.compile().unwrap();
        let filtered = thread::spawn(move || {
            Filter::install(&program).unwrap();
            let event = |flags| eventfd(0, flags).map(drop);
            let pipe = |flags| pipe_with(flags).map(drop);
            [
                ("the value", getpriority_process(None).map(drop), true),
                ("another value", getpriority_user(rustix::process::Uid::ROOT).map(drop), false),
                ("none of the bits", pipe(PipeFlags::CLOEXEC), true),
                ("one of the bits", pipe(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK), false),
                ("the masked value", event(EventfdFlags::CLOEXEC), true),
                ("with a bit beside the mask", event(EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE), true),
                (
                    "with another bit of the mask",
                    event(EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK),
                    false,
                ),
                ("without the bit of the mask", event(EventfdFlags::empty()), false),
                ("not in the table", rustix::thread::set_no_new_privs(true), false),
            ]
        });
        for (form, result, passes) in filtered.join().unwrap() {
            assert_eq!(result, if passes { Ok(()) } else { Err(Errno::PERM) }, "{form}");
        }
    }

    #[test]
    fn a_gateway_makes_and_accepts_only_sockets_of_ip_that_do_not_block_and_are_not_inherited() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, acceptfrom_with, ipproto, socket_with};

        let listener = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        // The same table, with a refusal that a test outlives.
        let program = Filter { otherwise: Otherwise::Refuse, ..GATEWAY }.compile().unwrap();
        let filtered = thread::spawn(move || {
            Filter::install(&program).unwrap();
            let both = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = |family, flags| {
                socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP)).map(drop).err()
            };
            let accept = |flags| acceptfrom_with(&listener, flags).map(drop).err();
            [
                ("a socket", socket(AddressFamily::INET, both), None),
                ("one that blocks", socket(AddressFamily::INET, SocketFlags::CLOEXEC), Some(Errno::PERM)),
                (
                    "one that is inherited",
                    socket(AddressFamily::INET, SocketFlags::NONBLOCK),
                    Some(Errno::PERM),
                ),
                ("one of the host's own services", socket(AddressFamily::UNIX, both), Some(Errno::PERM)),
                ("a peer, of which there is none", accept(both), Some(Errno::AGAIN)),
                ("a peer that blocks", accept(SocketFlags::CLOEXEC), Some(Errno::PERM)),
            ]
        });
        for (what, error, expected) in filtered.join().unwrap() {
            assert_eq!(error, expected, "{what}");
        }
    }

    /// The one form of a call that has a single one.
    fn form(filter: &Filter, call: i64) -> &'static [Condition] {
        let rule = filter.rules().find(|rule| rule.call == call).unwrap();
        assert_eq!(rule.forms.len(), 1);
        rule.forms[0]
    }

    #[test]
    fn u6_a_keeper_maps_counted_private_memory_of_no_file_and_executes_none() {
        for filter in [KEEPER, KEEPER_KVM, VCPU, GATEWAY, UNPACKER] {
            // Private and anonymous; neither growing (0x100) nor of huge pages (0x40000).
            let flags = Condition { argument: 3, test: Test::Masked { mask: 0x4_012f, value: 0x22 } };
            let not_executable = Condition { argument: 2, test: Test::Without(4) };
            assert_eq!(form(&filter, libc::SYS_mmap), [not_executable, flags], "{}", filter.name);
            assert_eq!(form(&filter, libc::SYS_mprotect), [not_executable], "{}", filter.name);
        }
    }

    /// What a guest kernel may do, in both modes.
    fn guest_kernels() -> [Filter; 2] {
        [GUEST_SECCOMP, GUEST_PTRACE].map(|filter| *filter.kernel())
    }

    fn stub() -> Filter {
        let GuestFilter::ByAddress(tables) = GUEST_SECCOMP else { panic!("a stub has no table of its own") };
        tables.stub
    }

    #[test]
    fn u6_u8_a_guest_maps_counted_memory_and_begins_no_session() {
        for filter in guest_kernels() {
            let mmap = filter.rules().find(|rule| rule.call == libc::SYS_mmap).unwrap();
            let of_a_file = Condition { argument: 3, test: Test::Without(0x4_0120) };
            let private = Condition { argument: 3, test: Test::Masked { mask: 0x4_010f, value: 2 } };
            let expected: [&[Condition]; 2] = [&[of_a_file], &[private]];
            assert_eq!(mmap.forms, expected, "{}", filter.name);
            // Within the 16 MiB from the kernel's address on, of which it makes its constants read-only and its signal stacks
            // writable.
            let image = Condition {
                argument: 0,
                test: Test::Wide { mask: 0xffff_ffff_ff00_0000, value: 0x6000_0000 },
            };
            let below = |mask| Condition { argument: 1, test: Test::Wide { mask, value: 0 } };
            let (constants, small) = (below(0xffff_ffff_ffe0_0000), below(0xffff_ffff_ffff_0000));
            let read_only = without(2, libc::PROT_WRITE);
            let expected: [&[Condition]; 2] = [&[image, constants, read_only], &[image, small]];
            let mprotect = filter.rules().find(|rule| rule.call == libc::SYS_mprotect).unwrap();
            assert_eq!(mprotect.forms, expected, "{}", filter.name);
            assert!(!filter.rules().any(|rule| rule.call == libc::SYS_setsid), "U8: {}", filter.name);
        }
    }

    #[test]
    fn u10_u11_a_guest_adds_no_filters() {
        for filter in guest_kernels() {
            assert!(!filter.rules().any(|rule| rule.call == libc::SYS_seccomp), "{}", filter.name);
            let prctl = filter.rules().find(|rule| rule.call == libc::SYS_prctl).unwrap();
            let set_seccomp = is(0, libc::PR_SET_SECCOMP);
            assert!(!prctl.forms.iter().any(|form| form.contains(&set_seccomp)), "{}", filter.name);
        }
    }

    #[test]
    fn u6_u11_a_stub_maps_guest_memory_and_adds_no_filters() {
        let calls: Vec<_> = stub().rules().map(|rule| rule.call).collect();
        let expected =
            [libc::SYS_mmap, libc::SYS_munmap, libc::SYS_futex, libc::SYS_arch_prctl, libc::SYS_rt_sigreturn];
        assert_eq!(calls, expected);
        // Shared, at a fixed address, of a file, and mapped with the call.
        assert_eq!(form(&stub(), libc::SYS_mmap), [is(3, 0x8011)]);
        // A process that is killed is a line in the host's audit log (U10).
        assert_eq!(stub().otherwise, Otherwise::Refuse);
    }

    #[test]
    fn a_guest_makes_no_namespace_of_any_kind() {
        // User, mount, pid, network, ipc, uts and cgroup namespaces, by their numbers in the kernel's headers.
        let namespaces =
            0x1000_0000 | 0x0002_0000 | 0x2000_0000 | 0x4000_0000 | 0x0800_0000 | 0x0400_0000 | 0x0200_0000;
        for filter in guest_kernels() {
            let clone = form(&filter, libc::SYS_clone);
            assert_eq!(
                clone,
                [Condition { argument: 0, test: Test::Without(namespaces) }],
                "{}",
                filter.name
            );
            let asks = Condition { argument: 0, test: Test::Is(u32::MAX) };
            assert_eq!(form(&filter, libc::SYS_personality), [asks], "{}", filter.name);
        }
    }
}
