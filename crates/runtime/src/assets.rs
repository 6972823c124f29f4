//! The parts of a sandbox: found or built, and opened.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use bathy_image::{
    Artifact, ImageCache, ImageCacheError, ImageConfig, InitramfsError, Recipe, RecipeError, initramfs,
};
use bathy_registry::content::InUse;
use bathy_registry::{Digest, ReferenceError};
use bathy_spec::image::Image;
use bathy_spec::paths::Paths;
use bathy_spec::{Chosen, SandboxSpec};
use thiserror::Error;

use crate::images::{self, Images, ImagesError, Pull};

/// The kernel's file name in its artifact.
pub(crate) const KERNEL_FILE: &str = "linux";
/// An image's file name in its artifact.
pub const IMAGE_FILE: &str = "root.erofs";
/// An image's configuration in its artifact.
pub const IMAGE_CONFIG: &str = "config.json";

#[derive(Debug, Error)]
pub enum AssetsError {
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Cache(#[from] ImageCacheError),
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    #[error(transparent)]
    Images(#[from] ImagesError),
    #[error("Cannot open {0}")]
    Open(PathBuf, #[source] io::Error),
    /// An image's configuration is invalid.
    #[error("The image's description {0} is damaged")]
    ImageConfig(PathBuf, #[source] io::Error),
    /// A program of ours is not beside `bathy`.
    #[error("Cannot find {0}, which belongs beside the bathy program; build it with `cargo build --release`")]
    Program(PathBuf, #[source] io::Error),
}

/// A file of a root image.
#[derive(Debug)]
pub struct ImagePart {
    /// Where on the image's disk it begins.
    pub offset: u64,
    pub file: File,
}

/// The parts of a sandbox, as open files.
#[derive(Debug)]
pub struct Assets {
    pub kernel: File,
    pub initramfs: File,
    /// The files of the root image, in the order of their offsets.
    pub image: Vec<ImagePart>,
    /// The image's defaults for commands.
    pub image_config: ImageConfig,
    /// What the image's registry has under its name.
    pub image_digest: Option<Digest>,
    pub keeper: File,
    pub gateway: File,
}

/// What to find the parts of a sandbox by.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub engine: Chosen,
    pub spec: &'a SandboxSpec,
    /// Replaces the guest kernel.
    pub kernel: Option<&'a Path>,
    pub pull: Pull,
}

impl Assets {
    /// Finds all parts, and builds or pulls what is missing.
    pub fn ensure(
        paths: &Paths,
        wanted: &Wanted<'_>,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, AssetsError> {
        let cache = ImageCache::new(paths.cache.clone());
        let root = wanted.spec.root_image()?;
        let kernel_path = match wanted.kernel {
            Some(path) => path.to_owned(),
            None => ensure_kernel(&cache, wanted.engine, progress)?.path(KERNEL_FILE),
        };
        let (image, image_config, image_digest) = match root {
            Image::Recipe(name) => {
                let built = BuiltImage::ensure(&cache, &name, progress)?;
                (vec![ImagePart { offset: 0, file: open(&built.file)? }], built.config, None)
            }
            Image::Registry(reference) => {
                let images = Images::open(paths)?;
                // Until the files are open.
                let _in_use = images.store().use_blobs().map_err(ImagesError::from)?;
                let pulled = images.fetch(&reference, wanted.pull, progress)?;
                let parts = images.root(&pulled, progress)?;
                (parts, images::defaults(&pulled)?, Some(pulled.record.pinned))
            }
        };
        Ok(Self {
            kernel: open(&kernel_path)?,
            initramfs: initramfs::pack(&program("bathy-agent")?)?,
            image,
            image_config,
            image_digest,
            keeper: open(&program("bathy-keeper")?)?,
            gateway: open(&program("bathy-gateway")?)?,
        })
    }
}

/// An image that was built by a recipe.
struct BuiltImage {
    file: PathBuf,
    config: ImageConfig,
}

impl BuiltImage {
    fn ensure(cache: &ImageCache, name: &str, progress: &mut dyn FnMut(&str)) -> Result<Self, AssetsError> {
        let image = cache.ensure(&Recipe::image(name)?, &[IMAGE_FILE, IMAGE_CONFIG], progress)?;
        let path = image.path(IMAGE_CONFIG);
        let read = || Ok(serde_json::from_slice(&fs::read(&path)?)?);
        let config = read().map_err(|error| AssetsError::ImageConfig(path.clone(), error))?;
        Ok(Self { file: image.path(IMAGE_FILE), config })
    }
}

/// The root image of a persistent sandbox, which is there from now on.
#[derive(Debug)]
pub struct KeptImage {
    /// The image's defaults for commands.
    pub config: ImageConfig,
    /// What its registry has under its name.
    pub digest: Option<Digest>,
    /// Until the sandbox exists, nothing else keeps the image.
    _in_use: Option<InUse>,
}

/// Finds an image and builds or pulls it if it is missing.
pub fn keep_image(
    paths: &Paths,
    spec: &SandboxSpec,
    pull: Pull,
    progress: &mut dyn FnMut(&str),
) -> Result<KeptImage, AssetsError> {
    match spec.root_image()? {
        Image::Recipe(name) => {
            let built = BuiltImage::ensure(&ImageCache::new(paths.cache.clone()), &name, progress)?;
            Ok(KeptImage { config: built.config, digest: None, _in_use: None })
        }
        Image::Registry(reference) => {
            let images = Images::open(paths)?;
            let in_use = images.store().use_blobs().map_err(ImagesError::from)?;
            let pulled = images.fetch(&reference, pull, progress)?;
            drop(images.root(&pulled, progress)?);
            let config = images::defaults(&pulled)?;
            images.pin(&pulled)?;
            Ok(KeptImage { config, digest: Some(pulled.record.pinned), _in_use: Some(in_use) })
        }
    }
}

/// The recipe of an engine's guest kernel.
pub(crate) fn kernel_recipe(engine: Chosen) -> Recipe {
    match engine {
        Chosen::Kvm => Recipe::kvm_kernel(),
        Chosen::Uml => Recipe::uml_kernel(),
    }
}

/// Finds an engine's guest kernel and builds it if it is missing.
pub fn ensure_kernel(
    store: &ImageCache,
    engine: Chosen,
    progress: &mut dyn FnMut(&str),
) -> Result<Artifact, ImageCacheError> {
    store.ensure(&kernel_recipe(engine), &[KERNEL_FILE], progress)
}

fn open(path: &Path) -> Result<File, AssetsError> {
    File::open(path).map_err(|error| AssetsError::Open(path.to_owned(), error))
}

/// The path of one of our programs, beside the running one.
pub fn program(name: &str) -> Result<PathBuf, AssetsError> {
    let missing = |error| AssetsError::Program(PathBuf::from(name), error);
    let folder = std::env::current_exe().map_err(missing)?;
    // Test programs are one folder below the programs that they test.
    let candidates = folder.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let found = candidates.clone().find(|path| path.exists());
    found.ok_or_else(|| AssetsError::Program(folder.with_file_name(name), io::ErrorKind::NotFound.into()))
}
