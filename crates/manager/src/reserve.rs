//! Counts ephemeral and persistent sandboxes together, where the operator limits their number.

use std::io;
use std::path::PathBuf;

use bathy_runtime::ephemeral::{self, Reservation};
use bathy_spec::operator::{Operator, OperatorError};
use bathy_spec::paths::Paths;
use thiserror::Error;

use crate::store::{Store, StoreError};

/// No further ephemeral sandbox can be started.
#[derive(Debug, Error)]
pub enum ReserveError {
    #[error("Cannot use {0}")]
    File(PathBuf, #[source] io::Error),
    /// The operator's limit is reached.
    #[error(transparent)]
    Operator(#[from] OperatorError),
    /// The store, which holds the persistent sandboxes, failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Reserves a place for one more ephemeral sandbox, if the operator's limit allows it.
pub fn reserve(paths: &Paths, operator: &Operator) -> Result<Reservation, ReserveError> {
    let take = || {
        Reservation::take(&paths.state)
            .map_err(|error| ReserveError::File(ephemeral::file(&paths.state), error))
    };
    let Some(most) = operator.sandboxes() else { return take() };
    match Store::open(&paths.state)?.while_fewer_than(most, take) {
        Ok(taken) => taken,
        Err(StoreError::TooMany { count }) => {
            operator.admit(count)?;
            Err(StoreError::TooMany { count }.into())
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Barrier;
    use std::thread;

    use bathy_runtime::ephemeral::count;
    use bathy_spec::{Choice, Chosen, SandboxSpec};

    use super::*;
    use crate::store::NewRecord;

    fn limited(folder: &Path, most: u32) -> (Paths, Operator) {
        let file = folder.join("operator.toml");
        std::fs::write(&file, format!("[ceiling]\nsandboxes = {most}\n")).unwrap();
        let paths = Paths { state: folder.join("state"), cache: folder.join("cache") };
        (paths, Operator::from_files([file]).unwrap())
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
        let places = [reserve(&paths, &policy).unwrap(), reserve(&paths, &policy).unwrap()];
        assert_eq!(count(&paths.state).unwrap(), 2);
        store.insert_at_most(&record("abcdefghijka"), Some(3)).unwrap();
        let refused = store.insert_at_most(&record("abcdefghijkb"), Some(3));
        assert!(matches!(refused, Err(StoreError::TooMany { count: 3 })), "{refused:?}");
        let error = reserve(&paths, &policy).unwrap_err().to_string();
        assert!(error.contains("the operator allows 3") && error.contains("[ceiling]"), "{error}");
        // A sandbox without a limit is counted as well.
        let beside = reserve(&paths, &Operator::default()).unwrap();
        assert_eq!(count(&paths.state).unwrap(), 3);
        let [first, second] = places;
        drop(first);
        assert!(reserve(&paths, &policy).is_err(), "the unlimited one has it");
        drop((second, beside));
        store.insert_at_most(&record("abcdefghijkb"), Some(3)).unwrap();
        let last = reserve(&paths, &policy).unwrap();
        assert!(reserve(&paths, &policy).is_err());
        drop(last);
        drop(reserve(&paths, &policy).unwrap());
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
                    reserve(paths, policy)
                })
            };
            let all: Vec<_> = (0..12).map(one).collect();
            all.into_iter().filter_map(|one| one.join().unwrap().ok()).collect()
        });
        assert_eq!((taken.len(), count(&paths.state).unwrap()), (3, 3));
    }
}
