//! What is known about sandboxes, on disk, for every process of one user.
//!
//! One SQLite file with a write-ahead log: a process that is killed at any point leaves the last finished change, and readers
//! never wait. What a person relies on (that a sandbox is there, that it was removed, what it may reach) is on the disk when
//! the change has returned. Other changes cost no disk flush: a machine that loses power may lose the last of them, and with
//! its power it has lost the processes that they tell of.
//!
//! The store says what was last written down. Whether a sandbox runs *now* is what its [`life`] lock says.

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
const PATIENCE: Duration = Duration::from_secs(5);
const COLUMNS: &str = "id, name, spec, created_ns, state, started_ns, ended_ns, end_cause, exit_code, monitor_pid, \
    keeper_pid, enforcement, idle_paused, engine, engine_reason";

/// The store cannot do what was asked.
#[derive(Debug, Error)]
pub enum StoreError {
    /// Another sandbox has the name.
    #[error(
        "There is a sandbox `{name}` already. Take another name, or remove that one with `bathy rm {name}`"
    )]
    NameTaken {
        name: String,
    },
    /// No more sandboxes are allowed.
    #[error("There are {count} sandboxes already, which is as many as there may be")]
    TooMany {
        count: u32,
    },
    /// Not a name, or nobody's.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Nothing is called that, or it is no REPL.
    #[error("There is no REPL `{wanted}`{hint}")]
    NoRepl {
        /// What was asked for, harmless for a terminal.
        wanted: String,
        /// What may have been meant.
        hint: String,
    },
    /// The sandbox has been removed.
    #[error("The sandbox {0} has been removed")]
    Removed(String),
    /// The folder or file cannot be made or used.
    #[error("Cannot use {0}")]
    File(PathBuf, #[source] io::Error),
    /// Not a database, or no longer one.
    #[error(
        "The store {path} is damaged. Move it away to start with an empty one: the disks of sandboxes stay in the folder `sandboxes` beside it, `bathy ls` lists them, and `bathy adopt` takes them back"
    )]
    Damaged {
        path: PathBuf,
        #[source]
        source: rusqlite::Error,
    },
    /// A record that this program cannot read.
    #[error(
        "The record of sandbox {id} in {path} cannot be read. `bathy adopt {id}` makes a new one by what stands beside its disk, `bathy rm {id}` removes the sandbox"
    )]
    Record {
        id: String,
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// Made by a later version.
    #[error(
        "The store {path} was made by a later version of bathy (its format is {found}, this one knows {known}). Use that version"
    )]
    Newer {
        path: PathBuf,
        found: usize,
        /// The latest format of this version.
        known: usize,
    },
    /// Other processes did not let it go.
    #[error("The store {0} was busy for {seconds} seconds; is some process stopped in the middle of a change?", seconds = PATIENCE.as_secs())]
    Busy(PathBuf),
    /// The disk is full.
    #[error(
        "The host's disk is full: no room for a change in {0}. Free some space; `bathy rm` frees that of a sandbox"
    )]
    Full(PathBuf),
    /// The disk is not to be written to, and the like.
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
    /// By an index in a file beside it, which takes some space unless another process has made it already.
    Shared,
    /// Not at all: others wait. Looking something up takes no space then.
    Exclusive,
}

#[derive(Debug)]
pub struct Store {
    connection: Connection,
    path: PathBuf,
    /// Whether changes are waited for to reach the disk at present.
    durable: bool,
    locking: Locking,
}

impl Store {
    /// Opens the store in the state folder, and makes it if it is not there. On a full disk it takes the space that is kept for
    /// that, so that a sandbox can be found, ended and removed.
    pub fn open(state: &Path) -> Result<Self, StoreError> {
        let opened = match Self::try_open(state, Locking::Shared) {
            Err(StoreError::Full(_)) if ballast::release(state) => Self::try_open(state, Locking::Shared),
            opened => opened,
        };
        // Others may have taken that space, too.
        let opened = match opened {
            Err(StoreError::Full(_)) => Self::try_open(state, Locking::Exclusive),
            opened => opened,
        };
        if opened.is_ok() {
            ballast::keep(state);
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
            connection.busy_timeout(PATIENCE)?;
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

    /// Does `change`; on a full disk, with the space that is kept for what must be possible there.
    pub fn at_any_price<T>(
        &mut self,
        mut change: impl FnMut(&mut Self) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match change(self) {
            Err(StoreError::Full(_)) if self.path.parent().is_some_and(ballast::release) => change(self),
            result => result,
        }
    }

    /// Whether other processes can use the store beside this one.
    pub fn is_shared(&self) -> bool {
        self.locking == Locking::Shared
    }

    /// Fails on a disk that has not even room for other processes to use the store beside this one.
    pub fn needs_room(&self) -> Result<(), StoreError> {
        if self.is_shared() { Ok(()) } else { Err(StoreError::Full(self.path.clone())) }
    }

    /// On a full disk, gives back the space that is kept for what must be possible there.
    pub fn make_room(&self) {
        if let Some(state) = self.path.parent().filter(|_| ballast::is_full(&self.path)) {
            ballast::release(state);
        }
    }

    /// Writes a new sandbox down.
    pub fn insert(&mut self, new: &NewRecord) -> Result<(), StoreError> {
        self.insert_at_most(new, None)
    }

    /// Writes a new sandbox down, unless there are `most` already.
    pub fn insert_at_most(&mut self, new: &NewRecord, most: Option<u32>) -> Result<(), StoreError> {
        if let Some(name) = &new.name {
            name::check(name)?;
        }
        // Ids become folders.
        if !name::is_id(&new.id) {
            return Err(NameError::Form(new.id.clone()).into());
        }
        let spec = serde_json::to_string(&new.spec).map_err(|source| self.bad_record(&new.id, source))?;
        let change = self.durable_change()?;
        most.map_or(Ok(()), |most| change.fewer_than(most))?;
        // A name that is another's id would make one word mean two sandboxes.
        let taken = "SELECT count(*) FROM sandboxes WHERE name = ?1 OR id = ?1";
        for word in new.name.iter().chain([&new.id]) {
            if change.number(taken, [word])? > 0 {
                return Err(StoreError::NameTaken { name: word.clone() });
            }
        }
        let values = (&new.id, &new.name, spec, record::signed(new.created_ns), State::Created.as_str());
        let row = "INSERT INTO sandboxes (id, name, spec, created_ns, state) VALUES (?, ?, ?, ?, ?)";
        change.run(row, values)?;
        Change::Engine(new.engine.clone()).write(&new.id, &change)?;
        change.finish()
    }

    /// Does something for one more ephemeral sandbox, unless there are `most` sandboxes already. Nothing is added to the
    /// store meanwhile, nor does another process get here.
    pub fn while_fewer_than<T>(&mut self, most: u32, run: impl FnOnce() -> T) -> Result<T, StoreError> {
        let change = self.change()?;
        change.fewer_than(most)?;
        Ok(run())
    }

    /// The sandbox with this id.
    pub fn get(&self, id: &str) -> Result<Option<Record>, StoreError> {
        self.one("id", id)
    }

    /// Whether there is a record of the sandbox with this id that can be read.
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

    /// The sandbox that somebody means by `wanted`: its name, its id, or the beginning of its id.
    pub fn find(&self, wanted: &str) -> Result<Record, StoreError> {
        if let Some(found) = self.by_name(wanted)? {
            return Ok(found);
        }
        if name::is_prefix(wanted) {
            // '{' follows 'z': the range is every id that begins with `wanted`.
            let past = format!("{wanted}{{");
            let query = format!("SELECT {COLUMNS} FROM sandboxes WHERE id >= ? AND id < ? ORDER BY id");
            let mut found = self.records(&query, [wanted, &past])?;
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

    /// Every sandbox whose record can be read, the oldest first.
    pub fn list(&self) -> Result<Vec<Record>, StoreError> {
        let query = format!("SELECT {COLUMNS} FROM sandboxes ORDER BY created_ns, id");
        let raw = self.query(&query, (), record::Raw::read)?;
        Ok(raw.into_iter().filter_map(|raw| raw.parse().ok()).collect())
    }

    /// Moves a sandbox from one of the states `from` to the state `to`, with what else changes. Nothing happens, and the
    /// answer is false, if it is in no such state or is gone.
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

    /// Changes what is known about a sandbox in whatever state it is. The answer is false if it is gone.
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

    /// Changes a sandbox's description by what it is at this moment: of two who do so at once, the later one goes on from
    /// what the earlier one made of it. None if the sandbox is gone.
    pub fn change_spec<E: From<StoreError>>(
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

    /// Forgets a sandbox and its jobs. Of several who do, one is told true.
    pub fn delete(&mut self, id: &str) -> Result<bool, StoreError> {
        let change = self.durable_change()?;
        let deleted = change.run("DELETE FROM sandboxes WHERE id = ?", [id])?;
        change.finish()?;
        Ok(deleted > 0)
    }

    /// Deletes the record of a sandbox that is being removed, and of which `rest` is left. Where the host's disk is too full for that,
    /// the sandbox's disk goes first. False if another process deleted it: that one records the removal.
    pub fn delete_removed(&mut self, id: &str, rest: &Folder) -> Result<bool, StoreError> {
        match self.delete(id) {
            Err(StoreError::Full(_)) => {
                // The folder stays until the record is deleted: by it the next command knows what to go on with.
                rest.free_disk();
                self.at_any_price(|store| store.delete(id))
            }
            deleted => deleted,
        }
    }

    fn one(&self, column: &str, value: &str) -> Result<Option<Record>, StoreError> {
        Ok(self.records(&format!("SELECT {COLUMNS} FROM sandboxes WHERE {column} = ?"), [value])?.pop())
    }

    fn records(&self, query: &str, values: impl Params) -> Result<Vec<Record>, StoreError> {
        let raw = self.query(query, values, record::Raw::read)?;
        let parse = |raw: record::Raw| {
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

    /// Makes a record one that cannot be read.
    #[cfg(test)]
    pub(crate) fn damage_record(&self, id: &str) {
        self.connection.execute("UPDATE sandboxes SET spec = '{' WHERE id = ?", [id]).unwrap();
    }

    /// Begins a change that waits for those of others first: one that begins as a reader could not become a writer
    /// after somebody else was.
    fn change(&mut self) -> Result<Changing<'_>, StoreError> {
        self.begin(false)
    }

    /// The same, for a change that is on the disk when it is finished.
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

/// A change under way. Dropping it undoes it.
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

    /// Fails if there are as many sandboxes already, persistent and ephemeral ones together.
    fn fewer_than(&self, most: u32) -> Result<(), StoreError> {
        let persistent = self.number("SELECT count(*) FROM sandboxes", ())?;
        let state = self.path.parent().unwrap_or(self.path);
        let ephemeral = ephemeral::count(state).map_err(|error| StoreError::File(state.to_owned(), error))?;
        let count = persistent.saturating_add(ephemeral);
        if count >= most { Err(StoreError::TooMany { count }) } else { Ok(()) }
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

/// Makes an empty file that only its owner reads, which is a valid empty database; SQLite gives its log the same mode.
fn make_file(state: &Path, path: &Path) -> io::Result<()> {
    // Closing any descriptor of a file drops this process's record locks on it. Nobody in this process may have the
    // database open while this one is: they all come through here first.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if path.try_exists()? {
        return Ok(());
    }
    make_durable_folder(state)?;
    // Of several processes that find none, one makes it: what the others set aside would be its log.
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

/// A database that was moved away may have left its log, which belongs to no other: SQLite would take it for the new one's.
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
        // A log or an index that cannot grow is told as one of these.
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
