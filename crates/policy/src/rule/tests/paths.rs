use super::rule;
use crate::{InspectedRequest, plain_path};

#[test]
fn paths_have_one_spelling_or_none() {
    let table = [
        ("/", Some("/")),
        ("/v1/x", Some("/v1/x")),
        ("/v1/", Some("/v1/")),
        ("/%76%31/x", Some("/v1/x")),
        ("/a%20b", Some("/a%20b")),
        ("/b%c3%bccher", Some("/b%C3%BCcher")),
        ("/a%3fb", Some("/a%3Fb")),
        ("", None),
        ("v1", None),
        ("*", None),
        ("/a/../b", None),
        ("/a/%2e%2e/b", None),
        ("/a/.%2E/b", None),
        ("/a/./b", None),
        ("/a/..", None),
        ("//a", None),
        ("/a//b", None),
        ("/a%2fb", None),
        ("/a%5cb", None),
        ("/a\\b", None),
        ("/a;b", None),
        ("/a%3bb", None),
        ("/a%252e", None),
        ("/a%00", None),
        ("/a%0d%0a", None),
        ("/a%c0%ae", None),
        ("/a%", None),
        ("/a%2", None),
        ("/a%zz", None),
        ("/a%+1", None),
        ("/a b", None),
        ("/\u{fc}", None),
        ("/a?b", None),
        ("/a#b", None),
    ];
    for (path, plain) in table {
        assert_eq!(plain_path(path).as_deref(), plain, "{path}");
        assert!(plain.is_none_or(|plain| plain_path(plain).as_deref() == Some(plain)), "{path}");
    }
}

fn matches_port(text: &str, method: &str, path: Option<&str>, rewrites: bool) -> bool {
    let rule = rule(text);
    let http = rule.http().expect("a rule for requests");
    let request = InspectedRequest { method, path, rewrites };
    if text.starts_with("allow") { http.allows(&request) } else { http.denies(&request) }
}

#[test]
fn an_allow_rule_takes_requests_letter_by_letter() {
    let rule = "allow GET,HEAD http://a.example/v1/*";
    let table = [
        ("GET", Some("/v1/x"), true),
        ("HEAD", Some("/v1/"), true),
        ("GET", Some("/v1"), false),
        ("GET", Some("/V1/x"), false),
        ("get", Some("/v1/x"), false),
        ("POST", Some("/v1/x"), false),
        ("GET", Some("/v1/../admin"), false),
        ("GET", Some("/v1/%2e%2e/admin"), false),
        ("GET", Some("/v1/a%20b"), true),
        ("GET", None, false),
    ];
    for (method, path, taken) in table {
        assert_eq!(matches_port(rule, method, path, false), taken, "{method} {path:?}");
        assert!(!matches_port(rule, method, path, true), "{method} {path:?} that asks for something else");
    }
    assert!(matches_port("allow http://a.example", "PURGE", None, true));
}

#[test]
fn n5_a_tunnel_is_allowed_only_by_its_name() {
    assert!(!matches_port("allow http://a.example", "CONNECT", None, false));
    assert!(matches_port("allow CONNECT http://a.example", "CONNECT", None, false));
    assert!(matches_port("deny http://a.example", "CONNECT", None, false));
}

#[test]
fn a_deny_rule_takes_every_request_that_a_server_may_take_for_it() {
    let rule = "deny POST http://a.example/admin/*";
    let table = [
        ("POST", Some("/admin/x"), true),
        ("post", Some("/Admin/X"), true),
        ("POST", Some("/admin"), true),
        ("POST", Some("/x/../admin/y"), true),
        ("POST", None, true),
        ("POST", Some("/public"), false),
        ("POST", Some("/administrator"), false),
        ("GET", Some("/admin/x"), false),
    ];
    for (method, path, taken) in table {
        assert_eq!(matches_port(rule, method, path, false), taken, "{method} {path:?}");
        assert!(matches_port(rule, method, path, true), "{method} {path:?} that asks for something else");
    }
    assert!(matches_port("deny GET http://a.example/x", "GET", Some("/X/"), false));
}
