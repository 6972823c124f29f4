use super::PublishedPort;
use crate::Protocol;

#[test]
fn ports_are_written_as_they_are_read() {
    let table = [
        ("8080:80", "8080:80"),
        ("8080:80/tcp", "8080:80"),
        ("127.0.0.1:8080:80", "8080:80"),
        ("0:80", "0:80"),
        ("0.0.0.0:8080:80", "0.0.0.0:8080:80"),
        ("5353:53/udp", "5353:53/udp"),
        ("[::1]:8080:80", "[::1]:8080:80"),
        ("[::]:65535:65535/udp", "[::]:65535:65535/udp"),
    ];
    for (text, plain) in table {
        let port: PublishedPort = text.parse().expect(text);
        assert_eq!(port.to_string(), plain);
        assert_eq!(plain.parse(), Ok(port));
        let json = serde_json::to_string(&port).expect("text");
        assert_eq!(serde_json::from_str::<PublishedPort>(&json).expect("a port"), port);
    }
    let port: PublishedPort = "0:53/udp".parse().expect("a port");
    let parts = (port.bind.to_string(), port.host, port.guest, port.protocol);
    assert_eq!(parts, ("127.0.0.1".to_owned(), 0, 53, Protocol::Udp));
}

#[test]
fn bad_ports_say_what_to_write() {
    let table = [
        ("", "such as 8080:80"),
        ("8080", "Write 8080:8080"),
        ("8080/udp", "Write 8080:8080/udp"),
        ("http", "\"http\" is not a port"),
        ("0", "\"0\" is not a port"),
        ("8080:0", "\"0\" is not a port of the sandbox"),
        ("8080:", "\"\" is not a port of the sandbox"),
        (":80", "0 for any that is free"),
        ("65536:80", "0 for any that is free"),
        ("080:80", "0 for any that is free"),
        ("8080:+80", "\"+80\" is not a port of the sandbox"),
        ("8080:80/upd", "Did you mean \"udp\"?"),
        ("8080:80/", "tcp and udp"),
        ("8080:80/icmp", "tcp and udp"),
        ("8000-8010:80", "by itself"),
        ("8000:80-90", "by itself"),
        ("localhost:8080:80", "127.0.0.1"),
        ("*:8080:80", "0.0.0.0"),
        (":8080:80", "not an address"),
        ("0177.0.0.1:8080:80", "not an address"),
        ("127.1:8080:80", "not an address"),
        ("::1:8080:80", "[::1]:8080:80"),
        ("fe80::1:8080:80", "[::1]:8080:80"),
        ("1:2:3:4:5:6:7:8:8080:80", "[::1]:8080:80"),
        ("[::1:8080:80", "[::1]:8080:80"),
        ("[::1]8080:80", "[::1]:8080:80"),
        ("[::1]:8080", "Write [::1]:8080:8080"),
        ("[127.0.0.1]:8080:80", "not an address"),
        ("[::ffff:127.0.0.1]:8080:80", "not an address"),
        ("[fe80::1%eth0]:8080:80", "not an address"),
        ("1.2.3.4:1:2:3", "too many parts"),
        ("8080:80:90:100", "too many parts"),
        ("8080 :80", "0 for any that is free"),
    ];
    for (text, advice) in table {
        let error = text.parse::<PublishedPort>().expect_err(text).to_string();
        assert!(error.contains(advice), "{text:?}: {error}");
    }
}
