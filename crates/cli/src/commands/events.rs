//! `bathy events` and `bathy audit`: prints the audit log, and verifies it.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use bathy_audit::{Anchor, FollowError, Follower, LogEntry, LogFilter, Report, VerifyError, verify};
use bathy_protocol::time::iso;
use bathy_protocol::unix_ns;
use bathy_runtime::audit::audit_folder;
use bathy_spec::paths::Paths;
use serde_json::{Map, Value, json};

use crate::commands::open_to_look;
use crate::ui::time::{self, Since};
use crate::ui::{escape, output};

/// The exit code for an audit log that fails verification.
const NOT_WHOLE: u8 = 1;
/// How long one wait for new events lasts.
const PATIENCE: Duration = Duration::from_secs(1);
/// Fields of an event that are not printed as details.
const PLACED: [&str; 8] = ["time_unix_ns", "sandbox", "name", "actor", "event", "seq", "prev", "hash"];

/// Arguments of `bathy events`.
#[derive(clap::Args)]
pub struct Args {
    /// Follow new events.
    #[arg(short, long)]
    follow: bool,
    /// Only events of this sandbox, which may have been removed: its name or id.
    #[arg(long, value_name = "NAME")]
    sandbox: Option<String>,
    /// Only events since this time: an age such as 10m, a date, or seconds since 1970.
    #[arg(long, value_name = "TIME", value_parser = time::parse_since)]
    since: Option<Since>,
    /// Print as JSON: one array, or with --follow one event per line.
    #[arg(long)]
    json: bool,
}

/// What can be done with the audit log.
#[derive(clap::Subcommand)]
pub enum AuditVerb {
    /// Verify that no line of the audit log was changed, removed or moved.
    ///
    /// The exit code is 1 if one was.
    Verify {
        /// The anchor that an earlier verification printed, as NUMBER:HASH. The log must still contain it.
        #[arg(long, value_name = "ANCHOR", value_parser = parse_anchor)]
        anchor: Option<Anchor>,
        /// Print the result as JSON.
        #[arg(long)]
        json: bool,
    },
}

pub fn run(args: &Args) -> Result<u8, Box<dyn Error>> {
    print(&Selection {
        sandbox: args.sandbox.as_deref(),
        follow: args.follow,
        since: args.since,
        json: args.json,
        wanted: |_| true,
        sentence,
    })
}

/// Which events are printed, and how.
pub struct Selection<'a> {
    /// Only events of this sandbox.
    pub sandbox: Option<&'a str>,
    pub follow: bool,
    /// Only events since this time.
    pub since: Option<Since>,
    pub json: bool,
    /// Only events that match.
    pub wanted: fn(&Map<String, Value>) -> bool,
    /// Formats an event as one line.
    pub sentence: fn(&Map<String, Value>) -> String,
}

/// Prints the selected events.
pub fn print(args: &Selection<'_>) -> Result<u8, Box<dyn Error>> {
    let sandbox = args.sandbox.map(sandbox_id).transpose()?;
    if let Some((Known::Unknown, id)) = &sandbox
        && !args.follow
        && !has_events(id)?
    {
        return Err(format!("There is no sandbox {id}, and nothing is recorded of one").into());
    }
    let filter = LogFilter {
        sandbox: sandbox.map(|(_, id)| id),
        since_unix_ns: args.since.map(|since| since.unix_ns(unix_ns())),
    };
    let mut printer = Printer {
        json: args.json,
        lines: args.follow,
        printed: false,
        wanted: args.wanted,
        sentence: args.sentence,
    };
    let mut follower = match Follower::open(&folder()?, filter) {
        Ok(follower) => follower,
        // There are no events yet.
        Err(FollowError::NoLog(_)) if !args.follow => return printer.finish().map(|()| 0),
        Err(error) => return Err(error.into()),
    };
    while let Some(entry) = follower.next()? {
        printer.print(&entry)?;
    }
    if args.follow {
        loop {
            io::stdout().flush()?;
            if let Some(entry) = follower.wait(PATIENCE)? {
                printer.print(&entry)?;
            }
        }
    }
    printer.finish()?;
    if follower.unreadable() > 0 {
        output::note(format_args!(
            "{} could not be read. `bathy audit verify` has details",
            counted(follower.unreadable(), "line")
        ));
    }
    Ok(0)
}

/// Whether the store knows a sandbox.
enum Known {
    Present,
    /// It was removed, or never existed.
    Unknown,
}

/// The id of a sandbox. One that was removed is known by its events only.
fn sandbox_id(wanted: &str) -> Result<(Known, String), Box<dyn Error>> {
    match open_to_look("bathy events")?.find(wanted) {
        Ok(sandbox) => Ok((Known::Present, sandbox.record.id)),
        Err(error) if error.is_unknown_name() => Ok((Known::Unknown, wanted.to_owned())),
        Err(error) => Err(error.into()),
    }
}

/// Whether the log has events of a sandbox.
fn has_events(sandbox: &str) -> Result<bool, Box<dyn Error>> {
    let filter = LogFilter { sandbox: Some(sandbox.to_owned()), since_unix_ns: None };
    match Follower::open(&folder()?, filter) {
        Ok(mut follower) => Ok(follower.next()?.is_some()),
        Err(FollowError::NoLog(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn folder() -> Result<PathBuf, Box<dyn Error>> {
    Ok(audit_folder(&Paths::of_user()?))
}

/// Verifies the audit log.
pub fn audit(verb: &AuditVerb) -> Result<u8, Box<dyn Error>> {
    let AuditVerb::Verify { anchor, json } = verb;
    let found = verify::verify(&folder()?, anchor.as_ref());
    let (code, document, text) = match found {
        Ok(report) => {
            let document = json!({
                "whole": true,
                "events": report.lines,
                "files": report.files,
                "first": report.first_seq,
                "last": report.last_seq,
                "hash": report.head_hash,
                "recovered": report.recovered,
                "torn_bytes": report.torn_bytes,
                "lost": report.lost,
            });
            (0, document, report_text(&report))
        }
        Err(
            error @ (VerifyError::Bad { .. }
            | VerifyError::NoHead
            | VerifyError::HeadChanged
            | VerifyError::NoAnchor(_)),
        ) => {
            let mut document = json!({ "whole": false, "error": error.to_string() });
            if let (VerifyError::Bad { file, line, .. }, Some(document)) = (&error, document.as_object_mut())
            {
                document.insert("file".to_owned(), json!(file));
                document.insert("line".to_owned(), json!(line));
            }
            (NOT_WHOLE, document, format!("The audit log is not intact: {error}"))
        }
        Err(error) => return Err(error.into()),
    };
    if *json {
        output::json(&document)?;
    } else {
        output::line(escape::text(&text))?;
    }
    Ok(code)
}

/// The report on a log that passed verification.
fn report_text(report: &Report) -> String {
    let Report { lines, files, first_seq, last_seq, head_hash, recovered, torn_bytes, lost } = report;
    let state = if *lost == 0 { "is intact" } else { "is consistent, but not complete" };
    let mut text = format!(
        "The audit log {state}: {} in {}, {first_seq} to {last_seq}.",
        counted(*lines, "event"),
        counted(*files, "file")
    );
    // Writing to a string cannot fail.
    if *lost > 0 {
        let _ = write!(
            text,
            "\n{} missing that were the newest when the machine stopped: they had not reached its disk, or were removed before it was started again.",
            if *lost == 1 { "1 event is".to_owned() } else { format!("{lost} events are") }
        );
    }
    if *recovered > 0 || *torn_bytes > 0 {
        let _ = write!(
            text,
            "\n{} a writer was interrupted in the middle of a line; all bytes are accounted for.",
            counted(*recovered, "time")
        );
    }
    let _ = write!(
        text,
        "\nTo notice later that all of it was replaced, keep this elsewhere and use --anchor: {last_seq}:{head_hash}"
    );
    text
}

/// A count with its noun.
fn counted(count: u64, thing: &str) -> String {
    match count {
        1 => format!("1 {thing}"),
        count => format!("{count} {thing}s"),
    }
}

fn parse_anchor(text: &str) -> Result<Anchor, String> {
    let wrong = || "an anchor is a number and a hash, as `bathy audit verify` prints them".to_owned();
    let (seq, hash) = text.split_once(':').ok_or_else(wrong)?;
    let hex = hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    match seq.parse() {
        Ok(seq) if hex => Ok(Anchor { seq, hash: hash.to_ascii_lowercase() }),
        _ => Err(wrong()),
    }
}

/// Prints events in the requested form.
struct Printer {
    wanted: fn(&Map<String, Value>) -> bool,
    sentence: fn(&Map<String, Value>) -> String,
    json: bool,
    /// JSON lines instead of one array.
    lines: bool,
    printed: bool,
}

impl Printer {
    fn print(&mut self, entry: &LogEntry) -> Result<(), Box<dyn Error>> {
        let Value::Object(event) = serde_json::from_str(&entry.line)? else { return Ok(()) };
        if !(self.wanted)(&event) {
            return Ok(());
        }
        if !self.json {
            output::line((self.sentence)(&event))?;
        } else if self.lines {
            output::line(with_time(&entry.line, &event))?;
        } else {
            let line = with_time(&entry.line, &event);
            write!(io::stdout(), "{}{line}", if self.printed { ",\n" } else { "[" })?;
        }
        self.printed = true;
        Ok(())
    }

    fn finish(&self) -> Result<(), Box<dyn Error>> {
        if self.json && !self.lines {
            output::line(if self.printed { "]" } else { "[]" })?;
        } else if !self.printed {
            output::nothing("nothing is recorded yet that matches");
        }
        Ok(())
    }
}

/// A line of the log with an additional field: its time as text.
fn with_time(line: &str, event: &Map<String, Value>) -> String {
    let time = event.get("time_unix_ns").and_then(Value::as_u64).map(iso).unwrap_or_default();
    let members = line.trim_end();
    format!("{},\"time\":\"{time}\"}}", members.strip_suffix('}').unwrap_or(members))
}

/// An event as one line: time, kind, sandbox, actor and details.
fn sentence(event: &Map<String, Value>) -> String {
    let text = |key: &str| event.get(key).and_then(Value::as_str).unwrap_or_default();
    let time = event.get("time_unix_ns").and_then(Value::as_u64).unwrap_or_default();
    let actor = |key: &str| event.get("actor").and_then(|actor| actor.get(key));
    let who = actor("user")
        .and_then(Value::as_str)
        .map_or_else(|| actor("uid").map_or_else(String::new, Value::to_string), str::to_owned);
    let program = actor("program").and_then(Value::as_str).unwrap_or_default();
    let mut line = format!("{} {}", iso(time), text("event"));
    if !text("sandbox").is_empty() {
        // Writing to a string cannot fail.
        let _ = write!(line, " {}", text("sandbox"));
    }
    if !text("name").is_empty() {
        let _ = write!(line, " ({})", text("name"));
    }
    let _ = write!(line, " by {who} ({program})");
    for (key, value) in event.iter().filter(|(key, _)| !PLACED.contains(&key.as_str())) {
        match value {
            Value::String(text) if is_word(text) => {
                let _ = write!(line, " {key}={text}");
            }
            value => {
                let _ = write!(line, " {key}={value}");
            }
        }
    }
    escape::word(&line)
}

fn is_word(text: &str) -> bool {
    !text.is_empty()
        && !text.contains(|c: char| c.is_whitespace() || matches!(c, '"' | '=' | '\\') || c.is_control())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentence_of(event: Value) -> String {
        sentence(event.as_object().unwrap())
    }

    #[test]
    fn a_line_tells_when_what_where_and_who() {
        let event = json!({
            "seq": 3, "prev": "00", "hash": "11", "time_unix_ns": 1_000_000_000, "sandbox": "abc", "name": "web",
            "actor": { "uid": 0, "user": "root", "pid": 7, "program": "bathy exec" },
            "event": "exec_started", "argv": ["sh", "-c", "a b"], "user": "user", "terminal": false,
        });
        assert_eq!(
            sentence_of(event),
            "1970-01-01T00:00:01.000Z exec_started abc (web) by root (bathy exec) argv=[\"sh\",\"-c\",\"a b\"] terminal=false user=user"
        );
    }

    #[test]
    fn anchors_are_read_as_they_are_printed() {
        let hash = "ab".repeat(32);
        assert_eq!(parse_anchor(&format!("7:{hash}")), Ok(Anchor { seq: 7, hash: hash.clone() }));
        for text in ["", "7", "7:ab", &format!("x:{hash}"), &format!("-1:{hash}"), &hash] {
            assert!(parse_anchor(text).is_err(), "{text}");
        }
    }

    #[test]
    fn c1_guests_cannot_forge_lines_or_fields() {
        let event = json!({
            "time_unix_ns": 0, "actor": { "uid": 5, "pid": 7, "program": "x" },
            "event": "sandbox_ended", "cause": "\n\u{1b}[2J user=root \u{202e}",
        });
        assert_eq!(
            sentence_of(event),
            "1970-01-01T00:00:00.000Z sandbox_ended by 5 (x) cause=\"\\n\\u001b[2J user=root \\u{202e}\""
        );
    }
}
