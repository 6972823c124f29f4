//! Tests with real sandboxes are in `tests/tests/durable.rs`.

use std::fs;

use super::*;

const ID: &str = "abcdefghijkl";
const OTHER: &str = "bbbbbbbbbbbb";

/// Creates the folder of a sandbox with a description and without a record.
fn orphan(manager: &Manager, id: &str, name: &str) -> Folder {
    let folder = Folder::of(&manager.paths, id);
    folder.create().unwrap();
    fs::write(folder.disk(), "disk").unwrap();
    let spec = SandboxSpec { memory: Size(64 << 20), ..SandboxSpec::default() };
    let engine = Choice { engine: Chosen::Uml, reason: "a test".to_owned() };
    Description::new(id.to_owned(), Some(name.to_owned()), spec, engine, 7).write(&folder).unwrap();
    folder
}

fn adopt(manager: &mut Manager, wanted: &str) -> Result<Adopted, ManagerError> {
    let found = manager.find_any(wanted)?;
    manager.adopt(&found)
}

#[test]
fn an_orphan_is_found_by_its_name_its_id_and_the_beginning_of_it() {
    let home = tempfile::tempdir().unwrap();
    let mut manager = Manager::in_home(home.path());
    orphan(&manager, ID, "web");
    orphan(&manager, OTHER, "db");
    for wanted in ["web", ID, "abcd"] {
        assert_eq!(manager.find_any(wanted).unwrap().record.id, ID, "{wanted}");
        let error = manager.find(wanted).unwrap_err();
        assert!(matches!(&error, ManagerError::Orphaned(name) if name == "web"), "{wanted}: {error}");
    }
    assert!(manager.find_any("wbe").is_err());
    assert_eq!(manager.orphans().unwrap().len(), 2);
    let adopted = adopt(&mut manager, "web").unwrap();
    assert_eq!((adopted.sandbox.status, adopted.notes.len()), (Status::Stopped, 0));
    assert_eq!(adopted.sandbox.record.spec.memory, Size(64 << 20));
    assert_eq!(manager.orphans().unwrap().len(), 1);
    assert_eq!(manager.find("web").unwrap().record.id, ID);
}

#[test]
fn two_orphans_of_one_name_are_distinguished_by_their_ids() {
    let home = tempfile::tempdir().unwrap();
    let mut manager = Manager::in_home(home.path());
    orphan(&manager, ID, "web");
    orphan(&manager, OTHER, "web");
    orphan(&manager, "cccccccccccc", "db");
    let error = manager.find_any("web").unwrap_err().to_string();
    assert!(error.contains(ID) && error.contains(OTHER) && !error.contains("cccc"), "{error}");
    let shown: Vec<_> = manager.orphans().unwrap().iter().map(|orphan| orphan.name().to_owned()).collect();
    assert_eq!(shown, [ID, OTHER, "db"], "a name that is not theirs alone is none");
    adopt(&mut manager, ID).unwrap();
    let second = adopt(&mut manager, OTHER).unwrap();
    assert_eq!(second.sandbox.record.name, None);
    assert!(second.notes[0].contains("`web` already"), "{:?}", second.notes);
}

/// The error message recommends both of these.
#[test]
fn a_record_that_cannot_be_read_can_be_adopted_and_removed() {
    let home = tempfile::tempdir().unwrap();
    let mut manager = Manager::in_home(home.path());
    for removes in [false, true] {
        let folder = orphan(&manager, ID, "web");
        adopt(&mut manager, "web").unwrap();
        manager.store.damage_record(ID);
        let error = manager.find("web").unwrap_err().to_string();
        assert!(
            error.contains(&format!("`bathy adopt {ID}`")) && error.contains(&format!("`bathy rm {ID}`")),
            "{error}"
        );
        assert_eq!(manager.list().unwrap().len(), 0, "the others could be listed");
        assert_eq!(manager.orphans().unwrap().len(), 1);
        let found = manager.find_any(ID).unwrap();
        if removes {
            manager.remove(&found, false).unwrap();
            assert!(!folder.path().exists());
        } else {
            manager.adopt(&found).unwrap();
            assert_eq!(manager.find("web").unwrap().record.spec.memory, Size(64 << 20));
            let found = manager.find(ID).unwrap();
            manager.remove(&found, false).unwrap();
        }
        assert!(matches!(manager.store.get(ID), Ok(None)));
    }
}

#[test]
fn a_description_that_cannot_be_read_is_no_reason_to_forget_what_it_denies() {
    let home = tempfile::tempdir().unwrap();
    let mut manager = Manager::in_home(home.path());
    let folder = orphan(&manager, ID, "web");
    fs::write(folder.description(), "{").unwrap();
    let found = manager.find_any(ID).unwrap();
    let error = manager.adopt(&found).unwrap_err();
    assert!(matches!(&error, ManagerError::File(path, _) if *path == folder.description()), "{error}");
    assert!(folder.disk().exists());
}
