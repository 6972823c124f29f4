//! Which engine runs a sandbox, and why.

use serde::Serialize;
use thiserror::Error;

use crate::spec::Engine;

/// The engine that was asked for cannot be used.
#[derive(Debug, Error)]
pub enum EngineError {
    /// kvm.
    #[error("The kvm engine is not part of this version. Leave --engine out, or use --engine uml")]
    NoKvm,
}

/// An engine and the reason for it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Choice {
    /// The engine.
    pub engine: Engine,
    /// Why.
    pub reason: &'static str,
}

/// Decides.
pub fn choose(wanted: Engine) -> Result<Choice, EngineError> {
    match wanted {
        Engine::Auto => Ok(Choice {
            engine: Engine::Uml,
            reason: "the only engine of this version; it needs no hardware virtualization",
        }),
        Engine::Uml => Ok(Choice { engine: Engine::Uml, reason: "asked for" }),
        Engine::Kvm => Err(EngineError::NoKvm),
    }
}
