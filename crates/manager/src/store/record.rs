//! The record of one sandbox.

use std::fmt;

use bathy_protocol::time;
use bathy_spec::{Choice, Chosen, SandboxSpec};
use rusqlite::Row;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Changing, StoreError};

/// The last recorded state of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It was never started.
    Created,
    Running,
    Paused,
    /// It ran and ended; its disk still exists.
    Stopped,
}

impl State {
    const ALL: [Self; 4] = [Self::Created, Self::Running, Self::Paused, Self::Stopped];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.as_str())
    }
}

/// The record of a new sandbox.
#[derive(Clone, Debug)]
pub struct NewRecord {
    /// The id from [`bathy_spec::name::new_id`].
    pub id: String,
    /// The name that its owner gave it.
    pub name: Option<String>,
    /// The specification, already validated.
    pub spec: SandboxSpec,
    /// The engine; it is chosen again at each start.
    pub engine: Choice,
    /// The creation time in nanoseconds since 1970.
    pub created_ns: u64,
}

/// The stored record of a sandbox. Times are nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Record {
    pub id: String,
    pub name: Option<String>,
    pub spec: SandboxSpec,
    /// The engine of the current or last run, or the one chosen at creation. Absent in records of earlier
    /// versions, which had one engine.
    pub engine: Option<Chosen>,
    pub engine_reason: Option<String>,
    #[serde(rename = "created_at", serialize_with = "time::serialize")]
    pub created_ns: u64,
    /// Its last recorded state.
    pub state: State,
    /// When it last started.
    #[serde(rename = "started_at", serialize_with = "time::serialize_option")]
    pub started_ns: Option<u64>,
    /// When it ended, if it has ended since.
    #[serde(rename = "ended_at", serialize_with = "time::serialize_option")]
    pub ended_ns: Option<u64>,
    pub end_cause: Option<String>,
    /// The exit code of its main command, if the end of that ended the sandbox.
    pub exit_code: Option<i32>,
    /// The pid of its monitor, while it is running.
    pub monitor_pid: Option<u32>,
    /// The pid of its keeper, while it is running.
    pub keeper_pid: Option<u32>,
    /// How its limits are enforced on this machine.
    pub enforcement: Option<Value>,
    /// Whether it is in an idle pause: then the next client resumes it.
    pub idle_paused: bool,
}

impl Record {
    /// The name, or the id if it has none.
    pub fn display_name(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.id)
    }
}

/// A change to a record.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// It started: the last end is cleared.
    Started {
        at_ns: u64,
        monitor_pid: u32,
    },
    Keeper(u32),
    /// The engine, and why it was chosen.
    Engine(Choice),
    /// How its limits are enforced.
    Enforcement(Value),
    /// Whether its pause is an idle pause.
    IdlePaused(bool),
    /// It ended and has no processes.
    Ended {
        at_ns: u64,
        cause: String,
        /// The exit code of its main command, if the end of that ended the sandbox.
        exit_code: Option<i32>,
    },
    /// A new name, or none.
    Name(Option<String>),
}

impl Change {
    pub(super) fn write(&self, id: &str, to: &Changing<'_>) -> Result<(), StoreError> {
        match self {
            Self::Started { at_ns, monitor_pid } => to.run(
                "UPDATE sandboxes SET started_ns = ?, monitor_pid = ?, keeper_pid = NULL, ended_ns = NULL,
                    end_cause = NULL, exit_code = NULL, enforcement = NULL, idle_paused = 0 WHERE id = ?",
                (signed(*at_ns), monitor_pid, id),
            ),
            Self::Keeper(pid) => to.run("UPDATE sandboxes SET keeper_pid = ? WHERE id = ?", (pid, id)),
            Self::Engine(choice) => to.run(
                "UPDATE sandboxes SET engine = ?, engine_reason = ? WHERE id = ?",
                (choice.engine.as_str(), &choice.reason, id),
            ),
            Self::Enforcement(value) => {
                to.run("UPDATE sandboxes SET enforcement = ? WHERE id = ?", (value.to_string(), id))
            }
            Self::IdlePaused(idle) => to.run("UPDATE sandboxes SET idle_paused = ? WHERE id = ?", (idle, id)),
            Self::Ended { at_ns, cause, exit_code } => to.run(
                "UPDATE sandboxes SET ended_ns = ?, end_cause = ?, exit_code = ?, monitor_pid = NULL,
                    keeper_pid = NULL, idle_paused = 0 WHERE id = ?",
                (signed(*at_ns), cause, exit_code, id),
            ),
            Self::Name(name) => {
                let taken = "SELECT count(*) FROM sandboxes WHERE (name = ?1 OR id = ?1) AND id != ?2";
                if let Some(name) = name {
                    bathy_spec::name::check(name)?;
                    if to.number(taken, (name, id))? > 0 {
                        return Err(StoreError::NameTaken { name: name.clone() });
                    }
                    to.no_id_begins_with(name, id)?;
                }
                to.run("UPDATE sandboxes SET name = ? WHERE id = ?", (name, id))
            }
        }
        .map(drop)
    }
}

/// A row whose text columns are not parsed yet.
pub(super) struct RawRecord {
    pub id: String,
    spec: String,
    state: String,
    enforcement: Option<String>,
    engine: Option<String>,
    /// Without the columns above.
    rest: Record,
}

impl RawRecord {
    /// Reads the columns of [`super::COLUMNS`].
    pub fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        let id: String = row.get(0)?;
        let rest = Record {
            id: id.clone(),
            name: row.get(1)?,
            spec: SandboxSpec::default(),
            engine: None,
            engine_reason: row.get(14)?,
            created_ns: unsigned(row.get(3)?),
            state: State::Created,
            started_ns: row.get::<_, Option<i64>>(5)?.map(unsigned),
            ended_ns: row.get::<_, Option<i64>>(6)?.map(unsigned),
            end_cause: row.get(7)?,
            exit_code: row.get(8)?,
            monitor_pid: row.get(9)?,
            keeper_pid: row.get(10)?,
            enforcement: None,
            idle_paused: row.get(12)?,
        };
        Ok(Self {
            id,
            spec: row.get(2)?,
            state: row.get(4)?,
            enforcement: row.get(11)?,
            engine: row.get(13)?,
            rest,
        })
    }

    pub fn parse(self) -> serde_json::Result<Record> {
        let known = State::ALL.into_iter().find(|state| state.as_str() == self.state);
        let unknown = || serde::de::Error::custom(format!("there is no state {:?}", self.state));
        let engine = self.engine.map(|engine| serde_json::from_value(Value::from(engine))).transpose()?;
        Ok(Record {
            engine,
            spec: serde_json::from_str(&self.spec)?,
            state: known.ok_or_else(unknown)?,
            enforcement: self.enforcement.as_deref().map(serde_json::from_str).transpose()?,
            ..self.rest
        })
    }
}

/// SQLite's integers are signed; they overflow in the year 2262.
pub(super) fn signed(nanoseconds: u64) -> i64 {
    i64::try_from(nanoseconds).unwrap_or(i64::MAX)
}

pub(super) fn unsigned(nanoseconds: i64) -> u64 {
    u64::try_from(nanoseconds).unwrap_or(0)
}
