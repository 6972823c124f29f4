//! The files of one persistent sandbox.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bathy_spec::paths::Paths;
use bathy_spec::{SandboxSpec, name};

/// How often a removal is retried when other processes interfere.
const TRIES: u32 = 20;
/// The name prefixes of a folder while it is created and while it is removed. Ids never begin with a dot, so
/// a finished folder is never treated as a leftover.
const MAKING: &str = ".new-";
const REMOVING: &str = ".removed-";

/// The folder of a sandbox's files.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
}

/// What an interrupted command left behind.
#[derive(Clone, Debug)]
pub enum Leftover {
    /// The incomplete folder of the sandbox with this id, which was being created.
    Unfinished(Folder, String),
    /// The remains of the sandbox with this id, which was being removed.
    Removed(Folder, String),
}

impl Folder {
    pub fn all(paths: &Paths) -> PathBuf {
        paths.state.join("sandboxes")
    }

    /// The folder of the sandbox with this id.
    pub fn of(paths: &Paths, id: &str) -> Self {
        Self { path: Self::all(paths).join(id) }
    }

    /// The temporary folder in which the same sandbox is created.
    pub fn unfinished(&self) -> Self {
        self.renamed(MAKING)
    }

    fn renamed(&self, prefix: &str) -> Self {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        self.with_name(prefix, &name)
    }

    fn with_name(&self, prefix: &str, name: &str) -> Self {
        Self { path: self.path.with_file_name(format!("{prefix}{name}")) }
    }

    /// The names of all sandbox folders, including those that are not named after an id.
    pub fn names(paths: &Paths) -> io::Result<Vec<String>> {
        Ok(entries(paths)?.into_iter().filter(|name| !name.starts_with('.')).collect())
    }

    /// Finds what interrupted commands left behind.
    pub fn leftovers(paths: &Paths) -> io::Result<Vec<Leftover>> {
        let leftover = |name: String| {
            let folder = Self::of(paths, &name);
            match (name.strip_prefix(MAKING), name.strip_prefix(REMOVING)) {
                (Some(id), _) if name::is_id(id) => Some(Leftover::Unfinished(folder, id.to_owned())),
                (_, Some(id)) if name::is_id(id) => Some(Leftover::Removed(folder, id.to_owned())),
                _ => None,
            }
        };
        Ok(entries(paths)?.into_iter().filter_map(leftover).collect())
    }

    /// Creates the folder, accessible to this user only.
    pub fn create(&self) -> io::Result<()> {
        if let Some(parent) = self.path.parent() {
            make_durable_folder(parent)?;
        }
        DirBuilder::new().mode(0o700).create(&self.path)
    }

    /// Flushes the folder with everything in it to the disk.
    pub fn sync(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                File::open(entry.path())?.sync_all()?;
            }
        }
        sync_folder(&self.path)?;
        self.path.parent().map_or(Ok(()), sync_folder)
    }

    /// Renames a complete and flushed folder to its final name, durably.
    pub fn finish(&self, unfinished: &Self) -> io::Result<()> {
        // Never replaces anything: a plain rename would silently replace an empty folder.
        rustix::fs::renameat_with(
            rustix::fs::CWD,
            &unfinished.path,
            rustix::fs::CWD,
            &self.path,
            rustix::fs::RenameFlags::NOREPLACE,
        )?;
        self.path.parent().map_or(Ok(()), sync_folder)
    }

    /// Waits for the lock that guards changes of the description. None if there is no such folder.
    pub fn lock(&self) -> io::Result<Option<File>> {
        let folder = match File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            folder => folder?,
        };
        loop {
            match rustix::fs::flock(&folder, rustix::fs::FlockOperation::LockExclusive) {
                Err(rustix::io::Errno::INTR) => {}
                locked => return Ok(locked.map(|()| Some(folder))?),
            }
        }
    }

    /// Renames the folder so that it counts as a leftover. A missing folder is no error.
    pub fn begin_removal(&self) -> io::Result<Self> {
        let mut removed = self.renamed(REMOVING);
        if !self.path.file_name().and_then(|name| name.to_str()).is_some_and(name::is_id) {
            // The folder is a copy with another name: only folders named after an id are recognised as
            // leftovers.
            removed = self.with_name(REMOVING, &name::new_id()?);
        }
        match fs::rename(&self.path, &removed.path) {
            // An earlier removal of the same sandbox was not completed, and the sandbox was restored since.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                removed.remove()?;
                fs::rename(&self.path, &removed.path)?;
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.path.parent().map_or(Ok(()), |parent| match sync_folder(parent) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        })?;
        Ok(removed)
    }

    /// The target of the folder if it is a symbolic link.
    pub fn link_target(&self) -> Option<PathBuf> {
        let target = fs::read_link(&self.path).ok()?;
        Some(self.path.parent().map_or_else(|| target.clone(), |parent| parent.join(&target)))
    }

    /// Removes the disk of a sandbox that is being removed, to free space. The target of a link is left
    /// alone, as in `remove`.
    pub fn free_disk(&self) {
        if !self.path.is_symlink() {
            let _ = fs::remove_file(self.disk());
        }
    }

    /// Removes the folder with everything in it. A missing folder is no error.
    pub fn remove(&self) -> io::Result<()> {
        let mut tries = 0;
        loop {
            match fs::remove_dir_all(&self.path) {
                // Another command has just created its lock file in the folder and is about to notice the
                // removal.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && tries < TRIES => tries += 1,
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => return Ok(()),
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn disk(&self) -> PathBuf {
        self.path.join("disk")
    }

    /// The ring buffer file with the output of jobs.
    pub fn output_log(&self) -> PathBuf {
        self.path.join("output.ring")
    }

    /// The ring buffer file with the guest kernel's console.
    pub fn console_log(&self) -> PathBuf {
        self.path.join("console.ring")
    }

    /// The image's defaults for commands.
    pub fn image_config(&self) -> PathBuf {
        self.path.join("image.json")
    }

    /// The description, for when the store has no record.
    pub fn description(&self) -> PathBuf {
        self.path.join("sandbox.json")
    }

    /// The monitor's own log.
    pub fn monitor_log(&self) -> PathBuf {
        self.path.join("monitor.log")
    }

    /// The memory of a paused sandbox.
    pub fn parking(&self) -> PathBuf {
        self.path.join("parking")
    }

    /// Opens a file of this folder for reading and writing. It must be a regular file, not a link.
    pub fn open(path: &Path) -> io::Result<File> {
        let file = File::options().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a file")) }
    }

    /// Opens the file for the memory of a paused sandbox, which is empty until then.
    pub fn open_parking(&self, spec: &SandboxSpec) -> io::Result<File> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.custom_flags(libc::O_NOFOLLOW).open(self.parking())?;
        file.set_len(spec.memory.0)?;
        Ok(file)
    }
}

/// The names in the folder of all sandboxes. Empty if there is no such folder yet.
fn entries(paths: &Paths) -> io::Result<Vec<String>> {
    let listed = match fs::read_dir(Folder::all(paths)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed?,
    };
    let mut names = Vec::new();
    for entry in listed {
        let entry = entry?;
        // Links are skipped: two of them could lead to one disk, which must not become two sandboxes.
        if entry.file_type()?.is_dir() {
            names.extend(entry.file_name().into_string());
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Creates a folder for this user only, with its parents, durably.
pub fn make_durable_folder(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_durable_folder(path.parent().ok_or(error)?)?;
            return make_durable_folder(path);
        }
        made => made?,
    }
    path.parent().map_or(Ok(()), sync_folder)
}

/// Flushes the directory entries of a folder.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "abcdefghijkl";

    fn paths(home: &Path) -> Paths {
        Paths { state: home.join("a/state"), cache: home.join("cache") }
    }

    #[test]
    fn a_sandbox_has_its_name_only_between_its_making_and_its_removal() {
        let home = tempfile::tempdir().unwrap();
        let paths = paths(home.path());
        assert!(Folder::names(&paths).unwrap().is_empty() && Folder::leftovers(&paths).unwrap().is_empty());
        let folder = Folder::of(&paths, ID);
        let unfinished = folder.unfinished();
        unfinished.create().unwrap();
        fs::write(unfinished.disk(), "disk").unwrap();
        assert_eq!(Folder::names(&paths).unwrap(), [""; 0]);
        assert!(matches!(&Folder::leftovers(&paths).unwrap()[..], [Leftover::Unfinished(_, id)] if id == ID));
        folder.finish(&unfinished).unwrap();
        assert_eq!(Folder::names(&paths).unwrap(), [ID]);
        assert!(Folder::leftovers(&paths).unwrap().is_empty());
        assert_eq!(fs::read(folder.disk()).unwrap(), b"disk");
        let removed = folder.begin_removal().unwrap();
        assert_eq!(Folder::names(&paths).unwrap(), [""; 0]);
        assert!(matches!(&Folder::leftovers(&paths).unwrap()[..], [Leftover::Removed(_, id)] if id == ID));
        removed.remove().unwrap();
        assert!(Folder::leftovers(&paths).unwrap().is_empty());
        folder.begin_removal().unwrap().remove().unwrap();
    }

    #[test]
    fn nothing_that_is_there_is_replaced() {
        let home = tempfile::tempdir().unwrap();
        let folder = Folder::of(&paths(home.path()), ID);
        folder.create().unwrap();
        let unfinished = folder.unfinished();
        unfinished.create().unwrap();
        assert_eq!(folder.finish(&unfinished).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert!(unfinished.path().exists());
    }

    /// Also when a full disk makes the removal free space first.
    #[test]
    fn what_a_linked_folder_leads_to_stays() {
        let home = tempfile::tempdir().unwrap();
        let folder = Folder::of(&paths(home.path()), ID);
        folder.create().unwrap();
        assert_eq!(folder.link_target(), None);
        fs::write(folder.disk(), "disk").unwrap();
        let elsewhere = folder.path().with_file_name("elsewhere");
        fs::rename(folder.path(), &elsewhere).unwrap();
        std::os::unix::fs::symlink("elsewhere", folder.path()).unwrap();
        assert_eq!(folder.link_target(), Some(elsewhere.clone()));
        let removed = folder.begin_removal().unwrap();
        removed.free_disk();
        removed.remove().unwrap();
        assert!(!removed.path().is_symlink());
        assert_eq!(fs::read(elsewhere.join("disk")).unwrap(), b"disk");
        let plain = Folder { path: elsewhere };
        plain.free_disk();
        assert!(!plain.disk().exists(), "and one that is no link gives its space");
    }

    #[test]
    fn a_folder_that_other_people_made_is_no_leftover() {
        let home = tempfile::tempdir().unwrap();
        let paths = paths(home.path());
        for name in [".git", ".new-", ".new-x", ".removed-../..", ".snapshots", "abc.bak", ID] {
            fs::create_dir_all(Folder::all(&paths).join(name.replace('/', "_"))).unwrap();
        }
        fs::write(Folder::all(&paths).join("file"), "").unwrap();
        std::os::unix::fs::symlink(home.path(), Folder::all(&paths).join("linked")).unwrap();
        assert!(Folder::leftovers(&paths).unwrap().is_empty());
        assert_eq!(Folder::names(&paths).unwrap(), ["abc.bak", ID]);
    }
}
