//! Push: an image of the store goes to a registry.

use std::collections::HashSet;
use std::sync::Arc;

use http::header::{CONTENT_TYPE, HeaderValue, LOCATION};
use http::{Method, StatusCode};

use super::document::what_of;
use super::progress::{Event, Progress, Reporter};
use super::session::Session;
use super::{PushError, TransferError, parallel};
use crate::client::{Client, ClientError};
use crate::content::{Record, Store};
use crate::digest::Digest;
use crate::http::{Call, Content, FileContent, HttpError};
use crate::manifest::{Descriptor, Document, MAX_MANIFEST, Manifest, ManifestError};
use crate::reference::Reference;

/// The longest answer that a successful upload has.
const MAX_ANSWER: u64 = 64 << 10;
const ACTIONS: &str = "pull,push";

impl Client {
    /// Pushes an image of the store under another reference, or the same. What the registry has is not sent again. Returns
    /// the digest that it has there.
    pub fn push(
        &self,
        store: &Store,
        image: &Record,
        to: &Reference,
        progress: &mut dyn Progress,
    ) -> Result<Digest, PushError> {
        let pushed = parallel::reported(progress, |reporter| {
            let store = &store.clone().with_cancel(self.options.cancel.clone());
            let _in_use = store.use_blobs()?;
            Push { client: self, store, to, reporter }.run(image)
        });
        pushed.map_err(|source| PushError { reference: to.clone(), source: source.into() })
    }
}

struct Push<'a> {
    client: &'a Client,
    store: &'a Store,
    to: &'a Reference,
    reporter: &'a Reporter,
}

impl Push<'_> {
    fn run(&self, image: &Record) -> Result<Digest, TransferError> {
        if self.to.digest().is_some_and(|digest| *digest != image.manifest) {
            return Err(TransferError::OtherDigest { found: image.manifest.clone() });
        }
        let what = what_of(&image.manifest.to_string());
        let text = self.store.read(&image.manifest, MAX_MANIFEST, &what)?;
        let Document::Manifest(manifest) = Document::parse(&text, Some(&image.media_type))? else {
            return Err(ManifestError::NestedIndex.into());
        };
        self.send_blobs(&manifest)?;
        let mut session = Session::of(self.client, self.to, ACTIONS)?.with_reporter(self.reporter);
        session.put_manifest(self.to, text, &manifest.media_type)?;
        self.reporter.report(Event::Resolved(image.manifest.clone()));
        Ok(image.manifest.clone())
    }

    fn send_blobs(&self, manifest: &Manifest) -> Result<(), TransferError> {
        let mut seen = HashSet::new();
        let all = manifest.layers.iter().chain([&manifest.config]);
        let blobs: Vec<Descriptor> = all.filter(|blob| seen.insert(&blob.digest)).cloned().collect();
        self.reporter.report(Event::Blobs(blobs.clone()));
        parallel::each(&blobs, self.client.options.parallel, |taken, stop| {
            let session = Session::stoppable(self.client, self.to, ACTIONS, stop.clone())?;
            let mut session = session.with_reporter(self.reporter);
            for blob in taken {
                session.upload(self.store, blob, self.reporter)?;
            }
            Ok(())
        })
    }
}

impl Session<'_> {
    /// Sends a blob, unless the registry has it.
    fn upload(&mut self, store: &Store, blob: &Descriptor, reporter: &Reporter) -> Result<(), TransferError> {
        let file = store.open_blob(&blob.digest)?;
        let head = Call::new(Method::HEAD, self.url(&format!("blobs/{}", blob.digest)));
        let found = self.fetch(&head, MAX_ANSWER)?;
        if !found.status.is_success() {
            let (digest, reporter) = (blob.digest.clone(), reporter.clone());
            let notify =
                Box::new(move |done| reporter.report(Event::Progress { digest: digest.clone(), done }));
            let content = Arc::new(FileContent { file, size: blob.size, notify });
            self.upload_content(&blob.digest, &Content::File(content))?;
        }
        reporter.report(Event::Done(blob.digest.clone()));
        Ok(())
    }

    fn upload_content(&mut self, digest: &Digest, content: &Content) -> Result<(), ClientError> {
        let what = format!("the upload of {digest}");
        let mut failures = 0;
        loop {
            // An upload that was cut cannot be continued everywhere: it begins anew.
            match self.upload_once(digest, content, &what) {
                // The server has forgotten it, perhaps because an earlier attempt did arrive.
                Err(ClientError::NotFound { .. }) if failures < self.client.options.retries.count => {
                    failures += 1
                }
                Err(error) => self.recover(error, &mut failures)?,
                sent => return sent,
            }
        }
    }

    fn upload_once(&mut self, digest: &Digest, content: &Content, what: &str) -> Result<(), ClientError> {
        let begun = self.fetch(&Call::new(Method::POST, self.url("blobs/uploads/")), MAX_ANSWER)?;
        if begun.status != StatusCode::ACCEPTED {
            return Err(self.refusal(&begun, what));
        }
        let location = begun.headers.get(LOCATION);
        let location =
            location.ok_or_else(|| ClientError::NoUpload(begun.origin.clone(), what.to_owned()))?;
        let url = self.link.next_url(&self.url("blobs/uploads/"), location)?;
        let mut call = Call::new(Method::PUT, url.with_query("digest", &digest.to_string()));
        call.content = content.clone();
        let call = call.with(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        let sent = self.fetch(&call, MAX_ANSWER)?;
        if sent.status == StatusCode::CREATED { Ok(()) } else { Err(self.refusal(&sent, what)) }
    }

    fn put_manifest(&mut self, to: &Reference, text: Vec<u8>, media_type: &str) -> Result<(), ClientError> {
        let (digest, what) = (Digest::of(&text), format!("the manifest of {to}"));
        let content_type = HeaderValue::try_from(media_type);
        let content_type = content_type.map_err(|error| HttpError::Request(error.into()))?;
        let mut call = Call::new(Method::PUT, self.url(&format!("manifests/{}", to.target())));
        call.content = Content::Bytes(text.into());
        let sent = self.fetch(&call.with(CONTENT_TYPE, content_type), MAX_ANSWER)?;
        if !sent.status.is_success() {
            return Err(self.refusal(&sent, &what));
        }
        let said = sent.headers.get("docker-content-digest").and_then(|value| value.to_str().ok());
        match said.map(str::parse) {
            Some(Ok(found)) if found != digest => {
                Err(ClientError::Mismatch { what, expected: digest, found })
            }
            _ => Ok(()),
        }
    }
}
