//! The location of the audit log, opening it, and the event of a new sandbox.

use std::path::PathBuf;

use bathy_audit::{Log, LogError, What};
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use bathy_spec::{Chosen, SandboxSpec, Seconds};

pub fn audit_folder(paths: &Paths) -> PathBuf {
    paths.state.join("audit")
}

/// Opens the user's audit log, with the operator's rotation settings.
pub fn audit_log(paths: &Paths, operator: &Operator) -> Result<Log, LogError> {
    let log = Log::open(&audit_folder(paths))?.keep(operator.audit.keep.map(|files| files as usize));
    Ok(match operator.audit.rotate_size {
        Some(size) => log.rotate_at(size.0),
        None => log,
    })
}

/// The event of a new sandbox.
pub fn sandbox_created(spec: &SandboxSpec, engine: Chosen, idle_timeout: Option<Seconds>) -> What {
    What::SandboxCreated {
        image: spec.image_text(),
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
