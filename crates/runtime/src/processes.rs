//! The host processes of a sandbox, as the host sees them. Nothing here is reported by the guest.
//!
//! A uml sandbox is a keeper, its child the guest kernel, and a child of that for every address space in the
//! guest. A kvm sandbox is a keeper alone: its virtual processors are threads of it. In both cases there is a
//! gateway if the sandbox has a network.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};

/// The unit of times in /proc. User space sees hundredths of a second, whatever the kernel counts in.
const TICK_NS: u64 = 10_000_000;
/// For how many processes the kinds of memory are read, those with the most memory first. Reading them takes
/// as long as everything else about a process, and guest processes only have guest memory unless their kernel
/// is hostile.
const ASKED_FOR_MEMORY: usize = 32;
/// Longer than any line of /proc/N/stat.
const STAT_SIZE: usize = 1024;

/// A process at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostProcess {
    pub pid: u32,
    pub parent: u32,
    /// Its state, as the letter that ps shows.
    pub state: u8,
    /// CPU time of its own and of children that it waited for, in nanoseconds.
    pub cpu_ns: u64,
    /// Its start time in ticks since boot, which distinguishes it from a later process with the same pid.
    pub began: u64,
    /// Pages of resident memory.
    pub resident: u64,
}

impl HostProcess {
    /// Reads a process. None if it has been reaped.
    pub fn read(pid: u32) -> Option<Self> {
        let mut line = [0u8; STAT_SIZE];
        let length = File::open(format!("/proc/{pid}/stat")).ok()?.read(&mut line).ok()?;
        Self::parse(line.get(..length)?)
    }

    fn parse(line: &[u8]) -> Option<Self> {
        // The name between the parentheses is chosen by the process and can contain spaces and parentheses.
        let end = line.iter().rposition(|byte| *byte == b')')?;
        let text = |bytes| std::str::from_utf8(bytes).ok();
        let pid = text(line.split(|byte| *byte == b' ').next()?)?.parse().ok()?;
        let mut fields = text(line.get(end + 1..)?)?.split_ascii_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let parent = fields.next()?.parse().ok()?;
        // From here on fields are counted: 14 to 17 of the whole line are times, 22 is the start time, 24 the
        // memory.
        let mut fields = fields.skip(9);
        let mut ticks = 0u64;
        for _ in 14..=17 {
            ticks = ticks.saturating_add(fields.next()?.parse().ok()?);
        }
        let began = fields.nth(4)?.parse().ok()?;
        let resident = fields.nth(1)?.parse().ok()?;
        Some(Self { pid, parent, state, cpu_ns: ticks.saturating_mul(TICK_NS), began, resident })
    }

    /// Whether it is stopped by a signal or a tracer, or has ended.
    pub fn is_stopped(&self) -> bool {
        match self.state {
            // A process whose first thread has ended looks like a zombie while other threads run.
            b'Z' => !threads(self.pid).any(|state| !matches!(state, b'T' | b't' | b'Z' | b'X')),
            state => matches!(state, b'T' | b't' | b'X'),
        }
    }
}

/// The states of a process's threads; empty if it has ended.
fn threads(pid: u32) -> impl Iterator<Item = u8> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some(HostProcess::parse(&fs::read(entry.path().join("stat")).ok()?)?.state))
}

/// All processes of the machine at about one moment.
#[derive(Debug)]
pub struct HostProcesses {
    all: BTreeMap<u32, HostProcess>,
    children: BTreeMap<u32, Vec<u32>>,
}

impl HostProcesses {
    /// Makes one pass over /proc.
    pub fn read() -> io::Result<Self> {
        let entries = fs::read_dir("/proc")?;
        let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        // A process that ended meanwhile is skipped.
        Ok(Self::of(pids.filter_map(HostProcess::read)))
    }

    fn of(list: impl Iterator<Item = HostProcess>) -> Self {
        let all: BTreeMap<_, _> = list.map(|process| (process.pid, process)).collect();
        let mut children: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for process in all.values() {
            children.entry(process.parent).or_default().push(process.pid);
        }
        Self { all, children }
    }

    /// A modified copy, as another pass could have found it.
    #[cfg(test)]
    pub(crate) fn with(mut self, change: impl FnMut(&mut HostProcess)) -> Self {
        self.all.values_mut().for_each(change);
        Self::of(self.all.into_values())
    }

    /// The children of a process.
    pub fn children_of(&self, pid: u32) -> Vec<u32> {
        self.children.get(&pid).cloned().unwrap_or_default()
    }

    /// All descendants of a process, every parent before its children.
    pub fn below(&self, pid: u32) -> Vec<HostProcess> {
        let mut found: Vec<HostProcess> = Vec::new();
        let mut parents = vec![pid];
        // Pids can be reused during the pass, so there may be cycles: no process is visited twice.
        let mut left = self.children.clone();
        while let Some(parent) = parents.pop() {
            let children = left.remove(&parent).unwrap_or_default();
            found.extend(children.iter().filter_map(|child| self.all.get(child)));
            parents.extend(children);
        }
        found
    }

    /// The processes of the sandbox of this keeper. Its monitor is not part of it; its gateway, which is the
    /// monitor's other child, is.
    pub fn sandbox(&self, keeper: u32, monitor: Option<u32>) -> SandboxProcesses {
        let below = self.below(keeper);
        let guest = below.iter().find(|process| process.parent == keeper).map(|process| process.pid);
        let children = monitor.and_then(|monitor| self.children.get(&monitor)).into_iter().flatten();
        let gateway = children.filter(|child| **child != keeper).filter_map(|child| self.all.get(child));
        let mut everybody: Vec<_> = self.all.get(&keeper).into_iter().chain(&below).chain(gateway).collect();
        let cpu_ns = everybody.iter().fold(0, |sum: u64, process| sum.saturating_add(process.cpu_ns));
        everybody.sort_by_key(|process| std::cmp::Reverse(process.resident));
        let (mut private, mut shared) = (0u64, 0u64);
        for process in everybody.iter().take(ASKED_FOR_MEMORY) {
            let memory = Memory::read(process.pid);
            private = private.saturating_add(memory.beyond_the_guests());
            shared = shared.max(memory.shared);
        }
        let memory = private.saturating_add(shared);
        SandboxProcesses { guest, count: below.len(), cpu_ns, memory }
    }
}

/// The processes of one sandbox in total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SandboxProcesses {
    pub guest: Option<u32>,
    /// How many of them are the guest's, without the keeper and the gateway.
    pub count: usize,
    /// CPU time, including processes that have ended and been reaped.
    pub cpu_ns: u64,
    /// Resident memory and its page tables in bytes. Shared memory is guest memory and counts once: the guest kernel has touched
    /// whatever its processes have, so the largest part that one process sees is about all of it.
    pub memory: u64,
}

/// The memory of a process in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    private: u64,
    shared: u64,
    tables: u64,
}

impl Memory {
    /// A process that has ended has none.
    pub(crate) fn read(pid: u32) -> Self {
        fs::read(format!("/proc/{pid}/status")).map(|text| Self::parse(&text)).unwrap_or_default()
    }

    fn parse(status: &[u8]) -> Self {
        let mut memory = Self::default();
        for line in status.split(|byte| *byte == b'\n') {
            let Some((name, value)) = std::str::from_utf8(line).ok().and_then(|line| line.split_once(':'))
            else {
                continue;
            };
            let part = match name {
                "RssAnon" => &mut memory.private,
                "RssFile" | "RssShmem" => &mut memory.shared,
                "VmPTE" => &mut memory.tables,
                _ => continue,
            };
            let kilobytes = value.trim().trim_end_matches(" kB").parse().unwrap_or(0);
            *part = part.saturating_add(1024_u64.saturating_mul(kilobytes));
        }
        memory
    }

    /// What the host's kernel has for this process besides files and shared memory.
    pub(crate) fn beyond_the_guests(&self) -> u64 {
        self.private.saturating_add(self.tables)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::processor_time;

    struct Ended(Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            for process in HostProcesses::read().unwrap().below(self.0.id()) {
                if let Some(pid) = i32::try_from(process.pid).ok().and_then(rustix::process::Pid::from_raw) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn shell(script: &str) -> Ended {
        Ended(Command::new("/bin/sh").args(["-c", script]).stdout(Stdio::null()).spawn().unwrap())
    }

    #[test]
    fn r10_a_process_whose_first_thread_has_ended_is_not_stopped_while_another_runs() {
        let script = "import ctypes, threading, time\n\
            threading.Thread(target=time.sleep, args=(60,)).start()\n\
            ctypes.CDLL(None).pthread_exit(None)";
        let child = Ended(Command::new("python3").args(["-c", script]).spawn().unwrap());
        let now = || HostProcess::read(child.0.id()).unwrap();
        wait_for(|| now().state == b'Z');
        assert!(!now().is_stopped());
        let pid = rustix::process::Pid::from_child(&child.0);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        wait_for(|| now().is_stopped());
    }

    fn wait_for(what: impl Fn() -> bool) {
        let begin = Instant::now();
        while !what() {
            assert!(begin.elapsed() < Duration::from_secs(60), "it does not come about");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_name_made_of_parentheses_and_numbers_is_not_taken_for_fields() {
        let rest = "S 7 1 1 0 -1 4194560 10 20 0 0 3 4 5 6 20 0 1 0 12345 1000 100 0 0";
        for name in ["sh", "a) R 1 2 3", "(((", ") ", "x\n) Z 9"] {
            let process = HostProcess::parse(format!("42 ({name}) {rest}\n").as_bytes()).unwrap();
            let expected = HostProcess {
                pid: 42,
                parent: 7,
                state: b'S',
                cpu_ns: 18 * TICK_NS,
                began: 12345,
                resident: 100,
            };
            assert_eq!(process, expected, "{name:?}");
        }
    }

    #[test]
    fn the_memory_of_a_process_is_its_own_shared_and_page_tables() {
        let status = "Name:\tVmPTE: 9 kB\nVmRSS:\t 70 kB\nRssAnon:\t  10 kB\nRssFile:\t 20 kB\n\
            RssShmem:\t 40 kB\nVmPTE:\t  5 kB\nThreads:\t3\n";
        let memory = Memory::parse(status.as_bytes());
        assert_eq!(memory, Memory { private: 10 << 10, shared: 60 << 10, tables: 5 << 10 });
        assert_eq!(memory.beyond_the_guests(), 15 << 10);
        let most =
            Memory::parse(b"VmPTE: 18446744073709551615 kB\nRssAnon: 18446744073709551615 kB\n\xff:\n");
        assert_eq!(most.beyond_the_guests(), u64::MAX);
        assert_eq!(Memory::parse(b"VmPTE: many kB\nRssAnon"), Memory::default());
        assert_eq!(Memory::read(u32::MAX), Memory::default());
    }

    #[test]
    fn what_is_no_line_of_stat_is_no_process() {
        for line in
            ["", "42", "42 (sh)", "42 (sh) S", "42 (sh) S 7 1 1", "x (sh) S 7 1 1 0 -1 1 1 1 1 1 1 1 1 1"]
        {
            assert_eq!(HostProcess::parse(line.as_bytes()), None, "{line:?}");
        }
    }

    #[test]
    fn a_circle_of_parents_ends() {
        let process =
            |pid, parent| HostProcess { pid, parent, state: b'S', cpu_ns: 0, began: 0, resident: 0 };
        let circle = HostProcesses::of([process(1, 2), process(2, 1), process(3, 2)].into_iter());
        assert_eq!(circle.below(1).len(), 3);
        assert!(circle.below(9).is_empty());
    }

    #[test]
    fn a_tree_is_found_and_its_time_and_memory_are_summed() {
        // A keeper, its guest kernel, and two processes of that, one of which spins.
        let keeper = shell("sh -c 'sleep 100 & sh -c \"while :; do :; done\" & wait'; true");
        let look = || HostProcesses::read().unwrap().sandbox(keeper.0.id(), None);
        wait_for(|| look().count == 3 && look().cpu_ns > 0);
        let before = look();
        assert!(before.guest.is_some_and(|guest| guest != keeper.0.id()));
        assert!(before.memory > 100 * 1024 && before.memory < 100 << 20, "{}", before.memory);
        let began = Instant::now();
        let used = || look().cpu_ns - before.cpu_ns;
        wait_for(|| used() >= 200_000_000);
        // One of them spins: at most one processor's time, plus the rounding of ticks.
        let most = u128::from(used()).saturating_sub(200_000_000);
        assert!(most < began.elapsed().as_nanos(), "{most}");
        assert_eq!(HostProcesses::read().unwrap().sandbox(u32::MAX, None), SandboxProcesses::default());
    }

    #[test]
    fn the_gateway_beside_a_keeper_is_counted_and_is_not_the_guests() {
        let monitor = shell("sleep 100 & sh -c 'while :; do :; done' & wait");
        let keeper = || {
            let children = HostProcesses::read().unwrap().below(monitor.0.id());
            children
                .iter()
                .find(|child| child.cpu_ns == 0)
                .map(|child| child.pid)
                .filter(|_| children.len() == 2)
        };
        let look = |keeper| HostProcesses::read().unwrap().sandbox(keeper, Some(monitor.0.id()));
        wait_for(|| keeper().is_some_and(|keeper| look(keeper).cpu_ns > 50_000_000));
        let keeper = keeper().unwrap();
        let (with, alone) = (look(keeper), HostProcesses::read().unwrap().sandbox(keeper, None));
        assert_eq!((with.count, with.guest, alone.cpu_ns), (0, None, 0));
        assert!(with.memory > alone.memory, "{with:?} {alone:?}");
    }

    #[test]
    fn time_of_children_that_ended_is_not_lost() {
        let keeper = shell("sh -c 'n=0; while [ $n -lt 200000 ]; do n=$((n+1)); done'; sleep 100; true");
        let look = || HostProcesses::read().unwrap().sandbox(keeper.0.id(), None);
        wait_for(|| look().cpu_ns > 30_000_000);
        // The counting process has ended when its parent starts the sleeping one.
        let most = std::cell::Cell::new(0);
        wait_for(|| {
            let now = look();
            let lost = now.cpu_ns < most.replace(now.cpu_ns);
            assert!(!lost, "time went back");
            let spinning = HostProcesses::read().unwrap().below(keeper.0.id());
            spinning.iter().all(|process| process.state == b'S')
        });
    }

    #[test]
    fn a_look_at_three_hundred_processes_is_cheap() {
        let keeper = shell("n=0; while [ $n -lt 300 ]; do sleep 100 & n=$((n+1)); done; wait");
        wait_for(|| HostProcesses::read().unwrap().below(keeper.0.id()).len() == 300);
        let looks = (0..20).map(|_| {
            let begin = processor_time();
            let all = HostProcesses::read().unwrap();
            assert_eq!(all.sandbox(keeper.0.id(), None).count, 300);
            (processor_time() - begin, fs::read_dir("/proc").unwrap().count())
        });
        let (best, entries) = looks.min().unwrap();
        println!("{best:?} for 300 processes and those of the machine: {entries} entries of /proc");
        // Unoptimised; an optimised build takes a tenth of that.
        assert!(best < Duration::from_micros(100) * u32::try_from(entries).unwrap(), "{best:?}, {entries}");
    }
}
