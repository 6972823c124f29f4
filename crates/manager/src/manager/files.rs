//! Single files and folders of a running sandbox, to and from the caller's memory, each time recorded.

use bathy_audit::What;
use bathy_audit::event::digest;
use bathy_client::command::{self, ExecOptions};
use bathy_client::connection::Connection;
use bathy_client::transfer::direct::{self, Target};
use bathy_client::transfer::{FileContent, Listing, Summary, TransferError};
use bathy_spec::CommandSpec;

use super::{Manager, ManagerError, Sandboxed};

/// The only stream of a connection that is made for one file.
const STREAM: u32 = 1;
/// In the audit log, for the host's side of a file that is no file there.
const MEMORY: &str = "-";
/// The most of a path or an error in the audit log.
const MAX_TEXT: usize = 4096;

impl Manager {
    /// Reads part of a file: at most `limit` bytes, and at most 64 MiB, from `offset` on. A relative path begins in the
    /// sandbox's working directory, and nothing in it is expanded.
    pub fn read_file(
        &mut self,
        sandbox: &Sandboxed,
        path: &str,
        offset: u64,
        limit: u64,
    ) -> Result<FileContent, ManagerError> {
        let read =
            |connection: &mut Connection, target| direct::read(connection, STREAM, target, offset, limit);
        self.directly(sandbox, path, "out", read, |guest_path, content: &FileContent| What::FileOut {
            host_path: MEMORY.to_owned(),
            guest_path,
            files: 1,
            bytes: count(content.bytes.len()),
            digest: digest(&content.bytes),
        })
    }

    /// Gives a file new content, at most 64 MiB, which a reader sees whole or not at all. A file that is there keeps its
    /// permissions; missing folders on the way are made. The path is as in [`Manager::read_file`].
    pub fn write_file(
        &mut self,
        sandbox: &Sandboxed,
        path: &str,
        content: &[u8],
    ) -> Result<(), ManagerError> {
        let write = |connection: &mut Connection, target| direct::write(connection, STREAM, target, content);
        let done = self.directly(sandbox, path, "in", write, |guest_path, summary: &Summary| What::FileIn {
            host_path: MEMORY.to_owned(),
            guest_path,
            files: summary.files,
            bytes: summary.bytes,
            digest: summary.digest.clone(),
        });
        done.map(drop)
    }

    /// Lists the first `limit` entries of a folder by name, and at most 65,536. The path is as in [`Manager::read_file`].
    pub fn list_directory(
        &mut self,
        sandbox: &Sandboxed,
        path: &str,
        limit: usize,
    ) -> Result<Listing, ManagerError> {
        let list = |connection: &mut Connection, target| direct::list(connection, STREAM, target, limit);
        self.directly(sandbox, path, "list", list, |guest_path, listing: &Listing| What::FolderListed {
            guest_path,
            entries: count(listing.entries.len()),
            total: listing.total,
        })
    }

    fn directly<T>(
        &mut self,
        sandbox: &Sandboxed,
        path: &str,
        direction: &str,
        work: impl FnOnce(&mut Connection, Target) -> Result<T, TransferError>,
        what: impl FnOnce(String, &T) -> What,
    ) -> Result<T, ManagerError> {
        let mut place: String = path.chars().take(MAX_TEXT).collect();
        let done = self.target(sandbox, path).and_then(|target| {
            place = String::from_utf8_lossy(&target.path).into_owned();
            let mut connection = self.connect(sandbox)?;
            Ok(work(&mut connection, target)?)
        });
        let event = match &done {
            Ok(done) => what(place, done),
            Err(error) => What::FileFailed {
                direction: direction.to_owned(),
                path: place,
                error: bathy_protocol::chain(error).chars().take(MAX_TEXT).collect(),
            },
        };
        // It has been done, or tried: a warning is all that is left to say.
        self.note_last(&sandbox.record, event);
        done
    }

    /// Who works where, as a command of the sandbox would.
    fn target(&mut self, sandbox: &Sandboxed, path: &str) -> Result<Target, ManagerError> {
        direct::check_path(path).map_err(TransferError::from)?;
        let image = self.image_config(sandbox)?;
        let exec =
            command::request(&CommandSpec::default(), &sandbox.record.spec, &image, ExecOptions::default());
        let tag = command::new_tag().map_err(|error| ManagerError::File("/dev/urandom".into(), error))?;
        Ok(Target { path: from_folder(exec.cwd.as_deref(), path), user: exec.user, tag })
    }
}

/// A relative path begins in the working directory; where that is the user's home, only the guest knows it.
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
