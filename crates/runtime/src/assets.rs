//! The parts of a sandbox: found or built, and opened.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use bathy_image::{
    Artifact, ImageCache, ImageCacheError, ImageConfig, InitramfsError, Recipe, RecipeError, initramfs,
};
use bathy_spec::Chosen;
use thiserror::Error;

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
    #[error("Cannot open {0}")]
    Open(PathBuf, #[source] io::Error),
    /// An image's configuration is invalid.
    #[error("The image's description {0} is damaged")]
    ImageConfig(PathBuf, #[source] io::Error),
    /// A program of ours is not beside `bathy`.
    #[error("Cannot find {0}, which belongs beside the bathy program; build it with `cargo build --release`")]
    Program(PathBuf, #[source] io::Error),
}

/// The parts of a sandbox, as open files.
#[derive(Debug)]
pub struct Assets {
    pub kernel: File,
    pub initramfs: File,
    pub image: File,
    /// The image's defaults for commands.
    pub image_config: ImageConfig,
    pub keeper: File,
    pub gateway: File,
}

impl Assets {
    /// Finds all parts for `image` and builds what is missing. `kernel` replaces the guest kernel.
    pub fn ensure(
        store: &ImageCache,
        engine: Chosen,
        image: &str,
        kernel: Option<&Path>,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, AssetsError> {
        let image_recipe = Recipe::image(image)?;
        let kernel_path = match kernel {
            Some(path) => path.to_owned(),
            None => ensure_kernel(store, engine, progress)?.path(KERNEL_FILE),
        };
        let image = store.ensure(&image_recipe, &[IMAGE_FILE, IMAGE_CONFIG], progress)?;
        let config_path = image.path(IMAGE_CONFIG);
        let read = || Ok(serde_json::from_slice(&fs::read(&config_path)?)?);
        let image_config = read().map_err(|error| AssetsError::ImageConfig(config_path.clone(), error))?;
        Ok(Self {
            kernel: open(&kernel_path)?,
            initramfs: initramfs::pack(&program("bathy-agent")?)?,
            image: open(&image.path(IMAGE_FILE))?,
            image_config,
            keeper: open(&program("bathy-keeper")?)?,
            gateway: open(&program("bathy-gateway")?)?,
        })
    }
}

/// The files of an image.
#[derive(Debug)]
pub struct ImageParts {
    /// The image's defaults for commands, as stored.
    pub config_text: Vec<u8>,
}

/// Finds an image and builds it if it is missing.
pub fn ensure_image(
    store: &ImageCache,
    image: &str,
    progress: &mut dyn FnMut(&str),
) -> Result<ImageParts, AssetsError> {
    let image = store.ensure(&Recipe::image(image)?, &[IMAGE_FILE, IMAGE_CONFIG], progress)?;
    let path = image.path(IMAGE_CONFIG);
    let config_text = fs::read(&path).map_err(|error| AssetsError::ImageConfig(path, error))?;
    Ok(ImageParts { config_text })
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
