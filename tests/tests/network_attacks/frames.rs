//! V9: frames that no honest sandbox sends.

use std::time::Duration;

use bathy_tests::promptly;
use bathy_tests::world::World;
use bathy_tests::world::addresses::{SITE, SITE_V6};
use serde_json::json;

use crate::others::{few_packets, packets_out};
use bathy_tests::world::guest::{AT_ONCE, Guest, probe};
use bathy_tests::world::table::{row, undefended};

const FRAMES: &str = include_str!("frames.py");

#[test]
fn v9_no_odd_frame_gets_out() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    // The content of the frames would be received if ordinary frames carried it.
    web.try_with(FRAMES, &[json!(["fire", "good_frames", 1])])[0].is("sent");
    bathy_tests::kept::until("both are heard", 3, || world.contacts().len() == 2);
    undefended("V9", "the same content in ordinary frames", "both were heard", true);
    world.forget_contacts();

    let before = packets_out(&world);
    let fired = web.try_with(FRAMES, &[json!(["fire", "all_frames", 20])]).remove(0);
    fired.is("sent");
    let (kinds, unsent) =
        (fired.result["kinds"].as_array().unwrap(), fired.result["unsent"].as_array().unwrap());
    assert!(kinds.len() > 60 && unsent.len() <= 4, "{fired:?}");
    let (contacts, sent, few) = (world.contacts(), packets_out(&world) - before, few_packets());
    for kind in kinds {
        let outcome = if unsent.contains(kind) { "not sent by this kernel" } else { "nothing left" };
        row("V9", kind.as_str().unwrap(), outcome, contacts.is_empty() && sent <= few);
    }

    for reason in [
        "malformed",
        "from a foreign MAC address",
        "from a foreign IP address",
        "to an unknown MAC address",
        "with a VLAN tag",
        "neither IP nor ARP",
        "with IP options or extension headers",
        "fragments",
        "without a port",
    ] {
        web.until_event(reason, |event| event["event"] == "net_dropped" && event["reason"] == reason);
        row("V9", &format!("frames {reason}"), "counted and told", true);
    }
    for address in
        ["127.0.0.1", "::1", "169.254.169.254", "fe80::5", "0.0.0.0", "::ffff:10.0.0.5", "::ffff:127.0.0.1"]
    {
        web.until_event(address, |event| {
            let reported =
                event["address"].as_str().and_then(|reported| reported.parse::<std::net::IpAddr>().ok());
            event["event"] == "net_denied" && reported == address.parse().ok()
        });
    }
    web.still_works();
    web.try_one(json!(["curl", "-6", "http://site.example/"])).is("status 200");
    assert_eq!(world.contacts_beyond(&[SITE, SITE_V6]), []);
}

#[test]
fn v9_a_neighbour_does_not_feel_odd_frames() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let neighbour = Guest::start(&world, "neighbour", &[]);
    let most = promptly(5 * AT_ONCE);
    let mut flood =
        world.bathy_command(&["exec", "-u", "root", "web", "--", "python3", "-c", &flood()]).spawn().unwrap();
    let mut worst = Duration::ZERO;
    for _ in 0..5 {
        let outcome = neighbour.try_one(json!(["curl", "http://site.example/still"]));
        worst = worst.max(outcome.is("status 200").took());
    }
    flood.wait().unwrap();
    row("V9", "odd frames without end, beside a neighbour", &format!("it waited {worst:?}"), worst <= most);
    web.still_works();
}

/// Two seconds of frames, or as many more as the neighbour takes.
fn flood() -> String {
    let program = probe(FRAMES);
    let (library, _) = program.split_once("if __name__").unwrap();
    format!(
        "{library}\nend = time.monotonic() + 2 * SLOWNESS\nwhile time.monotonic() < end:\n    fire('all_frames', 20)\n"
    )
}
