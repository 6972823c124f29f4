//! `bathy cp`: files and folders into and out of a sandbox.

use std::error::Error;
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use bathy_client::transfer::{Summary, UnpackLimits};
use bathy_manager::{CopyOptions, Manager};
use bathy_spec::Size;
use serde_json::json;

use crate::location::{Copy, parse_copies};
use crate::sys;
use crate::ui::progress::{Bar, rate};
use crate::ui::{escape, hints, output, table};

/// Arguments of `bathy cp`.
#[derive(clap::Args)]
pub struct Args {
    /// Print nothing, and show no progress.
    #[arg(short, long)]
    quiet: bool,
    /// Follow a symbolic link of this machine that is itself a source. Otherwise it is copied as a link, unless its path ends
    /// in a slash. Links in a folder are always copied as links.
    #[arg(short = 'L', long)]
    follow_link: bool,
    /// Maximum number of bytes to copy out of a sandbox, of all sources together.
    #[arg(long, value_name = "SIZE", default_value = "4G")]
    limit: Size,
    /// The user in the sandbox who reads or writes the files.
    #[arg(short, long)]
    user: Option<String>,
    /// Print a summary as JSON.
    #[arg(long)]
    json: bool,
    /// What to copy: PATH on this machine, or NAME:PATH in a sandbox, where a relative path begins at the user's home. Write
    /// ./PATH for a path with a colon in it.
    #[arg(value_name = "SOURCE", required = true)]
    from: Vec<OsString>,
    /// The destination: an existing folder receives the copy under its old name; any other path is its new name.
    #[arg(value_name = "DESTINATION")]
    to: OsString,
}

pub fn run(args: &Args) -> Result<u8, Box<dyn Error>> {
    let copies = parse_copies(&args.from, &args.to)?;
    let mut manager = Manager::open("bathy cp")?;
    // An interrupted copy cleans up.
    let stop = sys::stop_signals()?;
    let mut summaries = Vec::new();
    let mut left = args.limit.0;
    for copy in &copies {
        let started = Instant::now();
        let copied = copy_one(&mut manager, args, copy, left, stop.as_fd());
        output::warnings(&mut manager);
        if let Ok(summary) = &copied {
            left = left.saturating_sub(summary.bytes);
        }
        match copied {
            Ok(summary) if args.json => summaries.push(document(&summary)),
            Ok(summary) if args.quiet => drop(summary),
            Ok(summary) => report(&summary, started.elapsed()),
            Err(error) => {
                if !summaries.is_empty() {
                    // What was copied before the failure.
                    output::json(&summaries)?;
                }
                output::failure(error.as_ref());
                // There is a signal to read only if the caller interrupted the copy.
                let signal = sys::read_signal(&stop);
                return Ok(signal.map_or(crate::OUR_FAILURE, |signal| 128u8.saturating_add(signal)));
            }
        }
    }
    match summaries.as_slice() {
        [] => {}
        [one] => output::json(one)?,
        several => output::json(&several)?,
    }
    Ok(0)
}

fn copy_one(
    manager: &mut Manager,
    args: &Args,
    copy: &Copy,
    limit: u64,
    interrupt: BorrowedFd<'_>,
) -> Result<Summary, Box<dyn Error>> {
    let mut bar = Bar::new(args.quiet || args.json);
    let options = CopyOptions {
        user: args.user.clone(),
        follow_link: args.follow_link,
        limits: UnpackLimits { bytes: limit, ..UnpackLimits::default() },
        progress: &mut |done, total| bar.show(done, total),
        interrupt: Some(interrupt),
    };
    let (Copy::In { name, .. } | Copy::Out { name, .. }) = copy;
    let sandbox = manager.find(name)?;
    let copied = match copy {
        Copy::In { from, to, .. } => manager.copy_in(&sandbox, from, to, options),
        Copy::Out { from, to, .. } => manager.copy_out(&sandbox, from, to, options),
    };
    copied.map_err(|error| hints::not_running(error, &sandbox))
}

fn report(summary: &Summary, elapsed: Duration) {
    for (path, reason) in &summary.skipped {
        output::note(format_args!("left out {}: {}", escape::word(path), escape::word(reason)));
    }
    let others = summary.skipped_count.saturating_sub(summary.skipped.len() as u64);
    if others > 0 {
        output::note(format_args!("left out {others} more"));
    }
    output::note(sentence(summary, elapsed));
}

fn sentence(summary: &Summary, elapsed: Duration) -> String {
    let count = |number: u64, one: &str, many: &str| match number {
        0 => None,
        1 => Some(format!("1 {one}")),
        _ => Some(format!("{number} {many}")),
    };
    let parts = [
        count(summary.files, "file", "files"),
        count(summary.folders, "folder", "folders"),
        count(summary.links, "link", "links"),
    ];
    let what = parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let what = if what.is_empty() { "nothing".to_owned() } else { what };
    let speed = table::bytes(rate(summary.bytes, elapsed));
    format!("copied {what}, {} ({speed}/s)", table::bytes(summary.bytes))
}

fn document(summary: &Summary) -> serde_json::Value {
    let skipped: Vec<_> =
        summary.skipped.iter().map(|(path, reason)| json!({ "path": path, "reason": reason })).collect();
    json!({
        "files": summary.files,
        "folders": summary.folders,
        "links": summary.links,
        "bytes": summary.bytes,
        "digest": summary.digest,
        "skipped": skipped,
        "skipped_count": summary.skipped_count,
    })
}
