//! The descriptors that a keeper and a gateway are started with: what each is, and at which number.
//!
//! Both directions are here: the launcher passes them in this order, the process takes them over in the same one. Each has
//! its configuration at [`CONFIG`], which says which of the others are there.

use crate::launch::{Engine, Launch};
use crate::network::GatewayLaunch;

/// The configuration of either process, after the standard streams.
pub const CONFIG: i32 = 3;
/// The socket of whoever started it, which is told when the configuration cannot be used.
pub const OWNER: i32 = 4;

/// What a keeper works on, besides its configuration. It looks nothing up by path.
#[derive(Debug, PartialEq, Eq)]
pub struct KeeperDescriptors<F> {
    /// The first client's socket.
    pub owner: F,
    /// The guest kernel, executable.
    pub kernel: F,
    /// The initramfs with the agent.
    pub initramfs: F,
    /// The read-only root image.
    pub image: F,
    /// The sandbox's writable disk.
    pub disk: F,
    /// The lock that marks the sandbox's processor slot as taken for as long as the keeper lives.
    pub slot: F,
    /// With [`Launch::persistent`].
    pub persistent: Option<PersistentDescriptors<F>>,
    /// With [`Launch::network`]: frames to and from the gateway.
    pub link: Option<F>,
    /// For a guest of the kvm engine: the opened `/dev/kvm`.
    pub kvm: Option<F>,
}

/// What belongs to a sandbox that outlives its first client.
#[derive(Debug, PartialEq, Eq)]
pub struct PersistentDescriptors<F> {
    /// The lock that marks the sandbox as running for as long as the keeper lives.
    pub life: F,
    /// The ring file for the output of jobs.
    pub output: F,
    /// The ring file for the guest kernel's console.
    pub console: F,
    /// Where the guest's memory goes while it is paused.
    pub parking: F,
}

impl<F> KeeperDescriptors<F> {
    /// All of them in the order of their numbers, from [`CONFIG`] on.
    pub fn in_order(self, config: F) -> Vec<F> {
        let Self { owner, kernel, initramfs, image, disk, slot, persistent, link, kvm } = self;
        let mut all = vec![config, owner, kernel, initramfs, image, disk, slot];
        if let Some(PersistentDescriptors { life, output, console, parking }) = persistent {
            all.extend([life, output, console, parking]);
        }
        all.extend(link);
        all.extend(kvm);
        all
    }

    /// Those that a configuration announces, by what `inherit` makes of a number. Each number is asked for once.
    pub fn take_over(launch: &Launch, mut inherit: impl FnMut(i32) -> F) -> Self {
        let mut numbers = OWNER..;
        let mut next = || inherit(numbers.next().unwrap_or(OWNER));
        Self {
            owner: next(),
            kernel: next(),
            initramfs: next(),
            image: next(),
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

/// What a gateway works on, besides its configuration.
#[derive(Debug, PartialEq, Eq)]
pub struct GatewayDescriptors<F> {
    /// Messages to and from whoever started it.
    pub control: F,
    /// Frames to and from the keeper.
    pub link: F,
    /// The memory of [`crate::counts`].
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

    /// Those that a configuration announces, by what `inherit` makes of a number. Each number is asked for once.
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

    fn launch(engine: Engine, persistent: bool, network: bool) -> Launch {
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
        }
    }

    #[test]
    fn a_keeper_takes_over_what_its_launcher_passes() {
        let uml = Engine::Uml { cpu: 0, mode: UmlMode::Seccomp };
        for engine in [uml, Engine::Kvm { cpus: 1 }] {
            for (persistent, network) in [(false, false), (false, true), (true, false), (true, true)] {
                let launch = launch(engine, persistent, network);
                let taken = KeeperDescriptors::take_over(&launch, |number| number);
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
                cure: String::new(),
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
