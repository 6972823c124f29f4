//! The verbs that change a kept sandbox's state: start, stop, restart, rm, adopt, pause, resume, wait.

use std::error::Error;
use std::io;
use std::time::Duration;

use bathy_manager::{Manager, ManagerError, Sandboxed, Status};
use serde_json::{Value, json};

use crate::ui::progress::Progress;
use crate::ui::{escape, output, time};

/// One or more sandboxes.
#[derive(clap::Args)]
pub struct Names {
    /// The sandboxes: names, ids or beginnings of ids.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
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
    /// Time between asking the sandbox's processes to end and ending them, such as 30 or 2m.
    #[arg(short = 't', long = "time", value_name = "TIME", value_parser = time::parse_grace, default_value = "10")]
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
    each_found("bathy stop", &args.names, Manager::open_to_end, Manager::find, |manager, sandbox| {
        Ok(manager.stop(sandbox, args.grace.grace)?)
    })
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
    each_found("bathy rm", &args.names, Manager::open_to_end, Manager::find_any, |manager, sandbox| {
        Ok(manager.remove(sandbox, args.force)?)
    })
}

/// Takes sandboxes back that the store does not know, and prints what they are called now.
pub fn adopt(names: &Names) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open("bathy adopt")?;
    let mut results = Results::new(names);
    for name in &names.names {
        let adopted = adopt_one(&mut manager, name);
        output::warnings(&mut manager);
        results.add(name, adopted)?;
    }
    results.finish()
}

/// What became of each of several sandboxes.
struct Results {
    /// In JSON, if that is wanted.
    json: Option<Vec<Value>>,
    code: u8,
}

impl Results {
    fn new(names: &Names) -> Self {
        Self { json: names.json.then(Vec::new), code: 0 }
    }

    /// Shows one: what it is called, or why nothing was done to `wanted`.
    fn add(&mut self, wanted: &str, result: Result<String, Box<dyn Error>>) -> io::Result<()> {
        match (&mut self.json, result) {
            (Some(all), Ok(name)) => all.push(json!({ "name": name, "error": null })),
            (None, Ok(name)) => output::line(name)?,
            (all, Err(error)) => {
                if let Some(all) = all {
                    all.push(json!({ "name": wanted, "error": bathy_protocol::chain(error.as_ref()) }));
                }
                output::failure(error.as_ref());
                self.code = crate::OUR_FAILURE;
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<u8, Box<dyn Error>> {
        if let Some(all) = self.json {
            output::json(&Value::from(all))?;
        }
        Ok(self.code)
    }
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
    each_found("bathy pause", &args.names, Manager::open_to_end, Manager::find, |manager, sandbox| {
        Ok(manager.pause(sandbox, args.release_memory)?)
    })
}

/// Lets frozen sandboxes go on.
pub fn resume(names: &Names) -> Result<u8, Box<dyn Error>> {
    each("bathy resume", names, |manager, sandbox| Ok(manager.resume(sandbox)?))
}

/// Waits until every sandbox has ended, and prints the exit codes of their main commands.
pub fn wait(args: &WaitArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open_to_end("bathy wait")?;
    let sandboxes: Vec<Sandboxed> =
        args.names.names.iter().map(|name| manager.find(name)).collect::<Result<_, _>>()?;
    let mut ended = Vec::new();
    for sandbox in &sandboxes {
        let sandbox = manager.wait(sandbox, None)?;
        if !args.names.json {
            match sandbox.record.exit_code {
                Some(code) => output::line(code)?,
                None => output::line("-")?,
            }
        }
        ended.push(sandbox);
    }
    if args.names.json {
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
    each_found(program, names, Manager::open, Manager::find, act)
}

/// The same, with sandboxes that are found in another way.
fn each_found(
    program: &str,
    names: &Names,
    open: impl FnOnce(&str) -> Result<Manager, ManagerError>,
    find: impl Fn(&mut Manager, &str) -> Result<Sandboxed, ManagerError>,
    mut act: impl FnMut(&mut Manager, &Sandboxed) -> Result<(), Box<dyn Error>>,
) -> Result<u8, Box<dyn Error>> {
    let mut manager = open(program)?;
    let mut results = Results::new(names);
    for name in &names.names {
        let done =
            find(&mut manager, name).map_err(Into::into).and_then(|sandbox| act(&mut manager, &sandbox));
        output::warnings(&mut manager);
        results.add(name, done.map(|()| name.clone()))?;
    }
    results.finish()
}
