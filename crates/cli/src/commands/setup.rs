//! `bathy setup`: builds what is missing.

use std::collections::BTreeMap;
use std::error::Error;

use bathy_image::{ImageCache, Recipe};
use bathy_runtime::assets::{IMAGE_CONFIG, IMAGE_FILE, ensure_kernel};
use bathy_runtime::engine;
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use bathy_spec::{Chosen, Engine};
use serde_json::json;

use crate::ui::output;
use crate::ui::progress::Progress;

/// Arguments of `bathy setup`.
#[derive(clap::Args)]
pub struct Args {
    /// The image to build.
    #[arg(long, default_value = "default")]
    image: String,
    /// The engine whose guest kernel to build: kvm, uml, all, or auto for the engine that this machine would use. A kernel can
    /// be built on a machine that cannot run it.
    #[arg(long, default_value = "auto")]
    engine: Engines,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// The engines to build kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "lower")]
enum Engines {
    Auto,
    Kvm,
    Uml,
    All,
}

impl Engines {
    fn list(self, paths: &Paths) -> Result<Vec<Chosen>, engine::EngineError> {
        Ok(match self {
            Self::Auto => vec![engine::choose(Engine::Auto, &Operator::default(), paths)?.engine],
            Self::Kvm => vec![Chosen::Kvm],
            Self::Uml => vec![Chosen::Uml],
            Self::All => Chosen::ALL.to_vec(),
        })
    }
}

/// Builds the kernels and the image.
pub fn run(args: &Args) -> Result<u8, Box<dyn Error>> {
    let paths = Paths::of_user()?;
    let image_recipe = Recipe::image(&args.image)?;
    let engines = args.engine.list(&paths)?;
    let store = ImageCache::new(paths.cache);
    let mut progress = Progress::new();
    let mut kernels = BTreeMap::new();
    for &engine in &engines {
        let kernel = ensure_kernel(&store, engine, &mut |step| progress.step(step))?;
        kernels.insert(engine.as_str(), kernel.manifest);
    }
    let image = store.ensure(&image_recipe, &[IMAGE_FILE, IMAGE_CONFIG], &mut |step| progress.step(step))?;
    drop(progress);
    if args.json {
        let kernel = engines.first().and_then(|engine| kernels.get(engine.as_str()));
        output::json(&json!({ "kernel": kernel, "kernels": kernels, "image": image.manifest }))?;
    } else {
        let kernels: Vec<_> = kernels
            .iter()
            .map(|(engine, kernel)| format!("guest kernel {} ({engine})", kernel.version))
            .collect();
        output::line(format_args!(
            "{} and image {} ({}) are ready",
            kernels.join(", "),
            args.image,
            image.manifest.version
        ))?;
    }
    Ok(0)
}
