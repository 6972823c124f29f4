//! `bathy man`: manual pages, generated from the same definitions as `--help`.

use std::error::Error;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{self, Stdio};
use std::thread;

use clap::Command;
use clap_mangen::Man;

use crate::ui::output;

/// Arguments of `bathy man`.
#[derive(clap::Args)]
pub struct Args {
    /// A verb whose page to show, or a folder to write all pages to, as sources for `man`. [default: bathy's own page]
    #[arg(value_name = "VERB|FOLDER")]
    what: Option<PathBuf>,
}

/// Prints or writes pages.
pub fn run(args: &Args, command: Command) -> Result<u8, Box<dyn Error>> {
    let mut command = command.disable_help_subcommand(true);
    // Building gives every verb its full name.
    command.build();
    let Some(what) = &args.what else {
        show(&page(&command)?)?;
        return Ok(0);
    };
    if let Some(verb) =
        what.to_str().and_then(|verb| visible(&command).find(|known| known.get_name() == verb))
    {
        show(&page(verb)?)?;
        return Ok(0);
    }
    if !what.is_dir() {
        return Err(format!("{} is neither a verb of bathy nor a folder", what.display()).into());
    }
    let mut count = 0;
    write_pages(&command, what, &mut count)?;
    output::line(format_args!("{count} pages are in {}", what.display()))?;
    Ok(0)
}

/// Shows a page with the system's `man`: on a terminal in its pager, elsewhere as text. Without that program the page is
/// printed as it is.
fn show(page: &[u8]) -> io::Result<()> {
    let mut viewer = process::Command::new("man");
    viewer.args(["-l", "-"]).stdin(Stdio::piped());
    if !io::stdout().is_terminal() {
        let text = formatted(viewer, page);
        return io::stdout().write_all(text.as_deref().unwrap_or(page));
    }
    let Ok(mut viewer) = viewer.spawn() else { return io::stdout().write_all(page) };
    if let Some(mut input) = viewer.stdin.take() {
        // The viewer may be closed before it has read everything.
        let _ = input.write_all(page);
    }
    viewer.wait().map(drop)
}

/// What `viewer` makes of a page, unless it is missing or fails.
fn formatted(mut viewer: process::Command, page: &[u8]) -> Option<Vec<u8>> {
    let mut viewer = viewer.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
    let mut input = viewer.stdin.take()?;
    let output = thread::scope(|scope| {
        // A viewer that has failed reads nothing, which its exit status shows.
        scope.spawn(move || input.write_all(page));
        viewer.wait_with_output()
    });
    output
        .ok()
        .filter(|output| output.status.success() && !output.stdout.is_empty())
        .map(|output| output.stdout)
}

/// Writes the page of the command and of every verb below it into `folder`.
fn write_pages(command: &Command, folder: &Path, count: &mut usize) -> Result<(), Box<dyn Error>> {
    let path = folder.join(Man::new(command.clone()).get_filename());
    fs::write(&path, page(command)?).map_err(|error| format!("Cannot write {}: {error}", path.display()))?;
    *count += 1;
    visible(command).try_for_each(|verb| write_pages(verb, folder, count))
}

/// The verbs that are not hidden.
fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|verb| !verb.is_hide_set())
}

fn page(command: &Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page)?;
    Ok(page)
}
