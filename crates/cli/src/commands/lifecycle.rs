//! The verbs that change a kept sandbox's state: start, stop, restart, rm, adopt, pause, resume, wait.

use std::error::Error;
use std::time::Duration;

use bathy_manager::{Manager, ManagerError, Sandboxed, Status};
use serde_json::json;

use crate::ui::progress::Progress;
use crate::ui::{escape, output, time};

/// One or more sandboxes.
#[derive(clap::Args)]
pub struct Names {
    /// The sandboxes: names, ids or beginnings of ids.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
}

impl Names {
    /// As they were given.
    pub fn as_slice(&self) -> &[String] {
        &self.names
    }
}

/// How long a sandbox may take to end by itself.
#[derive(clap::Args)]
pub struct Grace {
    /// Seconds between asking the sandbox's processes to end and ending them.
    #[arg(short = 't', long = "time", value_name = "SECONDS", value_parser = time::parse_grace, default_value = "10")]
    grace: Duration,
}

/// Arguments of `bathy stop` and `bathy restart`.
#[derive(clap::Args)]
pub struct StopArgs {
    #[command(flatten)]
    grace: Grace,
    #[command(flatten)]
    names: Names,
}

/// Arguments of `bathy rm`.
#[derive(clap::Args)]
pub struct RemoveArgs {
    /// Also a sandbox that is running: it is ended at once.
    #[arg(short, long)]
    force: bool,
    #[command(flatten)]
    names: Names,
}

/// Arguments of `bathy pause`.
#[derive(clap::Args)]
pub struct PauseArgs {
    /// Move the guest's memory to disk, so that the host can use its own for something else.
    #[arg(long)]
    release_memory: bool,
    #[command(flatten)]
    names: Names,
}

/// Arguments of `bathy wait`.
#[derive(clap::Args)]
pub struct WaitArgs {
    /// Print the records as JSON instead of exit codes.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    names: Names,
}

/// Starts sandboxes.
pub fn start(names: &Names) -> Result<u8, Box<dyn Error>> {
    each("bathy start", names, |manager, sandbox| {
        let mut progress = Progress::new();
        manager.start(sandbox, &mut |step| progress.step(step))?;
        Ok(())
    })
}

/// Stops sandboxes.
pub fn stop(args: &StopArgs) -> Result<u8, Box<dyn Error>> {
    each("bathy stop", &args.names, |manager, sandbox| Ok(manager.stop(sandbox, args.grace.grace)?))
}

/// Stops and starts sandboxes.
pub fn restart(args: &StopArgs) -> Result<u8, Box<dyn Error>> {
    each("bathy restart", &args.names, |manager, sandbox| {
        let mut progress = Progress::new();
        manager.restart(sandbox, args.grace.grace, &mut |step| progress.step(step))?;
        Ok(())
    })
}

/// Removes sandboxes with everything they hold, also those that the store does not know.
pub fn remove(args: &RemoveArgs) -> Result<u8, Box<dyn Error>> {
    each_found("bathy rm", &args.names, Manager::find_any, |manager, sandbox| {
        Ok(manager.remove(sandbox, args.force)?)
    })
}

/// Takes sandboxes back that the store does not know, and prints what they are called now.
pub fn adopt(names: &Names) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open("bathy adopt")?;
    let mut code = 0;
    for name in &names.names {
        match adopt_one(&mut manager, name) {
            Ok(name) => output::line(name)?,
            Err(error) => {
                output::failure(error.as_ref());
                code = crate::OUR_FAILURE;
            }
        }
        output::warnings(&mut manager);
    }
    Ok(code)
}

fn adopt_one(manager: &mut Manager, name: &str) -> Result<String, Box<dyn Error>> {
    let found = manager.find_any(name)?;
    match found.status {
        Status::Orphaned => {}
        Status::Lost => return Err(ManagerError::Lost(found.name().to_owned()).into()),
        _ => return Err(format!("The sandbox `{}` is in the store already", found.name()).into()),
    }
    let adopted = manager.adopt(&found)?;
    for note in adopted.notes {
        output::note(escape::text(&note));
    }
    Ok(adopted.sandbox.name().to_owned())
}

/// Freezes sandboxes.
pub fn pause(args: &PauseArgs) -> Result<u8, Box<dyn Error>> {
    each("bathy pause", &args.names, |manager, sandbox| Ok(manager.pause(sandbox, args.release_memory)?))
}

/// Lets frozen sandboxes go on.
pub fn resume(names: &Names) -> Result<u8, Box<dyn Error>> {
    each("bathy resume", names, |manager, sandbox| Ok(manager.resume(sandbox)?))
}

/// Waits until every sandbox has ended, and prints the exit codes of their main commands.
pub fn wait(args: &WaitArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open("bathy wait")?;
    let sandboxes: Vec<Sandboxed> =
        args.names.names.iter().map(|name| manager.find(name)).collect::<Result<_, _>>()?;
    let mut ended = Vec::new();
    for sandbox in &sandboxes {
        let sandbox = manager.wait(sandbox, None)?;
        if !args.json {
            match sandbox.record.exit_code {
                Some(code) => output::line(code)?,
                None => output::line("-")?,
            }
        }
        ended.push(sandbox);
    }
    if args.json {
        output::json(&json!(ended))?;
    }
    Ok(0)
}

/// Does something to every sandbox and names it when it is done. One that fails does not keep the others from it.
fn each(
    program: &str,
    names: &Names,
    act: impl FnMut(&mut Manager, &Sandboxed) -> Result<(), Box<dyn Error>>,
) -> Result<u8, Box<dyn Error>> {
    each_found(program, names, Manager::find, act)
}

/// The same, with sandboxes that are found in another way.
fn each_found(
    program: &str,
    names: &Names,
    find: impl Fn(&mut Manager, &str) -> Result<Sandboxed, ManagerError>,
    mut act: impl FnMut(&mut Manager, &Sandboxed) -> Result<(), Box<dyn Error>>,
) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open(program)?;
    let mut code = 0;
    for name in &names.names {
        let done =
            find(&mut manager, name).map_err(Into::into).and_then(|sandbox| act(&mut manager, &sandbox));
        output::warnings(&mut manager);
        match done {
            Ok(()) => output::line(name)?,
            Err(error) => {
                output::failure(error.as_ref());
                code = crate::OUR_FAILURE;
            }
        }
    }
    Ok(code)
}
