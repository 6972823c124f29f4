//! The network policies of persistent sandboxes, and changes to them.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_policy::{NetworkPolicy, Policies, PublishedPort};
use bathy_runtime::description::Description;
use bathy_spec::SpecError;

use super::{Manager, ManagerError, Sandboxed};
use crate::monitor::control::{self, ControlError, FromMonitor, ToMonitor};
use crate::store::{self, StoreError};

/// How long a running sandbox may take to confirm a policy.
const TIMEOUT: Duration = Duration::from_secs(8);

/// The interval between attempts to reach a running sandbox.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The result of a policy change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedPolicy {
    pub policy: NetworkPolicy,
    /// How many connections the change closed, if the sandbox is running.
    pub closed: Option<u32>,
}

impl Manager {
    /// A sandbox's policy with the operator's ceiling.
    pub fn policies(&self, sandbox: &Sandboxed) -> Policies {
        sandbox.record.spec.policies(self.operator.network())
    }

    /// Changes a sandbox's policy, immediately if it is running. `change` gets the current policy, including
    /// changes by others since `sandbox` was looked up.
    ///
    /// # Errors
    /// The change cannot be made or recorded, or the running sandbox does not confirm it. A policy that was
    /// stored and recorded applies from the next start on.
    pub fn change_policy(
        &mut self,
        sandbox: &Sandboxed,
        change: impl FnOnce(&NetworkPolicy) -> Result<NetworkPolicy, bathy_policy::PolicyError>,
    ) -> Result<ChangedPolicy, ManagerError> {
        let folder = self.folder(sandbox);
        // One change at a time, including its roll-back.
        let _lock = folder.lock().map_err(|error| ManagerError::File(folder.path().to_owned(), error))?;
        // Denying a destination must work on a full disk.
        self.store.release_reserve();
        let mut before = None;
        let changed = self.store.change_spec(&sandbox.record.id, |spec| {
            let failed = |error| ManagerError::File(folder.description(), error);
            // The description beside the disk takes precedence when the two differ, so it is changed first.
            before = Description::read(&folder).map_err(failed)?;
            let mut spec = before.as_ref().map_or(spec, |before| before.spec.clone());
            spec.network = change(&spec.network).map_err(SpecError::from)?;
            let spec = spec.checked()?;
            if let Some(mut now) = before.clone() {
                now.spec = spec.clone();
                now.write(&folder).map_err(failed)?;
            }
            Ok::<_, ManagerError>(spec)
        });
        if let (Err(_), Some(before)) = (&changed, &before) {
            // Roll back: a change that is reported as failed must not apply after the next start.
            let _ = before.write(&folder);
        }
        let Some(spec) = changed? else {
            return Err(StoreError::Removed(sandbox.name().to_owned()).into());
        };
        let policy = spec.network;
        let obeyed = self.apply_policy(folder.path());
        let changed = What::PolicyChanged {
            preset: policy.preset.to_string(),
            rules: policy.rules.iter().map(ToString::to_string).collect(),
            closed: obeyed.as_ref().ok().copied().flatten(),
        };
        self.note_last(&sandbox.record, changed);
        match obeyed {
            Ok(closed) => Ok(ChangedPolicy { policy, closed }),
            Err(source) => Err(ManagerError::NotObeyed { name: sandbox.name().to_owned(), source }),
        }
    }

    /// Makes a running sandbox load its new policy. Returns how many connections were closed, or none if it
    /// is not running.
    ///
    /// An unreachable monitor proves nothing: while the life lock is held, the sandbox is running.
    fn apply_policy(&self, folder: &Path) -> Result<Option<u32>, ControlError> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match control::ask(folder, &ToMonitor::Policy, TIMEOUT) {
                Ok((FromMonitor::Changed { closed }, _)) => return Ok(Some(closed)),
                Ok(_) => return Err(ControlError::Unexpected),
                Err(ControlError::NotRunning) if !store::alive(folder).map_err(ControlError::Io)? => {
                    return Ok(None);
                }
                // The sandbox is starting and will read the stored policy, or is about to end.
                Err(ControlError::NotRunning) if Instant::now() < deadline => sleep(RETRY_INTERVAL),
                Err(ControlError::NotRunning) => return Err(ControlError::Unreachable),
                Err(error) => return Err(error),
            }
        }
    }

    /// The published ports of a sandbox: as bound if it is running, otherwise as requested.
    pub fn ports(&self, sandbox: &Sandboxed) -> Vec<PublishedPort> {
        let enforcement = sandbox.record.enforcement.as_ref().filter(|_| sandbox.is_alive());
        let bound = enforcement.and_then(|enforcement| enforcement.get("ports"));
        let bound = bound.and_then(|ports| serde_json::from_value(ports.clone()).ok());
        bound.unwrap_or_else(|| sandbox.record.spec.ports.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::{fs, thread};

    use bathy_audit::{Follower, LogFilter};
    use bathy_policy::{Preset, Rule};
    use bathy_protocol::CONNECTION;
    use bathy_protocol::message::encode;
    use bathy_runtime::folder::Folder;
    use bathy_spec::{Choice, Chosen, SandboxSpec, Size};

    use super::*;
    use crate::store::{NewRecord, Record};

    const ID: &str = "abcdefghijkl";

    fn with_sandbox(home: &Path) -> (Manager, Sandboxed) {
        let mut manager = Manager::in_home(home);
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

    /// The recorded changes: their rules and how many connections were closed.
    fn recorded(manager: &Manager) -> Vec<(Vec<String>, Option<u32>)> {
        let mut follower = Follower::open(&manager.audit_folder(), LogFilter::default()).unwrap();
        let mut found = Vec::new();
        while let Some(entry) = follower.next().unwrap() {
            if let What::PolicyChanged { rules, closed, .. } = entry.event.what {
                found.push((rules, closed));
            }
        }
        found
    }

    /// What a monitor does with its first client.
    #[derive(Clone)]
    enum Behaviour {
        /// Reads the request and answers.
        Answers(FromMonitor),
        /// Reads the request and sends these bytes.
        Sends(Vec<u8>),
        /// Closes the connection before it has read the request.
        Closes,
        /// Reads the request and closes the connection.
        ReadsAndCloses,
        /// Sends the beginning of an answer and closes.
        Breaks,
        /// Sends one byte of an answer at a time, for longer than any timeout.
        Drips,
        /// Accepts no connection for longer than any timeout.
        Stalls,
    }

    fn answer(answer: &FromMonitor) -> Vec<u8> {
        let mut message = Vec::new();
        encode(CONNECTION, answer, &mut message).unwrap();
        message
    }

    fn monitor(folder: &Folder, behaviour: Behaviour) -> thread::JoinHandle<()> {
        fs::create_dir_all(folder.path()).unwrap();
        let listener = control::listen(folder.path()).unwrap();
        listener.set_nonblocking(false).unwrap();
        thread::spawn(move || {
            if matches!(behaviour, Behaviour::Stalls) {
                return sleep(TIMEOUT + Duration::from_secs(2));
            }
            let (mut client, _) = listener.accept().unwrap();
            if matches!(behaviour, Behaviour::Closes) {
                return;
            }
            assert!(client.read(&mut [0; 64]).unwrap() > 0, "it receives a request");
            let whole = answer(&FromMonitor::Changed { closed: 3 });
            match behaviour {
                Behaviour::Answers(message) => client.write_all(&answer(&message)).unwrap(),
                Behaviour::Sends(bytes) => client.write_all(&bytes).unwrap(),
                Behaviour::Breaks => client.write_all(&whole[..whole.len() - 1]).unwrap(),
                Behaviour::Drips => {
                    for byte in &whole {
                        // The client times out in between.
                        let _ = client.write_all(&[*byte]);
                        sleep(TIMEOUT / 4);
                    }
                }
                Behaviour::ReadsAndCloses | Behaviour::Closes | Behaviour::Stalls => {}
            }
        })
    }

    #[test]
    fn of_two_denials_none_is_lost() {
        let home = tempfile::tempdir().unwrap();
        let (mut one, sandbox) = with_sandbox(home.path());
        let mut two = Manager::in_home(home.path());
        // Both have looked the sandbox up before either changed anything.
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
        let answers = |answer| Behaviour::Answers(answer);
        let behaviours = [
            (answers(FromMonitor::Changed { closed: 3 }), None),
            (answers(FromMonitor::Refused("it is busy".to_owned())), Some("it is busy")),
            (answers(FromMonitor::Done), Some("unexpected answer")),
            (answers(FromMonitor::Connected), Some("unexpected answer")),
            (Behaviour::Closes, Some("without an answer")),
            (Behaviour::ReadsAndCloses, Some("without an answer")),
            (Behaviour::Breaks, Some("without an answer")),
            (Behaviour::Sends(vec![0xff; 64]), Some("")),
            (Behaviour::Sends(vec![0; 64]), Some("")),
        ];
        let mut expected_record = Vec::new();
        for (behaviour, expected) in behaviours {
            let asked = monitor(&folder, behaviour);
            let changed = manager.change_policy(&sandbox, deny("a.example"));
            asked.join().unwrap();
            match expected {
                None => assert_eq!(changed.unwrap().closed, Some(3)),
                Some(words) => {
                    let error = bathy_protocol::chain(&changed.unwrap_err());
                    assert!(error.contains("`web`") && error.contains("may not be in effect"), "{error}");
                    assert!(error.contains(words), "{error}");
                }
            }
            expected_record.push((vec!["deny a.example".to_owned()], expected.is_none().then_some(3)));
        }
        assert_eq!(recorded(&manager), expected_record);
    }

    #[test]
    fn a_monitor_that_does_not_answer_in_time_is_not_taken_for_obedient() {
        for behaviour in [Behaviour::Drips, Behaviour::Stalls] {
            let home = tempfile::tempdir().unwrap();
            let (mut manager, sandbox) = with_sandbox(home.path());
            let asked = monitor(&manager.folder(&sandbox), behaviour);
            let began = Instant::now();
            let error =
                bathy_protocol::chain(&manager.change_policy(&sandbox, deny("a.example")).unwrap_err());
            assert!(error.contains("may not be in effect") && error.contains("did not answer"), "{error}");
            assert!(began.elapsed() < TIMEOUT * 2, "{:?}", began.elapsed());
            asked.join().unwrap();
        }
    }

    /// The socket was removed or nothing listens on it, but the processes are still running.
    #[test]
    fn a_sandbox_that_runs_and_cannot_be_reached_is_not_taken_for_stopped() {
        let home = tempfile::tempdir().unwrap();
        let (mut manager, sandbox) = with_sandbox(home.path());
        let folder = manager.folder(&sandbox);
        fs::create_dir_all(folder.path()).unwrap();
        let life = store::take_life(folder.path()).unwrap().unwrap();
        let error = bathy_protocol::chain(&manager.change_policy(&sandbox, deny("a.example")).unwrap_err());
        assert!(error.contains("may not be in effect") && error.contains("cannot be reached"), "{error}");
        drop(control::listen(folder.path()).unwrap());
        let error = bathy_protocol::chain(&manager.change_policy(&sandbox, deny("b.example")).unwrap_err());
        assert!(error.contains("cannot be reached"), "a socket that refuses: {error}");
        drop(life);
        assert_eq!(manager.change_policy(&sandbox, deny("c.example")).unwrap().closed, None);
    }

    #[test]
    fn what_stands_beside_the_disk_is_changed_with_it() {
        let home = tempfile::tempdir().unwrap();
        let (mut manager, sandbox) = with_sandbox(home.path());
        let folder = manager.folder(&sandbox);
        folder.create().unwrap();
        let Record { id, name, spec, created_ns, .. } = sandbox.record.clone();
        let engine = Choice { engine: Chosen::Uml, reason: "a test".to_owned() };
        Description::new(id, name, spec, engine, created_ns).write(&folder).unwrap();
        let changed = manager.change_policy(&sandbox, deny("a.example")).unwrap().policy;
        assert_eq!(Description::read(&folder).unwrap().unwrap().spec.network, changed);
        fs::write(folder.description(), "{").unwrap();
        let error = manager.change_policy(&sandbox, deny("b.example")).unwrap_err();
        assert!(matches!(error, ManagerError::File(..)), "{error}");
        assert_eq!(manager.find(ID).unwrap().record.spec.network, changed, "all or nothing");
    }

    #[test]
    fn what_is_refused_or_of_a_removed_sandbox_changes_nothing() {
        let home = tempfile::tempdir().unwrap();
        let (mut manager, sandbox) = with_sandbox(home.path());
        let none = |_: &NetworkPolicy| {
            NetworkPolicy::from_options(Some(Preset::None), vec!["allow public".parse().unwrap()])
        };
        assert!(matches!(manager.change_policy(&sandbox, none), Err(ManagerError::Spec(_))));
        assert_eq!(manager.find(ID).unwrap().record.spec.network, NetworkPolicy::default());
        manager.store.delete(ID).unwrap();
        let removed = manager.change_policy(&sandbox, deny("a.example")).unwrap_err();
        assert!(matches!(removed, ManagerError::Store(StoreError::Removed(name)) if name == "web"));
        assert_eq!(recorded(&manager), []);
    }
}
