//! A sandbox's description: a file beside its disk with everything that is needed to continue when the store
//! has no record, because it was damaged, lost or replaced by an older one.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use bathy_spec::{Choice, SandboxSpec};
use serde::{Deserialize, Serialize};

use crate::folder::{Folder, sync_folder};

/// The format version. A later version that only adds fields keeps the number.
const FORMAT: u32 = 1;
/// The maximum size of the file.
const MAX_SIZE: u64 = 4 << 20;

/// The content of the description file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    format: u32,
    /// The sandbox's id when this was written. A copy of the folder has another.
    pub id: String,
    pub name: Option<String>,
    /// The specification, including later changes.
    pub spec: SandboxSpec,
    /// The engine that was chosen at creation.
    pub engine: Choice,
    /// The creation time in nanoseconds since 1970.
    pub created_ns: u64,
    /// Present if the sandbox is a REPL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repl: Option<ReplDescription>,
}

/// The REPL that a sandbox holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplDescription {
    pub name: String,
    pub language: String,
    /// The context in the sandbox.
    pub context: String,
}

impl Description {
    /// The description of a new sandbox.
    pub fn new(id: String, name: Option<String>, spec: SandboxSpec, engine: Choice, created_ns: u64) -> Self {
        Self { format: FORMAT, id, name, spec, engine, created_ns, repl: None }
    }

    /// Reads the description. None if there is no file, as with earlier versions.
    ///
    /// # Errors
    /// The file exists but cannot be read.
    pub fn read(folder: &Folder) -> io::Result<Option<Self>> {
        let path = folder.description();
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let text = match File::options().read(true).custom_flags(flags).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => io::read_to_string(opened?.take(MAX_SIZE))?,
        };
        let unreadable =
            |error| io::Error::other(format!("{error}. Move the file away to continue without it"));
        let found: Self = serde_json::from_str(&text).map_err(unreadable)?;
        if found.format > FORMAT {
            return Err(io::Error::other(format!(
                "it was written by a later version of bathy (its format is {}, this one knows {FORMAT})",
                found.format
            )));
        }
        Ok(Some(found))
    }

    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        Ok(serde_json::to_vec_pretty(self)?)
    }

    /// Replaces the file atomically and flushes it to the disk.
    pub fn write(&self, folder: &Folder) -> io::Result<()> {
        let path = folder.description();
        // A name of its own: another process may be writing one, too.
        let new = path.with_extension(format!("json.{}", std::process::id()));
        let written = (|| {
            let mut options = File::options();
            options.create(true).truncate(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
            let mut file = options.open(&new)?;
            file.write_all(&self.to_bytes()?)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        })();
        if written.is_err() {
            // The old file stays; a partial new one would only take space.
            let _ = fs::remove_file(&new);
        }
        written.and_then(|()| sync_folder(folder.path()))
    }
}

#[cfg(test)]
mod tests {
    use bathy_spec::Chosen;
    use bathy_spec::paths::Paths;

    use super::*;

    fn folder(home: &std::path::Path) -> Folder {
        let folder = Folder::of(&Paths { state: home.into(), cache: home.into() }, "abcdefghijkl");
        folder.create().unwrap();
        folder
    }

    #[test]
    fn what_was_written_is_read_and_bad_content_is_an_error() {
        let home = tempfile::tempdir().unwrap();
        let folder = folder(home.path());
        assert_eq!(Description::read(&folder).unwrap(), None);
        let engine = Choice { engine: Chosen::Uml, reason: "a test".to_owned() };
        let spec = SandboxSpec::default();
        let mut new = Description::new("abcdefghijkl".into(), Some("web".into()), spec, engine, 7);
        new.write(&folder).unwrap();
        assert_eq!(Description::read(&folder).unwrap().as_ref(), Some(&new));
        new.format = FORMAT + 1;
        new.write(&folder).unwrap();
        assert!(Description::read(&folder).unwrap_err().to_string().contains("later version"));
        for bad in ["", "{}", "{\"format\":1}", "\0\0\0\0"] {
            fs::write(folder.description(), bad).unwrap();
            assert!(Description::read(&folder).is_err(), "{bad:?}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }
}
