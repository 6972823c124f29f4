//! What a guest is made of besides its disk: the kernel and the root images, built once and kept in a cache.
//!
//! * [`recipe`]: what can be built, embedded in the binary.
//! * [`store`]: the cache: keyed by the recipe's content, checked by digest, built by one process at a time.
//! * [`initramfs`]: the agent, packed for the guest kernel.
//! * [`trust`]: whose folders all this may lie in.

pub mod initramfs;
pub mod recipe;
pub mod store;
pub mod trust;

pub use initramfs::InitramfsError;
pub use recipe::{ImageConfig, Recipe, RecipeError};
pub use store::{Artifact, Store, StoreError};
pub use trust::TrustError;
