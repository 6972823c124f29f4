//! Limits what a configuration file may set that was only found in the working directory.
//!
//! It belongs to untrusted code, so it may restrict the sandbox further but not less. Every field of
//! [`SandboxSpec`] that costs the host something or is a boundary is compared with its value without the
//! file. The list is in `docs/configuration.md`. A new field that costs or weakens anything must be added
//! here.

use std::path::Path;

use bathy_protocol::launch::UmlMode;
use bathy_protocol::network::NetworkLimits;

use super::ConfigError;
use crate::image::Image;
use crate::operator::inward;
use crate::{DiskLimits, Engine, SandboxSpec, Seconds, Size};

/// A pause writes the guest's memory to the host's disk. With a shorter timeout that could happen between two
/// commands.
const MIN_PAUSE: Seconds = Seconds::from_millis(60_000);
/// Lower user and group ids belong to the system.
const FIRST_ORDINARY_USER: u32 = 1000;
/// Lower ports belong to the machine's own services.
const FIRST_ORDINARY_PORT: u16 = 1024;
/// The label that shows a sandbox to agents.
const AGENTS_LABEL: &str = "created-by";

/// A value that goes too far.
struct Refusal {
    key: &'static str,
    part: String,
    why: String,
    option: &'static str,
}

impl Refusal {
    fn new(key: &'static str, part: impl ToString, why: impl Into<String>, option: &'static str) -> Self {
        Self { key, part: part.to_string(), why: why.into(), option }
    }
}

/// Refuses `wanted`, which is `usual` with the file's values, if it allows more than `usual`.
pub(super) fn check(path: &Path, wanted: &SandboxSpec, usual: &SandboxSpec) -> Result<(), ConfigError> {
    let refusal = limits(wanted, usual)
        .or_else(|| disk_limits(&wanted.disk_limits, &usual.disk_limits))
        .or_else(|| network_limits(&wanted.network_limits, &usual.network_limits))
        .or_else(|| boundaries(wanted, usual))
        .or_else(|| reach(wanted));
    match refusal {
        None => Ok(()),
        Some(Refusal { key, part, why, option }) => Err(ConfigError::Found {
            path: path.to_owned(),
            key,
            part: part.escape_debug().to_string(),
            why,
            option,
        }),
    }
}

fn limits(wanted: &SandboxSpec, usual: &SandboxSpec) -> Option<Refusal> {
    fn more<T: Ord + ToString>(
        key: &'static str,
        wanted: T,
        most: T,
        option: &'static str,
    ) -> Option<Refusal> {
        let why = format!("is more than the default of {}", most.to_string());
        (wanted > most).then(|| Refusal::new(key, wanted, why, option))
    }
    more("memory", wanted.memory, usual.memory, "--memory")
        .or_else(|| more("disk", wanted.disk, usual.disk, "--disk"))
        .or_else(|| more("processes", wanted.processes, usual.processes, "--processes"))
        .or_else(|| more("cpus", wanted.cpus, usual.cpus, "--cpus"))
        .or_else(|| more("log_size", wanted.log_size, usual.log_size, "--log-size"))
        .or_else(|| {
            let (wanted, most) = (wanted.ready_timeout_ms, usual.ready_timeout_ms);
            more("ready_timeout_ms", wanted, most, "--ready-timeout")
        })
        .or_else(|| {
            let wanted = wanted.pause_idle.filter(|pause| *pause < MIN_PAUSE)?;
            let why =
                format!("is less than {MIN_PAUSE}, and each pause writes the guest's memory to the disk");
            Some(Refusal::new("pause_idle", wanted, why, "--pause-idle"))
        })
}

fn disk_limits(wanted: &DiskLimits, usual: &DiskLimits) -> Option<Refusal> {
    let bandwidth = |key, wanted: Size, most: Size, option| {
        let why = format!("is more than the default of {most}");
        (wanted > most).then(|| Refusal::new(key, wanted, why, option))
    };
    let (key, option) = ("disk_limits.write_bandwidth", "--disk-write-bandwidth");
    bandwidth(key, wanted.write_bandwidth, usual.write_bandwidth, option)
        .or_else(|| {
            // Without a default there is no limit; only an operator can set one.
            let most = usual.read_bandwidth?;
            let wanted = wanted.read_bandwidth.unwrap_or(Size(u64::MAX));
            bandwidth("disk_limits.read_bandwidth", wanted, most, "--disk-read-bandwidth")
        })
        .or_else(|| {
            let why = format!("is more than the default of {}", usual.flushes);
            (wanted.flushes > usual.flushes)
                .then(|| Refusal::new("disk_limits.flushes", wanted.flushes, why, "--disk-flushes"))
        })
}

fn network_limits(wanted: &NetworkLimits, usual: &NetworkLimits) -> Option<Refusal> {
    let all = [
        ("network_limits.connections", u64::from(wanted.connections), u64::from(usual.connections)),
        ("network_limits.new_connections", wanted.new_connections.into(), usual.new_connections.into()),
        ("network_limits.bytes", wanted.bytes, usual.bytes),
        ("network_limits.packets", wanted.packets.into(), usual.packets.into()),
        ("network_limits.queries", wanted.queries.into(), usual.queries.into()),
    ];
    let (key, wanted, most) = all.into_iter().find(|(_, wanted, most)| wanted > most)?;
    // There is no option for this.
    let why = format!("is more than the default of {most}");
    Some(Refusal::new(key, wanted, why, "a file of your own and --config"))
}

/// The boundaries between the guest and the host, and between the guest's users.
fn boundaries(wanted: &SandboxSpec, usual: &SandboxSpec) -> Option<Refusal> {
    if wanted.engine == Engine::Uml {
        let why = "is the weaker boundary where there is hardware virtualization";
        return Some(Refusal::new("engine", wanted.engine.as_str(), why, "--engine"));
    }
    if wanted.image != usual.image && matches!(Image::parse(&wanted.image), Ok(Image::Registry(_))) {
        let why = "would be fetched from a registry, which then learns of this machine";
        return Some(Refusal::new("image", &wanted.image, why, "--image"));
    }
    if wanted.security < usual.security {
        let why = format!("is less than {}", usual.security.as_str());
        return Some(Refusal::new("security", wanted.security.as_str(), why, "--security"));
    }
    if wanted.uml_mode == Some(UmlMode::Seccomp) && usual.mode() == UmlMode::Ptrace {
        let why = "keeps the guest's users apart less than the mode ptrace";
        return Some(Refusal::new("uml_mode", "seccomp", why, "--uml-mode"));
    }
    if wanted.writable_root && !usual.writable_root {
        let why = "undoes a part of restricted security";
        return Some(Refusal::new("writable_root", true, why, "--writable-root"));
    }
    if let Some(user) = wanted.user.as_ref().filter(|user| !is_ordinary(user)) {
        let why = format!(
            "is not a number from {FIRST_ORDINARY_USER}: what a name stands for, or a lower number, only the image knows"
        );
        return Some(Refusal::new("user", user, why, "--user"));
    }
    if wanted.auto_remove && !usual.auto_remove {
        let why = "removes the sandbox's disk and logs when it stops";
        return Some(Refusal::new("auto_remove", true, why, "--rm"));
    }
    if let Some(label) = wanted.labels.get(AGENTS_LABEL) {
        let why = "shows the sandbox to agents";
        return Some(Refusal::new("labels", format!("{AGENTS_LABEL}={label}"), why, "--label"));
    }
    None
}

/// The destinations that the sandbox can reach, and published ports.
fn reach(wanted: &SandboxSpec) -> Option<Refusal> {
    if let Some(part) = inward::part(&wanted.network) {
        return Some(Refusal::new(
            "network",
            part,
            "leads further than public addresses",
            "--net and --allow",
        ));
    }
    if let Some(port) = wanted.ports.iter().find(|port| !port.bind.is_loopback()) {
        return Some(Refusal::new("ports", port, "other machines get to", "--publish"));
    }
    let low = wanted.ports.iter().find(|port| (1..FIRST_ORDINARY_PORT).contains(&port.host));
    low.map(|port| Refusal::new("ports", port, "is a port of the machine's own services", "--publish"))
}

/// Whether a user, and the group if given, is a numeric id outside the system's range.
fn is_ordinary(user: &str) -> bool {
    let ordinary = |text: &str| {
        text.bytes().all(|byte| byte.is_ascii_digit())
            && text.parse().is_ok_and(|number: u32| (FIRST_ORDINARY_USER..u32::MAX).contains(&number))
    };
    match user.split_once(':') {
        Some((user, group)) => ordinary(user) && ordinary(group),
        None => ordinary(user),
    }
}

#[cfg(test)]
mod tests;
