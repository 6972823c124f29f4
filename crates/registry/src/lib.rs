//! The client of OCI registries, and the store of what it fetched: images arrive verified by digest, or not at all.
//!
//! * [`mod@reference`]: what images are called.
//! * [`client`]: what callers use. Everything blocks; threads and the asynchronous part are inside.
//! * [`content`]: blobs by digest, and which reference leads to which image.
//! * [`manifest`]: what a registry says an image consists of.
//! * [`transfer`]: pull and push.
//! * [`http`], [`auth`], [`credentials`]: how registries are reached, and who they think asks.
//!
//! A registry is hostile: it can refuse to serve an image, and nothing more.

pub mod auth;
pub mod cancel;
pub mod client;
pub mod content;
pub mod credentials;
pub mod digest;
pub mod http;
pub mod manifest;
pub mod reference;
mod text;
pub mod transfer;

pub use cancel::Cancel;
pub use client::{Client, ClientError, Limits, LoginCheck, Options, Retries};
pub use content::{ContentError, Record, Store};
pub use credentials::{Credentials, Keychain, Logins, Secret};
pub use digest::Digest;
pub use reference::{Reference, ReferenceError};
pub use transfer::progress::{Event, Progress};
pub use transfer::pull::{Layer, Pulled};
pub use transfer::{PullError, PushError, TransferError};
