//! Small guests of a few instructions on the real KVM: how each of them ends, and that none of them harms us (V13).
//!
//! Every guest starts in 32-bit protected mode without paging at 1 MiB, with no way to handle an exception.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bathy_devices::GuestRam;
use bathy_vmm::bus::{Bus, Registers};
use bathy_vmm::serial::SerialPort;
use bathy_vmm::{Machine, Processors, Stop, layout};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use vm_memory::{Bytes, GuestAddress};

const MIB: u64 = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(90);

/// Ends a guest as a kernel would: `mov al, 0xfe; out 0x64, al`.
const RESET: [u8; 4] = [0xb0, 0xfe, 0xe6, 0x64];

/// Remembers which accesses reached a device.
#[derive(Default)]
struct Notes(Mutex<Vec<(u64, usize)>>);

impl Registers for Notes {
    fn read(&self, offset: u64, out: &mut [u8]) {
        self.0.lock().unwrap().push((offset, out.len()));
        out.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.0.lock().unwrap().push((offset, data.len()));
    }
}

struct Guest {
    processors: Processors,
    ram: Arc<GuestRam>,
    device: Arc<Notes>,
    said: OwnedFd,
}

fn open_kvm() -> File {
    File::options().read(true).write(true).open("/dev/kvm").unwrap()
}

impl Guest {
    /// A guest with this code, which waits to be let run.
    fn new(code: &[u8]) -> Self {
        Self::with_processors(1, code)
    }

    fn with_processors(count: u8, code: &[u8]) -> Self {
        Self::on(open_kvm(), count, code)
    }

    fn on(kvm: File, count: u8, code: &[u8]) -> Self {
        let ram = Arc::new(GuestRam::create_around(16 * MIB, layout::HOLE).unwrap());
        ram.memory().write_slice(code, GuestAddress(MIB)).unwrap();
        let machine = Machine::new(kvm.into(), Arc::clone(&ram), count).unwrap();
        machine.enter_at(MIB).unwrap();
        let (said, log) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        let serial = SerialPort::new(machine.line(layout::SERIAL_LINE).unwrap(), log);
        let device = Arc::new(Notes::default());
        let bus = Bus::new(serial, vec![Arc::clone(&device) as Arc<dyn Registers>]);
        Self { processors: Processors::start(machine, bus).unwrap(), ram, device, said }
    }

    /// Runs it until it has ended by itself.
    fn end(&self) -> Stop {
        self.processors.resume();
        let timeout = Timespec { tv_sec: DEADLINE.as_secs().try_into().unwrap(), tv_nsec: 0 };
        let ended = self.processors.ended();
        let mut fds = [PollFd::new(&ended, PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&timeout)).unwrap(), 1, "the guest did not end in {DEADLINE:?}");
        self.processors.stopped().unwrap()
    }

    fn counter(&self) -> u32 {
        self.ram.memory().read_obj(GuestAddress(8 * MIB)).unwrap()
    }
}

fn end_of(code: &[u8]) -> Stop {
    Guest::new(code).end()
}

#[test]
fn a_reset_is_the_end_and_a_warm_one_is_a_panic() {
    assert_eq!(end_of(&RESET), Stop::PowerOff);
    // mov word [0x472], 0x1234
    let warm = [0x66, 0xc7, 0x05, 0x72, 0x04, 0, 0, 0x34, 0x12];
    assert_eq!(end_of(&[&warm[..], &RESET].concat()), Stop::Panic);
}

#[test]
fn v13_a_triple_fault_is_reported() {
    // ud2, without a handler.
    assert_eq!(end_of(&[0x0f, 0x0b]), Stop::TripleFault);
}

#[test]
fn v13_an_unknown_msr_is_the_guests_own_problem() {
    // mov ecx, 0x12345678; wrmsr: an exception without a handler.
    assert_eq!(end_of(&[0xb9, 0x78, 0x56, 0x34, 0x12, 0x0f, 0x30]), Stop::TripleFault);
}

#[test]
fn v13_the_first_4096_ports_can_be_read_and_written_in_every_width() {
    // mov ecx, 0xfff; each: mov edx, ecx; cmp edx, 0x64; je skip; in al, dx; out dx, al; in ax, dx; out dx, ax;
    // in eax, dx; out dx, eax; skip: dec ecx; jns each. What the others are like is tried in `bus.rs`.
    let each = [
        0x89, 0xca, 0x83, 0xfa, 0x64, 0x74, 0x08, 0xec, 0xee, 0x66, 0xed, 0x66, 0xef, 0xed, 0xef, 0x49, 0x79,
        0xed,
    ];
    let code = [&[0xb9, 0xff, 0x0f, 0, 0][..], &each, &RESET].concat();
    assert_eq!(end_of(&code), Stop::PowerOff);
}

#[test]
fn v13_strings_of_port_accesses_are_taken_whole() {
    // mov edx, 0x3f8; mov esi, 0x100000; mov edi, 0x800000; mov ecx, 4096; rep outsb; mov ecx, 4096; rep insd
    let code = [
        &[0xba, 0xf8, 0x03, 0, 0, 0xbe, 0, 0, 0x10, 0, 0xbf, 0, 0, 0x80, 0, 0xb9, 0, 0x10, 0, 0, 0xf3, 0x6e]
            [..],
        &[0xb9, 0, 0x10, 0, 0, 0xf3, 0x6d],
        &RESET,
    ]
    .concat();
    let guest = Guest::new(&code);
    assert_eq!(guest.end(), Stop::PowerOff);
    let mut said = [0; 8192];
    let count = rustix::io::read(&guest.said, &mut said).unwrap();
    assert_eq!(said.get(..code.len()), Some(&code[..]), "{count} bytes were said");
}

/// Without this an Intel guest copies memory slowly.
#[test]
fn strings_are_fast() {
    // mov ecx, 0x1a0; rdmsr; mov dx, 0x3f8; out dx, al
    let code = [&[0xb9, 0xa0, 0x01, 0, 0, 0x0f, 0x32, 0x66, 0xba, 0xf8, 0x03, 0xee][..], &RESET].concat();
    let guest = Guest::with_processors(1, &code);
    assert_eq!(guest.end(), Stop::PowerOff);
    let mut said = [0];
    assert_eq!(rustix::io::read(&guest.said, &mut said), Ok(1));
    assert_eq!(said[0] & 1, 1, "{said:x?}");
}

#[test]
fn v13_addresses_of_nobody_read_as_ones_and_devices_see_every_width() {
    // mov eax, [0xd0001000]; mov [0x800000], eax; then 1, 2 and 4 bytes at 0xd0000003, and the same written.
    let code = [
        &[0xa1, 0x00, 0x10, 0x00, 0xd0, 0xa3, 0, 0, 0x80, 0][..],
        &[0xa0, 0x03, 0, 0, 0xd0, 0x66, 0xa1, 0x03, 0, 0, 0xd0, 0xa1, 0x03, 0, 0, 0xd0],
        &[0xa2, 0x03, 0, 0, 0xd0, 0x66, 0xa3, 0x03, 0, 0, 0xd0, 0xa3, 0x03, 0, 0, 0xd0],
        &RESET,
    ]
    .concat();
    let guest = Guest::new(&code);
    assert_eq!(guest.end(), Stop::PowerOff);
    assert_eq!(guest.counter(), u32::MAX);
    let seen = guest.device.0.lock().unwrap().clone();
    assert_eq!(seen, [(3, 1), (3, 2), (3, 4), (3, 1), (3, 2), (3, 4)]);
}

#[test]
fn v13_code_that_is_not_in_memory_ends_the_guest() {
    // mov eax, 0xd0000000; jmp eax: instructions would have to be read from a device.
    let stop = end_of(&[0xb8, 0x00, 0x00, 0x00, 0xd0, 0xff, 0xe0]);
    assert!(matches!(stop, Stop::Internal(_) | Stop::TripleFault), "{stop:?}");
}

/// Processor time that this process has used.
fn used() -> Duration {
    let ticks = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(ticks.tv_sec.try_into().unwrap(), ticks.tv_nsec.try_into().unwrap())
}

#[test]
fn v13_a_guest_that_halts_for_ever_costs_nothing_and_can_be_paused() {
    // cli; hlt; and again. The second processor waits to be started, which never happens.
    let guest = Guest::with_processors(2, &[0xfa, 0xf4, 0xeb, 0xfc]);
    guest.processors.resume();
    std::thread::sleep(Duration::from_millis(200));
    let before = used();
    std::thread::sleep(Duration::from_secs(1));
    let cost = used() - before;
    assert!(cost < Duration::from_millis(300), "{cost:?} in a second");
    let begin = Instant::now();
    for _ in 0..20 {
        guest.processors.pause();
        guest.processors.resume();
    }
    assert!(begin.elapsed() < DEADLINE);
    assert_eq!(guest.processors.stopped(), None);
}

#[test]
fn a_guest_that_has_ended_can_still_be_paused() {
    let guest = Guest::with_processors(2, &RESET);
    assert_eq!(guest.end(), Stop::PowerOff);
    guest.processors.pause();
    assert_eq!(guest.processors.stopped(), Some(Stop::PowerOff));
}

/// As in a keeper, which is not root and may make no more threads once its guest runs: KVM needs one of its own.
#[test]
fn a_guest_runs_in_a_process_that_may_make_no_more_threads() {
    const NOBODY: u32 = 65534;
    let kvm = open_kvm();
    if rustix::process::geteuid().is_root() {
        become_user(NOBODY);
    }
    let guest = Guest::on(kvm, 1, &RESET);
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Nproc, none).unwrap();
    assert!(std::thread::Builder::new().spawn(|| ()).is_err(), "the limit holds");
    assert_eq!(guest.end(), Stop::PowerOff);
}

fn become_user(number: u32) {
    // SAFETY: the call has no memory arguments; it is the C library's, which changes all threads alike.
    assert_eq!(unsafe { libc::setresuid(number, number, number) }, 0);
}

#[test]
fn a_paused_guest_stands_still_and_goes_on_where_it_was() {
    // inc dword [0x800000]; and again.
    let guest = Guest::new(&[0xff, 0x05, 0, 0, 0x80, 0, 0xeb, 0xf8]);
    for _ in 0..3 {
        let before = guest.counter();
        guest.processors.resume();
        let begin = Instant::now();
        while guest.counter() < before + 10 {
            assert!(begin.elapsed() < DEADLINE, "the guest does not count");
        }
        guest.processors.pause();
        let still = guest.counter();
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(guest.counter(), still);
    }
}
