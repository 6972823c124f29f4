//! Rate limits on a sandbox's disks.

use bathy_protocol::launch;
use serde::{Deserialize, Serialize};

use super::{MIB, SandboxSpec, Size, SpecError};

/// With less bandwidth, a guest does not become ready in time.
pub const MIN_BANDWIDTH: Size = Size(MIB);
/// With fewer flushes, a guest does not become ready in time.
pub const MIN_FLUSHES: u32 = 10;

/// Rate limits on a sandbox's disks, per second, with a burst of four seconds' worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiskLimits {
    /// Bytes written per second.
    pub write_bandwidth: Size,
    /// Bytes read per second, of the image and of the disk each; unlimited if absent.
    pub read_bandwidth: Option<Size>,
    /// Flushes to stable storage per second. An ephemeral sandbox makes none.
    pub flushes: u32,
}

impl Default for DiskLimits {
    /// Half of what was measured on a virtual disk on solid-state storage (some 250 MB/s written, 1000
    /// flushes), so that one sandbox leaves half to the others.
    fn default() -> Self {
        Self { write_bandwidth: Size(128 * MIB), read_bandwidth: None, flushes: 500 }
    }
}

impl DiskLimits {
    /// Converts the limits for the keeper.
    pub fn for_keeper(&self) -> launch::DiskLimits {
        launch::DiskLimits {
            write_bandwidth: self.write_bandwidth.0,
            read_bandwidth: self.read_bandwidth.map(|bandwidth| bandwidth.0),
            flushes: self.flushes,
        }
    }
}

impl SandboxSpec {
    pub(super) fn check_disk_limits(&self) -> Result<(), SpecError> {
        let DiskLimits { write_bandwidth, read_bandwidth, flushes } = self.disk_limits;
        let bandwidths = [("write_bandwidth", Some(write_bandwidth)), ("read_bandwidth", read_bandwidth)];
        for (name, bandwidth) in bandwidths {
            if let Some(wanted) = bandwidth.filter(|bandwidth| *bandwidth < MIN_BANDWIDTH) {
                return Err(SpecError::Bandwidth { name, wanted });
            }
        }
        if flushes < MIN_FLUSHES { Err(SpecError::Flushes(flushes)) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(change: impl FnOnce(&mut DiskLimits)) -> Result<(), SpecError> {
        let mut spec = SandboxSpec::default();
        change(&mut spec.disk_limits);
        spec.checked().map(drop)
    }

    #[test]
    fn limits_leave_a_disk_that_a_guest_gets_ready_with() {
        assert_eq!(with(|limits| limits.write_bandwidth = MIN_BANDWIDTH), Ok(()));
        assert_eq!(with(|limits| limits.read_bandwidth = Some(MIN_BANDWIDTH)), Ok(()));
        assert_eq!(with(|limits| limits.flushes = MIN_FLUSHES), Ok(()));
        assert_eq!(with(|limits| limits.write_bandwidth = Size(u64::MAX)), Ok(()));
        let wanted = Size(MIB - 1);
        let name = "write_bandwidth";
        assert_eq!(
            with(|limits| limits.write_bandwidth = wanted),
            Err(SpecError::Bandwidth { name, wanted })
        );
        let name = "read_bandwidth";
        let error = with(|limits| limits.read_bandwidth = Some(wanted)).unwrap_err();
        assert_eq!(error, SpecError::Bandwidth { name, wanted });
        assert!(error.to_string().contains("read_bandwidth") && error.to_string().contains("1M"), "{error}");
        assert_eq!(with(|limits| limits.flushes = 9), Err(SpecError::Flushes(9)));
    }

    #[test]
    fn sandboxes_that_were_made_without_limits_have_the_default_ones() {
        let spec: SandboxSpec = serde_json::from_str(r#"{"memory":"1G"}"#).unwrap();
        assert_eq!(spec.disk_limits, DiskLimits::default());
        let spec: SandboxSpec = serde_json::from_str(r#"{"disk_limits":{"flushes":20}}"#).unwrap();
        assert_eq!(spec.disk_limits, DiskLimits { flushes: 20, ..DiskLimits::default() });
        let text = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<SandboxSpec>(&text).unwrap(), spec);
    }

    #[test]
    fn keepers_get_what_was_asked_for() {
        let limits =
            DiskLimits { write_bandwidth: Size(2 * MIB), read_bandwidth: Some(Size(3 * MIB)), flushes: 40 };
        let expected =
            launch::DiskLimits { write_bandwidth: 2 * MIB, read_bandwidth: Some(3 * MIB), flushes: 40 };
        assert_eq!(limits.for_keeper(), expected);
    }
}
