//! A cache of the last KVM probe, so that not every start runs a probe guest.
//!
//! An entry is valid for one boot and one device. The cache is only an optimisation: errors count as a
//! missing entry.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bathy_spec::host;
use serde::{Deserialize, Serialize};

use crate::kvm_probe::KvmSupport;

/// The file in the state folder.
pub const FILE: &str = "kvm.json";
/// The version of the probe: results of another version are not used.
const PROBE: u32 = 2;
/// The maximum size of the file.
const MAX_FILE: u64 = 4096;
/// How long a probe that did not finish is cached: an emulated device may get faster or be replaced.
const RETRY_SLOW_AFTER: Duration = Duration::from_secs(10 * 60);

/// The identity of a device: if any of these changes, the cached result is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    probe: u32,
    boot: String,
    device: u64,
    inode: u64,
    number: u64,
    mode: u32,
    user: u32,
    group: u32,
}

impl Device {
    /// The identity of the opened device, if the kernel reports it.
    pub fn of(opened: &File) -> Option<Self> {
        let data = opened.metadata().ok()?;
        Some(Self {
            probe: PROBE,
            boot: Some(host::boot_id()).filter(|id| !id.is_empty())?,
            device: data.dev(),
            inode: data.ino(),
            number: data.rdev(),
            mode: data.mode(),
            user: data.uid(),
            group: data.gid(),
        })
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    device: Device,
    #[serde(rename = "verdict")]
    support: KvmSupport,
}

#[derive(Debug)]
pub(crate) struct ProbeCache {
    state: PathBuf,
    path: PathBuf,
}

impl ProbeCache {
    /// The cache of a state folder.
    pub fn of(state: &Path) -> Self {
        Self { state: state.to_owned(), path: state.join(FILE) }
    }

    /// The cached result for this device, unless it is time for a new probe.
    pub fn get(&self, device: &Device) -> Option<KvmSupport> {
        self.read(device, RETRY_SLOW_AFTER)
    }

    /// As [`Self::get`], where no new probe would be run: the last result is still the best one.
    pub fn get_of_any_age(&self, device: &Device) -> Option<KvmSupport> {
        self.read(device, Duration::MAX)
    }

    fn read(&self, device: &Device, slow_until: Duration) -> Option<KvmSupport> {
        // Whatever is at the path, opening it does not block.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = File::options().read(true).custom_flags(flags).open(&self.path).ok()?;
        let data = file.metadata().ok().filter(fs::Metadata::is_file)?;
        let age = data.modified().ok()?.elapsed().unwrap_or_default();
        let mut text = String::new();
        file.take(MAX_FILE).read_to_string(&mut text).ok()?;
        let entry: Entry = serde_json::from_str(&text).ok()?;
        // Permissions are checked at every start, so only a measurement is cached.
        let holds = match entry.support {
            KvmSupport::Hardware { .. } => true,
            KvmSupport::NotHardware { .. } => age < slow_until,
            _ => false,
        };
        (entry.device == *device && holds).then_some(entry.support)
    }

    /// Caches a result if it is a measurement.
    pub fn put(&self, device: Device, support: KvmSupport) {
        if support.is_measurement() {
            // If that fails, the next start probes again.
            let _ = self.write(&Entry { device, support });
        }
    }

    fn write(&self, entry: &Entry) -> io::Result<()> {
        let folder = &self.state;
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let text = serde_json::to_vec(entry)?;
        // A name of its own, so that concurrent writers each write a complete file.
        let fresh = folder.join(format!(".{FILE}.{}", std::process::id()));
        let written = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&fresh)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| fs::rename(&fresh, &self.path));
        if written.is_err() {
            let _ = fs::remove_file(&fresh);
        }
        written
    }
}
