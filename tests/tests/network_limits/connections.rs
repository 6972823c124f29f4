//! More connections than anybody needs: begun and left, made and broken off, held, silent.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use bathy_tests::kept::until;
use bathy_tests::world::World;
use bathy_tests::world::addresses::{SILENT, SITE};
use bathy_tests::{fewer, patience, promptly};
use serde_json::{Value, json};

use crate::scene::Scene;
use bathy_tests::world::guest::{AT_ONCE, GATEWAY, Guest, on_host};
use bathy_tests::world::table::{row, undefended};

const FRAMES: &str = include_str!("../network_attacks/frames.py");
/// The default rate of new connections per second, which is also the burst.
const NEW_IN_A_SECOND: usize = 250;

/// First segments by hand, from every port, as fast as it goes: by their number and not by the clock. Only the own port
/// differs, and so only it changes the sum.
const FLOOD: &str = "
def flood(count, to, port):
    sock, sent, began = card(), 0, time.monotonic()
    for address in to:
        frame = ethernet(v4(tcp(port, 0, SYN, to=address), protocol=6, to=address))
        head, middle, tail = frame[:34], frame[36:50], frame[52:]
        rest = 0xFFFF - struct.unpack_from('>H', frame, 50)[0]
        for own in range(1024, 1024 + min(60000, count - sent)):
            words = rest + own
            words = 0xFFFF - (words & 0xFFFF) - (words >> 16)
            while True:
                try:
                    sock.send(head + struct.pack('>H', own) + middle + struct.pack('>H', words) + tail)
                    break
                except OSError:
                    time.sleep(0.001)
            sent += 1
    return {'outcome': 'done', 'sent': sent, 'seconds': time.monotonic() - began}
";

/// How many connections may have reached a server since then.
fn allowed_since(began: Instant) -> usize {
    NEW_IN_A_SECOND * (usize::try_from(began.elapsed().as_secs()).unwrap() + 2)
}

#[test]
fn r5_connections_that_are_only_begun() {
    let world = World::new();
    let began = Instant::now();
    let scene = Scene::new(&world, &[]);
    let more = format!("{FRAMES}\n{FLOOD}");
    // Without its address the sandbox's own kernel does not break off what it knows nothing about: all stay half-open.
    for (what, to, port, count) in [
        ("half-open connections", [SITE, "151.101.8.8"], 80, 100_000),
        ("half-open connections without an answer", [SILENT, SILENT], 80, 20_000),
        ("half-open connections that are denied", ["10.0.0.5", "10.0.0.6"], 443, 20_000),
        ("half-open connections that are denied with an answer", ["10.0.0.5", "10.0.0.6"], 80, 20_000),
    ] {
        let rows = [
            json!(["kernel_address", "del"]),
            json!(["flood", fewer(count), to, port]),
            json!(["kernel_address", "add"]),
        ];
        let outcome = scene.web.try_with(&more, &rows).remove(1);
        let reported =
            format!("{} in {:.1} s", outcome.result["sent"], outcome.result["seconds"].as_f64().unwrap());
        row("R5", what, &reported, outcome.result["sent"] == fewer(count));
        // What waits for answers that never come is given up after some time.
        until("it serves again", 30, || {
            scene.web.try_one(json!(["curl", "http://site.example/"])).word() == "status 200"
        });
    }
    scene.survived();
    scene.limited("new connections in a second");
    let (reached, most) = (world.contacts_at(SITE, 80).len(), allowed_since(began));
    row("R5", "what got out of them", &format!("{reached} connections, at most {most}"), reached <= most);
    let inward = [world.contacts_at("10.0.0.5", 80), world.contacts_at("10.0.0.5", 443)].concat();
    assert_eq!(inward, []);
}

/// Connections by the sandbox's own kernel, from eight threads.
const MANY: &str = "
def many(seconds, to, port):
    outcomes, end = {}, time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            dialled(to, port).close()
            word = 'open'
        except OSError as error:
            word = failure(error)
        outcomes[word] = outcomes.get(word, 0) + 1
    return outcomes

def from_all_sides(seconds, to, port):
    counts = []
    workers = [threading.Thread(target=lambda: counts.append(many(seconds, to, port))) for _ in range(8)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    outcomes = {}
    for count in counts:
        for word, times in count.items():
            outcomes[word] = outcomes.get(word, 0) + times
    return {'outcome': 'done', 'count': sum(outcomes.values()), 'outcomes': outcomes}
";

#[test]
fn r5_a_hundred_thousand_connections() {
    let world = World::new();
    let began = Instant::now();
    let scene = Scene::new(&world, &[]);
    let neighbour = Guest::start(&world, "neighbour", &[]);
    neighbour.still_works();
    let most = promptly(2 * AT_ONCE);
    let more = format!("{FRAMES}\n{FLOOD}\n{MANY}");
    let attacks = [
        ("connections from all sides", json!(["from_all_sides", 5, SITE, 80]), "count", fewer(300)),
        // The kernel breaks off what is answered, because it knows nothing about it.
        (
            "connections that are broken off",
            json!(["flood", fewer(100_000), [SITE, "151.101.8.8"], 80]),
            "sent",
            fewer(100_000),
        ),
    ];
    for (what, attack, count, least) in attacks {
        let (outcome, worst) = beside(&scene, &more, attack, &neighbour);
        let reported = format!("{}: {}; a neighbour waited {worst:?}", outcome[count], outcome["outcomes"]);
        let held = outcome[count].as_u64() >= Some(least) && worst < most;
        row("R5", what, &reported, held);
    }
    thread::sleep(Duration::from_secs(1));
    scene.survived();
    scene.limited("new connections in a second");
    // Those of the neighbour are among them, and it has a limit of its own.
    let (reached, most) = (world.contacts_at(SITE, 80).len(), 2 * allowed_since(began));
    row("R5", "what got out of them", &format!("{reached} connections, at most {most}"), reached <= most);
}

/// Attacks while a neighbour asks for a page again and again: what came of it, and how long the neighbour waited at most.
#[track_caller]
fn beside(scene: &Scene<'_>, more: &str, attack: Value, neighbour: &Guest<'_>) -> (Value, Duration) {
    thread::scope(|scope| {
        let flood = scope.spawn(|| scene.attack(more, attack));
        let mut worst = Duration::ZERO;
        while !flood.is_finished() {
            let outcome = neighbour.try_one(json!(["curl", "http://site.example/"]));
            worst = worst.max(outcome.is("status 200").took());
        }
        (flood.join().unwrap().result, worst)
    })
}

/// As many as there are, kept open. When nothing is opened any more for a while, that is all.
const HELD: &str = "
def held(seconds, to, port):
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    outcomes, socks, failed, end = {}, [], 0, time.monotonic() + seconds * SLOWNESS
    while len(socks) < 1500 and failed < 100 and time.monotonic() < end:
        try:
            socks.append(dialled(to, port))
            word, failed = 'open', 0
        except OSError as error:
            word, failed = failure(error), failed + 1
            time.sleep(0.02)
        outcomes[word] = outcomes.get(word, 0) + 1
    # What is open still works.
    echo = []
    for sock in (socks[0], socks[-1]):
        sock.settimeout(SECONDS)
        sock.sendall(b'x')
        echo.append(sock.recv(9).decode())
    return {'outcome': 'done', 'held': len(socks), 'outcomes': outcomes, 'echo': echo}
";

#[test]
fn r5_connections_that_are_held() {
    let world = World::new();
    let scene = Scene::new(&world, &[]);
    let outcome = scene.attack(HELD, json!(["held", 20, SITE, 7]));
    outcome.is("done");
    assert_eq!(outcome.result["echo"], json!(["x", "x"]), "{outcome:?}");
    let held = outcome.result["held"].as_u64().unwrap();
    // The limit, less what is left over from before for a moment.
    row("R5", "connections that are held", &format!("{held} of 1024"), (1000..=1024).contains(&held));
    scene.limited("connections at once");
    scene.survived();
    // A sandbox with higher limits gets more.
    let file = world.home().path().join("more.toml");
    fs::write(&file, "[network_limits]\nconnections = 2048\n").unwrap();
    let open = Guest::start(&world, "open", &["--net", "public", "--config", file.to_str().unwrap()]);
    let more =
        open.try_with(HELD, &[json!(["held", 20, SITE, 7])]).remove(0).result["held"].as_u64().unwrap();
    undefended("R5", "connections that are held", &format!("{more} of 2048"), more > 1024);
}

/// Connections that both sides end, with more in them than the server takes.
const ENDED: &str = "
def ended(seconds, to, port):
    outcomes, end = {}, time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            sock = dialled(to, port)
            sock.settimeout(1)
            sock.sendall(bytes(400_000))
            sock.close()
            word = 'ended'
        except OSError as error:
            word = failure(error)
            time.sleep(0.01)
        outcomes[word] = outcomes.get(word, 0) + 1
    return {'outcome': 'done', 'outcomes': outcomes}
";

/// How many connections of the host's have ended here and not on the other side.
fn unacknowledged(world: &World) -> usize {
    // LAST_ACK and CLOSING.
    let is_one =
        |line: &str| line.split_whitespace().nth(3).is_some_and(|state| ["09", "0B"].contains(&state));
    on_host(world, "cat", &["/proc/net/tcp"]).stdout.lines().filter(|line| is_one(line)).count()
}

/// How many sockets of the host's there are to this port, whatever became of their connections, but for those that only wait (TIME_WAIT).
fn sockets_to(world: &World, port: u16) -> usize {
    let end = format!(":{port:04X}");
    let is_one = |line: &&str| {
        let mut words = line.split_whitespace().skip(2);
        words.next().is_some_and(|to| to.ends_with(&end)) && words.next() != Some("06")
    };
    on_host(world, "cat", &["/proc/net/tcp"]).stdout.lines().filter(is_one).count()
}

#[test]
fn r14_connections_that_the_server_does_not_let_go_of() {
    let world = World::new();
    let file = world.home().path().join("few.toml");
    fs::write(&file, "[network_limits]\nconnections = 40\n").unwrap();
    let web = Guest::start(&world, "web", &["--net", "public", "--config", file.to_str().unwrap()]);
    let outcome = web.try_with(ENDED, &[json!(["ended", 15, SITE, 13])]).remove(0);
    outcome.is("done");
    let (ended, left) = (&outcome.result["outcomes"], unacknowledged(&world));
    let sockets = sockets_to(&world, 13);
    row("R14", "ended connections", &format!("{ended}: {left} of 40 are left"), (10..=40).contains(&left));
    row("R14", "sockets for them", &format!("{sockets} for 40"), sockets <= 40);
    web.until_event("the limit", |event| {
        event["event"] == "limit_hit"
            && event["limit"].as_str().is_some_and(|limit| limit.contains("at once"))
    });
    world.ok(&["rm", "-f", "web"]);
    // By timers of the host's kernel, which are as quick on a busy machine: it takes some 12 s, and 45 without the defence.
    let began = Instant::now();
    while unacknowledged(&world) > 0 {
        assert!(began.elapsed() < Duration::from_secs(30), "the host has not forgotten them");
        thread::sleep(Duration::from_millis(200));
    }
}

/// Clients that begin a greeting and say nothing more. Ten seconds are what the gateway gives them.
const SILENT_CLIENTS: &str = "
def silent(count):
    socks = []
    for index in range(count):
        try:
            socks.append(dialled('api.example', 443))
            socks[-1].sendall(b'\\x16\\x03\\x01')
        except OSError:
            time.sleep(0.01)
    answer = curl('http://site.example/')
    time.sleep(10 + SLOWNESS)
    ended = 0
    for sock in socks:
        sock.settimeout(0.1)
        try:
            ended += sock.recv(9) == b''
        except ConnectionResetError:
            ended += 1
        except OSError:
            pass
    return {'outcome': answer['outcome'], 'opened': len(socks), 'ended': ended}
";

#[test]
fn r5_clients_that_say_nothing() {
    let world = World::new();
    let scene = Scene::new(&world, &["--allow", "site.example:80,443", "--allow", "api.example:443"]);
    let outcome = scene.attack(SILENT_CLIENTS, json!(["silent", fewer(200).max(20)]));
    outcome.is("status 200");
    let (opened, ended) = (&outcome.result["opened"], &outcome.result["ended"]);
    row("R5", "clients that say nothing", &format!("{ended} of {opened} ended"), opened == ended);
    assert!(world.contacts_at("151.101.1.10", 443).is_empty(), "nothing was dialled for them");
    scene.survived();
}

#[test]
fn r5_published_ports_are_limited_too() {
    let world = World::new();
    let scene = Scene::new(&world, &["-p", "0:9000"]);
    let ports: Value = serde_json::from_str(&world.ok(&["port", "web", "--json"])).unwrap();
    let port = &ports[0]["host"];
    // No program listens in the sandbox: each inbound peer is refused, however many they are.
    let seconds = patience(Duration::from_secs(2)).as_secs();
    let calls = format!(
        "import socket, time\n\
         end, count = time.monotonic() + 3, 0\n\
         while time.monotonic() < end:\n\
         \x20try:\n\
         \x20\x20s = socket.create_connection(('127.0.0.1', {port}), {seconds}); s.settimeout({seconds}); s.recv(1); s.close()\n\
         \x20except OSError: pass\n\
         \x20count += 1\n\
         print(count)"
    );
    let ran = on_host(&world, "python3", &["-c", &calls]);
    let count: u64 = ran.stdout.trim().parse().unwrap();
    row("R5", "calls at a published port", &format!("{count} in 3 s"), count > fewer(100));
    scene.survived();
    assert_eq!(scene.web.try_one(json!(["names", "site.example", 1, GATEWAY])).word(), "code 0");
}
