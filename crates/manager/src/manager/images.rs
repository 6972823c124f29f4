//! Images from registries: pulled, listed, named, removed.

use std::collections::HashSet;
use std::time::UNIX_EPOCH;

use bathy_image::ImageConfig;
use bathy_registry::manifest::Platform;
use bathy_registry::{ClientError, Credentials, Digest, LoginCheck, Progress, Pulled, Record, Reference};
use bathy_runtime::description::Description;
use bathy_runtime::folder::Folder;
use bathy_runtime::images::{self, Images, ImagesError, leads_to};
use bathy_spec::SandboxSpec;
use bathy_spec::image::Image;
use serde::Serialize;
use thiserror::Error;

use super::{Manager, ManagerError};

/// Something cannot be done with an image.
#[derive(Debug, Error)]
pub enum ImageError {
    #[error(
        "The image {0} is built on this machine, by `bathy setup`; it is in no registry. `docker.io/library/{0}` is another image"
    )]
    Recipe(String),
    #[error("There is no image {0} on this machine. `bathy image ls` lists what is there")]
    Unknown(Reference),
    #[error(
        "The image {image} is the root of the sandbox `{sandbox}`. To remove both: bathy rm {sandbox}, then bathy image rm"
    )]
    Needed { image: Reference, sandbox: String },
    #[error("{0} names an image by its digest. A new name has no digest, only a tag")]
    NewDigest(Reference),
    #[error("Neither XDG_CONFIG_HOME nor HOME is set, so there is no place for logins")]
    NoLogins,
}

impl From<ImageError> for ManagerError {
    fn from(error: ImageError) -> Self {
        Self::Image(Box::new(error))
    }
}

impl From<ImagesError> for ManagerError {
    fn from(error: ImagesError) -> Self {
        Self::Images(Box::new(error))
    }
}

impl From<ClientError> for ManagerError {
    fn from(error: ClientError) -> Self {
        Self::Login(Box::new(error))
    }
}

/// An image, as it is listed.
#[derive(Clone, Debug, Serialize)]
pub struct ListedImage {
    /// Its name in full.
    pub reference: String,
    /// What the registry has under that name.
    pub digest: Digest,
    /// Of the manifest for this machine.
    pub manifest: Digest,
    /// Of its layers, compressed.
    pub size: Option<u64>,
    pub layers: Option<usize>,
    /// Seconds since 1970.
    pub pulled_at: u64,
    /// Sandboxes whose root it is.
    pub sandboxes: Vec<String>,
}

/// Everything about an image.
#[derive(Clone, Debug, Serialize)]
pub struct InspectedImage {
    #[serde(flatten)]
    pub listed: ListedImage,
    pub platform: Platform,
    pub created: String,
    pub user: String,
    pub workdir: String,
    pub env: Vec<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub stop_signal: String,
    pub exposed_ports: Vec<String>,
    pub labels: std::collections::BTreeMap<String, String>,
    pub layer_digests: Vec<LayerDigests>,
}

#[derive(Clone, Debug, Serialize)]
pub struct LayerDigests {
    pub digest: Digest,
    pub diff_id: Digest,
    pub size: u64,
}

/// A sandbox and the image that it needs.
struct Need {
    sandbox: String,
    reference: Reference,
}

impl Manager {
    /// Pulls an image and unpacks it, so that the first sandbox need not. One that cannot be unpacked keeps no name.
    pub fn pull_image(
        &mut self,
        image: &str,
        insecure: bool,
        progress: &mut dyn Progress,
        steps: &mut dyn FnMut(&str),
    ) -> Result<ListedImage, ManagerError> {
        let reference = self.registry_image(image)?;
        let images = self.images()?;
        let _in_use = images.store().use_blobs().map_err(ImagesError::from)?;
        let pulled = images.pull(&images::client(insecure), &reference, progress)?;
        let unpacked = images::defaults(&pulled).and_then(|_: ImageConfig| images.root(&pulled, steps));
        if let Err(error) = unpacked {
            if matches!(
                error,
                ImagesError::Layer { .. } | ImagesError::Index { .. } | ImagesError::Environment { .. }
            ) {
                // The first error is the one to report.
                let _ = images.store().remove_reference(&reference);
            }
            return Err(error.into());
        }
        Ok(listed(&pulled.record, Some(&pulled), &[]))
    }

    /// All images from registries.
    pub fn list_images(&mut self) -> Result<Vec<ListedImage>, ManagerError> {
        let images = self.images()?;
        let needs = self.needs()?;
        let records = images.store().references().map_err(ImagesError::from)?;
        // One that cannot be read must not hide the others.
        let list = |record: &Record| listed(record, images.load(record).ok().flatten().as_ref(), &needs);
        Ok(records.iter().map(list).collect())
    }

    /// The names of all images from registries, as far as they can be read. Makes nothing.
    pub fn image_names(&mut self) -> Vec<String> {
        if !Images::is_there(&self.paths) {
            return Vec::new();
        }
        let records = self.images().ok().and_then(|images| images.store().references().ok());
        records.into_iter().flatten().map(|record| record.reference.to_string()).collect()
    }

    /// Everything about an image that is on this machine.
    pub fn inspect_image(&mut self, image: &str) -> Result<InspectedImage, ManagerError> {
        let reference = self.registry_image(image)?;
        let pulled = self.images()?.find(&reference)?.ok_or(ImageError::Unknown(reference))?;
        let run = pulled.config.config.clone();
        Ok(InspectedImage {
            listed: listed(&pulled.record, Some(&pulled), &self.needs()?),
            platform: pulled.config.platform(),
            created: pulled.config.created.clone(),
            user: run.user,
            workdir: run.working_dir,
            env: run.env,
            entrypoint: run.entrypoint,
            cmd: run.cmd,
            stop_signal: run.stop_signal,
            exposed_ports: run.exposed_ports.into_keys().collect(),
            labels: run.labels,
            layer_digests: pulled
                .layers
                .iter()
                .map(|layer| LayerDigests {
                    digest: layer.blob.digest.clone(),
                    diff_id: layer.diff_id.clone(),
                    size: layer.blob.size,
                })
                .collect(),
        })
    }

    /// Gives an image another name.
    pub fn tag_image(&mut self, image: &str, name: &str) -> Result<Reference, ManagerError> {
        let (reference, name) = (self.registry_image(image)?, self.registry_image(name)?);
        if name.digest().is_some() {
            return Err(ImageError::NewDigest(name).into());
        }
        let images = self.images()?;
        let _in_use = images.store().use_blobs().map_err(ImagesError::from)?;
        let pulled = images.find(&reference)?.ok_or(ImageError::Unknown(reference))?;
        let record = Record { reference: name.clone(), ..pulled.record };
        images.store().set_reference(record).map_err(ImagesError::from)?;
        Ok(name)
    }

    /// Removes names of images, and what no other name leads to. Returns how many bytes were freed.
    pub fn remove_images(&mut self, names: &[String]) -> Result<u64, ManagerError> {
        let images = self.images()?;
        let store = images.store();
        // No sandbox is made meanwhile.
        let alone = store.alone().map_err(ImagesError::from)?;
        let needs = self.needs()?;
        for name in names {
            let reference = self.registry_image(name)?;
            let records = store.references().map_err(ImagesError::from)?;
            let record = records
                .iter()
                .find(|record| record.reference == reference)
                .ok_or_else(|| ImageError::Unknown(reference.clone()))?;
            // Another name may still lead to it: that of the sandbox's own, above all.
            let others = || records.iter().filter(|other| other.reference != reference);
            let held = |digest: &Digest| others().any(|other| leads_to(other, digest));
            if let Some(need) =
                needs.iter().find(|need| need.is_of(record) && !need.digest().is_some_and(held))
            {
                return Err(ImageError::Needed { image: reference, sandbox: need.sandbox.clone() }.into());
            }
            store.remove_reference(&reference).map_err(ImagesError::from)?;
        }
        let blobs = store.sweep(&alone, |_| false).map_err(ImagesError::from)?;
        Ok(blobs + images.sweep_unpacked()?)
    }

    /// Removes what no sandbox needs: names that only sandboxes have given, with `all` every name. Returns the removed names,
    /// and how many bytes were freed.
    pub fn prune_images(&mut self, all: bool) -> Result<(Vec<Reference>, u64), ManagerError> {
        let images = self.images()?;
        let store = images.store();
        let alone = store.alone().map_err(ImagesError::from)?;
        let needs = self.needs()?;
        let mut removed = Vec::new();
        for record in store.references().map_err(ImagesError::from)? {
            let is_needed = needs.iter().any(|need| need.is_of(&record));
            // The name that a sandbox gave: only that has both.
            let is_pin = record.reference.tag().is_some() && record.reference.digest().is_some();
            if !is_needed && (all || is_pin) {
                store.remove_reference(&record.reference).map_err(ImagesError::from)?;
                removed.push(record.reference);
            }
        }
        let blobs = store.sweep(&alone, |_| false).map_err(ImagesError::from)?;
        Ok((removed, blobs + images.sweep_unpacked()?))
    }

    /// Keeps a login, unless its registry refuses it. A registry may ask for none until something is pulled or pushed.
    pub fn login(
        &self,
        registry: &str,
        credentials: &Credentials,
        insecure: bool,
    ) -> Result<LoginCheck, ManagerError> {
        let logins = images::logins().ok_or(ImageError::NoLogins)?;
        let check = images::client(insecure).check_login(registry, credentials)?;
        logins.set(registry, credentials)?;
        Ok(check)
    }

    /// Forgets a login. Returns whether there was one.
    pub fn logout(&self, registry: &str) -> Result<bool, ManagerError> {
        Ok(images::logins().ok_or(ImageError::NoLogins)?.remove(registry)?)
    }

    fn images(&self) -> Result<Images, ManagerError> {
        Ok(Images::open(&self.paths)?)
    }

    /// The reference of an image from a registry, if the operator allows it.
    fn registry_image(&self, text: &str) -> Result<Reference, ManagerError> {
        let reference = match Image::parse(text).map_err(bathy_spec::SpecError::from)? {
            Image::Recipe(name) => return Err(ImageError::Recipe(name).into()),
            Image::Registry(reference) => reference,
        };
        self.operator.apply(SandboxSpec { image: text.to_owned(), ..self.operator.defaults() })?;
        Ok(reference)
    }

    /// The images of all sandboxes, also of those that the store does not know.
    fn needs(&mut self) -> Result<Vec<Need>, ManagerError> {
        let mut found: Vec<(String, SandboxSpec)> = Vec::new();
        for record in self.store.list()? {
            found.push((record.name.unwrap_or(record.id), record.spec));
        }
        let failed = |error| ManagerError::File(Folder::all(&self.paths), error);
        for id in Folder::names(&self.paths).map_err(failed)? {
            let folder = Folder::of(&self.paths, &id);
            // A description that cannot be read is reported when its sandbox is started.
            if let Ok(Some(description)) = Description::read(&folder) {
                found.push((description.name.unwrap_or(id), description.spec));
            }
        }
        let need = |(sandbox, spec): (String, SandboxSpec)| match spec.root_image() {
            Ok(Image::Registry(reference)) => Some(Need { sandbox, reference }),
            _ => None,
        };
        Ok(found.into_iter().filter_map(need).collect())
    }
}

impl Need {
    fn digest(&self) -> Option<&Digest> {
        self.reference.digest()
    }

    fn is_of(&self, record: &Record) -> bool {
        self.digest().is_some_and(|digest| leads_to(record, digest))
    }
}

fn listed(record: &Record, pulled: Option<&Pulled>, needs: &[Need]) -> ListedImage {
    let sandboxes: HashSet<&str> =
        needs.iter().filter(|need| need.is_of(record)).map(|need| need.sandbox.as_str()).collect();
    let mut sandboxes: Vec<String> = sandboxes.into_iter().map(str::to_owned).collect();
    sandboxes.sort_unstable();
    ListedImage {
        reference: record.reference.to_string(),
        digest: record.pinned.clone(),
        manifest: record.manifest.clone(),
        size: pulled.map(|pulled| pulled.layers.iter().fold(0, |sum, layer| sum + layer.blob.size)),
        layers: pulled.map(|pulled| pulled.layers.len()),
        pulled_at: record.pulled.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        sandboxes,
    }
}
