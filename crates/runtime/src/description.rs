//! What matters about a sandbox, in a file beside its disk: enough to go on with the disk when the store does not know it, because
//! the store was damaged, lost, or replaced by an older one.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use bathy_spec::{Choice, SandboxSpec};
use serde::{Deserialize, Serialize};

use crate::folder::{Folder, sync_folder};

/// The form of the file. A later version that adds to it keeps the number.
const FORMAT: u32 = 1;
/// No description is longer.
const MOST: u64 = 4 << 20;

/// What stands beside the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    format: u32,
    /// Its id when this was written. A copy of the folder has another.
    pub id: String,
    pub name: Option<String>,
    /// What was asked for, as it was last changed.
    pub spec: SandboxSpec,
    /// What was to run it when it was made.
    pub engine: Choice,
    /// When it was made: nanoseconds since 1970.
    pub created_ns: u64,
    /// If it is a REPL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repl: Option<ReplDescription>,
}

/// What makes a sandbox a REPL.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplDescription {
    /// What it is called.
    pub name: String,
    pub language: String,
    /// Its context in the sandbox.
    pub context: String,
}

impl Description {
    /// Of a sandbox that is made.
    pub fn new(id: String, name: Option<String>, spec: SandboxSpec, engine: Choice, created_ns: u64) -> Self {
        Self { format: FORMAT, id, name, spec, engine, created_ns, repl: None }
    }

    /// Reads it. None if there is none, as in the folders of earlier versions.
    ///
    /// # Errors
    /// When there is one that cannot be read.
    pub fn read(folder: &Folder) -> io::Result<Option<Self>> {
        let path = folder.description();
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let text = match File::options().read(true).custom_flags(flags).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => io::read_to_string(opened?.take(MOST))?,
        };
        let unreadable = |error| io::Error::other(format!("{error}. Move the file away to go on without it"));
        let found: Self = serde_json::from_str(&text).map_err(unreadable)?;
        if found.format > FORMAT {
            return Err(io::Error::other(format!(
                "it was written by a later version of bathy (its format is {}, this one knows {FORMAT})",
                found.format
            )));
        }
        Ok(Some(found))
    }

    /// As it is written.
    pub fn to_bytes(&self) -> io::Result<Vec<u8>> {
        Ok(serde_json::to_vec_pretty(self)?)
    }

    /// Writes it in place of the one that is there, whole or not at all, and waits until the disk has it.
    pub fn write(&self, folder: &Folder) -> io::Result<()> {
        let path = folder.description();
        // Of its own: another process may write one, too.
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
            // The old one stays; a half of the new one would only take space.
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
