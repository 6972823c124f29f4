//! What kept sandboxes may reach, and changing it.

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

/// How long a running sandbox may take to obey.
const PATIENCE: Duration = Duration::from_secs(8);

/// How often a sandbox is tried again that runs and cannot be reached.
const PAUSE: Duration = Duration::from_millis(20);

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
        sandbox.record.spec.policies(self.operator.network())
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
        let folder = self.folder(sandbox);
        // One change at a time, with its undoing.
        let _lock = folder.lock().map_err(|error| ManagerError::File(folder.path().to_owned(), error))?;
        // A denial has to be possible on a full disk.
        self.store.make_room();
        let mut before = None;
        let changed = self.store.change_spec(&sandbox.record.id, |spec| {
            let failed = |error| ManagerError::File(folder.description(), error);
            // What stands beside the disk holds when the two differ, and is changed first.
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
            // Told as failed: then it does not hold after the next start either.
            let _ = before.write(&folder);
        }
        let Some(spec) = changed? else {
            return Err(StoreError::Removed(sandbox.name().to_owned()).into());
        };
        let policy = spec.network;
        let obeyed = self.tell_policy(folder.path());
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

    /// Has a running sandbox take its new policy: how many connections were closed for it, or nothing if it does not run.
    ///
    /// A monitor that cannot be reached is no proof: as long as the sandbox's lock is held, it runs.
    fn tell_policy(&self, folder: &Path) -> Result<Option<u32>, ControlError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match control::ask(folder, &ToMonitor::Policy, PATIENCE) {
                Ok((FromMonitor::Changed { closed }, _)) => return Ok(Some(closed)),
                Ok(_) => return Err(ControlError::Unexpected),
                Err(ControlError::NotRunning) if !store::alive(folder).map_err(ControlError::Io)? => {
                    return Ok(None);
                }
                // It is being started, and will read what was written down, or is about to end.
                Err(ControlError::NotRunning) if Instant::now() < deadline => sleep(PAUSE),
                Err(ControlError::NotRunning) => return Err(ControlError::Unreachable),
                Err(error) => return Err(error),
            }
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
    use std::io::{Read, Write};
    use std::{fs, thread};

    use bathy_audit::{Filter, Follower};
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

    /// What a monitor does with the first who comes.
    #[derive(Clone)]
    enum Behaviour {
        /// Reads the question, and answers this.
        Says(FromMonitor),
        /// Reads the question, and sends these bytes.
        Sends(Vec<u8>),
        /// Closes the connection before it has read the question.
        Closes,
        /// Reads the question and closes the connection.
        ReadsAndCloses,
        /// Sends the beginning of an answer and closes.
        Breaks,
        /// Sends a byte of an answer now and then, for longer than anybody waits.
        Drips,
        /// Takes no connection for as long as anybody waits.
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
                return sleep(PATIENCE + Duration::from_secs(2));
            }
            let (mut visitor, _) = listener.accept().unwrap();
            if matches!(behaviour, Behaviour::Closes) {
                return;
            }
            assert!(visitor.read(&mut [0; 64]).unwrap() > 0, "it is asked something");
            let whole = answer(&FromMonitor::Changed { closed: 3 });
            match behaviour {
                Behaviour::Says(says) => visitor.write_all(&answer(&says)).unwrap(),
                Behaviour::Sends(bytes) => visitor.write_all(&bytes).unwrap(),
                Behaviour::Breaks => visitor.write_all(&whole[..whole.len() - 1]).unwrap(),
                Behaviour::Drips => {
                    for byte in &whole {
                        // The one who asked gives up in between.
                        let _ = visitor.write_all(&[*byte]);
                        sleep(PATIENCE / 4);
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
        let says = |answer| Behaviour::Says(answer);
        let behaviours = [
            (says(FromMonitor::Changed { closed: 3 }), None),
            (says(FromMonitor::Refused("it is busy".to_owned())), Some("it is busy")),
            (says(FromMonitor::Done), Some("something else")),
            (says(FromMonitor::Connected), Some("something else")),
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
                    assert!(error.contains("`web`") && error.contains("may not hold"), "{error}");
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
            assert!(error.contains("may not hold") && error.contains("did not answer"), "{error}");
            assert!(began.elapsed() < PATIENCE * 2, "{:?}", began.elapsed());
            asked.join().unwrap();
        }
    }

    /// Its socket was removed, or nothing listens at it any more, and yet its processes are there.
    #[test]
    fn a_sandbox_that_runs_and_cannot_be_reached_is_not_taken_for_stopped() {
        let home = tempfile::tempdir().unwrap();
        let (mut manager, sandbox) = with_sandbox(home.path());
        let folder = manager.folder(&sandbox);
        fs::create_dir_all(folder.path()).unwrap();
        let life = store::take_life(folder.path()).unwrap().unwrap();
        let error = bathy_protocol::chain(&manager.change_policy(&sandbox, deny("a.example")).unwrap_err());
        assert!(error.contains("may not hold") && error.contains("cannot be reached"), "{error}");
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
