//! `bathy logs`: the output of the main command and of jobs, and the guest kernel's console.

use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use bathy_logs::{CONSOLE, LogRecord, Meta, Reader, STDERR};
use bathy_manager::{Manager, ManagerError};
use bathy_protocol::time::iso;
use bathy_protocol::unix_ns;
use serde_json::{Value, json};

use crate::commands::jobs::no_job;
use crate::commands::open_to_look;
use crate::ui::escape::{self, Returns, Stream};
use crate::ui::output;
use crate::ui::time::{self, Since};

/// How often the state of a followed log's sandbox is checked.
const LOOK: Duration = Duration::from_millis(500);

/// Arguments of `bathy logs`.
#[derive(clap::Args)]
pub struct Args {
    /// The sandbox: its name, its id or a prefix of its id.
    name: String,
    /// Follow the log until the sandbox ends.
    #[arg(short, long)]
    follow: bool,
    /// Only output since this time: an age such as 10m, a date, or seconds since 1970.
    #[arg(long, value_name = "TIME", value_parser = time::parse_since)]
    since: Option<Since>,
    /// Only the last LINES lines.
    #[arg(short = 'n', long, value_name = "LINES")]
    tail: Option<usize>,
    /// The guest kernel's console instead of the output.
    #[arg(long, conflicts_with_all = ["job", "number"])]
    console: bool,
    /// Only this job's output; 0 is the main command.
    #[arg(value_name = "JOB")]
    number: Option<u32>,
    /// The same as JOB.
    #[arg(long, value_name = "NUMBER", conflicts_with = "number")]
    job: Option<u32>,
    /// Prefix every line with its time.
    #[arg(short, long)]
    timestamps: bool,
    /// Print records as JSON: one array, or with --follow one record per line.
    #[arg(long, conflicts_with = "timestamps")]
    json: bool,
}

pub fn run(args: &Args) -> Result<u8, Box<dyn Error>> {
    let mut manager = open_to_look("bathy logs")?;
    let sandbox = manager.find(&args.name)?;
    let wanted_job = args.job.or(args.number);
    if let Some(job) = wanted_job
        // The main command has its number before its first start.
        && (job != 0 || sandbox.record.spec.command.is_empty())
        && manager.jobs(&sandbox)?.iter().all(|known| known.number != job)
    {
        return Err(no_job(&args.name, job).into());
    }
    let folder = manager.folder(&sandbox);
    let path = if args.console { folder.console_log() } else { folder.output_log() };
    let mut printer = Printer::new(args);
    if !path.exists() {
        // A sandbox that was never started has no log.
        return printer.finish(0).map(|()| 0).map_err(Into::into);
    }
    let since = args.since.map_or(0, |since| since.unix_ns(unix_ns()));
    let wanted = |record: &LogRecord| {
        record.meta.unix_ns >= since && wanted_job.is_none_or(|job| record.meta.source == job)
    };

    let mut reader = Reader::open(&path)?.until_now()?;
    let mut tail = args.tail.map(Tail::new);
    while let Some(record) = reader.next()? {
        match &mut tail {
            _ if !wanted(&record) => {}
            Some(tail) => tail.push(record.meta, &record.bytes),
            None => printer.print(record.meta, &record.bytes)?,
        }
    }
    for (meta, bytes) in tail.into_iter().flat_map(|tail| tail.pieces) {
        printer.print(meta, &bytes)?;
    }
    let mut lost = reader.lost();
    if args.follow {
        let mut reader = Reader::open(&path)?.from(reader.position());
        // Checked before the last read, so that no output before the end is missed.
        let mut running = true;
        while running {
            running = goes_on(&mut manager, &sandbox.record.id, wanted_job)?;
            printer.flush()?;
            while let Some(record) = reader.wait(if running { LOOK } else { Duration::ZERO })? {
                if wanted(&record) {
                    printer.print(record.meta, &record.bytes)?;
                    printer.flush()?;
                }
            }
        }
        lost += reader.lost();
    }
    printer.finish(lost)?;
    Ok(0)
}

/// Whether more output may follow.
fn goes_on(manager: &mut Manager, id: &str, job: Option<u32>) -> Result<bool, ManagerError> {
    let sandbox = match manager.find(id) {
        Err(error) if error.is_unknown_name() => return Ok(false),
        found => found?,
    };
    let has_ended = match job {
        Some(number) => manager.jobs(&sandbox)?.iter().any(|job| job.number == number && job.exit.is_some()),
        None => false,
    };
    Ok(sandbox.is_alive() && !has_ended)
}

/// The last lines of the pushed records.
struct Tail {
    limit: usize,
    /// Each piece ends at the end of a line or of a record.
    pieces: VecDeque<(Meta, Vec<u8>)>,
    ends: usize,
}

impl Tail {
    fn new(limit: usize) -> Self {
        Self { limit, pieces: VecDeque::new(), ends: 0 }
    }

    fn push(&mut self, meta: Meta, bytes: &[u8]) {
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.pieces.push_back((meta, line.to_vec()));
            self.ends += usize::from(line.ends_with(b"\n"));
            while self.lines() > self.limit
                && let Some((_, first)) = self.pieces.pop_front()
            {
                self.ends -= usize::from(first.ends_with(b"\n"));
            }
        }
    }

    /// The number of lines, including an unfinished one.
    fn lines(&self) -> usize {
        self.ends + usize::from(self.pieces.back().is_some_and(|(_, last)| !last.ends_with(b"\n")))
    }
}

/// Prints records to the right output, in the requested form.
struct Printer {
    json: bool,
    /// JSON lines instead of one array.
    lines: bool,
    timestamps: bool,
    /// For standard output and standard error: whether it is a terminal.
    terminal: [bool; 2],
    printed: bool,
    /// For each job and channel: the decoder of characters split over records, and whether a line has begun.
    streams: BTreeMap<(u32, u8), Line>,
}

struct Line {
    stream: Stream,
    begun: bool,
}

impl Printer {
    fn new(args: &Args) -> Self {
        Self {
            json: args.json,
            lines: args.follow,
            timestamps: args.timestamps,
            terminal: [io::stdout().is_terminal(), io::stderr().is_terminal()],
            printed: false,
            streams: BTreeMap::new(),
        }
    }

    fn print(&mut self, meta: Meta, bytes: &[u8]) -> io::Result<()> {
        let was_printed = std::mem::replace(&mut self.printed, true);
        if self.json {
            let before = match (self.lines, was_printed) {
                (true, _) => "",
                (false, true) => ",\n",
                (false, false) => "[",
            };
            let after = if self.lines { "\n" } else { "" };
            return write!(
                io::stdout(),
                "{before}{}{after}",
                escape::json(&document(meta, bytes).to_string())
            );
        }
        let to_stderr = meta.channel == STDERR;
        let [stdout_terminal, stderr_terminal] = self.terminal;
        let terminal = if to_stderr { stderr_terminal } else { stdout_terminal };
        let timestamps = self.timestamps;
        let fresh = || Line { stream: Stream::new(Returns::Show), begun: false };
        let line = self.streams.entry((meta.source, meta.channel)).or_insert_with(fresh);
        let shown = if terminal {
            // The reader may be interrupted after any record.
            let shown = line.stream.push(bytes);
            (shown + line.stream.pause()).into_bytes()
        } else {
            bytes.to_vec()
        };
        let shown = if timestamps { stamped(&shown, meta.unix_ns, &mut line.begun) } else { shown };
        if to_stderr { io::stderr().write_all(&shown) } else { io::stdout().write_all(&shown) }
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }

    /// Ends the document, and reports what could not be read.
    fn finish(mut self, lost: u64) -> io::Result<()> {
        if self.json && !self.lines {
            output::line(if self.printed { "]" } else { "[]" })?;
        }
        for ((_, channel), line) in &mut self.streams {
            let rest = line.stream.finish();
            if *channel == STDERR {
                io::stderr().write_all(rest.as_bytes())?
            } else {
                io::stdout().write_all(rest.as_bytes())?
            }
        }
        self.flush()?;
        if !self.json && !self.printed {
            output::nothing("nothing was printed yet that matches");
        }
        if lost > 0 {
            output::note(format_args!(
                "about {lost} bytes of the log were overwritten before they could be read"
            ));
        }
        Ok(())
    }
}

/// Prefixes every line with a time.
fn stamped(bytes: &[u8], unix_ns: u64, begun: &mut bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + 32);
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        if !*begun {
            out.extend_from_slice(iso(unix_ns).as_bytes());
            out.push(b' ');
        }
        out.extend_from_slice(line);
        *begun = !line.ends_with(b"\n");
    }
    out
}

/// A record as JSON, with invalid UTF-8 replaced.
fn document(meta: Meta, bytes: &[u8]) -> Value {
    let channel = match meta.channel {
        CONSOLE => "console",
        STDERR => "stderr",
        _ => "stdout",
    };
    json!({
        "time": iso(meta.unix_ns),
        "time_unix_ns": meta.unix_ns,
        "job": (meta.channel != CONSOLE).then_some(meta.source),
        "channel": channel,
        "text": String::from_utf8_lossy(bytes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail_of(limit: usize, records: &[&str]) -> String {
        let mut tail = Tail::new(limit);
        for record in records {
            tail.push(Meta { unix_ns: 0, source: 0, channel: 1 }, record.as_bytes());
        }
        tail.pieces.into_iter().map(|(_, bytes)| String::from_utf8(bytes).unwrap()).collect()
    }

    #[test]
    fn the_last_lines_are_whole_lines() {
        assert_eq!(tail_of(2, &["a\nb\nc\nd\n"]), "c\nd\n");
        assert_eq!(tail_of(2, &["a\nb\n", "c\nunfinished"]), "c\nunfinished");
        assert_eq!(tail_of(1, &["a\nlo", "ng li", "ne\n"]), "long line\n");
        assert_eq!(tail_of(0, &["a\nb"]), "");
        assert_eq!(tail_of(9, &["a\nb"]), "a\nb");
    }

    #[test]
    fn every_line_gets_one_time() {
        let mut begun = false;
        assert_eq!(
            stamped(b"a\nb", 0, &mut begun),
            b"1970-01-01T00:00:00.000Z a\n1970-01-01T00:00:00.000Z b"
        );
        assert_eq!(stamped(b"c\n", 1_000_000_000, &mut begun), b"c\n");
        assert!(!begun);
    }

    #[test]
    fn records_say_where_they_come_from() {
        let record = document(Meta { unix_ns: 1, source: 2, channel: STDERR }, b"a\xff");
        assert_eq!((record["job"].as_u64(), record["channel"].as_str()), (Some(2), Some("stderr")));
        assert_eq!(record["text"], "a\u{fffd}");
        assert_eq!(document(Meta { unix_ns: 1, source: 0, channel: CONSOLE }, b"")["job"], Value::Null);
    }
}
