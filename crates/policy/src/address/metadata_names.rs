//! Names under which clouds serve metadata.

use crate::HostName;

const NAMES: [&str; 9] = [
    "api.metadata.cloud.ibm.com",
    "instance-data",
    "metadata",
    "metadata.goog",
    "metadata.google.internal",
    "metadata.packet.net",
    "metadata.platformequinix.com",
    "metadata.tencentyun.com",
    "rancher-metadata",
];

/// Clouds append the domain of a project or a region to these, which ends in `internal`.
const FIRST_LABELS: [&str; 2] = ["instance-data", "metadata"];

/// Whether a name is known to resolve to a metadata service, or is below such a name.
pub fn is_metadata_name(name: &HostName) -> bool {
    let name = name.as_str();
    let below =
        |known: &str| name.strip_suffix(known).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    let mut labels = name.split('.');
    let first = labels.next().is_some_and(|label| FIRST_LABELS.contains(&label));
    // Single-label names must match exactly, or every name of a domain with that label would match.
    NAMES.iter().any(|known| if known.contains('.') { below(known) } else { name == *known })
        || (first && labels.next_back() == Some("internal"))
}
