//! Floods of datagrams and of questions for names.

use std::time::Instant;

use bathy_tests::kept::until;
use bathy_tests::world::World;
use bathy_tests::world::addresses::{SITE, SITE_V6};
use serde_json::json;

use crate::scene::Scene;
use bathy_tests::world::table::row;

#[test]
fn r5_datagrams() {
    let world = World::new();
    let scene = Scene::new(&world, &[]);
    let flood = "
def datagrams(seconds, to):
    family = socket.AF_INET6 if ':' in to else socket.AF_INET
    socks = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(900)]
    sent, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for sock in socks:
            try:
                sock.sendto(b'x' * 200, (to, 1 + sent % 60000))
            except OSError:
                pass
            sent += 1
    return {'outcome': 'done', 'sent': sent}

def one_flow(seconds, to, size):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((to, 7))
    sock.setblocking(False)
    sent, back, end = 0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            sock.send(b'x' * size)
            sent += 1
        except OSError:
            pass
        try:
            while sock.recv(65535):
                back += 1
        except OSError:
            pass
    return {'outcome': 'done', 'sent': sent, 'back': back}
";
    for to in ["151.101.9.9", "10.0.0.5"] {
        let outcome = scene.attack(flood, json!(["datagrams", 2, to]));
        let what = format!("datagrams from 900 ports to all ports of {to}");
        row("R5", &what, &format!("{} sent", outcome.result["sent"]), outcome.word() == "done");
    }
    for size in [1, 1400, 60_000] {
        let outcome = scene.attack(flood, json!(["one_flow", 1, "151.101.9.9", size]));
        let reported = format!("{} sent, {} came back", outcome.result["sent"], outcome.result["back"]);
        row("R5", &format!("datagrams of {size} bytes"), &reported, outcome.word() == "done");
    }
    // Flows are given back after a minute of silence; until then there is room for new ones in the same second only if the
    // limit leaves some.
    until("it serves again", 70, || {
        scene.web.try_one(json!(["curl", "http://site.example/"])).word() == "status 200"
    });
    scene.survived();
    scene.limited("new connections in a second");
    assert_eq!(world.contacts_beyond(&["151.101.9.9", SITE, SITE_V6]), []);
}

#[test]
fn r5_questions_for_names() {
    let world = World::new();
    let began = Instant::now();
    let scene = Scene::new(&world, &[]);
    let flood = "
def questions(seconds, name):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(('192.0.0.1', 53))
    sock.setblocking(False)
    sent, codes, end = 0, {}, time.monotonic() + seconds * PAUSE
    while time.monotonic() < end:
        try:
            sock.send(question(name.replace('N', str(sent)).split('.'), number=sent & 0xffff))
            sent += 1
        except OSError:
            pass
        try:
            while data := sock.recv(4096):
                code = str(data[3] & 15)
                codes[code] = codes.get(code, 0) + 1
        except OSError:
            pass
    return {'outcome': 'done', 'sent': sent, 'codes': codes}
";
    for name in ["site.example", "nN.tunnel.example", "silent.example"] {
        let outcome = scene.attack(flood, json!(["questions", 3, name]));
        let reported = format!("{} asked: {}", outcome.result["sent"], outcome.result["codes"]);
        let refused = outcome.result["codes"]["5"].as_u64() > Some(0);
        row("R5", &format!("questions for {name}"), &reported, refused);
    }
    // 500 at once, and 100 in a second. Those without an answer are sent four times.
    let asked = world.asked_names().into_iter().filter(|name| name != "silent.example").count();
    let most = 500 + 100 * usize::try_from(began.elapsed().as_secs() + 1).unwrap();
    row("R5", "what got out of them", &format!("{asked} questions, at most {most}"), asked <= most);
    until("names work again", 20, || scene.web.try_one(json!(["names", "site.example"])).word() == "code 0");
    scene.survived();
    let reported = scene.web.net_log();
    let reason = "The sandbox sends more than 100 DNS queries per second";
    assert!(reported.iter().any(|event| event["reason"] == reason), "no event of the limit");
    // One that is slow to say what it wants does not keep others waiting.
    let slow = "
def slow(count):
    socks = [dialled('192.0.0.1', 53) for _ in range(count)]
    for sock in socks:
        sock.sendall(b'\\0')
    return names('site.example', 1, '192.0.0.1', 'tcp')
";
    let outcome = scene.attack(slow, json!(["slow", 100]));
    row("R5", "a question beside a hundred slow ones", outcome.word(), outcome.word() == "code 0");
}
