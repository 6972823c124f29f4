//! Which reference leads to which image: the `index.json` of the OCI layout.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::{ContentError, Store};
use crate::digest::Digest;
use crate::manifest::{Document, MAX_MANIFEST, media};
use crate::reference::Reference;

/// Far more references than a user has.
const MAX_INDEX: u64 = 64 << 20;
const NAME: &str = "org.opencontainers.image.ref.name";
const INDEX: &str = "bathysphere.index";
const PULLED: &str = "bathysphere.pulled";

/// Where a reference led when it was pulled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub reference: Reference,
    /// Of the manifest for this machine.
    pub manifest: Digest,
    pub manifest_size: u64,
    pub media_type: String,
    /// Of what the registry has under the tag: an index, or the manifest itself.
    pub pinned: Digest,
    pub pulled: SystemTime,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layout {
    schema_version: u32,
    media_type: String,
    manifests: Vec<Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    media_type: String,
    digest: Digest,
    size: u64,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

impl Store {
    /// All references, in their order by name.
    pub fn references(&self) -> Result<Vec<Record>, ContentError> {
        let path = self.root.join("index.json");
        let mut text = Vec::new();
        match File::open(&path).and_then(|file| file.take(MAX_INDEX).read_to_end(&mut text)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            read => read.map_err(|error| self.failed(&path, error))?,
        };
        let layout: Layout =
            serde_json::from_slice(&text).map_err(|error| ContentError::Index(path, error))?;
        Ok(layout.manifests.into_iter().filter_map(Record::of_entry).collect())
    }

    /// Where this reference leads.
    pub fn reference(&self, reference: &Reference) -> Result<Option<Record>, ContentError> {
        Ok(self.references()?.into_iter().find(|record| record.reference == *reference))
    }

    /// Lets a reference lead to an image, all of whose blobs are in the store.
    pub fn set_reference(&self, record: Record) -> Result<(), ContentError> {
        self.change(|records| {
            records.retain(|old| old.reference != record.reference);
            records.push(record);
        })
    }

    /// Forgets a reference. The blobs stay until [`Store::sweep`]. Returns whether there was one.
    pub fn remove_reference(&self, reference: &Reference) -> Result<bool, ContentError> {
        let mut was_there = false;
        self.change(|records| {
            was_there = records.iter().any(|record| record.reference == *reference);
            records.retain(|record| record.reference != *reference);
        })?;
        Ok(was_there)
    }

    /// The digests of all parts of all images that references lead to.
    pub fn reachable(&self) -> Result<HashSet<Digest>, ContentError> {
        let mut found = HashSet::new();
        for record in self.references()? {
            match self.read(&record.manifest, MAX_MANIFEST, "A manifest") {
                // It has to be pulled again in any case.
                Err(ContentError::Missing(_) | ContentError::Mismatch { .. } | ContentError::Size { .. }) => {
                }
                read => {
                    if let Ok(Document::Manifest(manifest)) =
                        Document::parse(&read?, Some(&record.media_type))
                    {
                        found.extend(manifest.layers.into_iter().map(|layer| layer.digest));
                        found.insert(manifest.config.digest);
                    }
                }
            }
            found.extend([record.manifest, record.pinned]);
        }
        Ok(found)
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Record>)) -> Result<(), ContentError> {
        let _alone = self.locked("lock", FlockOperation::NonBlockingLockExclusive)?;
        let mut records = self.references()?;
        change(&mut records);
        records.sort_by(|one, other| one.reference.cmp(&other.reference));
        let manifests = records.into_iter().map(Record::into_entry).collect();
        let layout = Layout { schema_version: 2, media_type: media::OCI_INDEX.to_owned(), manifests };
        let path = self.root.join("index.json");
        let text = serde_json::to_vec(&layout).map_err(|error| ContentError::Index(path.clone(), error))?;
        self.replace(&path, &text)
    }
}

impl Record {
    /// None for what other programs put there.
    fn of_entry(entry: Entry) -> Option<Self> {
        let text = |name| entry.annotations.get(name);
        let pinned = text(INDEX).and_then(|digest| digest.parse().ok());
        let seconds = text(PULLED).and_then(|seconds| seconds.parse().ok()).unwrap_or_default();
        Some(Self {
            reference: text(NAME)?.parse().ok()?,
            pinned: pinned.unwrap_or_else(|| entry.digest.clone()),
            pulled: UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?,
            manifest: entry.digest,
            manifest_size: entry.size,
            media_type: entry.media_type,
        })
    }

    fn into_entry(self) -> Entry {
        let seconds = self.pulled.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut annotations = BTreeMap::from([
            (NAME.to_owned(), self.reference.to_string()),
            (PULLED.to_owned(), seconds.to_string()),
        ]);
        if self.pinned != self.manifest {
            annotations.insert(INDEX.to_owned(), self.pinned.to_string());
        }
        Entry { media_type: self.media_type, digest: self.manifest, size: self.manifest_size, annotations }
    }
}
