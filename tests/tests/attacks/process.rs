//! The state of processes, from the host's /proc.

use std::collections::BTreeMap;
use std::fs;

/// A process, identified by its number and the time of its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    pub number: u32,
    started: u64,
}

struct Stat {
    parent: u32,
    state: char,
    started: u64,
}

fn stat(number: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // The name may contain anything; what follows its last bracket is regular.
    let fields: Vec<_> = text.rsplit_once(')')?.1.split_whitespace().collect();
    Some(Stat {
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        started: fields.get(19)?.parse().ok()?,
    })
}

impl Process {
    /// The process that has this number now.
    pub fn of(number: u32) -> Option<Self> {
        stat(number).map(|stat| Self { number, started: stat.started })
    }

    /// Whether it still runs. A zombie does not: it only waits for its parent to ask.
    pub fn is_alive(self) -> bool {
        stat(self.number).is_some_and(|stat| stat.started == self.started && stat.state != 'Z')
    }

    /// The lines of a file below its folder in /proc.
    pub fn file(self, name: &str) -> String {
        let path = format!("/proc/{}/{name}", self.number);
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The target of a link below its folder in /proc.
    pub fn link(self, name: &str) -> String {
        let path = format!("/proc/{}/{name}", self.number);
        fs::read_link(&path).unwrap_or_else(|error| panic!("{path}: {error}")).to_string_lossy().into_owned()
    }

    /// A number in its status file.
    pub fn status_number(self, name: &str) -> u64 {
        let status = self.file("status");
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let words = line.unwrap_or_else(|| panic!("no {name} in {status}"));
        words
            .split_whitespace()
            .next()
            .and_then(|word| word.parse().ok())
            .unwrap_or_else(|| panic!("{words}"))
    }
}

/// All descendants of a process, each with its parent's number.
pub fn descendants(ancestor: u32) -> BTreeMap<Process, u32> {
    let mut all: Vec<(Process, u32)> = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc is mounted").flatten() {
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(stat) = stat(number) {
            all.push((Process { number, started: stat.started }, stat.parent));
        }
    }
    let mut found = BTreeMap::new();
    let mut parents = vec![ancestor];
    while let Some(parent) = parents.pop() {
        for (process, _) in all.iter().filter(|(_, its)| *its == parent) {
            found.insert(*process, parent);
            parents.push(process.number);
        }
    }
    found
}
