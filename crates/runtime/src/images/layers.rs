//! Layers that are unpacked, and the index that makes them one root.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use bathy_registry::{Digest, Layer, Pulled};
use bathy_unpack::{IndexLayer, LayerTree, write_index};

use super::unpacker::{UnpackError, Unpacked, Unpacker};
use super::{Images, ImagesError, Unpacking, sealed};
use crate::assets::ImagePart;

pub const LAYERS: &str = "layers";
pub const TREES: &str = "trees";
pub const ROOTS: &str = "roots";
/// Changes with the format of trees and indexes, so that older ones are made again.
const FORMAT: &str = "1";
/// Layers' files and the index are padded to this on the disk.
const ALIGNMENT: u64 = 4096;

/// Bytes of all trees of an image, encoded: all of them are in memory while its index is made.
const MOST_TREES: u64 = 256 << 20;
/// Bytes of all layers of an image, unpacked.
const MOST_CONTENT: u64 = 128 << 30;

/// What is left for the further layers of an image. A layer's limits are its own, and an image may have many.
struct Budget {
    trees: u64,
    content: u64,
}

impl Budget {
    fn of_an_image() -> Self {
        Self { trees: MOST_TREES, content: MOST_CONTENT }
    }

    /// Takes one layer's share. If there is not so much left, the limit that is exceeded.
    fn take(&mut self, tree: u64, content: u64) -> Result<(), (&'static str, u64)> {
        self.trees = self.trees.checked_sub(tree).ok_or(("descriptions of files", MOST_TREES))?;
        self.content = self.content.checked_sub(content).ok_or(("content", MOST_CONTENT))?;
        Ok(())
    }
}

/// A layer's plain archive, its tree, and the tree's size as bytes.
type StoredLayer = (File, LayerTree, u64);

/// Where a layer's plain archive is.
fn layer_file(layer: &Layer) -> PathBuf {
    let diff_id = &layer.diff_id;
    Path::new(LAYERS).join(format!("{}-{}", diff_id.algorithm().name(), diff_id.hex()))
}

/// Where a layer's tree is. It was made of this blob by a process that the blob may have taken over, so no other blob gets it.
fn tree_file(layer: &Layer) -> PathBuf {
    Path::new(TREES).join(Digest::of(name_of(layer).as_bytes()).hex())
}

/// Where the index of an image's root is.
fn root_file(layers: &[Layer]) -> PathBuf {
    let names: Vec<String> = layers.iter().map(name_of).collect();
    Path::new(ROOTS).join(Digest::of(names.join("\n").as_bytes()).hex())
}

fn name_of(layer: &Layer) -> String {
    format!("{FORMAT} {} {}", layer.blob.digest, layer.diff_id)
}

/// All files of an image that is unpacked.
pub fn files_of(pulled: &Pulled) -> impl Iterator<Item = PathBuf> {
    let layers = pulled.layers.iter().flat_map(|layer| [layer_file(layer), tree_file(layer)]);
    layers.chain([root_file(&pulled.layers)])
}

/// Puts the index and the layers' files one after the other.
fn placed(files: impl IntoIterator<Item = File>) -> io::Result<Vec<ImagePart>> {
    let mut parts = Vec::new();
    let mut offset: u64 = 0;
    for file in files {
        let size = file.metadata()?.len();
        parts.push(ImagePart { offset, file });
        let end = offset.checked_add(size).and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
        offset = end.ok_or(io::ErrorKind::FileTooLarge)?;
    }
    Ok(parts)
}

impl Images {
    /// The files of an image's root, if all of them are there and certainly what they were.
    pub(super) fn unpacked_root(&self, pulled: &Pulled) -> Result<Option<Vec<ImagePart>>, ImagesError> {
        let mut files = Vec::new();
        for file in [root_file(&pulled.layers)].into_iter().chain(pulled.layers.iter().map(layer_file)) {
            let path = self.store.root().join(file);
            match sealed::open(&path).map_err(|error| self.failed(&path, error))? {
                sealed::Found::Whole(file) => files.push(file),
                sealed::Found::Changed | sealed::Found::Absent => return Ok(None),
            }
        }
        placed(files).map(Some).map_err(|error| self.failed(self.store.root(), error))
    }

    /// Unpacks whatever is not there.
    pub(super) fn unpack(
        &self,
        pulled: &Pulled,
        lock: &Unpacking,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Vec<ImagePart>, ImagesError> {
        let (mut files, mut trees) = (Vec::new(), Vec::new());
        let mut budget = Budget::of_an_image();
        let count = pulled.layers.len();
        for (layer, number) in pulled.layers.iter().zip(1..) {
            let unpacked = self.stored_layer(layer)?;
            let (file, tree, encoded) = match unpacked {
                Some(unpacked) => unpacked,
                None => {
                    progress(&format!("unpacking layer {number} of {count} of {}", pulled.record.reference));
                    self.unpack_layer(layer, lock).map_err(|error| match error {
                        LayerFailure::Store(error) => error,
                        LayerFailure::Unpack(source) => {
                            let image = pulled.record.reference.clone();
                            ImagesError::Layer { image, number, source: Box::new(source) }
                        }
                    })?
                }
            };
            let size = file.metadata().map_err(|error| self.failed(self.store.root(), error))?.len();
            budget.take(encoded, size).map_err(|(what, limit)| ImagesError::TooLarge {
                image: Box::new(pulled.record.reference.clone()),
                what,
                limit,
            })?;
            files.push(file);
            trees.push(tree);
        }
        let index = self.index(pulled, &files, &trees)?;
        let all = [index].into_iter().chain(files);
        placed(all).map_err(|error| self.failed(self.store.root(), error))
    }

    /// A layer's file and tree with its encoded size, if both are there.
    fn stored_layer(&self, layer: &Layer) -> Result<Option<StoredLayer>, ImagesError> {
        let open = |file: PathBuf| {
            let path = self.store.root().join(file);
            sealed::open_or_remove(&path).map_err(|error| self.failed(&path, error))
        };
        let (file, tree) = (open(layer_file(layer))?, open(tree_file(layer))?);
        let (Some(file), Some(mut tree)) = (file, tree) else { return Ok(None) };
        let mut bytes = Vec::new();
        let path = self.store.root().join(tree_file(layer));
        tree.read_to_end(&mut bytes).map_err(|error| self.failed(&path, error))?;
        let size = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        Ok(LayerTree::decode(&bytes).ok().map(|tree| (file, tree, size)))
    }

    fn unpack_layer(&self, layer: &Layer, _lock: &Unpacking) -> Result<StoredLayer, LayerFailure> {
        let blob = self.store.open_blob(&layer.blob.digest).map_err(ImagesError::from)?;
        let unpacker = Unpacker::find().map_err(|error| ImagesError::Program(Box::new(error)))?;
        let path = self.store.root().join(layer_file(layer));
        let unpack = |output: &mut dyn Write| -> Result<Unpacked, UnpackError> {
            let unpacked = unpacker.unpack(&blob, output, layer.diff_id.algorithm())?;
            if unpacked.digest == layer.diff_id {
                Ok(unpacked)
            } else {
                Err(UnpackError::Content { expected: layer.diff_id.clone(), found: unpacked.digest })
            }
        };
        let present = sealed::open_or_remove(&path).map_err(|error| self.failed(&path, error))?;
        let made = match present {
            // Unpacked from another blob, whose tree does not count for this one.
            Some(file) => unpack(&mut io::sink()).map(|unpacked| (file, unpacked)),
            None => sealed::create(&path, |file| {
                let unpacked = unpack(file)?;
                Ok((unpacked.digest.clone(), unpacked))
            }),
        };
        let (file, unpacked) = made.map_err(|error| self.unpack_failure(layer, error))?;
        let path = self.store.root().join(tree_file(layer));
        let write = |file: &mut File| -> io::Result<(Digest, ())> {
            file.write_all(&unpacked.encoded)?;
            Ok((Digest::of(&unpacked.encoded), ()))
        };
        sealed::create(&path, write).map_err(|error| self.failed(&path, error))?;
        let size = u64::try_from(unpacked.encoded.len()).unwrap_or(u64::MAX);
        Ok((file, unpacked.tree, size))
    }

    /// A blob that cannot be unpacked is removed: the disk may have changed it, and then the next pull fetches it again.
    fn unpack_failure(&self, layer: &Layer, error: UnpackError) -> LayerFailure {
        match error {
            UnpackError::Write(error) => self.failed(self.store.root(), error).into(),
            error => {
                if error.is_of_the_layer() {
                    // The first error is the one to report.
                    let _ = self.store.discard(&layer.blob.digest);
                }
                LayerFailure::Unpack(error)
            }
        }
    }

    /// The index of an image whose layers are unpacked.
    fn index(&self, pulled: &Pulled, files: &[File], trees: &[LayerTree]) -> Result<File, ImagesError> {
        let path = self.store.root().join(root_file(&pulled.layers));
        let failed = |error| self.failed(&path, error);
        if let Some(file) = sealed::open_or_remove(&path).map_err(failed)? {
            return Ok(file);
        }
        let mut layers = Vec::new();
        for (file, tree) in files.iter().zip(trees) {
            layers.push(IndexLayer { tree, size: file.metadata().map_err(failed)?.len() });
        }
        let write = |file: &mut File| -> Result<(Digest, ()), IndexFailure> {
            write_index(&layers, &mut *file)?;
            Ok((sealed::digest_of_all(file)?, ()))
        };
        let made = sealed::create(&path, write).map_err(|error| match error {
            IndexFailure::Write(error) | IndexFailure::Index(bathy_unpack::IndexError::Write(error)) => {
                failed(error)
            }
            IndexFailure::Index(source) => {
                let image = pulled.record.reference.clone();
                ImagesError::Index { image, source: Box::new(source) }
            }
        });
        made.map(|(file, ())| file)
    }
}

/// Why a layer is not unpacked.
enum LayerFailure {
    Store(ImagesError),
    Unpack(UnpackError),
}

impl From<ImagesError> for LayerFailure {
    fn from(error: ImagesError) -> Self {
        Self::Store(error)
    }
}

/// Why there is no index.
enum IndexFailure {
    Write(io::Error),
    Index(bathy_unpack::IndexError),
}

impl From<io::Error> for IndexFailure {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl From<bathy_unpack::IndexError> for IndexFailure {
    fn from(error: bathy_unpack::IndexError) -> Self {
        Self::Index(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c4_the_layers_of_an_image_share_its_limits() {
        let mut budget = Budget::of_an_image();
        let (tree, content) = (MOST_TREES / 2, MOST_CONTENT / 4);
        assert_eq!(budget.take(tree, content), Ok(()));
        assert_eq!(budget.take(tree, content), Ok(()), "exactly as much as there is");
        assert_eq!(budget.take(1, content), Err(("descriptions of files", MOST_TREES)));
        assert_eq!(Budget::of_an_image().take(0, MOST_CONTENT), Ok(()));
        assert_eq!(Budget::of_an_image().take(0, MOST_CONTENT + 1), Err(("content", MOST_CONTENT)));
    }
}
