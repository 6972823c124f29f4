//! The specification of a sandbox. Flags, files and requests all become this type, which is validated here.

mod disk;
mod engine;
mod network;
mod units;

use std::collections::BTreeMap;
use std::time::Duration;

use bathy_policy::{NetworkPolicy, PublishedPort};
use bathy_protocol::Restriction;
use bathy_protocol::launch::UmlMode;
use bathy_protocol::network::NetworkLimits;
use bathy_registry::{Digest, ReferenceError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::host;

pub use disk::{DiskLimits, MIN_BANDWIDTH, MIN_FLUSHES};
pub use engine::{Choice, Chosen};
pub use units::{CpuQuota, Seconds, Size};

const MIB: u64 = 1024 * 1024;

/// The minimum memory of a guest.
pub const MIN_MEMORY: Size = Size(64 * MIB);
/// The minimum size of a disk, for a usable file system.
pub const MIN_DISK: Size = Size(16 * MIB);
pub const MAX_DISK: Size = Size(1024 * 1024 * MIB);
/// The maximum number of host processes of a sandbox.
pub const MAX_PROCESSES: u32 = 32_768;
/// The minimum size limit of a sandbox's logs.
pub const MIN_LOG: Size = Size(MIB);
/// The maximum size limit of a sandbox's logs.
pub const MAX_LOG: Size = Size(1024 * MIB);

pub const MAX_PORTS: usize = 64;
pub const MAX_CONNECTIONS: u32 = 16_384;

/// The maximum size of a sandbox's environment variables, names and values together.
pub const MAX_ENVIRONMENT: usize = 128 * 1024;
pub const MAX_LABELS: usize = 64;

const MAX_LABEL_KEY: usize = 63;
const MAX_LABEL_VALUE: usize = 256;
const MAX_USER: usize = 128;
const MAX_PATH: usize = 4095;

/// A specification is invalid.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SpecError {
    #[error("{0:?} is not a size. Write a number of bytes, or a number with K, M, G or T, such as 512M")]
    Size(String),
    #[error("{0:?} is not an environment variable. Write NAME=value")]
    Variable(String),
    #[error("{0} of memory is too little for a guest. The least is {MIN_MEMORY}")]
    LittleMemory(Size),
    /// More memory than the machine has.
    #[error("{wanted} of memory is more than this machine has ({})", available.rounded())]
    MuchMemory { wanted: Size, available: Size },
    /// The disk size is out of range.
    #[error("A disk of {0} is not possible. The least is {MIN_DISK}, the most {MAX_DISK}")]
    Disk(Size),
    /// Too little bandwidth for a guest to become ready.
    #[error(
        "The disk limit `{name}` of {wanted} is too little for a guest. The least is {MIN_BANDWIDTH} in a second"
    )]
    Bandwidth { name: &'static str, wanted: Size },
    /// Too few flushes for a guest to become ready.
    #[error("{0} flushes of the disk in a second are too few for a guest. The least is {MIN_FLUSHES}")]
    Flushes(u32),
    #[error("A sandbox without a CPU is not possible. Use --cpus 1")]
    NoCpu,
    /// More processors than the uml engine supports.
    #[error(
        "{wanted} CPUs are not possible: a guest of the uml engine has exactly one, because its kernel and its processes take turns on one host CPU, which is what makes it fast. Use --cpus 1. More take the kvm engine, and the uml engine is used here: {reason}"
    )]
    UmlCpus {
        wanted: u32,
        /// Why the uml engine is used.
        reason: String,
    },
    /// More processors than the machine has.
    #[error(
        "{wanted} CPUs are more than a sandbox can have on this machine ({available}). Use --cpus {available}"
    )]
    ManyCpus { wanted: u32, available: u32 },
    /// A setting of the other engine.
    #[error(
        "The mode {mode} belongs to the uml engine, and the kvm engine is used here: {reason}. Leave uml_mode (--uml-mode) out, or use --engine uml"
    )]
    UmlMode {
        mode: &'static str,
        /// Why the kvm engine is used.
        reason: String,
    },
    /// The number of processes is out of range.
    #[error("A limit of {0} processes is not possible. It is between 16 and {MAX_PROCESSES}")]
    Processes(u32),
    /// The text is not a duration.
    #[error(
        "{0:?} is not a length of time. Write a number of seconds, or numbers with ms, s, m, h or d, such as 15m or 1m30s"
    )]
    Seconds(String),
    /// Not a number of processors.
    #[error("{0:?} is not a number of processors. Write a number such as 0.5")]
    Quota(String),
    /// The quota is out of range.
    #[error(
        "A CPU quota of {wanted} is not possible. It is between {} and {cpus}, the CPUs of the sandbox",
        CpuQuota::MIN
    )]
    QuotaRange {
        wanted: CpuQuota,
        /// The processors of the sandbox.
        cpus: u32,
    },
    /// The log size is out of range.
    #[error("A log size of {0} is not possible. It is between {MIN_LOG} and {MAX_LOG}")]
    LogSize(Size),
    /// A time limit is zero.
    #[error("{0} is zero, which would end the sandbox at once. Leave it out for no limit")]
    NoTime(&'static str),
    /// The idle timeout for pausing is zero.
    #[error(
        "pause_idle is zero, which would pause the sandbox as soon as it runs. Leave it out for no pause"
    )]
    PauseAtOnce,
    /// The working directory is not an absolute path.
    #[error("{0:?} is not a working directory. Give an absolute path in the sandbox")]
    Workdir(String),
    /// The user is invalid.
    #[error("{0:?} is not a user. Write a name or a number, with :group if wanted")]
    User(String),
    /// The environment variables are too large.
    #[error(
        "The sandbox's environment variables have {0} bytes; the most is {MAX_ENVIRONMENT}. Copy what is longer into a file, with bathy cp"
    )]
    Environment(usize),
    /// There are too many labels.
    #[error("{0} labels are too many. The most is {MAX_LABELS}")]
    Labels(usize),
    /// A label is invalid.
    #[error(
        "{0:?} is not a label. Write key=value: the key has 1 to {MAX_LABEL_KEY} letters, digits, '.', '_', '/' or '-', the value at most {MAX_LABEL_VALUE} characters, none of them a control character"
    )]
    Label(String),
    /// An argument contains a NUL character.
    #[error("An argument of the command contains a NUL character, which no program can be given")]
    NulInCommand,
    /// The network policy or a published port is invalid.
    #[error(transparent)]
    Network(#[from] bathy_policy::PolicyError),
    /// A port is published twice.
    #[error("The port {0} of the host is published twice. Leave one of them out")]
    PublishedTwice(PublishedPort),
    /// Too many ports are published.
    #[error("{0} ports are published. The most is {MAX_PORTS}")]
    Ports(usize),
    /// A network limit is zero.
    #[error("The network limit `{0}` is zero. For a sandbox without a network use --net none")]
    NoNetwork(&'static str),
    /// More connections than a gateway supports.
    #[error("{0} connections at once are not possible. The most is {MAX_CONNECTIONS}")]
    Connections(u32),
    /// The image's name is invalid.
    #[error(transparent)]
    Image(#[from] ReferenceError),
    #[error("The command is empty. Give a program to run, such as: bathy run -- python3 -c 'print(1)'")]
    EmptyCommand,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The best engine that this machine supports.
    #[default]
    Auto,
    /// A virtual machine with hardware support.
    Kvm,
    /// A jailed User Mode Linux kernel.
    Uml,
}

impl Engine {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Kvm => "kvm",
            Self::Uml => "uml",
        }
    }
}

/// How strictly commands are confined; the later variant is stricter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Security {
    /// A command has the privileges of its user in the guest.
    #[default]
    Default,
    /// Not root, no new privileges, no capabilities, nosuid and nodev everywhere, and a read-only root.
    Restricted,
}

impl Security {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Restricted => "restricted",
        }
    }
}

/// The specification of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxSpec {
    /// The name of a recipe, or a reference as docker reads it.
    pub image: String,
    pub engine: Engine,
    pub memory: Size,
    pub cpus: u32,
    /// The size of the writable disk.
    pub disk: Size,
    /// The rate limits on the disks.
    pub disk_limits: DiskLimits,
    /// The limit on host processes of the guest.
    pub processes: u32,
    /// How the uml engine isolates guest processes; by default see [`Self::mode`].
    pub uml_mode: Option<UmlMode>,
    /// How long the guest may take to become ready, in milliseconds.
    pub ready_timeout_ms: u64,
    /// Environment variables of every command, in addition to the image's.
    pub env: BTreeMap<String, String>,
    /// The working directory of every command; by default the image's.
    pub workdir: Option<String>,
    /// The user of every command; by default the image's.
    pub user: Option<String>,
    /// The main command; none if empty.
    pub command: Vec<String>,
    /// Labels by which the user finds sandboxes.
    pub labels: BTreeMap<String, String>,
    /// How strictly commands are confined.
    pub security: Security,
    /// Whether restricted commands may write to the root.
    pub writable_root: bool,
    /// The CPU quota; by default all of `cpus`.
    pub cpu_quota: Option<CpuQuota>,
    /// The size limit of job output and console logs together.
    pub log_size: Size,
    /// How long the sandbox may run; unlimited if absent.
    pub max_duration: Option<Seconds>,
    /// How long it may run without a client before it is stopped; unlimited if absent.
    pub idle_timeout: Option<Seconds>,
    /// How long it may run without a client before it is paused until the next client connects; never if
    /// absent.
    pub pause_idle: Option<Seconds>,
    /// Whether it is removed, with its disk and logs, when it has ended.
    pub auto_remove: bool,
    pub network: NetworkPolicy,
    pub network_limits: NetworkLimits,
    pub ports: Vec<PublishedPort>,
    /// The ceilings of its creator on the network policy, in addition to those of every sandbox. Not settable
    /// by files and options.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ceilings: Vec<NetworkPolicy>,
    /// What a registry had under the image's name when the sandbox was created: a moved tag does not change an existing
    /// sandbox. Not settable by files and options.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<Digest>,
}

impl Default for SandboxSpec {
    fn default() -> Self {
        Self {
            image: "default".to_owned(),
            engine: Engine::default(),
            memory: Size(512 * MIB),
            cpus: 1,
            disk: Size(4096 * MIB),
            disk_limits: DiskLimits::default(),
            processes: 1024,
            uml_mode: None,
            ready_timeout_ms: 30_000,
            env: BTreeMap::new(),
            workdir: None,
            user: None,
            command: Vec::new(),
            labels: BTreeMap::new(),
            security: Security::default(),
            writable_root: false,
            cpu_quota: None,
            log_size: Size(16 * MIB),
            max_duration: None,
            idle_timeout: None,
            pause_idle: None,
            auto_remove: false,
            network: NetworkPolicy::default(),
            network_limits: NetworkLimits::default(),
            ports: Vec::new(),
            ceilings: Vec::new(),
            image_digest: None,
        }
    }
}

impl SandboxSpec {
    /// The restriction of commands, as the guest gets it.
    pub fn restriction(&self) -> Option<Restriction> {
        (self.security == Security::Restricted).then_some(Restriction { writable_root: self.writable_root })
    }

    /// Validates all limits that do not depend on the engine, and rounds sizes to what devices support. The
    /// others are for [`Self::checked_for`].
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
        if self.cpus == 0 {
            return Err(SpecError::NoCpu);
        }
        if !(16..=MAX_PROCESSES).contains(&self.processes) {
            return Err(SpecError::Processes(self.processes));
        }
        if let Some(wanted) = self.cpu_quota
            && !(CpuQuota::MIN.thousandths()..=self.cpus.saturating_mul(1000)).contains(&wanted.thousandths())
        {
            return Err(SpecError::QuotaRange { wanted, cpus: self.cpus });
        }
        if !(MIN_LOG..=MAX_LOG).contains(&self.log_size) {
            return Err(SpecError::LogSize(self.log_size));
        }
        for (time, name) in [(self.max_duration, "max_duration"), (self.idle_timeout, "idle_timeout")] {
            if time.is_some_and(|time| time.as_millis() == 0) {
                return Err(SpecError::NoTime(name));
            }
        }
        if self.pause_idle.is_some_and(|time| time.as_millis() == 0) {
            return Err(SpecError::PauseAtOnce);
        }
        self.check_disk_limits()?;
        self.check_texts()?;
        self.check_network()?;
        self.memory = Size(self.memory.0.next_multiple_of(MIB));
        self.disk = Size(self.disk.0.next_multiple_of(MIB));
        Ok(self)
    }

    fn check_texts(&self) -> Result<(), SpecError> {
        self.root_image()?;
        for (name, value) in &self.env {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                return Err(SpecError::Variable(format!("{name}={value}")));
            }
        }
        // As a program gets it: NAME=value and a terminator.
        let environment = self.env.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
        if environment > MAX_ENVIRONMENT {
            return Err(SpecError::Environment(environment));
        }
        if self.labels.len() > MAX_LABELS {
            return Err(SpecError::Labels(self.labels.len()));
        }
        let impossible =
            |path: &&String| !path.starts_with('/') || path.contains('\0') || path.len() > MAX_PATH;
        if let Some(path) = self.workdir.as_ref().filter(impossible) {
            return Err(SpecError::Workdir(path.clone()));
        }
        let is_invalid = |user: &&String| {
            user.is_empty()
                || user.len() > MAX_USER
                || user.contains(|c: char| c.is_control() || c.is_whitespace())
        };
        if let Some(user) = self.user.as_ref().filter(is_invalid) {
            return Err(SpecError::User(user.clone()));
        }
        if self.command.first().is_some_and(String::is_empty) {
            return Err(SpecError::EmptyCommand);
        }
        if self.command.iter().any(|argument| argument.contains('\0')) {
            return Err(SpecError::NulInCommand);
        }
        self.labels.iter().try_for_each(|(key, value)| check_label(key, value))
    }
}

/// A command to run in a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandSpec {
    /// The program and its arguments.
    pub argv: Vec<Vec<u8>>,
    /// Environment variables in addition to the image's.
    pub env: BTreeMap<String, Vec<u8>>,
    /// The working directory; by default the image's.
    pub cwd: Option<Vec<u8>>,
    /// The user; by default the image's.
    pub user: Option<String>,
    pub timeout: Option<Duration>,
}

fn check_label(key: &str, value: &str) -> Result<(), SpecError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '/' | '-');
    let key_fits = (1..=MAX_LABEL_KEY).contains(&key.len()) && key.chars().all(fits);
    let value_fits = value.chars().count() <= MAX_LABEL_VALUE && !value.contains(char::is_control);
    if key_fits && value_fits { Ok(()) } else { Err(SpecError::Label(format!("{key}={value}"))) }
}

/// Parses a label written as `key=value`.
pub fn label(text: &str) -> Result<(String, String), SpecError> {
    let (key, value) = text.split_once('=').ok_or_else(|| SpecError::Label(text.to_owned()))?;
    check_label(key, value)?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Parses an environment variable written as `NAME=value`.
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
        assert_eq!(with(|s| s.cpus = 0), SpecError::NoCpu);
        assert_eq!(with(|s| s.processes = 0), SpecError::Processes(0));
        let half_more = CpuQuota::from_thousandths(1500);
        assert_eq!(
            with(|s| s.cpu_quota = Some(CpuQuota::from_thousandths(1500))),
            SpecError::QuotaRange { wanted: half_more, cpus: 1 }
        );
        assert!(matches!(
            with(|s| s.cpu_quota = Some(CpuQuota::from_thousandths(0))),
            SpecError::QuotaRange { .. }
        ));
        assert_eq!(with(|s| s.log_size = Size(MIB - 1)), SpecError::LogSize(Size(MIB - 1)));
        assert!(matches!(with(|s| s.log_size = Size(1025 * MIB)), SpecError::LogSize(_)));
        assert_eq!(
            with(|s| s.max_duration = Some(Seconds::from_millis(0))),
            SpecError::NoTime("max_duration")
        );
        assert_eq!(
            with(|s| s.idle_timeout = Some(Seconds::from_millis(0))),
            SpecError::NoTime("idle_timeout")
        );
        assert_eq!(with(|s| s.pause_idle = Some(Seconds::from_millis(0))), SpecError::PauseAtOnce);
    }

    #[test]
    fn texts_that_cannot_be_used_are_refused() {
        let with = |change: &dyn Fn(&mut SandboxSpec)| {
            let mut spec = SandboxSpec::default();
            change(&mut spec);
            spec.checked().err()
        };
        for name in ["", "A=B", "A\0"] {
            let error = with(&|s| drop(s.env.insert(name.to_owned(), "x".to_owned())));
            assert!(matches!(error, Some(SpecError::Variable(_))), "{name:?}");
        }
        for path in ["", "tmp", "/a\0b", &"/x".repeat(3000)] {
            assert!(
                matches!(with(&|s| s.workdir = Some(path.to_owned())), Some(SpecError::Workdir(_))),
                "{path:?}"
            );
        }
        for user in ["", "a b", "root\n", &"u".repeat(200)] {
            assert!(
                matches!(with(&|s| s.user = Some(user.to_owned())), Some(SpecError::User(_))),
                "{user:?}"
            );
        }
        assert_eq!(with(&|s| s.command = vec![String::new()]), Some(SpecError::EmptyCommand));
        assert_eq!(
            with(&|s| s.command = vec!["a".to_owned(), "b\0".to_owned()]),
            Some(SpecError::NulInCommand)
        );
        assert_eq!(with(&|s| s.command = vec!["a".to_owned(), String::new()]), None);
    }

    #[test]
    fn labels_have_a_form() {
        assert_eq!(label("team/a=x=y"), Ok(("team/a".to_owned(), "x=y".to_owned())));
        assert_eq!(label("a="), Ok(("a".to_owned(), String::new())));
        assert!(label(&format!("a={}", "\u{e9}".repeat(256))).is_ok());
        let (long_key, long_value) = (format!("{}=x", "k".repeat(64)), format!("a={}", "v".repeat(257)));
        for text in ["a", "=x", "a b=x", "\u{e9}=x", "a=\u{1b}[2J", "a=x\n", &long_key, &long_value] {
            assert!(matches!(label(text), Err(SpecError::Label(_))), "{text:?}");
        }
        let labels = BTreeMap::from([("a b".to_owned(), "x".to_owned())]);
        let error = SandboxSpec { labels, ..SandboxSpec::default() }.checked().unwrap_err();
        assert_eq!(error, SpecError::Label("a b=x".to_owned()));
    }

    #[test]
    fn c8_variables_and_labels_have_a_most_in_all() {
        let with = |env: &[(&str, usize)]| {
            let env = env.iter().map(|(name, length)| ((*name).to_owned(), "x".repeat(*length))).collect();
            SandboxSpec { env, ..SandboxSpec::default() }.checked().map(drop)
        };
        let half = MAX_ENVIRONMENT / 2 - 3;
        assert_eq!(with(&[("A", half), ("B", half)]), Ok(()));
        let error = with(&[("A", half), ("B", half + 1)]).unwrap_err();
        assert_eq!(error, SpecError::Environment(MAX_ENVIRONMENT + 1));
        let labelled = |count| {
            let labels = (0..count).map(|number| (format!("l{number}"), String::new())).collect();
            SandboxSpec { labels, ..SandboxSpec::default() }.checked().map(drop)
        };
        assert_eq!((labelled(64), labelled(65)), (Ok(()), Err(SpecError::Labels(65))));
    }

    #[test]
    fn a_description_survives_being_written_down() {
        let spec = SandboxSpec {
            env: BTreeMap::from([("A".to_owned(), "b\"\n".to_owned())]),
            command: vec!["sleep".to_owned(), "1".to_owned()],
            cpu_quota: Some(CpuQuota::from_thousandths(333)),
            max_duration: Some(Seconds::from_millis(90_000)),
            pause_idle: Some(Seconds::from_millis(1500)),
            auto_remove: true,
            security: Security::Restricted,
            ..SandboxSpec::default()
        };
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<SandboxSpec>(&text).unwrap(), spec);
        assert!(text.contains("\"security\":\"restricted\""), "{text}");
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
