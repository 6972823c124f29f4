//! Which engine runs a sandbox, and why.
//!
//! A hardware virtual machine is the stronger boundary, so it is taken wherever there is one. Whether there is one is
//! known only after a guest has been tried, so what was found is remembered until the machine is started again.

mod memory;
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

use crate::kvm_probe::{self, Verdict};
use crate::{assets, sys};
use memory::{Device, Memory};

/// The variable that stands for `--engine` where the caller leaves the choice open.
pub const VARIABLE: &str = "BATHY_ENGINE";

/// The engine that was asked for cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum EngineError {
    /// There are no hardware virtual machines for us.
    #[error("The kvm engine cannot be used: {found}. {cure}")]
    NoKvm {
        /// What is in the way.
        found: Verdict,
        cure: String,
    },
    /// The variable has a value that is no engine.
    #[error("{VARIABLE} is {0:?}, which is no engine. Set it to kvm, uml or auto, or unset it")]
    Variable(OsString),
}

/// Decides. Where the choice is open this takes microseconds, but for the first time since the machine was started.
pub fn choose(wanted: Engine, operator: &Operator, paths: &Paths) -> Result<Choice, EngineError> {
    let asked = match operator.engine_floor() {
        Some(engine) => Asked { engine, by: By::Operator },
        None => Asked::of(wanted, env::var_os(VARIABLE))?,
    };
    decide(&asked, || match asked.engine {
        // A refusal has to be right, so it is founded on a guest that has just been tried.
        Engine::Kvm => look(paths, |known, _| known.is_some_and(|verdict| verdict.is_hardware())),
        _ => look(paths, |known, processor| known.is_some() || !processor),
    })
}

/// As [`choose`] where the choice is open, by a guest that is tried now. The verdict comes with it.
pub fn examine(paths: &Paths) -> (Result<Choice, EngineError>, Verdict) {
    let verdict = look(paths, |_, _| false);
    let asked = Asked::of(Engine::Auto, env::var_os(VARIABLE));
    (asked.and_then(|asked| decide(&asked, || verdict.clone())), verdict)
}

/// What was asked for, and by what.
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

    fn in_words(self) -> String {
        match self.by {
            By::Caller => "asked for".to_owned(),
            By::Variable => format!("asked for by {VARIABLE}"),
            By::Operator => "required by the operator".to_owned(),
        }
    }

    fn cure(self, found: &Verdict) -> String {
        let other = match self.by {
            By::Caller => "Without it: use --engine uml, or leave --engine out".to_owned(),
            By::Variable => format!("Without it: set {VARIABLE} to uml, or unset it"),
            By::Operator => "The operator's settings allow no other engine: ask your operator".to_owned(),
        };
        found.cure().map_or_else(|| other.clone(), |cure| format!("{cure}. {other}"))
    }
}

fn decide(asked: &Asked, verdict: impl FnOnce() -> Verdict) -> Result<Choice, EngineError> {
    if asked.engine == Engine::Uml {
        return Ok(Choice { engine: Chosen::Uml, reason: asked.in_words() });
    }
    let verdict = verdict();
    match (asked.engine, verdict.is_hardware()) {
        (Engine::Kvm, true) => Ok(Choice { engine: Chosen::Kvm, reason: asked.in_words() }),
        (Engine::Kvm, false) => Err(EngineError::NoKvm { cure: asked.cure(&verdict), found: verdict }),
        (_, true) => Ok(Choice { engine: Chosen::Kvm, reason: verdict.to_string() }),
        (_, false) => Ok(Choice { engine: Chosen::Uml, reason: verdict.to_string() }),
    }
}

/// What the device is good for. A guest is tried unless `enough` is content with what is known of an earlier one, and
/// with whether the processor has what it takes.
fn look(paths: &Paths, enough: impl FnOnce(Option<&Verdict>, bool) -> bool) -> Verdict {
    let opened = match kvm_probe::open() {
        Ok(opened) => opened,
        Err(verdict) => return verdict,
    };
    let memory = Memory::of(&paths.state);
    let device = Device::of(&opened);
    let known = device.as_ref().and_then(|device| memory.recall(device));
    if enough(known.as_ref(), sys::processor_offers_virtualization()) {
        return known.unwrap_or(Verdict::NoProcessor);
    }
    let verdict = match assets::program("bathy") {
        Ok(program) => measure(&program),
        Err(error) => return Verdict::Broken { reason: bathy_protocol::chain(&error) },
    };
    if let Some(device) = device {
        memory.keep(device, verdict.clone());
    }
    verdict
}

fn measure(program: &Path) -> Verdict {
    kvm_probe::measure(Command::new(program).arg(kvm_probe::VERB))
}
