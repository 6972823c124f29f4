//! `bathy run` as its users see it.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::process::{Command, Stdio};
use std::time::Duration;

use bathy_tests::{Ran, bathy, engine, finish, patient_seconds, promptly, run};

#[track_caller]
fn assert_ran(ran: &Ran, code: i32, stdout: &str) {
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(code), stdout), "{}", ran.stderr);
}

#[test]
fn hello_from_python() {
    assert_ran(&run(&["run", "--", "python3", "-c", "print('hello')"]), 0, "hello\n");
}

#[test]
fn the_guest_has_our_kernel_and_its_own_user_and_the_exit_code_passes() {
    let ran = run(&["run", "--", "sh", "-c", "uname -r; id -u; exit 7"]);
    assert_eq!(ran.code, Some(7), "{}", ran.stderr);
    let lines: Vec<_> = ran.stdout.lines().collect();
    assert!(lines[0].contains("bathysphere"), "{lines:?}");
    assert_eq!(lines[1], "1000");
}

#[test]
fn input_passes_through() {
    assert_ran(&finish(Command::new(bathy()).args(["run", "--", "cat"]), b"hi\n"), 0, "hi\n");
}

#[test]
fn megabytes_pass_through_unchanged_in_both_directions() {
    let input: Vec<u8> = (0..3_000_000_u32)
        .map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes()[3] % 64 + 32)
        .collect();
    let ran = finish(Command::new(bathy()).args(["run", "--", "cat"]), &input);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stdout.as_bytes() == input, "{} bytes came back of {}", ran.stdout.len(), input.len());
}

#[test]
fn the_two_outputs_stay_apart() {
    let ran = run(&["run", "--", "sh", "-c", "echo out; echo err >&2"]);
    assert_ran(&ran, 0, "out\n");
    assert_eq!(ran.stderr, "err\n");
}

#[test]
fn a_flood_on_one_output_does_not_hold_up_the_other() {
    // Standard output is not read at all until standard error has arrived: only windows per channel allow that.
    let mut child = Command::new(bathy())
        .args(["run", "--", "sh", "-c", "(head -c 1000000 /dev/zero) & sleep 0.3; echo through >&2; wait"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stderr.take().unwrap()), &mut line)
        .unwrap();
    assert_eq!(line, "through\n");
    let mut zeros = Vec::new();
    std::io::Read::read_to_end(&mut child.stdout.take().unwrap(), &mut zeros).unwrap();
    assert_eq!(zeros.len(), 1_000_000);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_timeout_ends_the_command_with_124() {
    let ran = run(&["run", "--timeout", &patient_seconds(2), "--", "sleep", "600"]);
    assert_eq!(ran.code, Some(124));
    assert!(ran.took < promptly(Duration::from_secs(3)), "{:?}", ran.took);
    assert!(ran.stderr.contains("--timeout"), "{}", ran.stderr);
}

#[test]
fn a_signal_in_the_guest_is_128_and_its_number() {
    assert_eq!(run(&["run", "--", "sh", "-c", "kill -9 $$"]).code, Some(137));
    assert_eq!(run(&["run", "--", "sh", "-c", "kill -TERM $$"]).code, Some(143));
}

#[test]
fn the_usual_libraries_are_there() {
    let script =
        "import numpy, pandas, matplotlib, requests; print(int(pandas.DataFrame({'a':[1,2]}).sum()['a']))";
    assert_ran(&run(&["run", "--", "python3", "-c", script]), 0, "3\n");
    assert_ran(&run(&["run", "--", "node", "-e", "console.log(6*7)"]), 0, "42\n");
    let tools = run(&[
        "run",
        "--",
        "sh",
        "-c",
        "pip --version && git --version && curl --version && ls /etc/ssl/certs/ca-certificates.crt",
    ]);
    assert_eq!(tools.code, Some(0), "{}{}", tools.stdout, tools.stderr);
}

#[test]
fn programs_that_cannot_be_run_have_their_own_codes() {
    let missing = run(&["run", "--", "no-such-program"]);
    assert_eq!(missing.code, Some(127));
    assert!(missing.stderr.contains("no-such-program"), "{}", missing.stderr);
    let image = run(&["run", "debian", "echo"]);
    assert!(image.code == Some(127) && image.stderr.contains("bathy run --image debian"), "{image:?}");
    assert_eq!(run(&["run", "--", "/etc/passwd"]).code, Some(126));
    assert_eq!(run(&["run", "--", "/etc"]).code, Some(126));
}

#[test]
fn environment_folder_and_user_are_as_asked_for() {
    let ran = run(&[
        "run",
        "-e",
        "GREETING=a b",
        "-w",
        "/usr",
        "-u",
        "root",
        "--",
        "sh",
        "-c",
        "echo \"$GREETING $PWD $(id -u) $HOME\"",
    ]);
    assert_ran(&ran, 0, "a b /usr 0 /root\n");
    let ran = run(&["run", "--", "sh", "-c", "echo $PWD $USER $HOME $LANG"]);
    assert_ran(&ran, 0, "/home/user user /home/user C.UTF-8\n");
    assert_ran(&run(&["run", "--", "sudo", "id", "-u"]), 0, "0\n");
}

#[test]
fn a_command_needs_no_dashes_and_gets_the_callers_variables() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(".env");
    std::fs::write(&file, "# ours\nFROM_FILE=file\nOVER=file\n").unwrap();
    let script = "echo $PASSED $FROM_FILE $OVER; shift; echo $@";
    let ran = finish(
        Command::new(bathy())
            .args(["run", "--timeout", "10m", "-e", "PASSED", "-e", "OVER=option", "--env-file"])
            .arg(&file)
            .args(["sh", "-c", script, "sh", "first", "-e", "--", "last"])
            .env("PASSED", "passed on"),
        b"",
    );
    assert_ran(&ran, 0, "passed on file option\n-e -- last\n");
}

#[test]
fn a_command_that_fails_for_want_of_a_file_of_the_hosts_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("s.py"), "print(1)").unwrap();
    let ran = finish(Command::new(bathy()).args(["run", "python3", "s.py"]).current_dir(folder.path()), b"");
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("s.py is a file of this machine"), "{ran:?}");
    assert!(ran.stderr.contains("`bathy run python3 - < FILE`"), "{ran:?}");
    let ran = finish(Command::new(bathy()).args(["run", "true", "s.py"]).current_dir(folder.path()), b"");
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
}

#[test]
fn numpy_works_in_little_memory_or_is_ended_and_never_hangs() {
    let code = "import numpy; print(numpy.arange(4).sum())";
    for (memory, works) in [("64M", false), ("96M", false), ("128M", true), ("144M", true)] {
        let ran = run(&["run", "-m", memory, "--timeout", &patient_seconds(60), "python3", "-c", code]);
        let ended = [Some(1), Some(137)].contains(&ran.code);
        assert!(ran.code == Some(0) && ran.stdout == "6\n" || ended && !works, "{memory}: {ran:?}");
    }
}

#[test]
fn requests_that_cannot_be_met_are_refused_with_the_reason() {
    let cases: [(&[&str], &str); 15] = [
        (&["--timeout", "1e19", "--", "true"], "is not a length of time"),
        (&["--timeout=-1", "--", "true"], "is not a length of time"),
        (&["--timeout", "400d", "--", "true"], "a year"),
        (&["-e", "BATHY_NO_SUCH_VARIABLE", "true"], "is not set here"),
        (&["-v", "/tmp:/tmp", "true"], "no directory of this machine can be mounted"),
        (&["--image", "nope", "--pull", "never", "--", "true"], "library/nope:latest is not on this machine"),
        (&["--image", "Nope", "--", "true"], "Did you mean `nope`?"),
        (&["--"], "The command is empty"),
        (&["--", ""], "The command is empty"),
        (&["--memory", "1M", "--", "true"], "too little"),
        (&["--memory", "900G", "--", "true"], "more than this machine has"),
        (&["--memory", "lots", "--", "true"], "is not a size"),
        (&["--disk", "1K", "--", "true"], "The least is 16M"),
        (&["-u", "stranger", "--", "true"], "no user \"stranger\""),
        (&["-w", "/nowhere", "--", "true"], "/nowhere"),
    ];
    for (arguments, reason) in cases {
        let ran = run(&[&["run"], arguments].concat());
        assert_eq!(ran.code, Some(125), "{arguments:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(reason), "{arguments:?}: {}", ran.stderr);
    }
}

#[test]
fn json_holds_the_result_and_every_phase() {
    let ran = run(&["run", "--json", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert_eq!(ran.code, Some(3), "{}", ran.stderr);
    let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["exit_code"], 3);
    assert_eq!(report["stdout"]["text"], "out\n");
    assert_eq!(report["stderr"]["text"], "err\n");
    assert_eq!(report["engine"], engine().name());
    for phase in
        ["prepare", "spawn", "jail", "kernel", "mounts", "ready", "first_byte", "exit", "cleanup", "total"]
    {
        assert!(report["phases_ms"][phase].is_number(), "{phase}: {report}");
    }
}

#[test]
fn ptrace_mode_runs_the_same_commands() {
    let ran = run(&[
        "run",
        "--engine",
        "uml",
        "--uml-mode",
        "ptrace",
        "--",
        "python3",
        "-c",
        "import os; print(os.fork() >= 0)",
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(ran.stdout, "True\nTrue\n");
}

#[test]
fn orphans_are_reaped() {
    let script = "for i in 1 2 3 4 5; do (sleep 0.05 &) ; done; sleep 0.5; ps -e -o stat= | grep -c Z; true";
    assert_ran(&run(&["run", "--", "sh", "-c", script]), 0, "0\n");
}

#[test]
fn a_command_is_over_when_it_ends_whatever_its_children_still_write() {
    let ran =
        run(&["run", "--timeout", &patient_seconds(20), "--", "sh", "-c", "yes >&2 & echo first; exit 3"]);
    assert_ran(&ran, 3, "first\n");
}

#[test]
fn output_that_cannot_be_written_is_an_error_and_no_panic() {
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    for (arguments, code) in [(&["run", "--", "echo", "x"][..], 125), (&["doctor"][..], 125)] {
        let output =
            Command::new(bathy()).args(arguments).stdin(Stdio::null()).stdout(full()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(stderr.contains("No space left on device"), "{arguments:?}: {stderr}");
    }
}

#[test]
fn the_disk_has_the_size_that_was_asked_for() {
    let script = "dd if=/dev/zero of=/tmp/big bs=1M count=64 2>&1 | grep -o 'No space left on device'; sync; du -m /tmp/big | cut -f1";
    let ran = run(&["run", "--disk", "48M", "--", "sh", "-c", script]);
    let lines: Vec<_> = ran.stdout.lines().collect();
    assert_eq!(lines.first(), Some(&"No space left on device"), "{ran:?}");
    assert!(lines[1].parse::<u32>().unwrap() <= 48, "{ran:?}");
}

#[test]
fn doctor_tells_which_engine_and_that_all_is_well() {
    let ran = run(&["doctor", "--json"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    let diagnosis: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(diagnosis["healthy"], true);
    assert_eq!(diagnosis["engine"], engine().name());
    let names: Vec<_> =
        diagnosis["checks"].as_array().unwrap().iter().map(|check| check["name"].as_str().unwrap()).collect();
    for name in [
        "user namespaces",
        "seccomp",
        "Landlock",
        "cgroups",
        "processor time",
        "memory",
        "cache folder",
        "guest kernel (kvm)",
        "guest kernel (uml)",
        "image",
        "KVM",
    ] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    assert!(ran.took < promptly(Duration::from_secs(6)), "{:?}", ran.took);
}
