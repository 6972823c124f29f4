//! The test world itself: what the network suites take for granted about it.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use bathy_tests::kept::{is_alive, until};
use bathy_tests::world::addresses::{self, in_url};
use bathy_tests::world::{Contact, Kind, Side, World};
use bathy_tests::{Ran, finish, limit, patience, patient_seconds};
use rustix::process::geteuid;
use serde_json::{Value, json};

/// `curl` on the host.
fn curl(world: &World, arguments: &[&str]) -> Ran {
    finish(world.command("curl").args(["-sS", "-g", "--max-time", &patient_seconds(5)]).args(arguments), b"")
}

#[track_caller]
fn fetched(world: &World, url: &str) -> Value {
    let ran = curl(world, &[url]);
    assert_eq!(ran.code, Some(0), "{url}: {ran:?}");
    serde_json::from_str(&ran.stdout).unwrap()
}

/// The answer of a resolver.
#[track_caller]
fn asked(world: &World, arguments: &[&str]) -> Value {
    let ran = world.tool("ask.py", arguments);
    assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
    serde_json::from_str(&ran.stdout).unwrap()
}

/// The addresses that the resolver gives for a name, over UDP.
#[track_caller]
fn addresses_of(world: &World, name: &str, kind: &str) -> Vec<String> {
    let answer = asked(world, &[name, kind, addresses::RESOLVER]);
    let answers = answer["answers"].as_array().unwrap().iter().filter(|answer| answer["type"] == kind);
    answers.map(|answer| answer["data"].as_str().unwrap().to_owned()).collect()
}

#[track_caller]
fn output(mut command: Command) -> String {
    let ran = finish(&mut command, b"");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    ran.stdout
}

fn kinds(contacts: &[Contact]) -> Vec<Kind> {
    contacts.iter().map(|contact| contact.kind).collect()
}

#[test]
fn neither_side_has_an_interface_beyond_loopback_and_the_cable() {
    let world = World::new();
    for place in [World::command, World::outside_command] {
        let mut list = place(&world, "ip");
        list.args(["-j", "link"]);
        let links: Value = serde_json::from_str(&output(list)).unwrap();
        let names: Vec<_> = links.as_array().unwrap().iter().map(|link| &link["ifname"]).collect();
        assert_eq!(names, ["lo", "world"]);
        // The other end of the cable is in a namespace that is neither this one nor the machine's: it has no name here.
        assert_eq!(links[1]["link_type"], "ether");
        assert!(links[1]["flags"].as_array().unwrap().contains(&json!("LOWER_UP")), "{links}");
    }
    let own = std::fs::read_link("/proc/self/ns/net").unwrap();
    for pid in world.processes() {
        assert_ne!(std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap(), own);
    }
}

#[test]
fn everything_is_reached_from_the_host_and_is_written_down() {
    let world = World::new();
    let far = addresses::PUBLIC
        .iter()
        .chain(&addresses::PRIVATE)
        .chain(&addresses::LINK_LOCAL)
        .chain(&addresses::METADATA)
        .chain(&addresses::SPECIAL);
    let own = addresses::HOST_OWN.iter().chain(&addresses::LOOPBACK);
    let all = far.map(|address| (*address, "outside")).chain(own.map(|address| (*address, "inside")));
    for (address, side) in all {
        world.forget_contacts();
        let reported = fetched(&world, &format!("http://{}/here", in_url(address)));
        assert_eq!(reported["side"], side, "{address}");
        assert_eq!(reported["path"], "/here");
        // The system takes no address for its own.
        let reached = if address == "0.0.0.0" { "127.0.0.1" } else { address };
        let contacts = world.contacts_at(reached, 80);
        assert_eq!(kinds(&contacts), [Kind::Tcp, Kind::Http], "{address}");
        assert_eq!(contacts[1].detail.as_deref(), Some("GET /here"));
        assert_eq!(world.contacts_beyond(&[reached]), [], "{address}");
        assert_eq!(contacts[0].side == Side::Outside, side == "outside");
    }
}

#[test]
fn one_address_never_answers() {
    let world = World::new();
    let url = format!("http://{}/", addresses::SILENT);
    assert_eq!(curl(&world, &["--max-time", "1", &url]).code, Some(28));
    assert_eq!(world.contacts(), []);
}

#[test]
fn web_servers_do_what_they_say() {
    let world = World::new();
    let site = |path: &str| format!("http://{}{path}", addresses::SITE);
    let reported = |arguments: &[&str]| curl(&world, arguments).stdout;

    assert_eq!(reported(&[&site("/bytes/300000")]).len(), 300_000);
    assert_eq!(reported(&[&site("/slow/4")]).len(), 4096);
    assert_eq!(reported(&["-o", "/dev/null", "-w", "%{http_code}", &site("/status/418")]), "418");
    let redirect = site("/redirect?to=http://10.0.0.5/secret");
    assert_eq!(reported(&["-w", "%{redirect_url}", &redirect]), "http://10.0.0.5/secret");
    let mut upload = world.command("curl");
    upload.args(["-sS", "-T", "-", &site("/upload")]);
    assert_eq!(finish(&mut upload, &vec![7; 2_000_000]).stdout, "{\"bytes\": 2000000}\n");
    std::fs::create_dir(world.files().join("simple")).unwrap();
    std::fs::write(world.files().join("simple/index.html"), "<p>").unwrap();
    assert_eq!(reported(&[&site("/files/simple/")]), "<p>");
    assert_eq!(
        reported(&["-o", "/dev/null", "-w", "%{http_code}", "--path-as-is", &site("/files/../zone.json")]),
        "404"
    );

    world.forget_contacts();
    let twice = reported(&["-H", "Host: other.example", &site("/a"), &site("/b")]);
    assert_eq!(twice.matches("\"path\": ").count(), 2, "{twice}");
    // One connection, two requests.
    let contacts = world.contacts_at(addresses::SITE, 80);
    assert_eq!(kinds(&contacts), [Kind::Tcp, Kind::Http, Kind::Http]);
    assert_eq!(contacts[2].name.as_deref(), Some("other.example"));
}

#[test]
fn tls_servers_have_a_certificate_for_the_names_of_the_zone_and_note_the_one_that_was_asked_for() {
    let world = World::new();
    let authority = world.authority();
    let authority = authority.to_str().unwrap();
    let there = format!("api.example:443:{}", addresses::SITE);
    let ran = curl(&world, &["--cacert", authority, "--resolve", &there, "https://api.example/"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let contacts = world.contacts_at(addresses::SITE, 443);
    assert_eq!(kinds(&contacts), [Kind::Tcp, Kind::Tls, Kind::Http]);
    assert_eq!(contacts[1].name.as_deref(), Some("api.example"));

    let ran =
        curl(&world, &["--cacert", authority, "--http2", "-w", "%{http_version}", "https://1.1.1.1:8443/"]);
    assert!(ran.stdout.contains("\"HTTP/2\"") && ran.stdout.ends_with("}\n2"), "{ran:?}");
    let ran = curl(&world, &["--cacert", authority, "--http2", "-d", "body", "https://1.1.1.1:8443/"]);
    assert!(ran.stdout.contains("\"HTTP/2\""), "{ran:?}");

    // Also when the client trusts no authority.
    world.forget_contacts();
    let ran = curl(&world, &["--resolve", &there, "https://api.example/"]);
    assert_eq!(ran.code, Some(60), "{ran:?}");
    assert_eq!(kinds(&world.contacts_at(addresses::SITE, 443)), [Kind::Tcp, Kind::Tls]);
}

#[test]
fn web_sockets_say_everything_again() {
    let world = World::new();
    if !geteuid().is_root() {
        return;
    }
    let inside = world.enter();
    let mut stream = TcpStream::connect((addresses::SITE, 80)).unwrap();
    drop(inside);
    stream.set_read_timeout(Some(patience(Duration::from_secs(5)))).unwrap();
    let key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==";
    let head = format!("GET /ws HTTP/1.1\r\nHost: site.example\r\nUpgrade: websocket\r\n{key}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    // "hi" in one masked message.
    stream.write_all(&[0x81, 0x82, 1, 2, 3, 4, b'h' ^ 1, b'i' ^ 2]).unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(&[0x81, 2, b'h', b'i']) {
        let mut some = [0; 512];
        let count = stream.read(&mut some).unwrap();
        assert_ne!(count, 0, "{:?}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&some[..count]);
    }
    // The answer to this key is in RFC 6455.
    assert!(String::from_utf8_lossy(&answer).contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
}

#[test]
fn plain_servers_echo_discard_send_and_speak_first() {
    let world = World::new();
    if !geteuid().is_root() {
        return;
    }
    let _inside = world.enter();
    let connect = |port: u16| {
        let stream = TcpStream::connect(("1.1.1.1", port)).unwrap();
        stream.set_read_timeout(Some(patience(Duration::from_secs(5)))).unwrap();
        stream
    };
    let mut buffer = [0; 32];

    let mut echo = connect(7);
    echo.write_all(b"again").unwrap();
    echo.read_exact(&mut buffer[..5]).unwrap();
    assert_eq!(&buffer[..5], b"again");

    let mut discard = connect(9);
    discard.write_all(&[0; 100_000]).unwrap();
    discard.shutdown(std::net::Shutdown::Write).unwrap();
    let mut count = String::new();
    discard.read_to_string(&mut count).unwrap();
    assert_eq!(count, "100000\n");

    let mut source = connect(19);
    let mut zeros = vec![1; 1_000_000];
    source.read_exact(&mut zeros).unwrap();
    assert!(zeros.iter().all(|byte| *byte == 0));

    let mut first = connect(22);
    first.read_exact(&mut buffer[..8]).unwrap();
    assert_eq!(&buffer[..8], b"SSH-2.0-");

    for (from, to) in [("0.0.0.0:0", "8.8.8.8"), ("[::]:0", "2001:4860:4860::8888")] {
        for port in [7, 443, 853, 5353, 5355] {
            let socket = UdpSocket::bind(from).unwrap();
            socket.set_read_timeout(Some(patience(Duration::from_secs(5)))).unwrap();
            // Connected: an answer from another address than the one that was asked would not come through.
            socket.connect((to, port)).unwrap();
            socket.send(b"datagram").unwrap();
            assert_eq!(socket.recv(&mut buffer).unwrap(), 8);
            assert_eq!(kinds(&world.contacts_at(to, port)), [Kind::Udp]);
        }
    }
}

#[test]
fn what_has_arrived_is_told_even_if_its_server_has_not_looked_yet() {
    let world = World::new();
    if !geteuid().is_root() {
        return;
    }
    let _inside = world.enter();
    for round in 1..=200 {
        drop(TcpStream::connect(("10.0.0.5", 22)).unwrap());
        assert_eq!(world.contacts_at("10.0.0.5", 22).len(), round);
    }
}

#[test]
fn the_resolver_answers_over_every_transport_and_everything_is_written_down() {
    let world = World::new();
    for (transport, port) in [("udp", 53), ("tcp", 53), ("tls", 853)] {
        world.forget_contacts();
        let answer = asked(&world, &["site.example", "A", addresses::RESOLVER, transport]);
        assert_eq!(answer["answers"][0]["data"], addresses::SITE, "{transport}");
        assert_eq!(world.asked_names(), ["site.example"], "{transport}");
        assert!(world.contacts_at(addresses::RESOLVER, port).iter().any(|contact| contact.kind == Kind::Dns));
    }
    // Every other resolver gives the same answer, and records it.
    assert_eq!(asked(&world, &["site.example", "A", "8.8.8.8"])["answers"][0]["data"], addresses::SITE);
    assert_eq!(kinds(&world.contacts_beyond(&[])), [Kind::Dns]);
    assert_eq!(addresses_of(&world, "site.example", "AAAA"), [addresses::SITE_V6]);
}

#[test]
fn the_zone_has_the_tricks_of_an_attacker() {
    let world = World::with_names(&json!({ "own.example": { "A": ["151.101.9.9"] } }));
    let seconds = limit(Duration::from_millis(500)).as_secs_f64().to_string();
    let ask = |name: &str| asked(&world, &[name, "A", addresses::RESOLVER, "udp", &seconds]);

    assert_eq!(addresses_of(&world, "own.example", "A"), ["151.101.9.9"]);
    assert_eq!(addresses_of(&world, "rebind.example", "A"), [addresses::SITE]);
    assert_eq!(addresses_of(&world, "rebind.example", "A"), ["10.0.0.5"]);
    assert_eq!(ask("rebind.example")["answers"][0]["ttl"], 0);
    assert_eq!(addresses_of(&world, "mixed.example", "A"), [addresses::SITE, "10.0.0.5"]);
    assert_eq!(addresses_of(&world, "mapped.example", "AAAA")[0], "::ffff:a00:5");
    assert_eq!(addresses_of(&world, "some.data.tunnel.example", "A"), [addresses::SITE]);

    let inward = ask("inward.example");
    assert_eq!(inward["answers"][0]["data"], "db.internal.example");
    assert_eq!(inward["answers"][1]["data"], "172.16.0.5");
    assert_eq!(ask("chain20.example")["answers"].as_array().unwrap().len(), 21);
    let longer = asked(&world, &["chain0.example", "A", addresses::RESOLVER, "tcp"]);
    assert_eq!(longer["answers"].as_array().unwrap().len(), 41);
    assert_eq!(ask("circle.example")["answers"].as_array().unwrap().len(), 2);

    assert_eq!(ask("unheard-of.example")["rcode"], 3);
    assert_eq!(ask("fails.example")["rcode"], 2);
    assert_eq!(ask("silent.example"), json!({ "answered": false }));
    assert_eq!(ask("garbage.example"), json!({ "answered": true, "readable": false }));
    assert_eq!(ask("wrong-id.example")["same_id"], false);
    assert_eq!(ask("other-question.example")["question"], "other.example");
    assert_eq!(ask("poison.example")["answers"][0]["name"], "site.example");

    let cut = ask("big.example");
    assert_eq!((&cut["truncated"], &cut["answers"]), (&json!(true), &json!([])));
    let whole = asked(&world, &["big.example", "A", addresses::RESOLVER, "tcp"]);
    assert_eq!(whole["answers"].as_array().unwrap().len(), 120);
    let hints = asked(&world, &["ech.example", "HTTPS", addresses::RESOLVER]);
    // A priority of one, no other name, two protocols.
    assert!(
        hints["answers"][0]["data"].as_str().unwrap().starts_with("000100000100060268320268330004"),
        "{hints}"
    );
}

#[test]
fn everybody_else_can_reach_the_host() {
    let world = World::new();
    for address in addresses::HOST_OWN {
        let mut outside = world.outside_command("curl");
        outside.args([
            "-sS",
            "-g",
            "--max-time",
            &patient_seconds(5),
            &format!("http://{}/", in_url(address)),
        ]);
        let reported: Value = serde_json::from_str(&output(outside)).unwrap();
        assert_eq!((&reported["side"], &reported["address"]), (&json!("inside"), &json!(address)));
    }
}

#[test]
fn two_worlds_do_not_see_each_other() {
    let (one, other) = (World::new(), World::new());
    std::fs::write(one.files().join("which"), "one").unwrap();
    std::fs::write(other.files().join("which"), "other").unwrap();
    let url = format!("http://{}/files/which", addresses::SITE);
    assert_eq!(curl(&one, &[&url]).stdout, "one");
    assert_eq!(other.contacts(), []);
    assert_eq!(curl(&other, &[&url]).stdout, "other");
    assert_eq!(one.contacts().len(), 2);
    assert!(one.processes().is_disjoint(&other.processes()));
}

#[test]
fn a_world_that_ends_takes_no_other_along() {
    // The system gives the name of a network that is gone to the next one.
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..2 {
                    assert_eq!(World::new().processes().len(), 2);
                }
            });
        }
    });
}

#[test]
fn nothing_is_left_of_a_world_even_if_a_test_panics_in_it() {
    let mut all = Vec::new();
    let mut folder = std::path::PathBuf::new();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let world = World::new();
        folder = world.files();
        let mut forgotten = world.command("sleep").arg("600").spawn().unwrap();
        until("the forgotten process is inside", 5, || world.processes().contains(&forgotten.id()));
        all.extend(world.processes());
        assert_eq!(all.len(), 3, "the servers of both sides, and the forgotten process");
        // A parent has to reap it.
        std::thread::spawn(move || forgotten.wait());
        assert_eq!(world.contacts().len(), 1, "this fails on purpose");
    }));
    panicked.unwrap_err();
    until("all processes are gone", 3, || !all.iter().any(|pid| is_alive(*pid)));
    assert!(!folder.exists());
}

#[test]
fn a_world_whose_test_was_killed_ends_by_itself() {
    const ROLE: &str = "BATHY_TESTS_TO_BE_KILLED";
    if std::env::var_os(ROLE).is_some() {
        let world = World::new();
        let pids: Vec<String> = world.processes().iter().map(u32::to_string).collect();
        eprintln!("servers {} {}", world.files().display(), pids.join(" "));
        std::thread::sleep(Duration::from_secs(600));
    }
    // This very test, in another process.
    let mut test = Command::new(std::env::current_exe().unwrap());
    test.args(["--exact", "a_world_whose_test_was_killed_ends_by_itself", "--nocapture"]);
    let mut test = test.env(ROLE, "1").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(test.stderr.take().unwrap()).lines().map_while(Result::ok);
    let servers = lines.find_map(|line| line.strip_prefix("servers ").map(str::to_owned)).unwrap();
    let (folder, servers) = servers.split_once(' ').unwrap();
    let servers: Vec<u32> = servers.split(' ').map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(servers.len(), 2);
    assert!(servers.iter().all(|pid| is_alive(*pid)));

    test.kill().unwrap();
    test.wait().unwrap();

    until("its servers have noticed", 5, || !servers.iter().any(|pid| is_alive(*pid)));
    assert!(!Path::new(folder).exists());
}
