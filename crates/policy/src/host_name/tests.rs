use super::{HostName, HostNameError, NamePattern};

fn name(text: &str) -> Result<HostName, HostNameError> {
    text.parse()
}

#[test]
fn n1_nothing_that_could_be_an_address_is_a_name() {
    let table = [
        "127.0.0.1",
        "0177.0.0.1",
        "2130706433",
        "017700000001",
        "0x7f000001",
        "0x7f.1",
        "0X7F.0.0.0x1",
        "127.1",
        "127.0.1",
        "127.0.0.1.",
        "127.1.",
        "0",
        "0x",
        "example.0",
        "example.0x1",
        "1.2.3.4.5",
        "256.256.256.256",
        "00000127.0.0.1",
    ];
    for text in table {
        assert_eq!(name(text), Err(HostNameError::Address(text.to_owned())), "N1 {text}");
    }
}

#[test]
fn n1_other_spellings_of_addresses_are_no_names_either() {
    let table = [
        ("full-width digits", "\u{ff11}\u{ff12}\u{ff17}.0.0.1"),
        ("full-width dot", "127\u{ff0e}0\u{ff0e}0\u{ff0e}1"),
        ("ideographic dot", "127\u{3002}0\u{3002}0\u{3002}1"),
        ("circled digits", "\u{2460}\u{2461}\u{2466}.0.0.1"),
        ("arabic digits", "\u{0661}\u{0662}\u{0667}.0.0.1"),
        ("brackets", "[::ffff:127.0.0.1]"),
        ("IPv6", "::ffff:7f00:1"),
        ("compatible", "::127.0.0.1"),
        ("NAT64", "64:ff9b::7f00:1"),
        ("zone", "fe80::1%eth0"),
        ("encoded dot", "127%2e0.0.1"),
        ("a port", "localhost:80"),
        ("a user", "user@example"),
    ];
    for (id, text) in table {
        assert!(name(text).is_err(), "N1 {id}: {text}");
    }
}

#[test]
fn the_longest_names_and_labels_are_accepted() {
    let label = "a".repeat(63);
    let longest = [label.as_str(), &label, &label, &"a".repeat(61)].join(".");
    assert_eq!(longest.len(), 253);
    for text in [format!("{label}.example"), longest.clone(), format!("{longest}.")] {
        assert!(name(&text).is_ok(), "{text}");
    }
    assert!(name(&format!("{longest}a")).is_err());
}

#[test]
fn n3_odd_names_are_refused_at_their_place() {
    let long_label = "a".repeat(64);
    let long_name = ["a"; 127].join(".") + "a";
    let longer_name = ["a"; 128].join(".");
    let table = [
        ("nothing", "", 0),
        ("a dot", ".", 0),
        ("two dots", "..", 0),
        ("a dot in front", ".example", 0),
        ("an empty part", "a..example", 2),
        ("two dots at the end", "example..", 8),
        ("NUL", "allowed.com\0.evil.com", 11),
        ("space", "allowed.com .evil.com", 11),
        ("space in front", " allowed.com", 0),
        ("tab", "allowed\t.com", 7),
        ("newline", "allowed.com\n", 11),
        ("encoded NUL", "allowed.com%00.evil.com", 11),
        ("slash", "allowed.com/evil.com", 11),
        ("backslash", "allowed.com\\.evil.com", 11),
        ("homoglyph", "\u{430}llowed.com", 0),
        ("soft hyphen", "allo\u{ad}wed.com", 4),
        ("zero width", "allowed\u{200b}.com", 7),
        ("hyphen in front", "a.-b.com", 2),
        ("hyphen behind", "a.b-.com", 2),
        ("star", "*.example", 0),
        ("a long part", &long_label, 0),
        ("254 characters", &long_name, 0),
        ("255 characters", &longer_name, 0),
    ];
    for (id, text, at) in table {
        let error = name(text).expect_err(id);
        assert_eq!(error.at(), at, "N3 {id}: {error}");
    }
}

#[test]
fn n3_a_name_has_one_form() {
    let longest = ["a"; 127].join(".");
    assert_eq!(longest.len(), 253);
    let table = [
        ("Example.ORG", "example.org"),
        ("example.org.", "example.org"),
        ("_dmarc.example", "_dmarc.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("localhost", "localhost"),
        ("0x7g", "0x7g"),
        ("1.2.3.4.example", "1.2.3.4.example"),
        ("3com", "3com"),
        (&longest, &longest),
    ];
    for (text, form) in table {
        assert_eq!(name(text).map(|name| name.to_string()), Ok(form.to_owned()), "N3 {text}");
    }
    assert_eq!(name("allowed.com."), name("ALLOWED.com"));
}

#[test]
fn n3_patterns_take_whole_parts() {
    let table = [
        ("allowed.com", "allowed.com", true),
        ("allowed.com", "ALLOWED.COM.", true),
        ("allowed.com", "evilallowed.com", false),
        ("allowed.com", "allowed.com.evil.com", false),
        ("allowed.com", "www.allowed.com", false),
        ("allowed.com", "allowed.co", false),
        ("*.allowed.com", "www.allowed.com", true),
        ("*.allowed.com", "a.b.c.allowed.com", true),
        ("*.Allowed.COM.", "www.allowed.com", true),
        ("*.allowed.com", "allowed.com", false),
        ("*.allowed.com", "evilallowed.com", false),
        ("*.allowed.com", "www.evilallowed.com", false),
        ("*.allowed.com", "www.allowed.com.evil.com", false),
        ("*.allowed.com", "_sip.allowed.com", true),
        ("*.internal", "db.internal", true),
        ("*.internal", "internal", false),
        ("xn--llowed-2nf.com", "allowed.com", false),
    ];
    for (pattern, text, matches) in table {
        let pattern: NamePattern = pattern.parse().expect("a pattern");
        assert_eq!(pattern.matches(&name(text).expect("a name")), matches, "N3 {pattern} {text}");
    }
}

#[test]
fn n3_stars_stand_only_for_the_first_parts() {
    let table = [
        ("*", 0),
        ("*.", 0),
        ("**.example", 0),
        ("a.*.example", 2),
        ("*.*.example", 2),
        ("a*.example", 1),
        ("*example", 0),
    ];
    for (text, at) in table {
        let error = text.parse::<NamePattern>().expect_err(text);
        assert_eq!(error.at(), at, "N3 {text}: {error}");
        assert!(error.to_string().contains("*.example.org"), "{error}");
    }
    assert_eq!("*.127.0.0.1".parse::<NamePattern>().map_err(|error| error.at()), Err(2));
}
