//! Tests of the whole way, from an archive's bytes to the file system, and what they share.

pub(crate) mod archive;
mod attacks;
mod formats;
mod layers;
mod mount;
mod random;
pub(crate) mod reader;

use std::collections::BTreeMap;
use std::io::Cursor;

use crate::{
    Compression, IndexError, IndexInfo, IndexLayer, Layer, LayerError, LayerTree, Layout, Limits, Options,
    Refusal, unpack_layer, write_index,
};
use archive::Archive;
use reader::Found;

/// How the tests unpack, unless they say otherwise.
pub(crate) fn options(layout: Layout) -> Options {
    Options { compression: Compression::None, layout, limits: Limits::default() }
}

/// A layer and its file. Its tree has passed through its encoding.
pub(crate) struct Unpacked {
    pub(crate) layer: Layer,
    pub(crate) file: Vec<u8>,
}

pub(crate) fn unpack_bytes(bytes: &[u8], options: &Options) -> Result<Unpacked, LayerError> {
    let mut file = Vec::new();
    let mut layer = unpack_layer(bytes, &mut file, options)?;
    assert_eq!(layer.size, file.len() as u64);
    let decoded =
        LayerTree::decode(&layer.tree.encode().expect("it is encoded")).expect("what was made is valid");
    assert_eq!(decoded, layer.tree);
    layer.tree = decoded;
    Ok(Unpacked { layer, file })
}

pub(crate) fn unpack(archive: &Archive, layout: Layout) -> Result<Unpacked, LayerError> {
    unpack_bytes(&archive.bytes(), &options(layout))
}

/// Why the archive is refused, and at which entry.
pub(crate) fn refusal(archive: &Archive) -> (String, Refusal) {
    match unpack(archive, Layout::Tar) {
        Err(LayerError::Entry { entry, refusal }) => (entry, refusal),
        Err(LayerError::Layer(refusal)) => (String::new(), refusal),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the archive was accepted"),
    }
}

/// The disk of an image.
pub(crate) fn disk_of(layers: &[Unpacked]) -> Result<(IndexInfo, Vec<u8>), IndexError> {
    let given: Vec<_> = layers
        .iter()
        .map(|unpacked| IndexLayer { tree: &unpacked.layer.tree, size: unpacked.layer.size })
        .collect();
    let mut disk = Cursor::new(Vec::new());
    let info = write_index(&given, &mut disk)?;
    let mut disk = disk.into_inner();
    assert_eq!(disk.len() as u64, info.size);
    for (unpacked, offset) in layers.iter().zip(&info.layers) {
        disk.resize(usize::try_from(*offset).unwrap(), 0);
        disk.extend(&unpacked.file);
    }
    disk.resize(usize::try_from(info.disk).unwrap(), 0);
    Ok((info, disk))
}

/// What an image of these archives has, by path. Both layouts give the same.
pub(crate) fn image(archives: &[&Archive]) -> BTreeMap<String, Found> {
    let of = |layout| {
        let layers: Vec<_> =
            archives.iter().map(|archive| unpack(archive, layout).expect("it is valid")).collect();
        let (_, disk) = disk_of(&layers).expect("an index is written");
        reader::read(&disk)
    };
    let found = of(Layout::Tar);
    assert_eq!(found, of(Layout::Aligned));
    found
}
