use std::cell::Cell;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::probe_cache::{Device, FILE, ProbeCache};
use super::*;

fn asked(wanted: Engine, variable: Option<&str>) -> Result<Asked, EngineError> {
    Asked::of(wanted, variable.map(OsString::from))
}

fn decided(wanted: Engine, variable: Option<&str>, support: &KvmSupport) -> Result<Choice, EngineError> {
    decide(&asked(wanted, variable)?, || support.clone())
}

fn not_for_us() -> [KvmSupport; 6] {
    [
        KvmSupport::NotHardware { milliseconds: 1500 },
        KvmSupport::Absent,
        KvmSupport::NoPermission { group: "kvm".to_owned() },
        KvmSupport::NoPermission { group: "root".to_owned() },
        KvmSupport::NoProcessor,
        KvmSupport::Broken { reason: "no guests today".to_owned() },
    ]
}

const HARDWARE: KvmSupport = KvmSupport::Hardware { milliseconds: 30 };

#[test]
fn an_open_choice_is_kvm_on_hardware_and_uml_with_the_reason_elsewhere() {
    let choice = decided(Engine::Auto, None, &HARDWARE).unwrap();
    assert_eq!(choice, Choice { engine: Chosen::Kvm, reason: HARDWARE.to_string() });
    for support in not_for_us() {
        let choice = decided(Engine::Auto, None, &support).unwrap();
        assert_eq!(choice, Choice { engine: Chosen::Uml, reason: support.to_string() });
    }
}

#[test]
fn kvm_is_refused_where_it_is_not_hardware_with_reason_and_hint() {
    for support in not_for_us() {
        let error = decided(Engine::Kvm, None, &support).unwrap_err().to_string();
        assert!(error.contains(&support.to_string()), "{error}");
        assert!(error.contains("Without it: use --engine uml, or leave --engine out"), "{error}");
    }
    let error =
        decided(Engine::Kvm, None, &KvmSupport::NoPermission { group: "kvm".to_owned() }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "The kvm engine cannot be used: /dev/kvm may only be used by root and the group kvm. To use it: \
         usermod -aG kvm $USER, then log in again. Without it: use --engine uml, or leave --engine out"
    );
    assert_eq!(decided(Engine::Kvm, None, &HARDWARE).unwrap().engine, Chosen::Kvm);
}

#[test]
fn the_variable_stands_for_the_option_where_the_choice_is_open() {
    let absent = KvmSupport::Absent;
    let choice = |wanted, variable| decided(wanted, Some(variable), &HARDWARE).unwrap();
    assert_eq!(
        choice(Engine::Auto, "uml"),
        Choice { engine: Chosen::Uml, reason: "asked for by BATHY_ENGINE".to_owned() }
    );
    assert_eq!(choice(Engine::Auto, "kvm").reason, "asked for by BATHY_ENGINE");
    for same in ["auto", ""] {
        assert_eq!(choice(Engine::Auto, same), decided(Engine::Auto, None, &HARDWARE).unwrap());
    }
    let error = decided(Engine::Auto, Some("kvm"), &absent).unwrap_err().to_string();
    assert!(
        error.contains("there is no /dev/kvm. Without it: set BATHY_ENGINE to uml, or unset it"),
        "{error}"
    );
    // An explicit option makes the variable irrelevant, even an invalid one.
    assert_eq!(choice(Engine::Uml, "kvm").reason, "asked for");
    assert_eq!(choice(Engine::Kvm, "nonsense").engine, Chosen::Kvm);
    for nonsense in ["nonsense", "KVM", "uml ", "qemu"] {
        let error = decided(Engine::Auto, Some(nonsense), &absent).unwrap_err();
        assert_eq!(error, EngineError::Variable(nonsense.into()));
        assert!(error.to_string().contains("kvm, uml or auto"), "{error}");
    }
}

#[test]
fn nothing_is_tried_for_uml() {
    let looked = Cell::new(false);
    let asked = asked(Engine::Uml, None).unwrap();
    let choice = decide(&asked, || {
        looked.set(true);
        HARDWARE
    });
    assert_eq!((choice.unwrap().engine, looked.get()), (Chosen::Uml, false));
}

#[test]
fn what_was_found_is_remembered_for_the_same_device_and_boot() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("new/state");
    let cache = ProbeCache::of(&state);
    let device = Device::of(&File::open("/dev/null").unwrap()).unwrap();
    assert_eq!(cache.get(&device), None);
    for support in [KvmSupport::NotHardware { milliseconds: 1500 }, HARDWARE] {
        cache.put(device.clone(), support.clone());
        assert_eq!(cache.get(&device), Some(support));
    }
    let file = fs::metadata(state.join(FILE)).unwrap();
    assert_eq!((file.mode() & 0o777, fs::metadata(&state).unwrap().mode() & 0o777), (0o600, 0o700));
    assert_eq!(fs::read_dir(&state).unwrap().count(), 1, "nothing else is left");
    let other = Device::of(&File::open("/dev/zero").unwrap()).unwrap();
    assert_eq!(cache.get(&other), None, "another device");
    let text = fs::read_to_string(state.join(FILE)).unwrap();
    let boot = bathy_spec::host::boot_id();
    assert!(text.contains(&boot), "{text}");
    fs::write(state.join(FILE), text.replace(&boot, "another boot")).unwrap();
    assert_eq!(cache.get(&device), None, "another boot");
}

#[test]
fn a_guest_that_did_not_finish_is_tried_again_after_a_while_and_one_that_failed_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ProbeCache::of(folder.path());
    let device = Device::of(&File::open("/dev/null").unwrap()).unwrap();
    cache.put(device.clone(), not_for_us()[5].clone());
    assert_eq!(cache.get(&device), None, "a failure");
    let age = |support: KvmSupport| {
        cache.put(device.clone(), support);
        let hour_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
        File::options().write(true).open(folder.path().join(FILE)).unwrap().set_modified(hour_ago).unwrap();
        cache.get(&device)
    };
    let slow = KvmSupport::NotHardware { milliseconds: 1500 };
    assert_eq!(age(slow.clone()), None);
    assert_eq!(cache.get_of_any_age(&device), Some(slow), "where no probe is run, the reason stays the same");
    assert_eq!(age(HARDWARE), Some(HARDWARE), "hardware stays hardware");
}

#[test]
fn permission_is_never_remembered() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ProbeCache::of(folder.path());
    let device = Device::of(&File::open("/dev/null").unwrap()).unwrap();
    for support in &not_for_us()[1..5] {
        cache.put(device.clone(), support.clone());
        assert!(!folder.path().join(FILE).exists(), "{support}");
    }
    // A forged entry is not used either.
    cache.put(device.clone(), HARDWARE);
    let text = fs::read_to_string(folder.path().join(FILE)).unwrap();
    let forged = text.replace(r#"{"verdict":"hardware","milliseconds":30}"#, r#"{"verdict":"absent"}"#);
    assert_ne!(forged, text);
    fs::write(folder.path().join(FILE), forged).unwrap();
    assert_eq!(cache.get(&device), None);
}

#[test]
fn a_damaged_memory_is_none_and_is_written_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    let cache = ProbeCache::of(folder.path());
    let device = Device::of(&File::open("/dev/null").unwrap()).unwrap();
    cache.put(device.clone(), HARDWARE);
    let whole = fs::read(&path).unwrap();
    let long = [&whole[..], &vec![b' '; 5000][..], b"x"].concat();
    for damaged in [&b""[..], b"{", b"\xff\xfe", b"[]", b"null", &whole[..whole.len() - 1], &long] {
        fs::write(&path, damaged).unwrap();
        let known = cache.get(&device);
        // An entry that is only padded is still valid.
        assert!(known.is_none() || damaged == long, "{damaged:?}");
        cache.put(device.clone(), HARDWARE);
        assert_eq!(cache.get(&device), Some(HARDWARE));
    }
    // A symbolic link is not followed, neither for reading nor for writing.
    let elsewhere = folder.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    assert_eq!(cache.get(&device), None);
    cache.put(device, KvmSupport::NotHardware { milliseconds: 1 });
    assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
    assert_eq!(fs::read(&elsewhere).unwrap(), whole);
}

#[test]
fn a_folder_that_cannot_be_written_does_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o400)).unwrap();
    let cache = ProbeCache::of(&file);
    let device = Device::of(&File::open("/dev/null").unwrap()).unwrap();
    cache.put(device.clone(), HARDWARE);
    assert_eq!(cache.get(&device), None);
}

#[test]
fn an_engine_that_the_operator_requires_is_not_argued_with() {
    let asked = Asked { engine: Engine::Kvm, by: By::Operator };
    let error = decide(&asked, || KvmSupport::Absent).unwrap_err().to_string();
    assert!(error.contains("ask your operator") && !error.contains("--engine"), "{error}");
    assert_eq!(decide(&asked, || HARDWARE).unwrap().reason, "required by the operator");
}
