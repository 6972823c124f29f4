//! What the operator allows: a floor that is raised to and ceilings that are refused beyond. Callers narrow it and
//! never widen it; of two files, the stricter one counts.

use std::env;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

use crate::config::{self, ConfigError};
use crate::spec::{CpuQuota, SandboxSpec, Seconds, Security, Size};

/// The machine's file.
pub const SYSTEM_FILE: &str = "/etc/bathysphere/config.toml";
/// Names the one file to use instead.
pub const VARIABLE: &str = "BATHYSPHERE_CONFIG";

/// What the operator does not allow, or a policy that cannot be read.
#[derive(Debug, Error)]
pub enum PolicyError {
    /// A file.
    #[error("The operator's configuration cannot be used")]
    File(#[from] ConfigError),
    /// More than a ceiling.
    #[error("{what} of {wanted} is more than the operator allows: the most is {most}, by {file}")]
    Ceiling {
        /// What is limited.
        what: &'static str,
        /// Asked for.
        wanted: String,
        /// Allowed.
        most: String,
        /// Who says so.
        file: PathBuf,
    },
    /// As many sandboxes as there may be.
    #[error(
        "There are {count} sandboxes, and the operator allows {most}, by {file}. Remove one with `bathy rm`"
    )]
    Sandboxes {
        /// There are.
        count: u32,
        /// Allowed.
        most: u32,
        /// Who says so.
        file: PathBuf,
    },
}

/// The form of a file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Form {
    floor: Floor,
    ceiling: Ceiling,
    audit: Audit,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Floor {
    security: Option<Security>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Ceiling {
    memory: Option<Size>,
    disk: Option<Size>,
    processes: Option<u32>,
    cpus: Option<u32>,
    cpu_quota: Option<CpuQuota>,
    max_duration: Option<Seconds>,
    idle_timeout: Option<Seconds>,
    log_size: Option<Size>,
    sandboxes: Option<u32>,
}

/// How much of the audit log is kept. Of two files, each number counts that keeps more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Audit {
    /// A file of the log is closed at this size.
    pub rotate_size: Option<Size>,
    /// How many closed files are kept.
    pub keep: Option<u32>,
}

/// A value, and the file that says so.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Limit<T> {
    value: T,
    file: PathBuf,
}

/// Everything that the operator says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// How much of the audit log is kept.
    pub audit: Audit,
    security: Option<Limit<Security>>,
    memory: Option<Limit<Size>>,
    disk: Option<Limit<Size>>,
    processes: Option<Limit<u32>>,
    cpus: Option<Limit<u32>>,
    cpu_quota: Option<Limit<CpuQuota>>,
    max_duration: Option<Limit<Seconds>>,
    idle_timeout: Option<Limit<Seconds>>,
    log_size: Option<Limit<Size>>,
    sandboxes: Option<Limit<u32>>,
}

/// A description that the operator allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// The description.
    pub spec: SandboxSpec,
    /// What was made stricter than asked for, in sentences for the caller.
    pub notes: Vec<String>,
}

impl Policy {
    /// The policy that holds for the caller.
    pub fn load() -> Result<Self, PolicyError> {
        if let Some(path) = env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
            return Self::default().with(Path::new(&path));
        }
        let own = own_file(|name| env::var_os(name).map(PathBuf::from));
        Self::from_files([PathBuf::from(SYSTEM_FILE)].into_iter().chain(own))
    }

    /// The policy of several files; those that do not exist say nothing.
    pub fn from_files(paths: impl IntoIterator<Item = PathBuf>) -> Result<Self, PolicyError> {
        paths.into_iter().try_fold(Self::default(), |policy, path| match policy.clone().with(&path) {
            Err(PolicyError::File(ConfigError::Read(_, error)))
                if error.kind() == io::ErrorKind::NotFound =>
            {
                Ok(policy)
            }
            result => result,
        })
    }

    fn with(mut self, path: &Path) -> Result<Self, PolicyError> {
        let values = Value::Object(config::read::<Form>(path)?);
        let form: Form = serde_json::from_value(values).map_err(|error| ConfigError::Flag {
            key: path.display().to_string(),
            reason: error.to_string(),
        })?;
        let (floor, ceiling) = (form.floor, form.ceiling);
        narrow(&mut self.security, floor.security, path, |new, old| new > old);
        lower(&mut self.memory, ceiling.memory, path);
        lower(&mut self.disk, ceiling.disk, path);
        lower(&mut self.processes, ceiling.processes, path);
        lower(&mut self.cpus, ceiling.cpus, path);
        lower(&mut self.cpu_quota, ceiling.cpu_quota, path);
        lower(&mut self.max_duration, ceiling.max_duration, path);
        lower(&mut self.idle_timeout, ceiling.idle_timeout, path);
        lower(&mut self.log_size, ceiling.log_size, path);
        lower(&mut self.sandboxes, ceiling.sandboxes, path);
        self.audit.rotate_size = self.audit.rotate_size.max(form.audit.rotate_size);
        self.audit.keep = self.audit.keep.max(form.audit.keep);
        Ok(self)
    }

    /// The defaults of a caller who asks for nothing: never more than is allowed.
    pub fn defaults(&self) -> SandboxSpec {
        let mut spec = SandboxSpec::default();
        spec.memory = least(spec.memory, self.memory.as_ref());
        spec.disk = least(spec.disk, self.disk.as_ref());
        spec.processes = least(spec.processes, self.processes.as_ref());
        spec.cpus = least(spec.cpus, self.cpus.as_ref());
        spec.log_size = least(spec.log_size, self.log_size.as_ref());
        spec
    }

    /// Refuses what is above a ceiling, raises what is below the floor, and sets limits that were left open.
    pub fn apply(&self, mut spec: SandboxSpec) -> Result<Allowed, PolicyError> {
        let mut notes = Vec::new();
        check("Memory", spec.memory, self.memory.as_ref())?;
        check("A disk", spec.disk, self.disk.as_ref())?;
        check("A process limit", spec.processes, self.processes.as_ref())?;
        check("A number of CPUs", spec.cpus, self.cpus.as_ref())?;
        check("A log size", spec.log_size, self.log_size.as_ref())?;
        // The share of a sandbox that names none is all of its processors.
        let all = CpuQuota::from_thousandths(spec.cpus.saturating_mul(1000));
        if self.cpu_quota.as_ref().is_some_and(|limit| spec.cpu_quota.is_some() || limit.value < all) {
            check_open("A CPU quota", &mut spec.cpu_quota, self.cpu_quota.as_ref(), &mut notes)?;
        }
        check_open("A maximum duration", &mut spec.max_duration, self.max_duration.as_ref(), &mut notes)?;
        check_open("An idle timeout", &mut spec.idle_timeout, self.idle_timeout.as_ref(), &mut notes)?;
        if let Some(floor) = self.security.as_ref().filter(|floor| floor.value > spec.security) {
            spec.security = floor.value;
            let (level, file) = (floor.value.as_str(), floor.file.display());
            notes.push(format!("The operator requires {level} security, by {file}"));
        }
        Ok(Allowed { spec: spec.consistent(), notes })
    }

    /// How many sandboxes there may be.
    pub fn sandboxes(&self) -> Option<u32> {
        self.sandboxes.as_ref().map(|limit| limit.value)
    }

    /// The least security that commands run with.
    pub fn security(&self) -> Security {
        self.security.as_ref().map_or(Security::Default, |limit| limit.value)
    }

    /// Refuses one more sandbox beside `count` others, if there may be no more.
    pub fn admit(&self, count: u32) -> Result<(), PolicyError> {
        match &self.sandboxes {
            Some(limit) if count >= limit.value => {
                Err(PolicyError::Sandboxes { count, most: limit.value, file: limit.file.clone() })
            }
            _ => Ok(()),
        }
    }
}

fn own_file(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |name| variable(name).filter(|path| path.is_absolute());
    let base = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")))?;
    Some(base.join("bathysphere/config.toml"))
}

fn narrow<T: Copy>(
    limit: &mut Option<Limit<T>>,
    new: Option<T>,
    file: &Path,
    stricter: impl Fn(T, T) -> bool,
) {
    if let Some(value) = new
        && limit.as_ref().is_none_or(|old| stricter(value, old.value))
    {
        *limit = Some(Limit { value, file: file.to_owned() });
    }
}

fn lower<T: Copy + Ord>(limit: &mut Option<Limit<T>>, new: Option<T>, file: &Path) {
    narrow(limit, new, file, |new, old| new < old);
}

fn least<T: Copy + Ord>(value: T, limit: Option<&Limit<T>>) -> T {
    limit.map_or(value, |limit| value.min(limit.value))
}

fn check<T: Ord + ToString>(
    what: &'static str,
    wanted: T,
    limit: Option<&Limit<T>>,
) -> Result<(), PolicyError> {
    match limit {
        Some(limit) if wanted > limit.value => Err(PolicyError::Ceiling {
            what,
            wanted: wanted.to_string(),
            most: limit.value.to_string(),
            file: limit.file.clone(),
        }),
        _ => Ok(()),
    }
}

/// As [`check`], for what is unlimited unless said otherwise: left open, it becomes the ceiling.
fn check_open<T: Copy + Ord + ToString>(
    what: &'static str,
    wanted: &mut Option<T>,
    limit: Option<&Limit<T>>,
    notes: &mut Vec<String>,
) -> Result<(), PolicyError> {
    if let Some(wanted) = *wanted {
        return check(what, wanted, limit);
    }
    if let Some(limit) = limit {
        *wanted = Some(limit.value);
        notes.push(format!("{what} of {} is set by {}", limit.value.to_string(), limit.file.display()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bathy_protocol::launch::UmlMode;

    use super::*;

    /// The policy of files with these texts, named `0`, `1` and so on.
    fn policy(texts: &[&str]) -> Result<Policy, PolicyError> {
        let folder = tempfile::tempdir().unwrap();
        let paths = texts.iter().enumerate().map(|(number, text)| {
            let path = folder.path().join(number.to_string());
            fs::write(&path, text).unwrap();
            path
        });
        Policy::from_files(paths.collect::<Vec<_>>())
    }

    fn refusal(policy: &Policy, change: impl FnOnce(&mut SandboxSpec)) -> String {
        let mut spec = policy.defaults();
        change(&mut spec);
        policy.apply(spec).unwrap_err().to_string()
    }

    #[test]
    fn no_policy_changes_nothing() {
        let none = Policy::from_files([PathBuf::from("/nowhere/config.toml")]).unwrap();
        assert_eq!(none, Policy::default());
        let allowed = none.apply(SandboxSpec::default()).unwrap();
        assert_eq!(allowed, Allowed { spec: SandboxSpec::default(), notes: Vec::new() });
        assert!(none.admit(u32::MAX).is_ok());
    }

    #[test]
    fn ceilings_name_the_limit_the_file_and_the_value() {
        let policy = policy(&["[ceiling]\nmemory = \"256M\"\ndisk = \"1G\"\nprocesses = 64\ncpus = 1\n\
            cpu_quota = 0.5\nmax_duration = \"1h\"\nidle_timeout = \"5m\"\nlog_size = \"4M\"\n"])
        .unwrap();
        let message = refusal(&policy, |spec| spec.memory = Size(512 << 20));
        assert!(
            message.starts_with("Memory of 512M is more than the operator allows: the most is 256M, by /")
        );
        assert!(message.ends_with("/0"), "{message}");
        assert!(refusal(&policy, |spec| spec.disk = Size(2 << 30)).starts_with("A disk of 2G"));
        assert!(refusal(&policy, |spec| spec.processes = 65).contains("the most is 64"));
        assert!(refusal(&policy, |spec| spec.cpus = 2).contains("the most is 1"));
        assert!(refusal(&policy, |spec| spec.log_size = Size(5 << 20)).contains("the most is 4M"));
        let quota = CpuQuota::from_thousandths(501);
        assert!(refusal(&policy, |spec| spec.cpu_quota = Some(quota)).contains("0.501 is more"));
        let long = Some(Seconds::from_millis(3_600_001));
        assert!(refusal(&policy, |spec| spec.max_duration = long).contains("the most is 1h"));
        assert!(refusal(&policy, |spec| spec.idle_timeout = long).contains("the most is 5m"));
    }

    #[test]
    fn what_was_left_open_gets_the_ceiling_and_is_reported() {
        let policy = policy(&[
            "[ceiling]\ncpu_quota = 0.5\nmax_duration = \"1h\"\nidle_timeout = 60\nmemory = \"128M\"",
        ])
        .unwrap();
        let allowed = policy.apply(policy.defaults()).unwrap();
        assert_eq!(allowed.spec.max_duration, Some(Seconds::from_millis(3_600_000)));
        assert_eq!(allowed.spec.idle_timeout, Some(Seconds::from_millis(60_000)));
        assert_eq!(allowed.spec.cpu_quota, Some(CpuQuota::from_thousandths(500)));
        assert_eq!(allowed.spec.memory, Size(128 << 20));
        assert_eq!(allowed.notes.len(), 3);
        let asked = SandboxSpec { max_duration: Some(Seconds::from_millis(1)), ..policy.defaults() };
        assert_eq!(policy.apply(asked.clone()).unwrap().spec.max_duration, asked.max_duration);
    }

    #[test]
    fn a_quota_of_every_processor_is_no_limit() {
        let policy = policy(&["[ceiling]\ncpu_quota = 1\n"]).unwrap();
        assert_eq!(policy.apply(SandboxSpec::default()).unwrap().spec, SandboxSpec::default());
    }

    #[test]
    fn the_floor_raises_and_says_so() {
        let policy = policy(&["[floor]\nsecurity = \"restricted\"\n"]).unwrap();
        let allowed = policy.apply(SandboxSpec::default()).unwrap();
        assert_eq!((allowed.spec.security, allowed.spec.uml_mode), (Security::Restricted, UmlMode::Ptrace));
        assert!(allowed.notes[0].contains("restricted"), "{:?}", allowed.notes);
        assert_eq!(policy.apply(allowed.spec).unwrap().notes, Vec::<String>::new());
    }

    #[test]
    fn of_two_files_the_stricter_counts() {
        let one = "[floor]\nsecurity = \"restricted\"\n[ceiling]\nmemory = \"1G\"\nprocesses = 100\n[audit]\nkeep = 3\n";
        let two = "[floor]\nsecurity = \"default\"\n[ceiling]\nmemory = \"2G\"\nprocesses = 50\n[audit]\nkeep = 9\n";
        for policy in [policy(&[one, two]).unwrap(), policy(&[two, one]).unwrap()] {
            assert_eq!(policy.security(), Security::Restricted);
            assert_eq!(policy.audit.keep, Some(9));
            assert!(refusal(&policy, |spec| spec.memory = Size(3 << 30)).contains("the most is 1G"));
            assert!(refusal(&policy, |spec| spec.processes = 51).contains("the most is 50"));
        }
        let both = policy(&[one, two]).unwrap();
        assert!(refusal(&both, |spec| spec.memory = Size(3 << 30)).ends_with("/0"));
        assert!(refusal(&both, |spec| spec.processes = 51).ends_with("/1"));
    }

    #[test]
    fn the_number_of_sandboxes_is_limited() {
        let policy = policy(&["[ceiling]\nsandboxes = 2\n"]).unwrap();
        assert!(policy.admit(1).is_ok());
        assert!(policy.admit(2).unwrap_err().to_string().contains("the operator allows 2"));
    }

    #[test]
    fn mistakes_in_the_file_are_errors() {
        for (text, expected) in [
            ("[ceiling]\nmemroy = \"1G\"\n", "Unknown key `ceiling.memroy`"),
            ("[cieling]\n", "did you mean `ceiling`?"),
            ("[floor]\nsecurity = \"none\"\n", "Bad value of `floor.security`"),
            ("[ceiling]\n\nmemory = []\n", "line 3: invalid type"),
            ("ceiling = 1\n", "Bad value of `ceiling`"),
            ("[audit]\nrotate_size = \"x\"\n", "is not a size"),
        ] {
            let error = policy(&[text]).unwrap_err();
            let PolicyError::File(error) = error else { panic!("{text}: {error}") };
            assert!(error.to_string().contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn the_callers_file_is_found_by_the_xdg_rules() {
        let with = |set: &'static [(&str, &str)]| {
            own_file(move |name| {
                set.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value))
            })
        };
        let expected = |path: &str| Some(PathBuf::from(path));
        assert_eq!(with(&[("HOME", "/h")]), expected("/h/.config/bathysphere/config.toml"));
        assert_eq!(
            with(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "/c")]),
            expected("/c/bathysphere/config.toml")
        );
        assert_eq!(
            with(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "c")]),
            expected("/h/.config/bathysphere/config.toml")
        );
        assert_eq!(with(&[]), None);
    }
}
