//! `bathy setup`: builds what is missing.

use std::error::Error;

use bathy_image::{Recipe, Store};
use bathy_sandbox::Paths;
use bathy_sandbox::assets::{IMAGE_CONFIG, IMAGE_FILE, ensure_kernel};
use serde_json::json;

use crate::output;
use crate::progress::Progress;

/// Arguments of `bathy setup`.
#[derive(clap::Args)]
pub struct Args {
    /// The image to build.
    #[arg(long, default_value = "default")]
    image: String,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// Builds the kernel and the image.
pub fn run(args: &Args) -> Result<u8, Box<dyn Error>> {
    let store = Store::new(Paths::of_user()?.cache);
    let mut progress = Progress::new();
    let image_recipe = Recipe::image(&args.image)?;
    let kernel = ensure_kernel(&store, &mut |step| progress.step(step))?;
    let image = store.ensure(&image_recipe, &[IMAGE_FILE, IMAGE_CONFIG], &mut |step| progress.step(step))?;
    drop(progress);
    if args.json {
        output::json(&json!({ "kernel": kernel.manifest, "image": image.manifest }))?;
    } else {
        output::line(format_args!(
            "guest kernel {} and image {} ({}) are ready",
            kernel.manifest.version, args.image, image.manifest.version
        ))?;
    }
    Ok(0)
}
