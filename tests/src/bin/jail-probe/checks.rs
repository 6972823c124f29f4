//! Ways out that take more than one system call, and what is left where a call has to be allowed.

use std::os::fd::AsRawFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, IoSlice};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sendmsg_addr,
    socketpair,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::report::Report;
use crate::sys::{self, Fate};

/// What the guest kernel is given, and nothing else: input, console twice, memory, stub, initramfs, five devices, and
/// the input's other end.
const DESCRIPTORS: [&str; 12] = [
    "pipe", "pipe", "pipe", "file", "file", "file", "socket", "socket", "socket", "socket", "socket", "pipe",
];
const RAM: i32 = 3;
const STUB: i32 = 4;
const INITRAMFS: i32 = 5;

const GIB: usize = 1 << 30;
/// The default of a sandbox's processes, and some more for the guest kernel's own.
const MOST_PROCESSES: usize = 1024 + 32;
const MOST_DESCRIPTORS: usize = 1024;

type Check = fn() -> Result<(), String>;

/// Each check with whether it does no harm where it fails.
const CHECKS: &[(&str, Check, bool)] = &[
    ("inherited descriptors", only_given_descriptors, true),
    ("datagram to an abstract name", no_abstract_name, true),
    ("datagram to the host's log", no_log_socket, false),
    ("other processes", no_other_process, true),
    ("signals by descriptor", no_foreign_owner, true),
    ("private memory", private_memory_is_limited, true),
    ("private memory that becomes writable", private_memory_does_not_become_writable, true),
    ("shared memory", shared_memory_is_limited, true),
    ("guest memory grows", || refuses_to_grow(RAM), false),
    ("initramfs written", || refuses_to_grow(INITRAMFS), false),
    ("limits raised", limits_are_hard, true),
    ("no core dump, no locked memory", limits_are_zero, true),
    ("open descriptors", descriptors_are_limited, false),
    ("processes", processes_are_limited, false),
    ("32-bit entry", no_32_bit_entry, true),
    ("program of its own", own_program_is_confined, false),
];

/// Checks everything; outside a jail only what does no harm there.
pub fn run(report: &mut Report, jailed: bool) {
    for (name, check, harmless) in CHECKS {
        if jailed || *harmless {
            let result = check();
            report.add(result.is_ok(), name, || result.err().unwrap_or_default());
        }
    }
}

fn demand(held: bool, detail: impl FnOnce() -> String) -> Result<(), String> {
    if held { Ok(()) } else { Err(detail()) }
}

fn only_given_descriptors() -> Result<(), String> {
    let open = sys::open_descriptors(70_000);
    let expected: Vec<_> = (0..).zip(DESCRIPTORS).collect();
    demand(open == expected, || format!("{open:?}"))
}

/// A pair of datagram sockets may be made, and each can send to any address that it can name.
fn send_to(address: &SocketAddrUnix) -> Result<usize, Errno> {
    let (socket, _peer) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::empty(), None)?;
    let data = [IoSlice::new(b"attack")];
    sendmsg_addr(&socket, address, &data, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)
}

fn no_abstract_name() -> Result<(), String> {
    let address =
        SocketAddrUnix::new_abstract_name(b"bathysphere-attack-target").map_err(|error| error.to_string())?;
    let sent = send_to(&address);
    demand(sent == Err(Errno::CONNREFUSED), || format!("{sent:?}"))
}

fn no_log_socket() -> Result<(), String> {
    for path in ["/dev/log", "/run/systemd/journal/socket", "/run/systemd/notify"] {
        let address = SocketAddrUnix::new(path).map_err(|error| error.to_string())?;
        let sent = send_to(&address);
        demand(sent == Err(Errno::NOENT), || format!("{path}: {sent:?}"))?;
    }
    Ok(())
}

fn no_other_process() -> Result<(), String> {
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let seen = |process: &i32| *process != own && sys::signal(*process, 0) != Err(libc::ESRCH);
    let others: Vec<_> = (1..=70_000).filter(seen).take(5).collect();
    demand(others.is_empty(), || format!("{others:?}"))?;
    let all = sys::signal(-1, 0);
    demand(all == Err(libc::ESRCH), || format!("a signal to everybody: {all:?}"))
}

fn no_foreign_owner() -> Result<(), String> {
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let taken = |process: &i32| *process != own && sys::set_owner(0, *process) != Err(libc::ESRCH);
    let others: Vec<_> = (1..=5000).filter(taken).take(5).collect();
    let _ = sys::set_owner(0, own);
    demand(others.is_empty(), || format!("{others:?}"))
}

fn private_memory_is_limited() -> Result<(), String> {
    let mapped = sys::map_memory(GIB, libc::MAP_PRIVATE, libc::PROT_READ | libc::PROT_WRITE);
    demand(mapped == Err(libc::ENOMEM), || format!("1 GiB: {mapped:?}"))
}

/// The limit of the address space turns off that of private memory for what becomes writable later.
fn private_memory_does_not_become_writable() -> Result<(), String> {
    for mib in [1, 64, 700, 1024] {
        let mapped = sys::map_memory(mib << 20, libc::MAP_PRIVATE, libc::PROT_READ);
        demand(mapped.is_err(), || format!("{mib} MiB: {mapped:?}"))?;
    }
    Ok(())
}

/// Shared memory counts for no limit of a process: it must not be had at all.
fn shared_memory_is_limited() -> Result<(), String> {
    let mapped = sys::map_memory(GIB, libc::MAP_SHARED, libc::PROT_READ);
    demand(mapped.is_err(), || "1 GiB of shared memory, which no limit counts".to_owned())
}

fn refuses_to_grow(fd: i32) -> Result<(), String> {
    let written = sys::append(fd, b"more");
    // By its seal, or before that by the limit of a file's size.
    demand(matches!(written, Err(libc::EPERM | libc::EFBIG)), || format!("{written:?}"))
}

const LIMITED: [Resource; 11] = [
    Resource::Core,
    Resource::Data,
    Resource::Fsize,
    Resource::Memlock,
    Resource::Msgqueue,
    Resource::Nice,
    Resource::Nofile,
    Resource::Nproc,
    Resource::Rtprio,
    Resource::Sigpending,
    Resource::Stack,
];

/// In a child, because outside it succeeds.
fn limits_are_hard() -> Result<(), String> {
    for resource in LIMITED {
        let Some(hard) = getrlimit(resource).maximum else {
            return Err(format!("{resource:?} is not limited"));
        };
        let fate = sys::in_child(|| {
            let more = Some(hard.saturating_add(1));
            let raised = setrlimit(resource, Rlimit { current: more, maximum: more });
            raised.map_or_else(|error| -i64::from(error.raw_os_error()), |()| 0)
        });
        demand(fate == Fate::Error(libc::EPERM), || format!("{resource:?}: {fate:?}"))?;
    }
    Ok(())
}

fn limits_are_zero() -> Result<(), String> {
    // Of core dumps 1 is less than 0: see J9.
    let limits =
        [(Resource::Core, 1), (Resource::Memlock, 0), (Resource::Msgqueue, 0), (Resource::Rtprio, 0)];
    for (resource, value) in limits {
        let limit = getrlimit(resource);
        demand(limit.maximum == Some(value), || format!("{resource:?}: {limit:?}"))?;
    }
    Ok(())
}

fn descriptors_are_limited() -> Result<(), String> {
    let mut held = Vec::new();
    let refusal = loop {
        match eventfd(0, EventfdFlags::empty()) {
            Ok(fd) => held.push(fd),
            Err(error) => break error,
        }
        if held.len() > MOST_DESCRIPTORS {
            return Err(format!("{} were opened", held.len()));
        }
    };
    let highest = held.last().map(AsRawFd::as_raw_fd);
    demand(refusal == Errno::MFILE && highest.is_some_and(|fd| fd + 1 == 1024), || {
        format!("{refusal}, the last is {highest:?}")
    })
}

fn processes_are_limited() -> Result<(), String> {
    let children = sys::fork_until_refused(2 * MOST_PROCESSES);
    let count = children.len();
    children.into_iter().for_each(sys::end);
    demand((16..MOST_PROCESSES).contains(&count), || format!("{count} processes"))
}

fn no_32_bit_entry() -> Result<(), String> {
    let fate = sys::attempt_32_bit();
    let refused = matches!(fate, Fate::Signal(_) | Fate::Error(libc::ENOSYS));
    demand(refused, || format!("{fate:?}"))
}

/// It may write a program and run it; the filter and the empty root stay around it.
fn own_program_is_confined() -> Result<(), String> {
    let written = sys::append(STUB, &opener());
    demand(written == Ok(opener().len()), || format!("writing it: {written:?}"))?;
    let fate = sys::execute_descriptor(STUB.unsigned_abs().into());
    demand(fate == Fate::Error(libc::EPERM), || format!("{fate:?}"))
}

/// A program that opens `/` and ends with the error number.
fn opener() -> Vec<u8> {
    // Where a guest kernel is: elsewhere its calls would be trapped.
    const BASE: u64 = 0x6000_0000;
    const HEADERS: u64 = 64 + 56;
    const CODE: [u8; 34] = [
        0xb8, 0x01, 0x01, 0x00, 0x00, // mov eax, openat
        0xbf, 0x9c, 0xff, 0xff, 0xff, // mov edi, AT_FDCWD
        0xbe, 0x99, 0x00, 0x00, 0x60, // mov esi, path
        0x31, 0xd2, // xor edx, edx
        0x4d, 0x31, 0xd2, // xor r10, r10
        0x0f, 0x05, // syscall
        0xf7, 0xd8, // neg eax
        0x89, 0xc7, // mov edi, eax
        0xb8, 0xe7, 0x00, 0x00, 0x00, // mov eax, exit_group
        0x0f, 0x05, // syscall
        b'/', // path
    ];
    let size = HEADERS + CODE.len() as u64 + 1;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let half = |file: &mut Vec<u8>, value: u16| file.extend(value.to_le_bytes());
    let word = |file: &mut Vec<u8>, value: u32| file.extend(value.to_le_bytes());
    let long = |file: &mut Vec<u8>, value: u64| file.extend(value.to_le_bytes());
    half(&mut file, 2); // an executable
    half(&mut file, 62); // for x86-64
    word(&mut file, 1);
    long(&mut file, BASE + HEADERS); // the first instruction
    long(&mut file, 64); // the program header
    long(&mut file, 0);
    word(&mut file, 0);
    for value in [64, 56, 1, 64, 0, 0] {
        half(&mut file, value);
    }
    word(&mut file, 1); // load
    word(&mut file, 5); // to read and execute
    long(&mut file, 0);
    long(&mut file, BASE);
    long(&mut file, BASE);
    long(&mut file, size);
    long(&mut file, size);
    long(&mut file, 4096);
    file.extend(CODE);
    file.push(0);
    file
}
