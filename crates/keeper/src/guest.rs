//! The guest, whichever engine runs it: how it is started inside the keeper's closed jail, and how it ends.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use bathy_devices::GuestRam;
use bathy_jail::filter::{Filter, KEEPER, KEEPER_KVM};
use bathy_jail::limits::{self, Limit};
use bathy_jail::spawn::{self, Waiting};
use bathy_jail::{Spawned, privileges};
use bathy_protocol::Cause;
use bathy_protocol::launch::{Launch, UmlMode};
use bathy_uml::guest;
use bathy_vmm::bus::Bus;
use bathy_vmm::serial::SerialPort;
use bathy_vmm::{Machine, Processors, Stop, boot, layout};
use rustix::fs::MemfdFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Resource, WaitId, WaitIdOptions, waitid};

use crate::StartError;
use crate::devices::{Devices, GuestEnds, Models};

/// Descriptors of the keeper, besides one for each virtual processor and for each file of the image but one.
const DESCRIPTORS: u64 = 256;

fn descriptors(launch: &Launch) -> u64 {
    DESCRIPTORS.saturating_add(u64::try_from(launch.image.len().saturating_sub(1)).unwrap_or(0))
}

pub enum Guest {
    /// A process of its own.
    Process(Spawned),
    /// Threads of this process.
    Machine(Processors),
}

impl Guest {
    /// A descriptor that becomes readable when the guest has ended.
    pub fn ended(&self) -> BorrowedFd<'_> {
        match self {
            Self::Process(process) => process.pidfd.as_fd(),
            Self::Machine(processors) => processors.ended(),
        }
    }

    /// How the guest has ended.
    pub fn cause(&self) -> Cause {
        match self {
            Self::Process(process) => {
                let status =
                    waitid(WaitId::PidFd(process.pidfd.as_fd()), WaitIdOptions::EXITED).ok().flatten();
                let code = status.as_ref().and_then(|status| status.exit_status());
                let signal = status.as_ref().and_then(|status| status.terminating_signal());
                Cause::GuestExited(code.or_else(|| signal.map(|signal| 128 + signal)).unwrap_or(-1))
            }
            Self::Machine(processors) => match processors.stopped() {
                Some(Stop::PowerOff) => Cause::GuestExited(0),
                Some(stop) => Cause::GuestCrashed(stop.to_string()),
                None => Cause::GuestExited(-1),
            },
        }
    }

    /// Why the guest's program did not start, if it did not.
    pub fn failure(&self) -> Option<String> {
        match self {
            Self::Process(process) => process.failure(),
            Self::Machine(_) => None,
        }
    }

    /// Whether the guest has ended by itself.
    pub fn has_ended(&self) -> bool {
        match self {
            Self::Process(_) => false,
            Self::Machine(processors) => processors.stopped().is_some(),
        }
    }

    /// Writes the rest of the guest kernel's output that did not fit the pipe before.
    pub fn finish_console(&self) {
        if let Self::Machine(processors) = self {
            processors.finish_console();
        }
    }

    /// Pauses a virtual machine. A guest that is a process is frozen from outside.
    pub fn pause(&self) {
        if let Self::Machine(processors) = self {
            processors.pause();
        }
    }

    /// Resumes a virtual machine.
    pub fn resume(&self) {
        if let Self::Machine(processors) = self {
            processors.resume();
        }
    }
}

/// What a guest is made of; dropped, and so closed on our side, once the guest has it.
pub struct GuestParts {
    pub kernel: OwnedFd,
    pub initramfs: OwnedFd,
    pub models: Models,
    /// Where the kernel's console output goes.
    pub console: OwnedFd,
    /// The largest file that the keeper writes from now on.
    pub largest_file: u64,
}

impl GuestParts {
    /// Starts a guest that is a process, after closing the keeper's jail.
    pub fn start_process(
        self,
        launch: &Launch,
        (cpu, mode): (u32, UmlMode),
        ram: &Arc<GuestRam>,
        epoll: &Rc<OwnedFd>,
    ) -> Result<(Devices, Guest), StartError> {
        let largest_file = self.largest_file;
        let (devices, ends) = Devices::on_sockets(self.models, ram, epoll)?;
        let waiting =
            Process { kernel: self.kernel, initramfs: self.initramfs, ram, ends, console: self.console }
                .start(launch, cpu, mode)?;
        // While the new process closes its own jail on another processor.
        ram.use_large_pages(guest::used_at_boot(ram.size()));
        privileges::drop_all()?;
        confine(&KEEPER, descriptors(launch), largest_file)?;
        Ok((devices, Guest::Process(waiting.release()?)))
    }

    /// Starts a guest that is a virtual machine, after closing the keeper's jail and those of the machine's threads.
    pub fn start_machine(
        self,
        launch: &Launch,
        (cpus, kvm): (u32, OwnedFd),
        ram: &Arc<GuestRam>,
        epoll: &OwnedFd,
    ) -> Result<(Devices, Guest), StartError> {
        let cpus = u8::try_from(cpus).map_err(|_| StartError::Processors(cpus))?;
        let machine = Machine::new(kvm, Arc::clone(ram), cpus)?;
        let command_line = boot::command_line(launch, self.models.count());
        let (kernel, initramfs) = (File::from(self.kernel), File::from(self.initramfs));
        let parts = boot::Parts { kernel: &kernel, initramfs: &initramfs, command_line: &command_line, cpus };
        machine.enter_at(boot::load(ram, &parts)?)?;
        drop((kernel, initramfs));
        let (devices, registers) = Devices::on_bus(self.models, &machine, ram, epoll)?;
        rustix::io::ioctl_fionbio(&self.console, true)
            .map_err(|error| StartError::Descriptor(error.into()))?;
        let serial = SerialPort::new(machine.line(layout::SERIAL_LINE)?, self.console);
        privileges::drop_all()?;
        let processors = Processors::start(machine, Bus::new(serial, registers))?;
        confine(&KEEPER_KVM, descriptors(launch) + u64::from(cpus), self.largest_file)?;
        processors.resume();
        Ok((devices, Guest::Machine(processors)))
    }
}

/// What a guest that is a process is given.
struct Process<'a> {
    kernel: OwnedFd,
    initramfs: OwnedFd,
    ram: &'a GuestRam,
    ends: GuestEnds,
    console: OwnedFd,
}

impl Process<'_> {
    fn start(self, launch: &Launch, cpu: u32, mode: UmlMode) -> Result<Waiting, StartError> {
        // An input that never has anything to read and never ends: the guest holds its other end itself.
        let (input, input_write) =
            pipe_with(PipeFlags::CLOEXEC).map_err(|error| StartError::Descriptor(error.into()))?;
        let stub = rustix::fs::memfd_create("guest-stub", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|error| StartError::Descriptor(error.into()))?;
        let mut descriptors: Vec<BorrowedFd<'_>> = vec![
            input.as_fd(),
            self.console.as_fd(),
            self.console.as_fd(),
            self.ram.fd(),
            stub.as_fd(),
            self.initramfs.as_fd(),
        ];
        descriptors.extend(self.ends.iter());
        descriptors.push(input_write.as_fd());
        let waiting = spawn::guest(&spawn::GuestProgram {
            program: self.kernel.as_fd(),
            args: &guest::command_line(launch, mode),
            descriptors: &descriptors,
            limits: &guest::limits(launch),
            filter: guest::filter(mode),
            cpu,
            own_user: launch.guest_user,
        })?;
        Ok(waiting)
    }
}

/// Closes the keeper's own jail. From here on it can only work on descriptors that it already has.
fn confine(filter: &Filter, descriptors: u64, largest_file: u64) -> Result<(), StartError> {
    limits::apply(limits::COMMON)?;
    limits::apply(&[
        Limit { resource: Resource::Nofile, value: descriptors },
        Limit { resource: Resource::Nproc, value: 0 },
        Limit { resource: Resource::Fsize, value: largest_file },
        Limit { resource: Resource::Data, value: 256 * 1024 * 1024 },
    ])?;
    Filter::install(&filter.compile()?)?;
    Ok(())
}
