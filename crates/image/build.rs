//! Embeds the recipes, so that an installed binary can build everything without its source tree.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let root =
        PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("../..").canonicalize()?;
    let mut files = Vec::new();
    for folder in ["guest", "images"] {
        collect(&root.join(folder), &mut files)?;
        println!("cargo::rerun-if-changed=../../{folder}");
    }
    files.sort();
    // Paths are relative to the crate's folder: a build folder may be shared by several checkouts.
    let mut source = String::from("&[\n");
    for file in files {
        let name = file.strip_prefix(&root).unwrap_or(&file);
        let _ = writeln!(
            source,
            "    ({:?}, include_bytes!(concat!(env!(\"CARGO_MANIFEST_DIR\"), {:?}))),",
            name.display().to_string(),
            format!("/../../{}", name.display()),
        );
    }
    source.push_str("]\n");
    fs::write(PathBuf::from(env::var("OUT_DIR").unwrap_or_default()).join("recipes.rs"), source)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
