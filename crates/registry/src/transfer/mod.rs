//! Images and their parts between registries and the store.

mod blob;
mod document;
mod parallel;
pub mod progress;
pub mod pull;
pub mod push;
pub(crate) mod session;

use thiserror::Error;

use crate::client::ClientError;
use crate::content::ContentError;
use crate::manifest::ManifestError;
use crate::reference::Reference;

/// What went wrong on the way.
#[derive(Debug, Error)]
pub enum TransferError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Content(#[from] ContentError),
    #[error("The image to push has the digest {found}, and the reference asks for another one")]
    OtherDigest { found: crate::digest::Digest },
}

impl TransferError {
    pub fn is_cancelled(&self) -> bool {
        match self {
            Self::Client(error) => error.is_cancelled(),
            Self::Content(error) => matches!(error, ContentError::Cancelled),
            Self::Manifest(_) | Self::OtherDigest { .. } => false,
        }
    }
}

/// An image that was not pulled.
#[derive(Debug, Error)]
#[error("Cannot pull {reference}")]
pub struct PullError {
    pub reference: Reference,
    pub source: Box<TransferError>,
}

/// An image that was not pushed.
#[derive(Debug, Error)]
#[error("Cannot push {reference}")]
pub struct PushError {
    pub reference: Reference,
    pub source: Box<TransferError>,
}
