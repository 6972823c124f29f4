//! The one description of a sandbox. Flags, files and requests all become this type; limits are checked here, once.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use bathy_protocol::launch::UmlMode;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::host;

const MIB: u64 = 1024 * 1024;

/// The least memory that a guest starts with.
pub const MIN_MEMORY: Size = Size(64 * MIB);
/// The smallest disk that holds a file system worth having.
pub const MIN_DISK: Size = Size(16 * MIB);
/// The largest disk.
pub const MAX_DISK: Size = Size(1024 * 1024 * MIB);
/// The most host processes of one sandbox.
pub const MAX_PROCESSES: u32 = 32_768;

/// What is wrong with a description.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SpecError {
    /// Not a size.
    #[error("{0:?} is not a size. Write a number of bytes, or a number with K, M, G or T, such as 512M")]
    Size(String),
    /// Not a variable.
    #[error("{0:?} is not an environment variable. Write NAME=value")]
    Variable(String),
    /// Too little memory.
    #[error("{0} of memory is too little for a guest. The least is {MIN_MEMORY}")]
    LittleMemory(Size),
    /// More memory than there is.
    #[error("{wanted} of memory is more than this machine has ({available})")]
    MuchMemory {
        /// Asked for.
        wanted: Size,
        /// There is.
        available: Size,
    },
    /// A disk that is too small or too large.
    #[error("A disk of {0} is not possible. The least is {MIN_DISK}, the most {MAX_DISK}")]
    Disk(Size),
    /// No processor, or more than the engine has.
    #[error(
        "{0} CPUs are not possible: a guest of the uml engine has exactly one, because its kernel and its processes take turns on one host CPU, which is what makes it fast. Use --cpus 1"
    )]
    Cpus(u32),
    /// No or too many processes.
    #[error("A limit of {0} processes is not possible. It is between 16 and {MAX_PROCESSES}")]
    Processes(u32),
    /// Nothing to run.
    #[error("The command is empty. Give a program to run, such as: bathy run -- python3 -c 'print(1)'")]
    EmptyCommand,
}

/// A number of bytes, written as people do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let wrong = || SpecError::Size(text.to_owned());
        let lower = text.trim().to_ascii_lowercase();
        let unit = lower.trim_start_matches(|c: char| c.is_ascii_digit());
        let number: u64 =
            lower.get(..lower.len() - unit.len()).and_then(|n| n.parse().ok()).ok_or_else(wrong)?;
        let factor = match unit {
            "" | "b" => 1,
            "k" | "kb" | "kib" => 1024,
            "m" | "mb" | "mib" => MIB,
            "g" | "gb" | "gib" => 1024 * MIB,
            "t" | "tb" | "tib" => 1024 * 1024 * MIB,
            _ => return Err(wrong()),
        };
        number.checked_mul(factor).map(Self).ok_or_else(wrong)
    }
}

impl TryFrom<String> for Size {
    type Error = SpecError;

    fn try_from(text: String) -> Result<Self, SpecError> {
        text.parse()
    }
}

impl From<Size> for String {
    fn from(size: Size) -> Self {
        size.to_string()
    }
}

impl fmt::Display for Size {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1024 * MIB, "G"), (MIB, "M"), (1024, "K")];
        match units.into_iter().find(|(unit, _)| self.0 >= *unit && self.0.is_multiple_of(*unit)) {
            Some((unit, letter)) => write!(out, "{}{letter}", self.0 / unit),
            None => write!(out, "{}", self.0),
        }
    }
}

/// Which engine runs a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The best that this machine can run.
    #[default]
    Auto,
    /// A hardware virtual machine.
    Kvm,
    /// A jailed User Mode Linux kernel.
    Uml,
}

/// A sandbox, as asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxSpec {
    /// The root image.
    pub image: String,
    /// The engine.
    pub engine: Engine,
    /// Guest memory.
    pub memory: Size,
    /// Processors.
    pub cpus: u32,
    /// Size of the writable disk.
    pub disk: Size,
    /// How many host processes the guest may consist of.
    pub processes: u32,
    /// How the uml engine contains guest processes.
    pub uml_mode: UmlMode,
    /// How long the guest may take to get ready, in milliseconds.
    pub ready_timeout_ms: u64,
}

impl Default for SandboxSpec {
    fn default() -> Self {
        Self {
            image: "default".to_owned(),
            engine: Engine::default(),
            memory: Size(512 * MIB),
            cpus: 1,
            disk: Size(4096 * MIB),
            processes: 1024,
            uml_mode: UmlMode::default(),
            ready_timeout_ms: 30_000,
        }
    }
}

impl SandboxSpec {
    /// Checks every limit and rounds sizes to what devices can have.
    pub fn checked(mut self) -> Result<Self, SpecError> {
        let available = Size(host::total_memory());
        if self.memory < MIN_MEMORY {
            return Err(SpecError::LittleMemory(self.memory));
        }
        if self.memory > available {
            return Err(SpecError::MuchMemory { wanted: self.memory, available });
        }
        if self.disk < MIN_DISK || self.disk > MAX_DISK {
            return Err(SpecError::Disk(self.disk));
        }
        if self.cpus != 1 {
            return Err(SpecError::Cpus(self.cpus));
        }
        if !(16..=MAX_PROCESSES).contains(&self.processes) {
            return Err(SpecError::Processes(self.processes));
        }
        self.memory = Size(self.memory.0.next_multiple_of(MIB));
        self.disk = Size(self.disk.0.next_multiple_of(MIB));
        Ok(self)
    }
}

/// A command to run in a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandSpec {
    /// The program and its arguments.
    pub argv: Vec<Vec<u8>>,
    /// Variables on top of the image's.
    pub env: BTreeMap<String, Vec<u8>>,
    /// Working directory; the image's if absent.
    pub cwd: Option<Vec<u8>>,
    /// User; the image's if absent.
    pub user: Option<String>,
    /// How long it may run.
    pub timeout: Option<Duration>,
}

/// Takes `NAME=value` apart.
pub fn variable(text: &str) -> Result<(String, Vec<u8>), SpecError> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !text.contains('\0') => {
            Ok((name.to_owned(), value.as_bytes().to_vec()))
        }
        _ => Err(SpecError::Variable(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [("512M", 512 * MIB), ("1g", 1024 * MIB), ("64KiB", 65536), ("4096", 4096)] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "M", "12X", "-1", "1.5G", "99999999999G"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written_as_they_are_read() {
        for text in ["512M", "4G", "1K", "1000"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_default_is_possible() {
        let spec = SandboxSpec { memory: MIN_MEMORY, ..SandboxSpec::default() };
        assert_eq!(spec.clone().checked(), Ok(spec));
    }

    #[test]
    fn every_limit_is_enforced() {
        let with = |change: fn(&mut SandboxSpec)| {
            let mut spec = SandboxSpec::default();
            change(&mut spec);
            spec.checked().unwrap_err()
        };
        assert_eq!(with(|s| s.memory = Size(MIB)), SpecError::LittleMemory(Size(MIB)));
        assert!(matches!(with(|s| s.memory = Size(1 << 60)), SpecError::MuchMemory { .. }));
        assert_eq!(with(|s| s.disk = Size(0)), SpecError::Disk(Size(0)));
        assert_eq!(with(|s| s.cpus = 2), SpecError::Cpus(2));
        assert_eq!(with(|s| s.cpus = 0), SpecError::Cpus(0));
        assert_eq!(with(|s| s.processes = 0), SpecError::Processes(0));
    }

    #[test]
    fn unknown_keys_are_refused() {
        assert!(serde_json::from_str::<SandboxSpec>(r#"{"memroy":"1G"}"#).is_err());
        let spec: SandboxSpec = serde_json::from_str(r#"{"memory":"1G"}"#).unwrap();
        assert_eq!(spec.memory, Size(1024 * MIB));
    }

    #[test]
    fn variables_need_a_name() {
        assert_eq!(variable("A=b=c"), Ok(("A".to_owned(), b"b=c".to_vec())));
        assert!(variable("=x").is_err());
        assert!(variable("A").is_err());
    }
}
