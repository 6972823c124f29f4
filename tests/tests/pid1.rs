//! PID 1 of a sandbox starts everything that runs in it. No process of the sandbox can keep it from doing so.
#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::thread;
use std::time::Duration;

use bathy_tests::kept::{Home, until};
use bathy_tests::{Ran, finish, patience};

/// Takes a lease on a program of its own. A process that executes the program has to wait for the lease to be given back: until the kernel
/// breaks the lease, or for ever, because the process that waits is stopped.
const HOLD: &str = r#"
import fcntl, os, shutil, signal, sys
folder, name = sys.argv[1:]
os.makedirs(folder, exist_ok=True)
program = os.path.join(folder, name)
shutil.copy("/usr/bin/true", program)
lease = os.open(program, os.O_RDONLY)
def stop(*_):
    os.kill(-1, signal.SIGSTOP)
    open(program + ".hit", "w")
signal.signal(signal.SIGIO, stop)
fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
open(program + ".armed", "w")
while True:
    signal.pause()
"#;

struct Strict {
    home: Home,
}

impl Strict {
    fn new(options: &[&str]) -> Self {
        let home = Home::new();
        home.started("strict", &[&["--security", "restricted", "--memory", "384M"], options].concat());
        Self { home }
    }

    /// Has a job hold a program up, from the moment that it is executed.
    fn hold(&self, folder: &str, name: &str) {
        let hold = ["/usr/bin/python3", "-c", HOLD, folder, name];
        self.home.ok(&[&["exec", "-d", "strict", "--"], hold.as_slice()].concat());
        self.wait_for(&format!("{folder}/{name}.armed"));
    }

    /// Waits for a file. As another user: every process of the usual one may be stopped.
    fn wait_for(&self, path: &str) {
        until(path, 15, || self.as_other(&["test", "-e", path], b"").code == Some(0));
    }

    /// Runs a command as another user than the attacker's, who cannot be stopped by it.
    fn as_other(&self, command: &[&str], input: &[u8]) -> Ran {
        let arguments = [&["exec", "-i", "-u", "4321:4321", "-w", "/", "strict", "--"], command].concat();
        finish(&mut self.home.command(&arguments), input)
    }

    /// Everything that PID 1 does for others is done at once, and the sandbox stops when it is asked to.
    #[track_caller]
    fn others_are_served(&self) {
        // Its input ends although a process that began earlier is held up.
        let ran = self.as_other(&["cat"], b"through");
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "through"), "{ran:?}");
        assert!(ran.took < patience(Duration::from_secs(5)), "{ran:?}");
        let copied = self.home.run(&["cp", "strict:/etc/hostname", "."]);
        assert_eq!(copied.code, Some(0), "{copied:?}");
        let cell = ["code", "--sandbox", "strict", "--lang", "bash", "-c", "echo works"];
        assert_eq!(self.home.ok(&cell), "works\n");
    }
}

#[test]
fn r11_pid1_does_not_wait_for_a_command_that_is_held_up() {
    let strict = Strict::new(&[]);
    strict.hold("/tmp/bin", "held");
    thread::scope(|scope| {
        let held = scope.spawn(|| strict.home.run(&["exec", "strict", "--", "/tmp/bin/held"]));
        strict.wait_for("/tmp/bin/held.hit");
        strict.others_are_served();
        assert!(!held.is_finished());
        // It is given up in bounded time, and the host learns why.
        let held = held.join().unwrap();
        assert_eq!(held.code, Some(125), "{held:?}");
        assert!(held.stderr.contains("held: not executed within 20 s"), "{held:?}");
    });
    strict.others_are_served();
    // Another one is held up while the sandbox is stopped.
    strict.hold("/tmp/bin", "again");
    thread::scope(|scope| {
        let held = scope.spawn(|| strict.home.run(&["exec", "strict", "--", "/tmp/bin/again"]));
        strict.wait_for("/tmp/bin/again.hit");
        let stopped = strict.home.run(&["stop", "-t", "1", "strict"]);
        assert_eq!((stopped.code, stopped.stderr.as_str()), (Some(0), ""), "{stopped:?}");
        assert_eq!(strict.home.status("strict"), "stopped");
        assert_ne!(held.join().unwrap().code, Some(0));
    });
}

#[test]
fn r11_pid1_does_not_wait_for_an_interpreter_that_is_held_up() {
    let strict = Strict::new(&["--env", "PATH=/tmp/bin:/usr/bin:/bin"]);
    strict.hold("/tmp/bin", "python3");
    let python = ["code", "--sandbox", "strict", "--lang", "python", "-c", "1"];
    thread::scope(|scope| {
        let held = scope.spawn(|| strict.home.run(&python));
        strict.wait_for("/tmp/bin/python3.hit");
        strict.others_are_served();
        assert!(!held.is_finished());
        let held = held.join().unwrap();
        assert!(held.stderr.contains("python3: not executed within 20 s"), "{held:?}");
    });
}
