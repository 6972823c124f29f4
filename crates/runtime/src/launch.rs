//! From a description to a running keeper.

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
use crate::gateway::{self, GatewayError, Network};
use crate::identity::{self, Identities};
use crate::kvm_probe::{self, Verdict};
use crate::ledger::Ledger;
use crate::resource_group::ResourceGroup;
use crate::slot::{self, Slot, SlotError};
use crate::supervisor::network::SandboxGateways;

/// How much later than its keeper's deadline a sandbox is given up.
const READY_MARGIN: Duration = Duration::from_secs(5);

/// A sandbox could not be started.
#[derive(Debug, Error)]
pub enum LaunchError {
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// The hardware's virtual machines.
    #[error("The kvm engine cannot be used: {found}. {}", found.cure().unwrap_or_else(|| "`bathy doctor` tells more".to_owned()))]
    Kvm {
        /// What is in the way.
        found: Verdict,
    },
    #[error("Cannot start the sandbox's keeper. `bathy doctor` tells what this machine lacks")]
    Spawn(#[from] SpawnError),
    /// The user numbers of a sandbox of root.
    #[error(
        "Cannot give the sandbox user numbers of its own: {why}. Those of root's sandboxes are {}, which this user namespace may lack. Use a container that has them, or run bathy as an ordinary user",
        identity::range_of_root()
    )]
    Users {
        /// What the kernel said.
        why: String,
    },
    /// A socket or configuration.
    #[error("Cannot prepare the sandbox's keeper")]
    Prepare(#[source] io::Error),
    #[error(transparent)]
    Network(#[from] GatewayError),
    #[error(transparent)]
    Group(#[from] CgroupError),
    /// It ended before it was ready.
    #[error("{0}")]
    NotReady(String),
    #[error(transparent)]
    Connection(#[from] ConnectionError),
}

/// A running sandbox. Dropping it ends it.
#[derive(Debug)]
pub struct Sandbox {
    /// How to speak to it, as its owner.
    pub connection: Connection,
    /// When its keeper was started: wall clock, nanoseconds since 1970.
    pub spawned_unix_ns: u64,
    keeper: Spawned,
    group: Arc<ResourceGroup>,
}

/// The files of a sandbox that outlives its first client.
#[derive(Debug)]
pub struct PersistentFiles {
    /// Locked for as long as the sandbox runs.
    pub life: File,
    /// The ring for the output of jobs.
    pub output: File,
    /// The ring for the guest kernel's console.
    pub console: File,
    /// Where memory goes while it is paused.
    pub parking: File,
    /// The capacity of each ring.
    pub log_capacity: u64,
}

/// What a sandbox is started with, besides its description.
pub struct Resources<'a> {
    /// What runs it. The description [fits](SandboxSpec::fits) it.
    pub engine: Chosen,
    /// What every sandbox is made of.
    pub assets: &'a Assets,
    pub paths: &'a Paths,
    pub disk: File,
    /// For a persistent sandbox.
    pub persistent: Option<PersistentFiles>,
    pub group: ResourceGroup,
    /// What the operator lets any sandbox reach at most.
    pub ceilings: Vec<NetworkPolicy>,
    /// The beginning of the command that allows a target which the sandbox is kept from.
    pub cure: String,
}

impl Sandbox {
    /// Starts a sandbox with resources of the caller's, and the gateway of its network if it has one.
    ///
    /// # Errors
    /// When something of it cannot be had.
    pub fn start(
        spec: &SandboxSpec,
        resources: Resources<'_>,
    ) -> Result<(Self, Option<SandboxGateways>), LaunchError> {
        let Resources { engine, assets, paths, disk, persistent, group, ceilings, cure } = resources;
        let group = Arc::new(group);
        let kvm = match engine {
            Chosen::Kvm => Some(kvm_probe::open().map_err(|found| LaunchError::Kvm { found })?),
            Chosen::Uml => None,
        };
        // A guest that is no process needs no processor of its own, but the numbers that come with it.
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
                cure,
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
                // The system's helpers are missing or not privileged: the caller's own number is what every ordinary user has.
                let instead = identities.instead().ok_or_else(|| not_mapped(error))?;
                network.iter_mut().for_each(|network| network.identity = instead.gateway);
                keeper.spawn(&instead)?
            }
            spawned => spawned?,
        };
        let mut connection = Connection::new(ours).map_err(LaunchError::Prepare)?;
        let (moved, pid) = (Arc::clone(&group), spawned.pid);
        connection.when_guest_starts(move || moved.part_keeper(pid));
        let sandbox = Self { connection, spawned_unix_ns, keeper: spawned, group };
        // After the keeper: the guest boots meanwhile.
        let network = network.map(SandboxGateways::start).transpose()?;
        Ok((sandbox, network))
    }

    /// Waits for the guest's first message. The keeper has a deadline of its own; this one is for a keeper that does not keep it.
    ///
    /// # Errors
    /// When the sandbox has ended, or does not answer.
    pub fn wait_until_ready(&mut self, patience: Duration) -> Result<(), LaunchError> {
        let deadline = Instant::now() + patience + READY_MARGIN;
        loop {
            if !is_readable_before(self.connection.fd(), deadline) {
                return Err(LaunchError::NotReady("the sandbox's keeper does not answer".to_owned()));
            }
            let arrivals = match self.connection.receive() {
                Err(ConnectionError::Gone) => {
                    let failure = self.failure().unwrap_or_else(|| "start: it has ended".to_owned());
                    return Err(LaunchError::NotReady(format!("the sandbox's keeper could not {failure}")));
                }
                other => other?,
            };
            for arrival in arrivals {
                match arrival {
                    Arrival::Keeper(FromKeeper::Ready(_)) => return Ok(()),
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
        }
    }

    pub fn group(&self) -> &ResourceGroup {
        &self.group
    }

    /// The keeper's process number.
    pub fn keeper_pid(&self) -> u32 {
        self.keeper.pid
    }

    /// How the keeper's process ended. It is not waited for: one that only closed its connection is not gone.
    pub fn keepers_end(&self) -> String {
        ending::of_process(self.keeper.pidfd.as_fd())
    }

    /// Ends the sandbox at once; its connection tells when it is gone.
    pub fn kill(&self) {
        // Fails only if it is gone already.
        let _ = pidfd_send_signal(&self.keeper.pidfd, Signal::KILL);
    }

    /// Why the keeper's program did not run, if it did not. For a keeper that is gone; it waits for one that is not.
    pub fn failure(&self) -> Option<String> {
        self.keeper.failure()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // The keeper is the first process of its pid namespace: with it ends everything of the sandbox.
        ending::kill_or_say(&self.keeper);
    }
}

/// What a keeper is started with.
struct KeeperLaunch<'a> {
    spec: &'a SandboxSpec,
    engine: Chosen,
    assets: &'a Assets,
    disk: &'a File,
    persistent: Option<&'a PersistentFiles>,
    slot: &'a Slot,
    link: Option<&'a OwnedFd>,
    kvm: Option<&'a File>,
    group: &'a ResourceGroup,
}

impl KeeperLaunch<'_> {
    /// Starts it as these users; returns the owner's end of its connection too.
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
        };
        let config = config_file(&config).map_err(LaunchError::Prepare)?;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|error| LaunchError::Prepare(error.into()))?;
        let descriptors = KeeperDescriptors {
            owner: theirs.as_fd(),
            kernel: assets.kernel.as_fd(),
            initramfs: assets.initramfs.as_fd(),
            image: assets.image.as_fd(),
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

/// Why a sandbox cannot have its users.
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
