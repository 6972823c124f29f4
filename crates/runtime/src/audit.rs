//! Where the audit log is, how it is opened, and what it says about a sandbox that is made.

use std::path::PathBuf;

use bathy_audit::{Log, LogError, What};
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use bathy_spec::{Chosen, SandboxSpec, Seconds};

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

/// What the audit log says about a sandbox that is made.
pub fn sandbox_created(spec: &SandboxSpec, engine: Chosen, idle_timeout: Option<Seconds>) -> What {
    What::SandboxCreated {
        image: spec.image.clone(),
        engine: engine.as_str().to_owned(),
        memory: spec.memory.0,
        disk: spec.disk.0,
        security: spec.security.as_str().to_owned(),
        processes: Some(spec.processes.into()),
        cpu: spec.cpu_quota.map(|quota| quota.to_string()),
        max_duration_ms: spec.max_duration.map(|limit| limit.as_millis()),
        idle_timeout_ms: idle_timeout.map(|limit| limit.as_millis()),
    }
}
