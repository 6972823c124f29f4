//! The host's side of copying files and folders into and out of a sandbox.
//!
//! * [`pack`]: packs a file or tree of the host into an archive.
//! * [`unpack`]: unpacks an archive from a guest. The guest is hostile: its names are never used as paths,
//!   only as single components in an open folder.
//! * [`direct`]: one file or one listing, to or from memory.
//! * [`run`]: runs any of them over the connection to a sandbox.
//!
//! The archive format is [`bathy_protocol::archive`].

mod links;
mod tally;

pub mod direct;
pub mod pack;
pub mod run;
pub mod unpack;

pub use direct::{DirEntry, DirectError, EntryKind, FileContent, Listing};
pub use pack::{PackError, Packer};
pub use run::{TransferError, TransferOptions, TransferSession, into_guest, out_of_guest};
pub use unpack::{UnpackError, UnpackLimits, Unpacker};

/// The most omitted entries that are listed.
pub(crate) const MAX_SKIPPED: usize = 100;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub files: u64,
    /// Folders, including the topmost one.
    pub folders: u64,
    pub links: u64,
    /// Bytes of file content.
    pub bytes: u64,
    /// In hexadecimal, BLAKE3 of a single file's content, or of a tree.
    ///
    /// A tree's digest depends on names, permission bits, link targets and contents; not on times, on the order in
    /// which a folder is listed, on the topmost folder's name, nor on what was left out. Each entry has a number, and
    /// the tree's digest is the number of its topmost folder, with an empty name. A number is BLAKE3, in the
    /// key-derivation mode with the context `bathysphere 2026 entry of a copied tree`, of these bytes:
    ///
    /// * one byte for the kind: `d` for a folder, `f` for a file, `l` for a link;
    /// * the name's length as a little-endian `u32`, and the name;
    /// * the permission bits (at most 0o777; 0 for a link) as a little-endian `u32`;
    /// * 32 bytes of plain BLAKE3: of a file's content, of a link's target, of a folder's entries' numbers in
    ///   ascending order.
    pub digest: String,
    /// What was left out and why, at most `MAX_SKIPPED` entries. Controlled by the guest: escape it before
    /// printing.
    pub skipped: Vec<(String, String)>,
    /// How many entries were left out in total.
    pub skipped_count: u64,
}

#[cfg(test)]
mod tests;
