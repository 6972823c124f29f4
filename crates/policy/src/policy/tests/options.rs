//! Policies built from options.

use super::{policy, rule};
use crate::{MAX_RULES, NetworkPolicy, Policies, PolicyError, Preset};

fn from(preset: Option<Preset>, rules: &[&str]) -> Result<NetworkPolicy, PolicyError> {
    NetworkPolicy::from_options(preset, rules.iter().map(|text| rule(text)).collect())
}

#[test]
fn the_preset_follows_from_the_rules() {
    let table = [
        (None, &[][..], Preset::Public),
        (None, &["allow api.example:443"], Preset::AllowList),
        (None, &["deny api.example", "allow public"], Preset::AllowList),
        (None, &["deny api.example"], Preset::Public),
        (None, &["allow in private", "deny in any"], Preset::Public),
        (Some(Preset::Public), &["allow 10.0.0.5"], Preset::Public),
        (Some(Preset::Public), &["allow public"], Preset::Public),
        (Some(Preset::Open), &["deny private"], Preset::Open),
        (Some(Preset::None), &["deny any"], Preset::None),
        (Some(Preset::AllowList), &[], Preset::AllowList),
    ];
    for (preset, rules, expected) in table {
        assert_eq!(from(preset, rules), Ok(policy(expected, rules)), "{preset:?} {rules:?}");
    }
}

#[test]
fn contradictions_are_refused_with_advice() {
    for text in ["allow api.example:443", "allow in any"] {
        let error = from(Some(Preset::None), &[text]).expect_err("no network").to_string();
        assert!(error.contains(text) && error.contains("allow-list"), "{error}");
        assert!(policy(Preset::None, &[]).with_first(rule(text)).is_err());
    }
    let port = "8080:80".parse().expect("a port");
    let error = policy(Preset::None, &[]).check_published(&[port]).expect_err("no network").to_string();
    assert!(error.contains("8080:80") && error.contains("allow-list"), "{error}");
    assert_eq!(policy(Preset::Public, &[]).check_published(&[port]), Ok(()));
    assert_eq!(policy(Preset::None, &[]).check_published(&[]), Ok(()));
    assert!(
        policy(Preset::None, &["deny any"]).check_published(&[port]).is_err(),
        "a denial makes no network"
    );
}

#[test]
fn rules_are_counted() {
    let rules =
        |count| (0..count).map(|index| rule(&format!("deny 10.0.{}.{}", index / 256, index % 256))).collect();
    let full = NetworkPolicy::from_options(None, rules(MAX_RULES)).expect("as many as allowed");
    assert_eq!(
        NetworkPolicy::from_options(None, rules(MAX_RULES + 1)),
        Err(PolicyError::TooMany(MAX_RULES + 1))
    );
    assert!(full.with_first(rule("deny any")).is_err());
    let again = full.with_first(full.rules[7].clone()).expect("a rule that is there already");
    assert_eq!((again.rules.len(), &again.rules[0]), (MAX_RULES, &full.rules[7]));
}

#[test]
fn rules_are_taken_back_and_the_preset_stays() {
    let both = policy(Preset::AllowList, &["allow a.example:443", "deny private"]);
    assert_eq!(
        both.without(&[rule("allow a.example:443")]),
        Ok(policy(Preset::AllowList, &["deny private"]))
    );
    assert_eq!(both.without(&both.rules), Ok(policy(Preset::AllowList, &[])));
    let error =
        both.without(&[rule("deny private"), rule("deny public")]).expect_err("not there").to_string();
    assert!(error.contains("no rule \"deny public\"") && error.contains("allow a.example:443"), "{error}");
    let error = policy(Preset::Public, &[]).without(&[rule("deny any")]).expect_err("not there").to_string();
    assert!(error.ends_with("none at all"), "{error}");
}

#[test]
fn json_is_strict() {
    let text = r#"{"preset":"public","rules":["deny private","allow api.example:443"]}"#;
    let inspected: NetworkPolicy = serde_json::from_str(text).expect("a policy");
    assert_eq!(inspected, policy(Preset::Public, &["deny private", "allow api.example:443"]));
    assert_eq!(serde_json::to_string(&inspected).expect("text"), text);

    let without: NetworkPolicy =
        serde_json::from_str(r#"{"rules":["allow api.example:443"]}"#).expect("a policy");
    assert_eq!(without.preset, Preset::AllowList);
    let empty: NetworkPolicy = serde_json::from_str("{}").expect("a policy");
    assert_eq!(empty, NetworkPolicy::default());

    let bad = [
        (r#"{"preset":"pubilc"}"#, "Did you mean \"public\"?"),
        (r#"{"preset":"Public"}"#, "Did you mean \"public\"?"),
        (r#"{"preset":"none","rules":["allow any"]}"#, "allow-list"),
        (r#"{"rule":[]}"#, "unknown field"),
        (r#"{"rules":["allow 10.0.0.1/8"]}"#, "Write 10.0.0.0/8"),
    ];
    for (text, advice) in bad {
        let error = serde_json::from_str::<NetworkPolicy>(text).expect_err(text).to_string();
        assert!(error.contains(advice), "{text}: {error}");
    }
    let many = format!(r#"{{"rules":[{}]}}"#, vec![r#""deny any""#; MAX_RULES + 1].join(","));
    assert!(serde_json::from_str::<NetworkPolicy>(&many).is_err());
}

#[test]
fn a_gateway_is_given_both_policies_as_json() {
    let both = Policies::new(
        Some(policy(Preset::Public, &["deny evil.example"])),
        policy(Preset::Open, &["allow host:80"]),
    );
    for policies in [both, Policies::new(None, NetworkPolicy::default())] {
        let text = serde_json::to_string(&policies).expect("text");
        assert_eq!(serde_json::from_str::<Policies>(&text).expect("policies"), policies);
    }
    assert!(serde_json::from_str::<Policies>(r#"{"ceilings":[],"own":{},"celling":[]}"#).is_err());
    assert!(serde_json::from_str::<Policies>(r#"{"own":{}}"#).is_err(), "ceilings that were forgotten");
    assert!(serde_json::from_str::<Policies>(r#"{"ceilings":[]}"#).is_err(), "no policy is not any policy");
}
