//! The verbs that change a persistent sandbox's state: start, stop, restart, rm, adopt, pause, resume, wait.

use std::error::Error;
use std::io;
use std::time::Duration;

use bathy_manager::{Manager, ManagerError, Sandboxed, Status};
use serde_json::{Value, json};

use crate::commands::list::Filter;
use crate::commands::open_to_look;
use crate::ui::progress::Progress;
use crate::ui::{escape, output, time};

/// One or more sandboxes.
#[derive(clap::Args)]
pub struct Names {
    /// The sandboxes: names, ids or prefixes of ids.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

impl Names {
    pub fn as_slice(&self) -> &[String] {
        &self.names
    }
}

/// How long a sandbox may take to shut down.
#[derive(clap::Args)]
pub struct Grace {
    /// How long the sandbox's processes may take to end before they are killed, such as 30 or 2m.
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
    /// Remove running sandboxes, too: they are killed.
    #[arg(short, long)]
    force: bool,
    /// Remove all sandboxes; without --force only those that are not running.
    #[arg(short, long, conflicts_with = "names")]
    all: bool,
    /// Remove the sandboxes that match, as in `bathy ls`: label=KEY, label=KEY=VALUE, status=STATUS or name=PREFIX. Can be
    /// repeated; all filters must match.
    #[arg(long, value_name = "FILTER", conflicts_with = "names")]
    filter: Vec<Filter>,
    /// The sandboxes: names, ids or prefixes of ids.
    #[arg(required_unless_present_any = ["all", "filter"], value_name = "NAME")]
    names: Vec<String>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `bathy pause`.
#[derive(clap::Args)]
pub struct PauseArgs {
    /// Move the guest's memory to disk, which frees memory of the host.
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

pub fn start(names: &Names) -> Result<u8, Box<dyn Error>> {
    each("bathy start", names, |manager, sandbox| {
        if sandbox.status == Status::Running {
            output::note(format_args!("the sandbox `{}` is running already", sandbox.name()));
            return Ok(());
        }
        let mut progress = Progress::new();
        manager.start(sandbox, &mut |step| progress.step(step))?;
        Ok(())
    })
}

pub fn stop(args: &StopArgs) -> Result<u8, Box<dyn Error>> {
    each_found("bathy stop", &args.names, Manager::open_to_end, Manager::find, |manager, sandbox| {
        if !sandbox.is_alive() {
            output::note(format_args!("the sandbox `{}` is not running", sandbox.name()));
        }
        Ok(manager.stop(sandbox, args.grace.grace)?)
    })
}

pub fn restart(args: &StopArgs) -> Result<u8, Box<dyn Error>> {
    each("bathy restart", &args.names, |manager, sandbox| {
        let mut progress = Progress::new();
        manager.restart(sandbox, args.grace.grace, &mut |step| progress.step(step))?;
        Ok(())
    })
}

/// Removes sandboxes with their disks and logs, including those that the store does not know.
pub fn remove(args: &RemoveArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open_to_end("bathy rm")?;
    let chosen = if args.names.is_empty() { chosen(&mut manager, args)? } else { args.names.clone() };
    let mut results = Results::new(args.json);
    results.each(&mut manager, &chosen, Manager::find_any, |manager, sandbox| {
        Ok(manager.remove(sandbox, args.force)?)
    })?;
    results.finish()
}

/// The ids of the sandboxes to remove, if they are not named.
fn chosen(manager: &mut Manager, args: &RemoveArgs) -> Result<Vec<String>, Box<dyn Error>> {
    if args.filter.iter().any(Filter::is_for_orphans) {
        return Err("What the store does not know is removed by name only: `bathy ls` shows the names".into());
    }
    let mut fitting = manager.list()?;
    fitting.retain(|sandbox| args.filter.iter().all(|filter| filter.fits(sandbox)));
    let all = fitting.len();
    fitting.retain(|sandbox| args.force || !sandbox.is_alive());
    let running = all - fitting.len();
    if running > 0 {
        output::note(format_args!(
            "sandboxes that are running and stay: {running}; the same with --force ends them, too"
        ));
    }
    Ok(fitting.into_iter().map(|sandbox| sandbox.record.id).collect())
}

/// Takes back sandboxes that the store does not know, and prints their names.
pub fn adopt(names: &Names) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open("bathy adopt")?;
    let mut results = Results::new(names.json);
    for name in &names.names {
        let adopted = adopt_one(&mut manager, name);
        output::warnings(&mut manager);
        results.add(name, adopted.map(|sandbox| (sandbox.name().to_owned(), sandbox)))?;
    }
    results.finish()
}

/// The result of a verb for each of several sandboxes.
pub struct Results {
    /// The results so far, if JSON is requested.
    json: Option<Vec<Value>>,
    code: u8,
}

impl Results {
    pub fn new(json: bool) -> Self {
        Self { json: json.then(Vec::new), code: 0 }
    }

    /// Applies `act` to every sandbox, including those after one that fails.
    fn each(
        &mut self,
        manager: &mut Manager,
        names: &[String],
        find: impl Fn(&mut Manager, &str) -> Result<Sandboxed, ManagerError>,
        mut act: impl FnMut(&mut Manager, &Sandboxed) -> Result<(), Box<dyn Error>>,
    ) -> io::Result<()> {
        for name in names {
            let found = find(manager, name).map_err(Box::<dyn Error>::from);
            let done = found.and_then(|sandbox| act(manager, &sandbox).map(|()| (name.clone(), sandbox)));
            output::warnings(manager);
            self.add(name, done)?;
        }
        Ok(())
    }

    /// Reports one result: the name that was given, or the error.
    pub fn add(
        &mut self,
        wanted: &str,
        result: Result<(String, Sandboxed), Box<dyn Error>>,
    ) -> io::Result<()> {
        match (&mut self.json, result) {
            (Some(all), Ok((_, Sandboxed { record, .. }))) => {
                all.push(json!({ "id": record.id, "name": record.name, "error": null }));
            }
            (None, Ok((named, _))) => output::line(named)?,
            (all, Err(error)) => {
                if let Some(all) = all {
                    let error = bathy_protocol::chain(error.as_ref());
                    all.push(json!({ "id": null, "name": wanted, "error": error }));
                }
                output::failure(error.as_ref());
                self.code = crate::OUR_FAILURE;
            }
        }
        Ok(())
    }

    pub fn finish(self) -> Result<u8, Box<dyn Error>> {
        if let Some(all) = self.json {
            output::json(&Value::from(all))?;
        }
        Ok(self.code)
    }
}

fn adopt_one(manager: &mut Manager, name: &str) -> Result<Sandboxed, Box<dyn Error>> {
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
    Ok(adopted.sandbox)
}

pub fn pause(args: &PauseArgs) -> Result<u8, Box<dyn Error>> {
    each_found("bathy pause", &args.names, Manager::open_to_end, Manager::find, |manager, sandbox| {
        Ok(manager.pause(sandbox, args.release_memory)?)
    })
}

pub fn resume(names: &Names) -> Result<u8, Box<dyn Error>> {
    // What runs already is not started: it goes on as the operator's settings were at its start.
    each_found("bathy resume", names, Manager::open_to_end, Manager::find, |manager, sandbox| {
        Ok(manager.resume(sandbox)?)
    })
}

/// Waits until every sandbox has ended, and prints the exit codes of their main commands.
pub fn wait(args: &WaitArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = open_to_look("bathy wait")?;
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

/// Applies `act` to every sandbox, and prints its name when it is done.
fn each(
    program: &str,
    names: &Names,
    act: impl FnMut(&mut Manager, &Sandboxed) -> Result<(), Box<dyn Error>>,
) -> Result<u8, Box<dyn Error>> {
    each_found(program, names, Manager::open, Manager::find, act)
}

/// As [`each`], with other ways to open the store and to find a sandbox.
fn each_found(
    program: &str,
    names: &Names,
    open: impl FnOnce(&str) -> Result<Manager, ManagerError>,
    find: impl Fn(&mut Manager, &str) -> Result<Sandboxed, ManagerError>,
    act: impl FnMut(&mut Manager, &Sandboxed) -> Result<(), Box<dyn Error>>,
) -> Result<u8, Box<dyn Error>> {
    let mut manager = open(program)?;
    let mut results = Results::new(names.json);
    results.each(&mut manager, &names.names, find, act)?;
    results.finish()
}
