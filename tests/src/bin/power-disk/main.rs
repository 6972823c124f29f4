//! A machine that loses power, as far as its disk and its processes go.
//!
//! `power-disk serve` serves a disk image by FUSE, and starts the first process of a pid namespace, which mounts the
//! image through a loop device (`power-disk init`). Lines on standard input are cuts: `SEED FILE`. Each leaves the
//! image of a power cut in FILE and is answered by one line. At the end of standard input the namespace is killed, and
//! when that has released mounts and loop device, the server ends too. So nothing is left, whatever ends first.
//!
//! `power-disk writeback` begins to write back files of the state folder, as the kernel does when it likes.

mod disk;
mod fuse;
mod init;
mod writeback;

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
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
    let served = serve_until_unmounted(&device, &mut disk, &mut init);
    // A server that fails takes the machine along: nothing may wait for its answers.
    let _ = init.kill();
    init.wait()?;
    served
}

fn serve_until_unmounted(device: &File, disk: &mut Disk, init: &mut Child) -> io::Result<()> {
    let input = io::stdin();
    let mut lines = Vec::new();
    let mut is_on = true;
    let mut buffer = vec![0; fuse::BUFFER];
    loop {
        let mut waiting = vec![PollFd::new(device, PollFlags::IN)];
        if is_on {
            waiting.push(PollFd::new(&input, PollFlags::IN));
        }
        match poll(&mut waiting, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_asked = waiting.get(1).is_some_and(|input| !input.revents().is_empty());
        match fuse::serve(device, disk, &mut buffer)? {
            fuse::State::Unmounted => return Ok(()),
            fuse::State::Mounted => {}
            fuse::State::New if init.try_wait()?.is_some() => {
                return Err(io::Error::other("the machine's first process ended before it had a disk"));
            }
            // The device cannot be waited for before it is mounted.
            fuse::State::New => sleep(Duration::from_millis(1)),
        }
        if !is_asked {
            continue;
        }
        let mut part = [0; 4096];
        match rustix::io::read(&input, &mut part)? {
            0 => {
                is_on = false;
                init.kill()?;
            }
            length => lines.extend_from_slice(part.get(..length).unwrap_or_default()),
        }
        while let Some(end) = lines.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = lines.drain(..=end).collect();
            cut(disk, &String::from_utf8_lossy(&line))?;
        }
    }
}

fn cut(disk: &mut Disk, line: &str) -> io::Result<()> {
    let wrong = || io::Error::other(format!("not a cut: {line}"));
    let (seed, image) = line.trim_end().split_once(' ').ok_or_else(wrong)?;
    let loss = disk.cut(seed.parse().map_err(|_| wrong())?, Path::new(image))?;
    let mut output = io::stdout();
    writeln!(output, "{loss}")?;
    output.flush()
}
