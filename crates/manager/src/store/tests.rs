use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use bathy_spec::{Choice, Chosen, SandboxSpec, Size};
use serde_json::json;

use super::*;
use crate::processor_time;

fn folder_and_store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    (folder, store)
}

fn new(id: &str, name: Option<&str>) -> NewRecord {
    NewRecord {
        id: id.to_owned(),
        name: name.map(str::to_owned),
        spec: SandboxSpec { memory: Size(64 << 20), ..SandboxSpec::default() },
        engine: Choice { engine: Chosen::Uml, reason: "there is no /dev/kvm".to_owned() },
        created_ns: 1_700_000_000_000_000_000,
    }
}

const ONE: &str = "abcdefghijkl";
const TWO: &str = "abcdzzzzzzzz";

#[test]
fn what_was_written_is_read_by_others() {
    let (folder, mut store) = folder_and_store();
    store.insert(&new(ONE, Some("web"))).unwrap();
    store.insert(&new(TWO, None)).unwrap();
    let other = Store::open(folder.path()).unwrap();
    let web = other.get(ONE).unwrap().unwrap();
    assert_eq!(other.by_name("web").unwrap(), Some(web.clone()));
    assert_eq!(
        (web.spec.memory, web.state, web.name.as_deref()),
        (Size(64 << 20), State::Created, Some("web"))
    );
    assert_eq!(web.created_ns, 1_700_000_000_000_000_000);
    assert_eq!(other.get("missing").unwrap(), None);
    let ids: Vec<_> = other.list().unwrap().into_iter().map(|record| record.id).collect();
    assert_eq!(ids, [ONE, TWO]);
}

#[test]
fn only_the_owner_reads_the_files() {
    let (folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    let mut seen = 0;
    for entry in fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{:?}", entry.file_name());
        seen += 1;
    }
    assert!(seen >= 2, "the database and its log");
}

#[test]
fn a_sandbox_is_found_by_name_id_and_beginning() {
    let (_folder, mut store) = folder_and_store();
    store.insert(&new(ONE, Some("web"))).unwrap();
    store.insert(&new(TWO, Some("zzzz"))).unwrap();
    let found = |wanted: &str| store.find(wanted).map(|record| record.id).map_err(|error| error.to_string());
    assert_eq!(found("web").as_deref(), Ok(ONE));
    assert_eq!(found(ONE).as_deref(), Ok(ONE));
    assert_eq!(found("abcde").as_deref(), Ok(ONE));
    assert_eq!(found("abcdz").as_deref(), Ok(TWO));
    assert_eq!(
        found("abcd").unwrap_err(),
        format!("`abcd` could be any of {ONE}, {TWO}. Give more of the id")
    );
    assert_eq!(found("webb").unwrap_err(), "There is no sandbox `webb`; did you mean `web`?");
    assert!(found("abc").unwrap_err().contains("did you mean `abc"), "too short to stand for an id");
    for hostile in ["", "%", "' OR 1=1 --", "a\0b", "\u{1b}[2J"] {
        assert!(found(hostile).unwrap_err().starts_with("There is no sandbox"), "{hostile:?}");
    }
}

#[test]
fn a_name_belongs_to_one_sandbox() {
    let (_folder, mut store) = folder_and_store();
    store.insert(&new(ONE, Some("web"))).unwrap();
    for taken in ["web", ONE] {
        let error = store.insert(&new(TWO, Some(taken))).unwrap_err();
        assert!(matches!(error, StoreError::NameTaken { name } if name == taken));
    }
    assert!(matches!(store.insert(&new("../../../etc", None)), Err(StoreError::Name(NameError::Form(_)))));
    assert!(matches!(store.insert(&new(TWO, Some("../x"))), Err(StoreError::Name(NameError::Form(_)))));
    store.insert(&new(TWO, Some("api"))).unwrap();
    assert!(matches!(
        store.update(TWO, &[Change::Name(Some("web".to_owned()))]),
        Err(StoreError::NameTaken { .. })
    ));
    assert!(store.update(TWO, &[Change::Name(Some("api2".to_owned()))]).unwrap());
    assert_eq!(store.find("api2").unwrap().id, TWO);
    assert!(store.delete(ONE).unwrap());
    store.insert(&new("bbbbbbbbbbbb", Some("web"))).unwrap();
}

#[test]
fn of_many_who_want_a_name_one_gets_it() {
    let folder = tempfile::tempdir().unwrap();
    // The store does not exist yet: creating it is raced for as well.
    let winners: usize = thread::scope(|scope| {
        let tries: Vec<_> = (0..16)
            .map(|_| {
                scope.spawn(|| {
                    let mut store = Store::open(folder.path()).unwrap();
                    match store.insert(&new(&name::new_id().unwrap(), Some("web"))) {
                        Ok(()) => 1,
                        Err(StoreError::NameTaken { .. }) => 0,
                        Err(error) => panic!("{error:?}"),
                    }
                })
            })
            .collect();
        tries.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert_eq!(winners, 1);
    assert_eq!(Store::open(folder.path()).unwrap().list().unwrap().len(), 1);
}

#[test]
fn a_name_does_not_take_the_beginning_of_another_sandboxs_id() {
    let (_folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    let begin = &ONE[..5];
    let error = store.insert(&new(TWO, Some(begin))).unwrap_err();
    assert!(error.to_string().contains(ONE) && error.to_string().contains("another name"), "{error}");
    assert_eq!(store.find(begin).unwrap().id, ONE);
    store.insert(&new(TWO, Some("web"))).unwrap();
    let renamed = store.update(TWO, &[Change::Name(Some(begin.to_owned()))]);
    assert!(matches!(renamed, Err(StoreError::NameOfId { id, .. }) if id == ONE));
    // Its own id, and what is too short to stand for one.
    assert!(store.update(ONE, &[Change::Name(Some(begin.to_owned()))]).unwrap());
    assert!(store.update(TWO, &[Change::Name(Some(ONE[..3].to_owned()))]).unwrap());
    // A name wins over the id of a sandbox that was made later.
    let three = format!("{begin}zzzzzzz");
    store.insert(&new(&three, None)).unwrap();
    assert_eq!(store.find(begin).unwrap().id, ONE);
}

#[test]
fn a_number_of_sandboxes_is_kept_by_all_together() {
    let folder = tempfile::tempdir().unwrap();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut store = Store::open(folder.path()).unwrap();
                match store.insert_at_most(&new(&name::new_id().unwrap(), None), Some(3)) {
                    Ok(()) | Err(StoreError::TooMany { count: 3 }) => {}
                    Err(error) => panic!("{error:?}"),
                }
            });
        }
    });
    assert_eq!(Store::open(folder.path()).unwrap().list().unwrap().len(), 3);
}

#[test]
fn a_state_changes_only_from_what_it_was_thought_to_be() {
    let (_folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    let start = [
        Change::Started { at_ns: 5, monitor_pid: 7 },
        Change::Keeper(8),
        Change::Enforcement(json!({"cpu": "cgroup"})),
    ];
    assert!(!store.transition(ONE, &[State::Stopped], State::Running, &start).unwrap());
    assert_eq!(store.get(ONE).unwrap().unwrap().monitor_pid, None);
    assert!(store.transition(ONE, &[State::Created, State::Stopped], State::Running, &start).unwrap());
    let running = store.get(ONE).unwrap().unwrap();
    assert_eq!((running.state, running.started_ns), (State::Running, Some(5)));
    assert_eq!((running.monitor_pid, running.keeper_pid), (Some(7), Some(8)));
    assert_eq!(running.enforcement, Some(json!({"cpu": "cgroup"})));
    let end = [Change::Ended { at_ns: 9, cause: "the main command ended".to_owned(), exit_code: Some(3) }];
    assert!(store.transition(ONE, &[State::Running], State::Stopped, &end).unwrap());
    assert!(!store.transition(ONE, &[State::Running], State::Stopped, &end).unwrap());
    let ended = store.get(ONE).unwrap().unwrap();
    assert_eq!((ended.ended_ns, ended.exit_code, ended.monitor_pid), (Some(9), Some(3), None));
    assert!(store.transition(ONE, &[State::Stopped], State::Running, &start).unwrap());
    let again = store.get(ONE).unwrap().unwrap();
    assert_eq!((again.ended_ns, again.end_cause, again.exit_code), (None, None, None));
    assert!(!store.transition("gone", &[State::Created], State::Running, &[]).unwrap());
    assert!(!store.update("gone", &[Change::Keeper(1)]).unwrap());
}

#[test]
fn of_two_who_remove_one_does() {
    let (folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    store.next_job(ONE, &[b"x".to_vec()], None, "e1").unwrap();
    let removed: usize = thread::scope(|scope| {
        let remove = || usize::from(Store::open(folder.path()).unwrap().delete(ONE).unwrap());
        let both = [scope.spawn(remove), scope.spawn(remove)];
        both.into_iter().map(|one| one.join().unwrap()).sum()
    });
    assert_eq!(removed, 1);
    assert_eq!(store.jobs(ONE).unwrap(), []);
    assert!(matches!(store.next_job(ONE, &[], None, "e1"), Err(StoreError::Removed(_))));
}

#[test]
fn jobs_are_numbered_once() {
    let (folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    store.main_job(ONE, &[b"serve".to_vec()], Some("root"), "main").unwrap();
    let numbers: BTreeSet<u32> = thread::scope(|scope| {
        let tries: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let mut store = Store::open(folder.path()).unwrap();
                    (0..5)
                        .map(|_| store.next_job(ONE, &[b"x".to_vec()], None, "e7").unwrap())
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        tries.into_iter().flat_map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(numbers, (1..=40).collect());
    assert!(store.end_job(ONE, 3, "exit 1").unwrap());
    assert!(!store.end_job(ONE, 3, "exit 0").unwrap());
    assert!(!store.end_job(ONE, 99, "exit 0").unwrap());
    assert_eq!(store.end_all_jobs(ONE, "the sandbox ended").unwrap(), 40);
    let jobs = store.jobs(ONE).unwrap();
    assert_eq!(
        (jobs[0].number, jobs[0].exec_id.as_str(), jobs[0].argv.as_slice()),
        (0, "main", &["serve".to_owned()][..])
    );
    assert_eq!(jobs[3].exit.as_deref(), Some("exit 1"));
    assert!(jobs.iter().all(|job| job.ended_ns.is_some()));
    store.main_job(ONE, &[b"again".to_vec()], None, "e2").unwrap();
    assert_eq!(store.jobs(ONE).unwrap()[0].ended_ns, None);
}

#[test]
fn old_jobs_are_forgotten_and_running_ones_are_not() {
    let (_folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    for number in 1..=1010 {
        assert_eq!(store.next_job(ONE, &[], None, "e0").unwrap(), number);
        if number != 2 {
            store.end_job(ONE, number, "exit 0").unwrap();
        }
    }
    let numbers: Vec<_> = store.jobs(ONE).unwrap().iter().map(|job| job.number).collect();
    assert_eq!(numbers[..2], [2, 11]);
    assert_eq!(numbers.len(), 1001);
}

#[test]
fn a_change_that_was_not_finished_never_was() {
    let (folder, mut store) = folder_and_store();
    store.insert(&new(ONE, Some("web"))).unwrap();
    let change = store.change().unwrap();
    change.run("DELETE FROM sandboxes", ()).unwrap();
    drop(change);
    assert_eq!(Store::open(folder.path()).unwrap().list().unwrap().len(), 1);
}

/// Run as another process by the test below: changes the store until it is killed.
#[test]
fn changes_until_it_is_killed() {
    let Some(state) = std::env::var_os("BATHY_TEST_CHANGE_STORE").map(PathBuf::from) else { return };
    let mut store = Store::open(&state).unwrap();
    let mut written = File::options().append(true).create(true).open(state.join("written")).unwrap();
    // Far more rounds than it gets to, and an end if it is not killed.
    for round in 0..20_000 {
        let id = name::new_id().unwrap();
        store.insert(&new(&id, Some(&format!("{id}-{round}")))).unwrap();
        written.write_all(format!("{id}\n").as_bytes()).unwrap();
        store.main_job(&id, &[b"x".to_vec()], None, "e1").unwrap();
        store.transition(&id, &[State::Created], State::Running, &[Change::Keeper(1)]).unwrap();
    }
}

#[test]
fn the_store_survives_writers_that_are_killed() {
    let folder = tempfile::tempdir().unwrap();
    let written = || fs::read_to_string(folder.path().join("written")).unwrap_or_default();
    let count = || written().lines().count();
    for round in 0..12 {
        let mut writers: Vec<_> = (0..2)
            .map(|_| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "store::tests::changes_until_it_is_killed"])
                    .env("BATHY_TEST_CHANGE_STORE", folder.path())
                    .stdout(Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        // Wait until all writers have begun, however busy the machine is.
        let deadline = Instant::now() + Duration::from_secs(60);
        while count() < 10 * (round + 1) {
            assert!(Instant::now() < deadline, "the writers do not write");
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(7 * u64::try_from(round).unwrap()));
        for writer in &mut writers {
            writer.kill().unwrap();
            assert!(
                !writer.wait().unwrap().success(),
                "it should have been killed, not have failed or ended"
            );
        }
        let store = Store::open(folder.path()).unwrap();
        let sound: String =
            store.connection.query_row("PRAGMA integrity_check", (), |row| row.get(0)).unwrap();
        assert_eq!(sound, "ok");
        let records = store.list().unwrap();
        let ids: BTreeSet<_> = records.iter().map(|record| record.id.as_str()).collect();
        let written = written();
        let lost: Vec<_> = written.lines().filter(|id| !ids.contains(id)).collect();
        assert_eq!(lost, Vec::<&str>::new(), "an insert that returned is there for good");
        // A change is committed completely or not at all.
        for record in records {
            assert_eq!(record.keeper_pid.is_some(), record.state == State::Running);
        }
    }
}

#[test]
fn a_damaged_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    fs::write(&path, b"this is not a database, however long it is. ".repeat(100)).unwrap();
    let error = Store::open(folder.path()).unwrap_err();
    assert!(matches!(&error, StoreError::Damaged { .. }), "{error:?}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
}

#[test]
fn damage_inside_the_file_is_an_error() {
    let (folder, mut store) = folder_and_store();
    for _ in 0..200 {
        store.insert(&new(&name::new_id().unwrap(), None)).unwrap();
    }
    // Closing the last connection merges the log into the file.
    drop(store);
    let path = folder.path().join("store.db");
    let mut bytes = fs::read(&path).unwrap();
    let length = bytes.len();
    assert!(length > 16384, "{length}");
    bytes[8192..].fill(0xa5);
    fs::write(&path, bytes).unwrap();
    let listed = Store::open(folder.path()).and_then(|store| store.list());
    assert!(matches!(listed, Err(StoreError::Damaged { .. })), "{listed:?}");
}

#[test]
fn a_record_that_cannot_be_read_can_be_removed() {
    let (_folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    store.connection.execute("UPDATE sandboxes SET spec = '{\"later\": 1}'", ()).unwrap();
    assert!(matches!(store.get(ONE), Err(StoreError::Record { id, .. }) if id == ONE));
    assert!(store.delete(ONE).unwrap());
}

#[test]
fn a_folder_that_cannot_be_used_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    assert!(matches!(Store::open(&folder.path().join("file")), Err(StoreError::File(..))));
    fs::create_dir(folder.path().join("store.db")).unwrap();
    assert!(Store::open(folder.path()).is_err());
}

#[test]
fn an_older_store_takes_the_steps_that_it_misses() {
    let (folder, mut store) = folder_and_store();
    store.insert(&new(ONE, Some("web"))).unwrap();
    let mut steps = schema::STEPS.to_vec();
    let known = steps.len();
    steps.push("ALTER TABLE sandboxes ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue'");
    schema::bring_up_to_date(&mut store, &steps).unwrap();
    schema::bring_up_to_date(&mut store, &steps).unwrap();
    let colour = "SELECT colour FROM sandboxes WHERE name = 'web'";
    let colour: String = store.connection.query_row(colour, (), |row| row.get(0)).unwrap();
    assert_eq!(colour, "blue");
    let newer = Store::open(folder.path()).unwrap_err();
    assert!(matches!(newer, StoreError::Newer { found, known: k, .. } if found == known + 1 && k == known));
}

#[test]
fn an_engine_is_written_with_its_reason_and_older_records_have_none() {
    let (folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    let engine = |store: &Store| {
        let record = store.get(ONE).unwrap().unwrap();
        (record.engine, record.engine_reason)
    };
    assert_eq!(engine(&store), (Some(Chosen::Uml), Some("there is no /dev/kvm".to_owned())));
    let other = Choice { engine: Chosen::Kvm, reason: "asked for".to_owned() };
    assert!(store.update(ONE, &[Change::Engine(other)]).unwrap());
    assert_eq!(
        engine(&Store::open(folder.path()).unwrap()),
        (Some(Chosen::Kvm), Some("asked for".to_owned()))
    );
    // A record of the version with one engine, which always stored a mode.
    let spec = r#"{"engine":"auto","uml_mode":"ptrace"}"#;
    let older = "UPDATE sandboxes SET engine = NULL, engine_reason = NULL, spec = ?";
    store.connection.execute(older, [spec]).unwrap();
    assert_eq!(engine(&store), (None, None));
    let record = store.get(ONE).unwrap().unwrap();
    assert_eq!(record.spec.uml_mode, Some(bathy_protocol::launch::UmlMode::Ptrace));
}

#[test]
fn a_step_that_fails_changes_nothing() {
    let (folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    let mut steps = schema::STEPS.to_vec();
    steps.extend(["DELETE FROM sandboxes", "SELECT nonsense FROM nowhere"]);
    assert!(schema::bring_up_to_date(&mut store, &steps).is_err());
    assert_eq!(Store::open(folder.path()).unwrap().list().unwrap().len(), 1);
}

#[test]
fn a_thousand_sandboxes_are_listed_at_once() {
    let (folder, mut store) = folder_and_store();
    for number in 0..1000 {
        store.insert(&new(&name::new_id().unwrap(), Some(&format!("name-{number}")))).unwrap();
    }
    let began = processor_time();
    let one = Store::open(folder.path()).unwrap().find("name-500").unwrap();
    let open = processor_time() - began;
    assert_eq!(one.name.as_deref(), Some("name-500"));
    let began = processor_time();
    assert_eq!(Store::open(folder.path()).unwrap().list().unwrap().len(), 1000);
    let list = processor_time() - began;
    println!("open and find {open:?}, open and list 1000 {list:?}");
    // Ten times what a debug build takes on a slow machine: this catches a scan or a query per row, not
    // noise.
    assert!(open < Duration::from_millis(50) && list < Duration::from_secs(2), "{open:?} {list:?}");
}

#[test]
fn changes_of_a_description_are_made_one_after_the_other() {
    const EACH: u32 = 25;
    let (folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut store = Store::open(folder.path()).unwrap();
                for _ in 0..EACH {
                    let more = |spec: SandboxSpec| {
                        Ok::<_, StoreError>(SandboxSpec { processes: spec.processes + 1, ..spec })
                    };
                    assert!(store.change_spec(ONE, more).unwrap().is_some());
                }
            });
        }
    });
    let before = SandboxSpec::default().processes;
    assert_eq!(store.get(ONE).unwrap().unwrap().spec.processes, before + 4 * EACH);
    let refuse = |_| Err::<SandboxSpec, _>(StoreError::Removed("no".to_owned()));
    assert!(store.change_spec(ONE, refuse).is_err());
    assert_eq!(
        store.get(ONE).unwrap().unwrap().spec.processes,
        before + 4 * EACH,
        "a refusal changes nothing"
    );
    assert_eq!(store.change_spec(TWO, Ok::<_, StoreError>).unwrap(), None);
}

#[test]
fn f1_looking_something_up_takes_no_space_where_there_is_none_to_share_the_store() {
    let (folder, mut store) = folder_and_store();
    store.insert(&new(ONE, None)).unwrap();
    drop(store);
    let index = folder.path().join("store.db-shm");
    assert!(!index.exists(), "closing the last connection removes it");
    let mut alone = Store::try_open(folder.path(), Locking::Exclusive).unwrap();
    assert!(alone.get(ONE).unwrap().is_some() && !index.exists());
    assert!(!alone.is_shared() && matches!(alone.require_shared(), Err(StoreError::Full(_))));
    assert!(alone.delete(ONE).unwrap(), "it can be changed, if there is space");
    drop(alone);
    let store = Store::open(folder.path()).unwrap();
    assert!(store.is_shared() && store.get(ONE).unwrap().is_none());
}
