//! Which reference leads to which image: the `index.json` of the OCI layout.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{ContentError, Store};
use crate::digest::Digest;
use crate::manifest::{Document, MAX_MANIFEST, media};
use crate::reference::Reference;

/// Far more references than a user has.
const MAX_INDEX: u64 = 64 << 20;
/// How deep documents are that name others: an index, one in it, a manifest.
const MAX_DEPTH: usize = 3;
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
    /// Optional in the format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    media_type: Option<String>,
    manifests: Vec<Value>,
    /// What other programs added.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// An entry of the index. What is not changed is written as it was found.
struct Listed {
    /// None for what other programs put there, or a newer version.
    record: Option<Record>,
    entry: Value,
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
        let listed = self.layout()?.manifests.into_iter().map(Listed::new);
        let mut records: Vec<Record> = listed.filter_map(|listed| listed.record).collect();
        records.sort_by(|one, other| one.reference.cmp(&other.reference));
        Ok(records)
    }

    fn layout(&self) -> Result<Layout, ContentError> {
        let path = self.root.join("index.json");
        let mut text = Vec::new();
        match File::open(&path).and_then(|file| file.take(MAX_INDEX).read_to_end(&mut text)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Layout::new()),
            read => read.map_err(|error| self.failed(&path, error))?,
        };
        serde_json::from_slice(&text).map_err(|error| ContentError::Index(path, error))
    }

    /// Where this reference leads.
    pub fn reference(&self, reference: &Reference) -> Result<Option<Record>, ContentError> {
        Ok(self.references()?.into_iter().find(|record| record.reference == *reference))
    }

    /// Lets a reference lead to an image, all of whose blobs are in the store.
    pub fn set_reference(&self, record: Record) -> Result<(), ContentError> {
        let entry = serde_json::to_value(record.clone().into_entry())
            .map_err(|error| ContentError::Index(self.root.join("index.json"), error))?;
        self.change(|all| {
            all.retain(|old| !old.is_of(&record.reference));
            all.push(Listed { record: Some(record), entry });
        })
    }

    /// Forgets a reference. The blobs stay until [`Store::sweep`]. Returns whether there was one.
    pub fn remove_reference(&self, reference: &Reference) -> Result<bool, ContentError> {
        let mut was_there = false;
        self.change(|all| {
            was_there = all.iter().any(|listed| listed.is_of(reference));
            all.retain(|listed| !listed.is_of(reference));
        })?;
        Ok(was_there)
    }

    /// The digests of all parts of all images that references lead to, and of whatever entries lead to that this version
    /// does not know.
    pub fn reachable(&self) -> Result<HashSet<Digest>, ContentError> {
        let (mut found, mut unknown) = (HashSet::new(), Vec::new());
        for listed in self.layout()?.manifests.into_iter().map(Listed::new) {
            let Some(record) = listed.record else {
                unknown.push(listed.entry);
                continue;
            };
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
        found.extend(self.named_by(unknown)?);
        Ok(found)
    }

    /// Every digest that is anywhere in these entries, or in the documents that they lead to.
    fn named_by(&self, mut documents: Vec<Value>) -> Result<HashSet<Digest>, ContentError> {
        let mut found = HashSet::new();
        for depth in 0..=MAX_DEPTH {
            let mut new = Vec::new();
            documents.iter().for_each(|document| add_digests(document, &mut new));
            documents.clear();
            for digest in new {
                if !found.insert(digest.clone()) || depth == MAX_DEPTH {
                    continue;
                }
                match self.read(&digest, MAX_MANIFEST, "A manifest") {
                    // Layers are larger, or no documents.
                    Err(
                        ContentError::Missing(_) | ContentError::Mismatch { .. } | ContentError::Size { .. },
                    ) => {}
                    read => documents.extend(serde_json::from_slice(&read?).ok()),
                }
            }
        }
        Ok(found)
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Listed>)) -> Result<(), ContentError> {
        let _alone = self.locked("lock", FlockOperation::NonBlockingLockExclusive)?;
        let mut layout = self.layout()?;
        let mut all = layout.manifests.into_iter().map(Listed::new).collect();
        change(&mut all);
        layout.manifests = all.into_iter().map(|listed| listed.entry).collect();
        let path = self.root.join("index.json");
        let text = serde_json::to_vec(&layout).map_err(|error| ContentError::Index(path.clone(), error))?;
        self.replace(&path, &text)
    }
}

/// Adds all digests that are in a document.
fn add_digests(document: &Value, found: &mut Vec<Digest>) {
    match document {
        Value::String(text) => found.extend(text.parse().ok()),
        Value::Array(values) => values.iter().for_each(|value| add_digests(value, found)),
        Value::Object(fields) => fields.values().for_each(|value| add_digests(value, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

impl Layout {
    /// Without any entry.
    fn new() -> Self {
        let media_type = Some(media::OCI_INDEX.to_owned());
        Self { schema_version: 2, media_type, manifests: Vec::new(), rest: Map::new() }
    }
}

impl Listed {
    fn new(entry: Value) -> Self {
        Self { record: Entry::deserialize(&entry).ok().and_then(Record::of_entry), entry }
    }

    fn is_of(&self, reference: &Reference) -> bool {
        self.record.as_ref().is_some_and(|record| record.reference == *reference)
    }
}

impl Record {
    /// None for what this version does not know.
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
