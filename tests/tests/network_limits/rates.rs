//! How much a sandbox may send and receive in a second, and how its connections share it.

use std::fs;
use std::time::{Duration, Instant};

use bathy_tests::kept::until;
use bathy_tests::world::{Kind, World};
use bathy_tests::{is_emulated, promptly};
use serde_json::{Value, json};

use crate::scene::Scene;
use bathy_tests::world::guest::{AT_ONCE, Guest};
use bathy_tests::world::table::{row, undefended};

/// What a row moved, and how long that took. Packets that were sent count when they arrive, and what waits in the sandbox
/// still does: they are counted in the same moment as the time.
#[track_caller]
fn moved(guest: &Guest<'_>, row: &Value) -> Value {
    guest.world.forget_contacts();
    let began = Instant::now();
    let outcome = guest.try_with(MOVING, std::slice::from_ref(row)).remove(0).result;
    if row[0] != "packets_sent" {
        return outcome;
    }
    let arrived =
        guest.world.contacts_at("151.101.9.9", 7).into_iter().filter(|contact| contact.kind == Kind::Udp);
    json!({"count": arrived.count(), "sent": outcome["count"], "seconds": began.elapsed().as_secs_f64()})
}

/// A sandbox without those limits, where more gets through. A machine that is too slow for that shows nothing.
#[track_caller]
fn shown_without(world: &World, rows: &[(&str, Value)], limit: u64) {
    if is_emulated() {
        return;
    }
    fs::remove_file(world.home().path().join("bathysphere.toml")).unwrap();
    let open = Guest::start(world, "open", &["--net", "public"]);
    for (what, row) in rows {
        let outcome = moved(&open, row);
        let count = outcome["count"].as_f64().unwrap();
        let reported = format!("{count} in {} s", outcome["seconds"]);
        undefended("R5", what, &reported, count > most(limit, &outcome));
    }
}

/// A sandbox whose project sets these limits.
fn limited<'world>(world: &'world World, limits: &str) -> Scene<'world> {
    let file = world.home().path().join("bathysphere.toml");
    fs::write(file, format!("[network_limits]\n{limits}\n")).unwrap();
    Scene::new(world, &["--net", "public"])
}

/// Bytes one way and the other, until so many have gone, and packets for so long. Each reports how long that took.
const MOVING: &str = "
def received(total):
    buffer, count = bytearray(1 << 16), 0
    with dialled('93.184.215.14', 19) as sock:
        began = time.monotonic()
        while count < total:
            count += sock.recv_into(buffer)
        return {'outcome': 'done', 'count': count, 'seconds': time.monotonic() - began}

def sent(total):
    with dialled('93.184.215.14', 9) as sock:
        sock.settimeout(60)
        began = time.monotonic()
        sock.sendall(bytes(total))
        sock.shutdown(socket.SHUT_WR)
        # What arrived, reported by the other side.
        count = int(sock.makefile().readline())
        return {'outcome': 'done', 'count': count, 'seconds': time.monotonic() - began}

def packets_in():
    with open('/sys/class/net/eth0/statistics/rx_packets') as file:
        return int(file.read())

def packets_received(seconds):
    buffer = bytearray(1 << 16)
    with dialled('93.184.215.14', 19) as sock:
        began, before = time.monotonic(), packets_in()
        while time.monotonic() < began + seconds:
            sock.recv_into(buffer)
        count = packets_in() - before
        return {'outcome': 'done', 'count': count, 'seconds': time.monotonic() - began}

def packets_sent(seconds):
    began, count = time.monotonic(), 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(('151.101.9.9', 7))
        sock.setblocking(False)
        while time.monotonic() < began + seconds:
            try:
                sock.send(b'x')
                count += 1
            except OSError:
                time.sleep(0.001)
    return {'outcome': 'done', 'count': count, 'seconds': time.monotonic() - began}
";

/// How many a limit lets through in the time that was measured, with a second's worth at once and a little for the clock.
fn most(limit: u64, outcome: &Value) -> f64 {
    let limit = f64::from(u32::try_from(limit).unwrap());
    limit * (outcome["seconds"].as_f64().unwrap() + 1.0) * 1.05
}

#[test]
fn r5_bytes_have_a_limit_each_way() {
    const LIMIT: u64 = 2_000_000;
    let world = World::new();
    let scene = limited(&world, &format!("bytes = {LIMIT}"));
    for what in ["received", "sent"] {
        let outcome = moved(&scene.web, &json!([what, 4 * LIMIT]));
        let (count, seconds) = (outcome["count"].as_f64().unwrap(), outcome["seconds"].as_f64().unwrap());
        // It is slowed down, and does not stop.
        let held =
            count <= most(LIMIT, &outcome) && seconds < promptly(Duration::from_secs(12)).as_secs_f64();
        row(
            "R5",
            &format!("bytes {what}, {LIMIT} allowed in a second"),
            &format!("{count} in {seconds:.2} s"),
            held,
        );
    }
    scene.survived();
    let all = 4 * LIMIT;
    shown_without(
        &world,
        &[("bytes received", json!(["received", all])), ("bytes sent", json!(["sent", all]))],
        LIMIT,
    );
}

#[test]
fn r5_packets_have_a_limit_each_way() {
    // So few that a busy machine gets more through where there is no limit.
    const LIMIT: u64 = 250;
    let world = World::new();
    let scene = limited(&world, &format!("packets = {LIMIT}"));
    for what in ["received", "sent"] {
        let outcome = moved(&scene.web, &json!([format!("packets_{what}"), 3]));
        let count = outcome["count"].as_f64().unwrap();
        let held = count > 0.0 && count <= most(LIMIT, &outcome);
        let reported = format!("{count} in {} s", outcome["seconds"]);
        row("R5", &format!("packets {what}, {LIMIT} allowed in a second"), &reported, held);
    }
    // What waits in the sandbox's own queue comes first.
    until("it serves again", 20, || {
        scene.web.try_one(json!(["curl", "http://site.example/"])).word() == "status 200"
    });
    scene.survived();
    let rows =
        [("packets received", json!(["packets_received", 1])), ("packets sent", json!(["packets_sent", 1]))];
    shown_without(&world, &rows, LIMIT);
}

/// Eight downloads without end, and small requests beside them.
const BESIDE: &str = "
def beside(seconds):
    end, totals, waits = time.monotonic() + seconds * PAUSE, [0] * 8, []
    def load(index):
        buffer = bytearray(1 << 16)
        with dialled('93.184.215.14', 19) as sock:
            while time.monotonic() < end:
                totals[index] += sock.recv_into(buffer)
    workers = [threading.Thread(target=load, args=[index]) for index in range(8)]
    [worker.start() for worker in workers]
    time.sleep(0.5 * PAUSE)
    while time.monotonic() < end - 0.5:
        began = time.monotonic()
        with dialled('151.101.1.10', 80) as sock:
            sock.sendall(b'GET / HTTP/1.1\\r\\nHost: api.example\\r\\nConnection: close\\r\\n\\r\\n')
            if not sock.recv(4096).startswith(b'HTTP/1.1 200'):
                return {'outcome': 'no answer'}
        waits.append(round((time.monotonic() - began) * 1000))
        time.sleep(0.05)
    [worker.join() for worker in workers]
    return {'outcome': 'done', 'totals': totals, 'waits': waits}
";

#[test]
fn r5_a_small_request_does_not_wait_for_great_downloads() {
    let world = World::new();
    // Less than the sandbox could take: so it is the limit that they share.
    let scene = limited(&world, "bytes = 16000000");
    let most = promptly(AT_ONCE);
    let outcome = scene.attack(BESIDE, json!(["beside", 5]));
    outcome.is("done");
    let numbers = |key: &str| -> Vec<u64> {
        outcome.result[key].as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
    };
    let (waits, totals) = (numbers("waits"), numbers("totals"));
    let worst = Duration::from_millis(*waits.iter().max().unwrap());
    let reported = format!("{} requests, {worst:?} at most", waits.len());
    row("R5", "small requests beside eight downloads", &reported, worst < most);
    let (least, all) = (*totals.iter().min().unwrap(), totals.iter().sum::<u64>());
    row("R5", "eight downloads at once", &format!("{least} of {all} bytes at least"), least * 8 * 4 >= all);
    scene.survived();
}
