//! N3 and N4: names that lead inward, and other ways to ask for names.

use bathy_tests::world::addresses::{SITE, SITE_V6};
use bathy_tests::world::{Kind, World};
use serde_json::json;

use bathy_tests::world::guest::{GATEWAY, Guest};
use bathy_tests::world::table::{
    UNDEFENDED, all_held, all_held_by, all_work, attack, hopeless, is_through, row, undefended,
};

#[test]
fn n3_a_name_does_not_lead_inward() {
    let world = World::with_names(&json!({"nas.local": {"A": ["151.101.1.66"]}}));
    let web = Guest::start(&world, "web", &[]);
    let curl = |name: &str| json!(["curl", format!("http://{name}/")]);
    let inward = [
        "private.example",
        "metadata.example",
        "metadata.google.internal",
        "host.example",
        "inward.example",
        "nat64.example",
        "sixtofour.example",
        "nas.local",
    ];
    // The first is the sandbox's own; the others lead nowhere, or are no answers that anybody may give.
    let nowhere =
        ["loopback.example", "circle.example", "nowhere.example", "chain0.example", "poison.example"];
    let mut attacks: Vec<_> = inward.map(|name| attack("N3", name, curl(name))).into();
    attacks.extend(nowhere.map(|name| hopeless("N3", name, curl(name))));
    all_held(&web, "", &attacks, &[SITE, SITE_V6]);
    // What only means something inside of a network is not even asked for.
    assert!(!world.asked_names().contains(&"nas.local".to_owned()));
    for (name, removed) in [("private.example", "10.0.0.5"), ("metadata.example", "169.254.169.254")] {
        web.until_event("what was kept back", |event| {
            event["event"] == "name_resolved" && event["host"] == name && event["removed"] == json!([removed])
        });
    }
    all_work(&world, "", &attacks);
}

#[test]
fn n3_answers_that_change_or_mix() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let outcomes = web.try_all(&[
        // Public at first, private the next time; each question goes out, because its answer may not be kept.
        json!(["names", "rebind.example"]),
        json!(["names", "rebind.example"]),
        json!(["curl", "http://rebind.example/"]),
        json!(["names", "rebind-loopback.example"]),
        json!(["names", "rebind-loopback.example"]),
        // Both at once: only one of them is in the answer.
        json!(["names", "mixed.example"]),
        json!(["names", "mixed.example", 28]),
        json!(["curl", "http://mixed.example/"]),
        json!(["names", "mapped.example", 28]),
        // Moves from one public address to another, which is harmless.
        json!(["curl", "http://moving.example/"]),
        json!(["curl", "http://moving.example/"]),
    ]);
    for (index, what, expected) in [
        (0, "public at first", json!([SITE])),
        (1, "private the second time", json!([])),
        (3, "public at first", json!([SITE])),
        (4, "loopback the second time", json!([])),
        (5, "public and private at once", json!([SITE])),
        (6, "the same of IPv6", json!([SITE_V6])),
        (8, "IPv4 in IPv6", json!([])),
    ] {
        let reported = &outcomes[index].result["addresses"];
        row("N3", what, &reported.to_string(), *reported == expected);
    }
    for (index, what, expected) in [
        (2, "the program that asks once more", "unresolved"),
        (7, "the program that is told one of two", "status 200"),
        (9, "a name that moves from one public address", "status 200"),
        (10, "to another", "status 200"),
    ] {
        row("N3", what, outcomes[index].word(), outcomes[index].word() == expected);
    }
    assert_eq!(world.contacts_beyond(&[SITE, SITE_V6, "151.101.1.10"]), []);
    // With nothing in the way the second answer is believed.
    let open = Guest::start(&world, "open", &UNDEFENDED);
    for (name, kind, inner) in [
        ("mixed.example", 1, "10.0.0.5"),
        ("mixed.example", 28, "fd00::5"),
        ("rebind.example", 1, "10.0.0.5"),
    ] {
        let outcome = open.try_one(json!(["names", name, kind]));
        let reported = outcome.result["addresses"].to_string();
        undefended("N3", &format!("{name} is told whole"), &reported, reported.contains(inner));
    }
}

#[test]
fn n3_answers_of_somebody_else() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    for name in ["other-question.example", "wrong-id.example", "garbage.example"] {
        let outcome = web.try_with("SECONDS = 15 * SLOWNESS", &[json!(["names", name])]).remove(0);
        let is_believed = outcome.word() != "code 2" || outcome.result["addresses"] != json!([]);
        row("N3", &format!("an answer with a fault: {name}"), outcome.word(), !is_believed);
    }
    let poison = web.try_one(json!(["names", "poison.example"]));
    row("N3", "an answer about another name", poison.word(), poison.result["addresses"] == json!([]));
    let site = web.try_one(json!(["names", "site.example"])).result["addresses"].take();
    row("N3", "the name that it was about", &site.to_string(), site == json!([SITE]));
}

#[test]
fn n3_names_that_look_like_an_allowed_one() {
    let there = json!({"A": ["151.101.1.66"]});
    let world = World::with_names(&json!({
        "suffix.example": there,
        "www_suffix.example": there,
        "www-suffix.example": there,
        "xn--ite-h7c.example": there,
        "site.example.suffix.example.evil.example": there,
    }));
    let web = Guest::start(&world, "web", &["--allow", "site.example:80", "--allow", "*.suffix.example:80"]);
    let outcomes = web.try_all(&[
        json!(["curl", "http://site.example/"]),
        json!(["curl", "http://SITE.eXample/"]),
        json!(["curl", "http://site.example./"]),
        json!(["curl", "http://www.suffix.example/"]),
        json!(["curl", "http://deep.www.suffix.example/"]),
    ]);
    for outcome in &outcomes {
        outcome.is("status 200");
    }
    let long = format!(
        "{}.suffix.example",
        ["a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(63)].join(".")
    );
    let attacks = [
        attack("N3", "the suffix inside a word", json!(["curl", "http://evilsuffix.example/"])),
        attack("N3", "the name before another", json!(["curl", "http://site.example.evil.example/"])),
        attack(
            "N3",
            "both before another",
            json!(["curl", "http://site.example.suffix.example.evil.example/"]),
        ),
        attack("N3", "the suffix itself", json!(["curl", "http://suffix.example/"])),
        attack("N3", "an underscore for a dot", json!(["curl", "http://www_suffix.example/"])),
        attack("N3", "a hyphen for a dot", json!(["curl", "http://www-suffix.example/"])),
        attack("N3", "a name that looks like it", json!(["curl", "http://xn--ite-h7c.example/"])),
        hopeless("N3", "the same in Unicode", json!(["curl", "http://\u{455}ite.example/"])),
        hopeless("N3", "percent and zeros", json!(["curl", "http://site.example%00.evil.example/"])),
        hopeless("N3", "a label with a NUL", json!(["names", ["site.example\u{0}", "evil", "example"]])),
        hopeless("N3", "a label with a dot", json!(["names", ["evil", "x.suffix.example"]])),
        hopeless("N3", "a label with a space", json!(["names", ["site ", "example"]])),
        hopeless("N3", "a label with a slash", json!(["names", ["a/b", "suffix", "example"]])),
        hopeless("N3", "a label of bytes", json!(["names", ["\u{ff}\u{fe}", "suffix", "example"]])),
        hopeless("N3", "a name of more than 253", json!(["names", long.split('.').collect::<Vec<_>>()])),
        hopeless("N3", "an address as a name", json!(["names", "10.0.0.5"])),
        hopeless("N3", "the root", json!(["names", ""])),
    ];
    let refusals = ["unresolved", "code 5", "code 1", "malformed", "code 3", "code 4", "reset", "timeout"];
    all_held_by(&web, "", &attacks, &[], |outcome| refusals.contains(&outcome.word()));
    // Not a single question about them has left the sandbox.
    assert_eq!(world.contacts(), []);
    all_work(&world, "", &attacks);
}

#[test]
fn n3_a_name_rule_holds_for_its_own_addresses_and_time() {
    let world = World::with_names(&json!({
        "inner.example": {"A": ["10.0.0.5"]},
        "brief.example": {"A": ["151.101.3.3"], "ttl": 1},
    }));
    let web = Guest::start(&world, "web", &["--allow", "inner.example:80", "--allow", "brief.example:80"]);
    let request = "GET / HTTP/1.1\r\nHost: brief.example\r\n\r\n";
    let outcomes = web.try_all(&[
        // A name allows public addresses only, whatever its owner answers.
        json!(["curl", "http://inner.example/"]),
        json!(["say", "10.0.0.5", 80, "GET / HTTP/1.1\r\nHost: inner.example\r\n\r\n"]),
        json!(["say", "151.101.3.3", 80, request]),
        json!(["resolved", "brief.example"]),
        json!(["say", "151.101.3.3", 80, request]),
    ]);
    for (index, what) in [
        (0, "an allowed name at a private address"),
        (1, "that address with its name"),
        (2, "an address before its name"),
    ] {
        row("N3", what, outcomes[index].word(), outcomes[index].was_denied());
    }
    outcomes[4].says("HTTP/1.1 200 OK");
    // A second, and the time that a slow client is given.
    std::thread::sleep(std::time::Duration::from_secs(12));
    let late = web.try_one(json!(["say", "151.101.3.3", 80, request]));
    row("N3", "an address when its time is over", late.word(), late.was_denied());
    assert_eq!(world.contacts_beyond(&["151.101.3.3"]), []);
    // Without a rule by name it does not matter how an address was found.
    let open = Guest::start(&world, "open", &UNDEFENDED);
    for what in [json!(["curl", "http://inner.example/"]), json!(["say", "151.101.3.3", 80, request])] {
        let outcome = open.try_one(what.clone());
        undefended("N3", &what.to_string(), outcome.word(), is_through(&outcome) && !outcome.was_denied());
    }
}

#[test]
fn n4_no_other_resolver_is_reached() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let mut attacks = Vec::new();
    for server in ["8.8.8.8", "1.1.1.1", "2001:4860:4860::8888", "10.53.0.53", SITE] {
        for transport in ["udp", "tcp"] {
            let what = format!("{server} over {transport}");
            attacks.push(attack("N4", what, json!(["names", "site.example", 1, server, transport])));
        }
        attacks.push(attack("N4", format!("{server} over TLS"), json!(["tls", server, 853])));
        for (what, port) in [("QUIC", 853), ("mDNS", 5353), ("LLMNR", 5355)] {
            attacks.push(attack(
                "N4",
                format!("{server} over {what}"),
                json!(["datagram", server, port, "x"]),
            ));
        }
    }
    all_held(&web, "", &attacks, &[]);
    assert_eq!(world.contacts(), []);
    web.until_event("why", |event| {
        event["event"] == "net_denied" && event["rule"] == "preset public: other resolvers"
    });
    all_work(&world, "", &attacks);
}

#[test]
fn n4_resolvers_over_https_are_reached_by_name_only() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--allow", "api.example:443"]);
    web.try_one(json!(["curl", "https://api.example/"])).is("status 200");
    let attacks = [
        attack("N4", "a known one by address", json!(["curl", "https://1.1.1.1/dns-query?dns=AAAB"])),
        attack("N4", "an unknown one by address", json!(["curl", "https://93.184.215.14/dns-query"])),
        attack(
            "N4",
            "one at the address of an allowed name",
            json!([
                "curl",
                "--resolve",
                "shared.example:443:151.101.1.10",
                "https://shared.example/dns-query"
            ]),
        ),
        attack("N4", "over QUIC", json!(["datagram", "1.1.1.1", 443, "x"])),
        attack("N4", "over QUIC at the allowed name", json!(["datagram", "151.101.1.10", 443, "x"])),
    ];
    all_held(&web, "", &attacks, &[]);
    all_work(&world, "", &attacks);
}

#[test]
fn n4_kinds_of_questions() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let kinds = [
        ("TXT", 16, "text.example", json!(["type 16"])),
        ("ANY", 255, "site.example", json!([])),
        ("AXFR", 252, "example", json!([])),
        ("NULL", 10, "site.example", json!([])),
        ("SVCB", 64, "ech.example", json!([])),
        ("HTTPS", 65, "ech.example", json!([])),
    ];
    // No ECH keys, and no unneeded records. Texts are needed, and have their budget like all names.
    let rows: Vec<_> = kinds.iter().map(|(_, number, name, _)| json!(["names", name, number])).collect();
    for ((what, _, name, expected), outcome) in kinds.iter().zip(web.try_all(&rows)) {
        let reported = format!("{} {}", outcome.word(), outcome.result["addresses"]);
        row("N4", &format!("{what} of {name}"), &reported, outcome.result["addresses"] == *expected);
    }
    web.try_all(&[
        json!(["names", "site.example", 1, GATEWAY, "tcp"]),
        json!(["names", "big.example", 1, GATEWAY, "tcp"]),
        json!(["names", "site.example", 1, GATEWAY, "udp", 53, "0000290fff000000000000"]),
        json!(["names", "site.example", 1, "fd62:6174:6879::1"]),
    ])
    .iter()
    .for_each(|outcome| {
        let reported = !outcome.result["addresses"].as_array().unwrap().is_empty();
        row(
            "N4",
            &format!("an honest question: {}", outcome.row),
            outcome.word(),
            outcome.word() == "code 0" && reported,
        );
    });
    let kinds: Vec<_> = world
        .contacts()
        .into_iter()
        .filter(|contact| contact.kind == Kind::Dns)
        .filter_map(|contact| contact.detail)
        .collect();
    for forbidden in ["ANY", "TYPE252", "TYPE10 ", "HTTPS", "TYPE64"] {
        assert!(!kinds.iter().any(|kind| kind.starts_with(forbidden)), "{forbidden} was asked: {kinds:?}");
    }
}

#[test]
fn n4_names_carry_no_data_out() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let tunnel = "
def tunnel(count):
    codes, began = {}, time.monotonic()
    for index in range(count):
        word = names([f'{index:04}' + 'x' * 50, 'tunnel', 'example'])['outcome']
        codes[word] = codes.get(word, 0) + 1
    return {'outcome': 'done', 'codes': codes, 'seconds': time.monotonic() - began}
";
    let outcome = web.try_with(tunnel, &[json!(["tunnel", 400])]).remove(0);
    outcome.is("done");
    let asked = world.asked_names().into_iter().filter(|name| name.ends_with("tunnel.example")).count();
    // 4 KiB of names with 54 bytes in each minute that was begun. A resolver that is slow is asked again.
    let minutes = outcome.result["seconds"].as_f64().unwrap() / 60.0;
    let most = (minutes.ceil() + 1.0) * 4096.0 / 54.0;
    let reported = format!("{asked} of 400 names got out");
    row("N4", "data in names", &reported, (50.0..=most).contains(&f64::from(u32::try_from(asked).unwrap())));
    web.until_event("why", |event| {
        event["event"] == "name_unresolved"
            && event["reason"]
                .as_str()
                .is_some_and(|reason| reason.contains("too many different names below tunnel.example"))
    });
    web.still_works();
    // Names outside the policy carry nothing at all.
    web.policy("set", &["allow-list", "allow site.example:80"]);
    world.forget_contacts();
    let attacks = [
        attack("N4", "data in a name outside the policy", json!(["names", "secret.tunnel.example"])),
        attack("N4", "the same over TCP", json!(["names", "secret.tunnel.example", 16, GATEWAY, "tcp"])),
    ];
    all_held(&web, "", &attacks, &[]);
    assert_eq!(world.contacts(), []);
    all_work(&world, "", &attacks);
}
