//! Gateways that die or stop, and a monitor that does not listen: nothing slips through meanwhile.

use std::collections::BTreeSet;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use bathy_tests::kept::{descendants, is_alive, signal, until};
use bathy_tests::world::addresses::{SITE, SITE_V6};
use bathy_tests::world::{Contact, Kind, World};
use bathy_tests::{limit, patience, promptly, slowness};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::scene::{find_gateway, gateway};
use bathy_tests::world::guest::{Guest, on_host};
use bathy_tests::world::table::row;

#[test]
fn a_gateway_that_dies_is_replaced_and_nothing_slips_through() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--net", "public", "--deny", "api.example", "-p", "0:8000"]);
    world.ok(&["exec", "-d", "web", "--", "python3", "-m", "http.server", "8000"]);
    web.still_works();
    let pid = gateway(&world, "web");
    // Only a client that sends something finds out that its connection is gone.
    let url = format!("http://site.example/slow/{}", 200 * slowness());
    let curl = ["exec", "web", "--", "curl", "-sS", "--keepalive-time", "2", &url];
    let download = world.bathy_command(&curl).spawn().unwrap();
    let is_download =
        |contact: &Contact| contact.detail.as_deref().is_some_and(|detail| detail.starts_with("GET /slow/"));
    until("it has begun", 5, || world.contacts().iter().any(is_download));
    world.forget_contacts();
    let killed = Instant::now();
    signal(pid, Signal::KILL);
    until("it is gone", 2, || !is_alive(pid));
    until("there is a new one", 5, || find_gateway(&world, "web").is_some_and(|new| new != pid));
    row("N8", "a gateway that is killed", &format!("a new one after {:?}", killed.elapsed()), true);
    // The sandbox and its processes live, its connections do not, and its policy holds.
    assert_eq!(world.home().status("web"), "running");
    until("it serves", 5, || web.try_one(json!(["curl", "http://site.example/"])).word() == "status 200");
    assert!(killed.elapsed() < promptly(Duration::from_secs(8)), "{:?}", killed.elapsed());
    for url in ["http://api.example/", "http://10.0.0.5/"] {
        let outcome = web.try_one(json!(["curl", url]));
        row("N8", &format!("{url} after a new gateway"), outcome.word(), outcome.was_denied());
    }
    let output = download.wait_with_output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    assert_eq!(world.contacts_beyond(&[SITE, SITE_V6]), []);
    web.until_event("its end", |event| {
        event["event"] == "gateway_lost"
            && event["restarted"] == false
            && event["reason"].as_str().is_some_and(|reason| reason.contains("signal 9"))
    });
    web.until_event("the new one", |event| event["event"] == "gateway_lost" && event["restarted"] == true);
    // Published ports lead to the sandbox again, at the same place.
    let ports: Value = serde_json::from_str(&world.ok(&["port", "web", "--json"])).unwrap();
    let url = format!("http://127.0.0.1:{}/", ports[0]["host"]);
    let seconds = patience(Duration::from_secs(2)).as_secs().to_string();
    until("its port works", 5, || {
        on_host(&world, "curl", &["-sS", "-m", &seconds, "-o", "/dev/null", &url]).code == Some(0)
    });
    // A new policy reaches the new gateway.
    web.policy("deny", &["site.example"]);
    web.try_one(json!(["curl", "http://site.example/"])).is_denied();
}

#[test]
fn a_gateway_that_dies_again_and_again_leaves_a_sandbox_without_network_or_works() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    for _ in 0..6 {
        if let Some(pid) = find_gateway(&world, "web") {
            signal(pid, Signal::KILL);
            until("it is gone", 2, || !is_alive(pid));
        }
        thread::sleep(Duration::from_millis(100));
        web.try_one(json!(["connect", "10.0.0.5", 443]));
    }
    let contacts = world.contacts_beyond(&[]);
    row(
        "N8",
        "calls inward while gateways are killed",
        &format!("{} got through", contacts.len()),
        contacts.is_empty(),
    );
    assert_eq!(world.home().status("web"), "running");
    assert_eq!(web.user(&["echo", "alive"]), "alive\n");
    until("it serves again", 40, || {
        web.try_one(json!(["curl", "http://site.example/"])).word() == "status 200"
    });
    // Its end is the sandbox's only when that ends, and leaves nothing.
    let pid = gateway(&world, "web");
    world.ok(&["rm", "-f", "web"]);
    until("nothing of it is left", 3, || !is_alive(pid));
}

#[test]
fn n9_a_new_gateway_brings_no_new_budget_for_names_and_ends_what_was_open() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let url = format!("http://site.example/slow/{}", 200 * slowness());
    world.ok(&["exec", "-d", "web", "--", "curl", "-sS", "-o", "/dev/null", &url]);
    let is_open = |event: &Value| event["event"] == "net_allowed" && event["port"] == 80;
    web.until_event("a connection", is_open);
    let tunnel = "
def tunnel(turn, count):
    for index in range(count):
        names([f'{turn}{index:03}' + 'x' * 50, 'tunnel', 'example'])
    return {'outcome': 'done'}
";
    let began = Instant::now();
    for turn in 0..5 {
        web.try_with(tunnel, &[json!(["tunnel", turn, 120])]).remove(0).is("done");
        let pid = gateway(&world, "web");
        signal(pid, Signal::KILL);
        until("there is a new one", 10, || find_gateway(&world, "web").is_some_and(|new| new != pid));
    }
    let asked: BTreeSet<_> =
        world.asked_names().into_iter().filter(|name| name.ends_with("tunnel.example")).collect();
    // 4 KiB of names with 54 bytes in each minute that was begun, whatever the number of gateways.
    let minutes = usize::try_from(began.elapsed().as_secs() / 60).unwrap() + 2;
    let reported = format!("{} of 600 names got out", asked.len());
    row("N9", "names through five gateways", &reported, (50..=minutes * 4096 / 54).contains(&asked.len()));
    web.until_event("the end of what was open", |event| {
        event["port"] == 80 && is_lost(event) && event["sent"].as_u64() > Some(0)
    });
}

/// Whether it is the end of something that its gateway could not report.
fn is_lost(event: &Value) -> bool {
    let reason = event["reason"].as_str().unwrap_or_default();
    event["event"] == "net_closed" && reason.starts_with("its gateway failed")
}

/// Trades 500,000 bytes for 300,000 and reports that by a connection to the echo port; with `inbound`, before that also datagrams,
/// and, over a connection from outside, 40,000 bytes for 70,000. Keeps all of it until its standard input ends.
const TRADES: &str = "
import socket, sys

def take(sock, count):
    while count > 0:
        count -= len(sock.recv(count))

site, inbound = '93.184.215.14', len(sys.argv) > 1
trade = socket.create_connection((site, 17))
trade.sendall(b'500000 300000\\n'.ljust(500000, b'x'))
take(trade, 300000)
if inbound:
    server = socket.create_server(('', 8000))
    caller = server.accept()[0]
    take(caller, 70000)
    caller.sendall(bytes(40000))
    flow = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    flow.connect((site, 7))
    for size in (700, 77):
        flow.send(bytes(size))
        take(flow, size)
    caller.recv(1)
socket.create_connection((site, 7)).close()
sys.stdin.read()
";

/// Calls a published port of the host's, trades 70,000 bytes for 40,000, reports it, and keeps the connection.
const CALLER: &str = "
import socket, sys, time
sock = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
sock.sendall(bytes(70000))
count = 0
while count < 40000:
    count += len(sock.recv(65536))
sock.sendall(b'x')
time.sleep(3600)
";

/// A connection whose gateway died: protocol, direction, port, bytes from and to the guest.
type Lost = (String, String, u64, Option<u64>, Option<u64>);

/// What the log has of them.
fn lost(log: &[Value]) -> BTreeSet<Lost> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    // The connection to the echo port was not waited for.
    let is_call = |event: &Value| event["protocol"] == "tcp" && event["port"] == 7;
    let ends = log.iter().filter(|event| is_lost(event) && !is_call(event));
    let bytes = |event: &Value, name| event.get(name).and_then(Value::as_u64);
    ends.map(|event| {
        let port = event["port"].as_u64().unwrap_or_default();
        let moved = (bytes(event, "sent"), bytes(event, "received"));
        (text(&event["protocol"]), text(&event["direction"]), port, moved.0, moved.1)
    })
    .collect()
}

fn known(protocol: &str, direction: &str, port: u64, moved: (u64, u64)) -> Lost {
    (protocol.to_owned(), direction.to_owned(), port, Some(moved.0), Some(moved.1))
}

#[test]
fn n9_what_a_killed_gateway_had_carried_is_in_the_log_to_the_byte() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["-p", "0:8000"]);
    let command = world.bathy_command(&["exec", "-i", "web", "--", "python3", "-c", TRADES, "inbound"]);
    let mut trades = with_input(command);
    let ports: Value = serde_json::from_str(&world.ok(&["port", "web", "--json"])).unwrap();
    // Until the sandbox listens, its port refuses or breaks off.
    let mut callers = Vec::new();
    let host = ports[0]["host"].to_string();
    until("all was traded", 20, || {
        callers.retain_mut(|caller: &mut Child| matches!(caller.try_wait(), Ok(None)));
        if callers.is_empty() {
            let mut caller = world.command("python3");
            callers.push(caller.args(["-c", CALLER, &host]).stderr(Stdio::null()).spawn().unwrap());
        }
        !world.contacts_at(SITE, 7).iter().all(|contact| contact.kind == Kind::Udp)
    });
    let pid = gateway(&world, "web");
    signal(pid, Signal::KILL);
    web.until_event("its end", |event| event["event"] == "gateway_lost" && event["restarted"] == true);
    let found = lost(&web.net_log());
    let expected = BTreeSet::from([
        known("tcp", "out", 17, (500_000, 300_000)),
        known("tcp", "in", 8000, (40_000, 70_001)),
        known("udp", "out", 7, (777, 777)),
    ]);
    row("N9", "bytes of what a killed gateway had open", &format!("{found:?}"), found == expected);
    for child in callers.iter_mut().chain([&mut trades]) {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn n9_what_a_killed_gateway_of_a_command_had_carried_is_in_the_log_to_the_byte() {
    let world = World::new();
    let mut command =
        with_input(world.bathy_command(&["run", "-i", "--json", "--", "python3", "-c", TRADES]));
    until("all was traded", 20, || !world.contacts_at(SITE, 7).is_empty());
    let line = |pid: u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let gateways = || {
        let all = descendants(command.id()).into_iter();
        all.filter(|pid| line(*pid).starts_with(b"bathy-gateway")).collect::<Vec<_>>()
    };
    let [pid] = gateways()[..] else { panic!("{:?}", gateways()) };
    signal(pid, Signal::KILL);
    until("there is a new one", 10, || matches!(gateways()[..], [new] if new != pid));
    drop(command.stdin.take());
    let output = command.wait_with_output().unwrap();
    let reported: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{reported} {}", String::from_utf8_lossy(&output.stderr));
    let log = world.ok(&["net", "log", reported["sandbox"].as_str().unwrap(), "--json"]);
    let found = lost(&serde_json::from_str::<Vec<Value>>(&log).unwrap());
    let expected = BTreeSet::from([known("tcp", "out", 17, (500_000, 300_000))]);
    row("N9", "bytes of what a command's killed gateway had open", &format!("{found:?}"), found == expected);
}

/// Starts a command whose standard input stays open.
fn with_input(mut command: Command) -> Child {
    command.stdin(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_gateway_that_stops_is_a_network_that_stops() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    web.still_works();
    let pid = gateway(&world, "web");
    signal(pid, Signal::STOP);
    // Nothing gets out, the sandbox lives, and it can still be ended.
    let outcome = web.try_one(json!(["connect", SITE, 80]));
    row("N8", "a call while the gateway stands still", outcome.word(), outcome.word() == "timeout");
    assert_eq!(web.user(&["echo", "alive"]), "alive\n");
    world.forget_contacts();
    let started = Instant::now();
    world.ok(&["rm", "-f", "web"]);
    assert!(started.elapsed() < promptly(Duration::from_secs(5)), "{:?}", started.elapsed());
    assert!(!is_alive(pid));
    assert_eq!(world.contacts_beyond(&[]), []);
}

/// Connects as fast as possible, until the test ends it.
const CALLS: &str = "
import os, socket
while not os.path.exists('/tmp/enough'):
    try:
        socket.create_connection(('93.184.215.14', 7), 5).close()
    except OSError:
        pass
";

#[test]
fn n8_what_nobody_writes_down_does_not_happen() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let monitor = world.home().monitor("web");
    world.ok(&["exec", "-d", "web", "--", "python3", "-c", CALLS]);
    until("it calls", 5, || world.contacts_at(SITE, 7).len() > 10);
    // From now on the gateway's events pile up, until there is no room for another one.
    signal(monitor, Signal::STOP);
    let mut last = (0, Instant::now());
    let quiet = limit(Duration::from_secs(3));
    until("the calls end", 60, || {
        let now = world.contacts_at(SITE, 7).len();
        if now != last.0 {
            last = (now, Instant::now());
        }
        last.1.elapsed() > quiet
    });
    row("N8", "connections that could not be recorded", &format!("ended after {} of them", last.0), true);
    signal(monitor, Signal::CONT);
    until("they go on", 20, || world.contacts_at(SITE, 7).len() > last.0);
    web.user(&["touch", "/tmp/enough"]);
    web.still_works();
    // Every one of them is in the log.
    let reached = world.contacts_at(SITE, 7).len();
    let allowed =
        |event: &Value| event["event"] == "net_allowed" && event["address"] == SITE && event["port"] == 7;
    let deadline = Instant::now() + patience(Duration::from_secs(10));
    let reported = loop {
        let reported = web.net_log().iter().filter(|event| allowed(event)).count();
        if reported >= reached || Instant::now() > deadline {
            break reported;
        }
        thread::sleep(limit(Duration::from_millis(100)));
    };
    row(
        "N8",
        "calls that were made",
        &format!("{reached}, and {reported} are written down"),
        reported >= reached,
    );
}
