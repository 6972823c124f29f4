//! The cache of built artifacts.
//!
//! An entry is a folder named after its recipe's content and the version of its sources. It is built beside
//! its final path and renamed, so that it is either complete or absent. Its manifest has a digest of every
//! file. Hashing a whole image at every start would take longer than the start, so a stamp records the
//! metadata of each file's inode at the time when its digest was verified: a write to the file changes the
//! inode's change time, which cannot be set back by ordinary calls.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, DirBuilder, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::recipe::{Recipe, RecipeError};
use crate::stamp::Stamp;
use crate::trust::{self, TrustError};

const MANIFEST: &str = "manifest.json";
const STAMP: &str = "verified.json";
/// The mode of the cache's folders, whatever the umask is: others cannot write to them.
const SHARED: u32 = 0o755;
const PRIVATE: u32 = 0o700;
/// How many of the last lines of a failed build's log an error shows.
const SHOWN_LINES: usize = 15;

/// An artifact is not available.
#[derive(Debug, Error)]
pub enum ImageCacheError {
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error("Cannot use the cache folder {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Another user could have modified it.
    #[error(transparent)]
    Trust(#[from] TrustError),
    #[error("The {title} could not be built. The whole log is in {log}; its last lines:\n{tail}")]
    Build { title: String, log: PathBuf, tail: String },
    /// The built artifact lacks a file that its recipe promises.
    #[error("The {title} was built without its file {file}")]
    Missing { title: String, file: &'static str },
}

/// The metadata of a built entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The version of the sources.
    pub version: String,
    /// How long the build took in seconds.
    pub build_seconds: u64,
    /// The digest of every file, by name.
    pub files: BTreeMap<String, String>,
}

fn stamp(path: &Path) -> io::Result<Stamp> {
    fs::metadata(path).map(Stamp::from)
}

/// A usable entry of the cache.
#[derive(Clone, Debug)]
pub struct Artifact {
    folder: PathBuf,
    pub manifest: Manifest,
}

impl Artifact {
    /// The path of one of its files.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The digest of one of its files.
    pub fn digest(&self, name: &str) -> Option<&str> {
        self.manifest.files.get(name).map(String::as_str)
    }
}

/// The result of a lookup in the cache.
#[derive(Debug)]
pub enum CacheState {
    /// It exists, and was verified since its inodes last changed.
    Usable(Artifact),
    /// It exists, but has to be hashed first.
    Unverified(Artifact),
    /// It does not exist.
    Absent,
}

#[derive(Clone, Debug)]
pub struct ImageCache {
    root: PathBuf,
}

impl ImageCache {
    /// A cache in this folder, which need not exist yet.
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Looks up an artifact without changing anything.
    pub fn lookup(&self, recipe: &Recipe) -> CacheState {
        let Some(folder) = self.find(recipe) else { return CacheState::Absent };
        let Some(manifest) = read_json::<Manifest>(&folder.join(MANIFEST)) else { return CacheState::Absent };
        let stamps: BTreeMap<String, Stamp> = read_json(&folder.join(STAMP)).unwrap_or_default();
        let untouched = |name: &String| stamp(&folder.join(name)).ok().as_ref() == stamps.get(name);
        let usable = manifest.files.keys().all(|name| stamps.contains_key(name) && untouched(name));
        let artifact = Artifact { folder, manifest };
        if usable { CacheState::Usable(artifact) } else { CacheState::Unverified(artifact) }
    }

    /// The artifact, which is built if it is absent or damaged. `progress` is called for slow steps.
    pub fn ensure(
        &self,
        recipe: &Recipe,
        required: &[&'static str],
        progress: &mut dyn FnMut(&str),
    ) -> Result<Artifact, ImageCacheError> {
        for folder in [&self.root, &self.root.join(&recipe.name)] {
            trust::check(folder)?;
        }
        if let CacheState::Usable(artifact) = self.lookup(recipe) {
            return trusted(artifact);
        }
        let _lock = self.lock(recipe, progress)?;
        match self.lookup(recipe) {
            CacheState::Usable(artifact) => return trusted(artifact),
            CacheState::Unverified(artifact) => {
                let artifact = trusted(artifact)?;
                progress(&format!("checking the {}", recipe.title));
                if self.verify(&artifact)? {
                    return Ok(artifact);
                }
                progress(&format!("the {} is damaged: building it again", recipe.title));
            }
            CacheState::Absent => {}
        }
        self.build(recipe, required, progress)
    }

    /// Hashes every file, and stamps the entry if all digests match.
    pub fn verify(&self, artifact: &Artifact) -> Result<bool, ImageCacheError> {
        let mut stamps = BTreeMap::new();
        for (name, digest) in &artifact.manifest.files {
            let path = artifact.path(name);
            // The stamp is taken first, so that a change during hashing is detected.
            match stamp(&path).and_then(|stamp| Ok((stamp, hash(&path)?))) {
                Ok((stamp, found)) if found == *digest => stamps.insert(name, stamp),
                Ok(_) => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
                Err(source) => return Err(ImageCacheError::Io { path, source }),
            };
        }
        let path = artifact.path(STAMP);
        write_json(&path, &stamps).map_err(|source| ImageCacheError::Io { path, source })?;
        Ok(true)
    }

    /// The name of an entry's folder: the recipe's content and the version of the sources.
    fn folder(&self, recipe: &Recipe, version: &str) -> PathBuf {
        let safe = |c: char| if c.is_ascii_alphanumeric() || ".+-".contains(c) { c } else { '_' };
        let version: String = version.chars().map(safe).collect();
        self.root.join(&recipe.name).join(format!("{}-{version}", recipe.key()))
    }

    /// The newest entry of this recipe.
    fn find(&self, recipe: &Recipe) -> Option<PathBuf> {
        let prefix = format!("{}-", recipe.key());
        let entries = fs::read_dir(self.root.join(&recipe.name)).ok()?.flatten();
        let ours = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
        ours.max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok())
            .map(|entry| entry.path())
    }

    /// Takes the lock that allows one build at a time. The kernel releases it when its holder dies.
    fn lock(&self, recipe: &Recipe, progress: &mut dyn FnMut(&str)) -> Result<File, ImageCacheError> {
        let path = self.root.join(format!("{}.lock", recipe.name));
        let mut take = || -> io::Result<File> {
            make_folder(&self.root, SHARED)?;
            let file = File::options().create(true).truncate(false).write(true).open(&path)?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                progress(&format!("waiting for another bathy that is setting up the {}", recipe.title));
                flock(&file, FlockOperation::LockExclusive)?;
            }
            Ok(file)
        };
        take().map_err(|source| ImageCacheError::Io { path: path.clone(), source })
    }

    fn build(
        &self,
        recipe: &Recipe,
        required: &[&'static str],
        progress: &mut dyn FnMut(&str),
    ) -> Result<Artifact, ImageCacheError> {
        let started = Instant::now();
        let kind = self.root.join(&recipe.name);
        let scratch = kind.join("building");
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| ImageCacheError::Io { path, source }
        };
        // Under the lock, anything at this path was left by a build that was killed.
        remove(&scratch).map_err(failed(&scratch))?;
        let (out, work) = (scratch.join("out"), scratch.join("work"));
        make_folder(&kind, SHARED).map_err(failed(&kind))?;
        // The parent folder is private, whatever permissions the script sets below it.
        for (folder, mode) in [(&scratch, PRIVATE), (&out, SHARED), (&work, SHARED)] {
            make_folder(folder, mode).map_err(failed(folder))?;
        }
        let script = recipe.unpack(&scratch.join("recipe"))?;
        progress(&format!("building the {} (once)", recipe.title));
        let log = self.root.join(format!("{}.log", recipe.name));
        let outcome = run_script(&script, &out, &work, &log, progress).map_err(failed(&log))?;
        if let Err(tail) = outcome {
            remove(&scratch).map_err(failed(&scratch))?;
            return Err(ImageCacheError::Build { title: recipe.title.clone(), log, tail });
        }
        let manifest = describe(&out, started).map_err(failed(&out))?;
        if let Some(file) = required.iter().find(|file| !manifest.files.contains_key(**file)) {
            return Err(ImageCacheError::Missing { title: recipe.title.clone(), file });
        }
        write_json(&out.join(MANIFEST), &manifest).map_err(failed(&out))?;
        let folder = self.folder(recipe, &manifest.version);
        remove(&folder).map_err(failed(&folder))?;
        // Renamed when everything is flushed: after a power failure there is a complete entry or none.
        sync_all(&out).map_err(failed(&out))?;
        fs::rename(&out, &folder).and_then(|()| File::open(&kind)?.sync_all()).map_err(failed(&folder))?;
        remove(&scratch).map_err(failed(&scratch))?;
        let artifact = Artifact { folder, manifest };
        self.verify(&artifact)?;
        Ok(artifact)
    }
}

/// Checks that only its owner or root could have created or changed an artifact.
fn trusted(artifact: Artifact) -> Result<Artifact, ImageCacheError> {
    trust::check(&artifact.folder)?;
    let files = artifact.manifest.files.keys().map(String::as_str).chain([MANIFEST, STAMP]);
    files.map(|name| artifact.path(name)).try_for_each(|path| trust::check(&path))?;
    Ok(artifact)
}

fn make_folder(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(path)
}

/// Runs a recipe's script; the inner error is the end of its log.
fn run_script(
    script: &Path,
    out: &Path,
    work: &Path,
    log: &Path,
    progress: &mut dyn FnMut(&str),
) -> io::Result<Result<(), String>> {
    let mut log = File::create(log)?;
    let (reader, writer) = io::pipe()?;
    let mut child = Command::new("bash")
        .arg(script)
        .arg(out)
        .current_dir(work)
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .spawn()?;
    let mut tail = VecDeque::new();
    for line in BufReader::new(reader).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        writeln!(log, "{line}")?;
        if let Some(step) = line.strip_prefix("==> ") {
            progress(step);
        }
        if tail.len() == SHOWN_LINES {
            tail.pop_front();
        }
        tail.push_back(line);
    }
    let succeeded = child.wait()?.success();
    Ok(if succeeded { Ok(()) } else { Err(tail.make_contiguous().join("\n")) })
}

fn describe(out: &Path, started: Instant) -> io::Result<Manifest> {
    let version = fs::read_to_string(out.join("version"))?.trim().to_owned();
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(out)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name != "version" {
            // Artifacts are read-only, to guard against the owner's own mistakes.
            let executable = fs::metadata(&path)?.permissions().mode() & 0o111 != 0;
            fs::set_permissions(&path, fs::Permissions::from_mode(if executable { 0o555 } else { 0o444 }))?;
            files.insert(name, hash(&path)?);
        }
    }
    Ok(Manifest { version, build_seconds: started.elapsed().as_secs(), files })
}

fn hash(path: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok(hasher.finalize().to_hex().to_string())
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec_pretty(value)?;
    let mut fresh = path.to_owned();
    fresh.as_mut_os_string().push(".new");
    let mut file = File::options().create(true).truncate(true).write(true).mode(0o644).open(&fresh)?;
    file.write_all(&text)?;
    file.sync_all()?;
    fs::rename(fresh, path)
}

fn sync_all(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        File::open(entry?.path())?.sync_all()?;
    }
    File::open(folder)?.sync_all()
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Builds a file with a known content, and counts its builds in a file beside the cache.
    const GOOD: &[u8] =
        b"echo '==> making it'; echo 1.0 > $1/version; echo content > $1/file; echo x >> ../../../../builds";
    const BAD: &[u8] = b"echo the reason; exit 3";

    fn recipe(script: &'static [u8]) -> Recipe {
        let files = [("test/thing/build.sh", script)];
        Recipe::new("thing".to_owned(), "test thing".to_owned(), "test/thing".to_owned(), &files)
    }

    fn store() -> (tempfile::TempDir, ImageCache) {
        let folder = tempfile::tempdir().unwrap();
        let store = ImageCache::new(folder.path().join("cache"));
        (folder, store)
    }

    fn builds(folder: &tempfile::TempDir) -> usize {
        fs::read_to_string(folder.path().join("builds")).unwrap_or_default().lines().count()
    }

    #[test]
    fn it_is_built_once_and_then_found() {
        let (folder, store) = store();
        let mut steps = Vec::new();
        let artifact =
            store.ensure(&recipe(GOOD), &["file"], &mut |step| steps.push(step.to_owned())).unwrap();
        assert_eq!(fs::read_to_string(artifact.path("file")).unwrap(), "content\n");
        assert_eq!(artifact.manifest.version, "1.0");
        assert!(steps.contains(&"making it".to_owned()), "{steps:?}");
        store.ensure(&recipe(GOOD), &["file"], &mut |_| ()).unwrap();
        assert_eq!(builds(&folder), 1);
    }

    #[test]
    fn a_damaged_file_is_noticed_by_its_digest_and_built_again() {
        let (folder, store) = store();
        let artifact = store.ensure(&recipe(GOOD), &["file"], &mut |_| ()).unwrap();
        let path = artifact.path("file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(&path, "CONTENT\n").unwrap();
        let mut steps = Vec::new();
        let artifact =
            store.ensure(&recipe(GOOD), &["file"], &mut |step| steps.push(step.to_owned())).unwrap();
        assert!(steps.iter().any(|step| step.contains("damaged")), "{steps:?}");
        assert_eq!(fs::read_to_string(artifact.path("file")).unwrap(), "content\n");
        assert_eq!(builds(&folder), 2);
    }

    #[test]
    fn a_touched_but_unchanged_file_is_only_checked() {
        let (folder, store) = store();
        let artifact = store.ensure(&recipe(GOOD), &["file"], &mut |_| ()).unwrap();
        fs::set_permissions(artifact.path("file"), fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(store.lookup(&recipe(GOOD)), CacheState::Unverified(_)));
        store.ensure(&recipe(GOOD), &["file"], &mut |_| ()).unwrap();
        assert!(matches!(store.lookup(&recipe(GOOD)), CacheState::Usable(_)));
        assert_eq!(builds(&folder), 1);
    }

    #[test]
    fn of_two_at_once_one_builds_and_the_other_waits() {
        let (folder, store) = store();
        let waited = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut progress = |step: &str| {
                        if step.starts_with("waiting") {
                            waited.fetch_add(1, Ordering::Relaxed);
                        }
                    };
                    store.ensure(&recipe(GOOD), &["file"], &mut progress).unwrap();
                });
            }
        });
        assert_eq!(builds(&folder), 1);
    }

    #[test]
    fn an_entry_that_others_could_have_changed_is_not_used() {
        let (folder, store) = store();
        let ensure = || store.ensure(&recipe(GOOD), &["file"], &mut |_| ());
        let artifact = ensure().unwrap();
        let kind = store.root().join("thing");
        for (path, usual) in [
            (store.root().to_owned(), 0o755),
            (kind.clone(), 0o755),
            (artifact.folder.clone(), 0o755),
            (artifact.path("file"), 0o444),
            (artifact.path(MANIFEST), 0o644),
            (artifact.path(STAMP), 0o644),
        ] {
            let mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            mode(usual | 0o020);
            let error = ensure().unwrap_err();
            assert!(matches!(&error, ImageCacheError::Trust(_)), "{path:?}: {error}");
            mode(usual);
            ensure().unwrap();
        }
        if rustix::process::geteuid().is_root() {
            for path in [kind, artifact.folder.clone(), artifact.path("file")] {
                std::os::unix::fs::chown(&path, Some(1234), None).unwrap();
                assert!(ensure().unwrap_err().to_string().contains("user 1234"), "{path:?}");
                std::os::unix::fs::chown(&path, Some(0), None).unwrap();
                ensure().unwrap();
            }
        }
        assert_eq!(builds(&folder), 1);
    }

    #[test]
    fn a_failed_build_says_why_and_leaves_nothing() {
        let (_folder, store) = store();
        let error = store.ensure(&recipe(BAD), &["file"], &mut |_| ()).unwrap_err();
        assert!(error.to_string().contains("the reason"), "{error}");
        assert!(matches!(store.lookup(&recipe(BAD)), CacheState::Absent));
        assert!(!store.root().join("thing/building").exists());
    }

    #[test]
    fn a_recipe_that_forgets_a_file_is_an_error() {
        let (_folder, store) = store();
        let error = store.ensure(&recipe(GOOD), &["other"], &mut |_| ()).unwrap_err();
        assert!(error.to_string().contains("other"), "{error}");
    }

    #[test]
    fn the_rest_of_a_killed_build_is_cleared_away() {
        let (_folder, store) = store();
        let rest = store.root().join("thing/building/work/rest");
        fs::create_dir_all(&rest).unwrap();
        store.ensure(&recipe(GOOD), &["file"], &mut |_| ()).unwrap();
        assert!(!rest.exists());
    }
}
