//! Copies files into and out of a running sandbox and records each copy.

use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use bathy_audit::What;
use bathy_client::command;
use bathy_client::transfer::{
    self, Packer, Summary, TransferOptions, TransferSession, UnpackLimits, Unpacker,
};
use bathy_protocol::{CopyDirection, Transfer};

use super::{Manager, ManagerError, Sandboxed};

/// How long a copy may make no progress. A guest may have to flush gigabytes before it confirms them.
const STALL: Duration = Duration::from_secs(120);
/// The most characters of an error in the audit log.
const MAX_ERROR: usize = 1000;
/// The stream of the copy.
const STREAM: u32 = 1;

/// The host's side of a copy.
pub struct CopyOptions<'a> {
    /// The guest user that reads or writes; by default the sandbox's user.
    pub user: Option<String>,
    /// Whether a link of the host that is itself the source is followed. Otherwise it is copied as a link.
    pub follow_link: bool,
    /// Limits on what the guest may send.
    pub limits: UnpackLimits,
    /// Called with the bytes copied and, if known, the total.
    pub progress: &'a mut dyn FnMut(u64, Option<u64>),
    /// Becomes readable when the copy should stop.
    pub interrupt: Option<BorrowedFd<'a>>,
}

impl Manager {
    /// Copies a file or folder of the host into a sandbox.
    pub fn copy_in(
        &mut self,
        sandbox: &Sandboxed,
        host: &Path,
        guest: &[u8],
        options: CopyOptions<'_>,
    ) -> Result<Summary, ManagerError> {
        let packer = if options.follow_link { Packer::open_followed(host)? } else { Packer::open(host)? };
        let name = packer.name().unwrap_or_else(|| OsStr::new("copy")).as_bytes().to_vec();
        let (host_path, guest_path) = (host.to_string_lossy().into_owned(), text(guest));
        let request = CopyRequest { direction: CopyDirection::IntoGuest, path: guest, name };
        let done = self.copy(sandbox, request, options, |session| Ok(transfer::into_guest(session, packer)?));
        let what = |summary: &Summary| What::FileIn {
            host_path: host_path.clone(),
            guest_path: guest_path.clone(),
            files: summary.files,
            bytes: summary.bytes,
            digest: summary.digest.clone(),
        };
        self.record_access(
            sandbox,
            &Access { direction: "in", path: &guest_path, max_error: MAX_ERROR },
            done,
            what,
        )
    }

    /// Copies a file or folder of a sandbox to the host.
    pub fn copy_out(
        &mut self,
        sandbox: &Sandboxed,
        guest: &[u8],
        host: &Path,
        options: CopyOptions<'_>,
    ) -> Result<Summary, ManagerError> {
        // The name comes from the request, not from the guest.
        let trimmed = guest.strip_suffix(b"/").unwrap_or(guest);
        let name = trimmed.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let name = if matches!(name, b"" | b"." | b"..") { b"copy" } else { name };
        let unpacker = Unpacker::new(host, OsStr::from_bytes(name), options.limits)?;
        let (host_path, guest_path) = (host.to_string_lossy().into_owned(), text(guest));
        let request = CopyRequest { direction: CopyDirection::OutOfGuest, path: guest, name: Vec::new() };
        let done =
            self.copy(sandbox, request, options, |session| Ok(transfer::out_of_guest(session, unpacker)?));
        let what = |summary: &Summary| What::FileOut {
            host_path: host_path.clone(),
            guest_path: guest_path.clone(),
            files: summary.files,
            bytes: summary.bytes,
            digest: summary.digest.clone(),
        };
        self.record_access(
            sandbox,
            &Access { direction: "out", path: &guest_path, max_error: MAX_ERROR },
            done,
            what,
        )
    }

    fn copy(
        &mut self,
        sandbox: &Sandboxed,
        request: CopyRequest<'_>,
        options: CopyOptions<'_>,
        work: impl FnOnce(TransferSession<'_, '_>) -> Result<Summary, ManagerError>,
    ) -> Result<Summary, ManagerError> {
        let mut connection = self.connect(sandbox)?;
        let spec_user = || sandbox.record.spec.user.clone();
        let user = match options.user.or_else(spec_user) {
            Some(user) => user,
            None => self.image_config(sandbox)?.user,
        };
        let tag = command::new_tag().map_err(|error| ManagerError::File("/dev/urandom".into(), error))?;
        let CopyRequest { direction, path, name } = request;
        let transfer = Transfer { direction, path: path.to_vec(), name, user };
        let options =
            TransferOptions { progress: options.progress, interrupt: options.interrupt, stall: STALL };
        work(TransferSession::start(&mut connection, STREAM, transfer, tag, options)?)
    }

    /// Records a copy or file access. It was already done or tried, so failing to record it is only a warning.
    pub(super) fn record_access<T>(
        &mut self,
        sandbox: &Sandboxed,
        access: &Access<'_>,
        done: Result<T, ManagerError>,
        what: impl FnOnce(&T) -> What,
    ) -> Result<T, ManagerError> {
        let event = match &done {
            Ok(done) => what(done),
            Err(error) => access.failed(error),
        };
        self.note_last(&sandbox.record, event);
        done
    }
}

/// What to copy, in the terms of the protocol.
struct CopyRequest<'a> {
    direction: CopyDirection,
    path: &'a [u8],
    name: Vec<u8>,
}

/// An access to the guest's files, as the audit log describes a failed one.
pub(super) struct Access<'a> {
    pub direction: &'static str,
    pub path: &'a str,
    /// The most characters of the error.
    pub max_error: usize,
}

impl Access<'_> {
    fn failed(&self, error: &ManagerError) -> What {
        What::FileFailed {
            direction: self.direction.to_owned(),
            path: self.path.to_owned(),
            error: bathy_protocol::chain(error).chars().take(self.max_error).collect(),
        }
    }
}

fn text(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}
