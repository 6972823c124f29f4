//! The engine of a sandbox, and the validation that depends on it.

use bathy_protocol::launch::UmlMode;
use serde::{Deserialize, Serialize};

use super::{SandboxSpec, Security, SpecError};
use crate::host;

/// The maximum number of processors of the microVM kernel.
const MAX_CPUS: u32 = 64;

/// The engine that was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Chosen {
    /// A virtual machine with hardware support.
    Kvm,
    /// A jailed User Mode Linux kernel.
    Uml,
}

impl Chosen {
    pub const ALL: [Self; 2] = [Self::Kvm, Self::Uml];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Uml => "uml",
        }
    }
}

/// The chosen engine and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    pub engine: Chosen,
    /// The reason, as a clause.
    pub reason: String,
}

impl SandboxSpec {
    /// How the uml engine isolates guest processes. Users inside a restricted guest must be isolated, which
    /// only one mode does.
    pub fn mode(&self) -> UmlMode {
        match self.security {
            Security::Restricted => UmlMode::Ptrace,
            Security::Default => self.uml_mode.unwrap_or_default(),
        }
    }

    /// Validates a new specification, which is [`Self::checked`], for its engine, and fills in open fields.
    pub fn checked_for(mut self, choice: &Choice) -> Result<Self, SpecError> {
        self.fits(choice)?;
        match (choice.engine, self.uml_mode) {
            (Chosen::Uml, _) => self.uml_mode = Some(self.mode()),
            (Chosen::Kvm, None) => {}
            (Chosen::Kvm, Some(mode)) => {
                let mode = match mode {
                    UmlMode::Seccomp => "seccomp",
                    UmlMode::Ptrace => "ptrace",
                };
                return Err(SpecError::UmlMode { mode, reason: choice.reason.clone() });
            }
        }
        Ok(self)
    }

    /// Whether the engine can run this. An earlier start may have used the other engine or more processors.
    pub fn fits(&self, choice: &Choice) -> Result<(), SpecError> {
        let cpus = host::usable_cpus().map_or(0, |cpus| cpus.len());
        self.fits_on(choice, u32::try_from(cpus).unwrap_or(u32::MAX).clamp(1, MAX_CPUS))
    }

    fn fits_on(&self, choice: &Choice, available: u32) -> Result<(), SpecError> {
        match choice.engine {
            Chosen::Uml if self.cpus > 1 => {
                Err(SpecError::UmlCpus { wanted: self.cpus, reason: choice.reason.clone() })
            }
            Chosen::Kvm if self.cpus > available => Err(SpecError::ManyCpus { wanted: self.cpus, available }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(engine: Chosen) -> Choice {
        Choice { engine, reason: "there is no /dev/kvm".to_owned() }
    }

    #[test]
    fn more_than_one_processor_takes_kvm_and_the_reason_says_why_it_is_not() {
        let two = SandboxSpec { cpus: 2, ..SandboxSpec::default() };
        assert_eq!(two.fits_on(&choice(Chosen::Kvm), 2), Ok(()));
        let error = two.fits_on(&choice(Chosen::Uml), 2).unwrap_err().to_string();
        for words in ["2 CPUs", "exactly one", "take the kvm engine", "there is no /dev/kvm", "--cpus 1"] {
            assert!(error.contains(words), "{error}");
        }
        let three = SandboxSpec { cpus: 3, ..SandboxSpec::default() };
        let error = three.fits_on(&choice(Chosen::Kvm), 2).unwrap_err();
        assert_eq!(error, SpecError::ManyCpus { wanted: 3, available: 2 });
        assert!(error.to_string().contains("(2). Use --cpus 2"), "{error}");
        for engine in Chosen::ALL {
            assert_eq!(SandboxSpec::default().fits(&choice(engine)), Ok(()));
        }
        let many = SandboxSpec { cpus: u32::MAX, ..SandboxSpec::default() };
        assert!(matches!(many.fits(&choice(Chosen::Kvm)), Err(SpecError::ManyCpus { .. })));
    }

    #[test]
    fn a_mode_is_the_uml_engines_own() {
        for mode in [UmlMode::Seccomp, UmlMode::Ptrace] {
            let asked = SandboxSpec { uml_mode: Some(mode), ..SandboxSpec::default() };
            let error = asked.clone().checked_for(&choice(Chosen::Kvm)).unwrap_err().to_string();
            assert!(error.contains("belongs to the uml engine") && error.contains("--engine uml"), "{error}");
            assert_eq!(asked.clone().checked_for(&choice(Chosen::Uml)).unwrap(), asked);
            // A sandbox that was created for the uml engine can be started with the other one.
            assert_eq!(asked.fits(&choice(Chosen::Kvm)), Ok(()));
        }
        let open = SandboxSpec::default();
        assert_eq!(open.clone().checked_for(&choice(Chosen::Kvm)), Ok(open.clone()));
        assert_eq!(open.checked_for(&choice(Chosen::Uml)).unwrap().uml_mode, Some(UmlMode::Seccomp));
    }

    #[test]
    fn a_restricted_sandbox_keeps_its_users_apart() {
        for uml_mode in [None, Some(UmlMode::Seccomp), Some(UmlMode::Ptrace)] {
            let spec = SandboxSpec { security: Security::Restricted, uml_mode, ..SandboxSpec::default() };
            assert_eq!(spec.mode(), UmlMode::Ptrace);
            assert_eq!(spec.checked_for(&choice(Chosen::Uml)).unwrap().uml_mode, Some(UmlMode::Ptrace));
        }
        let spec = SandboxSpec { security: Security::Restricted, ..SandboxSpec::default() };
        // With kvm they are always isolated.
        assert_eq!(spec.checked_for(&choice(Chosen::Kvm)).unwrap().uml_mode, None);
        assert_eq!(SandboxSpec::default().mode(), UmlMode::Seccomp);
    }
}
