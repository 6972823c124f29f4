//! `bathy pull` and `bathy image`: images from registries.

use std::collections::HashMap;
use std::error::Error;

use bathy_manager::{ListedImage, Manager};
use bathy_registry::{Digest, Event, Progress as OnEvent};
use serde_json::json;

use crate::ui::progress::{Bar, Progress};
use crate::ui::table::{self, Side, Table};
use crate::ui::{escape, output, time};

/// Hexadecimal digits of a digest in a table.
const SHOWN_DIGITS: usize = 12;

/// Arguments of `bathy pull`.
#[derive(clap::Args)]
pub struct PullArgs {
    /// The image, such as debian:12, ghcr.io/owner/name:tag or debian@sha256:...
    image: String,
    /// Use plain HTTP, for a registry on this machine.
    #[arg(long)]
    insecure: bool,
    /// Print what was pulled as JSON.
    #[arg(long)]
    json: bool,
    /// Show no progress.
    #[arg(short, long)]
    quiet: bool,
}

/// What can be done with images.
#[derive(clap::Subcommand)]
pub enum Verb {
    /// List the images on this machine that are from registries.
    #[command(visible_alias = "list")]
    Ls {
        /// Print as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print all details of an image as JSON.
    Inspect {
        /// The image.
        image: String,
    },
    /// Remove images by their names. What a sandbox needs stays until the sandbox is removed.
    #[command(visible_alias = "remove")]
    Rm {
        /// The images.
        #[arg(required = true)]
        images: Vec<String>,
    },
    /// Remove what no sandbox needs: what a tag led to before it moved, and parts of images that were removed.
    Prune {
        /// Remove every image that no sandbox needs.
        #[arg(short, long)]
        all: bool,
        /// Print what was removed as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Give an image another name.
    Tag {
        /// The image.
        image: String,
        /// Its new name.
        name: String,
    },
}

/// Pulls and unpacks an image.
pub fn pull(args: &PullArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open("bathy pull")?;
    let mut bars = Bars::new(args.quiet);
    let mut progress = Progress::new();
    let mut step = |text: &str| {
        if !args.quiet {
            progress.step(text);
        }
    };
    let pulled = manager.pull_image(&args.image, args.insecure, &mut bars, &mut step);
    drop((bars, progress));
    let pulled = pulled?;
    if args.json {
        output::json(&pulled)?;
    } else {
        output::line(format_args!("{} is {}", pulled.reference, pulled.digest))?;
    }
    Ok(0)
}

/// Does what a verb says.
pub fn run(verb: &Verb) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open("bathy image")?;
    match verb {
        Verb::Ls { json } => list(&manager.list_images()?, *json)?,
        Verb::Inspect { image } => output::json(&manager.inspect_image(image)?)?,
        Verb::Rm { images } => {
            let freed = manager.remove_images(images)?;
            output::line(format_args!("freed {}", table::bytes(freed)))?;
        }
        Verb::Prune { all, json } => {
            let (removed, freed) = manager.prune_images(*all)?;
            if *json {
                output::json(&json!({ "removed": removed, "freed_bytes": freed }))?;
            } else {
                removed.iter().try_for_each(output::line)?;
                output::line(format_args!("freed {}", table::bytes(freed)))?;
            }
        }
        Verb::Tag { image, name } => output::line(manager.tag_image(image, name)?)?,
    }
    Ok(0)
}

fn list(images: &[ListedImage], as_json: bool) -> Result<(), Box<dyn Error>> {
    if as_json {
        return output::json(&images);
    }
    let mut table = Table::new(&[
        ("IMAGE", Side::Left),
        ("DIGEST", Side::Left),
        ("SIZE", Side::Right),
        ("PULLED", Side::Left),
        ("SANDBOXES", Side::Left),
    ]);
    let now = bathy_protocol::unix_ns();
    for image in images {
        table.row([
            without_digest(&image.reference),
            short(&image.digest),
            image.size.map_or_else(|| "incomplete".to_owned(), table::bytes),
            time::ago(image.pulled_at.saturating_mul(1_000_000_000), now),
            image.sandboxes.join(" "),
        ]);
    }
    if images.is_empty() {
        output::nothing("no images from registries. `bathy pull debian:12` fetches one");
    }
    for line in table.fit(table::output_width(), &["SANDBOXES", "PULLED", "SIZE"]).lines() {
        output::line(line)?;
    }
    Ok(())
}

/// The digest has a column of its own.
fn without_digest(reference: &str) -> String {
    reference.split('@').next().unwrap_or(reference).to_owned()
}

fn short(digest: &Digest) -> String {
    digest.hex().chars().take(SHOWN_DIGITS).collect()
}

/// Progress of a download: a bar on a terminal, and nothing elsewhere but what takes long.
struct Bars {
    bar: Bar,
    quiet: bool,
    total: u64,
    done: HashMap<Digest, u64>,
}

impl Bars {
    fn new(quiet: bool) -> Self {
        Self { bar: Bar::new(quiet), quiet, total: 0, done: HashMap::new() }
    }
}

impl OnEvent for Bars {
    fn on_event(&mut self, event: &Event) {
        match event {
            Event::Blobs(blobs) => {
                self.total = blobs.iter().fold(0, |sum, blob| sum + blob.size);
                self.done = blobs.iter().map(|blob| (blob.digest.clone(), 0)).collect();
            }
            Event::Progress { digest, done } => {
                if let Some(known) = self.done.get_mut(digest) {
                    *known = *done;
                    self.bar.show(self.done.values().sum(), Some(self.total));
                }
            }
            Event::Retrying { reason, after } if !self.quiet => {
                output::note(format_args!("{}; trying again in {} s", escape::text(reason), after.as_secs()));
            }
            Event::Waiting(_) if !self.quiet => output::note("waiting for another bathy that pulls the same"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_name_without_its_digest_and_the_digest_in_short() {
        let digest = Digest::of(b"");
        assert_eq!(short(&digest), "e3b0c44298fc");
        assert_eq!(without_digest(&format!("docker.io/library/a:b@{digest}")), "docker.io/library/a:b");
        assert_eq!(without_digest("docker.io/library/a:b"), "docker.io/library/a:b");
    }
}
