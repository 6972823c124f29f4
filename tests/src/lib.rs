//! What the end-to-end and attack tests share: where the product is, and how it is run.

pub mod kept;
pub mod mcp;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The program under test: the release binary, or what `BATHY_BIN` names.
pub fn bathy() -> PathBuf {
    std::env::var_os("BATHY_BIN").map_or_else(|| release_folder().join("bathy"), PathBuf::from)
}

/// Where release binaries are built.
pub fn release_folder() -> PathBuf {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
    target.join("x86_64-unknown-linux-gnu/release")
}

/// The repository's folder.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned).unwrap_or_default()
}

/// A finished run.
#[derive(Debug)]
pub struct Ran {
    /// Exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// How long it took.
    pub took: Duration,
}

/// Runs a prepared command to its end, with this standard input.
pub fn finish(command: &mut Command, input: &[u8]) -> Ran {
    use std::io::Write;
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program under test can be started; ./test builds it");
    let mut stdin = child.stdin.take().expect("its input is a pipe");
    let input = input.to_vec();
    // In a thread of its own: the program may write before it has read everything.
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let Output { status, stdout, stderr } = child.wait_with_output().expect("it can be waited for");
    // A program that does not read its input breaks the pipe, which is its right.
    let _ = writer.join();
    Ran {
        code: status.code(),
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
        took: started.elapsed(),
    }
}

/// `bathy` with these arguments.
pub fn run(arguments: &[&str]) -> Ran {
    finish(Command::new(bathy()).args(arguments), b"")
}
