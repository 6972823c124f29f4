//! Combines configuration files and flags into one specification.
//!
//! Options are declared once, as fields of [`SandboxSpec`]. This module works on the *values* of that type,
//! so a new option needs no code here: flags override the file, the file overrides the defaults.

mod file;
mod found;

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use thiserror::Error;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use crate::SandboxSpec;
use crate::name;

pub use file::{FileError, read_regular};

/// The file that configures a sandbox, beside the code that runs in it.
pub const FILE_NAME: &str = "bathysphere.toml";
/// Tables that are merged entry by entry. Any other value replaces the lower one as a whole.
const MERGED: [&str; 2] = ["env", "labels"];
/// A longer file is not a configuration.
const MAX_FILE: u64 = 1024 * 1024;

/// A configuration is invalid.
#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("Cannot read {0}")]
    Read(PathBuf, #[source] io::Error),
    /// The file is too long.
    #[error("{0} is longer than {MAX_FILE} bytes, so it is not a configuration")]
    TooLong(PathBuf),
    /// The file is a pipe, a device or a folder.
    #[error("{0} is {1} and not a regular file, so it is not a configuration")]
    Kind(PathBuf, &'static str),
    #[error("{path}, line {line}: {message}")]
    Syntax { path: PathBuf, line: usize, message: String },
    /// The key is unknown.
    #[error("Unknown key `{key}` in {path}, line {line}{hint}")]
    UnknownKey {
        /// The key with its section.
        key: String,
        path: PathBuf,
        line: usize,
        /// A suggestion, or empty.
        hint: String,
    },
    /// The value is invalid for its key.
    #[error("Bad value of `{key}` in {path}, line {line}: {reason}")]
    Value {
        /// The key with its section.
        key: String,
        path: PathBuf,
        line: usize,
        reason: String,
    },
    /// A file that was found, not named, raises a limit or weakens a boundary.
    #[error(
        "{path} was only found here, and its `{key}` has `{part}`, which {why}. If you trust the file, name it: --config {path}. Otherwise set the value yourself with {option}, or ignore the file: --no-config"
    )]
    Found {
        path: PathBuf,
        key: &'static str,
        /// The value in the file.
        part: String,
        /// Its effect, with the limit if there is one.
        why: String,
        /// The option that sets it explicitly.
        option: &'static str,
    },
    /// The value of a flag or request is invalid for its key.
    #[error("Bad value of `{key}`: {reason}")]
    Flag { key: String, reason: String },
}

/// The configuration file of `folder`, if there is one.
pub fn find(folder: &Path) -> Option<PathBuf> {
    Some(folder.join(FILE_NAME)).filter(|path| path.exists())
}

/// The specification from a single file.
pub fn load(path: &Path) -> Result<SandboxSpec, ConfigError> {
    Layers::new().file(path)?.build()
}

/// Layers of configuration, each with only the values that it sets. Tables (`env`, `labels`) are merged key
/// by key; other values replace the lower ones.
#[derive(Debug)]
pub struct Layers {
    values: Map<String, Value>,
    failed: Option<ConfigError>,
}

impl Default for Layers {
    fn default() -> Self {
        Self::new()
    }
}

impl Layers {
    pub fn new() -> Self {
        Self::over(&SandboxSpec::default())
    }

    /// Starts from other defaults, such as [`crate::operator::Operator::defaults`].
    pub fn over(defaults: &SandboxSpec) -> Self {
        Self { values: fields(defaults), failed: None }
    }

    /// Adds a file as the top layer.
    pub fn file(mut self, path: &Path) -> Result<Self, ConfigError> {
        merge(&mut self.values, read::<SandboxSpec>(path)?);
        Ok(self)
    }

    /// Adds a file that was found, not named, except for the keys in `replaced`, which the user sets. It
    /// belongs to untrusted code, so it may restrict the sandbox further than the layers below, but not less.
    pub fn found(mut self, path: &Path, replaced: &[&str]) -> Result<Self, ConfigError> {
        let mut values = read::<SandboxSpec>(path)?;
        values.retain(|key, _| MERGED.contains(&key.as_str()) || !replaced.contains(&key.as_str()));
        // Every value has been validated on its own.
        let whole = |values: Map<String, Value>| {
            serde_json::from_value::<SandboxSpec>(Value::Object(values)).map_err(|error| ConfigError::Flag {
                key: path.display().to_string(),
                reason: error.to_string(),
            })
        };
        let usual = whole(self.values.clone())?;
        merge(&mut self.values, values);
        found::check(path, &whole(self.values.clone())?, &usual)?;
        Ok(self)
    }

    /// Adds a single value as the top layer. An error is returned by [`Self::build`].
    #[must_use]
    pub fn set(mut self, key: &str, value: impl Serialize) -> Self {
        let set = serde_json::to_value(value).map_err(|error| error.to_string()).and_then(|value| {
            let single = Map::from_iter([(key.to_owned(), value)]);
            fits::<SandboxSpec>(single.clone())?;
            Ok(single)
        });
        match set {
            Ok(single) => merge(&mut self.values, single),
            Err(reason) => {
                self.failed.get_or_insert_with(|| ConfigError::Flag { key: key.to_owned(), reason });
            }
        }
        self
    }

    /// The combined specification, not yet validated.
    pub fn build(self) -> Result<SandboxSpec, ConfigError> {
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        // Every value has been validated on its own, so this error names no key.
        serde_json::from_value(Value::Object(self.values))
            .map_err(|error| ConfigError::Flag { key: "sandbox".to_owned(), reason: error.to_string() })
    }
}

/// Reads a TOML file as values of `T`, which has a default for every key and defines the valid keys. Returns
/// only the values in the file.
pub(crate) fn read<T>(path: &Path) -> Result<Map<String, Value>, ConfigError>
where
    T: Default + Serialize + DeserializeOwned,
{
    let text = read_text(path)?;
    let table = DeTable::parse(&text).map_err(|error| ConfigError::Syntax {
        path: path.to_owned(),
        line: line(&text, error.span().map_or(0, |span| span.start)),
        message: error.message().to_owned(),
    })?;
    let reader = Reader { path, text: &text, fits: fits::<T> };
    reader.section(table.get_ref(), &fields(&T::default()), &mut Vec::new())
}

fn read_text(path: &Path) -> Result<String, ConfigError> {
    let (bytes, _) = read_regular(path, MAX_FILE).map_err(|error| match error {
        FileError::Io(error) => ConfigError::Read(path.to_owned(), error),
        FileError::Kind(kind) => ConfigError::Kind(path.to_owned(), kind),
        FileError::TooLong(_) => ConfigError::TooLong(path.to_owned()),
    })?;
    String::from_utf8(bytes).map_err(|error| ConfigError::Syntax {
        path: path.to_owned(),
        line: 1 + newlines(error.as_bytes().get(..error.utf8_error().valid_up_to()).unwrap_or_default()),
        message: "this is not UTF-8 text".to_owned(),
    })
}

struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
    /// Checks whether values fit the type that is read.
    fits: fn(Map<String, Value>) -> Result<(), String>,
}

impl Reader<'_> {
    /// Reads a table with the keys of `known`. `section` is its path.
    fn section(
        &self,
        table: &DeTable<'_>,
        known: &Map<String, Value>,
        section: &mut Vec<String>,
    ) -> Result<Map<String, Value>, ConfigError> {
        let mut values = Map::new();
        for (key, value) in in_order(table) {
            let name = key.get_ref().as_ref();
            section.push(name.to_owned());
            let value = match (known.get(name), value.get_ref()) {
                (None, _) => return Err(self.unknown(key, known, section)),
                (Some(Value::Object(inner)), DeValue::Table(table)) if !inner.is_empty() => {
                    self.section(table, inner, section)?.into()
                }
                // A table with arbitrary keys, such as variables: each value is validated on its own.
                (Some(Value::Object(_)), DeValue::Table(table)) => self.own_keys(table, section)?.into(),
                _ => self.leaf(key, value.get_ref(), section)?,
            };
            section.pop();
            values.insert(name.to_owned(), value);
        }
        Ok(values)
    }

    fn own_keys(
        &self,
        table: &DeTable<'_>,
        section: &mut Vec<String>,
    ) -> Result<Map<String, Value>, ConfigError> {
        let mut values = Map::new();
        for (key, value) in in_order(table) {
            section.push(key.get_ref().to_string());
            values.insert(key.get_ref().to_string(), self.leaf(key, value.get_ref(), section)?);
            section.pop();
        }
        Ok(values)
    }

    /// Validates a single value in its place, with defaults for everything else.
    fn leaf(
        &self,
        key: &Spanned<DeString<'_>>,
        value: &DeValue<'_>,
        section: &[String],
    ) -> Result<Value, ConfigError> {
        let tried = json(value).and_then(|value| {
            let wrap = |inner, name: &String| Value::Object(Map::from_iter([(name.clone(), inner)]));
            match section.iter().rev().fold(value.clone(), wrap) {
                Value::Object(single) => (self.fits)(single).map(|()| value),
                _ => Ok(value),
            }
        });
        tried.map_err(|reason| ConfigError::Value {
            key: dotted(section),
            path: self.path.to_owned(),
            line: line(self.text, key.span().start),
            reason,
        })
    }

    fn unknown(
        &self,
        key: &Spanned<DeString<'_>>,
        known: &Map<String, Value>,
        section: &[String],
    ) -> ConfigError {
        let hint = match name::nearest(key.get_ref().as_ref(), known.keys().map(String::as_str)) {
            Some(near) => format!("; did you mean `{near}`?"),
            None => {
                let keys: Vec<_> = known.keys().map(String::as_str).collect();
                format!(". The keys are {}", keys.join(", "))
            }
        };
        let line = line(self.text, key.span().start);
        ConfigError::UnknownKey { key: dotted(section), path: self.path.to_owned(), line, hint }
    }
}

/// The keys in the order of the file, so that the first error is reported first.
fn in_order<'a, 'i>(table: &'a DeTable<'i>) -> Vec<(&'a Spanned<DeString<'i>>, &'a Spanned<DeValue<'i>>)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries
}

fn dotted(section: &[String]) -> String {
    section.join(".").escape_debug().to_string()
}

fn line(text: &str, offset: usize) -> usize {
    1 + newlines(text.as_bytes().get(..offset).unwrap_or(text.as_bytes()))
}

fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').count()
}

/// The fields of a struct as JSON values.
fn fields(of: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(of) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    }
}

fn fits<T: DeserializeOwned>(values: Map<String, Value>) -> Result<(), String> {
    serde_json::from_value::<T>(Value::Object(values)).map(drop).map_err(|error| error.to_string())
}

/// Merges `above` over `below`.
fn merge(below: &mut Map<String, Value>, above: Map<String, Value>) {
    for (key, value) in above {
        let is_joined = MERGED.contains(&key.as_str());
        match (below.get_mut(&key), value) {
            (Some(Value::Object(below)), Value::Object(above)) if is_joined => below.extend(above),
            (_, value) => drop(below.insert(key, value)),
        }
    }
}

/// TOML has two kinds of values that neither JSON nor our options have.
fn json(value: &DeValue<'_>) -> Result<Value, String> {
    match value {
        DeValue::String(text) => Ok(Value::from(text.as_ref())),
        DeValue::Integer(number) => {
            let wide = i128::from_str_radix(number.as_str(), number.radix()).ok();
            let signed = wide.and_then(|wide| i64::try_from(wide).ok()).map(Value::from);
            let unsigned = wide.and_then(|wide| u64::try_from(wide).ok()).map(Value::from);
            unsigned.or(signed).ok_or_else(|| format!("{number} is out of range"))
        }
        DeValue::Float(number) => {
            let finite = number.as_str().parse().ok().and_then(serde_json::Number::from_f64);
            finite.map(Value::Number).ok_or_else(|| format!("{number} is not a finite number"))
        }
        DeValue::Boolean(value) => Ok(Value::from(*value)),
        DeValue::Datetime(_) => Err("no option is a date; write text in quotes".to_owned()),
        DeValue::Array(items) => items.iter().map(|item| json(item.get_ref())).collect(),
        DeValue::Table(table) => {
            let entries =
                table.iter().map(|(key, value)| Ok((key.get_ref().to_string(), json(value.get_ref())?)));
            entries.collect::<Result<Map<_, _>, String>>().map(Value::Object)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use super::*;
    use crate::{CpuQuota, Seconds, Security, Size};

    fn try_load(text: impl AsRef<[u8]>) -> Result<SandboxSpec, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        fs::write(&path, text).unwrap();
        load(&path).map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
    }

    #[test]
    fn a_file_says_what_flags_say() {
        let spec = try_load(
            "memory = \"1G\"\ncpu_quota = 0.5\nmax_duration = 90\nidle_timeout = \"15m\"\nsecurity = \"restricted\"\n\
             command = [\"sleep\", \"9\"]\nprocesses = 0x40\n[env]\nPORT = \"80\"\n[labels]\n\"team/a\" = \"x\"\n",
        );
        let expected = SandboxSpec {
            memory: Size(1 << 30),
            cpu_quota: Some(CpuQuota::from_thousandths(500)),
            max_duration: Some(Seconds::from_millis(90_000)),
            idle_timeout: Some(Seconds::from_millis(900_000)),
            security: Security::Restricted,
            command: vec!["sleep".to_owned(), "9".to_owned()],
            processes: 64,
            env: BTreeMap::from([("PORT".to_owned(), "80".to_owned())]),
            labels: BTreeMap::from([("team/a".to_owned(), "x".to_owned())]),
            ..SandboxSpec::default()
        };
        assert_eq!(spec, Ok(expected));
        assert_eq!(try_load(""), Ok(SandboxSpec::default()));
    }

    #[test]
    fn unknown_keys_are_named_with_their_line_and_the_nearest_key() {
        let error = try_load("# mine\n\nmemroy = \"1G\"\n").unwrap_err();
        assert_eq!(error, "Unknown key `memroy` in bathysphere.toml, line 3; did you mean `memory`?");
        let error = try_load("max-duration = 1\n").unwrap_err();
        assert!(error.ends_with("did you mean `max_duration`?"), "{error}");
        let error = try_load("zzz = 1\n").unwrap_err();
        assert!(error.contains("line 1. The keys are ") && error.contains("memory"), "{error}");
    }

    #[test]
    fn the_first_mistake_is_reported_first() {
        let error = try_load("zebra = 1\naardvark = 1\n").unwrap_err();
        assert!(error.contains("`zebra`"), "{error}");
    }

    #[test]
    fn wrong_values_name_the_key_and_what_is_expected() {
        for (text, key, line, expected) in [
            ("memory = true", "memory", 1, "expected a size such as"),
            ("memory = \"12X\"", "memory", 1, "is not a size"),
            ("\ncpus = \"two\"", "cpus", 2, "expected u32"),
            ("security = \"tight\"", "security", 1, "expected `default` or `restricted`"),
            ("command = [\"a\", 1]", "command", 1, "expected a string"),
            ("command = \"ls\"", "command", 1, "expected a sequence"),
            ("[env]\nA = \"b\"\nPORT = 80", "env.PORT", 3, "expected a string"),
            ("env = 1", "env", 1, "expected a map"),
            ("user = 2020-01-01", "user", 1, "no option is a date"),
            ("cpu_quota = inf", "cpu_quota", 1, "not a finite number"),
            ("cpu_quota = -0.5", "cpu_quota", 1, "is not a number of processors"),
            ("processes = 99999999999999999999999", "processes", 1, "out of range"),
            ("max_duration = -1", "max_duration", 1, "is not a length of time"),
            ("[memory]\nx = 1", "memory", 1, "expected a size such as"),
        ] {
            let error = try_load(text).unwrap_err();
            let location = format!("`{key}` in bathysphere.toml, line {line}");
            assert!(error.contains(&location) && error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn invalid_toml_is_reported_with_its_line() {
        for (text, line) in
            [(&b"memory = \"1G\"\ncpus =\n"[..], 2), (b"cpus = 1\ncpus = 1\n", 2), (b"\n\xff", 2)]
        {
            let error = try_load(text).unwrap_err();
            assert!(error.starts_with(&format!("bathysphere.toml, line {line}: ")), "{error}");
        }
        assert!(try_load("a=".repeat(600_000)).unwrap_err().contains("longer than"));
        assert!(try_load(format!("command = {}", "[".repeat(100_000))).is_err());
        assert!(matches!(load(Path::new("/nowhere/x.toml")), Err(ConfigError::Read(..))));
        assert!(matches!(load(Path::new("/")), Err(ConfigError::Kind(_, "a directory"))));
    }

    #[test]
    fn flags_override_the_file_and_the_file_the_defaults() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(find(folder.path()), None);
        let path = folder.path().join(FILE_NAME);
        fs::write(
            &path,
            "memory = \"1G\"\ndisk = \"1G\"\ncommand = [\"a\", \"b\"]\nenv = { A = \"1\", B = \"1\" }",
        )
        .unwrap();
        assert_eq!(find(folder.path()), Some(path.clone()));
        let layers = Layers::new().file(&path).unwrap().set("memory", Size(2 << 30)).set("command", ["c"]);
        let layers = layers.set("env", BTreeMap::from([("B", "2")]));
        let spec = layers.build().unwrap();
        assert_eq!((spec.memory, spec.disk, spec.processes), (Size(2 << 30), Size(1 << 30), 1024));
        assert_eq!(spec.command, ["c"]);
        let env: Vec<_> = spec.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(env, ["A=1", "B=2"]);
    }

    #[test]
    fn a_bad_flag_is_reported_with_its_key() {
        let error = Layers::new().set("cpus", "many").set("memory", 1).build().unwrap_err().to_string();
        assert!(error.starts_with("Bad value of `cpus`: "), "{error}");
        assert!(Layers::new().set("memroy", "1G").build().is_err());
    }

    #[test]
    fn a_policy_replaces_the_one_below_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let one =
            file("1", "[network]\npreset = \"public\"\nrules = [\"deny a.example\"]\n[env]\nA = \"1\"\n");
        let two = file(
            "2",
            "[network]\nrules = [\"allow b.example:443\"]\n[network_limits]\nqueries = 7\n[env]\nB = \"2\"\n",
        );
        let spec = Layers::new().file(&one).unwrap().file(&two).unwrap().build().unwrap();
        let rules: Vec<_> = spec.network.rules.iter().map(ToString::to_string).collect();
        // Merging with the lower policy would create a policy that neither file contains.
        assert_eq!(
            (rules, spec.network.preset.name()),
            (vec!["allow b.example:443".to_owned()], "allow-list")
        );
        let limits = spec.network_limits;
        assert_eq!(
            (limits.queries, limits.connections),
            (7, SandboxSpec::default().network_limits.connections)
        );
        assert_eq!(spec.env.len(), 2, "variables are joined");
        for (text, key) in [
            ("[network]\nrules = [\"allow pubilc\"]", "`network.rules` in "),
            ("[network]\npreset = \"pubic\"", "`network.preset` in "),
            ("[network]\nrule = []", "did you mean `rules`?"),
            ("[network_limits]\nqueris = 1", "did you mean `queries`?"),
            ("ports = [\"80\"]", "`ports` in "),
            ("ceilings = []", "Unknown key `ceilings`"),
        ] {
            let error = try_load(text).unwrap_err();
            assert!(error.contains(key), "{text}: {error}");
        }
    }
}
