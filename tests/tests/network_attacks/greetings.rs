//! N6: greetings of TLS.

use bathy_tests::world::{Kind, World};
use serde_json::{Value, json};

use bathy_tests::world::guest::Guest;
use bathy_tests::world::table::{all_held, all_held_by, all_work, attack, is_through, row};

const GREETINGS: &str = include_str!("greetings.py");
const API: &str = "151.101.1.10";
const API_V6: &str = "2a04:4e42::10";

/// What comes of a greeting.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is let through.
    Passes,
    /// It is not, and a server would answer it.
    Believed,
    /// It is not, and this world's servers would not answer it either; others might.
    Odd,
}

/// Greetings.
const ROWS: [(&str, Fate); 35] = [
    ("plain", Fate::Passes),
    ("no name", Fate::Believed),
    ("another name", Fate::Believed),
    ("empty name", Fate::Believed),
    ("an address for a name", Fate::Believed),
    ("name with a dot at the end", Fate::Believed),
    ("name in capitals", Fate::Passes),
    ("name with a NUL", Fate::Odd),
    ("name with a space", Fate::Believed),
    ("name below", Fate::Believed),
    ("two names", Fate::Odd),
    ("two names, the other first", Fate::Odd),
    ("two lists of names", Fate::Odd),
    ("two lists, the other first", Fate::Odd),
    ("name of another kind", Fate::Odd),
    ("list longer than it is", Fate::Odd),
    ("name longer than its list", Fate::Odd),
    ("bytes behind the list", Fate::Odd),
    ("encrypted greeting", Fate::Believed),
    ("encrypted greeting of old drafts", Fate::Believed),
    ("only an encrypted greeting", Fate::Believed),
    ("many records", Fate::Passes),
    ("many records, another name", Fate::Believed),
    ("names that mean nothing", Fate::Passes),
    ("a second greeting behind it", Fate::Passes),
    ("TLS 1.1", Fate::Odd),
    ("TLS 1.0", Fate::Odd),
    ("SSL 3", Fate::Odd),
    ("SSL 2", Fate::Odd),
    ("not a greeting", Fate::Odd),
    ("application data first", Fate::Odd),
    ("an alert first", Fate::Odd),
    ("a greeting that never ends", Fate::Odd),
    ("HTTP instead", Fate::Odd),
    ("nothing readable", Fate::Odd),
];

#[test]
fn n6_only_a_plain_greeting_with_the_right_name_goes_out() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--allow", "api.example:443"]);
    let greet = |what: &str| json!(["greet", "api.example", 443, what]);
    let outcomes = web.try_with(GREETINGS, &ROWS.map(|(what, _)| greet(what)));
    for ((what, fate), outcome) in ROWS.iter().zip(&outcomes) {
        // A second greeting in the same breath is for the server to check; the gateway has decided on the first.
        let is_right = (outcome.word() == "believed") == (*fate == Fate::Passes) || what.contains("second");
        row("N6", what, outcome.word(), is_right);
    }
    let passed = ROWS.iter().filter(|(_, fate)| *fate == Fate::Passes).count();
    let contacts = world.contacts_beyond(&[]);
    let connections = contacts.iter().filter(|contact| contact.kind == Kind::Tcp).count();
    assert_eq!(connections, passed, "{contacts:?}");
    for contact in contacts.iter().filter(|contact| contact.kind == Kind::Tls) {
        assert_eq!(
            contact.name.as_deref().map(str::to_lowercase).as_deref(),
            Some("api.example"),
            "{contact:?}"
        );
    }
    // With nothing in the way, servers believe much more than that.
    let believed = ROWS.iter().filter(|(_, fate)| *fate == Fate::Believed);
    let attacks: Vec<_> = believed.map(|(what, _)| attack("N6", *what, greet(what))).collect();
    all_work(&world, GREETINGS, &attacks);
}

#[test]
fn n6_libraries_and_real_clients() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--allow", "api.example:443,8443", "--allow", "ech.example:443"]);
    let tls = |what: &str, more: Value| {
        attack("N6", what, json!([&["tls".into()], more.as_array().unwrap().as_slice()].concat()))
    };
    let honest = [
        tls("an ordinary client", json!(["api.example", 443, "api.example"])),
        tls("its greeting in 200 pieces", json!(["api.example", 443, "api.example", [], 200])),
        tls("HTTP/2", json!(["api.example", 8443, "api.example", ["h2", "http/1.1"]])),
        tls("an unknown protocol", json!(["api.example", 443, "api.example", ["odd/1"]])),
        attack(
            "N6",
            "a session that goes on",
            json!(["resumed", "api.example", 443, "api.example", "api.example"]),
        ),
        // The name in the greeting is right, the one inside belongs to the server behind it. It is inside.
        attack(
            "N6",
            "another host inside",
            json!(["curl", "-H", "Host: shared.example", "https://api.example/front"]),
        ),
    ];
    all_held_by(&web, "", &honest, &[API, API_V6], is_through);
    let keys = web.try_one(json!(["names", "ech.example", 65]));
    row(
        "N6",
        "keys for encrypted greetings",
        &keys.result["addresses"].to_string(),
        keys.result["addresses"] == json!([]),
    );
    // Another certificate authority is not ours to trust.
    let strange = web.try_one(json!(["shell", "curl -sS -m SECONDS https://api.example/; echo code $?"]));
    row("N6", "an unsigned certificate", strange.heard().trim(), strange.heard().contains("code 60"));

    let attacks = [
        // The right name at an address that was never resolved for it.
        tls("the right name at a public address", json!(["93.184.215.14", 443, "api.example"])),
        tls("at a neighbour of its address", json!(["151.101.1.20", 443, "api.example"])),
        tls("at a private address", json!(["10.0.0.5", 443, "api.example"])),
        // Another name, none, and a name that is allowed, but of another address.
        tls("another name of the same address", json!(["api.example", 443, "shared.example"])),
        tls("no name", json!(["api.example", 443])),
        tls("an allowed name of another address", json!(["api.example", 443, "ech.example"])),
        tls("another name in 300 pieces", json!(["api.example", 443, "evil.example", ["http/1.1"], 300])),
        tls(
            "another name with the protocol of a proof",
            json!(["api.example", 443, "evil.example", ["acme-tls/1"]]),
        ),
        attack(
            "N6",
            "a session that goes on under another name",
            json!(["resumed", "api.example", 443, "api.example", "shared.example"]),
        ),
    ];
    all_held(&web, "", &attacks, &[API, API_V6]);
    let heard = world.contacts().into_iter().filter(|contact| contact.kind == Kind::Tls);
    let names: Vec<_> = heard.filter_map(|contact| contact.name).collect();
    assert!(names.iter().all(|name| name == "api.example"), "{names:?}");
    web.until_event("what was wrong", |event| {
        event["event"] == "net_denied"
            && event["rule"].as_str().is_some_and(|rule| rule.contains("the client sent no host name"))
    });
    all_work(&world, "", &attacks);
}
