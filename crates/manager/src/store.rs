//! The records of sandboxes on disk, shared by all processes of one user.
//!
//! The store is one SQLite file with a write-ahead log: a process that is killed at any point leaves the last
//! committed change, and readers never wait. Changes that a user relies on (a sandbox exists, was removed,
//! may reach a destination) are durable when they return. Other changes are not flushed: a power failure may
//! lose the last of them, but it also ends the processes that they describe.
//!
//! The store can be stale. Whether a sandbox is running is decided by its [`life`] lock.

mod ballast;
mod jobs;
pub mod life;
mod record;
mod repls;
mod schema;

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bathy_runtime::ephemeral;
use bathy_runtime::folder::{Folder, make_durable_folder};
use bathy_spec::SandboxSpec;
use bathy_spec::name::{self, NameError};
use rusqlite::config::DbConfig;
use rusqlite::{
    Connection, ErrorCode, OpenFlags, OptionalExtension, Params, Row, Transaction, TransactionBehavior,
};
use thiserror::Error;

pub use jobs::Job;
pub use life::{alive, take_life};
pub use record::{Change, NewRecord, Record, State};
pub use repls::ReplRow;

/// How long a change waits for the changes of other processes.
const TIMEOUT: Duration = Duration::from_secs(5);
const COLUMNS: &str = "id, name, spec, created_ns, state, started_ns, ended_ns, end_cause, exit_code, monitor_pid, \
    keeper_pid, enforcement, idle_paused, engine, engine_reason";

/// A store operation failed.
#[derive(Debug, Error)]
pub enum StoreError {
    /// Another sandbox has the name.
    #[error(
        "There is a sandbox `{name}` already. Take another name, or remove that one with `bathy rm {name}`"
    )]
    NameTaken { name: String },
    /// The name is how another sandbox's id begins, and would stand for another sandbox than before.
    #[error("The id of the sandbox {id} begins with `{name}`, which stands for that one. Take another name")]
    NameOfId { name: String, id: String },
    /// The operator's limit on sandboxes is reached.
    #[error("There are {count} sandboxes already, which is as many as there may be")]
    TooMany { count: u32 },
    /// The name is invalid or unknown.
    #[error(transparent)]
    Name(#[from] NameError),
    /// There is no such REPL.
    #[error("There is no REPL `{wanted}`{hint}")]
    NoRepl {
        /// The requested name, escaped for a terminal.
        wanted: String,
        /// A suggestion, or empty.
        hint: String,
    },
    /// The sandbox has been removed.
    #[error("The sandbox {0} has been removed")]
    Removed(String),
    #[error("Cannot use {0}")]
    File(PathBuf, #[source] io::Error),
    #[error(
        "The store {path} is damaged. Move it away to start with an empty one: the disks of sandboxes stay in the folder `sandboxes` beside it, `bathy ls` lists them, and `bathy adopt` restores them"
    )]
    Damaged {
        path: PathBuf,
        #[source]
        source: rusqlite::Error,
    },
    /// The record cannot be read.
    #[error(
        "The record of sandbox {id} in {path} cannot be read. `bathy adopt {id}` makes a new one from the description beside its disk, `bathy rm {id}` removes the sandbox"
    )]
    Record {
        id: String,
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// The store was written by a later version.
    #[error(
        "The store {path} was made by a later version of bathy (its format is {found}, this one knows {known}). Use that version"
    )]
    Newer {
        path: PathBuf,
        found: usize,
        /// The latest format that this version knows.
        known: usize,
    },
    /// Another process held the lock for too long.
    #[error("The store {0} was busy for {seconds} seconds; is some process stopped in the middle of a change?", seconds = TIMEOUT.as_secs())]
    Busy(PathBuf),
    #[error(
        "The host's disk is full: no space for a change in {0}. Free some space; `bathy rm` frees that of a sandbox"
    )]
    Full(PathBuf),
    /// Any other database error.
    #[error("Cannot use the store {path}")]
    Database {
        path: PathBuf,
        #[source]
        source: rusqlite::Error,
    },
}

/// How the store is shared with other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Locking {
    /// Through an index file beside it, which needs some disk space unless another process has created it.
    Shared,
    /// Not at all: other processes wait. Reading then needs no disk space.
    Exclusive,
}

#[derive(Debug)]
pub struct Store {
    connection: Connection,
    path: PathBuf,
    /// Whether commits are flushed to the disk at present.
    durable: bool,
    locking: Locking,
}

impl Store {
    /// Opens the store in the state folder and creates it if necessary. On a full disk it releases the
    /// reserved space, so that sandboxes can be found, ended and removed.
    pub fn open(state: &Path) -> Result<Self, StoreError> {
        let opened = match Self::try_open(state, Locking::Shared) {
            Err(StoreError::Full(_)) if ballast::release(state) => Self::try_open(state, Locking::Shared),
            opened => opened,
        };
        // Another process may have used that space as well.
        let opened = match opened {
            Err(StoreError::Full(_)) => Self::try_open(state, Locking::Exclusive),
            opened => opened,
        };
        if opened.is_ok() {
            ballast::reserve(state);
        }
        opened
    }

    fn try_open(state: &Path, locking: Locking) -> Result<Self, StoreError> {
        let path = state.join("store.db");
        make_file(state, &path).map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreError::Full(path.clone()),
            _ => StoreError::File(path.clone(), error),
        })?;
        let opened = Connection::open_with_flags(
            &path,
            OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX,
        );
        let connection = opened.map_err(|error| failure(&path, error))?;
        let prepared = || {
            connection.busy_timeout(TIMEOUT)?;
            if locking == Locking::Exclusive {
                connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
            }
            connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_FKEY, true)?;
            connection.pragma_update(None, "synchronous", "NORMAL")
        };
        prepared().map_err(|error| failure(&path, error))?;
        let mut store = Self { connection, path, durable: false, locking };
        schema::bring_up_to_date(&mut store, schema::STEPS)?;
        Ok(store)
    }

    /// Makes a change; on a full disk, with the reserved space.
    pub(crate) fn with_reserve<T>(
        &mut self,
        mut change: impl FnMut(&mut Self) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match change(self) {
            Err(StoreError::Full(_)) if self.path.parent().is_some_and(ballast::release) => change(self),
            result => result,
        }
    }

    /// Whether other processes can use the store at the same time.
    pub(crate) fn is_shared(&self) -> bool {
        self.locking == Locking::Shared
    }

    /// Fails if the disk is too full for other processes to use the store at the same time.
    pub(crate) fn require_shared(&self) -> Result<(), StoreError> {
        if self.is_shared() { Ok(()) } else { Err(StoreError::Full(self.path.clone())) }
    }

    /// On a full disk, releases the reserved space.
    pub(crate) fn release_reserve(&self) {
        if let Some(state) = self.path.parent().filter(|_| ballast::is_full(&self.path)) {
            ballast::release(state);
        }
    }

    /// Inserts the record of a new sandbox.
    pub fn insert(&mut self, new: &NewRecord) -> Result<(), StoreError> {
        self.insert_at_most(new, None)
    }

    /// Inserts the record of a new sandbox, unless there are `most` already.
    pub(crate) fn insert_at_most(&mut self, new: &NewRecord, most: Option<u32>) -> Result<(), StoreError> {
        if let Some(name) = &new.name {
            name::check(name)?;
        }
        // Ids become folder names.
        if !name::is_id(&new.id) {
            return Err(NameError::Form(new.id.clone()).into());
        }
        let spec = serde_json::to_string(&new.spec).map_err(|source| self.bad_record(&new.id, source))?;
        let change = self.durable_change()?;
        most.map_or(Ok(()), |most| change.fewer_than(most))?;
        // A name equal to another sandbox's id would be ambiguous.
        let taken = "SELECT count(*) FROM sandboxes WHERE name = ?1 OR id = ?1";
        for word in new.name.iter().chain([&new.id]) {
            if change.number(taken, [word])? > 0 {
                return Err(StoreError::NameTaken { name: word.clone() });
            }
        }
        let values = (&new.id, &new.name, spec, record::signed(new.created_ns), State::Created.as_str());
        let row = "INSERT INTO sandboxes (id, name, spec, created_ns, state) VALUES (?, ?, ?, ?, ?)";
        if let Some(name) = &new.name {
            change.no_id_begins_with(name, &new.id)?;
        }
        change.run(row, values)?;
        Change::Engine(new.engine.clone()).write(&new.id, &change)?;
        change.finish()
    }

    /// Runs `run` for one more ephemeral sandbox, unless there are `most` sandboxes already. The store stays
    /// locked meanwhile, so no other process can add one.
    pub(crate) fn while_fewer_than<T>(
        &mut self,
        most: u32,
        run: impl FnOnce() -> T,
    ) -> Result<T, StoreError> {
        let change = self.change()?;
        change.fewer_than(most)?;
        Ok(run())
    }

    /// The sandbox with this id.
    pub fn get(&self, id: &str) -> Result<Option<Record>, StoreError> {
        self.one("id", id)
    }

    /// Whether the sandbox with this id has a readable record.
    pub fn knows(&self, id: &str) -> Result<bool, StoreError> {
        match self.get(id) {
            Ok(found) => Ok(found.is_some()),
            Err(StoreError::Record { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The sandbox with this name.
    pub fn by_name(&self, name: &str) -> Result<Option<Record>, StoreError> {
        self.one("name", name)
    }

    /// Finds a sandbox by its name, its id or the beginning of its id. A name wins over the beginning of an id: a
    /// sandbox made later can have an id that begins with an older one's name.
    pub fn find(&self, wanted: &str) -> Result<Record, StoreError> {
        if let Some(found) = self.by_name(wanted)? {
            return Ok(found);
        }
        if name::is_prefix(wanted) {
            let query = format!("SELECT {COLUMNS} FROM sandboxes WHERE id >= ? AND id < ? ORDER BY id");
            let mut found = self.records(&query, [wanted, &past(wanted)])?;
            if found.len() > 1 {
                return Err(
                    name::ambiguous(wanted, found.into_iter().map(|record| record.id).collect()).into()
                );
            }
            if let Some(found) = found.pop() {
                return Ok(found);
            }
        }
        let words = self.query("SELECT id, name FROM sandboxes", (), |row| {
            Ok([row.get::<_, Option<String>>(0)?, row.get::<_, Option<String>>(1)?])
        })?;
        Err(name::unknown(wanted, words.iter().flatten().flatten().map(String::as_str)).into())
    }

    /// All sandboxes whose records are readable, the oldest first.
    pub fn list(&self) -> Result<Vec<Record>, StoreError> {
        let query = format!("SELECT {COLUMNS} FROM sandboxes ORDER BY created_ns, id");
        let raw = self.query(&query, (), record::RawRecord::read)?;
        Ok(raw.into_iter().filter_map(|raw| raw.parse().ok()).collect())
    }

    /// Moves a sandbox from one of the states `from` to the state `to` and applies `changes`. Returns false
    /// and changes nothing if it is in another state or was removed.
    pub fn transition(
        &mut self,
        id: &str,
        from: &[State],
        to: State,
        changes: &[Change],
    ) -> Result<bool, StoreError> {
        let change = self.change()?;
        let found = change.text("SELECT state FROM sandboxes WHERE id = ?", [id])?;
        if !from.iter().any(|state| Some(state.as_str()) == found.as_deref()) {
            return Ok(false);
        }
        change.run("UPDATE sandboxes SET state = ? WHERE id = ?", (to.as_str(), id))?;
        for what in changes {
            what.write(id, &change)?;
        }
        change.finish()?;
        Ok(true)
    }

    /// Applies changes to a sandbox in any state. False if it was removed.
    pub fn update(&mut self, id: &str, changes: &[Change]) -> Result<bool, StoreError> {
        let change = self.change()?;
        if change.number("SELECT count(*) FROM sandboxes WHERE id = ?", [id])? == 0 {
            return Ok(false);
        }
        for what in changes {
            what.write(id, &change)?;
        }
        change.finish()?;
        Ok(true)
    }

    /// Updates a sandbox's specification in one transaction, so that concurrent updates do not overwrite each
    /// other. None if the sandbox was removed.
    pub(crate) fn change_spec<E: From<StoreError>>(
        &mut self,
        id: &str,
        change: impl FnOnce(SandboxSpec) -> Result<SandboxSpec, E>,
    ) -> Result<Option<SandboxSpec>, E> {
        let path = self.path.clone();
        let bad = |source| StoreError::Record { id: id.to_owned(), path: path.clone(), source };
        let changing = self.durable_change()?;
        let Some(text) = changing.text("SELECT spec FROM sandboxes WHERE id = ?", [id])? else {
            return Ok(None);
        };
        let spec = change(serde_json::from_str(&text).map_err(bad)?)?;
        let text = serde_json::to_string(&spec).map_err(bad)?;
        changing.run("UPDATE sandboxes SET spec = ? WHERE id = ?", (text, id))?;
        changing.finish()?;
        Ok(Some(spec))
    }

    /// Deletes a sandbox and its jobs. Of several concurrent calls, one returns true.
    pub fn delete(&mut self, id: &str) -> Result<bool, StoreError> {
        let change = self.durable_change()?;
        let deleted = change.run("DELETE FROM sandboxes WHERE id = ?", [id])?;
        change.finish()?;
        Ok(deleted > 0)
    }

    /// Deletes the record of a sandbox that is being removed; `rest` is its folder. If the host's disk is
    /// full, the sandbox's disk is deleted first. False if another process deleted the record: that process
    /// records the removal.
    pub(crate) fn delete_removed(&mut self, id: &str, rest: &Folder) -> Result<bool, StoreError> {
        match self.delete(id) {
            Err(StoreError::Full(_)) => {
                // The folder stays until the record is deleted: the next command completes the removal by it.
                rest.free_disk();
                self.with_reserve(|store| store.delete(id))
            }
            deleted => deleted,
        }
    }

    fn one(&self, column: &str, value: &str) -> Result<Option<Record>, StoreError> {
        Ok(self.records(&format!("SELECT {COLUMNS} FROM sandboxes WHERE {column} = ?"), [value])?.pop())
    }

    fn records(&self, query: &str, values: impl Params) -> Result<Vec<Record>, StoreError> {
        let raw = self.query(query, values, record::RawRecord::read)?;
        let parse = |raw: record::RawRecord| {
            let id = raw.id.clone();
            raw.parse().map_err(|source| self.bad_record(&id, source))
        };
        raw.into_iter().map(parse).collect()
    }

    fn query<T>(
        &self,
        query: &str,
        values: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, StoreError> {
        let rows = || -> rusqlite::Result<Vec<T>> {
            self.connection.prepare_cached(query)?.query_map(values, read)?.collect()
        };
        rows().map_err(|error| failure(&self.path, error))
    }

    /// Makes a record unreadable.
    #[cfg(test)]
    pub(crate) fn damage_record(&self, id: &str) {
        self.connection.execute("UPDATE sandboxes SET spec = '{' WHERE id = ?", [id]).unwrap();
    }

    /// Begins a transaction as a writer: a transaction that begins as a reader cannot be upgraded once
    /// another process has written.
    fn change(&mut self) -> Result<Changing<'_>, StoreError> {
        self.begin(false)
    }

    /// Like [`Self::change`], but flushed to the disk on commit.
    fn durable_change(&mut self) -> Result<Changing<'_>, StoreError> {
        self.begin(true)
    }

    fn begin(&mut self, durable: bool) -> Result<Changing<'_>, StoreError> {
        if self.durable != durable {
            let level = if durable { "FULL" } else { "NORMAL" };
            let set = self.connection.pragma_update(None, "synchronous", level);
            set.map_err(|error| failure(&self.path, error))?;
            self.durable = durable;
        }
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let transaction = transaction.map_err(|error| failure(&self.path, error))?;
        Ok(Changing { transaction, path: &self.path })
    }

    fn bad_record(&self, id: &str, source: serde_json::Error) -> StoreError {
        StoreError::Record { id: id.to_owned(), path: self.path.clone(), source }
    }
}

/// An open transaction. Dropping it rolls it back.
struct Changing<'a> {
    transaction: Transaction<'a>,
    path: &'a Path,
}

impl Changing<'_> {
    fn run(&self, statement: &str, values: impl Params) -> Result<usize, StoreError> {
        let run = || self.transaction.prepare_cached(statement)?.execute(values);
        run().map_err(|error| failure(self.path, error))
    }

    fn number(&self, query: &str, values: impl Params) -> Result<u32, StoreError> {
        let ask = || self.transaction.prepare_cached(query)?.query_row(values, |row| row.get(0));
        ask().map_err(|error| failure(self.path, error))
    }

    /// Fails if there are `most` sandboxes already, persistent and ephemeral together.
    fn fewer_than(&self, most: u32) -> Result<(), StoreError> {
        let persistent = self.number("SELECT count(*) FROM sandboxes", ())?;
        let state = self.path.parent().unwrap_or(self.path);
        let ephemeral = ephemeral::count(state).map_err(|error| StoreError::File(state.to_owned(), error))?;
        let count = persistent.saturating_add(ephemeral);
        if count >= most { Err(StoreError::TooMany { count }) } else { Ok(()) }
    }

    /// Fails if `name` stands for a sandbox other than `except`, as the beginning of its id.
    fn no_id_begins_with(&self, name: &str, except: &str) -> Result<(), StoreError> {
        if !name::is_prefix(name) {
            return Ok(());
        }
        let begun = "SELECT id FROM sandboxes WHERE id >= ?1 AND id < ?2 AND id != ?3 LIMIT 1";
        match self.text(begun, (name, past(name), except))? {
            Some(id) => Err(StoreError::NameOfId { name: name.to_owned(), id }),
            None => Ok(()),
        }
    }

    fn text(&self, query: &str, values: impl Params) -> Result<Option<String>, StoreError> {
        let ask = || self.transaction.prepare_cached(query)?.query_row(values, |row| row.get(0)).optional();
        ask().map_err(|error| failure(self.path, error))
    }

    fn finish(self) -> Result<(), StoreError> {
        let Self { transaction, path } = self;
        transaction.commit().map_err(|error| failure(path, error))
    }
}

/// The first text after all ids that begin with `prefix`: '{' follows 'z'.
fn past(prefix: &str) -> String {
    format!("{prefix}{{")
}

/// Creates an empty file that only its owner can read, which is a valid empty database. SQLite gives its log
/// the same mode.
fn make_file(state: &Path, path: &Path) -> io::Result<()> {
    // Closing any descriptor of a file drops this process's record locks on it. The mutex makes sure that no
    // other thread has the database open while this one is.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if path.try_exists()? {
        return Ok(());
    }
    make_durable_folder(state)?;
    // One process creates the file: otherwise another would move its new log aside.
    let folder = std::fs::File::open(state)?;
    rustix::fs::flock(&folder, rustix::fs::FlockOperation::LockExclusive)?;
    if path.try_exists()? {
        return Ok(());
    }
    set_logs_aside(path)?;
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// A database that was moved away may have left its log behind, and SQLite would apply it to the new
/// database.
fn set_logs_aside(path: &Path) -> io::Result<()> {
    for end in ["-wal", "-shm"] {
        let mut log = path.as_os_str().to_owned();
        log.push(end);
        let mut aside = log.clone();
        aside.push(".old");
        match std::fs::rename(log, aside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn failure(path: &Path, source: rusqlite::Error) -> StoreError {
    let path = path.to_owned();
    match source.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => StoreError::Full(path),
        // A log or index file that cannot grow is reported as one of these errors.
        Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen) if ballast::is_full(&path) => {
            StoreError::Full(path)
        }
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => StoreError::Damaged { path, source },
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => StoreError::Busy(path),
        _ => StoreError::Database { path, source },
    }
}

#[cfg(test)]
mod tests;
