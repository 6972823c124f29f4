//! The operator's ceilings, each with its origin for error messages.

use std::fmt;
use std::path::{Path, PathBuf};

use bathy_policy::{NetworkPolicy, Preset};
use bathy_registry::Digest;
use serde::{Deserialize, Serialize};

use super::{OperatorError, SYSTEM_FILE, inward};
use crate::image::{Image, ImageRule};
use crate::{CpuQuota, SandboxSpec, Seconds, Size};

/// The section of a file for all sandboxes, and the one for agents.
pub(super) const ALL_SANDBOXES: &str = "ceiling";
pub(super) const AGENTS: &str = "mcp";
const NETWORK: &str = "network";

/// A section of a file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Ceiling {
    memory: Option<Size>,
    disk: Option<Size>,
    processes: Option<u32>,
    cpus: Option<u32>,
    cpu_quota: Option<CpuQuota>,
    max_duration: Option<Seconds>,
    idle_timeout: Option<Seconds>,
    log_size: Option<Size>,
    sandboxes: Option<u32>,
    images: Option<Vec<ImageRule>>,
}

impl Ceiling {
    /// The defaults for agents where the operator sets nothing.
    fn defaults_for_agents() -> Self {
        Self {
            memory: Some(Size(4 << 30)),
            disk: Some(Size(32 << 30)),
            max_duration: Some(Seconds::from_millis(24 * 60 * 60 * 1000)),
            sandboxes: Some(32),
            // An agent does not choose which registries this machine talks to.
            images: "default".to_owned().try_into().ok().map(|rule| vec![rule]),
            ..Self::default()
        }
    }
}

/// The section for agents.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Agents {
    // Unknown keys have already been refused.
    #[serde(flatten)]
    pub ceiling: Ceiling,
    pub network: Option<NetworkPolicy>,
}

/// The origin of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LimitSource {
    /// A section of a file.
    File(&'static str, PathBuf),
    /// The default for agents.
    Default,
}

/// A value with its key and origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Limit<T> {
    pub value: T,
    pub key: &'static str,
    pub source: LimitSource,
}

impl<T> fmt::Display for Limit<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.key;
        match &self.source {
            LimitSource::File(section, path) => write!(out, "`{key}` in [{section}] of {}", path.display()),
            LimitSource::Default => write!(
                out,
                "the usual `{key}` for agents, which the operator changes by `{key}` in [{AGENTS}] of {SYSTEM_FILE}"
            ),
        }
    }
}

/// The combined ceilings of all files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    memory: Option<Limit<Size>>,
    disk: Option<Limit<Size>>,
    processes: Option<Limit<u32>>,
    cpus: Option<Limit<u32>>,
    cpu_quota: Option<Limit<CpuQuota>>,
    max_duration: Option<Limit<Seconds>>,
    idle_timeout: Option<Limit<Seconds>>,
    log_size: Option<Limit<Size>>,
    pub sandboxes: Option<Limit<u32>>,
    /// An image has to be on every list.
    images: Vec<Limit<Vec<ImageRule>>>,
    /// The network ceilings of agents' sandboxes: all of them have to allow a destination.
    network: Vec<Limit<NetworkPolicy>>,
}

impl Limits {
    /// Narrows the limits by a section of a file.
    pub fn lower(&mut self, ceiling: Ceiling, section: &'static str, path: &Path) {
        self.narrow(&Self::of(ceiling, &LimitSource::File(section, path.to_owned())));
    }

    /// Adds a file's network ceiling for agents' sandboxes.
    pub fn bound(&mut self, network: Option<NetworkPolicy>, path: &Path) {
        let source = LimitSource::File(AGENTS, path.to_owned());
        self.network.extend(network.map(|value| Limit { value, key: NETWORK, source }));
    }

    fn of(ceiling: Ceiling, source: &LimitSource) -> Self {
        fn limit<T>(value: Option<T>, key: &'static str, source: &LimitSource) -> Option<Limit<T>> {
            value.map(|value| Limit { value, key, source: source.clone() })
        }
        Self {
            memory: limit(ceiling.memory, "memory", source),
            disk: limit(ceiling.disk, "disk", source),
            processes: limit(ceiling.processes, "processes", source),
            cpus: limit(ceiling.cpus, "cpus", source),
            cpu_quota: limit(ceiling.cpu_quota, "cpu_quota", source),
            max_duration: limit(ceiling.max_duration, "max_duration", source),
            idle_timeout: limit(ceiling.idle_timeout, "idle_timeout", source),
            log_size: limit(ceiling.log_size, "log_size", source),
            sandboxes: limit(ceiling.sandboxes, "sandboxes", source),
            images: limit(ceiling.images, "images", source).into_iter().collect(),
            network: Vec::new(),
        }
    }

    /// Narrows the limits by others: the stricter value counts.
    pub fn narrow(&mut self, other: &Self) {
        stricter(&mut self.memory, other.memory.as_ref());
        stricter(&mut self.disk, other.disk.as_ref());
        stricter(&mut self.processes, other.processes.as_ref());
        stricter(&mut self.cpus, other.cpus.as_ref());
        stricter(&mut self.cpu_quota, other.cpu_quota.as_ref());
        stricter(&mut self.max_duration, other.max_duration.as_ref());
        stricter(&mut self.idle_timeout, other.idle_timeout.as_ref());
        stricter(&mut self.log_size, other.log_size.as_ref());
        stricter(&mut self.sandboxes, other.sandboxes.as_ref());
        let new = other.images.iter().filter(|list| !self.images.contains(list)).cloned();
        self.images.extend(new.collect::<Vec<_>>());
        let new = other.network.iter().filter(|bound| !self.network.contains(bound)).cloned();
        self.network.extend(new.collect::<Vec<_>>());
    }

    /// Fills in the defaults for agents. `all` are the limits of every sandbox.
    pub fn or_defaults(mut self, all: &Self) -> Self {
        let usual = Self::of(Ceiling::defaults_for_agents(), &LimitSource::Default);
        self.memory = self.memory.or(usual.memory);
        self.disk = self.disk.or(usual.disk);
        self.max_duration = self.max_duration.or(usual.max_duration);
        self.sandboxes = self.sandboxes.or(usual.sandboxes);
        // One list is enough for the operator to say.
        if self.images.is_empty() && all.images.is_empty() {
            self.images = usual.images;
        }
        if self.network.is_empty() {
            let value = NetworkPolicy { preset: Preset::Public, rules: Vec::new() };
            self.network.push(Limit { value, key: NETWORK, source: LimitSource::Default });
        }
        self
    }

    /// Removes default limits on a sandbox's lifetime, because a REPL lives until it is removed.
    pub fn for_repls(mut self) -> Self {
        self.max_duration = self.max_duration.filter(|limit| limit.source != LimitSource::Default);
        self
    }

    /// Lowers a default specification to what is allowed.
    pub fn defaults(&self, spec: &mut SandboxSpec) {
        spec.memory = least(spec.memory, self.memory.as_ref());
        spec.disk = least(spec.disk, self.disk.as_ref());
        spec.processes = least(spec.processes, self.processes.as_ref());
        spec.cpus = least(spec.cpus, self.cpus.as_ref());
        spec.log_size = least(spec.log_size, self.log_size.as_ref());
        let allowed =
            |image: &&str| self.images.iter().all(|list| is_allowed(list, Image::parse(image).ok(), None));
        if !allowed(&&*spec.image)
            && let Some(image) =
                self.images.iter().flat_map(|list| &list.value).filter_map(ImageRule::as_image).find(allowed)
        {
            spec.image = image.to_owned();
        }
    }

    /// Sentences on those defaults of `spec` that [`Self::defaults`] has lowered; `asked` is the same over the
    /// product's own defaults.
    pub fn lowered(&self, asked: &SandboxSpec, spec: &SandboxSpec) -> Vec<String> {
        let usual = SandboxSpec::default();
        [
            lowered("memory", [usual.memory, asked.memory, spec.memory], self.memory.as_ref()),
            lowered("disk", [usual.disk, asked.disk, spec.disk], self.disk.as_ref()),
            lowered(
                "process limit",
                [usual.processes, asked.processes, spec.processes],
                self.processes.as_ref(),
            ),
            lowered("log size", [usual.log_size, asked.log_size, spec.log_size], self.log_size.as_ref()),
            self.other_image(&usual.image, &asked.image, &spec.image),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// A sentence on another image than the usual one, which the operator does not allow.
    fn other_image(&self, usual: &str, asked: &str, image: &str) -> Option<String> {
        let is_by = |list: &&Limit<_>| !is_allowed(list, Image::parse(usual).ok(), None);
        let list = self.images.iter().find(is_by).filter(|_| asked == usual && image != usual)?;
        Some(format!("The default image is {image} instead of {usual}, by {list}"))
    }

    /// Refuses values above a ceiling and fills in open limits.
    pub fn apply(&self, spec: &mut SandboxSpec, notes: &mut Vec<String>) -> Result<(), OperatorError> {
        let is_refused =
            |list: &&Limit<_>| !is_allowed(list, Image::parse(&spec.image).ok(), spec.image_digest.as_ref());
        if let Some(list) = self.images.iter().find(is_refused) {
            return Err(OperatorError::Image {
                image: spec.image.escape_debug().to_string(),
                allowed: list.value.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
                by: list.to_string(),
            });
        }
        check("Memory", spec.memory, self.memory.as_ref())?;
        check("A disk", spec.disk, self.disk.as_ref())?;
        check("A process limit", spec.processes, self.processes.as_ref())?;
        check("A number of CPUs", spec.cpus, self.cpus.as_ref())?;
        check("A log size", spec.log_size, self.log_size.as_ref())?;
        // Without a quota, a sandbox may use all of its processors.
        let all = CpuQuota::from_thousandths(spec.cpus.saturating_mul(1000));
        if self.cpu_quota.as_ref().is_some_and(|limit| spec.cpu_quota.is_some() || limit.value < all) {
            check_open("A CPU quota", &mut spec.cpu_quota, self.cpu_quota.as_ref(), notes)?;
        }
        check_open("A maximum duration", &mut spec.max_duration, self.max_duration.as_ref(), notes)?;
        check_open("An idle timeout", &mut spec.idle_timeout, self.idle_timeout.as_ref(), notes)?;
        self.network.iter().try_for_each(|bound| check_network(spec, bound, notes))
    }
}

/// Refuses a policy that clearly reaches too far, so that the user knows, and adds the ceilings, which also
/// apply to later policies.
fn check_network(
    spec: &mut SandboxSpec,
    bound: &Limit<NetworkPolicy>,
    notes: &mut Vec<String>,
) -> Result<(), OperatorError> {
    if let Some(part) = inward::part(&spec.network).filter(|_| inward::part(&bound.value).is_none()) {
        return Err(OperatorError::Network { part, by: bound.to_string() });
    }
    if !spec.ceilings.contains(&bound.value) {
        spec.ceilings.push(bound.value.clone());
        if bound.source != LimitSource::Default {
            notes.push(format!("Its network is limited by {bound}"));
        }
    }
    Ok(())
}

fn is_allowed(list: &Limit<Vec<ImageRule>>, image: Option<Image>, digest: Option<&Digest>) -> bool {
    image.is_some_and(|image| list.value.iter().any(|rule| rule.allows(&image, digest)))
}

fn stricter<T: Clone + Ord>(limit: &mut Option<Limit<T>>, other: Option<&Limit<T>>) {
    if let Some(other) = other
        && limit.as_ref().is_none_or(|old| other.value < old.value)
    {
        *limit = Some(other.clone());
    }
}

fn least<T: Copy + Ord>(value: T, limit: Option<&Limit<T>>) -> T {
    limit.map_or(value, |limit| value.min(limit.value))
}

fn lowered<T: Ord + ToString>(
    what: &str,
    [usual, asked, value]: [T; 3],
    limit: Option<&Limit<T>>,
) -> Option<String> {
    let limit = limit.filter(|_| asked == usual && value < usual)?;
    Some(format!("The default {what} is {} instead of {}, by {limit}", value.to_string(), usual.to_string()))
}

fn check<T: Ord + ToString>(
    what: &'static str,
    wanted: T,
    limit: Option<&Limit<T>>,
) -> Result<(), OperatorError> {
    match limit {
        Some(limit) if wanted > limit.value => Err(OperatorError::Ceiling {
            what,
            wanted: wanted.to_string(),
            most: limit.value.to_string(),
            by: limit.to_string(),
        }),
        _ => Ok(()),
    }
}

/// Like [`check`], for a value that is unlimited by default: if open, it is set to the ceiling.
fn check_open<T: Copy + Ord + ToString>(
    what: &'static str,
    wanted: &mut Option<T>,
    limit: Option<&Limit<T>>,
    notes: &mut Vec<String>,
) -> Result<(), OperatorError> {
    if let Some(wanted) = *wanted {
        return check(what, wanted, limit);
    }
    if let Some(limit) = limit {
        *wanted = Some(limit.value);
        notes.push(format!("{what} of {} is set by {limit}", limit.value.to_string()));
    }
    Ok(())
}
