//! The file descriptors that a keeper and a gateway are started with, and their numbers.
//!
//! The launcher passes them in this order, and the process takes them over in the same order. Each process
//! has its configuration at [`CONFIG`], which lists the optional ones that are present.

use crate::launch::{Engine, Launch};
use crate::network::GatewayLaunch;

/// The configuration of either process, after the standard streams.
pub const CONFIG: i32 = 3;
/// The owner's socket, which receives an error if the configuration is invalid.
pub const OWNER: i32 = 4;

/// The descriptors of a keeper besides its configuration. It opens nothing by path.
#[derive(Debug, PartialEq, Eq)]
pub struct KeeperDescriptors<F> {
    /// The owner's socket, which is the first client.
    pub owner: F,
    /// The guest kernel, executable.
    pub kernel: F,
    /// The initramfs with the agent.
    pub initramfs: F,
    /// The files of the read-only root image, as many as [`Launch::image`] has offsets.
    pub image: Vec<F>,
    /// The sandbox's writable disk.
    pub disk: F,
    /// The lock on the sandbox's processor slot, held for as long as the keeper runs.
    pub slot: F,
    /// Present only with [`Launch::persistent`] set.
    pub persistent: Option<PersistentDescriptors<F>>,
    /// Frames to and from the gateway, only with [`Launch::network`].
    pub link: Option<F>,
    /// The opened `/dev/kvm`, only for the kvm engine.
    pub kvm: Option<F>,
}

/// The descriptors of a persistent sandbox.
#[derive(Debug, PartialEq, Eq)]
pub struct PersistentDescriptors<F> {
    /// The life lock, which marks the sandbox as running for as long as the keeper runs.
    pub life: F,
    /// The ring file for the output of jobs.
    pub output: F,
    /// The ring file for the guest kernel's console.
    pub console: F,
    /// The file for the guest's memory while it is paused.
    pub parking: F,
}

impl<F> KeeperDescriptors<F> {
    /// All of them in the order of their numbers, from [`CONFIG`] on.
    pub fn in_order(self, config: F) -> Vec<F> {
        let Self { owner, kernel, initramfs, image, disk, slot, persistent, link, kvm } = self;
        let mut all = vec![config, owner, kernel, initramfs];
        all.extend(image);
        all.extend([disk, slot]);
        if let Some(PersistentDescriptors { life, output, console, parking }) = persistent {
            all.extend([life, output, console, parking]);
        }
        all.extend(link);
        all.extend(kvm);
        all
    }

    /// The descriptors that a configuration announces, as `inherit` returns them for their numbers. It is
    /// called once for each number.
    pub fn take_over(launch: &Launch, mut inherit: impl FnMut(i32) -> F) -> Self {
        let mut numbers = OWNER..;
        let mut next = || inherit(numbers.next().unwrap_or(OWNER));
        Self {
            owner: next(),
            kernel: next(),
            initramfs: next(),
            image: std::iter::repeat_with(&mut next).take(launch.image.len()).collect(),
            disk: next(),
            slot: next(),
            persistent: launch.persistent.then(|| PersistentDescriptors {
                life: next(),
                output: next(),
                console: next(),
                parking: next(),
            }),
            link: launch.network.then(&mut next),
            kvm: matches!(launch.engine, Engine::Kvm { .. }).then(next),
        }
    }
}

/// The descriptors of a gateway besides its configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct GatewayDescriptors<F> {
    /// Messages to and from the owner.
    pub control: F,
    /// Frames to and from the keeper.
    pub link: F,
    /// The shared memory of [`crate::counts`].
    pub counts: F,
    /// Sockets that are bound to the published ports, in their order.
    pub ports: Vec<F>,
}

impl<F> GatewayDescriptors<F> {
    /// All of them in the order of their numbers, from [`CONFIG`] on.
    pub fn in_order(self, config: F) -> Vec<F> {
        let Self { control, link, counts, ports } = self;
        [config, control, link, counts].into_iter().chain(ports).collect()
    }

    /// The descriptors that a configuration announces, as `inherit` returns them for their numbers. It is
    /// called once for each number.
    pub fn take_over(launch: &GatewayLaunch, mut inherit: impl FnMut(i32) -> F) -> Self {
        let mut numbers = OWNER..;
        let mut next = || inherit(numbers.next().unwrap_or(OWNER));
        let (control, link, counts) = (next(), next(), next());
        Self { control, link, counts, ports: std::iter::repeat_with(next).take(launch.ports.len()).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{DiskLimits, UmlMode};
    use crate::network::{BoundPort, NetworkLimits};

    fn launch(engine: Engine, persistent: bool, network: bool, files: usize) -> Launch {
        Launch {
            engine,
            memory: 64 << 20,
            processes: 10,
            ready_timeout_ms: 1,
            guest_user: false,
            persistent,
            log_capacity: 0,
            disk_limits: DiskLimits { write_bandwidth: 1, read_bandwidth: None, flushes: 1 },
            restricted: None,
            network,
            image: vec![0; files],
        }
    }

    #[test]
    fn a_keeper_takes_over_what_its_launcher_passes() {
        let uml = Engine::Uml { cpu: 0, mode: UmlMode::Seccomp };
        for engine in [uml, Engine::Kvm { cpus: 1 }] {
            for (persistent, network) in [(false, false), (false, true), (true, false), (true, true)] {
                let files = if persistent { 129 } else { 1 };
                let launch = launch(engine, persistent, network, files);
                let taken = KeeperDescriptors::take_over(&launch, |number| number);
                assert_eq!(taken.image.len(), files);
                assert_eq!(taken.persistent.is_some(), persistent);
                assert_eq!(taken.link.is_some(), network);
                assert_eq!(taken.kvm.is_some(), engine != uml);
                assert_eq!(taken.owner, OWNER);
                let passed = taken.in_order(CONFIG);
                let count = i32::try_from(passed.len()).unwrap();
                assert_eq!(
                    passed,
                    Vec::from_iter(CONFIG..CONFIG + count),
                    "each has the number of its place"
                );
            }
        }
    }

    #[test]
    fn a_gateway_takes_over_what_its_launcher_passes() {
        for ports in [0, 1, 3] {
            let launch = GatewayLaunch {
                policies: String::new(),
                resolvers: Vec::new(),
                limits: NetworkLimits::default(),
                ports: vec![BoundPort { guest: 80, udp: false }; ports],
                allow_command: String::new(),
                spent: None,
                own: Vec::new(),
            };
            let taken = GatewayDescriptors::take_over(&launch, |number| number);
            assert_eq!((taken.control, taken.ports.len()), (OWNER, ports));
            let last = CONFIG + 4 + i32::try_from(ports).unwrap();
            assert_eq!(taken.in_order(CONFIG), Vec::from_iter(CONFIG..last));
        }
    }
}
