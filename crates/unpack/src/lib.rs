//! Turns the layers of an OCI image into a root file system, without creating any of their files on the host.
//!
//! A layer's archive is hostile: its names, links, sizes and maps are an attacker's. So nothing is ever extracted.
//! [`unpack_layer`] decompresses a layer into one plain file and records what the archive describes as a [`LayerTree`].
//! [`write_index`] merges the trees of an image's layers and writes an EROFS file system that has metadata only: the
//! blocks of its regular files are those of the layers' files. A disk that shows the index, then each layer at the
//! offset that [`IndexInfo`] gives, is the image's root file system, and the guest's kernel reads it.
//!
//! On a host, layers are read in a process of its own ([`process`]).
//!
//! ```text
//! | index | layer 0 | layer 1 | ... |        each begins at a multiple of 4096 bytes
//! ```

mod erofs;
mod layer;
mod limits;
mod merge;
mod name;
pub mod process;
mod tar;
#[cfg(test)]
mod tests;
mod tree;

pub use erofs::{IndexError, IndexInfo, IndexLayer, write_index};
pub use layer::{Compression, Layer, LayerError, Options, Refusal, unpack_layer};
pub use limits::Limits;
pub use tree::{LayerTree, Layout, TreeError};
