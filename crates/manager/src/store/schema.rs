//! The database schema and its migrations.

use std::thread;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::{Store, StoreError, TIMEOUT, failure};

/// The migrations from an empty file to the present schema. A database stores how many were applied.
/// Migrations are only appended; a published one is never changed.
pub(crate) const STEPS: &[&str] = &[
    "
    CREATE TABLE sandboxes (
        id TEXT NOT NULL PRIMARY KEY,
        name TEXT UNIQUE,
        spec TEXT NOT NULL,
        created_ns INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('created', 'running', 'paused', 'stopped')),
        started_ns INTEGER,
        ended_ns INTEGER,
        end_cause TEXT,
        exit_code INTEGER,
        monitor_pid INTEGER,
        keeper_pid INTEGER,
        enforcement TEXT
    ) STRICT;
    CREATE TABLE jobs (
        sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        argv TEXT NOT NULL,
        user TEXT,
        started_ns INTEGER NOT NULL,
        ended_ns INTEGER,
        exit TEXT,
        exec_id TEXT NOT NULL,
        PRIMARY KEY (sandbox, number)
    ) STRICT, WITHOUT ROWID;
",
    "
    ALTER TABLE sandboxes ADD COLUMN idle_paused INTEGER NOT NULL DEFAULT 0 CHECK (idle_paused IN (0, 1));
    CREATE TABLE repls (
        name TEXT NOT NULL PRIMARY KEY,
        sandbox TEXT NOT NULL UNIQUE REFERENCES sandboxes (id) ON DELETE CASCADE,
        language TEXT NOT NULL,
        context TEXT NOT NULL,
        created_ns INTEGER NOT NULL,
        cells INTEGER NOT NULL DEFAULT 0,
        last_used_ns INTEGER,
        boot TEXT
    ) STRICT;
",
    "
    ALTER TABLE sandboxes ADD COLUMN engine TEXT;
    ALTER TABLE sandboxes ADD COLUMN engine_reason TEXT;
",
];

/// Applies the missing migrations in one transaction.
pub(crate) fn bring_up_to_date(store: &mut Store, steps: &[&str]) -> Result<(), StoreError> {
    let taken = steps_taken(&store.connection).map_err(|error| failure(&store.path, error))?;
    if taken == steps.len() {
        return Ok(());
    }
    use_write_ahead_log(store)?;
    let change = store.change()?;
    // Another process may have applied them meanwhile.
    let taken = steps_taken(&change.transaction).map_err(|error| failure(change.path, error))?;
    let Some(missing) = steps.get(taken..) else {
        return Err(StoreError::Newer { path: change.path.to_owned(), found: taken, known: steps.len() });
    };
    let take = || {
        missing.iter().try_for_each(|step| change.transaction.execute_batch(step))?;
        change.transaction.pragma_update(None, "user_version", i64::try_from(steps.len()).unwrap_or(i64::MAX))
    };
    take().map_err(|error| failure(change.path, error))?;
    change.finish()
}

fn steps_taken(connection: &Connection) -> rusqlite::Result<usize> {
    let taken: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    // A version that no store of ours has is treated like one of a later version.
    Ok(usize::try_from(taken).unwrap_or(usize::MAX))
}

/// Set before the first migration. SQLite does not wait for other processes here, so this does.
fn use_write_ahead_log(store: &Store) -> Result<(), StoreError> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let set = store.connection.pragma_update(None, "journal_mode", "WAL");
        match set.map_err(|error| failure(&store.path, error)) {
            Err(StoreError::Busy(_)) if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
            result => return result,
        }
    }
}
