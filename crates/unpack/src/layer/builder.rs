//! Makes a tree of an archive's entries, as if each was unpacked over those before it.
//!
//! Symbolic links are never followed. What is below a name that this layer made a file or a symbolic link is refused;
//! what is below one that a lower layer made so replaces it by a directory, as overlayfs does with unpacked layers.
//! A whiteout hides what lower layers have, never what its own layer has, wherever in the archive it is. It hides names:
//! a hard link to a file that it hides gives that file another name, whichever of the two comes first. By OCI's text the
//! order means nothing; containerd, which unpacks in order, accepts such a link before the whiteout.

use std::collections::HashMap;

use crate::layer::Refusal;
use crate::limits::Limits;
use crate::name::{components, printable};
use crate::tar::{self, EntryKind};
use crate::tree::{Entry, Inode, Kind, LayerTree, Layout, Metadata, Node};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// How the names of AUFS's own files begin. They mean nothing elsewhere.
const AUFS: &[u8] = b".wh..wh.";

/// Memory that a name takes besides its bytes, about.
const NODE_COST: u64 = 256;

pub(super) struct Builder<'a> {
    limits: &'a Limits,
    entries: Vec<Entry>,
    /// The number of an entry by the number of its parent, in big-endian order, and its name: sorted by these bytes,
    /// entries are sorted by parent and name. What is not reachable from the root by it was replaced.
    names: HashMap<Box<[u8]>, u32>,
    inodes: Vec<Inode>,
    /// Directories that the archive does not name, and headers that it has.
    implied: u64,
    headers: u64,
    bytes: u64,
    /// Block map entries of the sparse files.
    chunks: u64,
}

/// What a path leads to.
enum Found {
    Entry(u32),
    /// There is no such name in this layer, or a whiteout. Lower layers may have it.
    Below,
    Missing,
}

fn key(parent: u32, name: &[u8]) -> Vec<u8> {
    [&parent.to_be_bytes(), name].concat()
}

impl<'a> Builder<'a> {
    pub(super) fn new(limits: &'a Limits) -> Self {
        let root = Entry::Directory { metadata: None, opaque: false };
        Self {
            limits,
            entries: vec![root],
            names: HashMap::new(),
            inodes: Vec::new(),
            implied: 0,
            headers: 0,
            bytes: 0,
            chunks: 0,
        }
    }

    /// Counts the archive's headers, also those that make no entry.
    pub(super) fn count(&mut self, headers: u64) -> Result<(), Refusal> {
        self.headers = headers;
        if self.headers + self.implied > self.limits.entries {
            return Err(Refusal::TooManyEntries(self.limits.entries));
        }
        Ok(())
    }

    pub(super) fn add(&mut self, entry: tar::Entry) -> Result<(), Refusal> {
        let path = components(&entry.path, self.limits)?;
        let Some((name, parents)) = path.split_last() else {
            let EntryKind::Directory = entry.kind else { return Err(Refusal::Root) };
            self.charge_metadata(&entry.metadata)?;
            return self.set_directory(0, entry.metadata);
        };
        if path.iter().any(|name| name.starts_with(AUFS) && *name != OPAQUE) {
            return Ok(());
        }
        if parents.iter().any(|name| name.starts_with(WHITEOUT)) {
            return Err(Refusal::BelowWhiteout);
        }
        if name.starts_with(WHITEOUT) {
            return self.add_whiteout(parents, name);
        }
        self.add_named(parents, name, entry.metadata, entry.kind)
    }

    fn add_whiteout(&mut self, parents: &[&[u8]], name: &[u8]) -> Result<(), Refusal> {
        let hidden = name.strip_prefix(WHITEOUT).unwrap_or_default();
        if matches!(hidden, b"" | b"." | b"..") {
            return Err(Refusal::WhiteoutName);
        }
        let parent = match self.parent(parents) {
            // Some programs add whiteouts for what was in a directory that the layer replaces by a file. The file hides
            // all of it.
            Err(Refusal::BelowNonDirectory(_)) => return Ok(()),
            parent => parent?,
        };
        if name == OPAQUE { self.set_opaque(parent) } else { self.hide(parent, hidden) }
    }

    fn add_named(
        &mut self,
        parents: &[&[u8]],
        name: &[u8],
        metadata: Metadata,
        kind: EntryKind,
    ) -> Result<(), Refusal> {
        let kind = match kind {
            EntryKind::Directory => {
                let parent = self.parent(parents)?;
                self.charge_metadata(&metadata)?;
                return self.add_directory(parent, name, metadata);
            }
            EntryKind::Link(target) => {
                let entry = self.link(parents, name, &target)?;
                let parent = self.parent(parents)?;
                return self.replace(parent, name, entry);
            }
            EntryKind::Inode(kind) => kind,
        };
        let parent = self.parent(parents)?;
        self.charge_inode(&metadata, &kind)?;
        let number = number(self.inodes.len())?;
        self.inodes.push(Inode { metadata, kind });
        self.replace(parent, name, Entry::Inode(number))
    }

    /// The directory that `path` names, made if it is not there.
    fn parent(&mut self, path: &[&[u8]]) -> Result<u32, Refusal> {
        let mut at = 0;
        for name in path {
            let Some(found) = self.names.get(key(at, name).as_slice()).copied() else {
                self.implied += 1;
                self.count(self.headers)?;
                at = self.insert(at, name, Entry::Directory { metadata: None, opaque: false })?;
                continue;
            };
            match self.entry(found)? {
                Entry::Directory { .. } => {}
                entry @ Entry::Whiteout => {
                    *entry = Entry::Directory { metadata: Some(Box::new(Metadata::IMPLIED)), opaque: true };
                }
                Entry::Inode(_) | Entry::Link(_) => return Err(Refusal::BelowNonDirectory(printable(name))),
            }
            at = found;
        }
        Ok(at)
    }

    fn add_directory(&mut self, parent: u32, name: &[u8], metadata: Metadata) -> Result<(), Refusal> {
        let opaque = match self.names.get(key(parent, name).as_slice()).copied() {
            None => false,
            Some(found) => {
                if matches!(self.entry(found)?, Entry::Directory { .. }) {
                    return self.set_directory(found, metadata);
                }
                true
            }
        };
        self.replace(parent, name, Entry::Directory { metadata: Some(Box::new(metadata)), opaque })
    }

    fn set_directory(&mut self, index: u32, new: Metadata) -> Result<(), Refusal> {
        if let Entry::Directory { metadata, .. } = self.entry(index)? {
            *metadata = Some(Box::new(new));
        }
        Ok(())
    }

    fn set_opaque(&mut self, index: u32) -> Result<(), Refusal> {
        if let Entry::Directory { opaque, .. } = self.entry(index)? {
            *opaque = true;
        }
        Ok(())
    }

    /// Hides what lower layers have at a name.
    fn hide(&mut self, parent: u32, name: &[u8]) -> Result<(), Refusal> {
        match self.names.get(key(parent, name).as_slice()).copied() {
            Some(found) => {
                // A directory that has no entry would otherwise have what is hidden for its metadata.
                if let Entry::Directory { metadata, .. } = self.entry(found)? {
                    metadata.get_or_insert_with(|| Box::new(Metadata::IMPLIED));
                }
                self.set_opaque(found)
            }
            None => self.replace(parent, name, Entry::Whiteout),
        }
    }

    /// What a hard link becomes: another name of its target.
    fn link(&self, parents: &[&[u8]], name: &[u8], target: &[u8]) -> Result<Entry, Refusal> {
        let path =
            components(target, self.limits).map_err(|refusal| Refusal::LinkTarget(Box::new(refusal)))?;
        if path.split_last() == Some((&name, parents)) {
            return Err(Refusal::LinkToItself);
        }
        match self.find(&path) {
            Found::Entry(found) => match self.entries.get(found as usize) {
                Some(entry @ (Entry::Inode(_) | Entry::Link(_))) => Ok(entry.clone()),
                Some(Entry::Directory { .. }) => Err(Refusal::LinkToDirectory(printable(target))),
                Some(Entry::Whiteout) => Ok(Entry::Link(path.join(&b'/').into())),
                None => Err(Refusal::LinkToMissing(printable(target))),
            },
            Found::Below => Ok(Entry::Link(path.join(&b'/').into())),
            Found::Missing => Err(Refusal::LinkToMissing(printable(target))),
        }
    }

    fn find(&self, path: &[&[u8]]) -> Found {
        let mut at = 0;
        for name in path {
            match self.entries.get(at as usize) {
                Some(Entry::Directory { .. }) => {}
                Some(Entry::Whiteout) => return Found::Below,
                _ => return Found::Missing,
            }
            match self.names.get(key(at, name).as_slice()) {
                Some(found) => at = *found,
                None => return Found::Below,
            }
        }
        Found::Entry(at)
    }

    /// Gives a name to an entry. What had it before, and what is below that, has none from then on.
    fn replace(&mut self, parent: u32, name: &[u8], entry: Entry) -> Result<(), Refusal> {
        self.insert(parent, name, entry).map(|_| ())
    }

    fn insert(&mut self, parent: u32, name: &[u8], entry: Entry) -> Result<u32, Refusal> {
        let link = if let Entry::Link(target) = &entry { target.len() } else { 0 };
        self.charge(NODE_COST + (name.len() + link) as u64)?;
        let index = number(self.entries.len())?;
        self.entries.push(entry);
        self.names.insert(key(parent, name).into(), index);
        Ok(index)
    }

    fn entry(&mut self, index: u32) -> Result<&mut Entry, Refusal> {
        // Every number in `names` is that of an entry.
        self.entries.get_mut(index as usize).ok_or_else(|| Refusal::TooManyEntries(u64::from(index)))
    }

    fn charge_inode(&mut self, metadata: &Metadata, kind: &Kind) -> Result<(), Refusal> {
        self.charge_metadata(metadata)?;
        match kind {
            Kind::Symlink(target) => self.charge(target.len() as u64),
            Kind::Sparse { size, segments } => {
                // Aligned to the smallest blocks, so at least as many as there will be.
                self.chunks = self.chunks.saturating_add(Kind::chunks(*size, segments, 9).1);
                if self.chunks > self.limits.chunks {
                    return Err(Refusal::SparseTooFine);
                }
                self.charge(size_of_val(&**segments) as u64)
            }
            _ => Ok(()),
        }
    }

    fn charge_metadata(&mut self, metadata: &Metadata) -> Result<(), Refusal> {
        let size = |xattr: &crate::tree::Xattr| (xattr.name.len() + xattr.value.len()) as u64 + 64;
        self.charge(size_of::<Inode>() as u64 + metadata.xattrs.iter().map(size).sum::<u64>())
    }

    fn charge(&mut self, bytes: u64) -> Result<(), Refusal> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.limits.tree { Err(Refusal::TreeTooLarge(self.limits.tree)) } else { Ok(()) }
    }

    /// The tree of what is reachable from the root.
    pub(super) fn finish(self, layout: Layout) -> LayerTree {
        let mut names: Vec<(Box<[u8]>, u32)> = self.names.into_iter().collect();
        names.sort_unstable();
        let mut entries: Vec<Option<Entry>> = self.entries.into_iter().map(Some).collect();
        let mut inodes: Vec<Option<Inode>> = self.inodes.into_iter().map(Some).collect();
        // The new number of each inode that has a name.
        let mut numbers = vec![None; inodes.len()];
        let mut tree = LayerTree { layout, nodes: Vec::new(), inodes: Vec::new() };
        // The old numbers of the new nodes.
        let mut old = vec![0_u32];
        if let Some(entry) = entries.first_mut().and_then(Option::take) {
            tree.nodes.push(Node { parent: 0, name: Box::default(), entry });
        }
        let mut at = 0;
        while let Some(directory) = old.get(at).copied() {
            let prefix = directory.to_be_bytes();
            let first = names.partition_point(|(key, _)| key[..4] < prefix[..]);
            for (key, index) in names[first..].iter().take_while(|(key, _)| key[..4] == prefix) {
                let Some(mut entry) = entries.get_mut(*index as usize).and_then(Option::take) else {
                    continue;
                };
                if let Entry::Inode(inode) = &mut entry {
                    *inode = renumber(*inode, &mut inodes, &mut numbers, &mut tree.inodes);
                }
                old.push(*index);
                // At most as many as entries, whose numbers are 32 bits.
                let parent = u32::try_from(at).unwrap_or(u32::MAX);
                tree.nodes.push(Node { parent, name: key[4..].into(), entry });
            }
            at += 1;
        }
        tree
    }
}

/// Moves an inode to `kept` unless it is there already, and returns its number there.
fn renumber(
    inode: u32,
    inodes: &mut [Option<Inode>],
    numbers: &mut [Option<u32>],
    kept: &mut Vec<Inode>,
) -> u32 {
    let index = inode as usize;
    if let Some(number) = numbers[index] {
        return number;
    }
    let number = u32::try_from(kept.len()).unwrap_or(u32::MAX);
    kept.extend(inodes[index].take());
    numbers[index] = Some(number);
    number
}

fn number(length: usize) -> Result<u32, Refusal> {
    u32::try_from(length).map_err(|_| Refusal::TooManyEntries(u64::from(u32::MAX)))
}
