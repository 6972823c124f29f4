//! N1 and N2: addresses that no sandbox may reach, in every spelling and of every class.

use bathy_tests::world::World;
use bathy_tests::world::addresses::{self, HOST_OWN, LINK_LOCAL, METADATA, PRIVATE, SPECIAL};
use serde_json::json;

use bathy_tests::kept::until;
use bathy_tests::world::guest::{Guest, Outcome, on_host};
use bathy_tests::world::table::{
    Attack, all_held, all_held_by, all_work_allowing, attack, hopeless, is_through, row, undefended,
};

/// Ways to write 10.0.0.5, 169.254.169.254 and loopback.
const SPELLINGS: [(&str, &str); 16] = [
    ("octal", "012.0.0.5"),
    ("octal with more zeros", "00000012.0.0.5"),
    ("hexadecimal", "0x0a.0x0.0x0.0x5"),
    ("one number", "167772165"),
    ("one hexadecimal number", "0xa000005"),
    ("two numbers", "10.5"),
    ("three numbers", "10.0.5"),
    ("dot at the end", "10.0.0.5."),
    ("metadata as a number", "2852039166"),
    ("metadata in octal", "0251.0376.0251.0376"),
    ("metadata in hexadecimal", "0xa9fea9fe"),
    ("full-width digits", "１０.0.0.5"),
    ("circled digits", "①⓪.0.0.5"),
    ("ideographic dots", "10。0。0。5"),
    ("percent signs", "10%2e0%2e0%2e5"),
    ("user before the host", "site.example@10.0.0.5"),
];

/// IPv6 addresses that some translators turn into IPv4 ones.
const DISGUISES: [(&str, &str); 17] = [
    ("mapped", "::ffff:10.0.0.5"),
    ("mapped, in hexadecimal", "::ffff:a00:5"),
    ("mapped metadata", "::ffff:169.254.169.254"),
    ("mapped host", "::ffff:192.168.77.2"),
    ("compatible", "::10.0.0.5"),
    ("compatible loopback", "::127.0.0.1"),
    ("translated", "::ffff:0:10.0.0.5"),
    ("NAT64", "64:ff9b::10.0.0.5"),
    ("NAT64 loopback", "64:ff9b::7f00:1"),
    ("NAT64 of a public address", "64:ff9b::93.184.215.14"),
    ("local NAT64", "64:ff9b:1::a00:5"),
    ("local NAT64 with a short prefix", "64:ff9b:1:a00:0:500::"),
    ("6to4", "2002:a00:5::1"),
    ("6to4 loopback", "2002:7f00:1::"),
    ("Teredo client", "2001:0:5db8:d70e::f5ff:fffa"),
    ("Teredo server", "2001:0:a00:5::1"),
    ("ISATAP", "2606:2800:21f:cb07:0:5efe:a00:5"),
];

#[test]
fn n1_every_spelling_of_an_inner_address_is_that_address() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let mut attacks: Vec<Attack> = Vec::new();
    for (what, text) in SPELLINGS {
        let understood = !["digits", "dot", "percent"].iter().any(|odd| what.contains(odd));
        let row = json!(["curl", format!("http://{text}:8080/")]);
        attacks.push(Attack { works: understood, ..attack("N1", format!("{what}: {text}"), row) });
    }
    for text in ["012.0.0.5", "167772165", "10.5", "0xa000005"] {
        attacks.push(attack("N1", format!("by a program: {text}"), json!(["connect", text, 7])));
    }
    for (what, text) in DISGUISES {
        attacks.push(attack(
            "N1",
            format!("{what}: {text}"),
            json!(["curl", format!("http://[{text}]:8080/")]),
        ));
    }
    for zone in ["fe80::1%25eth0", "fe80::5%251", "fe80::a9fe:a9fe%25eth0", "fe80::5efe:a00:5%25eth0"] {
        attacks.push(hopeless("N1", format!("zone {zone}"), json!(["curl", format!("http://[{zone}]/")])));
    }
    for loopback in
        ["127.1", "0177.0.0.1", "2130706433", "0x7f.1", "0", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::1]"]
    {
        let row = json!(["curl", format!("http://{loopback}:8080/")]);
        attacks.push(hopeless("N1", format!("the sandbox's own loopback: {loopback}"), row));
    }
    all_held(&web, "", &attacks, &[]);
    web.still_works();
    // A mapped address is an IPv4 one as soon as the sandbox's own kernel sends something there.
    let named = DISGUISES.iter().filter(|(what, _)| !what.starts_with("mapped"));
    let named: Vec<_> = named.map(|(_, address)| *address).collect();
    all_work_allowing(&world, &named, "", &attacks);
}

/// Classes of addresses beyond those of the world's own lists.
const MORE: [&str; 15] = [
    "0.0.0.1",
    "10.96.0.1",
    "100.127.255.254",
    "169.254.20.10",
    "172.20.0.10",
    "192.0.0.7",
    "192.0.0.170",
    "192.52.193.1",
    "198.19.255.254",
    "255.255.255.254",
    "2001:2::5",
    "2001:10::5",
    "3fff::5",
    "5f00::5",
    "fec0::5",
];

#[test]
fn n2_no_class_but_public_is_reached_over_tcp_or_udp() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let lists = [&PRIVATE[..], &METADATA, &SPECIAL, &HOST_OWN, &MORE];
    let all: Vec<&str> =
        lists.into_iter().flatten().copied().filter(|address| !address.starts_with("fe80:")).collect();
    let mut attacks = Vec::new();
    for address in &all {
        // The last one of the link itself.
        let on_link = *address == "192.0.0.7";
        let row = |what, row| if on_link { hopeless("N2", what, row) } else { attack("N2", what, row) };
        attacks.push(row(format!("{address} over TCP"), json!(["connect", address, 7])));
        attacks.push(row(format!("{address} over UDP"), json!(["datagram", address, 7, "out"])));
    }
    for address in LINK_LOCAL.iter().filter(|address| address.starts_with("fe80:")) {
        attacks.push(hopeless(
            "N2",
            format!("{address} over TCP"),
            json!(["connect", format!("{address}%eth0"), 7]),
        ));
    }
    for group in ["224.0.0.5", "239.255.255.250", "255.255.255.255", "ff02::1", "ff0e::5"] {
        attacks.push(hopeless("N2", format!("group {group} over TCP"), json!(["connect", group, 7])));
    }
    // Names are N3's; this one is built into programs.
    let url = "http://metadata.google.internal/";
    attacks.push(attack("N2", "metadata by its name", json!(["curl", url])));
    all_held(&web, "", &attacks, &[]);
    // Groups of hosts, and a neighbour on the link who is not there: what is sent to them is lost, as always when no host
    // listens.
    let unanswered =
        [("224.0.0.251", 5353), ("239.255.255.250", 5353), ("ff02::fb", 5353), ("fd62:6174:6879::3", 7)];
    let mut groups: Vec<_> = unanswered
        .map(|(to, port)| hopeless("N2", format!("{to} over UDP"), json!(["datagram", to, port, "x", 0.2])))
        .into();
    groups.push(hopeless("N2", "fd62:6174:6879::3 over TCP", json!(["connect", "fd62:6174:6879::3", 7])));
    let lost = |outcome: &Outcome| ["timeout", "unreachable"].contains(&outcome.word());
    all_held_by(&web, "", &groups, &[], lost);
    web.still_works();
    all_work_allowing(&world, &all, "", &attacks);
}

/// Changes the host's network, as its administrator does.
fn ip(world: &World, arguments: &str) {
    let ran = on_host(world, "ip", &arguments.split(' ').collect::<Vec<_>>());
    assert_eq!(ran.code, Some(0), "ip {arguments}: {}", ran.stderr);
}

#[test]
fn n10_the_hosts_own_addresses_are_denied_whatever_the_mtu_and_whenever_they_came() {
    let world = World::new();
    ip(&world, "link set lo mtu 1500");
    ip(&world, "route add local 93.184.79.0/24 dev lo table local mtu 1400");
    ip(&world, "-6 route add local 2606:2800:79::/64 dev lo table local mtu 1400");
    let web = Guest::start(&world, "web", &["--net", "public"]);
    let mut all = HOST_OWN.to_vec();
    all.extend(["93.184.79.5", "2606:2800:79::5"]);
    let mut attacks = Vec::new();
    for address in &all {
        attacks.push(attack("N10", format!("{address} over TCP"), json!(["connect", address, 7])));
        attacks.push(attack("N10", format!("{address} over UDP"), json!(["datagram", address, 7, "out"])));
    }
    all_held(&web, "", &attacks, &[]);
    all_work_allowing(&world, &all, "", &attacks);
    // The address of another host until now.
    for (address, change) in [
        ("93.184.78.4", "address add 93.184.78.4/24 dev world"),
        ("2606:2800:77::4", "-6 address add 2606:2800:77::4/128 dev world nodad"),
        ("93.184.80.5", "route add local 93.184.80.0/24 dev lo table local mtu 1400"),
    ] {
        let attempt = || web.try_one(json!(["connect", address, 7]));
        assert!(is_through(&attempt()), "{address} before it was the host's");
        ip(&world, change);
        until("it is denied", 5, || attempt().was_denied());
        row("N10", &format!("{address} once it is the host's"), "denied", true);
    }
    web.still_works();
}

#[test]
fn n2_sandboxes_do_not_reach_each_other() {
    let world = World::new();
    let victim = Guest::start(&world, "victim", &["-p", "0.0.0.0:0:9000"]);
    let server = "import socket\n\
        s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('', 9000)); s.listen()\n\
        while True:\n\
        \x20c, _ = s.accept(); c.sendall(b'victim'); c.close()";
    world.ok(&["exec", "-d", "victim", "--", "python3", "-c", server]);
    let ports: serde_json::Value = serde_json::from_str(&world.ok(&["port", "victim", "--json"])).unwrap();
    let port = ports[0]["host"].as_u64().unwrap();
    let ask =
        format!("import socket; print(socket.create_connection(('127.0.0.1', {port}), 3).recv(9).decode())");
    until("the victim listens", 5, || on_host(&world, "python3", &["-c", &ask]).stdout == "victim\n");
    let web = Guest::start(&world, "web", &[]);
    let attacks: Vec<_> = [
        ("192.0.0.2", 9000),
        (addresses::HOST, port),
        ("93.184.77.2", port),
        ("192.0.0.1", 9000),
        ("192.0.0.1", port),
    ]
    .map(|(address, port)| {
        hopeless("N2", format!("neighbour at {address}:{port}"), json!(["connect", address, port]))
    })
    .into();
    all_held(&web, "", &attacks, &[]);
    let inward = victim.net_log().into_iter().filter(|event| event["event"] == "net_allowed").count();
    // Without the defence: who may reach the host, reaches what is published there for everybody.
    web.policy("allow", &["host"]);
    let through = web.try_one(json!(["connect", addresses::HOST, port]));
    undefended("N2", "neighbour at the host's address", through.word(), is_through(&through));
    victim.until_event("one caller more", |_| {
        victim.net_log().into_iter().filter(|event| event["event"] == "net_allowed").count() > inward
    });
}
