//! A person at a terminal, played by tmux: what is typed, what is shown, and how the terminal is left.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bathy_tests::kept::{Home, signal, until};
use bathy_tests::{bathy, finish, limit, patience, promptly};
use rustix::process::Signal;

/// How long anything that a person waits for may take on a busy machine.
const PATIENCE: u64 = 20;

/// A terminal of its own, with a shell of the host in it.
struct Terminal<'a> {
    server: String,
    home: &'a Home,
}

impl<'a> Terminal<'a> {
    fn open(home: &'a Home) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let terminal = Self { server: format!("bathy-test-{}-{number}", std::process::id()), home };
        let state = format!("XDG_STATE_HOME={}", home.path().display());
        let program = format!("B={}", bathy().display());
        let shell = ["env", "-u", "BATHYSPHERE_CONFIG", &state, &program, "PS1=outer> ", "ENV=", "sh"];
        let folder = home.path().display().to_string();
        let size = ["new-session", "-d", "-x", "100", "-y", "30", "-c", &folder];
        terminal.tmux(&[&["-f", "/dev/null"], size.as_slice(), &shell].concat());
        // The whole window is the pane's, and one without a viewer keeps the size that it is given.
        terminal.tmux(&["set-option", "-g", "status", "off"]);
        terminal.tmux(&["set-option", "-g", "window-size", "manual"]);
        terminal.resize(100, 30);
        terminal.shows("outer>");
        terminal
    }

    #[track_caller]
    fn tmux(&self, arguments: &[&str]) -> String {
        let output = self.try_tmux(arguments).expect("tmux is installed; ./test does it");
        assert!(output.status.success(), "tmux {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn try_tmux(&self, arguments: &[&str]) -> io::Result<Output> {
        Command::new("tmux")
            .args(["-L", &self.server])
            .args(arguments)
            .env_remove("TMUX")
            .env("TMUX_TMPDIR", self.home.path())
            .env("LC_ALL", "C.UTF-8")
            .output()
    }

    fn resize(&self, columns: u32, rows: u32) {
        self.tmux(&["resize-window", "-x", &columns.to_string(), "-y", &rows.to_string()]);
    }

    /// Types this text and the return key.
    fn line(&self, text: &str) {
        self.text(text);
        self.keys(&["Enter"]);
    }

    fn text(&self, text: &str) {
        self.tmux(&["send-keys", "-l", "--", text]);
    }

    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    /// The screen with its colours, as the sequences that make them.
    fn colours(&self) -> String {
        self.tmux(&["capture-pane", "-p", "-e"])
    }

    /// Waits until the screen shows this. What was typed is on the screen too: look for something else.
    #[track_caller]
    fn shows(&self, text: &str) {
        self.becomes(text, |screen| screen.contains(text));
    }

    #[track_caller]
    fn becomes(&self, what: &str, holds: impl Fn(&str) -> bool) {
        let deadline = Instant::now() + patience(Duration::from_secs(PATIENCE));
        loop {
            let screen = self.screen();
            if holds(&screen) {
                return;
            }
            assert!(Instant::now() < deadline, "the screen does not become: {what}. It is:\n{screen}");
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// The settings of the terminal, as its driver has them.
    fn settings(&self) -> String {
        let device = self.tmux(&["display-message", "-p", "#{pane_tty}"]);
        let output = Command::new("stty").args(["-a", "-F", device.trim()]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn is_raw(&self) -> bool {
        self.settings().contains("-icanon")
    }

    /// Opens a shell in the sandbox and waits for its prompt.
    #[track_caller]
    fn enter(&self, command: &str) {
        self.line(command);
        self.becomes("a prompt of the guest", |screen| {
            screen.lines().any(|line| line.contains("user@sandbox:"))
        });
    }

    /// Waits until the last line is the host's prompt. What is typed earlier would go to the guest.
    #[track_caller]
    fn waits_at_the_host(&self) {
        self.becomes("the host's prompt", |screen| screen.trim_end().ends_with("outer>"));
    }

    /// Clears the host's screen.
    #[track_caller]
    fn clear(&self) {
        self.line("clear");
        self.becomes("an empty screen", |screen| screen.trim() == "outer>");
    }

    /// Waits until the host's shell has reported the exit code of the last command.
    #[track_caller]
    fn leaves_with(&self, code: u8) {
        self.waits_at_the_host();
        self.line("echo \"left with=$?\"");
        self.shows(&format!("left with={code}\n"));
    }
}

impl Drop for Terminal<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let screen = self.try_tmux(&["capture-pane", "-p"]).map(|output| output.stdout);
            eprintln!("the terminal at the end:\n{}", String::from_utf8_lossy(&screen.unwrap_or_default()));
        }
        let _ = self.try_tmux(&["kill-server"]);
    }
}

#[test]
fn a_shell_has_a_prompt_runs_top_and_passes_its_exit_code() {
    let home = Home::new();
    home.started("box", &[]);
    let terminal = Terminal::open(&home);
    let before = terminal.settings();
    terminal.enter("\"$B\" shell box");
    assert!(terminal.is_raw(), "keys would not pass as they are: {}", terminal.settings());

    // Only this user's: the list of all is longer than the screen.
    terminal.line("top -u user");
    terminal.shows("load average");
    terminal.becomes("top's list with itself in it", |screen| {
        screen.contains("PID USER") && screen.lines().any(|line| line.trim_end().ends_with(" top"))
    });
    terminal.keys(&["q"]);
    // As it leaves, top throws away what was typed and not yet read: type only when the shell is back.
    terminal.becomes("a prompt of the guest, last", |screen| screen.trim_end().ends_with("user@sandbox:~$"));
    terminal.line("echo sum=$((40+2))");
    terminal.shows("sum=42");

    terminal.line("exit 7");
    terminal.leaves_with(7);
    assert_eq!(terminal.settings(), before, "the terminal is not as it was");
}

#[test]
fn the_size_follows_the_window_and_colours_pass() {
    let home = Home::new();
    home.started("box", &[]);
    let terminal = Terminal::open(&home);
    terminal.enter("\"$B\" shell box");
    terminal.line("clear; stty size");
    terminal.shows("30 100");
    terminal.resize(77, 23);
    terminal.line("clear; stty size");
    terminal.shows("23 77");
    // A program that is running learns of it as well.
    terminal.line(
        "clear; sh -c 'trap \"stty size | tr \\  x\" WINCH; echo re''ady; while sleep 0.1; do :; done'",
    );
    terminal.shows("ready");
    terminal.resize(91, 27);
    terminal.shows("27x91");
    terminal.keys(&["C-c"]);

    terminal.line("clear; printf '\\033[31mre%s\\033[0m plain\\n' d");
    terminal.shows("red plain");
    assert!(terminal.colours().contains("\x1b[31mred"), "{:?}", terminal.colours());
}

#[test]
fn ctrl_c_ends_what_runs_and_not_the_shell() {
    let home = Home::new();
    home.started("box", &[]);
    let terminal = Terminal::open(&home);
    terminal.enter("\"$B\" shell box");
    terminal.line("echo $((20+3)); sleep 1000");
    terminal.shows("23");
    let sleeps = || home.exec("box", &["pgrep", "-x", "sleep"]).code == Some(0);
    until("the sleep runs", PATIENCE, sleeps);
    let pressed = Instant::now();
    terminal.keys(&["C-c"]);
    terminal.line("echo code=$?");
    terminal.shows("code=130");
    assert!(pressed.elapsed() < promptly(Duration::from_secs(5)), "{:?}", pressed.elapsed());
    assert!(!sleeps(), "the sleep goes on in the guest");
    // Job control and the end of input are the guest's as well.
    terminal.line("sleep 1000");
    until("the sleep runs", PATIENCE, sleeps);
    terminal.keys(&["C-z"]);
    terminal.shows("Stopped");
    // Only a shell without jobs ends at the first end of input; the host's shell would take a second one.
    terminal.line("kill %1; wait; echo $((40+2))");
    terminal.shows("42");
    terminal.keys(&["C-d"]);
    terminal.waits_at_the_host();
}

#[test]
fn vim_opens_inserts_and_saves() {
    let home = Home::new();
    home.started("box", &[]);
    let terminal = Terminal::open(&home);
    terminal.enter("\"$B\" shell box");
    terminal.line("vim -u NONE -N /tmp/note");
    terminal.shows("\"/tmp/note\" [New]");
    terminal.text("ifirst line");
    terminal.keys(&["Enter"]);
    terminal.text("second lime");
    terminal.keys(&["BSpace", "BSpace"]);
    terminal.text("ne");
    terminal.shows("-- INSERT --");
    terminal.keys(&["Up", "Home"]);
    terminal.text("the ");
    terminal.keys(&["Escape"]);
    terminal.line(":w");
    terminal.shows("written");
    terminal.becomes("both lines, and the signs of lines that are not there", |screen| {
        screen.starts_with("the first line\nsecond line\n~\n") && screen.matches("\n~\n~").count() > 5
    });
    assert_eq!(home.exec("box", &["cat", "/tmp/note"]).stdout, "the first line\nsecond line\n");
    terminal.line(":q");
    terminal
        .becomes("the shell's screen again", |screen| screen.contains("vim -u") && !screen.contains("\n~\n"));
    terminal.line("exit");
    terminal.leaves_with(0);
}

#[test]
fn the_terminal_is_restored_when_the_sandbox_is_killed_underneath() {
    let home = Home::new();
    home.started("box", &[]);
    let terminal = Terminal::open(&home);
    let before = terminal.settings();
    let ends: [(&str, &dyn Fn()); 3] = [
        ("bathy kill", &|| assert_eq!(home.run(&["kill", "box"]).code, Some(0))),
        ("its keeper is killed", &|| signal(home.keeper("box"), Signal::KILL)),
        ("its monitor is killed", &|| signal(home.monitor("box"), Signal::KILL)),
    ];
    for (how, end) in ends {
        terminal.clear();
        terminal.enter("\"$B\" shell box");
        assert!(terminal.is_raw());
        end();
        until("the terminal is not raw any more", PATIENCE, || !terminal.is_raw());
        terminal.becomes("a message and the host's prompt", |screen| {
            let mut lines = screen.trim_end().lines().rev();
            lines.next().is_some_and(|line| line.ends_with("outer>")) && screen.contains("bathy: ")
        });
        assert_eq!(terminal.settings(), before, "{how}");
        terminal.leaves_with(125);
        until("it can be started again", PATIENCE, || home.run(&["start", "box"]).code == Some(0));
    }
}

#[test]
fn run_with_a_terminal_is_a_terminal_too() {
    let home = Home::new();
    let terminal = Terminal::open(&home);
    let before = terminal.settings();
    terminal.enter("\"$B\" run -it -- bash");
    terminal.resize(81, 25);
    terminal.line("clear; tty; stty size");
    terminal.shows("/dev/pts/");
    terminal.shows("25 81");
    terminal.line("sleep 1000");
    std::thread::sleep(limit(Duration::from_millis(500)));
    terminal.keys(&["C-c"]);
    terminal.line("echo code=$?");
    terminal.shows("code=130");
    terminal.line("exit 9");
    terminal.leaves_with(9);
    // The window has another size now; everything else is as it was.
    terminal.resize(100, 30);
    assert_eq!(terminal.settings(), before);
    // Ended from outside while it shows a guest: also then.
    terminal.clear();
    terminal.enter("\"$B\" run -it -- bash");
    let is_keeper = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "bathy-keeper")
    };
    signal(home.processes().into_iter().find(is_keeper).unwrap(), Signal::KILL);
    until("the terminal is not raw any more", PATIENCE, || !terminal.is_raw());
    terminal.leaves_with(125);
    assert_eq!(terminal.settings(), before);
}

#[test]
fn c1_without_a_terminal_of_its_own_a_command_cannot_command_ours() {
    let home = Home::new();
    home.started("box", &[]);
    let terminal = Terminal::open(&home);
    let script = "printf '\\033[31mre%s\\033]0;title\\007\\n' d";
    fs::write(home.path().join("script"), script).unwrap();
    terminal.clear();
    terminal.line("\"$B\" exec box -- sh -c \"$(cat script)\"");
    terminal.shows("red\\u{1b}]0;title\\u{7}");
    terminal.becomes("the prompt again", |screen| screen.lines().any(|line| line.trim_end() == "outer>"));
    // The colour passes, and ends with the command.
    let shown = terminal.colours();
    assert!(shown.contains("\x1b[31mred\\u{1b}]0;title"), "{shown:?}");
    let prompt = shown.lines().find(|line| line.trim_end().ends_with("outer>"));
    assert!(prompt.is_some_and(|line| !line.contains("\x1b[31m")), "{shown:?}");
    // With a terminal the guest's sequences are its own business, and pass.
    terminal.clear();
    terminal.line("\"$B\" exec -it box -- sh -c \"$(cat script)\"");
    terminal.becomes("red text", |screen| screen.lines().any(|line| line.trim_end() == "red"));
    assert!(terminal.colours().contains("\x1b[31mred"), "{:?}", terminal.colours());
}

#[test]
fn a_person_is_told_that_there_is_nothing_and_sees_manual_pages_as_pages() {
    let home = Home::new();
    let terminal = Terminal::open(&home);
    for (verb, remark) in [
        ("net log", "nothing is recorded yet"),
        ("ls", "there are no sandboxes yet"),
        ("ps", "no sandbox is running"),
        ("repl ls", "there are no REPLs yet"),
    ] {
        terminal.clear();
        terminal.line(&format!("\"$B\" {verb}"));
        terminal.shows(remark);
        let ran = home.run(&verb.split(' ').collect::<Vec<_>>());
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "a program reads nothing: {verb}");
    }
    // The viewer is the system's own.
    let viewer = home.path().join("man");
    fs::write(&viewer, "#!/bin/sh\necho viewed \"$@\"; grep -c '^.TH bathy-run ' > \"$0.pages\"\n").unwrap();
    fs::set_permissions(&viewer, fs::Permissions::from_mode(0o700)).unwrap();
    terminal.clear();
    terminal.line("PATH=\"$PWD:$PATH\" \"$B\" man run");
    terminal.shows("viewed -l -");
    terminal.leaves_with(0);
    assert_eq!(fs::read_to_string(home.path().join("man.pages")).unwrap(), "1\n");
    // In a pipe there is the text, or the page itself where no viewer is installed.
    let piped = |path: &str| finish(home.command(&["man", "run"]).env("PATH", path), b"").stdout;
    assert_eq!(piped(&format!("{}:/usr/bin:/bin", home.path().display())), "viewed -l -\n");
    assert!(piped("/nowhere").contains("\n.TH bathy-run "));
}

#[test]
fn ctrl_p_ctrl_q_leaves_a_job_running() {
    let home = Home::new();
    home.started("box", &[]);
    let terminal = Terminal::open(&home);
    let before = terminal.settings();
    terminal.line("\"$B\" exec -dt box -- bash");
    terminal.shows("1\n");
    terminal.clear();
    terminal.line("\"$B\" attach -t box 1");
    until("the terminal is raw", PATIENCE, || terminal.is_raw());
    terminal.line("value=$((6*7)); echo set=$value");
    terminal.shows("set=42");
    terminal.keys(&["C-p"]);
    terminal.keys(&["C-q"]);
    terminal.shows("job 1 continues");
    terminal.leaves_with(0);
    assert_eq!(terminal.settings(), before);
    assert_eq!(home.json(&["jobs", "--json", "box"])[0]["exit"], serde_json::Value::Null);
    // It is the same one, and it still knows.
    terminal.clear();
    terminal.line("\"$B\" attach -t box 1");
    until("the terminal is raw", PATIENCE, || terminal.is_raw());
    terminal.line("echo kept=$value");
    terminal.shows("kept=42");
    // Ctrl-P alone is an ordinary key: the command before this one.
    terminal.line("clear");
    terminal.keys(&["C-p", "C-p", "Enter"]);
    terminal.shows("kept=42");
    terminal.line("exit 5");
    terminal.leaves_with(5);
}
