//! Where the audit log is, and how it is opened.

use std::path::PathBuf;

use bathy_audit::{Log, LogError};
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;

/// The folder of the user's audit log.
pub fn audit_folder(paths: &Paths) -> PathBuf {
    paths.state.join("audit")
}

/// The user's audit log, rotated as the operator says.
pub fn audit_log(paths: &Paths, operator: &Operator) -> Result<Log, LogError> {
    let log = Log::open(&audit_folder(paths))?.keep(operator.audit.keep.map(|files| files as usize));
    Ok(match operator.audit.rotate_size {
        Some(size) => log.rotate_at(size.0),
        None => log,
    })
}
