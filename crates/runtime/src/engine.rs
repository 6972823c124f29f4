//! Chooses the engine of a sandbox.
//!
//! A hardware virtual machine is the stronger boundary, so it is preferred. Only running a guest shows
//! whether one works, so the result is cached until the machine reboots.

mod probe_cache;
#[cfg(test)]
mod tests;

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use bathy_spec::{Choice, Chosen, Engine};
use thiserror::Error;

use crate::kvm_probe::{self, KvmSupport};
use crate::{assets, sys};
use probe_cache::{Device, ProbeCache};

/// The environment variable that replaces `--engine` where that is not given.
pub const VARIABLE: &str = "BATHY_ENGINE";

/// The required engine cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum EngineError {
    /// Hardware virtualization is not available to us.
    #[error("The kvm engine cannot be used: {found}. {hint}")]
    NoKvm {
        /// The result of the probe.
        found: KvmSupport,
        hint: String,
    },
    /// The environment variable has an invalid value.
    #[error("{VARIABLE} is {0:?}, which is not an engine. Set it to kvm, uml or auto, or unset it")]
    Variable(OsString),
}

/// Chooses the engine. Without a requirement this takes microseconds, except for the first time after a
/// reboot.
pub fn choose(wanted: Engine, operator: &Operator, paths: &Paths) -> Result<Choice, EngineError> {
    let asked = match operator.engine_floor() {
        Some(engine) => Asked { engine, by: By::Operator },
        None => Asked::of(wanted, env::var_os(VARIABLE))?,
    };
    decide(&asked, || match asked.engine {
        // A refusal has to be right, so it is based on a new probe.
        Engine::Kvm => probe_unless(paths, |known, _| known.is_some_and(|support| support.is_hardware())),
        _ => probe_unless(paths, |known, processor| known.is_some() || !processor),
    })
}

/// Like [`choose`] without a requirement, with a new probe, whose result is returned as well.
pub fn examine(paths: &Paths) -> (Result<Choice, EngineError>, KvmSupport) {
    let support = probe_unless(paths, |_, _| false);
    let asked = Asked::of(Engine::Auto, env::var_os(VARIABLE));
    (asked.and_then(|asked| decide(&asked, || support.clone())), support)
}

/// The requested engine, and where the request came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    engine: Engine,
    by: By,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Caller,
    Variable,
    Operator,
}

impl Asked {
    fn of(wanted: Engine, variable: Option<OsString>) -> Result<Self, EngineError> {
        let plain = Self { engine: wanted, by: By::Caller };
        let Some(variable) = variable.filter(|value| wanted == Engine::Auto && !value.is_empty()) else {
            return Ok(plain);
        };
        let named = [Engine::Auto, Engine::Kvm, Engine::Uml]
            .into_iter()
            .find(|engine| variable.to_str() == Some(engine.as_str()));
        match named {
            Some(Engine::Auto) => Ok(plain),
            Some(engine) => Ok(Self { engine, by: By::Variable }),
            None => Err(EngineError::Variable(variable)),
        }
    }

    fn describe(self) -> String {
        match self.by {
            By::Caller => "asked for".to_owned(),
            By::Variable => format!("asked for by {VARIABLE}"),
            By::Operator => "required by the operator".to_owned(),
        }
    }

    fn hint(self, found: &KvmSupport) -> String {
        let other = match self.by {
            By::Caller => "Without it: use --engine uml, or leave --engine out".to_owned(),
            By::Variable => format!("Without it: set {VARIABLE} to uml, or unset it"),
            By::Operator => "The operator's settings allow no other engine: ask your operator".to_owned(),
        };
        found.hint().map_or_else(|| other.clone(), |hint| format!("{hint}. {other}"))
    }
}

fn decide(asked: &Asked, support: impl FnOnce() -> KvmSupport) -> Result<Choice, EngineError> {
    if asked.engine == Engine::Uml {
        return Ok(Choice { engine: Chosen::Uml, reason: asked.describe() });
    }
    let support = support();
    match (asked.engine, support.is_hardware()) {
        (Engine::Kvm, true) => Ok(Choice { engine: Chosen::Kvm, reason: asked.describe() }),
        (Engine::Kvm, false) => Err(EngineError::NoKvm { hint: asked.hint(&support), found: support }),
        (_, true) => Ok(Choice { engine: Chosen::Kvm, reason: support.to_string() }),
        (_, false) => Ok(Choice { engine: Chosen::Uml, reason: support.to_string() }),
    }
}

/// Returns what the device supports. A new probe guest runs unless `enough` accepts the cached result, given
/// whether the processor supports virtualization.
fn probe_unless(paths: &Paths, enough: impl FnOnce(Option<&KvmSupport>, bool) -> bool) -> KvmSupport {
    let opened = match kvm_probe::open() {
        Ok(opened) => opened,
        Err(support) => return support,
    };
    let cache = ProbeCache::of(&paths.state);
    let device = Device::of(&opened);
    let known = device.as_ref().and_then(|device| cache.get(device));
    if enough(known.as_ref(), sys::processor_offers_virtualization()) {
        let last = || device.as_ref().and_then(|device| cache.get_of_any_age(device));
        return known.or_else(last).unwrap_or(KvmSupport::NoProcessor);
    }
    let support = match assets::program("bathy") {
        Ok(program) => measure(&program),
        Err(error) => return KvmSupport::Broken { reason: bathy_protocol::chain(&error) },
    };
    if let Some(device) = device {
        cache.put(device, support.clone());
    }
    support
}

fn measure(program: &Path) -> KvmSupport {
    kvm_probe::measure(Command::new(program).arg(kvm_probe::VERB))
}
