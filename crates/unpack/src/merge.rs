//! One tree of all layers of an image, each applied to those below it.

use std::collections::HashMap;

use crate::name::printable;
use crate::tree::{Entry, Inode, LayerTree, Metadata};

/// The most names of an image, those that upper layers hide among them.
const MOST_NAMES: usize = 8_000_000;

/// Why layers have no common tree.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    #[error("The image's layers have more than {MOST_NAMES} names")]
    TooManyNames,
    #[error("In layer {}, \"{name}\" is a hard link to \"{target}\", which is no file of a lower layer", layer + 1)]
    LinkToMissing { layer: usize, name: String, target: String },
    #[error("The tree of layer {} is damaged", .0 + 1)]
    Damaged(usize),
}

/// A file of the image that is not a directory.
#[derive(Clone, Copy)]
pub(crate) struct Leaf<'a> {
    pub(crate) layer: usize,
    pub(crate) inode: &'a Inode,
}

pub(crate) enum Object<'a> {
    /// `children` is a range of [`Image::names`].
    Directory {
        metadata: Option<&'a Metadata>,
        parent: usize,
        children: std::ops::Range<usize>,
    },
    Leaf {
        leaf: Leaf<'a>,
        links: u32,
    },
}

/// The inodes of an image, the root first, and parents before their children.
#[derive(Default)]
pub(crate) struct Image<'a> {
    pub(crate) objects: Vec<Object<'a>>,
    /// Names and which object they are of; those of one directory are together, and sorted.
    pub(crate) names: Vec<(&'a [u8], usize)>,
}

#[derive(Clone, Copy)]
enum Node<'a> {
    Directory(Option<&'a Metadata>),
    /// Its number among the leaves.
    Leaf(u32),
}

#[derive(Default)]
struct Merge<'a> {
    /// What was replaced is not reachable from the root any more.
    nodes: Vec<Node<'a>>,
    names: HashMap<(u32, &'a [u8]), u32>,
    leaves: Vec<Leaf<'a>>,
}

/// Applies the layers in order, the lowest first.
pub(crate) fn merge<'a>(layers: impl IntoIterator<Item = &'a LayerTree>) -> Result<Image<'a>, MergeError> {
    let mut merge = Merge { nodes: vec![Node::Directory(None)], ..Merge::default() };
    for (layer, tree) in layers.into_iter().enumerate() {
        merge.apply(layer, tree)?;
    }
    Ok(merge.finish())
}

impl<'a> Merge<'a> {
    fn apply(&mut self, layer: usize, tree: &'a LayerTree) -> Result<(), MergeError> {
        let links = self.find_links(layer, tree)?;
        // The merged number of each inode of the layer that has a name, and of each of its directories.
        let mut leaves: Vec<Option<u32>> = vec![None; tree.inodes.len()];
        let mut directories: Vec<u32> = vec![0; tree.nodes.len()];
        let mut links = links.into_iter();
        for (index, node) in tree.nodes.iter().enumerate() {
            let parent = directories.get(node.parent as usize).copied().ok_or(MergeError::Damaged(layer))?;
            let name: &[u8] = &node.name;
            match &node.entry {
                Entry::Directory { metadata, opaque } => {
                    let at = if index == 0 { Some(0) } else { self.names.get(&(parent, name)).copied() };
                    directories[index] = self.directory(at, metadata.as_deref(), *opaque)?;
                    if index > 0 {
                        self.names.insert((parent, name), directories[index]);
                    } else if *opaque {
                        self.names.clear();
                    }
                }
                Entry::Whiteout => {
                    self.names.remove(&(parent, name));
                }
                Entry::Inode(number) => {
                    let inode = tree.inode(*number).ok_or(MergeError::Damaged(layer))?;
                    let known = leaves.get_mut(*number as usize).ok_or(MergeError::Damaged(layer))?;
                    let leaf = match *known {
                        Some(leaf) => leaf,
                        None => *known.insert(self.leaf(Leaf { layer, inode })?),
                    };
                    self.set(parent, name, Node::Leaf(leaf))?;
                }
                Entry::Link(_) => {
                    let leaf = links.next().ok_or(MergeError::Damaged(layer))?;
                    self.set(parent, name, Node::Leaf(leaf))?;
                }
            }
        }
        Ok(())
    }

    /// What the layer's links to lower layers lead to, before the layer changes anything.
    fn find_links(&self, layer: usize, tree: &LayerTree) -> Result<Vec<u32>, MergeError> {
        let mut found = Vec::new();
        for node in &tree.nodes {
            let Entry::Link(target) = &node.entry else { continue };
            let missing = || MergeError::LinkToMissing {
                layer,
                name: printable(&node.name),
                target: printable(target),
            };
            found.push(self.find(target).ok_or_else(missing)?);
        }
        Ok(found)
    }

    /// The leaf at a path. Symbolic links on the way are not followed.
    fn find(&self, path: &[u8]) -> Option<u32> {
        let mut at = 0;
        for name in path.split(|byte| *byte == b'/') {
            at = *self.names.get(&(at, name))?;
        }
        match self.node(at)? {
            Node::Leaf(leaf) => Some(leaf),
            Node::Directory(_) => None,
        }
    }

    /// The directory that takes the place of what is at `at`, if anything is.
    fn directory(
        &mut self,
        at: Option<u32>,
        metadata: Option<&'a Metadata>,
        opaque: bool,
    ) -> Result<u32, MergeError> {
        let below = at.and_then(|at| Some((at, self.node(at)?)));
        let inherited = match below {
            Some((at, Node::Directory(inherited))) => {
                // The root keeps its number: its names are removed instead.
                if !opaque || at == 0 {
                    self.nodes[at as usize] = Node::Directory(metadata.or(inherited));
                    return Ok(at);
                }
                inherited
            }
            _ => None,
        };
        self.push(Node::Directory(metadata.or(inherited)))
    }

    fn set(&mut self, parent: u32, name: &'a [u8], node: Node<'a>) -> Result<(), MergeError> {
        let index = self.push(node)?;
        self.names.insert((parent, name), index);
        Ok(())
    }

    fn push(&mut self, node: Node<'a>) -> Result<u32, MergeError> {
        if self.nodes.len() >= MOST_NAMES {
            return Err(MergeError::TooManyNames);
        }
        let index = u32::try_from(self.nodes.len()).map_err(|_| MergeError::TooManyNames)?;
        self.nodes.push(node);
        Ok(index)
    }

    fn leaf(&mut self, leaf: Leaf<'a>) -> Result<u32, MergeError> {
        let index = u32::try_from(self.leaves.len()).map_err(|_| MergeError::TooManyNames)?;
        self.leaves.push(leaf);
        Ok(index)
    }

    fn node(&self, index: u32) -> Option<Node<'a>> {
        self.nodes.get(index as usize).copied()
    }

    /// What is reachable from the root.
    fn finish(mut self) -> Image<'a> {
        let mut names: Vec<_> = std::mem::take(&mut self.names).into_iter().collect();
        names.sort_unstable();
        let root = match self.nodes.first() {
            Some(Node::Directory(metadata)) => *metadata,
            _ => None,
        };
        let root = Object::Directory { metadata: root, parent: 0, children: 0..0 };
        let mut listing = Listing {
            seen: vec![None; self.leaves.len()],
            nodes: vec![0],
            image: Image { objects: vec![root], names: Vec::new() },
            merge: self,
        };
        let mut at = 0;
        while at < listing.image.objects.len() {
            listing.list(at, &names);
            at += 1;
        }
        listing.image
    }
}

/// An image while its directories are listed, from the root on.
struct Listing<'a> {
    merge: Merge<'a>,
    image: Image<'a>,
    /// The node of each object.
    nodes: Vec<u32>,
    /// The objects of leaves that already have a name.
    seen: Vec<Option<usize>>,
}

impl<'a> Listing<'a> {
    /// Adds what is in the directory at `at`. All names are sorted by their parents.
    fn list(&mut self, at: usize, all: &[((u32, &'a [u8]), u32)]) {
        let Object::Directory { .. } = self.image.objects[at] else { return };
        let first = self.image.names.len();
        let directory = self.nodes[at];
        let start = all.partition_point(|((parent, _), _)| *parent < directory);
        for ((_, name), node) in all[start..].iter().take_while(|((parent, _), _)| *parent == directory) {
            let object = match self.merge.nodes[*node as usize] {
                Node::Directory(metadata) => {
                    self.add(*node, Object::Directory { metadata, parent: at, children: 0..0 })
                }
                Node::Leaf(leaf) => self.name_leaf(*node, leaf as usize),
            };
            self.image.names.push((name, object));
        }
        let end = self.image.names.len();
        if let Object::Directory { children, .. } = &mut self.image.objects[at] {
            *children = first..end;
        }
    }

    /// The object of a leaf, which has one more name.
    fn name_leaf(&mut self, node: u32, index: usize) -> usize {
        let object = match self.seen[index] {
            Some(object) => object,
            None => self.add(node, Object::Leaf { leaf: self.merge.leaves[index], links: 0 }),
        };
        self.seen[index] = Some(object);
        if let Object::Leaf { links, .. } = &mut self.image.objects[object] {
            *links += 1;
        }
        object
    }

    fn add(&mut self, node: u32, object: Object<'a>) -> usize {
        self.image.objects.push(object);
        self.nodes.push(node);
        self.image.objects.len() - 1
    }
}
