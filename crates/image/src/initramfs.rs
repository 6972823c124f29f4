//! The initramfs: a `newc` cpio archive that contains only the agent as `/init`.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use thiserror::Error;

/// The agent cannot be packed.
#[derive(Debug, Error)]
pub enum InitramfsError {
    /// The agent's file cannot be read.
    #[error(
        "Cannot read the guest agent {0}. It belongs beside the bathy program; build it with `cargo build --release`"
    )]
    Agent(PathBuf, #[source] io::Error),
    /// The archive cannot be stored.
    #[error("Cannot make the initramfs")]
    Store(#[source] io::Error),
}

/// Packs `agent` into an archive in memory, sealed against modification.
pub fn pack(agent: &Path) -> Result<File, InitramfsError> {
    let unreadable = |error| InitramfsError::Agent(agent.to_owned(), error);
    let program = File::open(agent).map_err(unreadable)?;
    let size = program.metadata().map_err(unreadable)?.len();
    let store = || -> io::Result<File> {
        let fd = memfd_create("initramfs", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let mut file = File::from(fd);
        archive(&program, size, &mut file)?;
        fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    };
    store().map_err(InitramfsError::Store)
}

/// Writes the archive. The kernel copies the program from file to file.
fn archive(program: &File, size: u64, out: &mut File) -> io::Result<()> {
    let length = usize::try_from(size).map_err(io::Error::other)?;
    let mut text = Vec::with_capacity(1024);
    // The kernel opens /dev/console for PID 1 before PID 1 can mount anything.
    entry(&mut text, "dev", 0o040_755, (0, 0), 0);
    entry(&mut text, "dev/console", 0o020_600, (5, 1), 0);
    entry(&mut text, "init", 0o100_755, (0, 0), length);
    out.write_all(&text)?;
    if io::copy(&mut program.take(size), out)? != size {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    out.write_all(&vec![0; length.next_multiple_of(4) - length])?;
    text.clear();
    entry(&mut text, "TRAILER!!!", 0, (0, 0), 0);
    out.write_all(&text)
}

/// Begins an entry; its content follows.
fn entry(out: &mut Vec<u8>, name: &str, mode: u32, (major, minor): (u32, u32), length: usize) {
    let inode = out.len();
    let mut header = String::from("070701");
    let fields =
        [inode, mode as usize, 0, 0, 1, 0, length, 0, 0, major as usize, minor as usize, name.len() + 1, 0];
    for field in fields {
        // Writing to a string cannot fail.
        let _ = write!(header, "{field:08x}");
    }
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_is_what_cpio_expects() {
        let folder = tempfile::tempdir().unwrap();
        let agent = folder.path().join("agent");
        std::fs::write(&agent, b"abc").unwrap();
        let mut archive = Vec::new();
        let file = pack(&agent).unwrap();
        rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0)).unwrap();
        (&file).read_to_end(&mut archive).unwrap();
        assert!(archive.starts_with(b"070701"));
        assert_eq!(archive.len() % 4, 0);
        let headers = archive.chunks(4).filter(|word| *word == b"0707").count();
        assert_eq!(headers, 4, "each at a multiple of four");
        let text = String::from_utf8_lossy(&archive);
        assert!(text.contains("init\0") && text.contains("abc") && text.contains("TRAILER!!!"));
    }

    #[test]
    fn a_missing_agent_is_named() {
        let error = pack(Path::new("/nowhere/bathy-agent")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/bathy-agent"), "{error}");
    }

    #[test]
    fn the_archive_cannot_be_changed_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let agent = folder.path().join("agent");
        std::fs::write(&agent, b"program").unwrap();
        let mut file = pack(&agent).unwrap();
        assert!(file.write_all(b"x").is_err());
        assert!(file.set_len(0).is_err());
    }
}
