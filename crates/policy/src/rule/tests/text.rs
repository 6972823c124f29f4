use super::rule;
use crate::{Action, Direction, Protocol, Rule, Target};

#[test]
fn rules_are_written_as_they_are_read() {
    let table = [
        "allow public",
        "deny private",
        "allow loopback",
        "allow link-local:80",
        "deny metadata",
        "allow host:8080",
        "deny any",
        "allow api.example:443",
        "allow *.example.org:443,8443",
        "allow private:8000-8100",
        "allow tcp://10.1.2.3:22",
        "allow 10.0.0.0/8:443",
        "allow [2001:db8::/32]:443",
        "allow 2001:db8::/32",
        "allow udp://1.1.1.1:53",
        "allow icmp://1.1.1.1",
        "allow GET,HEAD http://api.example/v1/*",
        "deny POST http://[10.0.0.0/8]/admin",
        "allow http://[2001:db8::7]:8080/",
        "deny http://api.example:1-65535",
        "deny in public",
        "allow in tcp://10.0.0.0/8:80",
        "deny udp://example.org",
        "allow hosts.",
        "allow public.:443",
    ];
    for text in table {
        assert_eq!(rule(text).to_string(), text);
    }
}

#[test]
fn other_spellings_become_the_plain_one() {
    let table = [
        ("allow  API.Example.:443", "allow api.example:443"),
        ("allow out public", "allow public"),
        ("allow 1.2.3.4:1-65535", "allow 1.2.3.4"),
        ("allow 1.2.3.4:443,80,443,70-90", "allow 1.2.3.4:70-90,443"),
        ("allow 1.2.3.4/32", "allow 1.2.3.4"),
        ("allow HEAD,GET,GET http://a.example:80/*", "allow GET,HEAD http://a.example"),
        ("allow 2001:DB8:0:0::7", "allow 2001:db8::7"),
    ];
    for (text, plain) in table {
        assert_eq!(rule(text).to_string(), plain);
        assert_eq!(rule(text), rule(plain));
    }
}

#[test]
fn the_command_line_leaves_out_the_first_word() {
    let parsed = Rule::parse(Action::Deny, "udp://10.0.0.0/8:53").expect("a rule");
    assert_eq!(parsed, rule("deny udp://10.0.0.0/8:53"));
    assert_eq!(parsed.after_action(), "udp://10.0.0.0/8:53");
    assert_eq!((parsed.action(), parsed.direction()), (Action::Deny, Direction::Out));
    assert_eq!(parsed.protocol(), Some(Protocol::Udp));
    assert!(parsed.ports().contains(53) && !parsed.ports().contains(54));
    assert!(matches!(parsed.target(), Target::Net(_)) && parsed.http().is_none());
}

#[test]
fn json_has_the_same_text() {
    let json = serde_json::to_string(&rule("allow api.example:443")).expect("text");
    assert_eq!(json, r#""allow api.example:443""#);
    assert_eq!(serde_json::from_str::<Rule>(&json).expect("a rule"), rule("allow api.example:443"));
    let error = serde_json::from_str::<Rule>(r#""allow pubic""#).expect_err("a misspelling").to_string();
    assert!(error.starts_with("Column 7: ") && error.contains("public"), "{error}");
}
