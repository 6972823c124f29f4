//! A sandbox, its gateway, and what the gateway has before anything happens.

use bathy_tests::kept::until;
use bathy_tests::world::World;
use serde_json::Value;

use bathy_tests::world::guest::{Guest, Outcome};

/// The gateway's process: the monitor's child that has its name.
#[track_caller]
pub fn gateway(world: &World, name: &str) -> u32 {
    let found = find_gateway(world, name);
    assert!(found.is_some(), "no gateway of {name}");
    found.unwrap()
}

/// The same, if there is one.
pub fn find_gateway(world: &World, name: &str) -> Option<u32> {
    world.home().gateway(name)
}

/// Memory of a process, in KiB.
fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// A sandbox and what its gateway has before anything happens.
pub struct Scene<'world> {
    pub web: Guest<'world>,
    pid: u32,
    memory: u64,
}

impl<'world> Scene<'world> {
    /// A sandbox with these options.
    pub fn new(world: &'world World, options: &[&str]) -> Self {
        let web = Guest::start(world, "web", options);
        web.still_works();
        let pid = gateway(world, "web");
        Self { web, pid, memory: memory(pid) }
    }

    /// Runs one row, with more Python before it.
    #[track_caller]
    pub fn attack(&self, more: &str, row: Value) -> Outcome {
        self.web.try_with(more, &[row]).remove(0)
    }

    /// The same gateway still serves, and has not grown beyond its limits.
    #[track_caller]
    pub fn survived(&self) {
        self.web.still_works();
        assert_eq!(gateway(self.web.world, "web"), self.pid, "it is another one");
        let grown = memory(self.pid).saturating_sub(self.memory);
        println!("    the gateway grew by {grown} KiB and has {} descriptors", descriptors(self.pid));
        assert!(grown < 256 * 1024, "it grew by {grown} KiB");
        assert!(descriptors(self.pid) < 2100, "{}", descriptors(self.pid));
    }

    /// The limit was hit, and that is written down.
    #[track_caller]
    pub fn limited(&self, limit: &str) {
        until(&format!("the limit {limit:?} is written down"), 4, || {
            self.web.events("limit_hit").iter().any(|event| event["limit"] == limit)
        });
    }
}
