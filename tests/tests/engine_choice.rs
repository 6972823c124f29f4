//! Which engine is taken, as a user meets it. The machine decides: one without hardware virtualization refuses the kvm
//! engine with the reason, one with it takes that engine by itself.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use bathy_tests::kept::Home;
use bathy_tests::{Ran, finish, has_hardware, promptly};
use serde_json::Value;

/// How long an answer about the machine may take, where a guest does not end by itself.
const SOON: Duration = Duration::from_secs(6);

/// Runs `bathy` with the variable set.
fn with_variable(home: &Home, value: &str, arguments: &[&str]) -> Ran {
    finish(home.command(arguments).env("BATHY_ENGINE", value), b"")
}

/// Runs `bathy` with nothing but its arguments to go by.
fn without_variable(home: &Home, arguments: &[&str]) -> Ran {
    finish(home.command(arguments).env_remove("BATHY_ENGINE"), b"")
}

#[track_caller]
fn json(ran: &Ran) -> Value {
    let reported = serde_json::from_str(&ran.stdout);
    assert!(reported.is_ok(), "{ran:?}");
    reported.unwrap()
}

#[track_caller]
fn assert_refused(ran: &Ran, words: &[&str]) {
    assert_eq!(ran.code, Some(125), "{ran:?}");
    for words in words {
        assert!(ran.stderr.contains(words), "{words:?} is not in {}", ran.stderr);
    }
}

#[test]
fn the_doctor_tells_soon_what_kvm_is_and_which_engine_is_taken() {
    let home = Home::new();
    let ran = without_variable(&home, &["doctor", "--json"]);
    assert!(ran.took < promptly(SOON), "{:?}", ran.took);
    let diagnosis = json(&ran);
    let reason = diagnosis["engine_reason"].as_str().unwrap();
    let verdict = diagnosis["kvm"]["verdict"].as_str().unwrap();
    if has_hardware() {
        assert_eq!((&diagnosis["engine"], verdict), (&"kvm".into(), "hardware"), "{reason}");
    } else {
        assert_eq!(diagnosis["engine"], "uml");
        assert!(reason.contains("/dev/kvm") && ["not_hardware", "absent"].contains(&verdict), "{reason}");
    }
    let ran = without_variable(&home, &["doctor"]);
    assert!(ran.took < promptly(SOON), "{:?}", ran.took);
    let line = format!("\nengine: {} (", diagnosis["engine"].as_str().unwrap());
    assert!(ran.stdout.contains(&line), "{}", ran.stdout);
    let checks = diagnosis["checks"].as_array().unwrap();
    for kernel in ["guest kernel (kvm)", "guest kernel (uml)"] {
        assert!(checks.iter().any(|check| check["name"] == kernel), "{kernel}: {}", ran.stdout);
    }
}

#[test]
fn what_the_doctor_found_is_kept_for_the_next_start_and_mended_if_it_is_damaged() {
    if !Path::new("/dev/kvm").exists() {
        return;
    }
    let home = Home::new();
    let file = home.state().join("kvm.json");
    fs::create_dir(home.state()).unwrap();
    for damaged in ["", "{\"device\":", "\0\0\0\0"] {
        fs::write(&file, damaged).unwrap();
        let found = json(&without_variable(&home, &["doctor", "--json"]))["kvm"].clone();
        let kept: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        assert_eq!(kept["verdict"], found);
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let left = fs::read_dir(home.state()).unwrap().count();
    assert_eq!(left, 1, "nothing of the writing is left");
}

#[test]
fn kvm_is_refused_everywhere_with_the_reason_where_the_machine_lacks_it() {
    if has_hardware() {
        return;
    }
    let home = Home::new();
    let reason = if Path::new("/dev/kvm").exists() {
        "The kvm engine cannot be used: /dev/kvm is not hardware virtualization: a probe guest"
    } else {
        "The kvm engine cannot be used: there is no /dev/kvm"
    };
    let cases: [&[&str]; 5] = [
        &["run", "--engine", "kvm", "--", "true"],
        &["run", "--detach", "--engine", "kvm", "--", "true"],
        &["create", "--engine", "kvm"],
        &["code", "--engine", "kvm", "-c", "1"],
        // One CPU more than there are would be refused as well, but that is not the first thing to know.
        &["run", "--engine", "kvm", "--cpus", "4096", "--", "true"],
    ];
    for arguments in cases {
        let ran = without_variable(&home, arguments);
        assert_refused(&ran, &[reason, "use --engine uml, or leave --engine out"]);
        assert!(ran.took < promptly(SOON), "{arguments:?}: {:?}", ran.took);
    }
    let ran = with_variable(&home, "kvm", &["run", "--", "true"]);
    assert_refused(&ran, &[reason, "set BATHY_ENGINE to uml, or unset it"]);
    let ran = with_variable(&home, "kvm", &["doctor"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stdout.contains("FAIL  engine") && ran.stdout.contains("engine: none"), "{}", ran.stdout);
    assert_eq!(home.ok(&["ls", "-q"]), "", "nothing was made");
}

#[test]
fn a_variable_that_is_no_engine_is_refused_and_not_looked_at_where_the_engine_is_named() {
    let home = Home::new();
    let words = ["BATHY_ENGINE is \"nonsense\"", "kvm, uml or auto"];
    for arguments in [&["run", "--", "true"][..], &["create"], &["code", "-c", "1"], &["setup"]] {
        assert_refused(&with_variable(&home, "nonsense", arguments), &words);
    }
    let ran = with_variable(&home, "nonsense", &["doctor", "--json"]);
    assert_eq!((ran.code, &json(&ran)["engine"]), (Some(1), &Value::Null), "{ran:?}");
    let ran = with_variable(&home, "nonsense", &["run", "--engine", "uml", "--", "echo", "fine"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "fine\n"), "{ran:?}");
}

#[test]
fn several_cpus_take_kvm_and_no_more_than_there_are() {
    let home = Home::new();
    for engine in [&["--engine", "uml"][..], &[]] {
        if engine.is_empty() && has_hardware() {
            continue;
        }
        for verb in [&["run"][..], &["create"]] {
            let arguments = [verb, engine, &["--cpus", "2", "--", "true"]].concat();
            let ran = without_variable(&home, &arguments);
            assert_refused(&ran, &["2 CPUs", "exactly one", "More take the kvm engine", "Use --cpus 1"]);
            assert!(ran.stderr.contains("/dev/kvm") || !engine.is_empty(), "{}", ran.stderr);
        }
    }
    assert_refused(&without_variable(&home, &["run", "--cpus", "0", "--", "true"]), &["without a CPU"]);
    if has_hardware() {
        let cpus = std::thread::available_parallelism().unwrap();
        let ran = without_variable(&home, &["run", "--cpus", "4096", "--", "true"]);
        assert_refused(&ran, &["more than a sandbox can have on this machine", &format!("({cpus})")]);
        let ran = without_variable(&home, &["run", "--uml-mode", "ptrace", "--", "true"]);
        assert_refused(&ran, &["belongs to the uml engine", "--engine uml"]);
    }
}

#[test]
fn results_and_records_tell_the_engine_and_why() {
    let home = Home::new();
    let taken = if has_hardware() { "kvm" } else { "uml" };
    let reported = json(&without_variable(&home, &["run", "--json", "--", "true"]));
    assert_eq!((&reported["engine"], &reported["exit_code"]), (&taken.into(), &0.into()), "{reported}");
    assert!(reported["engine_reason"].as_str().unwrap().contains("/dev/kvm"), "{reported}");

    let ran = without_variable(&home, &["create", "--name", "open", "--json"]);
    let made = json(&ran);
    assert_eq!((&made["engine"], &made["spec"]["engine"]), (&taken.into(), &"auto".into()), "{made}");
    assert_eq!(made["engine_reason"], reported["engine_reason"]);
    // The choice is made anew at every start.
    let ran = with_variable(&home, "uml", &["start", "open"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let started = home.inspect("open");
    assert_eq!(
        (&started["engine"], &started["engine_reason"]),
        (&"uml".into(), &"asked for by BATHY_ENGINE".into()),
        "{started}"
    );
}
