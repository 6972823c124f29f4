//! From the name of an image to an image in the store.

use bathy_registry::http::Proxies;
use bathy_registry::{Client, Event, Keychain, Logins, Options, Progress, Pulled, Record, Reference};
use bathy_spec::operator;
use serde::{Deserialize, Serialize};

use super::{Images, ImagesError};

/// When a registry is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pull {
    Always,
    /// If the image is not on this machine.
    #[default]
    Missing,
    Never,
}

/// A client with this user's logins. `insecure` is plain HTTP, which only registries on this machine are reached by.
pub fn client(insecure: bool) -> Client {
    let options = Options { insecure, proxies: Proxies::of_environment(), ..Options::default() };
    Client::new(options, Keychain::new(logins(), Keychain::docker_config()))
}

/// What `bathy login` keeps. None if the environment has no folder for it.
pub fn logins() -> Option<Logins> {
    operator::own_folder().map(|folder| Logins::at(folder.join("logins.json")))
}

impl Images {
    /// The image of a reference, from its registry if `pull` says so.
    pub fn fetch(
        &self,
        reference: &Reference,
        pull: Pull,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Pulled, ImagesError> {
        if pull != Pull::Always
            && let Some(pulled) = self.find(reference)?
        {
            return Ok(pulled);
        }
        if pull == Pull::Never {
            return Err(ImagesError::Missing(reference.clone()));
        }
        self.pull(&client(false), reference, &mut Steps::new(reference, progress))
    }

    /// Pulls an image. Nothing is unpacked yet.
    pub fn pull(
        &self,
        client: &Client,
        reference: &Reference,
        progress: &mut dyn Progress,
    ) -> Result<Pulled, ImagesError> {
        Ok(client.pull(&self.store, reference, progress)?)
    }

    /// Lets a reference with a digest lead to an image, which then stays when a tag moves on.
    pub fn pin(&self, pulled: &Pulled) -> Result<Reference, ImagesError> {
        let pinned = pulled.record.reference.pinned(&pulled.record.pinned);
        if self.store.reference(&pinned)?.is_none() {
            self.store.set_reference(Record { reference: pinned.clone(), ..pulled.record.clone() })?;
        }
        Ok(pinned)
    }
}

/// A pull as steps of one line each.
struct Steps<'a> {
    name: String,
    count: usize,
    done: usize,
    progress: &'a mut dyn FnMut(&str),
}

impl<'a> Steps<'a> {
    fn new(reference: &Reference, progress: &'a mut dyn FnMut(&str)) -> Self {
        progress(&format!("pulling {reference}"));
        Self { name: reference.to_string(), count: 0, done: 0, progress }
    }
}

impl Progress for Steps<'_> {
    fn on_event(&mut self, event: &Event) {
        match event {
            Event::Blobs(blobs) => self.count = blobs.len(),
            // The config is fetched before anything is counted.
            Event::Done(_) if self.done < self.count => {
                self.done += 1;
                (self.progress)(&format!("pulling {}: layer {} of {}", self.name, self.done, self.count));
            }
            Event::Retrying { reason, after } => {
                (self.progress)(&format!("{reason}; trying again in {} s", after.as_secs()));
            }
            Event::Waiting(_) => (self.progress)("waiting for another bathy that pulls the same"),
            _ => {}
        }
    }
}
