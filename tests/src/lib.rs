//! What the end-to-end and attack tests share: where the product is, and how it is run.

pub mod kept;
pub mod mcp;
pub mod power;
pub mod random;
pub mod world;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// What runs a sandbox's guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// A virtual machine, run by threads of the keeper.
    Kvm,
    /// User Mode Linux: the guest kernel and each of its processes are processes of the host.
    Uml,
}

impl Engine {
    /// As the product writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Uml => "uml",
        }
    }
}

/// The engine that the product takes where a test names none: `BATHY_ENGINE`, or what the machine can do.
pub fn engine() -> Engine {
    match std::env::var("BATHY_ENGINE").as_deref() {
        Ok("kvm") => Engine::Kvm,
        Ok("uml") => Engine::Uml,
        _ if has_hardware() => Engine::Kvm,
        _ => Engine::Uml,
    }
}

/// Whether the machine has hardware virtualization, by other means than those of the product.
pub fn has_hardware() -> bool {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    Path::new("/dev/kvm").exists() && (named("vmx") || named("svm"))
}

/// How many times longer things may take while other programs use the processors.
const BUSY: u32 = 5;
/// From which share of the last ten seconds on, in percent, in which a process waited for a processor, the machine is busy.
const WAITING: f64 = 25.0;

/// How long a test waits for something that takes at most `time` on an ordinary machine. It only tells what hangs from
/// what is slow: the machine may be busy.
pub fn patience(time: Duration) -> Duration {
    // An emulated machine is slower than its pace only by what its host does besides.
    pace(time) * if is_emulated() { 2 } else { BUSY }
}

/// How long something may take that is promised to take at most `time`: the promise holds where the processors are not busy with
/// something else. To be asked after it was done, unless it is done beside an attack that takes the processors: then before that.
pub fn promptly(time: Duration) -> Duration {
    if is_busy() { patience(time) } else { pace(time) }
}

/// A moment that a test lets pass, long enough for what takes that long on an ordinary machine. `BATHY_TEST_PATIENCE` is how
/// many times slower this one is: the nested test bed sets it, because it emulates every instruction.
pub fn pace(time: Duration) -> Duration {
    time * slowness()
}

/// Whether processes had to wait for a processor in the last seconds. A kernel that does not tell was not asked to.
fn is_busy() -> bool {
    let pressure = std::fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let share = pressure.split_whitespace().find_map(|word| word.strip_prefix("avg10=")?.parse::<f64>().ok());
    share.is_some_and(|share| share > WAITING)
}

/// A limit that a test sets and waits for. It need not grow as much as what a test tolerates.
pub fn limit(time: Duration) -> Duration {
    time * slowness().div_ceil(4)
}

/// As [`limit`], for an option of the product.
pub fn patient_seconds(seconds: u64) -> String {
    limit(Duration::from_secs(seconds)).as_secs().to_string()
}

/// How many sandboxes a test may start at once, that starts `wanted` of them on an ordinary machine.
pub fn at_once(wanted: usize) -> usize {
    if is_emulated() { wanted.min(4) } else { wanted }
}

/// How many of something a test does or expects, that does or expects `count` of them on an ordinary machine.
pub fn fewer(count: u64) -> u64 {
    (count / u64::from(slowness())).max(1)
}

/// Whether this is the nested test bed, or another machine that is many times slower than usual.
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

/// The repository's folder. Asked when the test runs: cargo takes programs of another checkout that shares its target
/// folder for its own.
pub fn repository() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("what runs the tests names their folder");
    Path::new(&package).parent().map(Path::to_owned).unwrap_or_default()
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

/// Does something when it goes, also when a test fails: threads of a scope that go on would be waited for.
pub struct OnDrop<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
