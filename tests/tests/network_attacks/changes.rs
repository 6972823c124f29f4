//! N7 and N8: what a sandbox changes in itself, and what changes around it.

use std::thread;
use std::time::Duration;

use bathy_tests::pace;
use bathy_tests::world::addresses::{SITE, SITE_V6};
use bathy_tests::world::{Kind, World};
use serde_json::json;

use bathy_tests::world::guest::Guest;
use bathy_tests::world::table::{
    UNDEFENDED, all_held, all_held_by, all_work_in, attack, hopeless, is_through, row, step,
};

#[test]
fn n7_what_a_sandbox_changes_in_itself_changes_nothing() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--allow", "api.example:80"]);
    web.try_one(json!(["curl", "http://api.example/"])).is("status 200");
    let shell = |script: &str| step(json!(["shell", format!("({script}) >/dev/null 2>&1; exit 0")]));
    let curl = |what: &str, url: &str| attack("N7", what, json!(["curl", url]));
    let steps = [
        shell("echo '10.0.0.5 api.example inner.test' >> /etc/hosts"),
        curl("the allowed name, elsewhere", "http://api.example/"),
        curl("another name", "http://inner.test/"),
        shell("sed -i s/10.0.0.5/93.184.215.14/ /etc/hosts"),
        curl("the allowed name at a public address", "http://api.example/"),
        shell("sed -i /api.example/d /etc/hosts; echo nameserver 8.8.8.8 > /etc/resolv.conf"),
        curl("another resolver", "http://api.example/"),
        shell("echo nameserver 192.0.0.1 > /etc/resolv.conf"),
        shell(
            "ip route add 10.0.0.0/8 dev eth0; ip route add 169.254.0.0/16 via 192.0.0.1; \
             ip -6 route add fd00::/8 via fd62:6174:6879::1",
        ),
        attack("N7", "a route to metadata", json!(["connect", "169.254.169.254", 443])),
        attack("N7", "a route to IPv6 inside", json!(["connect", "fd00::5", 443])),
        // The guest's kernel could not, if it wanted to: rules of its own would only ever change what the gateway judges.
        hopeless("N7", "rules of its own", json!(["netfilter"])),
        shell("iptables -t nat -A OUTPUT -d 151.101.1.10 -j DNAT --to 10.0.0.5; nft add table ip own"),
        shell("ip route del 10.0.0.0/8 dev eth0"),
        shell("unset http_proxy https_proxy no_proxy"),
        curl("through a proxy of its own", "http://10.0.0.5:8080/"),
        shell(
            "ip address del 127.0.0.1/8 dev lo; ip route del local 127.0.0.0/8 table local; \
             ip route add 127.0.0.0/8 via 192.0.0.1; sysctl -w net.ipv4.conf.all.route_localnet=1",
        ),
        hopeless("N7", "the host's loopback", json!(["connect", "127.0.0.1", 8080])),
    ];
    all_held_by(&web, NETFILTER, &steps, &[], |outcome| match outcome.row[0].as_str() {
        Some("shell") => outcome.word() == "exit 0",
        Some("netfilter") => outcome.word() == "absent",
        // A resolver that is denied is asked for some time by the C library.
        _ => ["unresolved", "timeout", "status 403", "unreachable", "refused"].contains(&outcome.word()),
    });
    web.try_one(json!(["curl", "http://api.example/"])).is("status 200");
    // Where nothing defends, all of that leads inward.
    let open = Guest::start(&world, "open", &UNDEFENDED);
    all_work_in(&open, NETFILTER, &steps.iter().collect::<Vec<_>>(), is_through);
}

/// Whether the kernel has rules for packets: the old ones of iptables, and the new ones of nft.
const NETFILTER: &str = "
def netfilter():
    try:
        with socket.socket() as sock:
            sock.getsockopt(socket.SOL_IP, 64, 84)
        return {'outcome': 'iptables'}
    except OSError:
        pass
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12).close()
        return {'outcome': 'nft'}
    except OSError:
        return {'outcome': 'absent'}
";

#[test]
fn n7_a_card_or_address_of_its_own_choice_is_nobodys() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let changes = [
        (
            "another address",
            "ip address add 10.0.0.77/32 dev eth0; ip route replace default via 192.0.0.1 dev eth0 onlink src 10.0.0.77",
        ),
        (
            "another card",
            "ip link set eth0 down; ip link set eth0 address 02:aa:bb:cc:dd:ee; ip link set eth0 up; ip route replace default via 192.0.0.1 dev eth0",
        ),
    ];
    for (what, script) in changes {
        world.forget_contacts();
        let outcomes = web.try_all(&[
            json!(["shell", script]),
            json!(["datagram", SITE, 7, "x"]),
            json!(["shell", "curl -sS -m SECONDS http://93.184.215.14/"]),
        ]);
        assert_eq!(world.contacts(), [], "{what}");
        let lost = ["timeout", "unreachable"].contains(&outcomes[1].word());
        row("N7", &format!("{what}, a datagram"), outcomes[1].word(), lost);
        row("N7", &format!("{what}, a request"), outcomes[2].word(), outcomes[2].word() != "exit 0");
    }
    for reason in ["from a foreign IP address", "from a foreign MAC address"] {
        web.until_event(reason, |event| event["event"] == "net_dropped" && event["reason"] == reason);
    }
}

/// Holds connections open while the policy changes, and reports which of them are still there.
const HOLD: &str = r#"
def hold(seconds):
    held = {}
    held["tcp"] = dialled("93.184.215.14", 7)
    held["named"] = dialled("site.example", 7)
    held["kept"] = dialled("151.101.1.10", 7)
    held["six"] = dialled("2606:2800:21f:cb07::1", 7)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.connect(("93.184.215.14", 7))
    held["udp"] = datagrams
    result = {}
    for turn in ("before", "after"):
        for name, sock in held.items():
            try:
                sock.settimeout(2 * SLOWNESS)
                sock.send(b"x")
                result[f"{name} {turn}"] = "echo" if sock.recv(9) == b"x" else "end"
            except OSError as error:
                result[f"{name} {turn}"] = failure(error)
        if turn == "before":
            print("holding", file=sys.stderr, flush=True)
            end = time.monotonic() + 20 * SLOWNESS
            while not os.path.exists("/tmp/go") and time.monotonic() < end:
                time.sleep(0.05)
    return {"outcome": "done", **result}
"#;

#[test]
fn n8_a_new_denial_holds_for_what_is_open() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    thread::scope(|scope| {
        let holding = scope.spawn(|| web.try_with(HOLD, &[json!(["hold", 1])]).remove(0));
        bathy_tests::kept::until("all are open", 10, || {
            let contacts = world.contacts();
            contacts.iter().filter(|contact| contact.port == 7 && contact.kind == Kind::Tcp).count() >= 4
                && contacts.iter().any(|contact| contact.kind == Kind::Udp)
        });
        thread::sleep(pace(Duration::from_millis(200)));
        web.policy("deny", &[SITE, SITE_V6]);
        world.forget_contacts();
        web.user(&["touch", "/tmp/go"]);
        let outcome = holding.join().unwrap();
        for name in ["tcp", "named", "kept", "six", "udp"] {
            assert_eq!(outcome.result[format!("{name} before")], "echo", "{name}: {outcome:?}");
            let after = outcome.result[format!("{name} after")].as_str().unwrap();
            row(
                "N8",
                &format!("an open connection ({name}) after a denial"),
                after,
                (after == "echo") == (name == "kept"),
            );
        }
    });
    assert_eq!(world.contacts_beyond(&["151.101.1.10"]), []);
    let log = web.net_log();
    let ended = log.iter().filter(|event| {
        event["reason"].as_str().is_some_and(|reason| reason.starts_with("the policy was changed: deny "))
    });
    assert_eq!(ended.count(), 4, "{log:#?}");
}

#[test]
fn n8_nothing_slips_through_while_policies_change() {
    let world = World::new();
    let web = Guest::start(&world, "web", &["--net", "public", "--deny", "10.0.0.5"]);
    let busy = "
def busy(seconds):
    end, count, denied = time.monotonic() + seconds * SLOWNESS, 0, 0
    while time.monotonic() < end:
        count += 1
        try:
            dialled('10.0.0.5', 7).close()
        except OSError:
            denied += 1
        dialled('151.101.1.10', 7).close()
        time.sleep(0.01)
    return {'outcome': 'done', 'count': count, 'denied': denied}
";
    thread::scope(|scope| {
        let running = scope.spawn(|| web.try_with(busy, &[json!(["busy", 4])]).remove(0));
        for turn in 0..12 {
            let preset = if turn % 2 == 0 { "open" } else { "public" };
            web.policy("set", &[preset, "deny 10.0.0.5", "allow any"]);
        }
        let outcome = running.join().unwrap();
        outcome.is("done");
        let (count, denied) = (&outcome.result["count"], &outcome.result["denied"]);
        row("N8", "calls while policies change", &format!("{denied} of {count} denied"), count == denied);
    });
    assert_eq!(world.contacts_beyond(&["151.101.1.10"]), []);
    // A policy that cannot be read changes nothing.
    let ran = world.bathy(&["policy", "set", "web", "public", "allow nonsense nonsense"]);
    assert_ne!(ran.code, Some(0));
    let bad = attack("N8", "after a bad policy", json!(["connect", "10.0.0.5", 7]));
    let empty = attack("N8", "under an empty list", json!(["connect", "151.101.1.10", 7]));
    let attacks = [bad, empty];
    all_held(&web, "", &attacks[..1], &[]);
    // Nothing at all, while it runs.
    web.policy("set", &["allow-list"]);
    all_held(&web, "", &attacks, &[]);
    web.policy("set", &["open"]);
    all_work_in(&web, "", &attacks.iter().collect::<Vec<_>>(), is_through);
}
