//! N5: everything that is not plain TCP or UDP to an allowed place, and ways to become a relay.

use bathy_tests::slowness;
use bathy_tests::world::addresses::{SITE, SITE_V6};
use bathy_tests::world::{Contact, Kind, World};
use serde_json::{Value, json};

use bathy_tests::world::guest::{Guest, Outcome, on_host};
use bathy_tests::world::table::{
    Attack, UNDEFENDED, all_held, all_held_by, all_work, all_work_in, attack, hopeless, row,
};

const FRAMES: &str = include_str!("frames.py");
const API: &str = "151.101.1.10";
const API_V6: &str = "2a04:4e42::10";

/// How many packets have left the host.
pub fn packets_out(world: &World) -> u64 {
    let text = on_host(world, "ip", &["-s", "-j", "link", "show", "dev", "world"]).stdout;
    let links: Value = serde_json::from_str(&text).unwrap();
    links[0]["stats64"]["tx"]["packets"].as_u64().unwrap()
}

/// How many may leave in a test by themselves: neighbours are looked for now and then.
pub fn few_packets() -> u64 {
    5 + u64::from(slowness())
}

#[test]
fn n5_other_protocols_do_not_leave() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let payload = "7475 6e6e 656c".replace(' ', "").repeat(20);
    let row = |what: &str, number: u8, to: &str| {
        hopeless("N5", format!("{what} to {to}"), json!(["raw", number, to, payload]))
    };
    let mut attacks = Vec::new();
    for (what, number) in [
        ("IGMP", 2),
        ("IPv4 in IP", 4),
        ("EGP", 8),
        ("DCCP", 33),
        ("IPv6 in IP", 41),
        ("GRE", 47),
        ("ESP", 50),
        ("AH", 51),
        ("SCTP", 132),
        ("UDP-Lite", 136),
        ("experiments", 253),
        ("raw", 255),
    ] {
        attacks.push(row(what, number, SITE));
    }
    for (what, number) in [("SCTP", 132), ("GRE", 47), ("IPv6 in IPv6", 41)] {
        attacks.push(row(what, number, SITE_V6));
    }
    attacks.push(row("an echo with data", 1, SITE));
    attacks.push(row("an echo with data", 1, "10.0.0.5"));
    let before = packets_out(&world);
    all_held_by(&web, FRAMES, &attacks, &[], |outcome| {
        // For an echo request the gateway only sends refusals.
        let said_no = outcome.word() == "answered" && outcome.heard().get(40..42) == Some("03");
        said_no || ["timeout", "unreachable"].contains(&outcome.word())
    });
    let sent = packets_out(&world) - before;
    assert!(sent <= few_packets(), "{sent} packets left");
    web.until_event("the echo", |event| {
        event["event"] == "net_denied" && event["protocol"] == "icmp" && event["address"] == SITE
    });
    web.until_event("SCTP", |event| event["event"] == "net_denied" && event["protocol"] == "132");
    web.still_works();
    // The probe works: the gateway answers an echo request to itself.
    let own = web.try_with(FRAMES, &[json!(["raw", 1, "192.0.0.1", payload])]).remove(0);
    assert_eq!(own.is("answered").heard().get(40..42), Some("00"), "{own:?}");
}

#[test]
fn n5_segments_that_begin_nothing() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let attacks = [SITE, "10.0.0.5"].map(|to| {
        hopeless("N5", format!("segments that begin nothing, to {to}"), json!(["odd_flags", to, 80]))
    });
    all_held_by(&web, FRAMES, &attacks, &[], |outcome| outcome.word() == "sent");
    web.still_works();
}

#[test]
fn n5_overlapping_segments_mean_one_thing_only() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--allow", "api.example:80,443"]);
    let orders = [
        ("as it should be", true),
        ("byte for byte", true),
        ("the second is bad", false),
        ("the first is bad", false),
        ("bad is there before its turn", false),
        ("good is there before its turn", false),
        ("bad comes from behind", false),
        ("bad and then good at the same place", false),
    ];
    let mut rows = vec![json!(["names", "api.example"]), json!(["kernel_address", "del"])];
    let mut own = 20000;
    for (port, what) in [(443, "tls"), (80, "http")] {
        for (order, _) in orders {
            own += 1;
            rows.push(json!(["overlap", API, port, order, what, own]));
        }
    }
    // Nothing is dialled for half a handshake, nor for data that comes too early.
    let early = "GET / HTTP/1.1\r\nHost: bad.example\r\n\r\n";
    rows.push(json!(["early", API, 443, 30001, early]));
    rows.push(json!(["early", API, 80, 30002, early]));
    rows.push(json!(["kernel_address", "add"]));
    let outcomes = web.try_with(FRAMES, &rows);
    outcomes[0].is("code 0");
    // Whatever the gateway believed is what the server got.
    let contacts = world.contacts_beyond(&[]);
    let is_right =
        |contact: &Contact| contact.kind == Kind::Tcp || contact.name.as_deref() == Some("api.example");
    let one_thing = contacts.iter().all(|contact| contact.address.to_string() == API && is_right(contact));
    for (outcome, (order, plain)) in outcomes[2..18].iter().zip(orders.iter().chain(&orders)) {
        let opened = outcome.word() != "not open" && (!plain || outcome.word() == "believed");
        row("N5", &format!("segments over {}: {order}", outcome.row[4]), outcome.word(), opened && one_thing);
    }
    for outcome in &outcomes[18..20] {
        let reported = format!("{}, nothing was dialled", outcome.word());
        let early = contacts.iter().any(|contact| contact.name.as_deref() == Some("bad.example"));
        row("N5", &format!("data in the first segment to port {}", outcome.row[2]), &reported, !early);
    }
    let believed = outcomes.iter().filter(|outcome| outcome.word() == "believed").count();
    let named = contacts.iter().filter(|contact| contact.kind != Kind::Tcp).count();
    assert!(believed >= 4 && named >= believed, "{believed} {contacts:?}");
    web.try_one(json!(["curl", "http://api.example/"])).is("status 200");
}

#[test]
fn n5_an_allowed_place_is_no_relay() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--allow", "api.example:80,22"]);
    let say = |what: &str, text: &str| attack("N5", what, json!(["say", "api.example", 80, text]));
    // The server of this world would not understand it either; others might.
    let odd = |what: &str, text: &str| Attack { works: false, ..say(what, text) };
    let other = "GET / HTTP/1.1\r\nHost: site.example\r\n\r\n";
    let upgrade = |to: &str| {
        format!("GET /first HTTP/1.1\r\nHost: api.example\r\nConnection: Upgrade\r\nUpgrade: {to}\r\n\r\n")
    };
    let urgent = |at: usize, extra: &str| {
        let text = "GET /first HTTP/1.1\r\nHost: api.example\r\nConnection: close\r\n\r\n";
        hopeless(
            "N5",
            format!("an urgent {extra:?} at {at}"),
            json!(["urgent", "api.example", 80, text, at, extra]),
        )
    };
    let attacks = [
        odd("CONNECT", "CONNECT 10.0.0.5:80 HTTP/1.1\r\nHost: 10.0.0.5:80\r\n\r\n"),
        odd("CONNECT with the right host", "CONNECT 10.0.0.5:80 HTTP/1.1\r\nHost: api.example\r\n\r\n"),
        say("a whole URL", "GET http://10.0.0.5/ HTTP/1.1\r\nHost: api.example\r\n\r\n"),
        say("a whole URL of another name", "GET http://site.example/ HTTP/1.1\r\nHost: api.example\r\n\r\n"),
        say("two hosts", "GET / HTTP/1.1\r\nHost: api.example\r\nHost: site.example\r\n\r\n"),
        say("a host with a port of its own", "GET / HTTP/1.1\r\nHost: site.example:80\r\n\r\n"),
        say("a host behind a space", "GET / HTTP/1.1\r\nHost : site.example\r\n\r\n"),
        say("a host in a folded line", "GET / HTTP/1.1\r\nX: y\r\n Host: site.example\r\n\r\n"),
        odd(
            "two lengths",
            "POST / HTTP/1.1\r\nHost: api.example\r\nContent-Length: 4\r\nContent-Length: 9\r\n\r\nabcd",
        ),
        say(
            "both kinds of length",
            "POST / HTTP/1.1\r\nHost: api.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: site.example\r\n\r\n",
        ),
        say(
            "an odd encoding",
            "POST / HTTP/1.1\r\nHost: api.example\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        ),
        odd("lines without CR", "GET / HTTP/1.1\nHost: site.example\n\n"),
        odd("HTTP/0.9", "GET /\r\n"),
        odd("SOCKS 5", "\u{5}\u{1}\u{0}\u{5}\u{1}\u{0}\u{1}\u{a}\u{0}\u{0}\u{5}\u{0}\u{50}"),
        odd("SOCKS 4", "\u{4}\u{1}\u{0}\u{50}\u{a}\u{0}\u{0}\u{5}user\u{0}"),
        odd("FTP", "USER anonymous\r\n"),
        odd("HTTP/2 at once", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        say("NUL in the host", "GET / HTTP/1.1\r\nHost: api.example\u{0}.evil.example\r\n\r\n"),
        say(
            "a request behind one that is allowed",
            &format!("GET /first HTTP/1.1\r\nHost: api.example\r\n\r\n{other}"),
        ),
        say(
            "a WebSocket that the server does not make, and then a request",
            &format!("{}{other}", upgrade("websocket")),
        ),
        say(
            "HTTP/2 that the server does not change to, and then a request",
            &format!("{}{other}", upgrade("h2c")),
        ),
        attack("N5", "a server that speaks first", json!(["say", "api.example", 22, "x"])),
        urgent(28, "x"),
        urgent(24, "b"),
        urgent(0, "x"),
    ];
    all_held_by(&web, FRAMES, &attacks, &[API, API_V6], |outcome| !is_relayed(outcome));
    let contacts = world.contacts_beyond(&[]);
    for contact in &contacts {
        assert_eq!(contact.name.as_deref().unwrap_or("api.example"), "api.example", "{contact:?}");
        assert_eq!(contact.port, 80, "{contact:?}");
    }
    web.try_one(json!(["curl", "http://api.example/"])).is("status 200");
    let open = Guest::start(&world, "open", &UNDEFENDED);
    let possible: Vec<_> = attacks.iter().filter(|attack| attack.works).collect();
    all_work_in(&open, FRAMES, &possible, is_relayed);
}

/// Whether a server has answered what it must not even hear. What comes before in the same row may be answered.
fn is_relayed(outcome: &Outcome) -> bool {
    let answers = outcome.heard().matches(" 200 ").count();
    let expected = usize::from(outcome.row[3].as_str().is_some_and(|text| text.contains("/first")));
    answers > expected || outcome.heard().contains("SSH")
}

/// A second connection with the port of one that is open.
const SAME_PORT: &str = "
def from_same_port(first, first_port, second, second_port):
    socks, own = [], 0
    for to in ((first, first_port), (second, second_port)):
        sock = socket.socket()
        sock.settimeout(SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(('', own))
        sock.connect(to)
        own = sock.getsockname()[1]
        socks.append(sock)
    return {'outcome': 'open'}
";

#[test]
fn n5_an_allowed_address_is_no_other_port_or_protocol() {
    let world = World::new();
    let web = Guest::start(
        &world,
        "web",
        &["--allow", "tcp://151.101.1.10:443", "--allow", "udp://151.101.1.20:7"],
    );
    web.try_one(json!(["connect", API, 443])).is("open");
    web.try_one(json!(["datagram", "151.101.1.20", 7, "x"])).is("answered");
    let attacks = [
        attack("N5", "another port", json!(["connect", API, 22])),
        attack("N5", "plain HTTP", json!(["curl", format!("http://{API}/")])),
        attack("N5", "QUIC", json!(["datagram", API, 443, "x"])),
        attack("N5", "an echo service", json!(["datagram", API, 7, "x"])),
        attack("N5", "TCP instead of UDP", json!(["connect", "151.101.1.20", 7])),
        attack("N5", "a neighbour of the address", json!(["connect", "151.101.1.11", 443])),
        attack("N5", "the same over IPv6", json!(["connect", "::ffff:151.101.1.11", 443])),
        attack("N5", "from the port of an allowed connection", json!(["from_same_port", API, 443, API, 22])),
        attack("N5", "the same to another address", json!(["from_same_port", API, 443, "10.0.0.5", 443])),
    ];
    all_held(&web, SAME_PORT, &attacks, &[API]);
    let allowed = |contact: &Contact| contact.kind == Kind::Tcp && contact.port == 443;
    assert!(world.contacts_beyond(&[]).iter().all(allowed), "{:?}", world.contacts());
    all_work(&world, SAME_PORT, &attacks);
}
