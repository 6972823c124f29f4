//! A host's disk that is full: nothing is lost, nothing new begins in the network, and whatever is ended ends and frees space.
//!
//! The state folder is a small disk of its own. It is filled by a file beside the sandboxes, or by a guest that writes its disk.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;
use std::io::{Read, Seek, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::time::{Duration, Instant};

use bathy_tests::kept::{Home, until};
use bathy_tests::world::World;
use bathy_tests::world::addresses::SITE;
use bathy_tests::world::guest::Guest;
use bathy_tests::world::table::row;
use bathy_tests::{Ran, limit, patience};
use serde_json::Value;

/// The disk that everything is on, and what each sandbox is promised: more than fits.
const DISK_MIB: u32 = 64;
const OPTIONS: [&str; 4] = ["--disk", "128M", "--memory", "256M"];
/// The server that discards its input.
const PORT: u16 = 7;

/// Asks for a name and calls as fast as it goes, and echoes what inbound peers say, until the file is there. It needs nothing of
/// its disk once it runs.
const BUSY: &str = "
import os, socket, threading
def echo(peer):
    while data := peer.recv(100):
        peer.sendall(data)
def serve():
    server = socket.create_server(('', 8000))
    while True:
        threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
def ask():
    while True:
        try:
            socket.getaddrinfo('site.example', 80)
        except OSError:
            pass
threading.Thread(target=serve, daemon=True).start()
threading.Thread(target=ask, daemon=True).start()
while not os.path.exists('/dev/shm/enough'):
    try:
        socket.create_connection(('93.184.215.14', 7), 5).close()
    except OSError:
        pass
";

fn small_world() -> World {
    World::with_home(Home::small(DISK_MIB))
}

/// A sandbox that is busy, and the number of connections that it has made so far.
fn busy<'world>(world: &'world World, options: &[&str]) -> Guest<'world> {
    let web = Guest::start(world, "web", &[&OPTIONS[..], options].concat());
    world.ok(&["exec", "-d", "web", "--", "python3", "-c", BUSY]);
    until("it calls", 20, || calls(world) > 10);
    web
}

fn calls(world: &World) -> usize {
    world.contacts_at(SITE, PORT).len()
}

/// Waits until no more calls arrive; how many there were.
#[track_caller]
fn until_quiet(world: &World) -> usize {
    let quiet = limit(Duration::from_secs(4));
    let mut last = (usize::MAX, Instant::now());
    until("nothing new begins", 60, || {
        let now = calls(world);
        if now != last.0 {
            last = (now, Instant::now());
        }
        last.1.elapsed() > quiet
    });
    last.0
}

/// How many events of this kind there are about the calls.
fn reported(web: &Guest<'_>, kind: &str) -> usize {
    let is_call = |event: &&Value| event["address"] == SITE && event["port"] == PORT;
    web.events(kind).iter().filter(is_call).count()
}

#[track_caller]
fn verifies(world: &World) {
    let verified = world.ok(&["audit", "verify"]);
    assert!(verified.contains("The audit log is intact"), "{verified}");
}

/// It has to succeed, whatever it warns of.
#[track_caller]
fn works(world: &World, arguments: &[&str]) -> Ran {
    let ran = world.bathy(arguments);
    assert_eq!(ran.code, Some(0), "bathy {arguments:?}: {ran:?}");
    ran
}

/// It has to be refused, because the disk is full.
#[track_caller]
fn is_refused(world: &World, arguments: &[&str]) {
    let ran = world.bathy(arguments);
    assert_eq!(ran.code, Some(125), "bathy {arguments:?}: {ran:?}");
    assert!(ran.stderr.contains("disk is full") || ran.stderr.contains("No space left"), "{ran:?}");
}

fn free(world: &World) {
    fs::remove_file(world.home().filler()).unwrap();
}

/// A connection to the sandbox's published port.
fn inbound(world: &World) -> TcpStream {
    let ports: Value = serde_json::from_str(&world.ok(&["port", "web", "--json"])).unwrap();
    let port = u16::try_from(ports[0]["host"].as_u64().unwrap()).unwrap();
    let peer = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
    peer.set_read_timeout(Some(patience(Duration::from_secs(2)))).unwrap();
    peer
}

fn is_echoed(peer: &mut TcpStream) -> bool {
    let mut answer = [0; 4];
    peer.write_all(b"ping").is_ok() && peer.read_exact(&mut answer).is_ok()
}

#[test]
fn f1_a_full_disk_holds_the_network_and_loses_no_event() {
    let world = small_world();
    let web = busy(&world, &["-p", "0:8000"]);
    let inside = world.enter();
    let mut open = inbound(&world);
    assert!(is_echoed(&mut open));
    let before = calls(&world);
    world.home().fill();
    let made = until_quiet(&world);
    row("F1", "calls on a full disk", &format!("ended after {} of them", made - before), true);
    let asked = world.asked_names().len();
    // What had begun goes on; nothing new does, inward or outward, and no name is asked for.
    assert!(is_echoed(&mut open), "it had begun");
    let mut late = inbound(&world);
    assert!(!is_echoed(&mut late), "it is not let in");
    drop(inside);
    assert_eq!((calls(&world), world.asked_names().len()), (made, asked));
    assert_eq!(world.home().status("web"), "running");
    // What is left may be enough for a short line or two.
    until("commands are refused", 20, || world.bathy(&["exec", "web", "--", "true"]).code == Some(125));
    is_refused(&world, &["exec", "web", "--", "true"]);
    verifies(&world);
    // Its policy can be narrowed all the same, with space that is kept for such things.
    works(&world, &["policy", "deny", "web", "203.0.113.0/24"]);
    world.home().fill();
    let made = until_quiet(&world);

    free(&world);
    let freed = Instant::now();
    until("it goes on", 20, || calls(&world) > made && world.asked_names().len() > asked);
    row("F1", "calls when there is space again", &format!("go on after {:?}", freed.elapsed()), true);
    assert!(is_echoed(&mut open) && is_echoed(&mut late));
    web.user(&["touch", "/dev/shm/enough"]);
    let made = until_quiet(&world);
    until("every call is in the log", 10, || reported(&web, "net_allowed") >= made);
    until("and its end", 10, || reported(&web, "net_closed") >= made);
    let (allowed, closed) = (reported(&web, "net_allowed"), reported(&web, "net_closed"));
    let outcome = format!("{made}, of which {allowed} beginnings and {closed} ends are recorded");
    row("F1", "calls that were made", &outcome, (allowed, closed) == (made, made));
    verifies(&world);
}

#[test]
fn f1_a_sandbox_that_fills_the_disk_is_killed_and_removed() {
    let world = small_world();
    let _web = busy(&world, &[]);
    let dd = "cat /dev/zero > /home/user/zeros; sync";
    world.ok(&["exec", "-d", "web", "--", "sh", "-c", dd]);
    until("the disk is full", 60, || is_full(&world));
    let made = until_quiet(&world);
    assert_eq!(world.home().status("web"), "running");
    works(&world, &["ls"]);
    let killed = works(&world, &["kill", "web"]);
    row("F1", "kill on a full disk", &format!("took {:?}", killed.took), true);
    let ended = world.home().inspect("web");
    assert_eq!(
        (ended["status"].as_str(), ended["end_cause"].as_str()),
        (Some("stopped"), Some("it was killed"))
    );
    // There is no room for what a start has to record; what is not recorded is not done.
    world.home().fill();
    is_refused(&world, &["start", "web"]);
    assert_eq!(world.home().status("web"), "stopped");
    let removed = works(&world, &["rm", "web"]);
    row("F1", "rm on a full disk", &format!("took {:?}", removed.took), true);
    free(&world);
    assert_eq!(world.ok(&["ls", "-q"]), "");
    verifies(&world);
    let events = world.ok(&["events", "--json"]);
    let events: Vec<Value> = serde_json::from_str(&events).unwrap();
    let count = |kind: &str| events.iter().filter(|event| event["event"] == kind).count();
    assert_eq!((count("killed"), count("sandbox_ended"), count("sandbox_removed")), (1, 1, 1));
    let allowed = events.iter().filter(|event| event["event"] == "net_allowed" && event["port"] == PORT);
    assert_eq!(allowed.count(), made, "every call that was made");
    // The space is there for the next one.
    let next = Guest::start(&world, "next", &OPTIONS);
    next.still_works();
}

fn is_full(world: &World) -> bool {
    let found = rustix::fs::statvfs(world.home().path()).unwrap();
    found.f_bavail * found.f_frsize < 64 << 10
}

#[test]
fn f1_whatever_state_a_sandbox_is_in_it_ends_on_a_full_disk() {
    let world = small_world();
    for name in ["stopped", "killed", "forced", "paused"] {
        world.ok(&[&["create", "--name", name, "--net", "none"], &OPTIONS[..]].concat());
    }
    world.ok(&["create", "--name", "created", "--net", "none", "--disk", "128M"]);
    for name in ["stopped", "killed", "forced", "paused"] {
        world.ok(&["start", name]);
    }
    world.ok(&["pause", "paused"]);
    let fill = || world.home().fill();
    fill();
    let steps: [(&[&str], &str, &str); 4] = [
        (&["stop", "stopped"], "stopped", "it was stopped"),
        (&["kill", "killed"], "killed", "it was killed"),
        (&["stop", "paused"], "paused", "it was stopped"),
        (&["rm", "-f", "forced"], "", ""),
    ];
    for (arguments, name, cause) in steps {
        works(&world, arguments);
        // Whatever that freed.
        fill();
        if name.is_empty() {
            continue;
        }
        let now = world.home().inspect(name);
        assert_eq!(
            (now["status"].as_str(), now["end_cause"].as_str()),
            (Some("stopped"), Some(cause)),
            "{name}"
        );
        is_refused(&world, &["start", name]);
        assert_eq!(world.home().status(name), "stopped", "{name}");
    }
    is_refused(&world, &["create", "--name", "more"]);
    let listed = world.ok(&["ls", "--all", "-q"]);
    assert_eq!(listed.lines().count(), 4, "{listed}");
    works(&world, &["rm", "created", "paused"]);
    free(&world);
    works(&world, &["start", "stopped"]);
    assert_eq!(world.home().exec("stopped", &["echo", "alive"]).stdout, "alive\n");
    let kinds = |name: &str| {
        let all = world.home().events(name);
        all.iter().filter_map(|event| event["event"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    let killed = kinds("killed");
    assert!(killed.ends_with(&["killed".to_owned(), "sandbox_ended".to_owned()]), "{killed:?}");
    verifies(&world);
}

#[test]
fn f1_an_ephemeral_sandbox_keeps_its_exit_code_on_a_full_disk() {
    let world = small_world();
    let script = format!("{BUSY}\nos._exit(7)").replace(
        "while not os.path.exists('/dev/shm/enough'):",
        "import sys\nend = threading.Thread(target=sys.stdin.read, daemon=True)\nend.start()\nwhile end.is_alive():",
    );
    let mut run = world.bathy_command(&["run", "-m", "256M", "--", "python3", "-c", &script]);
    // Not a pipe: one that is not read would stop it, too.
    let mut message = tempfile::tempfile().unwrap();
    let mut run = run.stdin(Stdio::piped()).stderr(message.try_clone().unwrap()).spawn().unwrap();
    until("it calls", 20, || calls(&world) > 10);
    world.home().fill();
    let made = until_quiet(&world);
    is_refused(&world, &["run", "--", "true"]);
    drop(run.stdin.take());
    let status = run.wait().unwrap();
    let mut stderr = String::new();
    message.rewind().unwrap();
    message.read_to_string(&mut stderr).unwrap();
    assert_eq!(status.code(), Some(7), "{stderr}");
    free(&world);
    let events: Vec<Value> = serde_json::from_str(&world.ok(&["events", "--json"])).unwrap();
    let is_call = |event: &&Value| event["event"] == "net_allowed" && event["port"] == PORT;
    let recorded = events.iter().filter(is_call).count();
    assert!(recorded >= made, "{recorded} of {made}");
    let last = events.iter().filter_map(|event| event["event"].as_str()).next_back();
    assert_eq!(last, Some("sandbox_removed"));
    assert!(stderr.contains("nothing new begins"), "{stderr}");
    verifies(&world);
}

#[test]
fn f1_a_disk_that_could_not_hold_what_is_promised_is_told() {
    let world = small_world();
    let reported = |ran: &Ran| {
        let lines: Vec<_> = ran.stderr.lines().filter(|line| line.contains("free space")).collect();
        assert_eq!(lines.len(), 1, "{ran:?}");
        assert!(lines[0].contains("MiB of free space") && lines[0].contains("--disk"), "{ran:?}");
    };
    let small = works(&world, &["create", "--name", "small", "--net", "none", "--disk", "16M"]);
    assert!(!small.stderr.contains("free space"), "{small:?}");
    reported(&works(&world, &["create", "--name", "large", "--net", "none", "--disk", "1G"]));
    reported(&works(&world, &["start", "large"]));
    reported(&works(&world, &["restart", "large"]));
    reported(&works(&world, &["run", "-d", "--net", "none", "--disk", "1G", "--", "sleep", "1000"]));
    reported(&works(&world, &["repl", "new", "calc", "--net", "none", "--disk", "16M", "-m", "256M"]));
}
