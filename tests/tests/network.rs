//! A sandbox's network, as its users see it. Everything happens in a world of its own, from which nothing gets out.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;
use std::process::{Child, Output};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bathy_tests::kept::{descendants, signal, until};
use bathy_tests::world::addresses::{self, HOST_OWN, LINK_LOCAL, METADATA, PRIVATE, SITE, SITE_V6, SPECIAL};
use bathy_tests::world::guest::{AT_ONCE, GATEWAY, Guest, on_host};
use bathy_tests::world::{Kind, World};
use bathy_tests::{Ran, finish, pace, patience, promptly, slowness};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The addresses of `api.example`.
const API: &str = "151.101.1.10";
const API_V6: &str = "2a04:4e42::10";

/// An address in an URL, as the sandbox writes it.
fn in_url(address: &str) -> String {
    addresses::in_url(address).replace("%25world", "%25eth0")
}

#[track_caller]
fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// The decisions about an address.
fn denials<'a>(log: &'a [Value], address: &str) -> Vec<&'a Value> {
    let parsed: std::net::IpAddr = address.parse().unwrap();
    let text = parsed.to_string();
    log.iter().filter(|event| event["event"] == "net_denied" && event["address"] == *text).collect()
}

#[test]
fn a_public_site_is_reached() {
    let world = World::new();
    let seen = parsed(&world.ok(&["run", "--net", "public", "--", "curl", "-sS", "http://site.example"]));
    assert_eq!(seen["side"], "outside");
    assert_eq!(seen["host"], "site.example");
    // The address of the sandbox's own link exists nowhere outside.
    assert!(
        seen["peer"] == *addresses::HOST || seen["peer"] == *"fd77::2" || seen["peer"] == *"2606:2800:77::2"
    );
    // It is also the default.
    let seen = parsed(&world.ok(&["run", "--", "curl", "-4", "-sS", "http://site.example/x"]));
    assert_eq!(seen["address"], SITE);
}

#[test]
fn every_class_of_denied_address_fails_at_once_with_a_reason() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--net", "public"]);
    let all: Vec<&str> =
        [&PRIVATE[..], &LINK_LOCAL, &METADATA, &SPECIAL, &HOST_OWN].into_iter().flatten().copied().collect();
    let requests: Vec<_> =
        all.iter().map(|address| json!(["curl", format!("http://{}/", in_url(address))])).collect();
    let connections: Vec<_> =
        all.iter().map(|address| json!(["curl", format!("https://{}/", in_url(address))])).collect();
    for (address, outcome) in all.iter().zip(web.try_all(&requests)) {
        outcome.is_denied();
        if address.starts_with("fe80:") {
            continue;
        }
        // For plain HTTP the response has the rule, and how to change it.
        outcome.is("status 403").says("The network policy of this sandbox denies").says("preset public");
    }
    for outcome in web.try_all(&connections) {
        outcome.is_denied();
    }
    assert_eq!(world.contacts_beyond(&[]), []);

    let log = web.net_log();
    for address in all.iter().filter(|address| !address.starts_with("fe80:")) {
        let denied = denials(&log, address);
        let ports: Vec<_> = denied.iter().map(|event| event["port"].as_u64().unwrap()).collect();
        assert!(ports.contains(&80) && ports.contains(&443), "{address}: {log:#?}");
        assert!(
            denied.iter().all(|event| event["rule"] == "preset public" && event["protocol"] == "tcp"),
            "{denied:?}"
        );
    }
    let lines = world.ok(&["net", "log", "web"]);
    let line = lines.lines().find(|line| line.contains("10.0.0.5:443")).unwrap();
    assert!(line.contains("denied tcp to 10.0.0.5:443 by preset public"), "{line}");
    assert!(line.ends_with("to allow it: bathy policy allow web tcp://10.0.0.5:443"), "{line}");
    // The command in the hint works.
    web.policy("allow", &["tcp://10.0.0.5:443"]);
    web.try_one(json!(["curl", "https://10.0.0.5/"])).is("status 200");
    web.try_one(json!(["curl", "http://10.0.0.5/"])).is("status 403");
}

#[test]
fn what_a_command_was_kept_from_is_told_at_its_end() {
    let world = World::new();
    let curl = ["--", "curl", "-k", "-sS", "https://10.0.0.5/"];
    let run = |options: &[&str], command: &[&str]| world.bathy(&[&["run"], options, command].concat());
    let ran = run(&["--deny", "private"], &curl);
    let hint = "--allow tcp://10.0.0.5:443, before the other rules";
    let reported = format!("bathy: denied tcp to 10.0.0.5:443 by deny private; to allow it: {hint}\n");
    assert!(ran.code == Some(7) && ran.stderr.ends_with(&reported), "{ran:?}");
    // There, the option in the hint works.
    let ran = run(&["--net", "public", "--allow", "tcp://10.0.0.5:443", "--deny", "private"], &curl);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
    // Who has done its work has not missed it.
    let ran = run(&[], &["--", "sh", "-c", "curl -sS https://10.0.0.5/ 2> /dev/null; echo done"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
    let denied = parsed(&run(&["--json"], &curl).stdout)["denied"].clone();
    assert_eq!(
        denied,
        json!(["denied tcp to 10.0.0.5:443 by preset public; to allow it: --allow tcp://10.0.0.5:443"])
    );
}

#[test]
fn a_rule_is_taken_back() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let asks = || web.try_one(json!(["curl", "http://site.example/"]));
    web.policy("deny", &["site.example", "private"]);
    asks().is_denied();
    web.policy("rm", &["deny site.example"]);
    asks().is("status 200");
    let ran = world.bathy(&["policy", "rm", "web", "deny site.example"]);
    assert!(ran.code == Some(125) && ran.stderr.contains("It has [\"deny private\"]"), "{ran:?}");
}

#[test]
fn the_hosts_loopback_is_not_behind_the_gateway() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let mut rows = Vec::new();
    for host in [GATEWAY, "127.0.0.1", "localhost", "0.0.0.0", "[fd62:6174:6879::1]", "[::1]"] {
        rows.extend([80, 8080].map(|port| json!(["curl", format!("http://{host}:{port}/")])));
    }
    rows.push(json!(["datagram", GATEWAY, 7, "x"]));
    for outcome in web.try_all(&rows) {
        outcome.is_denied();
    }
    assert_eq!(world.contacts(), []);
}

#[test]
fn without_a_network_there_is_only_loopback() {
    let world = World::new();
    let none = Guest::start(&world, "none", &["--net", "none"]);
    assert_eq!(none.user(&["ls", "/sys/class/net"]), "lo\n");
    let links = none.user(&["ip", "-o", "link"]);
    assert_eq!(links.lines().count(), 1, "{links}");
    none.try_one(json!(["curl", "http://site.example/"])).is("unresolved").took_at_most(AT_ONCE);
    none.try_one(json!(["connect", SITE, 80])).is("unreachable").took_at_most(AT_ONCE);
    assert_eq!(world.contacts(), []);
    // It does not get one while it runs, and the message explains it.
    let ran = world.bathy(&["policy", "set", "none", "public"]);
    assert_eq!(ran.code, Some(125), "{ran:?}");
    assert!(ran.stderr.contains("started without a network"), "{ran:?}");
    assert_eq!(none.user(&["ls", "/sys/class/net"]), "lo\n");
}

#[test]
fn one_allowed_name_is_all_that_is_reached() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--allow", "api.example:443"]);
    let outcomes = web.try_all(&[
        // By its address, before it was ever resolved, and after.
        json!(["connect", API, 443]),
        json!(["curl", "https://api.example/x"]),
        json!(["curl", format!("https://{API}/")]),
        json!(["tls", API, 443, "api.example"]),
        // With another name in the greeting, or in none.
        json!(["curl", "--connect-to", "shared.example:443:api.example:443", "https://shared.example/"]),
        json!(["tls", "api.example", 443, "site.example"]),
        json!(["tls", "api.example", 443]),
        // At another port.
        json!(["curl", "http://api.example/"]),
        json!(["curl", "https://api.example:8443/"]),
        json!(["connect", "api.example", 22]),
        // Other names, and other addresses.
        json!(["curl", "https://site.example/"]),
        json!(["curl", "https://shared.example/"]),
        json!(["connect", SITE, 443]),
        json!(["connect", "10.0.0.5", 443]),
        // No datagrams, because the name in them cannot be inspected.
        json!(["datagram", API, 443, "x"]),
        json!(["datagram", "8.8.8.8", 53, "x"]),
    ]);
    outcomes[1].is("status 200");
    outcomes[3].is("open");
    for outcome in
        outcomes.iter().enumerate().filter(|(index, _)| ![1, 3].contains(index)).map(|(_, outcome)| outcome)
    {
        outcome.is_denied();
    }
    let contacts = world.contacts_beyond(&[]);
    for contact in &contacts {
        assert!(
            [API, API_V6].contains(&contact.address.to_string().as_str()) && contact.port == 443,
            "{contact:?}"
        );
        assert!(contact.kind != Kind::Tls || contact.name.as_deref() == Some("api.example"), "{contact:?}");
    }
    assert_eq!(contacts.iter().filter(|contact| contact.kind == Kind::Tls).count(), 2, "{contacts:?}");
    // Names without an address are not denials.
    let asked = world.asked_names();
    assert!(asked.iter().all(|name| name == "api.example"), "{asked:?}");
    let log = web.net_log();
    let refused = log
        .iter()
        .find(|event| event["event"] == "name_unresolved" && event["host"] == "site.example")
        .unwrap();
    assert_eq!(refused["denied"], true);
    assert_eq!(refused["reason"], "preset allow-list");
}

#[test]
fn another_host_than_the_resolved_one_gets_a_403() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--allow", "api.example:80", "--allow", "shared.example:80"]);
    let request = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let outcomes = web.try_all(&[
        json!(["say", "api.example", 80, request("api.example")]),
        json!(["say", "api.example", 80, request("site.example")]),
        json!(["say", "api.example", 80, request(API)]),
        json!(["say", "api.example", 80, "GET / HTTP/1.0\r\n\r\n"]),
        // Allowed as well, and at the same address, but this sandbox has not resolved it.
        json!(["say", API, 80, request("shared.example")]),
        json!(["resolved", "shared.example"]),
        json!(["say", API, 80, request("shared.example")]),
    ]);
    for index in [0, 6] {
        outcomes[index].says("HTTP/1.1 200 OK");
    }
    for index in [1, 2, 3, 4] {
        outcomes[index].says("HTTP/1.1 403 Forbidden");
    }
    outcomes[1].says("the client's host name, site.example, was not resolved to this address");
    outcomes[3].says("the client sent no host name");
    let heard: Vec<_> = world.contacts().into_iter().filter(|contact| contact.kind == Kind::Http).collect();
    let hosts: Vec<_> = heard.iter().map(|contact| contact.name.as_deref().unwrap()).collect();
    assert_eq!(hosts, ["api.example", "shared.example"]);
}

/// A download that runs beside everything else.
fn download(world: &World, name: &str, url: &str) -> Child {
    world.bathy_command(&["exec", name, "--", "curl", "-sS", url]).spawn().unwrap()
}

fn ended(child: Child) -> (Output, Instant) {
    (child.wait_with_output().unwrap(), Instant::now())
}

#[test]
fn a_new_denial_ends_a_download_and_no_other() {
    let world = World::new();
    // A rule with a name in it: so what connections carry is read, and a new name ends only those that carry it.
    let web = Guest::start(&world, "web", &["--net", "public", "--deny", "bad.example"]);
    // A KiB every 50 ms, for longer than any of what follows takes.
    let denied = download(&world, "web", &format!("http://site.example/slow/{}", 400 * slowness()));
    let allowed = download(&world, "web", "http://api.example/slow/60");
    until("both have begun", 5, || {
        let http = world.contacts().into_iter().filter(|contact| contact.kind == Kind::Http);
        http.count() == 2
    });
    sleep(pace(Duration::from_millis(300)));
    let changed = Instant::now();
    let ran = world.bathy(&["policy", "deny", "web", "site.example"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(
        ran.stdout.contains("deny site.example") && ran.stderr.contains("1 connection was closed"),
        "{ran:?}"
    );
    let (output, end) = ended(denied);
    assert_eq!(output.status.code(), Some(56), "{output:?}");
    let most = 100 * 1024 * usize::try_from(slowness()).unwrap();
    assert!((1024..most).contains(&output.stdout.len()), "{}", output.stdout.len());
    assert!(end - changed < promptly(Duration::from_secs(2)), "{:?}", end - changed);
    let (output, _) = ended(allowed);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stdout.len(), 60 * 1024);

    web.until_event("the end and its reason", |event| {
        event["event"] == "net_closed"
            && event["host"] == "site.example"
            && event["reason"] == "the policy was changed: deny site.example"
            && event["received"].as_u64() > Some(1024)
    });
    web.until_event("the other end", |event| {
        event["event"] == "net_closed"
            && event["host"] == "api.example"
            && event["received"].as_u64() > Some(60 * 1024)
    });
    web.until_event("the change", |event| event["event"] == "policy_changed" && event["closed"] == 1);
    web.try_one(json!(["curl", "http://site.example/"])).is_denied();
    web.policy("allow", &["site.example"]);
    web.try_one(json!(["curl", "http://site.example/"])).is("status 200");
}

#[test]
fn policies_are_shown_and_set() {
    let world = World::new();
    let web = Guest::start(
        &world,
        "web",
        &["--allow", "api.example:443", "--deny", "*.example", "--net", "public"],
    );
    assert_eq!(
        web.policy("show", &[]),
        "allow api.example:443\ndeny *.example\npublic (otherwise: public addresses)\n"
    );
    let shown = parsed(&web.policy("show", &["--json"]));
    assert_eq!(
        shown["policy"],
        json!({"preset": "public", "rules": ["allow api.example:443", "deny *.example"]})
    );
    assert_eq!(shown["ceilings"], json!([]));
    let set = web.policy("set", &["allow-list", "allow 10.0.0.5:80", "deny private"]);
    assert_eq!(set, "allow 10.0.0.5:80\ndeny private\nallow-list (otherwise: nothing)\n");
    web.try_one(json!(["curl", "http://10.0.0.5/"])).is("status 200");
    web.try_one(json!(["curl", "http://172.16.0.5/"])).is("status 403").says("deny private");
    // It holds for the next start, too.
    world.ok(&["restart", "-t", "1", "web"]);
    web.try_one(json!(["curl", "http://10.0.0.5/"])).is("status 200");
}

#[test]
fn ports_lead_into_a_sandbox() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["-p", "0:80", "-p", "0:7000/udp", "-p", "[::1]:0:80"]);
    let server = "import socket, threading\n\
        u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('', 7000))\n\
        def echo():\n\
        \x20while True:\n\
        \x20\x20data, peer = u.recvfrom(65535)\n\
        \x20\x20u.sendto(b'again ' + data, peer)\n\
        threading.Thread(target=echo, daemon=True).start()\n\
        import http.server\n\
        class H(http.server.BaseHTTPRequestHandler):\n\
        \x20def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b'from inside')\n\
        http.server.HTTPServer(('', 80), H).serve_forever()";
    world.ok(&["exec", "-d", "-u", "root", "web", "--", "python3", "-c", server]);
    let ports = parsed(&world.ok(&["port", "web", "--json"]));
    let port = |index: usize| ports[index]["host"].as_u64().unwrap();
    assert_eq!(ports[0]["bind"], "127.0.0.1");
    assert_eq!((&ports[0]["guest"], &ports[0]["protocol"]), (&json!(80), &json!("tcp")));
    assert_eq!((&ports[1]["guest"], &ports[1]["protocol"]), (&json!(7000), &json!("udp")));
    let (tcp, udp, v6) = (port(0), port(1), port(2));
    let shown = world.ok(&["port", "web"]);
    let lines = format!("80/tcp -> 127.0.0.1:{tcp}\n7000/udp -> 127.0.0.1:{udp}\n80/tcp -> [::1]:{v6}\n");
    assert_eq!(shown, lines);

    let seconds = patience(Duration::from_secs(3)).as_secs().to_string();
    let fetched = |url: &str| on_host(&world, "curl", &["-sS", "-g", "--max-time", &seconds, url]);
    let local = format!("http://127.0.0.1:{tcp}/");
    until("the server answers", 5, || fetched(&local).stdout == "from inside");
    assert_eq!(fetched(&format!("http://[::1]:{v6}/")).stdout, "from inside");
    let ask = format!(
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout({seconds}); \
         s.connect(('127.0.0.1', {udp})); s.send(b'hello'); print(s.recv(99).decode())"
    );
    assert_eq!(on_host(&world, "python3", &["-c", &ask]).stdout, "again hello\n");
    // No other address leads there.
    let mut outside = world.outside_command("curl");
    outside.args(["-sS", "--max-time", &seconds, &format!("http://{}:{tcp}/", addresses::HOST)]);
    assert_eq!(finish(&mut outside, b"").code, Some(7));
    web.until_event("the caller", |event| {
        event["event"] == "net_allowed"
            && event["direction"] == "in"
            && event["port"] == 80
            && event["rule"] == "published port"
    });

    // Another sandbox has the port already.
    world.ok(&["create", "--name", "late", "-p", &format!("{tcp}:80")]);
    let ran = world.bathy(&["start", "late"]);
    assert_eq!(ran.code, Some(125), "{ran:?}");
    assert!(ran.stderr.contains(&format!("Port {tcp} of 127.0.0.1 is in use")), "{ran:?}");
    assert!(ran.stderr.contains("-p 127.0.0.1:0:80"), "{ran:?}");

    // Callers have rules of their own.
    web.policy("deny", &["in loopback"]);
    let refused = fetched(&local);
    assert!([Some(7), Some(52), Some(55), Some(56)].contains(&refused.code), "{refused:?}");
    web.until_event("the denied caller", |event| {
        event["event"] == "net_denied" && event["direction"] == "in" && event["rule"] == "deny in loopback"
    });
    // A port is free again when its sandbox is gone.
    world.ok(&["rm", "-f", "web"]);
    world.ok(&["start", "late"]);
}

/// `bathy` under an operator's configuration.
fn under(world: &World, config: &str, arguments: &[&str]) -> Ran {
    let file = world.home().path().join("operator.toml");
    fs::write(&file, config).unwrap();
    finish(world.bathy_command(arguments).env("BATHYSPHERE_CONFIG", &file), b"")
}

#[test]
fn the_operators_ceiling_cannot_be_widened() {
    let world = World::new();
    let config = "[network]\npreset = \"public\"\nrules = [\"deny api.example\", \"allow 10.0.0.5:80\"]\n";
    let bathy = |arguments: &[&str]| {
        let ran = under(&world, config, arguments);
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        ran.stdout
    };
    bathy(&[
        "create", "--name", "web", "--net", "open", "--allow", "any", "--allow", "metadata", "--allow",
        "host",
    ]);
    bathy(&["start", "web"]);
    let web = Guest { world: &world, name: "web" };
    for target in ["api.example", "172.16.0.5", "metadata", "loopback", "any"] {
        bathy(&["policy", "allow", "web", target]);
    }
    let shown = bathy(&["policy", "show", "web"]);
    assert!(
        shown.starts_with("# the operator, for every sandbox:\ndeny api.example\nallow 10.0.0.5:80\npublic"),
        "{shown}"
    );
    let rows = [
        json!(["curl", "http://api.example/"]),
        json!(["curl", "http://172.16.0.5/"]),
        json!(["curl", "http://169.254.169.254/"]),
        json!(["curl", format!("http://{}/", addresses::HOST)]),
        json!(["curl", "http://10.0.0.5:8080/"]),
        json!(["curl", "http://10.0.0.5/"]),
        json!(["curl", "http://site.example/"]),
    ];
    let outcomes = web.try_all(&rows);
    for outcome in &outcomes[..5] {
        outcome.is_denied();
    }
    outcomes[1]
        .is("status 403")
        .says("operator: preset public")
        .says("the operator of this host denies it for every sandbox");
    outcomes[5].is("status 200");
    outcomes[6].is("status 200");
    assert_eq!(world.contacts_beyond(&[SITE, SITE_V6, "10.0.0.5"]), []);
    // An error in the operator's own rules is reported, and nothing starts.
    let ran = under(&world, "[network]\nrules = [\"deny pubilc\"]\n", &["create", "--name", "never"]);
    assert_eq!(ran.code, Some(125), "{ran:?}");
    assert!(ran.stderr.contains("looks like \"public\""), "{ran:?}");
}

#[test]
fn what_is_wrong_with_a_rule_is_said_with_its_place() {
    let world = World::new();
    for (arguments, words) in [
        (&["--net", "pubic"][..], &["Did you mean \"public\"?"][..]),
        (&["--allow", "api.example:http"], &["Column 13", "\"http\" is not a port", "1 to 65535"]),
        (&["--allow", "pubilc"], &["Column 1", "looks like \"public\""]),
        (&["--deny", "exa mple"], &["Column 1", "GET,HEAD"]),
        (&["--allow", "https://api.example/v1"], &["cannot be seen inside of TLS", "api.example:443"]),
        (&["--allow", "upd://1.1.1.1:53"], &["is not a protocol", "Did you mean \"udp\"?"]),
        (&["--allow", "api.example:8100-8000"], &["runs backwards", "8000-8100"]),
        (&["--allow", "10.0.0.0/33"], &["Column 1", "33"]),
        (&["--allow", "0177.0.0.1"], &["0177.0.0.1"]),
        (&["--allow", "2130706433"], &["2130706433", "decimal"]),
        (&["--allow", "ｅxample.com"], &["ASCII"]),
        (&["--allow", "get http://api.example/"], &["capital letters"]),
        (&["--allow", "udp://api.example:53"], &["Only TCP carries a name"]),
        (&["--allow", ""], &["target is missing"]),
        (&["--net", "none", "--allow", "public"], &["preset none has none", "allow-list"]),
        (&["--net", "none", "-p", "8080:80"], &["preset none has none"]),
        (&["-p", "8080"], &["8080:8080"]),
        (&["-p", "localhost:80:80"], &["127.0.0.1"]),
        (&["-p", "80:80/sctp"], &["tcp and udp"]),
        (&["-p", "99999:80"], &["99999", "65535"]),
    ] {
        let ran = world.bathy(&[&["create", "--name", "never"], arguments].concat());
        assert!(matches!(ran.code, Some(2 | 125)), "{arguments:?}: {ran:?}");
        for word in words {
            assert!(ran.stderr.contains(word), "{arguments:?}: no {word:?} in {}", ran.stderr);
        }
        assert!(!ran.stderr.contains('\u{1b}'));
    }
    assert_eq!(world.ok(&["ls", "-q"]), "");
    world.ok(&["create", "--name", "web"]);
    let ran = world.bathy(&["policy", "allow", "web", "api.example:99999"]);
    assert!(ran.code == Some(125) && ran.stderr.contains("Column 13"), "{ran:?}");
    let ran = world.bathy(&["policy", "set", "web", "public", "alow public"]);
    assert!(ran.stderr.contains("Did you mean \"allow\"?"), "{ran:?}");
    assert_eq!(world.ok(&["policy", "show", "web"]), "public (otherwise: public addresses)\n");
}

#[test]
fn the_log_follows() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let mut follow = world.bathy_command(&["net", "log", "web", "-f", "--json"]);
    let mut child = follow.spawn().unwrap();
    web.try_one(json!(["curl", "http://10.0.0.5/"])).is("status 403");
    web.try_one(json!(["curl", "http://site.example/bytes/5000"])).is("status 200");
    sleep(pace(Duration::from_millis(500)));
    child.kill().unwrap();
    let (output, _) = ended(child);
    let text = String::from_utf8(output.stdout).unwrap();
    let events: Vec<Value> = text.lines().map(parsed).collect();
    let kinds: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    for kind in ["net_denied", "name_resolved", "net_allowed", "net_closed"] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
    let closed = events.iter().find(|event| event["event"] == "net_closed").unwrap();
    assert_eq!(closed["host"], "site.example");
    assert!(
        closed["received"].as_u64().unwrap() >= 5000 && closed["sent"].as_u64().unwrap() > 50,
        "{closed}"
    );
    assert!(closed["took_ms"].is_u64() && closed["protocol"] == "tcp", "{closed}");
}

/// What `bathy run` reports about a script in a sandbox that ends with it.
#[track_caller]
fn ran_once(world: &World, script: &str) -> Value {
    parsed(&world.ok(&["run", "--net", "public", "--json", "--", "sh", "-c", script]))
}

#[test]
fn a_sandbox_for_one_command_is_denied_at_once_with_a_reason_too() {
    let world = World::new();
    let all: Vec<&str> = [&PRIVATE[..], &LINK_LOCAL, &METADATA, &SPECIAL, &HOST_OWN]
        .into_iter()
        .flatten()
        .copied()
        .filter(|address| !address.starts_with("fe80:"))
        .collect();
    let list: Vec<_> = all.iter().map(|address| addresses::in_url(address)).collect();
    let curl = "curl -gksS -m 30 -o /dev/null -w '%{http_code} %{exitcode} %{time_total}\\n'";
    let script =
        format!("for at in {}; do {curl} http://$at/; {curl} https://$at/; done; exit 0", list.join(" "));
    let reported = ran_once(&world, &script);
    let lines: Vec<Vec<&str>> =
        reported["stdout"]["text"].as_str().unwrap().lines().map(|line| line.split(' ').collect()).collect();
    assert_eq!(lines.len(), 2 * all.len(), "{reported}");
    for (address, both) in all.iter().zip(lines.chunks(2)) {
        assert_eq!(both[0][..2], ["403", "0"], "{address}: {reported}");
        assert_eq!(both[1][..2], ["000", "7"], "{address}: {reported}");
        for line in both {
            let took = Duration::from_secs_f64(line[2].parse().unwrap());
            assert!(took < promptly(AT_ONCE), "{address}: {took:?}");
        }
    }
    assert_eq!(world.contacts_beyond(&[]), []);
    // It is gone, and what happened to it is not.
    let id = reported["sandbox"].as_str().unwrap();
    assert_eq!(world.ok(&["ls", "-q"]), "");
    let log: Vec<Value> = serde_json::from_str(&world.ok(&["net", "log", id, "--json"])).unwrap();
    for address in &all {
        let denied = denials(&log, address);
        let ports: Vec<_> = denied.iter().map(|event| event["port"].as_u64().unwrap()).collect();
        assert!(ports.contains(&80) && ports.contains(&443), "{address}: {log:#?}");
        assert!(denied.iter().all(|event| event["rule"] == "preset public"), "{denied:?}");
    }
    let lines = world.ok(&["net", "log", id]);
    assert!(lines.contains("denied tcp to 10.0.0.5:443 by preset public"), "{lines}");
    let events = world.ok(&["events", "--sandbox", id]);
    assert!(events.contains("10.0.0.5"), "{events}");
}

#[test]
fn n9_a_command_whose_gateway_dies_gets_another_and_its_connections_an_end_in_the_log() {
    let world = World::new();
    let script = format!(
        "curl -sS -o /dev/null -Y 1 -y 3 http://site.example/slow/{}; curl -sS -m {} http://{SITE}/; echo second $?; echo alive",
        400 * slowness(),
        patience(Duration::from_secs(10)).as_secs(),
    );
    let running = world.bathy_command(&["run", "--json", "--", "sh", "-c", &script]).spawn().unwrap();
    until("it has begun", 10, || world.contacts().iter().any(|contact| contact.kind == Kind::Http));
    let line = |pid: u32| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let is_gateway = |pid: &u32| line(*pid).starts_with(b"bathy-gateway");
    let gateways: Vec<_> = descendants(running.id()).into_iter().filter(is_gateway).collect();
    assert_eq!(gateways.len(), 1, "{gateways:?}");
    world.forget_contacts();
    signal(gateways[0], Signal::KILL);
    let (output, _) = ended(running);
    let [reported, printed] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    let reported = parsed(&reported);
    assert_eq!(output.status.code(), Some(0), "{reported} {printed}");
    let expected = ["lost its network: its gateway failed", "the sandbox has a network again"];
    assert!(expected.iter().all(|words| printed.contains(words)), "{printed}");
    let lines = reported["stdout"]["text"].as_str().unwrap();
    assert!(lines.contains("second 0") && lines.ends_with("alive\n"), "{reported}");
    assert_eq!(world.contacts_beyond(&[SITE, SITE_V6]), []);
    let id = reported["sandbox"].as_str().unwrap();
    let log: Vec<Value> = serde_json::from_str(&world.ok(&["net", "log", id, "--json"])).unwrap();
    let lost = log.iter().filter(|event| event["event"] == "gateway_lost");
    assert_eq!(lost.map(|event| &event["restarted"]).collect::<Vec<_>>(), [false, true], "{log:#?}");
    let count = |kind: &str| log.iter().filter(|event| event["event"] == kind).count();
    assert_eq!(count("net_allowed"), count("net_closed"), "{log:#?}");
    let is_lost = |event: &&Value| event["reason"].as_str().is_some_and(|why| why.starts_with("its gateway"));
    let ends: Vec<_> = log.iter().filter(is_lost).filter(|event| event["event"] == "net_closed").collect();
    assert!(ends.len() == 1 && ends[0]["sent"].as_u64() > Some(0), "{log:#?}");
}
