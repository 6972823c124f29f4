//! `bathy code`: one cell of code, in an ephemeral or a persistent sandbox.

use std::error::Error;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bathy_client::command;
use bathy_client::connection::Connection;
use bathy_client::interpreter::{
    self, CellEvent, CellOptions, CellOutcome, CellRequest, InterpreterError, Language, MAX_CODE,
    PreparedCell,
};
use bathy_manager::ephemeral::{Ended, Ephemeral, NewEphemeral};
use bathy_manager::{Manager, Sandboxed};
use bathy_protocol::cell::{Cell, ContextsRequest};
use bathy_runtime::assets::{Assets, Wanted};
use bathy_runtime::engine;
use bathy_runtime::images::Pull;
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use bathy_spec::{CommandSpec, SandboxSpec};

use crate::args::choice::choice;
use crate::args::spec::SpecArgs;
use crate::ui::cell::{End, Screen, ShowArgs};
use crate::ui::interrupts::Interrupts;
use crate::ui::narrator::Narrator;
use crate::ui::progress::Progress;
use crate::ui::{escape, output, time};

/// The only stream of a connection.
const STREAM: u32 = 1;
/// The name of this verb in the audit log.
const PROGRAM: &str = "bathy code";

/// Arguments of `bathy code`.
#[derive(clap::Args)]
pub struct Args {
    /// The language: python, javascript, typescript or bash. [default: by FILE's extension, else python]
    #[arg(long, value_name = "LANGUAGE", value_parser = choice(LANGUAGES, language), hide_possible_values = true)]
    lang: Option<Language>,
    /// The code to run.
    #[arg(short, long, value_name = "CODE", conflicts_with = "file")]
    code: Option<String>,
    /// Run the code in this sandbox, where variables persist between cells: a name, an id or a prefix of an id.
    #[arg(long, value_name = "NAME", conflicts_with_all = OF_NEW_SANDBOXES)]
    sandbox: Option<String>,
    /// With --sandbox: the context to use, which has its own variables. It is created if it does not exist.
    #[arg(long, value_name = "ID", requires = "sandbox")]
    context: Option<String>,
    /// With --sandbox: start the interpreter anew first, such as when it is stuck or damaged; its variables are lost.
    #[arg(long, requires = "sandbox")]
    restart: bool,
    /// Interrupt the code after this time, such as 30s; the exit code is then 124.
    #[arg(long, value_name = "TIME", value_parser = time::parse_duration)]
    timeout: Option<Duration>,
    #[command(flatten)]
    show: ShowArgs,
    #[command(flatten)]
    spec: SpecArgs,
    /// A file with the code: .py, .js, .mjs, .ts or .sh. [default: standard input, as with -]
    file: Option<PathBuf>,
}

/// As `--lang` names them.
const LANGUAGES: &[&str] = &["python", "javascript", "typescript", "bash"];

/// Options for new sandboxes, which conflict with --sandbox. Variables and the working directory apply to a cell as well.
const OF_NEW_SANDBOXES: [&str; 22] = [
    "config",
    "no_config",
    "image",
    "engine",
    "uml_mode",
    "security",
    "writable_root",
    "label",
    "user",
    "memory",
    "cpus",
    "cpu_quota",
    "disk",
    "disk_write_bandwidth",
    "disk_read_bandwidth",
    "disk_flushes",
    "processes",
    "log_size",
    "max_duration",
    "idle_timeout",
    "pause_idle",
    "rm",
];

/// Runs the code and returns its exit code.
pub fn run(args: Args) -> Result<u8, Box<dyn Error>> {
    let source = Source::of(args.code, args.file);
    let language = source.language(args.lang)?;
    let mut request = CellRequest::new(language, source.read(language)?);
    request.timeout = args.timeout;
    request.max_output = args.show.max_output();
    request.restart = args.restart;
    match args.sandbox {
        Some(name) => {
            (request.env, request.cwd) = args.spec.variables_and_folder()?;
            persistent(&name, args.context, request, &args.show)
        }
        None => {
            let spec = args.spec.spec(&[])?;
            args.spec.warn_of_no_effect();
            // The sandbox lives as long as its cell, so the shorter time ends both.
            let life = spec.max_duration.map(Duration::from);
            request.timeout = request.timeout.into_iter().chain(life).min();
            ephemeral(spec, args.spec.pull(), &request, &args.show)
        }
    }
}

fn language(text: &str) -> Result<Language, String> {
    interpreter::language(text).map_err(|error| error.to_string())
}

/// Where code comes from.
pub enum Source {
    Given(String),
    File(PathBuf),
    Input,
}

impl Source {
    /// Code given as an option, in a file, or on standard input.
    pub fn of(code: Option<String>, file: Option<PathBuf>) -> Self {
        match (code, file) {
            (Some(code), _) => Self::Given(code),
            (None, Some(file)) if file != Path::new("-") => Self::File(file),
            _ => Self::Input,
        }
    }

    /// The requested language, else that of the file's extension, else Python.
    pub fn language(&self, wanted: Option<Language>) -> Result<Language, String> {
        let Self::File(path) = self else { return Ok(wanted.unwrap_or(Language::Python)) };
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        let told = match extension.to_str() {
            Some("py") => Some(Language::Python),
            Some("js" | "mjs") => Some(Language::JavaScript),
            Some("ts" | "mts") => Some(Language::TypeScript),
            Some("sh" | "bash") => Some(Language::Bash),
            _ => None,
        };
        if wanted.is_none() && told.is_none() && !path.exists() {
            return Err(no_such_file(path));
        }
        wanted
            .or(told)
            .ok_or_else(|| format!("The name of {} does not tell its language. Use --lang", path.display()))
    }

    pub fn read(self, language: Language) -> Result<String, Box<dyn Error>> {
        let (what, bytes) = match self {
            Self::Given(code) => return Ok(code),
            Self::File(path) => {
                let name = path.display().to_string();
                let read = File::open(&path).and_then(limited);
                let failed = |error: io::Error| match error.kind() {
                    io::ErrorKind::NotFound => no_such_file(&path),
                    _ => format!("Cannot read {name}: {error}"),
                };
                (name.clone(), read.map_err(failed)?)
            }
            Self::Input => {
                if io::stdin().is_terminal() {
                    output::note(format_args!(
                        "write {} code; Ctrl-D ends it and runs it",
                        language.as_str()
                    ));
                }
                ("The code".to_owned(), limited(io::stdin().lock())?)
            }
        };
        if bytes.len() > MAX_CODE {
            return Err(format!("{what} has more than {MAX_CODE} bytes. Copy it into a sandbox with `bathy cp` and run it there").into());
        }
        Ok(String::from_utf8(bytes).map_err(|_| format!("{what} is not UTF-8 text"))?)
    }
}

/// Reads at most one byte more than can be run.
fn limited(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(u64::try_from(MAX_CODE).unwrap_or(u64::MAX) + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Runs a cell in a persistent sandbox.
fn persistent(
    name: &str,
    context: Option<String>,
    mut request: CellRequest,
    show: &ShowArgs,
) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open(PROGRAM)?;
    let sandbox = manager.find(name)?;
    request.context = context.filter(|context| context != request.language.default_context());
    request.check()?;
    if let Some(context) = &request.context {
        ensure_context(&mut manager, &sandbox, context, request.language)?;
    }
    let mut connection = manager.connect(&sandbox)?;
    let begun = manager.begin_cell(&sandbox, &request)?;
    let result = perform(&mut connection, begun.cell, begun.tag, show, true)?;
    result.code
}

fn ensure_context(
    manager: &mut Manager,
    sandbox: &Sandboxed,
    context: &str,
    language: Language,
) -> Result<(), Box<dyn Error>> {
    let listed = manager.contexts(sandbox, ContextsRequest::List)?;
    if listed.iter().all(|known| known.context != context) {
        manager.make_context(sandbox, context, language, None)?;
    }
    Ok(())
}

/// The result of a cell: for the audit log, and for the caller.
struct CellResult {
    outcome: Result<CellOutcome, InterpreterError>,
    code: Result<u8, Box<dyn Error>>,
}

/// Runs a cell on a connection and shows its output.
fn perform(
    connection: &mut Connection,
    cell: Cell,
    tag: u64,
    show: &ShowArgs,
    kept: bool,
) -> Result<CellResult, Box<dyn Error>> {
    let interrupts = Interrupts::take(Some(connection.fd().try_clone_to_owned()?))?;
    let mut screen = Screen::new(show, interrupts.trigger());
    let options = CellOptions { interrupt: Some(interrupts.fd()) };
    let mut take = |event: CellEvent| screen.take(event);
    let outcome = interpreter::run_cell(connection, STREAM, PreparedCell { cell, tag }, &options, &mut take);
    let signal = interrupts.signal();
    drop(interrupts);
    let code = match (&outcome, signal) {
        (Ok(outcome), signal) => screen.finish(&End { outcome, signal, kept, lost: None }),
        // The second interrupt closed the connection.
        (Err(InterpreterError::Connection(_)), Some(signal)) => Ok(128u8.saturating_add(signal)),
        (Err(error), _) => Err(failure(error)),
    };
    Ok(CellResult { outcome, code })
}

/// A failure, with the end of the guest's console if the sandbox has ended.
fn failure(error: &InterpreterError) -> Box<dyn Error> {
    let mut text = bathy_protocol::chain(error);
    if let InterpreterError::SandboxEnded { console, .. } = error {
        let lines: String = console.lines().map(|line| format!("\n  | {line}")).collect();
        text.push_str(&lines);
    }
    text.into()
}

/// Runs a cell in an ephemeral sandbox.
fn ephemeral(
    spec: SandboxSpec,
    pull: Pull,
    request: &CellRequest,
    show: &ShowArgs,
) -> Result<u8, Box<dyn Error>> {
    request.check()?;
    let (paths, operator) = (Paths::of_user()?, Operator::load()?);
    let choice = engine::choose(spec.engine, &operator, &paths)?;
    let (engine, mut spec) = (choice.engine, spec.checked_for(&choice)?);
    let mut progress = Progress::new();
    let wanted = Wanted { engine, spec: &spec, kernel: None, pull };
    let assets = Assets::ensure(&paths, &wanted, &mut |step| progress.step(step))?;
    drop(progress);
    spec.image_digest.clone_from(&assets.image_digest);
    let spec = &spec;

    let surroundings = command::surroundings(&CommandSpec::default(), spec, &assets.image_config, None);
    let restricted = surroundings.restricted;
    let cell = request.cell(Some(surroundings), restricted);
    let work = |tag| command::code_started(&cell, tag);
    let new =
        NewEphemeral { program: PROGRAM, spec, engine, assets: &assets, paths: &paths, operator: &operator };
    let mut sandbox = Ephemeral::start(new, &work, Box::new(Narrator::default()))?;
    let tag = sandbox.tag();
    let result = perform(sandbox.connection(), cell, tag, show, false);
    let keeper_failure = match &result {
        Ok(CellResult { outcome: Err(InterpreterError::Connection(_)), code: Err(_) }) => sandbox.failure(),
        _ => None,
    };
    let ended = match &result {
        Ok(CellResult { outcome: Err(error @ InterpreterError::Connection(_)), .. }) => {
            Ended::without_result(sandbox.cause_of(error))
        }
        Ok(result) => Ended::of_cell(&result.outcome),
        Err(error) => Ended::without_result(sandbox.cause_of(error.as_ref())),
    };
    // The sandbox has ended before anything is reported about it.
    sandbox.end(ended).into_iter().for_each(output::note);
    match keeper_failure {
        Some(failure) => Err(escape::text(&failure).into()),
        None => result?.code,
    }
}

/// The error for a missing file, which may be code that was given without -c.
fn no_such_file(path: &Path) -> String {
    format!("Cannot read {}: there is no such file. Code itself is given with -c", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(file: &str, wanted: Option<Language>) -> Result<Language, String> {
        Source::of(None, Some(file.into())).language(wanted)
    }

    #[test]
    fn a_files_name_tells_its_language() {
        for (file, language) in [
            ("a.py", Language::Python),
            ("a.JS", Language::JavaScript),
            ("a.mjs", Language::JavaScript),
            ("a.ts", Language::TypeScript),
            ("dir.py/a.sh", Language::Bash),
            ("-", Language::Python),
        ] {
            assert_eq!(told(file, None), Ok(language), "{file}");
        }
        assert_eq!(told("a.py", Some(Language::Bash)), Ok(Language::Bash));
        assert!(told("Cargo.toml", None).unwrap_err().contains("--lang"));
        assert!(told("print(1)", None).unwrap_err().contains("-c"));
    }

    #[test]
    fn code_that_cannot_be_run_is_refused_before_a_sandbox_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let read = |bytes: &[u8]| {
            let path = folder.path().join("a.py");
            std::fs::write(&path, bytes).unwrap();
            Source::File(path).read(Language::Python).map_err(|error| error.to_string())
        };
        assert_eq!(read("print('ä')".as_bytes()), Ok("print('ä')".to_owned()));
        assert!(read(b"\xff").unwrap_err().contains("UTF-8"));
        assert!(read(&vec![b'#'; MAX_CODE + 1]).unwrap_err().contains("bathy cp"));
        let missing = Source::File(folder.path().join("no.py")).read(Language::Python);
        assert!(missing.unwrap_err().to_string().contains("Cannot read"));
        assert!(Source::File(folder.path().to_owned()).read(Language::Python).is_err());
    }
}
