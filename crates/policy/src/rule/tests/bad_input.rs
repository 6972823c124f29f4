use crate::{Action, Rule};

/// Text, the column of the first wrong character, and a part of the advice.
type Row = (&'static str, usize, &'static str);

const TABLE: [Row; 58] = [
    ("", 1, "public, api.example:443"),
    ("   ", 1, "public, api.example:443"),
    ("allow", 6, "A target is missing"),
    ("alow public", 1, "Did you mean \"allow\"?"),
    ("Allow public", 1, "Did you mean \"allow\"?"),
    ("permit public", 1, "allow or deny"),
    ("allow pubilc", 7, "Write public"),
    ("allow PRIVATE", 7, "Write private"),
    ("allow hosts", 7, "hosts. with a dot"),
    ("allow inn public", 7, "Did you mean \"in\"?"),
    ("allow in out public", 10, "GET,HEAD"),
    ("allow in in public", 10, "GET,HEAD"),
    ("allow tpc://a.example", 7, "Did you mean \"tcp\"?"),
    ("allow ssh://a.example", 7, "tcp, udp, icmp and http"),
    ("allow https://a.example/x", 7, "Write a.example:443"),
    ("allow https://a.example:8443/x", 7, "Write a.example:8443"),
    ("allow a.example:", 17, "from 1 to 65535"),
    ("allow a.example:0", 17, "from 1 to 65535"),
    ("allow a.example:65536", 17, "from 1 to 65535"),
    ("allow a.example:080", 17, "from 1 to 65535"),
    ("allow a.example:+80", 17, "from 1 to 65535"),
    ("allow a.example:80,", 20, "from 1 to 65535"),
    ("allow a.example:80,x", 20, "from 1 to 65535"),
    ("allow a.example:90-80", 17, "Write 80-90"),
    ("allow a.example:80,95-90", 20, "Write 90-95"),
    ("allow :80", 7, "A target is missing"),
    ("allow tcp://", 13, "A target is missing"),
    ("allow icmp://1.1.1.1:8", 22, "ICMP has no ports"),
    ("allow GTE http://a.example", 7, "Did you mean \"GET\"?"),
    ("allow GET,PSOT http://a.example", 11, "Did you mean \"POST\"?"),
    ("allow get http://a.example", 7, "Did you mean \"GET\"?"),
    ("allow GET,NOTHING http://a.example", 11, "\"NOTHING\" is not a method"),
    ("allow GTE http://a.example", 7, "\"GTE\" is not a method"),
    ("allow GET a.example", 7, "http://a.example"),
    ("allow a.example/v1", 7, "http://a.example/v1"),
    ("allow http://a.example/a/../b", 23, "no dot segments"),
    ("allow http://a.example/a%2e", 23, "no percent sign"),
    ("allow http://a.example/a*b", 23, "may end in a star"),
    ("allow http://a.example/a?b", 23, "no query"),
    ("allow 10.0.0.1/8", 7, "Write 10.0.0.0/8"),
    ("allow 10.0.0.0/33", 7, "from 0 to 32"),
    ("allow 10.0.0.0/08", 7, "from 0 to 32"),
    ("allow 2001:db8::/129", 7, "from 0 to 128"),
    ("allow fe80::1%eth0", 7, "has a zone"),
    ("allow ::ffff:10.0.0.1", 7, "Write the IPv4 form, 10.0.0.1"),
    ("allow ::ffff:10.0.0.0/104", 7, "Write the IPv4 form, 10.0.0.0/8"),
    ("allow [2001:db8::7:443", 7, "[2001:db8::7]:443"),
    ("allow [2001:db8::7]443", 20, "[2001:db8::7]:443"),
    ("allow [2001:db8::7]x:443", 20, "[2001:db8::7]:443"),
    ("allow 0177.0.0.1", 7, "such as 192.168.1.7"),
    ("allow 2130706433", 7, "such as 192.168.1.7"),
    ("allow 0x7f.1:80", 7, "such as 192.168.1.7"),
    ("allow b\u{fc}cher.example", 8, "xn--"),
    ("allow a_b.ex ample:80", 7, "GET,HEAD"),
    ("allow *", 7, "*.example.org"),
    ("allow udp://a.example:443", 7, "udp://192.0.2.7:123"),
    ("deny in a.example", 9, "Write an address"),
    ("deny in http://10.0.0.1", 9, "Leave out http://"),
];

#[test]
fn bad_rules_say_where_and_what_instead() {
    for (text, column, advice) in TABLE {
        let error = text.parse::<Rule>().expect_err(text).to_string();
        assert!(error.starts_with(&format!("Column {column}: ")), "{text:?}: {error}");
        assert!(error.contains(advice), "{text:?}: {error}");
    }
}

#[test]
fn columns_of_an_option_count_from_its_own_beginning() {
    let error = Rule::parse(Action::Allow, "api.example:x").expect_err("not a port");
    assert_eq!(error.at, "api.example:".len());
}

#[test]
fn very_long_rules_are_refused_before_they_are_read() {
    let text = format!("allow {}", "a.".repeat(100_000));
    let error = text.parse::<Rule>().expect_err("too long").to_string();
    assert!(error.contains("The most is 2048"), "{error}");
    let longest = format!("{:2048}", "allow public");
    assert_eq!(longest.parse::<Rule>().map(|rule| rule.to_string()).as_deref(), Ok("allow public"));
    assert!(format!("{longest} ").parse::<Rule>().is_err());
}

#[test]
fn no_text_makes_the_reader_panic() {
    let pieces = [
        "allow ", "deny ", "in ", "[", "]", ":", "/", "*", "%", "http://", "::", "GET,", "1", "a.", "\u{fc}",
        "\0", "-", ",",
    ];
    let mut state = 1_u32;
    for _ in 0..20_000 {
        let mut text = String::from("allow ");
        for _ in 0..6 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            text += pieces[(state >> 16) as usize % pieces.len()];
        }
        if let Ok(rule) = text.parse::<Rule>() {
            assert_eq!(rule.to_string().parse::<Rule>().as_ref(), Ok(&rule), "{text:?}");
        }
    }
}
