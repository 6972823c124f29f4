//! Watches the host memory of a uml guest's processes where no control group limits it.
//!
//! A limit of a process's address space counts sizes: one page in each gigabyte costs the host a page of tables
//! each, which only the host's kernel counts, process by process.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_jail::Spawned;
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use crate::processes::{HostProcesses, Memory};
use crate::processor_time;

/// The time between two looks: the first while a look costs little, the last for a thousand processes.
const PACES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(1)];
/// Between these, looking takes one part in this many of a processor.
const SHARE: u32 = 100;

/// Watches the host memory that the guest's processes have beyond the guest's memory.
#[derive(Debug)]
pub struct MemoryWatch {
    keeper: Arc<Spawned>,
    limit: u64,
    due: Instant,
}

/// The guest's processes have more memory than they may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Excess {
    used: u64,
    limit: u64,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [used, limit] = [self.used, self.limit].map(|bytes| bytes >> 20);
        write!(f, "its guest made the host use {used} MiB of memory beyond its own; the limit is {limit} MiB")
    }
}

impl Excess {
    pub(crate) fn event(&self) -> What {
        What::limit_hit("host memory", self.to_string())
    }
}

impl MemoryWatch {
    pub(crate) fn new(keeper: Arc<Spawned>, limit: u64) -> Self {
        Self { keeper, limit, due: Instant::now() }
    }

    /// When [`Self::check`] has something to do.
    pub(crate) fn due(&self) -> Instant {
        self.due
    }

    /// Looks at the guest's processes when it is time.
    pub(crate) fn check(&mut self, now: Instant) -> Option<Excess> {
        if now < self.due {
            return None;
        }
        let began = processor_time();
        let used = beyond_the_guests(self.keeper.pid);
        self.due = now + pace(processor_time().saturating_sub(began));
        let excess = Excess { used, limit: self.limit };
        // The processes of a keeper that has ended may have been another's.
        (used > self.limit && self.keeper_runs()).then_some(excess)
    }

    fn keeper_runs(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        matches!(waitid(WaitId::PidFd(self.keeper.pidfd.as_fd()), options), Ok(None))
    }

    /// Kills the sandbox.
    pub(crate) fn kill(&self) {
        // Fails only if it has already exited.
        let _ = pidfd_send_signal(&self.keeper.pidfd, Signal::KILL);
    }
}

/// The time until the next look, after one that took so much of a processor.
fn pace(cost: Duration) -> Duration {
    let [fast, slow] = PACES;
    cost.saturating_mul(SHARE).clamp(fast, slow)
}

/// The memory in bytes of all descendants of the keeper, without files and shared memory. What has ended
/// counts nothing.
fn beyond_the_guests(keeper: u32) -> u64 {
    let of = |pid| Memory::read(pid).beyond_the_guests();
    let Some(first) = children(keeper) else {
        // The host's kernel lists no children, or the keeper has ended.
        let all = HostProcesses::read().map(|all| all.below(keeper)).unwrap_or_default();
        return all.iter().fold(0, |sum, process| sum.saturating_add(of(process.pid)));
    };
    let mut sum = 0u64;
    // Pids can be reused meanwhile, so no process is visited twice.
    let mut seen = BTreeSet::from([keeper]);
    let mut left = first;
    while let Some(pid) = left.pop() {
        if seen.insert(pid) {
            sum = sum.saturating_add(of(pid));
            left.extend(children(pid).unwrap_or_default());
        }
    }
    sum
}

/// The children of all threads of a process. None if they cannot be read.
fn children(pid: u32) -> Option<Vec<u32>> {
    let mut found = Vec::new();
    let mut is_readable = false;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        // A thread may have ended since.
        let Ok(text) = fs::read_to_string(thread.path().join("children")) else { continue };
        is_readable = true;
        found.extend(text.split_ascii_whitespace().filter_map(|word| word.parse::<u32>().ok()));
    }
    is_readable.then_some(found)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    /// A keeper whose child is the guest kernel, with this many processes.
    struct Keeper(Child);

    impl Keeper {
        fn with(processes: usize) -> Self {
            let script = format!(
                "sh -c 'n=0; while [ $n -lt {processes} ]; do sleep 600 & n=$((n+1)); done; wait'; true"
            );
            let child = Command::new("/bin/sh").args(["-c", &script]).stdout(Stdio::null()).spawn().unwrap();
            let keeper = Self(child);
            let until = Instant::now() + Duration::from_secs(60);
            while keeper.below().len() != processes + 1 {
                assert!(Instant::now() < until, "they do not start");
                std::thread::sleep(Duration::from_millis(5));
            }
            keeper
        }

        fn below(&self) -> Vec<u32> {
            let all = HostProcesses::read().unwrap().below(self.0.id());
            all.iter().map(|process| process.pid).collect()
        }

        fn watch(&self, limit: u64) -> MemoryWatch {
            let pidfd = || pidfd_open(Pid::from_child(&self.0), PidfdFlags::empty()).unwrap();
            MemoryWatch::new(Arc::new(Spawned::new(self.0.id(), pidfd(), pidfd())), limit)
        }
    }

    impl Drop for Keeper {
        fn drop(&mut self) {
            for pid in self.below() {
                if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                    let _ = rustix::process::kill_process(pid, Signal::KILL);
                }
            }
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn u6_the_memory_of_all_processes_below_the_keeper_is_summed() {
        let keeper = Keeper::with(20);
        let expected =
            || -> u64 { keeper.below().iter().map(|pid| Memory::read(*pid).beyond_the_guests()).sum() };
        // Shells may still take or release a page.
        let (before, sum, after) = (expected(), beyond_the_guests(keeper.0.id()), expected());
        assert!(
            before.min(after) <= sum + (1 << 16) && sum <= before.max(after) + (1 << 16),
            "{before} {sum}"
        );
        // Each has at least a page of its own and one of tables.
        assert!(sum >= 21 * 8192, "{sum}");
        assert_eq!(beyond_the_guests(u32::MAX), 0);
    }

    #[test]
    fn u6_a_guest_beyond_its_limit_is_noticed_when_it_is_time() {
        let keeper = Keeper::with(2);
        let mut watch = keeper.watch(8192);
        let now = Instant::now();
        let excess = watch.check(now).unwrap();
        assert!(excess.used > excess.limit, "{excess:?}");
        assert_eq!(watch.check(now), None, "it is not time");
        assert!(watch.check(watch.due()).is_some());
        assert_eq!(keeper.watch(1 << 40).check(Instant::now()), None);
    }

    #[test]
    fn u6_a_sandbox_that_has_ended_is_not_ended_for_a_strangers_memory() {
        let mut keeper = Keeper::with(1);
        let mut watch = keeper.watch(0);
        for pid in keeper.below() {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).unwrap();
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        watch.kill();
        keeper.0.wait().unwrap();
        assert!(!watch.keeper_runs());
        assert_eq!(watch.check(Instant::now()), None);
    }

    #[test]
    fn u6_a_look_that_takes_long_is_made_less_often() {
        let ms = Duration::from_millis;
        assert_eq!([pace(ms(0)), pace(ms(2)), pace(ms(5))], [ms(250), ms(250), ms(500)]);
        assert_eq!([pace(ms(30)), pace(Duration::MAX)], [ms(1000); 2]);
    }

    #[test]
    fn the_cause_has_both_numbers() {
        let text = Excess { used: 700 << 20, limit: 324 << 20 }.to_string();
        assert_eq!(
            text,
            "its guest made the host use 700 MiB of memory beyond its own; the limit is 324 MiB"
        );
    }
}
