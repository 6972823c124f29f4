//! `bathy repl`: interpreters whose state persists until they are removed.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use bathy_client::interpreter::{CellEvent, CellOptions, CellRequest};
use bathy_manager::{Manager, NewRepl, Repl};
use bathy_protocol::unix_ns;

use crate::args::spec::SpecArgs;
use crate::commands::code::Source;
use crate::commands::lifecycle::Results;
use crate::commands::open_to_look;
use crate::ui::cell::{End, Screen, ShowArgs};
use crate::ui::interrupts::Interrupts;
use crate::ui::progress::Progress;
use crate::ui::table::{Side, Table, output_width};
use crate::ui::{escape, output, prompt, time};

/// The name of this verb in the audit log.
const PROGRAM: &str = "bathy repl";

/// Arguments of `bathy repl`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    open: OpenArgs,
}

/// What can be done with REPLs besides opening one.
#[derive(clap::Subcommand)]
enum Verb {
    /// Create a REPL and print its name.
    New(Box<NewArgs>),
    /// List REPLs.
    Ls(ListArgs),
    /// Run code in a REPL.
    ///
    /// Exit codes are those of `bathy code`.
    Run(RunArgs),
    /// Remove REPLs with their variables and files.
    Rm(RemoveArgs),
}

#[derive(clap::Args)]
struct OpenArgs {
    /// The REPL: its name, or its sandbox's id or a prefix of that. [default: a new one]
    name: Option<String>,
    #[command(flatten)]
    how: How,
}

/// Verbs, which cannot be the names of REPLs.
const VERBS: [&str; 5] = ["new", "ls", "run", "rm", "help"];

/// How cells run and are shown.
#[derive(clap::Args)]
struct How {
    /// Interrupt a cell after this time, such as 30s. [default: never]
    #[arg(long, value_name = "TIME", value_parser = time::parse_duration)]
    timeout: Option<Duration>,
    #[command(flatten)]
    show: ShowArgs,
}

#[derive(clap::Args)]
struct NewArgs {
    /// A name for the REPL. [default: its sandbox's id]
    name: Option<String>,
    #[command(flatten)]
    spec: SpecArgs,
    /// Print the record as JSON instead of the name.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct ListArgs {
    /// Print names only.
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
    /// Print the records as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct RunArgs {
    #[command(flatten)]
    how: How,
    /// The code to run.
    #[arg(short, long, value_name = "CODE", conflicts_with = "file")]
    code: Option<String>,
    /// The REPL: its name, or its sandbox's id or a prefix of that.
    name: String,
    /// A file with the code. [default: standard input, as with -]
    file: Option<PathBuf>,
}

#[derive(clap::Args)]
struct RemoveArgs {
    /// The REPLs to remove.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the verb and returns the exit code.
pub fn run(args: Args) -> Result<u8, Box<dyn Error>> {
    match args.verb {
        None => open(args.open),
        Some(Verb::New(args)) => new(*args),
        Some(Verb::Ls(args)) => list(&args),
        Some(Verb::Run(args)) => run_code(args),
        Some(Verb::Rm(args)) => remove(&args),
    }
}

fn open(args: OpenArgs) -> Result<u8, Box<dyn Error>> {
    prompt::check()?;
    let mut manager = Manager::open(PROGRAM)?;
    let repl = match &args.name {
        Some(name) => manager.find_repl(name)?,
        None => create(&mut manager, None, &SpecArgs::default())?,
    };
    let conversation = Conversation { manager, repl, timeout: args.how.timeout, show: args.how.show };
    prompt::talk(conversation)
}

fn create(manager: &mut Manager, name: Option<String>, spec: &SpecArgs) -> Result<Repl, Box<dyn Error>> {
    if let Some(name) = name.as_deref().filter(|name| VERBS.contains(name)) {
        return Err(format!("A REPL cannot be called {name}: `bathy repl {name}` is a command").into());
    }
    let (spec, pull) = (spec.spec(&[])?, spec.pull());
    let mut progress = Progress::new();
    let repl = manager.create_repl(NewRepl { name, spec, pull }, &mut |step| progress.step(step));
    drop(progress);
    output::warnings(manager);
    let repl = repl?;
    for note in &repl.notes {
        output::note(escape::text(note));
    }
    Ok(repl)
}

fn new(args: NewArgs) -> Result<u8, Box<dyn Error>> {
    let repl = create(&mut Manager::open(PROGRAM)?, args.name, &args.spec)?;
    if args.json {
        output::json(&repl)?;
    } else {
        output::line(&repl.name)?;
    }
    Ok(0)
}

/// The columns that are left out on a narrow terminal, the first one first.
const LEAST_IMPORTANT: [&str; 4] = ["LANGUAGE", "SANDBOX", "CREATED", "MEMORY"];

fn list(args: &ListArgs) -> Result<u8, Box<dyn Error>> {
    let repls = open_to_look(PROGRAM)?.list_repls()?;
    if args.json {
        output::json(&repls)?;
    } else if args.quiet {
        repls.iter().try_for_each(|repl| output::line(&repl.name))?;
    } else {
        let table = table(&repls, unix_ns()).fit(output_width(), &LEAST_IMPORTANT);
        table.lines().iter().try_for_each(output::line)?;
        if repls.is_empty() {
            output::nothing("there are no REPLs yet; `bathy repl` makes one");
        }
    }
    Ok(0)
}

fn table(repls: &[Repl], now: u64) -> Table {
    let mut table = Table::new(&[
        ("NAME", Side::Left),
        ("STATUS", Side::Left),
        ("LANGUAGE", Side::Left),
        ("CELLS", Side::Right),
        ("LAST USED", Side::Left),
        ("CREATED", Side::Left),
        ("MEMORY", Side::Right),
        ("SANDBOX", Side::Left),
    ]);
    for repl in repls {
        table.row([
            repl.name.clone(),
            repl.status.as_str().to_owned(),
            repl.language.as_str().to_owned(),
            repl.cells.to_string(),
            repl.last_used_ns.map_or_else(|| "never".to_owned(), |at| time::ago(at, now)),
            time::ago(repl.created_ns, now),
            repl.sandbox.record.spec.memory.to_string(),
            repl.sandbox.record.id.clone(),
        ]);
    }
    table
}

fn run_code(args: RunArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open(PROGRAM)?;
    let repl = manager.find_repl(&args.name)?;
    let code = Source::of(args.code, args.file).read(repl.language)?;
    let mut conversation = Conversation { manager, repl, timeout: args.how.timeout, show: args.how.show };
    conversation.run(code)
}

fn remove(args: &RemoveArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open_to_end(PROGRAM)?;
    let mut results = Results::new(args.json);
    for name in &args.names {
        let found = manager.find_repl(name);
        let removed = found.and_then(|repl| manager.remove_repl(&repl).map(|()| repl.sandbox));
        output::warnings(&mut manager);
        results.add(name, removed.map(|sandbox| (name.clone(), sandbox)).map_err(Into::into))?;
    }
    results.finish()
}

/// A REPL that is open at a prompt or for one cell.
pub struct Conversation {
    manager: Manager,
    repl: Repl,
    timeout: Option<Duration>,
    show: ShowArgs,
}

impl Conversation {
    pub fn name(&self) -> &str {
        &self.repl.name
    }

    /// How many cells have run in it.
    pub fn cells(&self) -> u64 {
        self.repl.cells
    }

    /// Whether the REPL still exists.
    pub fn goes_on(&mut self) -> bool {
        self.manager.find_repl(&self.repl.sandbox.record.id).is_ok()
    }

    /// Runs code, shows its output, and returns its exit code.
    pub fn run(&mut self, code: String) -> Result<u8, Box<dyn Error>> {
        let mut request = CellRequest::new(self.repl.language, code);
        request.timeout = self.timeout;
        request.max_output = self.show.max_output();
        request.check()?;
        let interrupts = Interrupts::take(None)?;
        let mut screen = Screen::new(&self.show, interrupts.trigger());
        let options = CellOptions { interrupt: Some(interrupts.fd()) };
        let mut take = |event: CellEvent| {
            // Lost state is reported at the end, by the manager, which knows more about it than the agent.
            if !matches!(event, CellEvent::Started(_)) {
                screen.take(event);
            }
        };
        let done = self.manager.run_in_repl(&self.repl, request, &options, &mut take);
        let signal = interrupts.signal();
        drop(interrupts);
        output::warnings(&mut self.manager);
        let done = done?;
        screen.finish(&End { outcome: &done.outcome, signal, kept: true, lost: done.lost.as_deref() })
    }
}
