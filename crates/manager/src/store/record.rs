//! One sandbox, as it is written down and shown.

use std::fmt;

use bathy_protocol::time;
use bathy_spec::{Choice, Chosen, SandboxSpec};
use rusqlite::Row;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Changing, StoreError};

/// What a sandbox was last known to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It has never run.
    Created,
    Running,
    Paused,
    /// It ran and ended; its disk is kept.
    Stopped,
}

impl State {
    const ALL: [Self; 4] = [Self::Created, Self::Running, Self::Paused, Self::Stopped];

    /// As it is written.
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

/// A sandbox to write down.
#[derive(Clone, Debug)]
pub struct NewRecord {
    /// The id from [`bathy_spec::name::new_id`].
    pub id: String,
    /// What its owner calls it.
    pub name: Option<String>,
    /// The specification, already validated.
    pub spec: SandboxSpec,
    /// What will run it, unless that changes before it is started.
    pub engine: Choice,
    /// When it was made: nanoseconds since 1970.
    pub created_ns: u64,
}

/// A sandbox that was written down. Times are nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Record {
    pub id: String,
    pub name: Option<String>,
    /// What was asked for.
    pub spec: SandboxSpec,
    /// What runs it, ran it last, or would have when it was made. Earlier versions knew one engine and did not say.
    pub engine: Option<Chosen>,
    pub engine_reason: Option<String>,
    /// When it was made.
    #[serde(rename = "created_at", serialize_with = "time::serialize")]
    pub created_ns: u64,
    /// What it was last known to be.
    pub state: State,
    /// When it last started.
    #[serde(rename = "started_at", serialize_with = "time::serialize_option")]
    pub started_ns: Option<u64>,
    /// When it ended, if it did after that.
    #[serde(rename = "ended_at", serialize_with = "time::serialize_option")]
    pub ended_ns: Option<u64>,
    pub end_cause: Option<String>,
    /// How its main command ended, if that is how it ended.
    pub exit_code: Option<i32>,
    /// Its monitor's process, while it runs.
    pub monitor_pid: Option<u32>,
    /// Its keeper's process, while it runs.
    pub keeper_pid: Option<u32>,
    /// How its limits are enforced on this machine.
    pub enforcement: Option<Value>,
    /// Whether it is paused because nobody uses it: then the next client resumes it.
    pub idle_paused: bool,
}

impl Record {
    /// What people call it.
    pub fn display_name(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.id)
    }
}

/// Something that changes about a sandbox.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// It starts: what is known about its last end is forgotten.
    Started {
        at_ns: u64,
        monitor_pid: u32,
    },
    Keeper(u32),
    /// What runs it, and why.
    Engine(Choice),
    /// How its limits are enforced.
    Enforcement(Value),
    /// Whether its pause is for want of clients.
    IdlePaused(bool),
    /// It ended: it has no processes any more.
    Ended {
        at_ns: u64,
        cause: String,
        /// How its main command ended, if that is how.
        exit_code: Option<i32>,
    },
    /// Another name, or none.
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
                }
                to.run("UPDATE sandboxes SET name = ? WHERE id = ?", (name, id))
            }
        }
        .map(drop)
    }
}

/// A row, before its texts are understood.
pub(super) struct Raw {
    pub id: String,
    spec: String,
    state: String,
    enforcement: Option<String>,
    engine: Option<String>,
    /// With the texts above left open.
    rest: Record,
}

impl Raw {
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

/// SQLite's integers are signed; the year 2262 is the last that fits.
pub(super) fn signed(nanoseconds: u64) -> i64 {
    i64::try_from(nanoseconds).unwrap_or(i64::MAX)
}

pub(super) fn unsigned(nanoseconds: i64) -> u64 {
    u64::try_from(nanoseconds).unwrap_or(0)
}
