//! Launches a sandbox: from its specification to a running keeper.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bathy_client::connection::{Arrival, Connection, ConnectionError};
use bathy_client::wait::is_readable_before;
use bathy_jail::spawn::{self, Program};
use bathy_jail::{CgroupError, SpawnError, Spawned};
use bathy_policy::NetworkPolicy;
use bathy_protocol::descriptors::{KeeperDescriptors, PersistentDescriptors};
use bathy_protocol::launch::{self, Launch};
use bathy_protocol::{FromKeeper, unix_ns};
use bathy_spec::paths::Paths;
use bathy_spec::{Chosen, SandboxSpec};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Signal, pidfd_send_signal};
use thiserror::Error;

use crate::addresses::Watcher;
use crate::assets::Assets;
use crate::disk::DiskError;
use crate::ending;
use crate::gateway::{self, Network, NetworkError};
use crate::identity::{self, Identities};
use crate::kvm_probe::{self, KvmSupport};
use crate::ledger::Ledger;
use crate::resource_group::ResourceGroup;
use crate::slot::{self, CpuSlot, CpuSlotError};
use crate::supervisor::MemoryWatch;
use crate::supervisor::network::SandboxGateways;

/// How much longer than its keeper's deadline a sandbox may take to be ready.
const READY_MARGIN: Duration = Duration::from_secs(5);

/// A sandbox could not be started.
#[derive(Debug, Error)]
pub enum LaunchError {
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    CpuSlot(#[from] CpuSlotError),
    /// The kvm engine cannot be used.
    #[error("The kvm engine cannot be used: {found}. {}", found.hint().unwrap_or_else(|| "`bathy doctor` shows more".to_owned()))]
    Kvm {
        /// The result of the probe.
        found: KvmSupport,
    },
    #[error("Cannot start the sandbox's keeper. `bathy doctor` shows what is missing")]
    Spawn(#[from] SpawnError),
    /// The user ids of root's sandboxes cannot be mapped.
    #[error(
        "Cannot give the sandbox user numbers of its own: {why}. Those of root's sandboxes are {}, which this user namespace may lack. Use a container that has them, or run bathy as an ordinary user",
        identity::range_of_root()
    )]
    Users { why: String },
    /// A socket or configuration cannot be created.
    #[error("Cannot prepare the sandbox's keeper")]
    Prepare(#[source] io::Error),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error(transparent)]
    Group(#[from] CgroupError),
    /// The sandbox ended before it was ready.
    #[error("{0}")]
    NotReady(String),
    #[error(transparent)]
    Connection(#[from] ConnectionError),
}

/// A running sandbox. Dropping it kills it.
#[derive(Debug)]
pub struct Sandbox {
    /// The owner's connection to the keeper.
    pub connection: Connection,
    /// When the keeper was started, in nanoseconds since 1970.
    pub spawned_unix_ns: u64,
    keeper: Arc<Spawned>,
    group: Arc<ResourceGroup>,
}

/// The files of a persistent sandbox.
#[derive(Debug)]
pub struct PersistentFiles {
    /// Locked for as long as the sandbox runs.
    pub life: File,
    /// The ring buffer for the output of jobs.
    pub output: File,
    /// The ring buffer for the guest kernel's console.
    pub console: File,
    /// The file for its memory while it is paused.
    pub parking: File,
    /// The capacity of each ring buffer.
    pub log_capacity: u64,
}

/// The inputs of a launch besides the specification.
pub struct Resources<'a> {
    /// The engine. The specification [fits](SandboxSpec::fits) it.
    pub engine: Chosen,
    /// Kernel, initramfs, root image and programs.
    pub assets: &'a Assets,
    pub paths: &'a Paths,
    pub disk: File,
    /// Only for a persistent sandbox.
    pub persistent: Option<PersistentFiles>,
    pub group: ResourceGroup,
    /// The operator's ceilings on the network policy.
    pub ceilings: Vec<NetworkPolicy>,
    /// The prefix of the command that allows a denied destination, for hints.
    pub allow_command: String,
}

impl Sandbox {
    /// Starts a sandbox, and its gateway if it has a network.
    ///
    /// # Errors
    /// A resource is missing or a process cannot be started.
    pub fn start(
        spec: &SandboxSpec,
        resources: Resources<'_>,
    ) -> Result<(Self, Option<SandboxGateways>), LaunchError> {
        let Resources { engine, assets, paths, disk, persistent, group, ceilings, allow_command } = resources;
        let group = Arc::new(group);
        let kvm = match engine {
            Chosen::Kvm => Some(kvm_probe::open().map_err(|found| LaunchError::Kvm { found })?),
            Chosen::Uml => None,
        };
        // A kvm guest needs no processor of its own, but the user ids that come with the slot.
        let slot = slot::take(&paths.state)?;
        let identities = Identities::of(&slot);
        let policies = spec.policies(ceilings);
        let (mut network, mut link) = (None, None);
        if policies.has_network() {
            let (keepers, gateways) = gateway::link()?;
            link = Some(keepers);
            network = Some(Network {
                program: assets.gateway.try_clone().map_err(LaunchError::Prepare)?,
                identity: identities.gateway,
                group: Arc::clone(&group),
                policies,
                limits: spec.network_limits,
                allow_command,
                ports: gateway::bind_ports(&spec.ports)?,
                link: gateways,
                ledger: Ledger::new(&spec.network_limits),
                addresses: Watcher::start().map_err(LaunchError::Prepare)?,
            });
        }
        let keeper = KeeperLaunch {
            spec,
            engine,
            assets,
            disk: &disk,
            persistent: persistent.as_ref(),
            slot: &slot,
            link: link.as_ref(),
            kvm: kvm.as_ref(),
            group: &group,
        };
        let spawned_unix_ns = unix_ns();
        let (spawned, ours) = match keeper.spawn(&identities) {
            Err(LaunchError::Spawn(SpawnError::Map(error))) => {
                // The newuidmap helpers are missing or not privileged: fall back to the user's own id.
                let fallback = identities.fallback().ok_or_else(|| not_mapped(error))?;
                network.iter_mut().for_each(|network| network.identity = fallback.gateway);
                keeper.spawn(&fallback)?
            }
            spawned => spawned?,
        };
        let mut connection = Connection::new(ours).map_err(LaunchError::Prepare)?;
        let (moved, pid) = (Arc::clone(&group), spawned.pid);
        connection.when_guest_starts(move || moved.part_keeper(pid));
        let sandbox = Self { connection, spawned_unix_ns, keeper: Arc::new(spawned), group };
        // Started after the keeper, while the guest boots.
        let network = network.map(SandboxGateways::start).transpose()?;
        Ok((sandbox, network))
    }

    /// Waits for the guest's first message. The keeper has a deadline of its own; this one is for a keeper
    /// that ignores it.
    ///
    /// # Errors
    /// The sandbox has ended or does not answer.
    pub fn wait_until_ready(&mut self, timeout: Duration) -> Result<(), LaunchError> {
        let deadline = Instant::now() + timeout + READY_MARGIN;
        loop {
            if !is_readable_before(self.connection.fd(), deadline) {
                return Err(LaunchError::NotReady("the sandbox's keeper does not answer".to_owned()));
            }
            let arrivals = match self.connection.receive() {
                Err(ConnectionError::KeeperExited) => {
                    let failure = self.failure().unwrap_or_else(|| "start: it has ended".to_owned());
                    return Err(LaunchError::NotReady(format!("the sandbox's keeper could not {failure}")));
                }
                other => other?,
            };
            let mut is_ready = false;
            for arrival in arrivals {
                match arrival {
                    // What came with it may say that the guest has ended since.
                    Arrival::Keeper(FromKeeper::Ready(_)) => is_ready = true,
                    Arrival::Keeper(FromKeeper::Ended { cause, console }) => {
                        let mut text = cause.to_string();
                        if !console.is_empty() {
                            text.push_str("; the guest kernel's last lines: ");
                            text.push_str(&console);
                        }
                        return Err(LaunchError::NotReady(text));
                    }
                    _ => {}
                }
            }
            if is_ready {
                return Ok(());
            }
        }
    }

    pub fn group(&self) -> &ResourceGroup {
        &self.group
    }

    pub fn keeper_pid(&self) -> u32 {
        self.keeper.pid
    }

    /// What watches the host memory of its guest's processes, where no control group limits it.
    pub fn memory_watch(&self) -> Option<MemoryWatch> {
        Some(MemoryWatch::new(Arc::clone(&self.keeper), self.group.watched_memory()?))
    }

    /// Describes how the keeper ended that closed its connection.
    pub fn keepers_end(&self) -> String {
        self.exited_keepers_end().unwrap_or_else(|| ending::HUNG_UP.to_owned())
    }

    /// Describes how the keeper ended. None if it still runs.
    pub fn exited_keepers_end(&self) -> Option<String> {
        ending::of_process(self.keeper.pidfd.as_fd())
    }

    /// Kills the sandbox; its connection closes when it has ended.
    pub fn kill(&self) {
        // Fails only if it has already exited.
        let _ = pidfd_send_signal(&self.keeper.pidfd, Signal::KILL);
    }

    /// Why the keeper's program failed, if it did. Waits for the keeper to exit.
    pub fn failure(&self) -> Option<String> {
        self.keeper.failure()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // The keeper is the first process of its pid namespace: everything of the sandbox ends with it. It is killed
        // first, so that it reports nothing about its guest.
        self.kill();
        self.group.kill_guest();
        ending::kill_or_log(&self.keeper);
    }
}

/// The inputs of a keeper process.
struct KeeperLaunch<'a> {
    spec: &'a SandboxSpec,
    engine: Chosen,
    assets: &'a Assets,
    disk: &'a File,
    persistent: Option<&'a PersistentFiles>,
    slot: &'a CpuSlot,
    link: Option<&'a OwnedFd>,
    kvm: Option<&'a File>,
    group: &'a ResourceGroup,
}

impl KeeperLaunch<'_> {
    /// Starts the keeper as these users. Also returns the owner's end of its connection.
    fn spawn(&self, identities: &Identities) -> Result<(Spawned, OwnedFd), LaunchError> {
        let Self { spec, assets, persistent, slot, .. } = self;
        let config = Launch {
            engine: match self.engine {
                Chosen::Kvm => launch::Engine::Kvm { cpus: spec.cpus },
                Chosen::Uml => launch::Engine::Uml { cpu: slot.cpu, mode: spec.mode() },
            },
            memory: spec.memory.0,
            processes: spec.processes.into(),
            ready_timeout_ms: spec.ready_timeout_ms,
            guest_user: self.engine == Chosen::Uml && identities.guest_has_its_own(),
            persistent: persistent.is_some(),
            log_capacity: persistent.map_or(0, |files| files.log_capacity),
            disk_limits: spec.disk_limits.for_keeper(),
            restricted: spec.restriction(),
            network: self.link.is_some(),
            image: assets.image.iter().map(|part| part.offset).collect(),
        };
        let config = config_file(&config).map_err(LaunchError::Prepare)?;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|error| LaunchError::Prepare(error.into()))?;
        let descriptors = KeeperDescriptors {
            owner: theirs.as_fd(),
            kernel: assets.kernel.as_fd(),
            initramfs: assets.initramfs.as_fd(),
            image: assets.image.iter().map(|part| part.file.as_fd()).collect(),
            disk: self.disk.as_fd(),
            slot: slot.lock.as_fd(),
            persistent: persistent.map(|files| PersistentDescriptors {
                life: files.life.as_fd(),
                output: files.output.as_fd(),
                console: files.console.as_fd(),
                parking: files.parking.as_fd(),
            }),
            link: self.link.map(AsFd::as_fd),
            kvm: self.kvm.map(AsFd::as_fd),
        };
        let spawned = spawn::keeper(&Program {
            program: assets.keeper.as_fd(),
            args: &[CString::from(c"bathy-keeper")],
            descriptors: &descriptors.in_order(config.as_fd()),
            identity: identities.keeper,
            entrance: Some(&self.group.keeper_entrance()?),
            before_start: Some(&|pid| self.group.set_priority(pid)),
        })?;
        Ok((spawned, ours))
    }
}

/// The error for user ids that cannot be mapped.
fn not_mapped(error: io::Error) -> LaunchError {
    if rustix::process::geteuid().is_root() {
        return LaunchError::Users { why: error.to_string() };
    }
    SpawnError::Map(error).into()
}

fn config_file(config: &Launch) -> io::Result<File> {
    let bytes = launch::encode(config).map_err(io::Error::other)?;
    let mut file = File::from(memfd_create("keeper-config", MemfdFlags::CLOEXEC)?);
    file.write_all(&bytes)?;
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    Ok(file)
}
