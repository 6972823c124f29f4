//! One keeper per sandbox: it holds the guest's devices and its control channel, and nothing else.
//!
//! It is started with every resource as an open descriptor (`bathy_protocol::launch`), starts the guest kernel in a
//! jail of its own, closes its own jail, and only then lets the guest's first instruction run. A bug in a device gives
//! an attacker this process: no network, no files, no secrets, no way to start another program.

mod console_log;
mod devices;
mod event_loop;
pub mod hub;
mod sys;

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
use crate::hub::Hub;

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
    _slot: OwnedFd,
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
            _slot: sys::inherit(launch::fd::SLOT),
        }
    };
    let Ok(client) = inherited.client.try_clone() else { return ExitCode::FAILURE };
    match start(inherited, started) {
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

fn start(inherited: Inherited, started: u64) -> Result<Keeper, StartError> {
    let mut config = Vec::new();
    inherited.config.take(64 * 1024).read_to_end(&mut config).map_err(StartError::ReadConfig)?;
    let launch: Launch = bathy_protocol::message::decode(&config)?;
    let disk_size = inherited.disk.metadata().map_err(StartError::ReadConfig)?.len();

    root::enter_empty_root()?;
    let ram = Rc::new(GuestRam::create(launch.memory)?);
    let epoll =
        epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| StartError::Descriptor(error.into()))?;
    let epoll = Rc::new(epoll);
    let (devices, ends) = Devices::new(inherited.image, inherited.disk, &ram, &epoll)?;
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
    confine(disk_size)?;
    let guest = waiting.release()?;

    let hub = Hub::new(Timeline { keeper: started, jailed: unix_ns(), ..Timeline::default() });
    let keeper = Keeper {
        epoll,
        devices,
        hub,
        client: inherited.client,
        console: ConsoleLog::new(console),
        guest,
        ready_timeout: Duration::from_millis(launch.ready_timeout_ms),
        warned: Vec::new(),
        _slot: inherited._slot,
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
fn confine(disk_size: u64) -> Result<(), StartError> {
    limits::apply(limits::COMMON)?;
    limits::apply(&[
        Limit { resource: Resource::Nofile, value: 128 },
        Limit { resource: Resource::Nproc, value: 0 },
        Limit { resource: Resource::Fsize, value: disk_size },
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
