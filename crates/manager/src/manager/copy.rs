//! Files into and out of a running sandbox, each copy recorded.

use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use bathy_audit::What;
use bathy_client::command;
use bathy_client::transfer::{self, Limits, Options, Packer, Summary, Unpacker};
use bathy_protocol::{Direction, Transfer};

use super::{Manager, ManagerError, Sandboxed};

/// For so long a copy may stand still: a guest may have to write gigabytes to disk before it says that they are safe.
const STALL: Duration = Duration::from_secs(120);
/// The stream of the copy.
const STREAM: u32 = 1;

/// The caller's side of a copy.
pub struct CopyOptions<'a> {
    /// Who reads or writes in the guest; the sandbox's user if absent.
    pub user: Option<String>,
    /// The most that a guest may send.
    pub limits: Limits,
    /// Is told how many bytes are done, and how many there are if that is known.
    pub progress: &'a mut dyn FnMut(u64, Option<u64>),
    /// Becomes readable when the caller wants to stop.
    pub interrupt: Option<BorrowedFd<'a>>,
}

impl Manager {
    /// Copies a file or a folder of the host's into a sandbox.
    pub fn copy_in(
        &mut self,
        sandbox: &Sandboxed,
        host: &Path,
        guest: &[u8],
        options: CopyOptions<'_>,
    ) -> Result<Summary, ManagerError> {
        let packer = Packer::open(host)?;
        let name = packer.name().unwrap_or_else(|| OsStr::new("copy")).as_bytes().to_vec();
        let (host_path, guest_path) = (host.to_string_lossy().into_owned(), text(guest));
        let done = self.copy(sandbox, Direction::IntoGuest, guest, name, options, |connection, plan| {
            Ok(transfer::into_guest(connection, STREAM, packer, plan.transfer, plan.tag, plan.options)?)
        });
        let what = |summary: &Summary| What::FileIn {
            host_path: host_path.clone(),
            guest_path: guest_path.clone(),
            files: summary.files,
            bytes: summary.bytes,
            digest: summary.digest.clone(),
        };
        self.record_copy(sandbox, "in", &guest_path, done, what)
    }

    /// Copies a file or a folder of a sandbox to the host.
    pub fn copy_out(
        &mut self,
        sandbox: &Sandboxed,
        guest: &[u8],
        host: &Path,
        options: CopyOptions<'_>,
    ) -> Result<Summary, ManagerError> {
        // The name is the caller's word, not the guest's.
        let trimmed = guest.strip_suffix(b"/").unwrap_or(guest);
        let name = trimmed.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let name = if matches!(name, b"" | b"." | b"..") { b"copy" } else { name };
        let unpacker = Unpacker::new(host, OsStr::from_bytes(name), options.limits)?;
        let (host_path, guest_path) = (host.to_string_lossy().into_owned(), text(guest));
        let done =
            self.copy(sandbox, Direction::OutOfGuest, guest, Vec::new(), options, |connection, plan| {
                Ok(transfer::out_of_guest(
                    connection,
                    STREAM,
                    unpacker,
                    plan.transfer,
                    plan.tag,
                    plan.options,
                )?)
            });
        let what = |summary: &Summary| What::FileOut {
            host_path: host_path.clone(),
            guest_path: guest_path.clone(),
            files: summary.files,
            bytes: summary.bytes,
            digest: summary.digest.clone(),
        };
        self.record_copy(sandbox, "out", &guest_path, done, what)
    }

    fn copy(
        &mut self,
        sandbox: &Sandboxed,
        direction: Direction,
        path: &[u8],
        name: Vec<u8>,
        options: CopyOptions<'_>,
        work: impl FnOnce(&mut bathy_client::connection::Connection, Plan<'_>) -> Result<Summary, ManagerError>,
    ) -> Result<Summary, ManagerError> {
        let mut connection = self.connect(sandbox)?;
        let spec_user = || sandbox.record.spec.user.clone();
        let user = match options.user.or_else(spec_user) {
            Some(user) => user,
            None => self.image_config(sandbox)?.user,
        };
        let tag = command::new_tag().map_err(|error| ManagerError::File("/dev/urandom".into(), error))?;
        let plan = Plan {
            transfer: Transfer { direction, path: path.to_vec(), name, user },
            tag,
            options: Options { progress: options.progress, interrupt: options.interrupt, stall: STALL },
        };
        work(&mut connection, plan)
    }

    fn record_copy(
        &mut self,
        sandbox: &Sandboxed,
        direction: &str,
        guest_path: &str,
        done: Result<Summary, ManagerError>,
        what: impl FnOnce(&Summary) -> What,
    ) -> Result<Summary, ManagerError> {
        let event = match &done {
            Ok(summary) => what(summary),
            Err(error) => What::FileFailed {
                direction: direction.to_owned(),
                path: guest_path.to_owned(),
                error: bathy_protocol::chain(error).chars().take(1000).collect(),
            },
        };
        // It has been done, or tried: a warning is all that is left to say.
        self.note_last(&sandbox.record, event);
        done
    }
}

/// One copy, ready to go.
struct Plan<'a> {
    transfer: Transfer,
    tag: u64,
    options: Options<'a>,
}

fn text(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}
