//! One keeper per sandbox: it holds the guest's devices and its control channel, and nothing else.
//!
//! It is started with every resource as an open descriptor (`bathy_protocol::launch`), makes the guest ready to run
//! (a process in a jail of its own, or a virtual machine), closes its own jail, and only then lets the guest's first instruction run. A bug in a device gives
//! an attacker this process: no network, no files, no secrets, no way to start another program.

mod clients;
mod console_log;
mod devices;
mod event_loop;
mod guest;
pub mod hub;
mod nic_link;
mod owner;
mod parking;
mod port;
mod sys;
mod timers;
mod watchdog;

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::Arc;

use bathy_devices::{GuestRam, MemoryError};
use bathy_jail::{FilterError, LimitsError, PrivilegesError, RootError, SpawnError, root};
use bathy_logs::{Ring, RingError};
use bathy_protocol::descriptors::{self, CONFIG, KeeperDescriptors, PersistentDescriptors};
use bathy_protocol::launch::{Engine, Launch};
use bathy_protocol::{Cause, FromKeeper, MessageError, Timeline, chain, unix_ns};
use bathy_vmm::boot::BootError;
use bathy_vmm::{MachineError, layout};
use rustix::net::SendFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use thiserror::Error;

use crate::devices::{DevicesError, Models};
use crate::event_loop::{Epolls, Keeper, KeeperResources};
use crate::guest::GuestParts;

/// Why the sandbox did not start.
#[derive(Debug, Error)]
enum StartError {
    #[error("The keeper's configuration is damaged")]
    Config(#[from] MessageError),
    #[error("The keeper's configuration cannot be read")]
    ReadConfig(#[source] io::Error),
    #[error("The keeper cannot enter its empty root")]
    Root(#[from] RootError),
    #[error("The guest's memory cannot be made")]
    Memory(#[from] MemoryError),
    #[error("The guest's devices cannot be made")]
    Devices(#[from] DevicesError),
    #[error("The sandbox's logs cannot be written")]
    Logs(#[from] RingError),
    #[error("A descriptor cannot be made")]
    Descriptor(#[source] io::Error),
    #[error("The guest cannot be started")]
    Spawn(#[from] SpawnError),
    #[error("The guest's virtual machine cannot be made")]
    Machine(#[from] MachineError),
    #[error("The launcher passed no /dev/kvm")]
    NoDevice,
    #[error("The guest cannot be booted")]
    Boot(#[from] BootError),
    #[error("A guest cannot have {0} virtual processors")]
    Processors(u32),
    #[error("The guest's virtual processors cannot be started")]
    Threads(#[from] bathy_vmm::vcpu::VcpuError),
    #[error("The keeper cannot be limited")]
    Limits(#[from] LimitsError),
    #[error("The keeper cannot drop its privileges")]
    Privileges(#[from] PrivilegesError),
    #[error("The keeper's system calls cannot be filtered")]
    Filter(#[from] FilterError),
}

/// What only a persistent sandbox has.
struct Persistent {
    /// Held, never used: while it is open the sandbox counts as running.
    life: OwnedFd,
    output: Ring,
    console: Ring,
    parking: File,
}

impl Persistent {
    fn new(descriptors: PersistentDescriptors<OwnedFd>, launch: &Launch) -> Result<Self, StartError> {
        let PersistentDescriptors { life, output, console, parking } = descriptors;
        Ok(Self {
            life,
            output: Ring::writer(output.into(), launch.log_capacity)?,
            console: Ring::writer(console.into(), launch.log_capacity)?,
            parking: parking.into(),
        })
    }
}

/// The whole life of a keeper.
///
/// # Safety
/// The descriptors of [`bathy_protocol::descriptors`] must be open and have no other owner in this process.
pub unsafe fn run() -> ExitCode {
    let started = unix_ns();
    // SAFETY: by the function's contract. Each number is asked for once; the owner's is in one of two branches.
    let inherit = |number| unsafe { sys::inherit(number) };
    let config = File::from(inherit(CONFIG));
    let launch = match configuration(&config) {
        Ok(launch) => launch,
        Err(error) => return fail(&inherit(descriptors::OWNER), &error),
    };
    let descriptors = KeeperDescriptors::take_over(&launch, inherit);
    let Ok(owner) = descriptors.owner.try_clone() else { return ExitCode::FAILURE };
    drop(config);
    match start(&launch, descriptors, started) {
        Ok(keeper) => {
            drop(owner);
            keeper.run();
            ExitCode::SUCCESS
        }
        Err(error) => fail(&owner, &error),
    }
}

/// Reports to the owner why the sandbox cannot be started.
fn fail(owner: &OwnedFd, error: &StartError) -> ExitCode {
    let ended = FromKeeper::Ended { cause: Cause::Failed(chain(error)), console: String::new() };
    let mut message = Vec::new();
    if bathy_protocol::message::encode(bathy_protocol::CONNECTION, &ended, &mut message).is_ok() {
        // The socket is fresh and takes this at once; an owner that has exited needs no report.
        let _ = rustix::net::send(owner, &message, SendFlags::NOSIGNAL);
    }
    ExitCode::FAILURE
}

fn configuration(file: &File) -> Result<Launch, StartError> {
    let mut config = Vec::new();
    file.take(64 * 1024).read_to_end(&mut config).map_err(StartError::ReadConfig)?;
    Ok(bathy_protocol::message::decode(&config)?)
}

fn start(
    launch: &Launch,
    descriptors: KeeperDescriptors<OwnedFd>,
    started: u64,
) -> Result<Keeper, StartError> {
    let KeeperDescriptors { owner, kernel, initramfs, image, disk, slot, persistent, link, kvm } =
        descriptors;
    let persistent = persistent.map(|files| Persistent::new(files, launch)).transpose()?;
    let (image, disk) = (image.into_iter().map(File::from).collect(), File::from(disk));
    let disk_size = disk.metadata().map_err(StartError::ReadConfig)?.len();

    root::enter_empty_root()?;
    let epolls = Epolls::new().map_err(StartError::Descriptor)?;
    let (console, console_write) =
        pipe_with(PipeFlags::CLOEXEC).map_err(|error| StartError::Descriptor(error.into()))?;
    rustix::io::ioctl_fionbio(&console, true).map_err(|error| StartError::Descriptor(error.into()))?;
    let parts = GuestParts {
        kernel,
        initramfs,
        models: Models::new(image, disk, launch)?,
        console: console_write,
        // The disk, the parked memory, or a log with its header.
        largest_file: if launch.persistent {
            disk_size.max(launch.memory).max(launch.log_capacity * 2)
        } else {
            disk_size
        },
    };
    let (ram, (devices, guest)) = match launch.engine {
        Engine::Kvm { cpus } => {
            let kvm = kvm.ok_or(StartError::NoDevice)?;
            let ram = Arc::new(GuestRam::create_around(launch.memory, layout::HOLE)?);
            let started = parts.start_machine(launch, (cpus, kvm), &ram, &epolls.running)?;
            (ram, started)
        }
        Engine::Uml { cpu, mode } => {
            let ram = Arc::new(GuestRam::create(launch.memory)?);
            let started = parts.start_process(launch, (cpu, mode), &ram, &epolls.running)?;
            (ram, started)
        }
    };

    let timeline = Timeline { keeper: started, jailed: unix_ns(), ..Timeline::default() };
    let resources = KeeperResources { epolls, guest, devices, ram, console, owner, link, slot, persistent };
    Keeper::new(resources, launch, timeline).map_err(StartError::Descriptor)
}
