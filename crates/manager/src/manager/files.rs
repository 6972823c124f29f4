//! Reads and writes single files and folders of a running sandbox, in memory, and records each access.

use bathy_audit::What;
use bathy_audit::event::digest;
use bathy_client::command::{self, ExecOptions};
use bathy_client::connection::Connection;
use bathy_client::transfer::direct::{self, FileTarget};
use bathy_client::transfer::{FileContent, Listing, Summary, TransferError};
use bathy_spec::CommandSpec;

use super::copy::Access;
use super::{Manager, ManagerError, Sandboxed};

/// The only stream of a connection that is opened for one file.
const STREAM: u32 = 1;
/// The host path in the audit log for content that is not a file on the host.
const MEMORY: &str = "-";
/// The most characters of a path or error in the audit log.
const MAX_TEXT: usize = 4096;

impl Manager {
    /// Reads at most `limit` bytes (and at most 64 MiB) of a file from `offset` on. A relative path starts in
    /// the sandbox's working directory; nothing in it is expanded.
    pub fn read_file(
        &mut self,
        sandbox: &Sandboxed,
        path: &str,
        offset: u64,
        limit: u64,
    ) -> Result<FileContent, ManagerError> {
        let read =
            |connection: &mut Connection, target| direct::read(connection, STREAM, target, offset, limit);
        self.access(
            sandbox,
            Access { direction: "out", path, max_error: MAX_TEXT },
            read,
            |guest_path, content: &FileContent| What::FileOut {
                host_path: MEMORY.to_owned(),
                guest_path,
                files: 1,
                bytes: count(content.bytes.len()),
                digest: digest(&content.bytes),
            },
        )
    }

    /// Replaces a file's content, at most 64 MiB, atomically. An existing file keeps its permissions; missing
    /// folders are created. The path is as in [`Manager::read_file`].
    pub fn write_file(
        &mut self,
        sandbox: &Sandboxed,
        path: &str,
        content: &[u8],
    ) -> Result<(), ManagerError> {
        let write = |connection: &mut Connection, target| direct::write(connection, STREAM, target, content);
        let done = self.access(
            sandbox,
            Access { direction: "in", path, max_error: MAX_TEXT },
            write,
            |guest_path, summary: &Summary| What::FileIn {
                host_path: MEMORY.to_owned(),
                guest_path,
                files: summary.files,
                bytes: summary.bytes,
                digest: summary.digest.clone(),
            },
        );
        done.map(drop)
    }

    /// Lists the first `limit` entries of a folder by name, at most 65,536. The path is as in
    /// [`Manager::read_file`].
    pub fn list_directory(
        &mut self,
        sandbox: &Sandboxed,
        path: &str,
        limit: usize,
    ) -> Result<Listing, ManagerError> {
        let list = |connection: &mut Connection, target| direct::list(connection, STREAM, target, limit);
        self.access(
            sandbox,
            Access { direction: "list", path, max_error: MAX_TEXT },
            list,
            |guest_path, listing: &Listing| What::FolderListed {
                guest_path,
                entries: count(listing.entries.len()),
                total: listing.total,
            },
        )
    }

    fn access<T>(
        &mut self,
        sandbox: &Sandboxed,
        access: Access<'_>,
        work: impl FnOnce(&mut Connection, FileTarget) -> Result<T, TransferError>,
        what: impl FnOnce(String, &T) -> What,
    ) -> Result<T, ManagerError> {
        let mut path: String = access.path.chars().take(MAX_TEXT).collect();
        let done = self.target(sandbox, access.path).and_then(|target| {
            path = String::from_utf8_lossy(&target.path).into_owned();
            let mut connection = self.connect(sandbox)?;
            Ok(work(&mut connection, target)?)
        });
        self.record_access(sandbox, &Access { path: &path, ..access }, done, |done| what(path.clone(), done))
    }

    /// The user and directory that a command of the sandbox would have.
    fn target(&mut self, sandbox: &Sandboxed, path: &str) -> Result<FileTarget, ManagerError> {
        direct::check_path(path).map_err(TransferError::from)?;
        let image = self.image_config(sandbox)?;
        let exec =
            command::request(&CommandSpec::default(), &sandbox.record.spec, &image, ExecOptions::default());
        let tag = command::new_tag().map_err(|error| ManagerError::File("/dev/urandom".into(), error))?;
        Ok(FileTarget { path: from_folder(exec.cwd.as_deref(), path), user: exec.user, tag })
    }
}

/// Resolves a relative path against the working directory. If that is the user's home, only the guest knows
/// it.
fn from_folder(folder: Option<&[u8]>, path: &str) -> Vec<u8> {
    match folder {
        Some(folder) if !path.starts_with('/') => {
            [folder.strip_suffix(b"/").unwrap_or(folder), b"/", path.as_bytes()].concat()
        }
        _ => path.as_bytes().to_vec(),
    }
}

fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_path_begins_in_the_working_directory_and_is_not_expanded() {
        assert_eq!(from_folder(Some(b"/srv"), "a/../b"), b"/srv/a/../b");
        assert_eq!(from_folder(Some(b"/"), "~/x"), b"/~/x");
        assert_eq!(from_folder(Some(b"/srv/"), "."), b"/srv/.");
        assert_eq!(from_folder(Some(b"/work"), "/etc/x"), b"/etc/x");
        assert_eq!(from_folder(None, "x"), b"x");
    }
}
