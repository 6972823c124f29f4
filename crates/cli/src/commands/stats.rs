//! `bathy stats`: the resource usage of sandboxes, once.

use std::collections::BTreeMap;
use std::error::Error;
use std::thread;
use std::time::Duration;

use bathy_manager::stats::Stats;
use bathy_manager::{Manager, Sandboxed};
use serde_json::{Value, json};

use crate::commands::open_to_look;
use crate::ui::table::{Side, Table, bytes, output_width};
use crate::ui::{output, time};

/// The time between the two samples whose difference is the processor usage.
const SAMPLE: Duration = Duration::from_millis(500);

/// The columns that are left out on a narrow terminal, the first one first.
pub const LEAST_IMPORTANT: [&str; 8] =
    ["CLIENTS", "READ", "WRITTEN", "OF DISK", "COMMANDS", "DISK", "PROCESSES", "OF"];

/// Arguments of `bathy stats`.
#[derive(clap::Args)]
pub struct Args {
    /// Show all columns, even if the terminal is too narrow for them.
    #[arg(long)]
    wide: bool,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
    /// The sandboxes; all running ones by default.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
}

pub fn run(args: &Args) -> Result<u8, Box<dyn Error>> {
    let mut manager = open_to_look("bathy stats")?;
    let mut watch = Watch::default();
    watch.look(&mut manager, &args.names)?;
    thread::sleep(SAMPLE);
    let rows = watch.look(&mut manager, &args.names)?;
    if args.json {
        output::json(&rows.iter().map(Row::document).collect::<Result<Vec<_>, _>>()?)?;
    } else {
        let width = if args.wide { None } else { output_width() };
        for line in table(&rows).fit(width, &LEAST_IMPORTANT).lines() {
            output::line(line)?;
        }
        if rows.is_empty() {
            output::nothing("no sandbox is running");
        }
    }
    Ok(0)
}

/// A sandbox with its resource usage.
pub struct Row {
    sandbox: Sandboxed,
    stats: Stats,
    /// Percent of one processor, since the previous sample.
    cpu_percent: Option<f64>,
}

impl Row {
    fn name(&self) -> String {
        self.sandbox.record.name.clone().unwrap_or_else(|| self.sandbox.record.id.clone())
    }

    fn document(&self) -> Result<Value, serde_json::Error> {
        let mut document = json!({
            "id": self.sandbox.record.id,
            "name": self.sandbox.record.name,
            "status": self.sandbox.status,
        });
        if let (Some(all), Value::Object(stats)) =
            (document.as_object_mut(), serde_json::to_value(&self.stats)?)
        {
            all.extend(stats);
            all.insert("cpu_percent".to_owned(), json!(self.cpu_percent));
        }
        Ok(document)
    }
}

/// Samples sandboxes, and remembers the previous sample.
#[derive(Default)]
pub struct Watch {
    /// The previous sample of each sandbox.
    before: BTreeMap<String, Stats>,
}

impl Watch {
    /// Samples the named sandboxes, or all that run.
    pub fn look(&mut self, manager: &mut Manager, names: &[String]) -> Result<Vec<Row>, Box<dyn Error>> {
        let sandboxes: Vec<Sandboxed> = if names.is_empty() {
            manager.list()?.into_iter().filter(|sandbox| sandbox.is_alive()).collect()
        } else {
            names.iter().map(|name| manager.find(name)).collect::<Result<_, _>>()?
        };
        let mut rows = Vec::new();
        for sandbox in sandboxes {
            let stats = match manager.usage(&sandbox) {
                Ok(stats) => stats,
                // A sandbox that has just ended is left out.
                Err(_) if names.is_empty() => continue,
                Err(error) => return Err(error.into()),
            };
            let before = self.before.insert(sandbox.record.id.clone(), stats.clone());
            // The counters of a restarted sandbox begin at zero.
            let before = before.filter(|before| before.uptime <= stats.uptime);
            let cpu_percent = before.map(|before| (stats.cpu_percent(&before) * 10.0).round() / 10.0);
            rows.push(Row { sandbox, stats, cpu_percent });
        }
        Ok(rows)
    }
}

/// The table, the busiest sandbox first.
pub fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(&[
        ("NAME", Side::Left),
        ("STATUS", Side::Left),
        ("CPU", Side::Right),
        ("MEMORY", Side::Right),
        ("OF", Side::Right),
        ("DISK", Side::Right),
        ("OF DISK", Side::Right),
        ("READ", Side::Right),
        ("WRITTEN", Side::Right),
        ("PROCESSES", Side::Right),
        ("COMMANDS", Side::Right),
        ("CLIENTS", Side::Right),
        ("UP", Side::Right),
    ]);
    let mut sorted: Vec<&Row> = rows.iter().collect();
    let busy = |row: &Row| row.cpu_percent.unwrap_or_default();
    sorted.sort_by(|a, b| busy(b).total_cmp(&busy(a)));
    for row in sorted {
        let stats = &row.stats;
        table.row([
            row.name(),
            row.sandbox.status.to_string(),
            row.cpu_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.1} %")),
            bytes(stats.memory),
            bytes(stats.memory_limit),
            bytes(stats.disk),
            bytes(stats.disk_limit),
            bytes(stats.disk_read),
            bytes(stats.disk_written),
            stats
                .processes
                .map_or_else(|| "-".to_owned(), |count| format!("{count}/{}", stats.processes_limit)),
            stats.commands.to_string(),
            stats.clients.to_string(),
            time::length(stats.uptime),
        ]);
    }
    table
}
