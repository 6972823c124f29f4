//! One keeper per sandbox: it holds the guest's devices and its control channel, and nothing else.
//!
//! It is started with every resource as an open descriptor (`bathy_protocol::launch`), starts the guest kernel in a
//! jail of its own, closes its own jail, and only then lets the guest's first instruction run. A bug in a device gives
//! an attacker this process: no network, no files, no secrets, no way to start another program.

mod console_log;
mod devices;
mod event_loop;
pub mod hub;
mod owner;
mod parking;
mod sys;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bathy_devices::{GuestRam, MemoryError};
use bathy_jail::filter::{Filter, KEEPER};
use bathy_jail::limits::{self, Limit};
use bathy_jail::spawn::{self, Guest, Waiting};
use bathy_jail::{FilterError, LimitsError, PrivilegesError, RootError, SpawnError, privileges, root};
use bathy_logs::{Ring, RingError};
use bathy_protocol::launch::{self, Launch};
use bathy_protocol::{Cause, FromKeeper, MessageError, Timeline};
use bathy_uml::guest;
use rustix::event::epoll;
use rustix::fs::MemfdFlags;
use rustix::net::SendFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Resource;
use thiserror::Error;

use crate::console_log::ConsoleLog;
use crate::devices::{Devices, DevicesError, GuestEnds};
use crate::event_loop::{Keeper, chain};
use crate::hub::{Hub, OWNER};

/// What kept the sandbox from starting.
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
    #[error("The keeper cannot be limited")]
    Limits(#[from] LimitsError),
    #[error("The keeper cannot drop its privileges")]
    Privileges(#[from] PrivilegesError),
    #[error("The keeper's system calls cannot be filtered")]
    Filter(#[from] FilterError),
}

/// The descriptors that the keeper was started with.
struct Inherited {
    config: File,
    client: OwnedFd,
    kernel: OwnedFd,
    initramfs: OwnedFd,
    image: File,
    disk: File,
    /// Held, never used: while it is open the sandbox's processor slot is taken.
    slot: OwnedFd,
}

/// The descriptors of a sandbox that outlives its first client.
struct Kept {
    /// Held, never used: while it is open the sandbox counts as running.
    life: OwnedFd,
    output: Ring,
    console: Ring,
    parking: File,
}

impl Kept {
    /// # Safety
    /// As for [`run`].
    unsafe fn inherit(launch: &Launch) -> Result<Option<Self>, StartError> {
        if !launch.kept {
            return Ok(None);
        }
        // SAFETY: by the function's contract, because the configuration says that these are there too.
        let (life, output, console, parking) = unsafe {
            (
                sys::inherit(launch::fd::LIFE),
                sys::inherit(launch::fd::OUTPUT_LOG),
                sys::inherit(launch::fd::CONSOLE_LOG),
                sys::inherit(launch::fd::PARKING),
            )
        };
        Ok(Some(Self {
            life,
            output: Ring::writer(output.into(), launch.log_capacity)?,
            console: Ring::writer(console.into(), launch.log_capacity)?,
            parking: parking.into(),
        }))
    }
}

/// The whole life of a keeper.
///
/// # Safety
/// The descriptors of [`launch::fd`] must be open and belong to nobody else in this process.
pub unsafe fn run() -> ExitCode {
    let started = unix_ns();
    // SAFETY: by the function's contract. The launcher opened these numbers for us; nothing else in this process has taken them.
    let inherited = unsafe {
        Inherited {
            config: sys::inherit(launch::fd::CONFIG).into(),
            client: sys::inherit(launch::fd::CLIENT),
            kernel: sys::inherit(launch::fd::KERNEL),
            initramfs: sys::inherit(launch::fd::INITRAMFS),
            image: sys::inherit(launch::fd::IMAGE).into(),
            disk: sys::inherit(launch::fd::DISK).into(),
            slot: sys::inherit(launch::fd::SLOT),
        }
    };
    let Ok(client) = inherited.client.try_clone() else { return ExitCode::FAILURE };
    // SAFETY: by the function's contract.
    match unsafe { start(inherited, started) } {
        Ok(keeper) => {
            drop(client);
            keeper.run();
            ExitCode::SUCCESS
        }
        Err(error) => {
            let ended = FromKeeper::Ended { cause: Cause::Failed(chain(&error)), console: String::new() };
            let mut message = Vec::new();
            if bathy_protocol::message::encode(bathy_protocol::CONNECTION, &ended, &mut message).is_ok() {
                // The socket is fresh and takes this at once; if the client is gone there is nobody to tell.
                let _ = rustix::net::send(&client, &message, SendFlags::NOSIGNAL);
            }
            ExitCode::FAILURE
        }
    }
}

/// # Safety
/// As for [`run`].
unsafe fn start(inherited: Inherited, started: u64) -> Result<Keeper, StartError> {
    let mut config = Vec::new();
    inherited.config.take(64 * 1024).read_to_end(&mut config).map_err(StartError::ReadConfig)?;
    let launch: Launch = bathy_protocol::message::decode(&config)?;
    // SAFETY: by the function's contract.
    let kept = unsafe { Kept::inherit(&launch)? };
    let disk_size = inherited.disk.metadata().map_err(StartError::ReadConfig)?.len();

    root::enter_empty_root()?;
    let ram = Rc::new(GuestRam::create(launch.memory)?);
    let new_epoll =
        || epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| StartError::Descriptor(error.into()));
    let (epoll, asleep) = (Rc::new(new_epoll()?), new_epoll()?);
    let (devices, ends) = Devices::new(inherited.image, inherited.disk, launch.kept, &ram, &epoll)?;
    let (console, console_write) = pipe()?;
    rustix::io::ioctl_fionbio(&console, true).map_err(|error| StartError::Descriptor(error.into()))?;

    let parts = GuestParts {
        kernel: inherited.kernel,
        initramfs: inherited.initramfs,
        ram: Rc::clone(&ram),
        ends,
        console: console_write,
    };
    let waiting = parts.start(&launch)?;
    // The largest file that it writes: the disk, the parked memory, or a log with its header.
    confine(if launch.kept { disk_size.max(launch.memory).max(launch.log_capacity * 2) } else { disk_size })?;
    let guest = waiting.release()?;

    let timeline = Timeline { keeper: started, jailed: unix_ns(), ..Timeline::default() };
    let (life, output, console_ring, parking) = match kept {
        Some(kept) => (Some(kept.life), Some(kept.output), Some(kept.console), Some(kept.parking)),
        None => (None, None, None, None),
    };
    let keeper = Keeper {
        epoll,
        devices,
        hub: Hub::new(timeline, launch.restricted),
        clients: BTreeMap::from([(OWNER, inherited.client)]),
        new_clients: VecDeque::new(),
        demands: VecDeque::new(),
        last_client: OWNER,
        console: ConsoleLog::new(console, console_ring),
        output,
        ram,
        parking,
        asleep,
        guest,
        ready_timeout: Duration::from_millis(launch.ready_timeout_ms),
        warned: Vec::new(),
        _locks: (inherited.slot, life),
    };
    keeper.watch().map_err(StartError::Descriptor)?;
    Ok(keeper)
}

/// What the guest is given; dropped, and so closed on our side, once the guest has it.
struct GuestParts {
    kernel: OwnedFd,
    initramfs: OwnedFd,
    ram: Rc<GuestRam>,
    ends: GuestEnds,
    console: OwnedFd,
}

impl GuestParts {
    fn start(self, launch: &Launch) -> Result<Waiting, StartError> {
        // An input that never has anything to read and never ends: the guest holds its other end itself.
        let (input, input_write) = pipe()?;
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
        let waiting = spawn::guest(&Guest {
            program: self.kernel.as_fd(),
            args: &guest::command_line(launch),
            descriptors: &descriptors,
            limits: &guest::limits(launch),
            filter: guest::filter(launch.mode),
            cpu: launch.cpu,
            own_user: launch.guest_user,
        })?;
        Ok(waiting)
    }
}

/// Closes the keeper's own jail. From here on it can only work on descriptors that it already has.
fn confine(largest_file: u64) -> Result<(), StartError> {
    limits::apply(limits::COMMON)?;
    limits::apply(&[
        Limit { resource: Resource::Nofile, value: 256 },
        Limit { resource: Resource::Nproc, value: 0 },
        Limit { resource: Resource::Fsize, value: largest_file },
        Limit { resource: Resource::Data, value: 256 * 1024 * 1024 },
    ])?;
    let filter = KEEPER.compile()?;
    privileges::drop_all()?;
    Filter::install(&filter)?;
    Ok(())
}

fn pipe() -> Result<(OwnedFd, OwnedFd), StartError> {
    pipe_with(PipeFlags::CLOEXEC).map_err(|error| StartError::Descriptor(error.into()))
}

/// The wall clock, as nanoseconds since 1970.
fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
