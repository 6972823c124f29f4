//! One cell of code on the command line: its output is shown as it arrives, and its result becomes an exit code.

use std::error::Error;
use std::io::{self, IsTerminal};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use bathy_client::interpreter::{
    Bundle, CapturedOutput, CellEnd, CellEvent, CellOutcome, CodeError, Collected, Interrupter,
};
use bathy_protocol::Exit;
use serde_json::{Value, json};

use crate::ui::escape::{self, Returns, Stream};
use crate::ui::exit_code::{BROKEN_PIPE, JSON_OUTPUT};
use crate::ui::images::{self, Image, Protocol};
use crate::ui::interrupts::Trigger;
use crate::ui::{output, table, terminal};

/// The exit code of code that raised an error.
const ERROR: u8 = 1;
const TIMED_OUT: u8 = 124;
const NO_INTERPRETER: u8 = 127;
/// The exit code of an interpreter that SIGKILL ended.
const KILLED: u8 = 137;

/// How a cell's results are shown.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ShowArgs {
    /// Save pictures into this folder, as bathy-1.png and so on.
    #[arg(long, value_name = "FOLDER")]
    save_dir: Option<PathBuf>,
    /// Do not show pictures on the terminal.
    #[arg(long)]
    no_inline: bool,
    /// Print everything as one JSON document at the end.
    #[arg(long, conflicts_with_all = ["save_dir", "no_inline"])]
    json: bool,
}

impl ShowArgs {
    /// How many bytes of each output the guest should send.
    pub fn max_output(&self) -> u64 {
        if self.json { u64::try_from(JSON_OUTPUT).unwrap_or(u64::MAX) } else { u64::MAX }
    }
}

/// Shows the events of a cell.
pub struct Screen {
    args: ShowArgs,
    protocol: Option<Protocol>,
    outputs: [Out; 2],
    collected: Collected,
    trigger: Trigger,
    /// The first output that failed.
    failed: Option<io::Error>,
    /// Pictures that were neither shown nor saved.
    unseen: Vec<Image>,
}

/// One of our outputs. Bytes of a guest are escaped on a terminal, and unchanged elsewhere.
struct Out {
    fd: BorrowedFd<'static>,
    escape: Option<Stream>,
    /// Whether a line has begun.
    begun: bool,
}

impl Out {
    fn new(fd: BorrowedFd<'static>) -> Self {
        Self { fd, escape: fd.is_terminal().then(|| Stream::new(Returns::Pass)), begun: false }
    }

    fn guest_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.escape {
            Some(stream) => {
                let shown = stream.push(bytes);
                self.ours(shown.as_bytes())
            }
            None => self.ours(bytes),
        }
    }

    /// Prints text of a guest on a line of its own.
    fn guest_line(&mut self, text: &str) -> io::Result<()> {
        self.fresh_line()?;
        let text = if self.escape.is_some() { escape::text(text) } else { text.to_owned() };
        self.ours(format!("{text}\n").as_bytes())
    }

    /// Flushes an incomplete character.
    fn settle(&mut self) -> io::Result<()> {
        let rest = self.escape.as_mut().map(Stream::finish).unwrap_or_default();
        self.ours(rest.as_bytes())
    }

    fn fresh_line(&mut self) -> io::Result<()> {
        self.settle()?;
        if self.begun { self.ours(b"\n") } else { Ok(()) }
    }

    fn ours(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(last) = bytes.last() {
            self.begun = *last != b'\n';
        }
        terminal::write_all(self.fd, bytes)
    }
}

impl Drop for Out {
    /// Also when the sandbox ended in the middle of the output: the guest's colours end with it.
    fn drop(&mut self) {
        let _ = self.settle();
    }
}

impl Screen {
    /// An empty screen. `trigger` interrupts the code when its output can no longer be written.
    pub fn new(args: &ShowArgs, trigger: Trigger) -> Self {
        Self {
            args: args.clone(),
            protocol: if args.no_inline { None } else { images::protocol() },
            outputs: [Out::new(rustix::stdio::stdout()), Out::new(rustix::stdio::stderr())],
            collected: Collected::default(),
            trigger,
            failed: None,
            unseen: Vec::new(),
        }
    }

    pub fn take(&mut self, event: CellEvent) {
        if self.args.json {
            self.collected.take(event);
            return;
        }
        if self.failed.is_none()
            && let Err(error) = self.show(event)
        {
            self.failed = Some(error);
            self.trigger.pull();
        }
    }

    fn show(&mut self, event: CellEvent) -> io::Result<()> {
        let [stdout, stderr] = &mut self.outputs;
        match event {
            CellEvent::Started(started) => {
                if let Some(lost) = started.lost {
                    output::note(format_args!(
                        "{}. All variables of this context are lost; files are kept",
                        escape::text(&lost)
                    ));
                }
                Ok(())
            }
            CellEvent::Stdout(bytes) | CellEvent::Background(bytes) => stdout.guest_bytes(&bytes),
            CellEvent::Stderr(bytes) => stderr.guest_bytes(&bytes),
            CellEvent::Display(bundle) | CellEvent::Result(bundle) => self.value(&bundle),
            CellEvent::Error(error) => {
                self.collected.error = Some(error.clone());
                self.before_stderr()?;
                let [_, stderr] = &mut self.outputs;
                traceback(&error).iter().try_for_each(|line| stderr.guest_line(line))
            }
        }
    }

    fn value(&mut self, bundle: &Bundle) -> io::Result<()> {
        for omitted in &bundle.omitted {
            let (mime, reason) = (escape::word(&omitted.mime), escape::word(&omitted.reason));
            self.note(format_args!("{mime} of {}: {reason}", table::bytes(omitted.bytes)))?;
        }
        match Image::of(bundle) {
            Some(Ok(image)) => return self.picture(image),
            Some(Err(wrong)) => self.note(wrong)?,
            None => {}
        }
        let [stdout, _] = &mut self.outputs;
        if let Some(text) =
            ["text/plain", "text/markdown", "text/latex"].iter().find_map(|mime| bundle.text(mime))
        {
            return stdout.guest_line(text);
        }
        if let Some(document) = bundle.data.get("application/json") {
            return stdout.guest_line(&escape::json(&format!("{document:#}")));
        }
        let forms: Vec<String> = bundle.data.keys().map(|mime| escape::word(mime)).collect();
        match forms.as_slice() {
            [] => Ok(()),
            forms => self.note(format_args!("a value as {} only; --json prints it", forms.join(", "))),
        }
    }

    fn picture(&mut self, image: Image) -> io::Result<()> {
        let mut seen = false;
        if let Some(folder) = self.args.save_dir.clone() {
            match image.save(&folder) {
                Ok(path) => self.note(format_args!("{} ({image})", path.display()))?,
                Err(error) => {
                    self.note(format_args!("Cannot save a picture in {}: {error}", folder.display()))?
                }
            }
            seen = true;
        }
        if let Some(shown) = self.protocol.and_then(|protocol| image.inline(protocol)) {
            let [stdout, _] = &mut self.outputs;
            stdout.fresh_line()?;
            stdout.ours(shown.as_bytes())?;
            seen = true;
        }
        if !seen {
            self.unseen.push(image);
        }
        Ok(())
    }

    /// Prints a line of our own between the guest's.
    fn note(&mut self, text: impl std::fmt::Display) -> io::Result<()> {
        self.before_stderr()?;
        let [_, stderr] = &mut self.outputs;
        stderr.fresh_line()?;
        stderr.ours(format!("bathy: {text}\n").as_bytes())
    }

    /// On a terminal both outputs share their lines.
    fn before_stderr(&mut self) -> io::Result<()> {
        let [stdout, stderr] = &mut self.outputs;
        if stdout.escape.is_some() && stderr.escape.is_some() { stdout.fresh_line() } else { Ok(()) }
    }

    /// Ends the cell: prints what remains, and returns the exit code.
    pub fn finish(mut self, end: &End<'_>) -> Result<u8, Box<dyn Error>> {
        let code = end.exit_code(self.collected.error.as_ref());
        if self.args.json {
            let document = report(&self.collected, end, code);
            output::json(&document)?;
            return Ok(code);
        }
        let ended = self.close(end);
        match self.failed.take().or_else(|| ended.err()) {
            Some(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(BROKEN_PIPE),
            Some(error) => Err(error.into()),
            None => Ok(code),
        }
    }

    fn close(&mut self, end: &End<'_>) -> io::Result<()> {
        self.outputs.iter_mut().try_for_each(Out::settle)?;
        let unseen = std::mem::take(&mut self.unseen);
        if !unseen.is_empty() {
            let noun = if unseen.len() == 1 { "picture" } else { "pictures" };
            let which: Vec<String> = unseen.iter().map(Image::to_string).collect();
            self.note(format_args!("{} {noun} ({}): use --save-dir", unseen.len(), which.join("; ")))?;
        }
        for sentence in end.lost.map(str::to_owned).into_iter().chain(end.message()) {
            self.note(escape::text(&sentence))?;
        }
        Ok(())
    }
}

/// The exit code of an error; for `SystemExit` that of the script.
fn left_with(error: Option<&CodeError>) -> u8 {
    let code = error.filter(|error| error.name == "SystemExit").and_then(|error| error.value.parse().ok());
    code.filter(|code| *code != 0).unwrap_or(ERROR)
}

/// The lines of an error.
fn traceback(error: &CodeError) -> Vec<String> {
    match error.traceback.as_slice() {
        [] if error.value.is_empty() => vec![error.name.clone()],
        [] => vec![format!("{}: {}", error.name, error.value)],
        lines => lines.to_vec(),
    }
}

/// How a cell ended.
pub struct End<'a> {
    /// As the sandbox reported it.
    pub outcome: &'a CellOutcome,
    /// The signal with which the caller interrupted it.
    pub signal: Option<u8>,
    /// Whether the context persists, so that lost state is worth reporting.
    pub kept: bool,
    /// The state that was lost before the cell ran.
    pub lost: Option<&'a str>,
}

impl End<'_> {
    fn exit_code(&self, error: Option<&CodeError>) -> u8 {
        let ended = &self.outcome.ended;
        match (&ended.end, ended.interrupted) {
            (_, Some(Interrupter::Timeout)) => TIMED_OUT,
            (_, Some(Interrupter::Asked)) => {
                self.signal.map_or(KILLED, |signal| 128u8.saturating_add(signal))
            }
            (CellEnd::Finished(_), None) if error.is_some() || !self.outcome.ok => left_with(error),
            (CellEnd::Finished(_), None) => 0,
            (CellEnd::Exited(exit), None) => exit.shell_code(),
            (CellEnd::OutOfMemory | CellEnd::Killed, None) => KILLED,
            (CellEnd::NotStarted(_), None) => NO_INTERPRETER,
            (CellEnd::ChannelClosed, None) => ERROR,
            (CellEnd::Cancelled, None) => crate::OUR_FAILURE,
        }
    }

    /// The message to print after the code's own output.
    fn message(&self) -> Option<String> {
        let trouble = self.outcome.trouble()?;
        match &self.outcome.ended.end {
            CellEnd::NotStarted(_) => Some(trouble),
            _ if self.kept => Some(trouble),
            // The script may have ended its interpreter on purpose.
            CellEnd::Exited(Exit::Code(_)) => None,
            // The rest is about the next cell, and there is none.
            _ => Some(trouble.split_once(". ").map_or(trouble.as_str(), |(first, _)| first).to_owned()),
        }
    }
}

fn report(collected: &Collected, end: &End<'_>, code: u8) -> Value {
    let outcome = end.outcome;
    let ended = &outcome.ended;
    let text = |kept: &CapturedOutput, total: u64| json!({ "text": kept.text(), "bytes": total, "truncated": total > kept.captured() });
    json!({
        "exit_code": code,
        "ok": collected.ok(outcome),
        "stdout": text(&collected.stdout, ended.stdout_bytes),
        "stderr": text(&collected.stderr, ended.stderr_bytes),
        "background": text(&collected.background, ended.background_bytes),
        "results": collected.results,
        "error": collected.error,
        "message": end.message(),
        "count": outcome.count,
        "fresh": outcome.started.fresh,
        "lost": end.lost.or(outcome.started.lost.as_deref()),
        "state_lost": ended.state_lost,
        "timing_ms": { "waited": outcome.started.waited_ms, "ran": ended.ran_ms },
    })
}

#[cfg(test)]
mod tests {
    use bathy_protocol::cell::{CellEnded, CellStarted};

    use super::*;

    fn outcome(end: CellEnd, interrupted: Option<Interrupter>) -> CellOutcome {
        let ok = matches!(end, CellEnd::Finished(_));
        let ended = CellEnded {
            end,
            interrupted,
            state_lost: !ok,
            stdout_bytes: 0,
            stderr_bytes: 0,
            background_bytes: 0,
            stray_packets: 0,
            ran_ms: 1500,
        };
        CellOutcome { started: CellStarted::default(), ended, ok, count: Some(1), damage: None }
    }

    fn code(outcome: &CellOutcome, error: bool) -> u8 {
        let error = error.then(CodeError::default);
        End { outcome, signal: Some(2), kept: false, lost: None }.exit_code(error.as_ref())
    }

    #[test]
    fn exit_codes_tell_how_a_cell_ended() {
        let finished = || CellEnd::Finished("{}".to_owned());
        for (end, interrupted, error, expected) in [
            (finished(), None, false, 0),
            (finished(), None, true, 1),
            (finished(), Some(Interrupter::Timeout), true, 124),
            (finished(), Some(Interrupter::Asked), true, 130),
            (CellEnd::Killed, Some(Interrupter::Timeout), false, 124),
            (CellEnd::Exited(Exit::Code(3)), None, false, 3),
            (CellEnd::Exited(Exit::Signal(11)), None, false, 139),
            (CellEnd::OutOfMemory, None, false, 137),
            (CellEnd::NotStarted("no node".to_owned()), None, false, 127),
            (CellEnd::Cancelled, None, false, 125),
        ] {
            let outcome = outcome(end, interrupted);
            assert_eq!(code(&outcome, error), expected, "{outcome:?}");
        }
    }

    #[test]
    fn what_becomes_of_the_state_is_told_only_where_it_matters() {
        let killed = outcome(CellEnd::Killed, Some(Interrupter::Timeout));
        let message = |kept| End { outcome: &killed, signal: None, kept, lost: None }.message().unwrap();
        assert!(message(true).contains("variables"));
        assert!(!message(false).contains("variables") && message(false).contains("time limit"));
        let left = outcome(CellEnd::Exited(Exit::Code(3)), None);
        assert_eq!(End { outcome: &left, signal: None, kept: false, lost: None }.message(), None);
    }

    #[test]
    fn an_error_without_a_traceback_is_still_told() {
        let error = |value: &str| CodeError { name: "E".into(), value: value.into(), traceback: vec![] };
        assert_eq!(
            (traceback(&error("v")), traceback(&error(""))),
            (vec!["E: v".to_owned()], vec!["E".to_owned()])
        );
    }
}
