//! From a layer as a registry stores it to its tree.

mod builder;
mod error;
mod source;

use std::io::{Read, Write};

use crate::limits::Limits;
use crate::name::printable;
use crate::tar::Archive;
use crate::tree::{LayerTree, Layout};

pub use error::{LayerError, Refusal};
pub(crate) use source::{Finished, Source};

/// How a layer is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// Which one a layer that begins with `bytes` has. Media types are often wrong, so every runtime looks.
    pub fn detect(bytes: &[u8]) -> Self {
        // A skippable frame of zstd has any of 16 numbers.
        match bytes {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::None,
        }
    }
}

/// How a layer is unpacked.
#[derive(Clone, Debug)]
pub struct Options {
    pub compression: Compression,
    pub layout: Layout,
    pub limits: Limits,
}

/// A layer that was unpacked.
#[derive(Clone, Debug)]
pub struct Layer {
    pub tree: LayerTree,
    /// SHA-256 of the decompressed archive, to be compared with the image's configuration.
    pub diff_id: [u8; 32],
    /// Bytes that were written to the layer's file.
    pub size: u64,
}

/// Reads a layer to its end and writes the file that the image's blocks are in.
///
/// Nothing that was written may be used before the digest of the input and the diff-id were verified.
pub fn unpack_layer(input: impl Read, output: impl Write, options: &Options) -> Result<Layer, LayerError> {
    let source = Source::new(input, output, options)?;
    let mut archive = Archive::new(source, &options.limits);
    let mut builder = builder::Builder::new(&options.limits);
    match read_entries(&mut archive, &mut builder) {
        Ok(()) => {}
        Err(refusal) => return Err(LayerError::new(printable(archive.current()), refusal)),
    }
    let (diff_id, size) = archive.finish().map_err(|refusal| LayerError::new(String::new(), refusal))?;
    Ok(Layer { tree: builder.finish(options.layout), diff_id, size })
}

fn read_entries<W: Write>(
    archive: &mut Archive<'_, W>,
    builder: &mut builder::Builder<'_>,
) -> Result<(), Refusal> {
    while let Some(entry) = archive.next()? {
        builder.count(archive.headers())?;
        builder.add(entry)?;
    }
    Ok(())
}
