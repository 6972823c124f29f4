//! Places of ephemeral sandboxes, so that they count where the operator limits how many sandboxes there may be.
//!
//! A place is a byte of one file in the state folder, locked by the command for as long as it lives: whatever ends the
//! command, the kernel frees the place. No row of the store does that.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::folder::make_durable_folder;
use crate::paths::Paths;
use crate::policy::{Policy, PolicyError};
use crate::store::{Store, StoreError};
use crate::sys;

const FILE: &str = "ephemeral";
/// More ephemeral sandboxes than a machine runs.
const PLACES: u64 = 1 << 20;

/// No place can be had.
#[derive(Debug, Error)]
pub enum PlaceError {
    /// The file.
    #[error("Cannot use {0}")]
    File(PathBuf, #[source] io::Error),
    /// There are as many sandboxes as there may be.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The store has the persistent ones.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A place, until it is dropped or its process ends.
#[derive(Debug)]
pub struct Place {
    /// Holds the lock.
    _lock: File,
}

impl Place {
    /// Takes a place for one more sandbox beside the others, ephemeral and persistent, if the operator allows that many.
    pub fn take(paths: &Paths, policy: &Policy) -> Result<Self, PlaceError> {
        let path = paths.state.join(FILE);
        let take = || Self::lock(&paths.state).map_err(|error| PlaceError::File(path.clone(), error));
        match policy.sandboxes() {
            None => take(),
            Some(most) => match Store::open(&paths.state)?.while_fewer_than(most, take) {
                Ok(taken) => taken,
                Err(StoreError::TooMany { count }) => {
                    policy.admit(count)?;
                    Err(StoreError::TooMany { count }.into())
                }
                Err(error) => Err(error.into()),
            },
        }
    }

    fn lock(state: &Path) -> io::Result<Self> {
        make_durable_folder(state)?;
        let file = open(state, true)?;
        for byte in 0..PLACES {
            if sys::lock_byte(&file, byte)? {
                return Ok(Self { _lock: file });
            }
        }
        Err(io::Error::other("all places are taken"))
    }
}

/// How many ephemeral sandboxes there are.
pub(crate) fn count(state: &Path) -> io::Result<u32> {
    match open(state, false) {
        Ok(file) => sys::count_locked_bytes(&file, PLACES),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

fn open(state: &Path, create: bool) -> io::Result<File> {
    let mut options = File::options();
    options.create(create).truncate(false).read(true).write(true).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(state.join(FILE))
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;
    use crate::engine::{Choice, Chosen};
    use crate::spec::SandboxSpec;
    use crate::store::NewRecord;

    fn limited(folder: &Path, most: u32) -> (Paths, Policy) {
        let file = folder.join("operator.toml");
        std::fs::write(&file, format!("[ceiling]\nsandboxes = {most}\n")).unwrap();
        let paths = Paths { state: folder.join("state"), cache: folder.join("cache") };
        (paths, Policy::from_files([file]).unwrap())
    }

    fn record(id: &str) -> NewRecord {
        let engine = Choice { engine: Chosen::Uml, reason: String::new() };
        NewRecord { id: id.to_owned(), name: None, spec: SandboxSpec::default(), engine, created_ns: 1 }
    }

    #[test]
    fn ephemeral_and_persistent_sandboxes_count_together_and_places_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let (paths, policy) = limited(folder.path(), 3);
        let mut store = Store::open(&paths.state).unwrap();
        assert_eq!(count(&paths.state).unwrap(), 0);
        let places = [Place::take(&paths, &policy).unwrap(), Place::take(&paths, &policy).unwrap()];
        assert_eq!(count(&paths.state).unwrap(), 2);
        store.insert_at_most(&record("abcdefghijka"), Some(3)).unwrap();
        let refused = store.insert_at_most(&record("abcdefghijkb"), Some(3));
        assert!(matches!(refused, Err(StoreError::TooMany { count: 3 })), "{refused:?}");
        let error = Place::take(&paths, &policy).unwrap_err().to_string();
        assert!(error.contains("the operator allows 3") && error.contains("[ceiling]"), "{error}");
        // Whoever is not limited counts all the same.
        let beside = Place::take(&paths, &Policy::default()).unwrap();
        assert_eq!(count(&paths.state).unwrap(), 3);
        let [first, second] = places;
        drop(first);
        assert!(Place::take(&paths, &policy).is_err(), "the unlimited one has it");
        drop((second, beside));
        store.insert_at_most(&record("abcdefghijkb"), Some(3)).unwrap();
        let last = Place::take(&paths, &policy).unwrap();
        assert!(Place::take(&paths, &policy).is_err());
        drop(last);
        drop(Place::take(&paths, &policy).unwrap());
    }

    #[test]
    fn of_many_at_once_no_more_get_in_than_may() {
        let folder = tempfile::tempdir().unwrap();
        let (paths, policy) = limited(folder.path(), 3);
        drop(Store::open(&paths.state).unwrap());
        let begin = Barrier::new(12);
        let (paths, policy, begin) = (&paths, &policy, &begin);
        let taken: Vec<_> = thread::scope(|scope| {
            let one = |_| {
                scope.spawn(move || {
                    begin.wait();
                    Place::take(paths, policy)
                })
            };
            let all: Vec<_> = (0..12).map(one).collect();
            all.into_iter().filter_map(|one| one.join().unwrap().ok()).collect()
        });
        assert_eq!((taken.len(), count(&paths.state).unwrap()), (3, 3));
    }
}
