//! A machine that loses power, as far as its disk and its processes go.
//!
//! `power-disk serve` serves a disk image by FUSE, and starts the first process of a pid namespace, which mounts the
//! image through a loop device (`power-disk init`). Lines on standard input are requests, each answered by one line:
//!
//! - `fail WRITES MILLISECONDS`: the power fails after that many more writes, or that much time, whichever is first
//! - `cut SEED FILE`: leaves in FILE the image of the power failure, which is now if it was not before
//!
//! At the end of standard input the namespace is killed, and
//! when that has released mounts and loop device, the server ends too. So nothing is left, whatever ends first.
//!
//! `power-disk writeback` begins to write back files of the state folder, as the kernel does when it likes.

mod disk;
mod fuse;
mod init;
mod writeback;

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::thread::{UnshareFlags, unshare_unsafe};

use disk::Disk;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        ["serve", image, rest @ ..] => serve(Path::new(image), rest),
        ["init", folder, kind, options, templates] => init::run(Path::new(folder), kind, options, templates),
        ["writeback", seed, folder] => writeback::run(seed, Path::new(folder)),
        _ => Err(io::Error::other("usage: power-disk serve IMAGE FOLDER FILESYSTEM OPTIONS TEMPLATES")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("power-disk: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(image: &Path, init_arguments: &[&str]) -> io::Result<()> {
    let mut disk = Disk::open(image)?;
    let device = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/fuse")?;
    // SAFETY: this concerns the processes that are started from now on, and no memory.
    unsafe { unshare_unsafe(UnshareFlags::NEWPID)? };
    let mut init = Command::new(std::env::current_exe()?)
        .arg("init")
        .args(init_arguments)
        .stdin(Stdio::from(device.try_clone()?))
        .spawn()?;
    let (is_on, input, fails_at) = (true, Vec::new(), None);
    let served = Server { device: &device, disk: &mut disk, init: &mut init, input, is_on, fails_at }
        .serve_until_unmounted();
    // If the server fails, the machine ends, too: nothing may wait for its answers.
    let _ = init.kill();
    init.wait()?;
    // A disk that is switched off in order writes its cache.
    served.and_then(|()| disk.flush())
}

/// What the server does at the same time.
struct Server<'machine> {
    device: &'machine File,
    disk: &'machine mut Disk,
    init: &'machine mut Child,
    /// Requests that were not read to their ends.
    input: Vec<u8>,
    /// False after the end of the input.
    is_on: bool,
    /// The deadline of a requested power failure, which is answered when it happens.
    fails_at: Option<Instant>,
}

impl Server<'_> {
    fn serve_until_unmounted(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; fuse::BUFFER];
        loop {
            let is_asked = self.wait()?;
            match fuse::serve(self.device, self.disk, &mut buffer)? {
                fuse::State::Unmounted => return Ok(()),
                fuse::State::Mounted => {}
                fuse::State::New if self.init.try_wait()?.is_some() => {
                    return Err(io::Error::other("the machine's first process ended before it had a disk"));
                }
                // The device cannot be waited for before it is mounted.
                fuse::State::New => sleep(Duration::from_millis(1)),
            }
            if is_asked {
                self.read_requests()?;
            }
            self.report_failure()?;
        }
    }

    /// Waits for the device or for a request. True if there is a request.
    fn wait(&self) -> io::Result<bool> {
        let input = io::stdin();
        let mut waiting = vec![PollFd::new(self.device, PollFlags::IN)];
        if self.is_on {
            waiting.push(PollFd::new(&input, PollFlags::IN));
        }
        // Soon enough for a power failure that has a deadline.
        let timeout = self.fails_at.map(|_| Timespec { tv_sec: 0, tv_nsec: 1_000_000 });
        match poll(&mut waiting, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(waiting.get(1).is_some_and(|input| !input.revents().is_empty()))
    }

    fn read_requests(&mut self) -> io::Result<()> {
        let mut part = [0; 4096];
        match rustix::io::read(io::stdin(), &mut part)? {
            0 => {
                self.is_on = false;
                self.init.kill()?;
            }
            length => self.input.extend_from_slice(part.get(..length).unwrap_or_default()),
        }
        while let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            self.request(String::from_utf8_lossy(&line).trim_end())?;
        }
        Ok(())
    }

    fn request(&mut self, line: &str) -> io::Result<()> {
        let wrong = || io::Error::other(format!("not a request: {line}"));
        let number = |text: &str| text.parse::<u64>().map_err(|_| wrong());
        match line.splitn(3, ' ').collect::<Vec<_>>().as_slice() {
            ["fail", writes, milliseconds] => {
                self.fails_at = Some(Instant::now() + Duration::from_millis(number(milliseconds)?));
                self.disk.fail_after(number(writes)?);
                Ok(())
            }
            ["cut", seed, image] => answer(self.disk.cut(number(seed)?, Path::new(image))?),
            _ => Err(wrong()),
        }
    }

    fn report_failure(&mut self) -> io::Result<()> {
        if self.fails_at.is_some_and(|deadline| Instant::now() >= deadline) {
            self.disk.fail();
        }
        if self.disk.has_failed() && self.fails_at.take().is_some() {
            answer("failed")?;
        }
        Ok(())
    }
}

fn answer(line: impl Display) -> io::Result<()> {
    let mut output = io::stdout();
    writeln!(output, "{line}")?;
    output.flush()
}
