//! Which names are resolved, and which addresses are revealed.

use super::{SERVER, SERVER_V6, address, allow_list, name, policies, policy};
use crate::{Access, Policies, Preset};

#[test]
fn n4_names_outside_of_the_policy_are_not_resolved() {
    let table = [
        (Preset::Public, &[][..], "any.example", true, "preset public"),
        (Preset::Open, &[], "any.example", true, "preset open"),
        (Preset::None, &[], "any.example", false, "preset none"),
        (Preset::AllowList, &[], "any.example", false, "preset allow-list"),
        (Preset::AllowList, &["allow api.example:443"], "api.example", true, "allow api.example:443"),
        (Preset::AllowList, &["allow api.example:443"], "data.api.example", false, "preset allow-list"),
        (Preset::AllowList, &["allow *.api.example"], "data.api.example", true, "allow *.api.example"),
        (
            Preset::AllowList,
            &["allow GET http://api.example/x"],
            "api.example",
            true,
            "allow GET http://api.example/x",
        ),
        (Preset::AllowList, &["allow public:443"], "any.example", true, "allow public:443"),
        (Preset::AllowList, &["allow 10.0.0.0/8"], "db.internal", true, "allow 10.0.0.0/8"),
        (Preset::AllowList, &["allow 10.0.0.5:5432"], "db.internal", false, "preset allow-list"),
        (Preset::AllowList, &["allow 127.0.0.0/8"], "any.example", false, "preset allow-list"),
        (Preset::AllowList, &["allow host", "allow loopback"], "any.example", false, "preset allow-list"),
        (Preset::AllowList, &["allow in public"], "any.example", false, "preset allow-list"),
        (Preset::AllowList, &["deny any", "allow a.example"], "a.example", false, "deny any"),
        (Preset::Public, &["deny evil.example"], "evil.example", false, "deny evil.example"),
        (Preset::Public, &["deny *.evil.example"], "a.b.evil.example", false, "deny *.evil.example"),
        (Preset::Public, &["deny evil.example:80"], "evil.example", true, "preset public"),
        (Preset::Public, &["deny tcp://evil.example"], "evil.example", true, "preset public"),
        (Preset::Public, &["deny in any"], "any.example", true, "preset public"),
        (Preset::Public, &["deny private"], "any.example", true, "preset public"),
        (Preset::Public, &[], "nas.local", false, "preset public: internal name"),
        (Preset::Public, &[], "printer", false, "preset public: internal name"),
        (Preset::Public, &["allow nas.local"], "nas.local", true, "allow nas.local"),
        (Preset::Open, &[], "nas.local", true, "preset open"),
    ];
    for (preset, rules, asked, allowed, by) in table {
        let decision = policies(preset, rules).resolve(&name(asked));
        assert_eq!(
            (decision.allows(), decision.by.to_string().as_str()),
            (allowed, by),
            "N4 {preset} {rules:?} {asked}"
        );
    }
}

#[test]
fn n2_names_of_metadata_services_need_to_be_named() {
    let metadata = name("metadata.google.internal");
    for preset in [Preset::Public, Preset::Open] {
        for rules in
            [&[][..], &["allow any"], &["allow 169.254.169.254"], &["allow public"], &["allow 0.0.0.0/0"]]
        {
            let decision = policies(preset, rules).resolve(&metadata);
            assert_eq!(decision.access, Access::Deny, "N2 {preset} {rules:?}");
            assert_eq!(decision.by.to_string(), format!("preset {preset}: name of a metadata service"));
        }
    }
    for rule in ["allow metadata", "allow metadata.google.internal"] {
        assert!(allow_list(&[rule]).resolve(&metadata).allows(), "{rule}");
    }
    assert!(!allow_list(&["allow metadata"]).resolve(&name("any.example")).allows());
}

#[test]
fn n3_responses_that_point_inward_are_not_revealed() {
    let inbound = [
        "10.0.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "192.168.0.1",
        "0.0.0.0",
        "::1",
        "::ffff:10.0.0.1",
        "fd00:ec2::254",
        "fe80::1",
        "64:ff9b::7f00:1",
        "2002:a00:1::",
        "224.0.0.251",
    ];
    for text in inbound {
        for policies in [policies(Preset::Public, &[]), allow_list(&["allow a.example", "allow public"])] {
            assert!(!policies.reveal(&name("a.example"), address(text), false), "N3 {text}");
        }
    }
    for text in [SERVER, SERVER_V6] {
        assert!(policies(Preset::Public, &[]).reveal(&name("a.example"), address(text), false));
        assert!(
            !policies(Preset::Public, &[]).reveal(&name("a.example"), address(text), true),
            "N3 the host's own"
        );
    }
}

#[test]
fn addresses_are_revealed_if_they_could_be_reached() {
    let a = name("a.example");
    let table = [
        (Preset::Open, &[][..], "10.0.0.1", true),
        (Preset::Open, &["deny private"], "10.0.0.1", false),
        (Preset::Open, &["deny private:80"], "10.0.0.1", true),
        (Preset::Public, &["allow 10.0.0.0/8:80"], "10.0.0.1", true),
        (Preset::Public, &["deny a.example"], SERVER, false),
        (Preset::Public, &["deny 93.184.0.0/16"], SERVER, false),
        (Preset::Public, &["allow metadata"], "169.254.169.254", true),
        (Preset::Public, &["allow in private"], "10.0.0.1", false),
        (Preset::AllowList, &["allow a.example:443"], SERVER, true),
        (Preset::AllowList, &["allow b.example:443"], SERVER, false),
        (Preset::AllowList, &["deny public", "allow a.example:443"], SERVER, false),
        (Preset::None, &[], SERVER, false),
    ];
    for (preset, rules, text, told) in table {
        assert_eq!(
            policies(preset, rules).reveal(&a, address(text), false),
            told,
            "{preset} {rules:?} {text}"
        );
    }
    let below = Policies::new(Some(policy(Preset::Public, &[])), policy(Preset::Open, &[]));
    assert!(!below.reveal(&a, address("10.0.0.1"), false));
}
