//! `bathy ls`, `bathy ps` and `bathy inspect`: the sandboxes of the store.

use std::error::Error;
use std::str::FromStr;

use bathy_manager::{Sandboxed, Status};
use bathy_protocol::unix_ns;

use crate::commands::lifecycle::Names;
use crate::commands::open_to_look;
use crate::ui::colour::Colour;
use crate::ui::table::{Side, Table, cut, output_width};
use crate::ui::{escape, output, time};

/// How many characters of a command are shown.
const COMMAND_WIDTH: usize = 40;

/// The columns that are left out on a narrow terminal, the first one first.
const LEAST_IMPORTANT: [&str; 4] = ["IMAGE", "MEMORY", "CREATED", "COMMAND"];

/// Arguments of `bathy ls` and `bathy ps`.
#[derive(clap::Args)]
pub struct Args {
    /// Include sandboxes that are not running, which `bathy ls` always does.
    #[arg(short, long)]
    all: bool,
    /// Only sandboxes that match: label=KEY, label=KEY=VALUE, status=STATUS or name=PREFIX. Can be repeated; all filters must
    /// match.
    #[arg(short, long, value_name = "FILTER")]
    filter: Vec<Filter>,
    /// Show all columns, even if the terminal is too narrow for them.
    #[arg(long)]
    wide: bool,
    /// Print ids only.
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
    /// Print the records as JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `bathy inspect`.
#[derive(clap::Args)]
pub struct InspectArgs {
    // The output is JSON with and without --json.
    #[command(flatten)]
    names: Names,
}

/// A condition on a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    /// The sandbox has this label, with this value if there is one.
    Label(String, Option<String>),
    /// The sandbox has this status.
    Status(String),
    /// The sandbox's name has this prefix.
    Name(String),
}

impl Filter {
    /// Whether it asks for sandboxes that the store does not know.
    pub fn is_for_orphans(&self) -> bool {
        matches!(self, Self::Status(status) if status == "orphaned")
    }
}

const STATUSES: [&str; 8] =
    ["created", "running", "paused", "stopped", "dead", "orphaned", "lost", "unusable"];

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some(("label", label)) if !label.is_empty() => Ok(match label.split_once('=') {
                Some((key, value)) => Self::Label(key.to_owned(), Some(value.to_owned())),
                None => Self::Label(label.to_owned(), None),
            }),
            Some(("status", status)) if STATUSES.contains(&status) => Ok(Self::Status(status.to_owned())),
            Some(("status", _)) => Err(format!("the statuses are {}", STATUSES.join(", "))),
            Some(("name", prefix)) if !prefix.is_empty() => Ok(Self::Name(prefix.to_owned())),
            _ => Err("filters are label=KEY, label=KEY=VALUE, status=STATUS and name=PREFIX".to_owned()),
        }
    }
}

impl Filter {
    /// Whether a sandbox matches.
    pub fn fits(&self, sandbox: &Sandboxed) -> bool {
        match self {
            Self::Label(key, wanted) => {
                let value = sandbox.record.spec.labels.get(key);
                value.is_some_and(|value| wanted.as_ref().is_none_or(|wanted| wanted == value))
            }
            Self::Status(status) => sandbox.status.to_string() == *status,
            Self::Name(prefix) => {
                sandbox.record.name.as_ref().is_some_and(|name| name.starts_with(prefix.as_str()))
            }
        }
    }
}

/// Lists sandboxes; with `running` only those that run, unless `--all` is given.
pub fn list(args: &Args, running: bool) -> Result<u8, Box<dyn Error>> {
    let mut manager = open_to_look("bathy ls")?;
    let mut sandboxes = manager.list()?;
    let orphans = manager.orphans()?;
    let hint = (!orphans.is_empty() && !running).then(|| hint(&orphans));
    sandboxes.extend(orphans);
    output::warnings(&mut manager);
    sandboxes.retain(|sandbox| {
        (args.all || !running || sandbox.is_alive()) && args.filter.iter().all(|filter| filter.fits(sandbox))
    });
    if args.json {
        output::json(&sandboxes)?;
    } else if args.quiet {
        for sandbox in &sandboxes {
            output::line(&sandbox.record.id)?;
        }
    } else {
        let width = if args.wide { None } else { output_width() };
        let table = table(&sandboxes, unix_ns()).coloured("STATUS", colour);
        for line in table.fit(width, &LEAST_IMPORTANT).lines() {
            output::line(line)?;
        }
        if let Some(hint) = hint {
            output::note(hint);
        }
        if sandboxes.is_empty() {
            let which = if !args.filter.is_empty() {
                "no sandbox matches"
            } else if running && !args.all {
                "no sandbox is running"
            } else {
                "there are no sandboxes yet"
            };
            output::nothing(format_args!("{which}; `bathy create` and `bathy run --detach` make one"));
        }
    }
    Ok(0)
}

/// A hint for sandboxes that the store does not know.
fn hint(orphans: &[Sandboxed]) -> String {
    let first = escape::text(orphans.first().map_or("NAME", Sandboxed::name));
    format!(
        "the disks of orphaned sandboxes are there, but the store does not know them: `bathy adopt {first}` takes one back, `bathy rm {first}` removes it"
    )
}

pub fn inspect(args: &InspectArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = open_to_look("bathy inspect")?;
    let found: Vec<Sandboxed> =
        args.names.as_slice().iter().map(|name| manager.find_any(name)).collect::<Result<_, _>>()?;
    output::json(&found)?;
    Ok(0)
}

fn table(sandboxes: &[Sandboxed], now: u64) -> Table {
    let mut table = Table::new(&[
        ("ID", Side::Left),
        ("NAME", Side::Left),
        ("STATUS", Side::Left),
        ("IMAGE", Side::Left),
        ("MEMORY", Side::Right),
        ("CREATED", Side::Left),
        ("COMMAND", Side::Left),
    ]);
    for sandbox in sandboxes {
        let record = &sandbox.record;
        table.row([
            record.id.clone(),
            record.name.clone().unwrap_or_else(|| "-".to_owned()),
            status(sandbox, now),
            record.spec.image.clone(),
            record.spec.memory.to_string(),
            time::ago(record.created_ns, now),
            cut(&record.spec.command.join(" "), COMMAND_WIDTH),
        ]);
    }
    table
}

/// The colour of a status.
fn colour(status: &str) -> Option<Colour> {
    match status.split([' ', ',']).next()? {
        "running" => Some(Colour::Good),
        "paused" => Some(Colour::Odd),
        "dead" | "orphaned" | "lost" | "unusable" => Some(Colour::Bad),
        _ => None,
    }
}

/// The status, with the time since the start or the exit code.
fn status(sandbox: &Sandboxed, now: u64) -> String {
    let record = &sandbox.record;
    let status = sandbox.status.to_string();
    if sandbox.status == Status::Orphaned && record.monitor_pid.is_some() {
        return format!("{status}, running");
    }
    match (sandbox.is_alive(), record.started_ns, record.exit_code) {
        (true, Some(started), _) => {
            let lasted = time::ago(started, now);
            format!("{status} {}", lasted.trim_end_matches(" ago"))
        }
        (false, Some(_), Some(code)) => format!("{status} ({code})"),
        _ => status,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_read() {
        let label = |key: &str, value: Option<&str>| Filter::Label(key.to_owned(), value.map(str::to_owned));
        for (text, filter) in [
            ("label=a", label("a", None)),
            ("label=a=b=c", label("a", Some("b=c"))),
            ("label=a=", label("a", Some(""))),
            ("status=dead", Filter::Status("dead".to_owned())),
            ("name=we", Filter::Name("we".to_owned())),
        ] {
            assert_eq!(text.parse(), Ok(filter), "{text}");
        }
        for text in ["", "label=", "status=asleep", "size=1", "running"] {
            assert!(text.parse::<Filter>().is_err(), "{text}");
        }
    }
}
