//! One thread per virtual processor: it enters the guest, and does what the guest left for.
//!
//! These threads do no other I/O. They answer accesses to a device's registers under the device's lock; the devices' work is
//! done by the keeper's own thread. They have the tightest system call filter of all.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use bathy_devices::GuestRam;
use bathy_jail::FilterError;
use bathy_jail::filter::{Filter, KICK_SIGNAL, VCPU};
use kvm_bindings::{KVM_EXIT_NOTIFY, KVM_EXIT_X86_BUS_LOCK};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::arch::layout;
use crate::bus::{Bus, Flow};
use crate::machine::Machine;
use crate::sys::{self, ExitFlag};

/// What one of these threads needs: exits are handled in a few small frames.
const STACK: usize = 256 * 1024;
/// How often in a row KVM may have a processor try again. Those that wait to be started do, seldom; a KVM that cannot run
/// the guest at all would for ever.
const TRIES: u32 = 10_000;
/// How long a thread has to leave the guest before it is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// Processors could not be started.
#[derive(Debug, Error)]
pub enum VcpuError {
    #[error("A virtual processor's thread cannot be started")]
    Thread(#[source] io::Error),
    #[error("A descriptor cannot be made")]
    Descriptor(#[source] io::Error),
    #[error("A virtual processor's system calls cannot be filtered")]
    Filter(#[from] FilterError),
}

/// Why the guest has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Stop {
    /// It asked for a reset, which is how a kernel without ACPI turns itself off.
    #[error("the guest powered itself off")]
    PowerOff,
    /// Its kernel gave up.
    #[error("the guest kernel panicked")]
    Panic,
    /// A processor stopped with an error.
    #[error("the guest's processor shut down (triple fault)")]
    TripleFault,
    /// KVM could not go on.
    #[error("KVM could not go on with the guest (internal error {0})")]
    Internal(u32),
    /// The processor refused the guest's state.
    #[error("the processor refused to enter the guest (reason {0:#x})")]
    Entry(u64),
    /// KVM reported an exit that cannot happen here.
    #[error("KVM left the guest for a reason that we do not handle ({0})")]
    Unknown(u32),
    /// The call itself failed.
    #[error("KVM cannot run the guest: {}", io::Error::from_raw_os_error(*.0))]
    Failed(i32),
}

/// The state that the threads and the keeper share.
struct Shared {
    bus: Bus,
    ram: Arc<GuestRam>,
    /// Whether processors have to stay out of the guest; looked at after each exit.
    held: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    /// Becomes readable when the guest has ended.
    ended: EventFd,
}

#[derive(Default)]
struct State {
    /// How many threads are out of the guest, because they were asked to.
    waiting: usize,
    /// Why the guest has ended; the first reason counts.
    stop: Option<Stop>,
    failure: Option<FilterError>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic ends the whole process: no thread is left to find the lock poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Stays here while processors are held.
    fn pass_gate(&self, flag: ExitFlag) {
        if !self.held.load(Ordering::SeqCst) {
            return;
        }
        let mut state = self.state();
        state.waiting += 1;
        self.changed.notify_all();
        while self.held.load(Ordering::SeqCst) {
            state = self.wait(state);
        }
        state.waiting -= 1;
        flag.set(false);
    }

    /// The guest has ended. This thread waits for the end of the process.
    fn stop(&self, reason: Stop) -> ! {
        self.bus.finish();
        let mut state = self.state();
        state.stop.get_or_insert(reason);
        state.waiting += 1;
        self.changed.notify_all();
        let _ = self.ended.write(1);
        loop {
            state = self.wait(state);
        }
    }

    /// What a reset was for.
    fn reset(&self) -> Stop {
        let kind: Result<u16, _> = self.ram.memory().read_obj(GuestAddress(layout::RESET_KIND));
        if kind.is_ok_and(|kind| kind == layout::WARM_RESET) { Stop::Panic } else { Stop::PowerOff }
    }
}

/// One virtual processor, seen from the keeper.
struct Thread {
    number: i32,
    flag: ExitFlag,
}

/// All processors of a guest. They end with the process.
pub struct Processors {
    shared: Arc<Shared>,
    threads: Vec<Thread>,
    /// Held: interrupt lines end with it.
    _vm: VmFd,
}

impl Processors {
    /// Starts the threads. Each confines itself and waits; none enters the guest before [`resume`](Self::resume).
    ///
    /// The caller has given up its privileges, which every thread inherits, and confines itself before it resumes.
    ///
    /// # Errors
    /// When a thread cannot be started or confined.
    pub fn start(machine: Machine, bus: Bus) -> Result<Self, VcpuError> {
        let (vm, cpus, ram) = machine.into_parts();
        sys::make_harmless(KICK_SIGNAL).map_err(VcpuError::Thread)?;
        let shared = Arc::new(Shared {
            bus,
            ram,
            held: AtomicBool::new(true),
            state: Mutex::default(),
            changed: Condvar::new(),
            ended: sys::event().map_err(VcpuError::Descriptor)?,
        });
        let filter = Arc::new(VCPU.compile()?);
        let mut threads = Vec::with_capacity(cpus.len());
        for (number, mut cpu) in cpus.into_iter().enumerate() {
            let flag = ExitFlag::of(&cpu).map_err(VcpuError::Descriptor)?;
            let (sender, receiver) = std::sync::mpsc::sync_channel(1);
            let (shared, filter) = (Arc::clone(&shared), Arc::clone(&filter));
            let body = move || {
                let _ = sender.send(rustix::thread::gettid().as_raw_nonzero().get());
                drop(sender);
                if let Err(error) = Filter::install(&filter) {
                    shared.state().failure.get_or_insert(error);
                }
                drop(filter);
                prepare(&mut cpu, flag);
                shared.pass_gate(flag);
                run(cpu, &shared, flag)
            };
            let builder = thread::Builder::new().name(format!("vcpu{number}")).stack_size(STACK);
            builder.spawn(body).map_err(VcpuError::Thread)?;
            let number = receiver.recv().map_err(|_| VcpuError::Thread(io::ErrorKind::BrokenPipe.into()))?;
            threads.push(Thread { number, flag });
        }
        let processors = Self { shared, threads, _vm: vm };
        processors.wait_until_held();
        let failure = processors.shared.state().failure.take();
        failure.map_or(Ok(processors), |error| Err(error.into()))
    }

    fn wait_until_held(&self) {
        let mut state = self.shared.state();
        while state.waiting < self.threads.len() {
            state = match self.shared.changed.wait_timeout(state, ASK_AGAIN) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
            // A thread that is still in the guest, or was just about to enter it, is interrupted again.
            for thread in &self.threads {
                sys::interrupt(thread.number, KICK_SIGNAL);
            }
        }
    }

    /// Takes all processors out of the guest, and returns when they are.
    pub fn pause(&self) {
        {
            // Under the lock, so that a thread which is just being let go does not take the flag back.
            let _state = self.shared.state();
            self.shared.held.store(true, Ordering::SeqCst);
            self.threads.iter().for_each(|thread| thread.flag.set(true));
        }
        for thread in &self.threads {
            sys::interrupt(thread.number, KICK_SIGNAL);
        }
        self.wait_until_held();
    }

    /// Lets the processors run.
    pub fn resume(&self) {
        let _state = self.shared.state();
        self.shared.held.store(false, Ordering::SeqCst);
        self.shared.changed.notify_all();
    }

    /// Why the guest has ended, if it has.
    pub fn stopped(&self) -> Option<Stop> {
        self.shared.state().stop
    }

    /// Writes the rest of the guest kernel's output that did not fit the pipe before.
    pub fn finish_console(&self) {
        self.shared.bus.finish();
    }

    /// Becomes readable when the guest has ended.
    pub fn ended(&self) -> BorrowedFd<'_> {
        sys::borrow(&self.shared.ended)
    }
}

/// Lets KVM make what it needs for the guest, a thread of this process among it, while that is still allowed. The guest
/// is not entered: it is left before its first instruction.
fn prepare(cpu: &mut VcpuFd, flag: ExitFlag) {
    flag.set(true);
    // The result is ignored here: if KVM cannot run the guest, the next call fails too.
    let _ = cpu.run();
    flag.set(false);
}

/// Runs one processor until the process ends.
fn run(mut cpu: VcpuFd, shared: &Shared, flag: ExitFlag) -> ! {
    let mut tries = 0;
    loop {
        let stop = match cpu.run() {
            Ok(VcpuExit::MmioRead(address, out)) => {
                shared.bus.read(address, out);
                None
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                shared.bus.write(address, data);
                None
            }
            Ok(VcpuExit::IoIn(port, out)) => {
                shared.bus.port_in(port, out);
                None
            }
            Ok(VcpuExit::IoOut(port, data)) => match shared.bus.port_out(port, data) {
                Flow::GoOn => None,
                Flow::Reset => Some(shared.reset()),
            },
            Ok(VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen) => None,
            Ok(VcpuExit::Shutdown) => Some(Stop::TripleFault),
            Ok(VcpuExit::InternalError) => Some(Stop::Internal(sys::internal_error(&mut cpu))),
            Ok(VcpuExit::FailEntry(reason, _)) => Some(Stop::Entry(reason)),
            // It has cost the guest a while, which is the point; others come first.
            Ok(VcpuExit::Unsupported(KVM_EXIT_X86_BUS_LOCK)) => {
                thread::yield_now();
                None
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_NOTIFY)) => {
                sys::is_beyond_help(&mut cpu).then_some(Stop::Unknown(KVM_EXIT_NOTIFY))
            }
            Ok(_) => Some(Stop::Unknown(cpu.get_kvm_run().exit_reason)),
            Err(error) if error.errno() == libc::EINTR => None,
            Err(error) if error.errno() == libc::EAGAIN && tries < TRIES => {
                tries += 1;
                shared.pass_gate(flag);
                continue;
            }
            Err(error) => Some(Stop::Failed(error.errno())),
        };
        tries = 0;
        if let Some(stop) = stop {
            shared.stop(stop);
        }
        shared.pass_gate(flag);
    }
}
