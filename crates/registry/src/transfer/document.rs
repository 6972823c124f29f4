//! Indexes and manifests of a registry.

use http::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method};

use super::session::Session;
use crate::client::ClientError;
use crate::digest::{Digest, Hasher};
use crate::http::{Call, Origin};
use crate::manifest::{MAX_MANIFEST, media};
use crate::reference::Reference;

const DIGEST_HEADER: &str = "docker-content-digest";

/// A document whose digest was checked.
pub struct Verified {
    pub digest: Digest,
    pub content_type: Option<String>,
    pub body: Vec<u8>,
}

impl Session<'_> {
    fn document_call(&self, method: Method, target: &str) -> Call {
        let url = self.url(&format!("manifests/{target}"));
        Call::new(method, url).with(ACCEPT, HeaderValue::from_static(media::ACCEPTED))
    }

    /// What a reference leads to, without fetching it.
    pub fn resolve(&mut self, reference: &Reference) -> Result<Digest, ClientError> {
        let target = reference.target();
        let fetched = self.fetch(&self.document_call(Method::HEAD, &target), MAX_MANIFEST)?;
        if !fetched.status.is_success() {
            // A response to HEAD has no body that would name the error.
            return Ok(self.document(&target, reference.digest(), &what_of(&target))?.digest);
        }
        let found = header_digest(&fetched.headers, &fetched.origin, &what_of(&target))?;
        let found = match found {
            Some(found) => found,
            None => self.document(&target, reference.digest(), &what_of(&target))?.digest,
        };
        match reference.digest() {
            Some(expected) if *expected != found && expected.algorithm() == found.algorithm() => {
                Err(ClientError::Mismatch { what: what_of(&target), expected: expected.clone(), found })
            }
            _ => Ok(found),
        }
    }

    /// Fetches a document by a tag or digest. It has to have the digest that is expected, and the one that the registry
    /// says it has.
    pub fn document(
        &mut self,
        target: &str,
        expected: Option<&Digest>,
        what: &str,
    ) -> Result<Verified, ClientError> {
        let fetched = self.fetch(&self.document_call(Method::GET, target), MAX_MANIFEST)?;
        if !fetched.status.is_success() {
            return Err(self.refusal(&fetched, target));
        }
        let said = header_digest(&fetched.headers, &fetched.origin, what)?;
        for expected in expected.iter().copied().chain(&said) {
            let mut hasher = Hasher::new(expected.algorithm());
            hasher.update(&fetched.body);
            let found = hasher.finish();
            if found != *expected {
                return Err(ClientError::Mismatch {
                    what: what.to_owned(),
                    expected: expected.clone(),
                    found,
                });
            }
        }
        let content_type = fetched.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        Ok(Verified {
            digest: expected.cloned().unwrap_or_else(|| Digest::of(&fetched.body)),
            content_type: content_type.map(str::to_owned),
            body: fetched.body,
        })
    }
}

pub fn what_of(target: &str) -> String {
    format!("The manifest {target}")
}

/// Parses the digest in the registry's header.
fn header_digest(headers: &HeaderMap, origin: &Origin, what: &str) -> Result<Option<Digest>, ClientError> {
    let Some(value) = headers.get(DIGEST_HEADER) else { return Ok(None) };
    let digest = value.to_str().ok().and_then(|text| text.parse().ok());
    digest.map(Some).ok_or_else(|| ClientError::NoDigest(origin.clone(), what.to_owned()))
}
