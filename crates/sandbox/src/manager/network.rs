//! What kept sandboxes may reach, and changing it.

use std::time::Duration;

use bathy_audit::What;
use bathy_policy::{NetworkPolicy, Policies, PublishedPort};

use super::{Manager, ManagerError, Sandboxed};
use crate::monitor::door::{self, DoorError, FromMonitor, ToMonitor};
use crate::spec::SpecError;
use crate::store::StoreError;

/// How long a running sandbox may take to obey.
const PATIENCE: Duration = Duration::from_secs(8);

/// A policy that was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedPolicy {
    /// What it is now.
    pub policy: NetworkPolicy,
    /// How many connections were closed for it, if the sandbox runs.
    pub closed: Option<u32>,
}

impl Manager {
    /// What a sandbox may reach, with the operator's ceiling.
    pub fn policies(&self, sandbox: &Sandboxed) -> Policies {
        sandbox.record.spec.policies(self.policy.network())
    }

    /// Changes what a sandbox may reach, at once if it runs. `change` is given what it may reach at this moment, whatever
    /// others have made of it since `sandbox` was found.
    ///
    /// # Errors
    /// When it cannot be changed or written down, or the running sandbox does not obey. What is written down is recorded, and
    /// holds from the next start on.
    pub fn change_policy(
        &mut self,
        sandbox: &Sandboxed,
        change: impl FnOnce(&NetworkPolicy) -> Result<NetworkPolicy, bathy_policy::PolicyError>,
    ) -> Result<ChangedPolicy, ManagerError> {
        let changed = self.store.change_spec(&sandbox.record.id, |mut spec| {
            spec.network = change(&spec.network).map_err(SpecError::from)?;
            Ok::<_, ManagerError>(spec.checked()?)
        })?;
        let Some(spec) = changed else {
            return Err(StoreError::Removed(sandbox.name().to_owned()).into());
        };
        let policy = spec.network;
        let obeyed = match door::ask(self.folder(sandbox).path(), &ToMonitor::Policy, PATIENCE) {
            Ok((FromMonitor::Changed { closed }, _)) => Ok(Some(closed)),
            Ok(_) => Err(DoorError::Unexpected),
            Err(DoorError::NotRunning) => Ok(None),
            Err(error) => Err(error),
        };
        let changed = What::PolicyChanged {
            preset: policy.preset.to_string(),
            rules: policy.rules.iter().map(ToString::to_string).collect(),
            closed: obeyed.as_ref().ok().copied().flatten(),
        };
        self.note(&sandbox.record, changed)?;
        match obeyed {
            Ok(closed) => Ok(ChangedPolicy { policy, closed }),
            Err(source) => Err(ManagerError::NotObeyed { name: sandbox.name().to_owned(), source }),
        }
    }

    /// The published ports of a sandbox: as they are bound if it runs, as they are asked for otherwise.
    pub fn ports(&self, sandbox: &Sandboxed) -> Vec<PublishedPort> {
        let enforcement = sandbox.record.enforcement.as_ref().filter(|_| sandbox.is_alive());
        let bound = enforcement.and_then(|enforcement| enforcement.get("ports"));
        let bound = bound.and_then(|ports| serde_json::from_value(ports.clone()).ok());
        bound.unwrap_or_else(|| sandbox.record.spec.ports.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::path::Path;
    use std::thread;

    use bathy_audit::{Filter, Follower};
    use bathy_policy::{Preset, Rule};
    use bathy_protocol::CONNECTION;
    use bathy_protocol::message::encode;

    use super::*;
    use crate::engine::{Choice, Chosen};
    use crate::folder::Folder;
    use crate::paths::Paths;
    use crate::policy::Policy;
    use crate::spec::{SandboxSpec, Size};
    use crate::store::{NewRecord, Store};

    const ID: &str = "abcdefghijkl";

    fn manager(home: &Path) -> Manager {
        let paths = Paths { state: home.join("state"), cache: home.join("cache") };
        let policy = Policy::default();
        let store = Store::open(&paths.state).unwrap();
        let audit = crate::audit_log(&paths, &policy).unwrap();
        Manager { paths, store, audit, policy, program: "test".to_owned() }
    }

    fn with_sandbox(home: &Path) -> (Manager, Sandboxed) {
        let mut manager = manager(home);
        let spec = SandboxSpec { memory: Size(64 << 20), ..SandboxSpec::default() };
        let engine = Choice { engine: Chosen::Uml, reason: "a test".to_owned() };
        let new = NewRecord { id: ID.to_owned(), name: Some("web".to_owned()), spec, engine, created_ns: 1 };
        manager.store.insert(&new).unwrap();
        let sandbox = manager.find(ID).unwrap();
        (manager, sandbox)
    }

    fn deny(target: &str) -> impl FnOnce(&NetworkPolicy) -> Result<NetworkPolicy, bathy_policy::PolicyError> {
        let rule: Rule = format!("deny {target}").parse().unwrap();
        move |policy| policy.with_first(rule)
    }

    /// The recorded changes: their rules, and how many connections were closed.
    fn recorded(manager: &Manager) -> Vec<(Vec<String>, Option<u32>)> {
        let mut follower = Follower::open(&manager.audit_folder(), Filter::default()).unwrap();
        let mut found = Vec::new();
        while let Some(entry) = follower.next().unwrap() {
            if let What::PolicyChanged { rules, closed, .. } = entry.event.what {
                found.push((rules, closed));
            }
        }
        found
    }

    /// A monitor that says one thing to the first who comes.
    fn monitor(folder: &Folder, answer: FromMonitor) -> thread::JoinHandle<()> {
        fs::create_dir_all(folder.path()).unwrap();
        let listener = door::listen(folder.path()).unwrap();
        listener.set_nonblocking(false).unwrap();
        thread::spawn(move || {
            let (mut visitor, _) = listener.accept().unwrap();
            let mut message = Vec::new();
            encode(CONNECTION, &answer, &mut message).unwrap();
            visitor.write_all(&message).unwrap();
        })
    }

    #[test]
    fn of_two_denials_none_is_lost() {
        let home = tempfile::tempdir().unwrap();
        let (mut one, sandbox) = with_sandbox(home.path());
        let mut two = manager(home.path());
        // Both have looked before either changed anything.
        let same = two.find(ID).unwrap();
        assert_eq!(one.change_policy(&sandbox, deny("a.example")).unwrap().closed, None);
        let changed = two.change_policy(&same, deny("b.example")).unwrap().policy;
        let rules: Vec<_> = changed.rules.iter().map(ToString::to_string).collect();
        assert_eq!(rules, ["deny b.example", "deny a.example"]);
        assert_eq!(one.find(ID).unwrap().record.spec.network, changed);
        assert_eq!(recorded(&one).len(), 2);
    }

    #[test]
    fn a_change_that_the_sandbox_does_not_obey_is_recorded_all_the_same() {
        let home = tempfile::tempdir().unwrap();
        let (mut manager, sandbox) = with_sandbox(home.path());
        let folder = manager.folder(&sandbox);
        let answers = [
            (FromMonitor::Changed { closed: 3 }, None),
            (FromMonitor::Refused("it is busy".to_owned()), Some("it is busy")),
            (FromMonitor::Done, Some("something else")),
        ];
        for (answer, expected) in answers {
            let asked = monitor(&folder, answer);
            let changed = manager.change_policy(&sandbox, deny("a.example"));
            asked.join().unwrap();
            match expected {
                None => assert_eq!(changed.unwrap().closed, Some(3)),
                Some(words) => {
                    let error = crate::chain(&changed.unwrap_err());
                    assert!(error.contains("`web`") && error.contains("written down"), "{error}");
                    assert!(error.contains(words), "{error}");
                }
            }
        }
        let rules = || vec!["deny a.example".to_owned()];
        assert_eq!(recorded(&manager), [(rules(), Some(3)), (rules(), None), (rules(), None)]);
    }

    #[test]
    fn what_is_refused_or_of_a_sandbox_that_is_gone_changes_nothing() {
        let home = tempfile::tempdir().unwrap();
        let (mut manager, sandbox) = with_sandbox(home.path());
        let none = |_: &NetworkPolicy| {
            NetworkPolicy::from_options(Some(Preset::None), vec!["allow public".parse().unwrap()])
        };
        assert!(matches!(manager.change_policy(&sandbox, none), Err(ManagerError::Spec(_))));
        assert_eq!(manager.find(ID).unwrap().record.spec.network, NetworkPolicy::default());
        manager.store.delete(ID).unwrap();
        let gone = manager.change_policy(&sandbox, deny("a.example")).unwrap_err();
        assert!(matches!(gone, ManagerError::Store(StoreError::Removed(name)) if name == "web"));
        assert_eq!(recorded(&manager), []);
    }
}
