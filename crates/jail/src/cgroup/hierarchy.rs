//! This process's place in the machine's control groups.
//!
//! Version 1 has a tree per controller or set of controllers, version 2 one tree for all; a machine can have both.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// How many folders of one tree are looked through for groups that were left behind.
const SEARCH_LIMIT: usize = 20_000;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Tree {
    /// The controllers of a version 1 tree; `None` for the version 2 tree.
    controllers: Option<Vec<String>>,
    /// Which group of the tree is seen at the mount point.
    root: String,
    mount: PathBuf,
}

/// The trees, and this process's group in each.
#[derive(Clone, Debug)]
pub struct Hierarchies {
    trees: Vec<Tree>,
    /// Lines of /proc/self/cgroup: controllers (empty for version 2) and group.
    own: Vec<(Vec<String>, String)>,
    /// How folders come and go.
    pub folders: Folders,
}

/// The kernel fills a new group's folder with files, and lets it be removed with them; a tree that a test made up cannot.
#[derive(Clone, Copy, Debug)]
pub struct Folders {
    pub make: fn(&Path) -> io::Result<()>,
    /// Removes a group that has no processes.
    pub unmake: fn(&Path) -> io::Result<()>,
}

impl Folders {
    /// The real control groups of this machine.
    pub const KERNEL: Self = Self { make: make_folder, unmake: remove_folder };
}

fn make_folder(path: &Path) -> io::Result<()> {
    fs::create_dir(path)
}

fn remove_folder(path: &Path) -> io::Result<()> {
    fs::remove_dir(path)
}

impl Hierarchies {
    /// This machine's hierarchies. None if the kernel does not list them.
    pub fn of_this_process() -> Self {
        Self::of_process("self")
    }

    /// This machine's trees, with the groups of the process that /proc knows by this name as one's own.
    pub fn of_process(process: &str) -> Self {
        let read = |path: &str| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let own = read(&format!("/proc/{process}/cgroup")).unwrap_or_default();
        let mounts = read("/proc/self/mountinfo").unwrap_or_default();
        Self::parse(&own, &mounts, Folders::KERNEL)
    }

    /// From the texts of /proc/self/cgroup and /proc/self/mountinfo.
    pub fn parse(own: &str, mounts: &str, folders: Folders) -> Self {
        let own = own.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let controllers = fields.next()?.split(',').filter(|name| !name.is_empty());
            Some((controllers.map(str::to_owned).collect(), fields.next()?.to_owned()))
        });
        Self { trees: mounts.lines().filter_map(tree).collect(), own: own.collect(), folders }
    }

    /// This process's group in the version 1 tree of `controller`; `None` if there is no such tree.
    pub fn v1(&self, controller: &str) -> Option<Result<PathBuf, String>> {
        let has = |names: &[String]| names.iter().any(|name| name == controller);
        let trees: Vec<_> =
            self.trees.iter().filter(|tree| tree.controllers.as_deref().is_some_and(has)).collect();
        if trees.is_empty() {
            return None;
        }
        let group = self.own.iter().find(|(names, _)| has(names)).map(|(_, group)| group.as_str());
        Some(own_folder(&trees, group))
    }

    /// This process's group in the version 2 tree.
    pub fn v2(&self) -> Option<Result<PathBuf, String>> {
        let trees: Vec<_> = self.trees.iter().filter(|tree| tree.controllers.is_none()).collect();
        if trees.is_empty() {
            return None;
        }
        let group = self.own.iter().find(|(names, _)| names.is_empty()).map(|(_, group)| group.as_str());
        Some(own_folder(&trees, group))
    }

    /// Whether this is the first group of a tree, above all others.
    pub fn is_root(&self, group: &Path) -> bool {
        self.trees.iter().any(|tree| tree.root == "/" && tree.mount == group)
    }

    /// All groups called `name`, wherever in the trees of `controllers` and of version 2 they are: a group that was left
    /// behind is below the group of the process that made it, which need not be ours.
    pub fn search(&self, name: &str, controllers: &[&str]) -> Found {
        let mut found = Found::default();
        for tree in &self.trees {
            let (wanted, list) = match &tree.controllers {
                None => (true, &mut found.v2),
                Some(names) => (names.iter().any(|name| controllers.contains(&name.as_str())), &mut found.v1),
            };
            if wanted {
                search_below(&tree.mount, name, list);
            }
        }
        found
    }
}

/// Groups that a search came upon.
#[derive(Debug, Default)]
pub struct Found {
    /// In version 1 trees.
    pub v1: Vec<PathBuf>,
    /// In the version 2 tree.
    pub v2: Vec<PathBuf>,
}

fn search_below(mount: &Path, name: &str, found: &mut Vec<PathBuf>) {
    let mut waiting = vec![mount.to_owned()];
    for _ in 0..SEARCH_LIMIT {
        let Some(folder) = waiting.pop() else { return };
        // A folder that went away meanwhile, or is not ours to read, holds nothing of ours.
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            let list = if entry.file_name() == name { &mut *found } else { &mut waiting };
            if !list.contains(&entry.path()) {
                list.push(entry.path());
            }
        }
    }
}

/// The folder in which one of `trees` shows `group`.
fn own_folder(trees: &[&Tree], group: Option<&str>) -> Result<PathBuf, String> {
    let group = group.ok_or("the kernel does not report the group of this process")?;
    // A group above the namespace's own is shown as `/..`, and cannot be reached.
    let shown = trees.iter().find_map(|tree| {
        let below = Path::new(group).strip_prefix(&tree.root).ok()?;
        (!group.contains("..")).then(|| tree.mount.join(below))
    });
    shown.ok_or_else(|| "this process's group is outside of what is mounted".to_owned())
}

/// A line of mountinfo, if it is about a tree of control groups.
fn tree(line: &str) -> Option<Tree> {
    let (place, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let system = kind.next()?;
    let options = kind.nth(1)?;
    let mut place = place.split(' ').skip(3);
    let (root, mount) = (unescape(place.next()?), unescape(place.next()?));
    let controllers = match system {
        "cgroup" => Some(options.split(',').map(str::to_owned).collect()),
        "cgroup2" => None,
        _ => return None,
    };
    Some(Tree { controllers, root: root.to_string_lossy().into_owned(), mount })
}

/// mountinfo writes spaces and the like as a backslash and three octal digits.
fn unescape(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.filter(|_| *first == b'\\').and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}
