//! Build recipes: folders of this repository with a `build.sh`, embedded in the binary.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Every file of every recipe, with its path in the repository.
const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/recipes.rs"));

/// Files outside the recipes' folders: the path prefixes of the recipes that use them, and the files.
const SHARED: &[(&str, &[&str])] = &[
    ("", &["guest/mirror.sh"]),
    (
        "guest/kernel/",
        &[
            "guest/kernel/config",
            "guest/kernel/config.forbidden",
            "guest/kernel/source.exclude",
            "guest/kernel/source.sh",
        ],
    ),
];

/// A recipe cannot be used.
#[derive(Debug, Error)]
pub enum RecipeError {
    /// There is no such image.
    #[error("There is no image {wanted:?}. Known images: {known}")]
    UnknownImage { wanted: String, known: String },
    /// The recipe cannot be unpacked for the build.
    #[error("Cannot write the recipe to {0}")]
    Unpack(PathBuf, #[source] io::Error),
}

/// A root image's defaults for commands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageConfig {
    pub user: String,
    pub cwd: String,
    pub env: BTreeMap<String, String>,
    /// Comes before the words of the main command.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// The words of the main command if none are given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// What the main command is asked to end with; SIGTERM if empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stop_signal: String,
}

impl ImageConfig {
    /// The words of the main command, of which the caller gave `words`.
    pub fn command(&self, words: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        let bytes = |words: &[String]| words.iter().map(|word| word.clone().into_bytes()).collect::<Vec<_>>();
        let mut all = bytes(&self.entrypoint);
        all.extend(if words.is_empty() { bytes(&self.cmd) } else { words });
        all
    }
}

/// A file of a recipe: its path in the repository, and its content.
type RecipeFile = (&'static str, &'static [u8]);

/// Something that can be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// The name in the cache.
    pub name: String,
    /// The name in messages.
    pub title: String,
    /// The folder in the repository.
    folder: String,
    files: Vec<RecipeFile>,
}

impl Recipe {
    /// The recipe in `folder`, out of all `files`.
    pub(crate) fn new(name: String, title: String, folder: String, files: &[RecipeFile]) -> Self {
        let below = |path: &str| path.strip_prefix(folder.as_str()).is_some_and(|rest| rest.starts_with('/'));
        let shared = |path: &str| {
            SHARED.iter().any(|(start, shared)| folder.starts_with(start) && shared.contains(&path))
        };
        let files = files.iter().copied().filter(|(path, _)| shared(path) || below(path)).collect();
        Self { name, title, folder, files }
    }

    /// The recipe of the guest kernel of the uml engine.
    pub fn uml_kernel() -> Self {
        Self::new("kernel-uml".to_owned(), "guest kernel".to_owned(), "guest/kernel/uml".to_owned(), FILES)
    }

    /// The recipe of the guest kernel of the kvm engine.
    pub fn kvm_kernel() -> Self {
        Self::new("kernel-kvm".to_owned(), "microVM kernel".to_owned(), "guest/kernel/kvm".to_owned(), FILES)
    }

    /// The recipe of a root image.
    pub fn image(wanted: &str) -> Result<Self, RecipeError> {
        if !Self::images().any(|name| name == wanted) {
            let known = Self::images().collect::<Vec<_>>().join(", ");
            return Err(RecipeError::UnknownImage { wanted: wanted.to_owned(), known });
        }
        Ok(Self::new(format!("image-{wanted}"), format!("{wanted} image"), format!("images/{wanted}"), FILES))
    }

    /// The names of all images.
    pub fn images() -> impl Iterator<Item = &'static str> {
        FILES.iter().filter_map(|(path, _)| path.strip_prefix("images/")?.strip_suffix("/build.sh"))
    }

    /// A digest of everything that the result depends on, except the version of the sources, which is part of
    /// the result's name.
    pub fn key(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (path, content) in &self.files {
            for part in [path.as_bytes(), *content] {
                hasher.update(&part.len().to_le_bytes());
                hasher.update(part);
            }
        }
        hasher.finalize().to_hex().chars().take(20).collect()
    }

    /// Writes the recipe below `target` and returns the path of its script.
    pub fn unpack(&self, target: &Path) -> Result<PathBuf, RecipeError> {
        for (path, content) in &self.files {
            let file = target.join(path);
            let failed = |error| RecipeError::Unpack(file.clone(), error);
            fs::create_dir_all(file.parent().unwrap_or(target)).map_err(failed)?;
            fs::write(&file, content).map_err(failed)?;
            if path.ends_with(".sh") {
                fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).map_err(failed)?;
            }
        }
        Ok(target.join(&self.folder).join("build.sh"))
    }
}

#[cfg(test)]
mod script_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_image_is_refused_with_the_known_ones() {
        let error = Recipe::image("nope").unwrap_err().to_string();
        assert!(error.contains("\"nope\"") && error.contains("default"), "{error}");
        assert!(Recipe::image("../default").is_err());
    }

    /// The keys of all recipes, optionally with `path` changed.
    fn keys(changed: Option<&str>) -> [String; 3] {
        let files: Vec<RecipeFile> = FILES
            .iter()
            .map(|&(path, content)| {
                (path, if Some(path) == changed { b"changed".as_slice() } else { content })
            })
            .collect();
        [Recipe::uml_kernel(), Recipe::kvm_kernel(), Recipe::image("default").unwrap()]
            .map(|recipe| Recipe::new(recipe.name, recipe.title, recipe.folder, &files).key())
    }

    #[test]
    fn the_key_depends_on_the_recipe() {
        let [uml, kvm, image] = keys(None);
        assert!(uml != kvm && kvm != image && image != uml);
        assert_eq!(uml, Recipe::uml_kernel().key());
    }

    #[test]
    fn a_file_changes_the_keys_of_the_recipes_that_use_it_and_no_other() {
        let before = keys(None);
        for &(path, _) in FILES {
            let uses = match path {
                "guest/mirror.sh" => [true, true, true],
                "guest/kernel/README.md" => [false, false, false],
                _ if path.starts_with("guest/kernel/uml/") => [true, false, false],
                _ if path.starts_with("guest/kernel/kvm/") => [false, true, false],
                _ if path.starts_with("guest/kernel/") => [true, true, false],
                _ => [false, false, true],
            };
            let after = keys(Some(path));
            let changed = [0, 1, 2].map(|recipe| before[recipe] != after[recipe]);
            assert_eq!(changed, uses, "uml, kvm, image after a change of {path}");
        }
    }

    #[test]
    fn a_recipe_unpacks_with_its_script() {
        for (recipe, folder) in [(Recipe::uml_kernel(), "uml"), (Recipe::kvm_kernel(), "kvm")] {
            let target = tempfile::tempdir().unwrap();
            let script = recipe.unpack(target.path()).unwrap();
            assert_eq!(script, target.path().join("guest/kernel").join(folder).join("build.sh"));
            assert_eq!(fs::metadata(script).unwrap().permissions().mode() & 0o111, 0o111);
            for shared in SHARED.iter().flat_map(|(_, files)| *files) {
                assert!(target.path().join(shared).exists(), "{shared}");
            }
            assert!(!target.path().join("images").exists());
        }
    }
}
