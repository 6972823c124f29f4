//! What programs in a sandbox do with its network: both families of addresses, names, HTTP by the rules, and real clients
//! against real servers. Everything happens in a world of its own, from which nothing gets out.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;
use std::process::Command;
use std::time::Duration;

use bathy_tests::world::addresses::{self, SITE, SITE_V6};
use bathy_tests::world::guest::{AT_ONCE, GATEWAY, Guest, PATIENT};
use bathy_tests::world::{Kind, World};
use bathy_tests::{finish, limit};
use serde_json::json;

#[test]
fn both_families_of_addresses() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let outcomes = web.try_all(&[
        json!(["curl", "-6", "http://site.example/six"]),
        json!(["curl", "http://six.example/"]),
        json!(["curl", "-6", "https://site.example/"]),
        json!(["datagram", SITE_V6, 7, "hello"]),
        json!(["datagram", SITE, 7, "hello"]),
        json!(["names", "site.example", 28, "fd62:6174:6879::1"]),
    ]);
    for outcome in &outcomes[..3] {
        outcome.is("status 200").says(SITE_V6);
    }
    for outcome in &outcomes[3..5] {
        outcome.is("answered").says("hello");
    }
    outcomes[5].is("code 0").says(SITE_V6);
    // The gateway answers for itself only.
    let seconds = limit(Duration::from_secs(1)).as_secs().to_string();
    let ping = |host: &str| web.run(&["python3", "-c", PING, host, &seconds]).stdout;
    assert_eq!(ping(GATEWAY), "answered\n");
    assert_eq!(ping(SITE), "nothing\n");
}

/// One echo request.
const PING: &str = "import socket, struct, sys
def total(data):
    words = sum(struct.unpack(f'>{len(data) // 2}H', data))
    words = (words >> 16) + (words & 0xffff)
    return 0xffff - words - (words >> 16)
sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
sock.settimeout(float(sys.argv[2]))
body = struct.pack('>BBHHH', 8, 0, 0, 7, 1) + b'ping'
sock.sendto(body[:2] + struct.pack('>H', total(body)) + body[4:], (sys.argv[1], 0))
try:
    data = sock.recv(999)
    print('answered' if data[20] == 0 else 'nothing')
except OSError:
    print('nothing')";

#[test]
fn names_that_do_not_resolve() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let names = ["no-such-name", "fails", "nowhere", "empty"];
    let rows = names.map(|name| json!(["curl", format!("http://{name}.example/")]));
    let outcomes = web.try_with(PATIENT, &rows);
    for outcome in &outcomes {
        outcome.is("unresolved");
    }
    outcomes[0].took_at_most(AT_ONCE);
    web.until_event("the name and its reason", |event| {
        event["event"] == "name_unresolved"
            && event["host"] == "no-such-name.example"
            && event["reason"] == "there is no such name"
            && event["denied"] == false
    });
    // A resolver that never answers: the sandbox gets SERVFAIL, and other names still work meanwhile.
    let asking =
        world.bathy_command(&["exec", "web", "--", "getent", "hosts", "silent.example"]).spawn().unwrap();
    web.still_works();
    let output = asking.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    web.until_event("the silence", |event| {
        event["event"] == "name_unresolved"
            && event["host"] == "silent.example"
            && event["reason"] == "the host's resolvers did not respond"
    });
    web.try_with(PATIENT, &[json!(["curl", "http://late.example/"])])[0].is("status 200");
}

#[test]
fn the_hosts_resolver_is_down() {
    let world = World::new();
    let conf = world.home().path().join("resolv.conf");
    fs::write(&conf, format!("nameserver {}\n", addresses::SILENT)).unwrap();
    let bathy =
        |arguments: &[&str]| finish(world.bathy_command(arguments).env("BATHY_RESOLV_CONF", &conf), b"");
    assert_eq!(bathy(&["create", "--name", "web"]).code, Some(0));
    assert_eq!(bathy(&["start", "web"]).code, Some(0));
    let web = Guest { world: &world, name: "web" };
    let answer = web.try_with(PATIENT, &[json!(["names", "site.example"])]).remove(0);
    answer.is("code 2");
    web.until_event("who is silent", |event| event["reason"] == "the host's resolvers did not respond");
    // Addresses need no resolver.
    web.try_one(json!(["curl", format!("http://{SITE}/")])).is("status 200");
}

#[test]
fn methods_and_paths_are_rules_too() {
    let world = World::new();
    let options = [
        "--allow",
        "GET http://api.example/v1/*",
        "--allow",
        "POST http://api.example/upload",
        "--allow",
        "GET http://api.example/ws",
    ];
    let web = Guest::start(&world, "web", &options);
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: api.example\r\n\r\n");
    let rows = [
        json!(["curl", "http://api.example/v1/items"]),
        json!(["curl", "-d", "x", "http://api.example/v1/items"]),
        json!(["curl", "http://api.example/v2/items"]),
        json!(["curl", "--path-as-is", "http://api.example/v1/../v2"]),
        json!(["curl", "-I", "http://api.example/v1/items"]),
        json!(["say", "api.example", 80, get("/v1/first"), get("/v1/second")]),
        json!(["say", "api.example", 80, get("/v1/first"), get("/private")]),
        json!(["say", "api.example", 80, get("/v1/first") + &get("/private")]),
        json!(["websocket", "api.example", 80, "/ws", "hello"]),
        json!(["curl", "-H", "Transfer-Encoding: chunked", "-d", "0123456789", "http://api.example/upload"]),
        json!(["curl", "https://api.example/v1/items"]),
        json!(["say", "api.example", 80, "not HTTP at all\r\n\r\n"]),
    ];
    let outcomes = web.try_all(&rows);
    outcomes[0].is("status 200");
    for (index, path) in [(1, "POST"), (2, "/v2/items"), (3, "/v1/../v2")] {
        let denied = outcomes[index].is("status 403");
        denied.says("denies api.example:80 (").says("Rule: ").says("bathy policy allow web api.example:80");
        assert!(
            !world.contacts().iter().any(|contact| contact
                .detail
                .as_deref()
                .is_some_and(|detail| detail.contains(path) && !detail.contains("upload"))),
            "{path} got through"
        );
    }
    outcomes[4].is("status 403");
    assert_eq!(outcomes[5].heard().matches("HTTP/1.1 200 OK").count(), 2, "{:?}", outcomes[5]);
    for index in [6, 7] {
        let heard = outcomes[index].heard();
        assert_eq!(heard.matches("HTTP/1.1 200 OK").count(), 1, "{heard}");
        assert_eq!(heard.matches("HTTP/1.1 403 Forbidden").count(), 1, "{heard}");
        assert!(heard.find("200 OK") < heard.find("403 Forbidden"), "{heard}");
    }
    outcomes[8].is("echo").says("hello");
    outcomes[9].is("status 200").says(r#"{\"bytes\": 10}"#);
    outcomes[10].is_denied();
    assert_eq!(outcomes[11].heard(), "<reset>", "{:?}", outcomes[11]);
    let requests: Vec<_> =
        world.contacts().into_iter().filter(|contact| contact.kind == Kind::Http).collect();
    let targets: Vec<_> = requests.iter().map(|contact| contact.detail.as_deref().unwrap()).collect();
    let expected = [
        "GET /v1/items",
        "GET /v1/first",
        "GET /v1/second",
        "GET /v1/first",
        "GET /v1/first",
        "GET /ws",
        "POST /upload",
    ];
    assert_eq!(targets, expected);
}

#[test]
fn a_redirect_does_not_lead_inward() {
    let world = World::new();
    let web = Guest::start(&world, "web", &[]);
    let url = |to: &str| format!("http://site.example/redirect?to={to}");
    let rows = [
        "http://10.0.0.5/secret",
        "http://metadata.example/",
        "http://169.254.169.254/latest",
        "http://[fd00::5]/",
    ]
    .map(|to| json!(["curl", "-L", url(to)]));
    for outcome in web.try_all(&rows) {
        outcome.is_denied();
    }
    assert_eq!(world.contacts_beyond(&[SITE, SITE_V6]), []);
}

/// Makes a package and its index, and a repository, below the world's files.
fn publish(world: &World) {
    let files = world.files();
    let wheel = "import sys, zipfile\n\
        from pathlib import Path\n\
        folder = Path(sys.argv[1]) / 'simple' / 'tiny'\n\
        folder.mkdir(parents=True)\n\
        name = 'tiny-1.0-py3-none-any.whl'\n\
        info = 'tiny-1.0.dist-info'\n\
        with zipfile.ZipFile(folder / name, 'w') as file:\n\
        \x20file.writestr('tiny.py', 'print(\"tiny works\")')\n\
        \x20file.writestr(f'{info}/METADATA', 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n')\n\
        \x20file.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n\
        \x20file.writestr(f'{info}/RECORD', f'tiny.py,,\\n{info}/METADATA,,\\n{info}/WHEEL,,\\n{info}/RECORD,,\\n')\n\
        (folder / 'index.html').write_text(f'<a href=\"{name}\">{name}</a>')";
    let ran = finish(Command::new("python3").args(["-c", wheel]).arg(&files), b"");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let repository = "set -e; git init -q work; cd work; echo deep > file; git add file; \
        git -c user.name=t -c user.email=t@t.example commit -qm first; cd ..; git clone -q --bare work repo.git; \
        git -C repo.git update-server-info; rm -rf work";
    let ran = finish(Command::new("sh").args(["-c", repository]).current_dir(&files), b"");
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn real_clients_work() {
    let world = World::new();
    publish(&world);
    let web = Guest::start(&world, "web", &["--allow", "*.example:80,443,8443"]);
    let sh = |script: &str| {
        let ran = world.bathy(&["exec", "web", "--", "sh", "-c", script]);
        assert_eq!(ran.code, Some(0), "{script}: {ran:?}");
        ran.stdout
    };
    let pip = "--disable-pip-version-check --no-input -q --trusted-host pypi.example \
        --index-url http://pypi.example/files/simple/";
    assert_eq!(sh(&format!("cd /tmp && pip download {pip} tiny && ls *.whl")), "tiny-1.0-py3-none-any.whl\n");
    assert_eq!(
        sh(&format!("pip install {pip} --target /tmp/lib tiny && PYTHONPATH=/tmp/lib python3 -m tiny")),
        "tiny works\n"
    );
    assert_eq!(sh("cd /tmp && git clone -q http://git.example/files/repo.git && cat repo/file"), "deep\n");

    // TLS passes unopened: the client trusts only the server's own authority.
    let authority = fs::read_to_string(world.authority()).unwrap();
    sh(&format!("cat > /tmp/ca.pem <<'END'\n{authority}\nEND"));
    let curl = |more: &str, url: &str| {
        sh(&format!(
            "curl -sS --cacert /tmp/ca.pem {more} -o /tmp/body -w '%{{http_code}} %{{http_version}}' {url}"
        ))
    };
    assert_eq!(curl("--http1.1", "https://site.example/"), "200 1.1");
    assert_eq!(curl("--http2", "https://site.example:8443/"), "200 2");
    assert_eq!(curl("--http1.1", "https://site.example/bytes/3000000"), "200 1.1");
    assert_eq!(sh("mv /tmp/body /tmp/large; wc -c < /tmp/large"), "3000000\n");
    assert_eq!(curl("--http1.1 --data-binary @/tmp/large", "https://site.example/upload"), "200 1.1");
    assert_eq!(sh("cat /tmp/body"), "{\"bytes\": 3000000}\n");
    web.try_one(json!(["websocket", "site.example", 80, "/ws", "over the wire"]))
        .is("echo")
        .says("over the wire");
}
