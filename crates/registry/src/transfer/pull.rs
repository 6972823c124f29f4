//! Pull: a reference becomes a verified image in the store.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::SystemTime;

use super::blob::Wanted;
use super::document::{Verified, what_of};
use super::progress::{Event, Progress, Reporter};
use super::session::Session;
use super::{PullError, TransferError, parallel};
use crate::client::Client;
use crate::content::{ContentError, Record, Store};
use crate::digest::Digest;
use crate::manifest::{Descriptor, Document, ImageConfig, MAX_CONFIG, MAX_MANIFEST, Manifest, Platform};
use crate::reference::Reference;

/// An image whose parts are all in the store.
#[derive(Clone, Debug)]
pub struct Pulled {
    pub record: Record,
    pub manifest: Manifest,
    pub config: ImageConfig,
    /// From the lowest to the uppermost.
    pub layers: Vec<Layer>,
}

#[derive(Clone, Debug)]
pub struct Layer {
    pub blob: Descriptor,
    /// The digest of what is in the blob, without compression.
    pub diff_id: Digest,
    pub path: PathBuf,
}

impl Pulled {
    /// Opens an image that was pulled before. None if a part of it is missing, or not what it was.
    pub fn load(store: &Store, record: Record, platform: &Platform) -> Result<Option<Self>, TransferError> {
        match Self::load_all(store, record, platform) {
            Err(TransferError::Content(ContentError::Missing(_))) => Ok(None),
            Err(TransferError::Content(ContentError::Mismatch { expected, .. })) => {
                store.discard(&expected)?;
                Ok(None)
            }
            loaded => loaded.map(Some),
        }
    }

    fn load_all(store: &Store, record: Record, platform: &Platform) -> Result<Self, TransferError> {
        let text = store.read(&record.manifest, MAX_MANIFEST, &what_of(&record.manifest.to_string()))?;
        let Document::Manifest(manifest) = Document::parse(&text, Some(&record.media_type))? else {
            return Err(ContentError::Missing(record.manifest).into());
        };
        let text = store.read(&manifest.config.digest, MAX_CONFIG, "The image's config")?;
        let config = manifest.parse_config(&text, platform)?;
        for blob in &manifest.layers {
            if !store.has(&blob.digest, blob.size)? {
                return Err(ContentError::Missing(blob.digest.clone()).into());
            }
        }
        let layer = |(blob, diff_id): (&Descriptor, &Digest)| Layer {
            path: store.blob_path(&blob.digest),
            blob: blob.clone(),
            diff_id: diff_id.clone(),
        };
        let layers = manifest.layers.iter().zip(&config.rootfs.diff_ids).map(layer).collect();
        Ok(Self { record, layers, manifest: *manifest, config })
    }
}

impl Client {
    /// Pulls an image, and lets the reference lead to it. What the store has is not fetched again; if that is everything
    /// and the reference has a digest, the registry is not even asked.
    pub fn pull(
        &self,
        store: &Store,
        reference: &Reference,
        progress: &mut dyn Progress,
    ) -> Result<Pulled, PullError> {
        let pulled = parallel::reported(progress, |reporter| {
            let store = &store.clone().with_cancel(self.options.cancel.clone());
            // Until the reference leads to them, nothing else keeps the blobs.
            let _in_use = store.use_blobs()?;
            Pull { client: self, store, reference, reporter }.run()
        });
        pulled.map_err(|source| PullError { reference: reference.clone(), source: source.into() })
    }
}

struct Pull<'a> {
    client: &'a Client,
    store: &'a Store,
    reference: &'a Reference,
    reporter: &'a Reporter,
}

/// The manifest for this machine, and what the registry has under the tag.
struct Chosen {
    pinned: Digest,
    manifest: Box<Manifest>,
    digest: Digest,
    size: u64,
}

impl<'a> Pull<'a> {
    fn session(&self) -> Result<Session<'a>, TransferError> {
        Ok(Session::of(self.client, self.reference, "pull")?.with_reporter(self.reporter))
    }

    fn run(&self) -> Result<Pulled, TransferError> {
        let mut session = self.session()?;
        if let Some(pulled) = self.unchanged(&mut session)? {
            return Ok(pulled);
        }
        let chosen = self.choose(&mut session)?;
        self.reporter.report(Event::Resolved(chosen.pinned.clone()));
        let config = &chosen.manifest.config;
        let wanted = Wanted { descriptor: config, what: format!("The config of {}", self.reference) };
        session.download(self.store, &wanted, self.reporter)?;
        let text = self.store.read(&config.digest, MAX_CONFIG, &wanted.what)?;
        // Before the layers, which may be large and for another platform.
        chosen.manifest.parse_config(&text, &self.client.options.platform)?;
        drop(session);
        self.fetch_layers(&chosen.manifest)?;
        let record = Record {
            reference: self.reference.clone(),
            manifest: chosen.digest,
            manifest_size: chosen.size,
            media_type: chosen.manifest.media_type,
            pinned: chosen.pinned,
            pulled: SystemTime::now(),
        };
        self.store.set_reference(record.clone())?;
        Pulled::load_all(self.store, record, &self.client.options.platform)
    }

    /// What the store has, if the reference still leads to it.
    fn unchanged(&self, session: &mut Session<'_>) -> Result<Option<Pulled>, TransferError> {
        let Some(record) = self.store.reference(self.reference)? else { return Ok(None) };
        let Some(pulled) = Pulled::load(self.store, record, &self.client.options.platform)? else {
            return Ok(None);
        };
        let is_fixed = self.reference.digest().is_some();
        if !is_fixed && session.resolve(self.reference)? != pulled.record.pinned {
            return Ok(None);
        }
        self.reporter.report(Event::Resolved(pulled.record.pinned.clone()));
        Ok(Some(pulled))
    }

    fn choose(&self, session: &mut Session<'_>) -> Result<Chosen, TransferError> {
        let target = self.reference.target();
        let first = session.document(&target, self.reference.digest(), &what_of(&target))?;
        let pinned = first.digest.clone();
        let (verified, manifest) = match parsed(&first)? {
            Document::Manifest(manifest) => (first, manifest),
            Document::Index(index) => {
                let chosen = index.select(&self.client.options.platform)?;
                let what = what_of(&chosen.digest.to_string());
                let verified = session.document(&chosen.digest.to_string(), Some(&chosen.digest), &what)?;
                let Document::Manifest(manifest) = parsed(&verified)? else {
                    return Err(crate::manifest::ManifestError::NestedIndex.into());
                };
                self.store.put(&first.digest, &first.body, &what_of(&target))?;
                (verified, manifest)
            }
        };
        let limits = self.client.options.limits;
        manifest.check_sizes(limits.layer, limits.image)?;
        self.store.put(&verified.digest, &verified.body, &what_of(&target))?;
        Ok(Chosen { pinned, manifest, size: verified.body.len() as u64, digest: verified.digest })
    }

    fn fetch_layers(&self, manifest: &Manifest) -> Result<(), TransferError> {
        let mut seen = HashSet::new();
        let numbered = manifest.layers.iter().zip(1..);
        let wanted: Vec<Wanted<'_>> = numbered
            .filter(|(layer, _)| seen.insert(&layer.digest))
            .map(|(descriptor, number)| {
                let what = format!("Layer {number} of {} ({})", self.reference, descriptor.digest);
                Wanted { descriptor, what }
            })
            .collect();
        let all = wanted.iter().map(|wanted| wanted.descriptor.clone()).collect();
        self.reporter.report(Event::Blobs(all));
        parallel::each(&wanted, self.client.options.parallel, |taken, stop| {
            let session = Session::stoppable(self.client, self.reference, "pull", stop.clone())?;
            let mut session = session.with_reporter(self.reporter);
            for wanted in taken {
                session.download(self.store, wanted, self.reporter)?;
            }
            Ok(())
        })
    }
}

fn parsed(verified: &Verified) -> Result<Document, TransferError> {
    Ok(Document::parse(&verified.body, verified.content_type.as_deref())?)
}
