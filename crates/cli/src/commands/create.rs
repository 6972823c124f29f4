//! `bathy create`: a persistent sandbox.

use std::error::Error;
use std::ffi::OsString;

use bathy_manager::{Manager, NewSandbox, Sandboxed};

use crate::args::spec::SpecArgs;
use crate::ui::progress::Progress;
use crate::ui::{escape, output};

/// Arguments of `bathy create`.
#[derive(clap::Args)]
pub struct Args {
    /// A name for the sandbox, besides its id.
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    spec: SpecArgs,
    /// Start the sandbox, too.
    #[arg(long)]
    start: bool,
    /// Print the sandbox's record as JSON instead of its id.
    #[arg(long)]
    json: bool,
    /// The main command. It runs at every start, and the sandbox stops when it ends. Without one the sandbox runs until it is
    /// stopped.
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Creates the sandbox and prints its id.
pub fn run(args: Args) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open("bathy create")?;
    let spec = args.spec.spec(&args.command)?;
    let pull = args.spec.pull();
    let new = NewSandbox { name: args.name, spec, pull, with_image_command: false };
    let sandbox = create(&mut manager, new, args.start)?;
    report(&sandbox, args.json)
}

/// Creates a sandbox, and starts it if requested. A sandbox that cannot be started is removed.
pub fn create(manager: &mut Manager, new: NewSandbox, start: bool) -> Result<Sandboxed, Box<dyn Error>> {
    let mut progress = Progress::new();
    let (sandbox, notes) = manager.create(new, &mut |step| progress.step(step))?;
    if start && let Err(error) = manager.start(&sandbox, &mut |step| progress.step(step)) {
        // The first failure is the one that is reported.
        let _ = manager.remove(&sandbox, true);
        output::warnings(manager);
        return Err(error.into());
    }
    drop(progress);
    output::warnings(manager);
    for note in notes {
        output::note(escape::text(&note));
    }
    Ok(manager.refresh(&sandbox)?)
}

/// Prints the new sandbox.
pub fn report(sandbox: &Sandboxed, json: bool) -> Result<u8, Box<dyn Error>> {
    if json {
        output::json(sandbox)?;
    } else {
        output::line(&sandbox.record.id)?;
    }
    Ok(0)
}
