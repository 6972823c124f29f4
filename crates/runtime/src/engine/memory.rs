//! What was last found out about `/dev/kvm`, so that a guest is not tried at every start.
//!
//! It holds for one boot of the machine and one device. It is only ever a shortcut: what cannot be read or written is
//! as good as not there.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bathy_spec::host;
use serde::{Deserialize, Serialize};

use crate::kvm_probe::Verdict;

/// Its file in the state folder.
pub const FILE: &str = "kvm.json";
/// Counts the ways in which guests are tried: what another version found is not known to this one.
const PROBE: u32 = 2;
/// Longer than any memory.
const MAX_FILE: u64 = 4096;
/// How long a guest's failure to finish is remembered: an emulated one may get faster, or be replaced.
const DOUBT: Duration = Duration::from_secs(10 * 60);

/// A device as it is at present: if one of these is another, so may be what it is good for.
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
    /// The opened device, unless the kernel does not tell.
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
    verdict: Verdict,
}

#[derive(Debug)]
pub struct Memory {
    state: PathBuf,
    path: PathBuf,
}

impl Memory {
    /// That of a state folder.
    pub fn of(state: &Path) -> Self {
        Self { state: state.to_owned(), path: state.join(FILE) }
    }

    /// What was found out about this device.
    pub fn recall(&self, device: &Device) -> Option<Verdict> {
        // Whatever lies there, it is not waited for.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = File::options().read(true).custom_flags(flags).open(&self.path).ok()?;
        let data = file.metadata().ok().filter(fs::Metadata::is_file)?;
        let age = data.modified().ok()?.elapsed().unwrap_or_default();
        let mut text = String::new();
        file.take(MAX_FILE).read_to_string(&mut text).ok()?;
        let entry: Entry = serde_json::from_str(&text).ok()?;
        // Who may use the device is asked every time, so nothing else than a measurement is worth remembering.
        let holds = match entry.verdict {
            Verdict::Hardware { .. } => true,
            Verdict::NotHardware { .. } => age < DOUBT,
            _ => false,
        };
        (entry.device == *device && holds).then_some(entry.verdict)
    }

    /// Remembers what was found out, if it was.
    pub fn keep(&self, device: Device, verdict: Verdict) {
        if verdict.is_measurement() {
            // The next start tries again.
            let _ = self.write(&Entry { device, verdict });
        }
    }

    fn write(&self, entry: &Entry) -> io::Result<()> {
        let folder = &self.state;
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let text = serde_json::to_vec(entry)?;
        // A name of its own, so that of several who write at once each writes a whole file.
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
