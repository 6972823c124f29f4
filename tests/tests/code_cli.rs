//! Code on the command line: `bathy code`, `bathy repl`, and what they show.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bathy_tests::kept::{Home, signal, until};
use bathy_tests::{Ran, bathy, finish, limit, patience, patient_seconds, promptly};
use rustix::process::Signal;
use serde_json::Value;

/// Displays a picture of one pixel.
const DOT: &str = "
import base64
class Dot:
    def _repr_png_(self):
        return base64.b64decode('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==')
Dot()
";

#[track_caller]
fn shown(ran: &Ran, code: i32, stdout: &str) {
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(code), stdout), "{}", ran.stderr);
}

/// Starts a command and waits for the output that shows that it has begun.
fn begun(mut command: Command) -> Child {
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "begun\n");
    child
}

#[test]
fn code_runs_in_a_sandbox_of_its_own() {
    let home = Home::new();
    shown(&home.run(&["code", "-c", "print('hi')\n6 * 7"]), 0, "hi\n42\n");
    shown(&home.run_with(&["code"], b"x = 'from input'\nx"), 0, "'from input'\n");
    shown(&home.run_with(&["code", "--lang", "bash", "-"], b"echo $A; cd /usr; pwd"), 0, "\n/usr\n");
    fs::write(home.path().join("a.sh"), "echo file $A; pwd; exit 7").unwrap();
    shown(&home.run(&["code", "-e", "A=b", "-w", "/tmp", "a.sh"]), 7, "file b\n/tmp\n");
    assert_eq!(home.ok(&["ls", "-q"]), "");
    // It is in the record, from its making to its end.
    let Value::Array(events) = home.json(&["events", "--json"]) else { unreachable!() };
    let kinds: Vec<&str> = events.iter().filter_map(|event| event["event"].as_str()).take(5).collect();
    assert_eq!(kinds, ["sandbox_created", "code_started", "exec_ended", "sandbox_ended", "sandbox_removed"]);
    assert_eq!(events[1]["code"], "print('hi')\n6 * 7");
    assert_eq!(events[1]["actor"]["program"], "bathy code");
}

#[test]
fn exit_codes_tell_how_code_ended() {
    let home = Home::new();
    home.started("box", &[]);
    let run =
        |code: &str| home.run(&["code", "--sandbox", "box", "--timeout", &patient_seconds(2), "-c", code]);
    let error = run("print('before')\n1/0");
    shown(&error, 1, "before\n");
    assert!(error.stderr.contains("Traceback") && error.stderr.contains("ZeroDivisionError"), "{error:?}");
    let left = run("import os; os._exit(3)");
    assert!(left.code == Some(3) && left.stderr.contains("variables"), "{left:?}");
    assert_eq!(run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").code, Some(137));
    let late = run("import time; x = 5; time.sleep(600)");
    assert!(
        late.code == Some(124)
            && late.stderr.contains("time limit")
            && late.took < promptly(Duration::from_secs(20)),
        "{late:?}"
    );
    shown(&run("x"), 0, "5\n");
    assert!(home.fails(&["code", "--sandbox", "nosuch", "-c", "1"], 125).contains("nosuch"));
    assert!(home.fails(&["code", "--sandbox", "box", "--memory", "1G", "-c", "1"], 125).contains("--memory"));
    assert!(home.fails(&["code", "--lang", "cobol", "-c", "1"], 125).contains("python"));
    assert!(home.fails(&["code", "print(1)"], 125).contains("-c"));
    fs::write(home.path().join("what.txt"), "1").unwrap();
    assert!(home.fails(&["code", "what.txt"], 125).contains("--lang"));
}

#[test]
fn a_kept_sandbox_keeps_the_variables_of_each_context() {
    let home = Home::new();
    home.started("box", &[]);
    let run = |line: &[&str]| home.run(&[&["code", "--sandbox", "box"], line].concat());
    shown(&run(&["-c", "x = 41"]), 0, "");
    shown(&run(&["-c", "x + 1"]), 0, "42\n");
    let other = run(&["--context", "other", "-c", "x"]);
    assert!(other.code == Some(1) && other.stderr.contains("NameError"), "{other:?}");
    shown(&run(&["--context", "other", "-c", "x = 'other'"]), 0, "");
    shown(&run(&["--context", "other", "-c", "print(x)"]), 0, "other\n");
    // Variables of the environment and the folder are one cell's own.
    let where_am_i = "import os; print(os.environ.get('A'), os.getcwd())";
    shown(&run(&["-e", "A=1", "-w", "/usr", "-c", where_am_i]), 0, "1 /usr\n");
    assert!(run(&["-c", where_am_i]).stdout.starts_with("None "));
    shown(&run(&["--lang", "bash", "-c", "Y=7"]), 0, "");
    shown(&run(&["--lang", "bash", "-c", "echo $Y"]), 0, "7\n");
    assert!(run(&["--context", "a b", "-c", "1"]).stderr.contains("context"));
}

#[test]
fn json_has_everything_that_came_of_it() {
    let home = Home::new();
    home.started("box", &[]);
    let report = |code: &str| {
        let ran = home.run(&["code", "--json", "--sandbox", "box", "-c", code]);
        (ran.code, serde_json::from_str::<Value>(&ran.stdout).unwrap())
    };
    let (code, good) = report("import sys\nprint('o')\nprint('e', file=sys.stderr)\n{'a': 1}");
    assert_eq!((code, &good["exit_code"], &good["ok"]), (Some(0), &0.into(), &true.into()));
    assert_eq!((&good["stdout"]["text"], &good["stderr"]["text"]), (&"o\n".into(), &"e\n".into()));
    assert_eq!(good["results"][0]["data"]["text/plain"], "{'a': 1}");
    assert_eq!((&good["results"][0]["is_main_result"], &good["error"]), (&true.into(), &Value::Null));
    assert_eq!(
        (&good["count"], &good["fresh"], &good["state_lost"]),
        (&1.into(), &true.into(), &false.into())
    );
    let (code, bad) = report("int('x')");
    assert_eq!((code, &bad["error"]["name"], &bad["ok"]), (Some(1), &"ValueError".into(), &false.into()));
    assert!(bad["timing_ms"]["ran"].is_u64() && bad["error"]["traceback"].is_array(), "{bad}");
    let (code, gone) = report("import os; os._exit(0)");
    assert_eq!((code, &gone["state_lost"], &gone["ok"]), (Some(0), &true.into(), &false.into()));
    assert!(gone["message"].as_str().unwrap().contains("exit code 0"), "{gone}");
    let (_, after) = report("1");
    assert!(after["fresh"] == true && after["lost"].is_string(), "{after}");
}

#[test]
fn pictures_are_saved_told_or_shown() {
    let home = Home::new();
    home.started("box", &[]);
    let reported = home.run(&["code", "--sandbox", "box", "-c", DOT]);
    assert_eq!((reported.code, reported.stdout.as_str()), (Some(0), ""));
    assert!(reported.stderr.contains("1 picture (PNG, 1×1, 70 B): use --save-dir"), "{reported:?}");
    for name in ["bathy-1.png", "bathy-2.png"] {
        let saved = home.run(&["code", "--sandbox", "box", "--save-dir", "shots", "-c", DOT]);
        assert!(saved.stderr.contains(name), "{saved:?}");
        assert!(fs::read(home.path().join("shots").join(name)).unwrap().starts_with(b"\x89PNG"));
    }
    fs::write(home.path().join("dot.py"), DOT).unwrap();
    let on_terminal = |term: &str| {
        let line = format!("{} code --sandbox box dot.py", bathy().display());
        let mut command = Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).current_dir(home.path());
        command.env("XDG_STATE_HOME", home.path()).env("TERM", term);
        for name in ["TMUX", "TERM_PROGRAM", "KITTY_WINDOW_ID", "LC_TERMINAL", "BATHYSPHERE_CONFIG"] {
            command.env_remove(name);
        }
        finish(&mut command, b"").stdout
    };
    let kitty = on_terminal("xterm-kitty");
    assert!(kitty.contains("\x1b_Ga=T,f=100,q=2,m=0;iVBOR") && !kitty.contains("--save-dir"), "{kitty:?}");
    let plain = on_terminal("xterm-256color");
    assert!(plain.contains("--save-dir") && !plain.contains('\x1b'), "{plain:?}");
}

#[test]
fn c1_output_and_values_are_harmless_on_a_terminal() {
    let home = Home::new();
    home.started("box", &[]);
    let hostile =
        "class X:\n    def __repr__(self): return '\\x1b]0;owned\\x07'\nprint('\\x1b[2J')\nprint(X())\nX()";
    fs::write(home.path().join("x.py"), format!("{hostile}\n")).unwrap();
    fs::write(home.path().join("e.py"), "raise ValueError('\\x1b[31m')").unwrap();
    for file in ["x.py", "e.py"] {
        let line = format!("{} code --sandbox box {file}", bathy().display());
        let mut command = Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).current_dir(home.path());
        command.env("XDG_STATE_HOME", home.path()).env_remove("BATHYSPHERE_CONFIG");
        let shown = finish(&mut command, b"").stdout;
        assert!(shown.contains("\\u{1b}") && !shown.contains('\x1b'), "{shown:?}");
    }
}

#[test]
fn ctrl_c_interrupts_the_code_and_not_the_sandbox() {
    let home = Home::new();
    home.started("box", &[]);
    shown(&home.run(&["code", "--sandbox", "box", "-c", "x = 1"]), 0, "");
    let endless = "x = 2\nprint('begun', flush=True)\nwhile True: pass";
    let child = begun(home.command(&["code", "--sandbox", "box", "-c", endless]));
    signal(child.id(), Signal::INT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("interrupted"), "{output:?}");
    shown(&home.run(&["code", "--sandbox", "box", "-c", "x"]), 0, "2\n");
    // A reader that goes away ends the code as well.
    let mut child =
        home.command(&["code", "--sandbox", "box", "-c", "while True: print('y')"]).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(141));
    shown(&home.run(&["code", "--sandbox", "box", "-c", "x"]), 0, "2\n");
}

#[test]
fn a_second_ctrl_c_waits_for_nothing() {
    let home = Home::new();
    let stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun', flush=True)\nwhile True: pass";
    let mut child = begun(home.command(&["code", "-c", stubborn]));
    signal(child.id(), Signal::INT);
    sleep(limit(Duration::from_millis(300)));
    let second = Instant::now();
    signal(child.id(), Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(second.elapsed() < promptly(Duration::from_secs(2)), "{:?}", second.elapsed());
    until("everything is gone", 10, || home.all_processes().is_empty());
    let Value::Array(events) = home.json(&["events", "--json"]) else { unreachable!() };
    assert_eq!(events.last().unwrap()["event"], "sandbox_removed");
}

#[test]
fn repls_remember_until_they_are_removed() {
    let home = Home::new();
    assert_eq!(home.ok(&["repl", "new", "calc", "--memory", "256M"]), "calc\n");
    shown(&home.run(&["repl", "run", "calc", "-c", "x = 20"]), 0, "");
    shown(&home.run_with(&["repl", "run", "calc"], b"x += 1\nx * 2"), 0, "42\n");
    fs::write(home.path().join("a.py"), "print('file', x)").unwrap();
    shown(&home.run(&["repl", "run", "calc", "a.py"]), 0, "file 21\n");
    assert_eq!(home.run(&["repl", "run", "calc", "-c", "1/0"]).code, Some(1));
    let listed = home.json(&["repl", "ls", "--json"]);
    assert_eq!(
        (&listed[0]["name"], &listed[0]["cells"], &listed[1]),
        (&"calc".into(), &4.into(), &Value::Null)
    );
    assert!(home.ok(&["repl", "ls"]).contains("calc"));
    // A sandbox that was killed starts again with the files that were on its disk, and reports what is lost.
    let write = "import os\nwith open('kept', 'w') as f: f.write('file')\nos.sync()";
    shown(&home.run(&["repl", "run", "calc", "-c", write]), 0, "");
    home.ok(&["kill", "calc"]);
    let after = home.run(&["repl", "run", "calc", "-c", "print('x' in globals(), open('kept').read())"]);
    shown(&after, 0, "False file\n");
    assert!(after.stderr.contains("variables"), "{after:?}");
    assert!(home.fails(&["repl", "new", "calc"], 125).contains("calc"));
    assert_eq!(home.ok(&["repl", "rm", "calc"]), "calc\n");
    assert_eq!(home.ok(&["ls", "-q"]), "");
    for line in [&["repl", "rm", "calc"][..], &["repl", "run", "calc", "-c", "1"]] {
        assert!(home.fails(line, 125).contains("calc"), "{line:?}");
    }
    assert!(home.fails(&["repl"], 125).contains("terminal"));
}

/// A terminal with one command in it, played by tmux.
struct Terminal<'a> {
    home: &'a Home,
}

impl Terminal<'_> {
    fn tmux(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("tmux");
        command.args(["-L", "code-cli", "-f", "/dev/null"]).args(arguments);
        command.env_remove("TMUX").env("TMUX_TMPDIR", self.home.path()).env("LC_ALL", "C.UTF-8");
        command.output().expect("tmux is installed; ./test does it")
    }

    fn line(&self, text: &str) {
        self.tmux(&["send-keys", "-l", "--", text]);
        self.tmux(&["send-keys", "Enter"]);
    }

    #[track_caller]
    fn shows(&self, text: &str) {
        let mut screen = String::new();
        let deadline = Instant::now() + patience(Duration::from_secs(30));
        while !screen.contains(text) {
            assert!(Instant::now() < deadline, "the screen does not show {text:?} but:\n{screen}");
            sleep(Duration::from_millis(50));
            screen = String::from_utf8_lossy(&self.tmux(&["capture-pane", "-p", "-J"]).stdout).into_owned();
        }
    }
}

impl Drop for Terminal<'_> {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

#[test]
fn the_prompt_of_a_repl() {
    let home = Home::new();
    home.ok(&["repl", "new", "talk"]);
    let terminal = Terminal { home: &home };
    let state = format!("XDG_STATE_HOME={}", home.path().display());
    let program = bathy().display().to_string();
    let open = ["env", "-u", "BATHYSPHERE_CONFIG", &state, &program, "repl", "talk"];
    // Ctrl-C reaches the shell as well, which is to wait for us.
    let shell = format!("trap : INT; {}; echo left with $?; sleep 600", open.join(" "));
    terminal.tmux(&["new-session", "-d", "-x", "120", "-y", "40", "sh", "-c", &shell]);
    terminal.shows("Python in the REPL talk (it is new)");
    terminal.line("20 + 1");
    terminal.shows("\n21\n");
    // A block goes on until an empty line.
    terminal.line("for i in range(2):");
    terminal.shows("\n...");
    terminal.line("    print('turn', i)");
    terminal.line("");
    terminal.shows("turn 0\nturn 1\n");
    terminal.line("import time; time.sleep(600)");
    sleep(limit(Duration::from_millis(1500)));
    terminal.tmux(&["send-keys", "C-c"]);
    terminal.shows("KeyboardInterrupt");
    terminal.line("print('still', 'here')");
    terminal.shows("\nstill here\n");
    terminal.tmux(&["send-keys", "C-d"]);
    terminal.shows("bathy repl rm talk");
    terminal.shows("left with 0");
    shown(&home.run(&["repl", "run", "talk", "-c", "i"]), 0, "1\n");
    assert!(fs::read_to_string(home.state().join("repl_history")).unwrap().contains("20 + 1"));
}

#[test]
fn mistakes_are_told_so_that_the_next_try_works() {
    let home = Home::new();
    home.create("box", &[]);
    assert!(home.fails(&["build", "."], 125).contains("bathy pull"));
    assert!(!home.fails(&["init"], 125).contains("monitor"));
    let no_job = home.fails(&["logs", "box", "--job", "9"], 125);
    assert!(no_job.contains("no job 9") && no_job.contains("bathy jobs box"), "{no_job}");
    assert!(home.fails(&["events", "--sandbox", "nosuch"], 125).contains("nosuch"));
    // One that is gone is known by its events.
    home.ok(&["rm", "box"]);
    assert!(home.ok(&["events", "--sandbox", "box"]).contains("sandbox_removed"));
    assert!(home.ok(&["audit", "verify"]).contains(" in 1 file,"));
}
