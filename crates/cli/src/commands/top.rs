//! `bathy top`: the resource usage of sandboxes, live.

use std::error::Error;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use bathy_client::wait::poll_until;
use bathy_manager::Manager;
use bathy_protocol::time::iso;
use bathy_protocol::unix_ns;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::commands::open_to_look;
use crate::commands::stats::{LEAST_IMPORTANT, Watch, table};
use crate::sys;
use crate::ui::screen;
use crate::ui::terminal::{self, Raw};

/// How often the table is refreshed.
const REFRESH: Duration = Duration::from_secs(1);
/// The keys that quit: q, Q, Ctrl-C, Ctrl-D.
const QUIT: [u8; 4] = [b'q', b'Q', 3, 4];

/// Arguments of `bathy top`.
#[derive(clap::Args)]
pub struct Args {
    /// The sandboxes; all running ones by default.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
}

/// Shows the table until a key ends it.
pub fn run(args: &Args) -> Result<u8, Box<dyn Error>> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err("bathy top needs a terminal. Use `bathy stats` elsewhere".into());
    }
    let mut manager = open_to_look("bathy top")?;
    let mut watch = Watch::default();
    // Before switching to the alternate screen, so that an error for a wrong name stays visible.
    watch.look(&mut manager, &args.names)?;
    let stop = sys::stop_signals()?;
    let resize = sys::resize_signals()?;
    let raw = Raw::enter_screen()?;
    let outcome = show(&mut manager, &mut watch, &args.names, &[stop.as_fd(), resize.as_fd()]);
    drop(raw);
    match outcome? {
        End::Key => Ok(0),
        End::Signal => Ok(128u8.saturating_add(sys::read_signal(&stop)?)),
    }
}

/// Why the table was closed.
enum End {
    Key,
    Signal,
}

fn show(
    manager: &mut Manager,
    watch: &mut Watch,
    names: &[String],
    signals: &[BorrowedFd<'_>; 2],
) -> Result<End, Box<dyn Error>> {
    let [stop, resize] = *signals;
    let mut lines = Vec::new();
    let mut due = Instant::now();
    loop {
        if due <= Instant::now() {
            let width = terminal::size().columns.into();
            lines = table(&watch.look(manager, names)?).fit(Some(width), &LEAST_IMPORTANT).lines();
            due = Instant::now() + REFRESH;
        }
        let title = format!("bathy top   {}   sandboxes: {}", iso(unix_ns()), lines.len().saturating_sub(1));
        let frame = screen::draw(&title, &lines, "q quits", terminal::size());
        terminal::write_all(io::stdout().as_fd(), frame.as_bytes())?;
        match wait(due, stop, resize)? {
            Event::Time => {}
            Event::Stop => return Ok(End::Signal),
            Event::Quit => return Ok(End::Key),
        }
    }
}

enum Event {
    Time,
    Stop,
    Quit,
}

fn wait(due: Instant, stop: BorrowedFd<'_>, resize: BorrowedFd<'_>) -> io::Result<Event> {
    let stdin = io::stdin();
    let mut fds = [
        PollFd::from_borrowed_fd(stop, PollFlags::IN),
        PollFd::from_borrowed_fd(resize, PollFlags::IN),
        PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN),
    ];
    poll_until(&mut fds, Some(due))?;
    let [stopped, resized, key] = fds.each_ref().map(|fd| !fd.revents().is_empty());
    if stopped {
        return Ok(Event::Stop);
    }
    if resized {
        // The content does not matter: the size is queried for every frame.
        let mut record = [0u8; 1024];
        let _ = rustix::io::read(resize, &mut record);
    }
    if key {
        let mut keys = [0u8; 64];
        return match rustix::io::read(&stdin, &mut keys) {
            // The terminal was closed.
            Ok(0) => Ok(Event::Quit),
            Ok(count) => {
                let quit = keys.iter().take(count).any(|key| QUIT.contains(key));
                Ok(if quit { Event::Quit } else { Event::Time })
            }
            Err(Errno::INTR | Errno::AGAIN) => Ok(Event::Time),
            Err(error) => Err(error.into()),
        };
    }
    Ok(Event::Time)
}
