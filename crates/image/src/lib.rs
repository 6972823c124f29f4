//! The parts of a guest besides its disk: kernels and root images, built once and cached.
//!
//! * [`recipe`]: what can be built, embedded in the binary.
//! * [`store`]: the cache, keyed by the recipe's content, verified by digest, built by one process at a time.
//! * [`initramfs`]: the agent, packed for the guest kernel.
//! * [`Stamp`]: whether a file that was verified may have changed since.
//! * [`trust`]: refuses folders that other users can write to.

pub mod initramfs;
pub mod recipe;
mod stamp;
pub mod store;
pub mod trust;

pub use initramfs::InitramfsError;
pub use recipe::{ImageConfig, Recipe, RecipeError};
pub use stamp::Stamp;
pub use store::{Artifact, ImageCache, ImageCacheError};
pub use trust::TrustError;
