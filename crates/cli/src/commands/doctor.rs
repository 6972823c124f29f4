//! `bathy doctor`: checks whether this machine can run sandboxes, and suggests fixes.

use std::error::Error;

use bathy_runtime::doctor::{CheckStatus, examine};
use bathy_runtime::kvm_probe;
use bathy_spec::Chosen;
use bathy_spec::paths::Paths;

use crate::ui::colour::Colour;
use crate::ui::{escape, output};

/// Arguments of `bathy doctor`.
#[derive(clap::Args)]
pub struct Args {
    /// Print the diagnosis as JSON.
    #[arg(long)]
    json: bool,
}

/// Checks this machine. The exit code is 1 if sandboxes cannot run.
pub fn run(args: &Args) -> Result<u8, Box<dyn Error>> {
    let diagnosis = examine(&Paths::of_user()?);
    if args.json {
        output::json(&diagnosis)?;
    } else {
        for check in &diagnosis.checks {
            let mark = match check.status {
                CheckStatus::Ok => Colour::Good.paint("ok  "),
                CheckStatus::Note => Colour::Odd.paint("note"),
                CheckStatus::Warning => Colour::Odd.paint("WARN"),
                CheckStatus::Failed => Colour::Bad.paint("FAIL"),
            };
            output::line(format_args!("{mark}  {:<19} {}", check.name, escape::text(&check.found)))?;
            if let Some(hint) = &check.hint {
                output::line(format_args!("      {:<19} -> {}", "", escape::text(hint)))?;
            }
        }
        let engine = diagnosis.engine.map_or("none", Chosen::as_str);
        output::line(format_args!("\nengine: {engine} ({})", escape::text(&diagnosis.engine_reason)))?;
        output::line(if diagnosis.healthy {
            if diagnosis.checks.iter().any(|check| check.status == CheckStatus::Warning) {
                "Sandboxes will run, but with less protection than they should have: see the warnings."
            } else {
                "Sandboxes will run."
            }
        } else {
            "Sandboxes will not run until the failed checks are fixed."
        })?;
    }
    Ok(u8::from(!diagnosis.healthy))
}

/// Runs the probe guest in this process.
pub fn probe_kvm() -> Result<u8, Box<dyn Error>> {
    kvm_probe::run_guest()?;
    Ok(0)
}
