//! Tests of the Bash driver, which is run natively with the agent's protocol.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

mod support;

use std::time::Duration;

use support::bash::start;
use support::{Cell, Driver, Look};

/// The standard output of a cell, which must succeed.
fn output(driver: &mut Driver, code: &str) -> String {
    let cell = driver.execute(code);
    assert_eq!(cell.status(), "ok", "{code}: {cell:#?}");
    cell.stdout
}

/// The name and value of a cell's error.
fn error(cell: &Cell) -> (&str, &str) {
    let error = cell.one('e');
    assert_eq!(cell.status(), "error");
    (error["name"].text(), error["value"].text())
}

#[test]
fn variables_functions_aliases_options_and_the_directory_last() {
    let mut driver = start();
    output(
        &mut driver,
        "x=1; declare -A m=([k]=v)\nf() { echo \"f $1\"; }\nalias a='echo alias'\nshopt -s nullglob\ncd /usr",
    );
    assert_eq!(
        output(&mut driver, "echo $x ${m[k]}; f 2; a; shopt -q nullglob && pwd"),
        "1 v\nf 2\nalias\n/usr\n"
    );
}

#[test]
fn here_documents_work_and_lines_are_counted_from_the_cells_own() {
    let mut driver = start();
    assert_eq!(output(&mut driver, "cat <<END\na $((1 + 1))\nEND\necho $LINENO"), "a 2\n4\n");
    let cell = driver.execute("\n\nno-such-command");
    assert!(cell.stderr.contains("line 3: no-such-command: command not found"), "{cell:#?}");
    assert!(!cell.stderr.contains("__ctx"), "{cell:#?}");
    assert_eq!(error(&cell), ("ExitStatus", "127"));
}

#[test]
fn the_status_of_the_last_command_is_the_cells() {
    let mut driver = start();
    assert_eq!(error(&driver.execute("true; (exit 3)")), ("ExitStatus", "3"));
    assert_eq!(error(&driver.execute("return 5")), ("ExitStatus", "5"));
    assert_eq!(driver.execute("false; true").status(), "ok");
    assert_eq!(driver.execute(":").count(), 4.0);
}

#[test]
fn a_syntax_error_is_reported_with_its_line_and_the_state_stays() {
    let mut driver = start();
    output(&mut driver, "x=old");
    let cell = driver.execute("echo before\nif; then");
    assert_eq!(cell.stdout, "before\n");
    let (name, value) = error(&cell);
    assert_eq!(name, "SyntaxError");
    assert!(value.starts_with("line 2: syntax error"), "{value}");
    assert!(cell.traceback().starts_with("bash: line 2:"), "{cell:#?}");
    assert_eq!(error(&driver.execute("echo \"open")).0, "SyntaxError");
    assert_eq!(output(&mut driver, "echo $x"), "old\n");
}

#[test]
fn errexit_ends_the_cell_and_not_the_process() {
    let mut driver = start();
    let cell = driver.execute("x=1; set -e; f() { (exit 4); echo not here; }; f; echo not here either");
    assert_eq!((error(&cell), cell.stdout.as_str()), (("ExitStatus", "4"), ""));
    let cell = driver.execute("echo $x; false; echo not here");
    assert_eq!((error(&cell), cell.stdout.as_str()), (("ExitStatus", "1"), "1\n"), "the option is state too");
    assert_eq!(output(&mut driver, "set +e; false; echo on"), "on\n");
}

#[test]
fn exit_ends_the_process() {
    let mut driver = start();
    assert_eq!(driver.execute("exit 4").ended.unwrap().code(), Some(4));
}

#[test]
fn an_interrupt_ends_loops_functions_and_children_and_keeps_the_state() {
    let mut driver = start();
    output(&mut driver, "x=old; f() { while :; do :; done; }");
    for code in [
        "while :; do :; done",
        "while f; do f; done",
        "sleep 30",
        "g() { for ((;;)); do sleep 30; done; }; g | cat",
        "echo $(sleep 30)",
        "sleep 30 & wait",
        "until false; do ( sleep 30 ); done",
    ] {
        driver.begin(&format!("echo go\n{code}\necho not here >&2"), "", "", &[]);
        driver.wait_for_output("go");
        let cell = driver.finish_interrupted();
        assert_eq!(error(&cell).0, "Interrupted", "{code}");
        assert!(!cell.stderr.contains("not here"), "{code}: {cell:#?}");
        assert!(cell.took < Duration::from_secs(20), "{code} took {:?}", cell.took);
        assert_eq!(output(&mut driver, "echo $x"), "old\n");
    }
}

#[test]
fn an_interrupt_between_cells_is_nothing() {
    let mut driver = start();
    output(&mut driver, "x=old");
    driver.interrupt();
    assert_eq!(output(&mut driver, "echo $x"), "old\n");
}

#[test]
fn environment_and_directory_are_for_one_cell_and_never_code() {
    let mut driver = start();
    output(&mut driver, "old=1; cd /usr");
    let cell = driver.execute_with(
        "printf '%s\\n' \"$odd\" \"$old\"; pwd; env | grep -c ^odd=",
        "/tmp",
        "",
        &["odd=$(id) \"'; echo", "old=2"],
    );
    assert_eq!(cell.stdout, "$(id) \"'; echo\n2\n/tmp\n1\n");
    assert_eq!(
        output(&mut driver, "echo \"[$odd]\" $old; pwd; env | grep -c ^old= || true"),
        "[] 1\n/usr\n0\n"
    );
    let cell = driver.execute_with("echo not here", "/no/such/folder", "", &[]);
    assert_eq!((error(&cell).0, cell.stdout.as_str()), ("DirectoryError", ""));
}

#[test]
fn redirections_end_with_the_cell() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("out");
    let mut driver = start();
    assert_eq!(output(&mut driver, &format!("exec >{} 2>&1; echo to the file", file.display())), "");
    assert_eq!(support::read_text(&file), "to the file\n");
    assert_eq!(output(&mut driver, "exec 1>&- 2>&-"), "");
    let cell = driver.execute("echo out; echo err >&2");
    assert_eq!((cell.stdout.as_str(), cell.stderr.as_str()), ("out\n", "err\n"));
}

#[test]
fn cells_find_no_descriptor_of_the_driver_and_no_input() {
    let mut driver = start();
    assert_eq!(
        output(&mut driver, "for n in 3 4 5 6 7 9; do [ -e /proc/self/fd/$n ] && echo $n; done; true"),
        ""
    );
    assert_eq!(
        output(&mut driver, "ls /proc/self/fd | grep -x '[0-9]' | tr '\\n' ' '"),
        "0 1 2 3 ",
        "the last is what ls reads"
    );
    assert_eq!(output(&mut driver, "read line; echo $?"), "1\n");
}

#[test]
fn jobs_go_on_after_their_cell() {
    let folder = tempfile::tempdir().unwrap();
    let mut driver = start();
    output(&mut driver, &format!("cd {}; {{ sleep 0.2; echo done >job; }} &", folder.path().display()));
    assert_eq!(output(&mut driver, "wait; cat job"), "done\n");
}

#[test]
fn tracing_and_functions_of_known_names_do_not_reach_the_driver() {
    let mut driver = start();
    let cell = driver.execute("set -x; echo traced");
    assert!(cell.stderr.contains("echo traced") && !cell.stderr.contains("__ctx"), "{cell:#?}");
    let cell = driver.execute("set +x; source() { echo fake; }; cd() { echo fake; }; trap() { echo fake; }; printf() { echo fake; }");
    assert!(!cell.stderr.contains("__ctx"), "{cell:#?}");
    assert_eq!(driver.execute_with("echo real", "/tmp", "", &["a=b"]).stdout, "real\n");
    assert_eq!(output(&mut driver, "break; continue; echo on"), "on\n");
    assert_eq!(output(&mut driver, "IFS=0; set -f; echo 1"), "1\n");
}

#[test]
fn five_megabytes_of_code_run() {
    let mut driver = start();
    let code = format!("x={}\necho ${{#x}}", "y".repeat(5 << 20));
    assert_eq!(output(&mut driver, &code), format!("{}\n", 5 << 20));
    let code = format!("{}echo $LINENO", ": a comment\n".repeat(100_000));
    assert_eq!(output(&mut driver, &code), "100001\n");
}
