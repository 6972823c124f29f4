use super::*;

const HEX: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

fn read(text: &str) -> Reference {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refused(text: &str) -> ReferenceError {
    text.parse::<Reference>().unwrap_err()
}

#[test]
fn names_are_read_as_docker_reads_them() {
    for (text, canonical) in [
        ("debian", "docker.io/library/debian:latest"),
        ("debian:12", "docker.io/library/debian:12"),
        ("owner/name", "docker.io/owner/name:latest"),
        ("docker.io/debian", "docker.io/library/debian:latest"),
        ("index.docker.io/owner/name:x", "docker.io/owner/name:x"),
        ("registry-1.docker.io/owner/name:x", "docker.io/owner/name:x"),
        ("ghcr.io/a/b/c", "ghcr.io/a/b/c:latest"),
        ("ghcr.io/name", "ghcr.io/name:latest"),
        ("localhost/name", "localhost/name:latest"),
        ("localhost:5000/name:tag", "localhost:5000/name:tag"),
        ("myhost:5000/name", "myhost:5000/name:latest"),
        ("myhost/name", "docker.io/myhost/name:latest"),
        ("Example.COM/name", "example.com/name:latest"),
        ("[::1]:5000/name", "[::1]:5000/name:latest"),
        ("127.0.0.1:5000/a.b_c__d---e:T_a.g-1", "127.0.0.1:5000/a.b_c__d---e:T_a.g-1"),
        ("debian:5000", "docker.io/library/debian:5000"),
    ] {
        let reference = read(text);
        assert_eq!(reference.to_string(), canonical, "{text}");
        assert_eq!(read(canonical), reference, "{text}");
    }
}

#[test]
fn a_digest_replaces_the_default_tag_and_stands_beside_a_given_one() {
    let reference = read(&format!("debian@sha256:{HEX}"));
    assert_eq!(reference.to_string(), format!("docker.io/library/debian@sha256:{HEX}"));
    assert_eq!((reference.tag(), reference.target()), (None, format!("sha256:{HEX}")));
    let both = read(&format!("debian:12@sha256:{HEX}"));
    assert_eq!(both.to_string(), format!("docker.io/library/debian:12@sha256:{HEX}"));
    assert_eq!(both.target(), format!("sha256:{HEX}"));
    assert_eq!(read("debian:12").pinned(both.digest().unwrap()), both);
    assert_eq!(read(&both.to_string()), both);
}

#[test]
fn the_hub_has_its_server_elsewhere() {
    assert_eq!(read("debian").server(), "registry-1.docker.io");
    assert_eq!(read("ghcr.io/a/b").server(), "ghcr.io");
    assert_eq!(registry("index.docker.io").unwrap(), "docker.io");
    assert_eq!(registry("LocalHost:5000").unwrap(), "localhost:5000");
    for wrong in
        ["", "https://x", "a/b", "x:", "x:0", "x:99999", "x:+1", "-x", "x..y", "[::1", "[::1]5", "[x]"]
    {
        assert!(registry(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_mistake_is_named_with_a_suggestion() {
    let upper = refused("Debian").to_string();
    assert!(upper.contains("lower case") && upper.ends_with("Did you mean `debian`?"), "{upper}");
    let upper = refused("ghcr.io/Owner/name:Tag").to_string();
    assert!(upper.ends_with("Did you mean `ghcr.io/owner/name:Tag`?"), "{upper}");
    let upper = refused("Owner/name").to_string();
    assert!(upper.ends_with("Did you mean `owner/name`?"), "{upper}");
    let scheme = refused("https://ghcr.io/owner/name/").to_string();
    assert!(scheme.contains("no `https://`. Did you mean `ghcr.io/owner/name`?"), "{scheme}");
    assert_eq!(refused(""), ReferenceError::Empty);
    assert!(refused(HEX).to_string().contains(&format!("NAME@sha256:{HEX}")));
}

#[test]
fn what_is_no_name_is_refused() {
    for text in
        ["debian:", "debian:-x", "debian:.x", "debian:a b", &format!("debian:{}", "x".repeat(129)), "a/b:c:"]
    {
        assert!(matches!(refused(text), ReferenceError::Tag { .. }), "{text}");
    }
    for text in [
        "/", "a//b", "/a", "a/", "-a", "a-", "a..b", "a___b", "a._b", "a b", "a/../b", "ä", "a\u{1b}b", ":x",
        "a\0",
    ] {
        let error = refused(text);
        assert!(matches!(error, ReferenceError::Repository { .. }), "{text}: {error:?}");
        assert!(!error.to_string().contains('\u{1b}'));
    }
    for text in ["debian@", "debian@sha256", "debian@md5:abc", "debian@sha256:abc", "debian@x@y"] {
        assert!(matches!(refused(text), ReferenceError::Digest(..)), "{text}");
    }
    for text in ["x:y/z", "a.b:0/z", "a_b.c/z", "user@host"] {
        assert!(text.parse::<Reference>().is_err(), "{text}");
    }
    assert!(matches!(refused("x:y/z"), ReferenceError::Registry(..)));
    assert_eq!(refused(&format!("ghcr.io/{}", "a".repeat(248))), ReferenceError::Long);
    read(&format!("ghcr.io/{}", "a".repeat(247)));
}

#[test]
fn only_this_machine_is_loopback() {
    for host in ["localhost", "127.0.0.1", "127.8.8.8", "[::1]", "::1"] {
        assert!(is_loopback(host), "{host}");
    }
    for host in ["localhost.example.com", "128.0.0.1", "[::2]", "example.com", "127.0.0.1.example.com", ""] {
        assert!(!is_loopback(host), "{host}");
    }
}
