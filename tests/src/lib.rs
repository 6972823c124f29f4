//! Shared by the end-to-end and attack tests: where the product is, and how to run it.

pub mod kept;
pub mod mcp;
pub mod power;
pub mod random;
pub mod world;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The engine that runs a sandbox's guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// A virtual machine, run by threads of the keeper.
    Kvm,
    /// User Mode Linux: the guest kernel and each of its processes are processes of the host.
    Uml,
}

impl Engine {
    /// Its name in the product.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Uml => "uml",
        }
    }
}

/// The engine that the product uses by default: `BATHY_ENGINE`, or what the machine supports.
pub fn engine() -> Engine {
    match std::env::var("BATHY_ENGINE").as_deref() {
        Ok("kvm") => Engine::Kvm,
        Ok("uml") => Engine::Uml,
        _ if has_hardware() => Engine::Kvm,
        _ => Engine::Uml,
    }
}

/// Whether the machine has hardware virtualization, determined independently of the product.
pub fn has_hardware() -> bool {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    Path::new("/dev/kvm").exists() && (named("vmx") || named("svm"))
}

/// The factor by which time limits grow on a busy machine.
const BUSY: u32 = 5;
/// The machine is busy if processes waited for a processor in more than this percentage of the last ten seconds.
const WAITING: f64 = 25.0;

/// How long a test waits for something that takes at most `time` on an ordinary machine. The machine may be busy: this limit
/// only detects what hangs.
pub fn patience(time: Duration) -> Duration {
    // An emulated machine is slower than its pace only by what its host does besides.
    pace(time) * if is_emulated() { 2 } else { BUSY }
}

/// How long something may take that is promised to take at most `time`. The promise holds while other programs do not use the
/// processors, so call this after measuring, or before an attack that uses them itself.
pub fn promptly(time: Duration) -> Duration {
    if is_busy() { patience(time) } else { pace(time) }
}

/// A delay of a test, scaled to the speed of this machine. `BATHY_TEST_PATIENCE` is how many times slower than an ordinary one it
/// is: the nested test bed sets it, because it emulates every instruction.
pub fn pace(time: Duration) -> Duration {
    time * slowness()
}

/// Whether processes had to wait for a processor in the last seconds. Not every kernel reports that.
fn is_busy() -> bool {
    let pressure = std::fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let share = pressure.split_whitespace().find_map(|word| word.strip_prefix("avg10=")?.parse::<f64>().ok());
    share.is_some_and(|share| share > WAITING)
}

/// A limit that a test sets and waits for. It is scaled less than what a test tolerates.
pub fn limit(time: Duration) -> Duration {
    time * slowness().div_ceil(4)
}

/// As [`limit`], for an option of the product.
pub fn patient_seconds(seconds: u64) -> String {
    limit(Duration::from_secs(seconds)).as_secs().to_string()
}

/// How many sandboxes a test starts at once, if it starts `wanted` on an ordinary machine.
pub fn at_once(wanted: usize) -> usize {
    if is_emulated() { wanted.min(4) } else { wanted }
}

/// How many of something a test does or expects, if it is `count` on an ordinary machine.
pub fn fewer(count: u64) -> u64 {
    (count / u64::from(slowness())).max(1)
}

/// Whether this is the nested test bed, or another machine that is many times slower than an ordinary one.
pub fn is_emulated() -> bool {
    slowness() > 1
}

/// How many times slower than an ordinary machine this one is.
pub fn slowness() -> u32 {
    std::env::var("BATHY_TEST_PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

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

/// The repository's folder, determined at run time: checkouts that share a target folder also share compiled tests.
pub fn repository() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("what runs the tests names their folder");
    Path::new(&package).parent().map(Path::to_owned).unwrap_or_default()
}

/// The result of a finished program.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
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

/// Calls a function when it is dropped, also if a test fails: a scope waits for its threads, which have to be stopped.
pub struct OnDrop<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
