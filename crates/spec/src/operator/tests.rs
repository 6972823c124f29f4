use std::fs;

use bathy_protocol::launch::UmlMode;

use super::*;
use crate::{CpuQuota, Engine, Seconds};

/// The configuration of files with these texts, named `0`, `1` and so on.
fn policy(texts: &[&str]) -> Result<Operator, OperatorError> {
    let folder = tempfile::tempdir().unwrap();
    let paths = texts.iter().enumerate().map(|(number, text)| {
        let path = folder.path().join(number.to_string());
        fs::write(&path, text).unwrap();
        path
    });
    Operator::from_files(paths.collect::<Vec<_>>())
}

fn refusal(policy: &Operator, change: impl FnOnce(&mut SandboxSpec)) -> String {
    let mut spec = policy.defaults();
    change(&mut spec);
    policy.apply(spec).unwrap_err().to_string()
}

#[test]
fn no_policy_changes_nothing() {
    let none = Operator::from_files([PathBuf::from("/nowhere/config.toml")]).unwrap();
    assert_eq!(none, Operator::default());
    let allowed = none.apply(SandboxSpec::default()).unwrap();
    assert_eq!(allowed, Allowed { spec: SandboxSpec::default(), notes: Vec::new() });
    assert!(none.admit(u32::MAX).is_ok());
}

/// The file was moved or its file system is not mounted: the operator's limits are unknown, so nothing is
/// allowed.
#[test]
fn a_file_behind_a_link_that_leads_nowhere_is_missed() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("config.toml");
    std::os::unix::fs::symlink("/nowhere/config.toml", &link).unwrap();
    let error = Operator::from_files([link]).unwrap_err();
    assert!(bathy_protocol::chain(&error).contains("config.toml"), "{error}");
}

#[test]
fn ceilings_name_the_limit_the_file_and_the_value() {
    let policy = policy(&["[ceiling]\nmemory = \"256M\"\ndisk = \"1G\"\nprocesses = 64\ncpus = 1\n\
        cpu_quota = 0.5\nmax_duration = \"1h\"\nidle_timeout = \"5m\"\nlog_size = \"4M\"\n"])
    .unwrap();
    let message = refusal(&policy, |spec| spec.memory = Size(512 << 20));
    assert!(message.starts_with(
        "Memory of 512M is more than the operator allows: the most is 256M, by `memory` in [ceiling] of /"
    ));
    assert!(message.ends_with("/0"), "{message}");
    assert!(refusal(&policy, |spec| spec.disk = Size(2 << 30)).starts_with("A disk of 2G"));
    assert!(refusal(&policy, |spec| spec.processes = 65).contains("the most is 64"));
    assert!(refusal(&policy, |spec| spec.cpus = 2).contains("the most is 1"));
    assert!(refusal(&policy, |spec| spec.log_size = Size(5 << 20)).contains("the most is 4M"));
    let quota = CpuQuota::from_thousandths(501);
    assert!(refusal(&policy, |spec| spec.cpu_quota = Some(quota)).contains("0.501 is more"));
    let long = Some(Seconds::from_millis(3_600_001));
    assert!(refusal(&policy, |spec| spec.max_duration = long).contains("the most is 1h"));
    assert!(refusal(&policy, |spec| spec.idle_timeout = long).contains("the most is 5m"));
}

#[test]
fn what_was_left_open_gets_the_ceiling_and_is_reported() {
    let policy =
        policy(&["[ceiling]\ncpu_quota = 0.5\nmax_duration = \"1h\"\nidle_timeout = 60\nmemory = \"128M\""])
            .unwrap();
    let allowed = policy.apply(policy.defaults()).unwrap();
    assert_eq!(allowed.spec.max_duration, Some(Seconds::from_millis(3_600_000)));
    assert_eq!(allowed.spec.idle_timeout, Some(Seconds::from_millis(60_000)));
    assert_eq!(allowed.spec.cpu_quota, Some(CpuQuota::from_thousandths(500)));
    assert_eq!(allowed.spec.memory, Size(128 << 20));
    assert_eq!(allowed.notes.len(), 3);
    let asked = SandboxSpec { max_duration: Some(Seconds::from_millis(1)), ..policy.defaults() };
    assert_eq!(policy.apply(asked.clone()).unwrap().spec.max_duration, asked.max_duration);
}

#[test]
fn a_default_that_a_ceiling_lowers_is_reported() {
    let policy = policy(&["[ceiling]\nmemory = \"256M\"\nprocesses = 99\ndisk = \"900G\""]).unwrap();
    let notes = policy.lowered(&SandboxSpec::default(), &policy.defaults());
    assert_eq!(notes.len(), 2, "{notes:?}");
    assert!(notes[0].starts_with("The default memory is 256M instead of 512M, by `memory` in [ceiling] of"));
    assert!(notes[1].starts_with("The default process limit is 99 instead of 1024"), "{notes:?}");
    let asked = SandboxSpec { memory: Size(128 << 20), processes: 10, ..policy.defaults() };
    assert_eq!(policy.lowered(&asked, &asked), Vec::<String>::new());
    assert_eq!(
        Operator::default().lowered(&SandboxSpec::default(), &SandboxSpec::default()),
        Vec::<String>::new()
    );
}

#[test]
fn another_image_in_place_of_the_default_one_is_reported() {
    let policy = policy(&["[ceiling]\nimages = [\"example.org/a/tools:1\"]"]).unwrap();
    let notes = policy.lowered(&SandboxSpec::default(), &policy.defaults());
    let expected =
        "The default image is example.org/a/tools:1 instead of default, by `images` in [ceiling] of";
    assert!(notes.len() == 1 && notes[0].starts_with(expected), "{notes:?}");
    let asked = SandboxSpec { image: "example.org/a/tools:1".to_owned(), ..SandboxSpec::default() };
    assert_eq!(policy.lowered(&asked, &asked), Vec::<String>::new());
}

#[test]
fn a_quota_of_every_processor_is_no_limit() {
    let policy = policy(&["[ceiling]\ncpu_quota = 1\n"]).unwrap();
    assert_eq!(policy.apply(SandboxSpec::default()).unwrap().spec, SandboxSpec::default());
}

#[test]
fn the_floor_raises_and_says_so() {
    let policy = policy(&["[floor]\nsecurity = \"restricted\"\n"]).unwrap();
    let allowed = policy.apply(SandboxSpec::default()).unwrap();
    assert_eq!((allowed.spec.security, allowed.spec.mode()), (Security::Restricted, UmlMode::Ptrace));
    assert!(allowed.notes[0].contains("restricted"), "{:?}", allowed.notes);
    assert_eq!(policy.apply(allowed.spec).unwrap().notes, Vec::<String>::new());
}

#[test]
fn an_engine_that_is_asked_for_by_the_operator_is_everybodys() {
    for (text, expected) in [("kvm", Engine::Kvm), ("uml", Engine::Uml), ("auto", Engine::Uml)] {
        let policy = policy(&[&format!("[floor]\nengine = \"{text}\"\n")]).unwrap();
        let allowed = policy.apply(SandboxSpec { engine: Engine::Uml, ..SandboxSpec::default() }).unwrap();
        assert_eq!(allowed.spec.engine, expected, "{text}");
        assert_eq!(policy.engine_floor().unwrap_or(Engine::Uml), expected, "{text}");
        assert_eq!(allowed.notes.len(), usize::from(expected == Engine::Kvm), "{:?}", allowed.notes);
    }
    let two = policy(&["[floor]\nengine = \"kvm\"\n", "[floor]\nengine = \"uml\"\n"]).unwrap();
    assert_eq!(two.apply(SandboxSpec::default()).unwrap().spec.engine, Engine::Kvm);
}

#[test]
fn of_two_files_the_stricter_counts() {
    let one = "[floor]\nsecurity = \"restricted\"\n[ceiling]\nmemory = \"1G\"\nprocesses = 100\n[audit]\nkeep = 3\n";
    let two =
        "[floor]\nsecurity = \"default\"\n[ceiling]\nmemory = \"2G\"\nprocesses = 50\n[audit]\nkeep = 9\n";
    for policy in [policy(&[one, two]).unwrap(), policy(&[two, one]).unwrap()] {
        assert_eq!(policy.security(), Security::Restricted);
        assert_eq!(policy.audit.keep, Some(9));
        assert!(refusal(&policy, |spec| spec.memory = Size(3 << 30)).contains("the most is 1G"));
        assert!(refusal(&policy, |spec| spec.processes = 51).contains("the most is 50"));
    }
    let both = policy(&[one, two]).unwrap();
    assert!(refusal(&both, |spec| spec.memory = Size(3 << 30)).ends_with("/0"));
    assert!(refusal(&both, |spec| spec.processes = 51).ends_with("/1"));
}

#[test]
fn the_number_of_sandboxes_is_limited() {
    let policy = policy(&["[ceiling]\nsandboxes = 2\n"]).unwrap();
    assert!(policy.admit(1).is_ok());
    assert!(policy.admit(2).unwrap_err().to_string().contains("the operator allows 2"));
}

#[test]
fn mistakes_in_the_file_are_errors() {
    for (text, expected) in [
        ("[ceiling]\nmemroy = \"1G\"\n", "Unknown key `ceiling.memroy`"),
        ("[cieling]\n", "did you mean `ceiling`?"),
        ("[floor]\nsecurity = \"none\"\n", "Bad value of `floor.security`"),
        ("[ceiling]\n\nmemory = []\n", "line 3: invalid type"),
        ("ceiling = 1\n", "Bad value of `ceiling`"),
        ("[audit]\nrotate_size = \"x\"\n", "is not a size"),
        ("[ceiling]\nimages = \"default\"\n", "Bad value of `ceiling.images`"),
        ("[mcp]\nmemroy = \"1G\"\n", "Unknown key `mcp.memroy`"),
        ("[mcp]\nsecurity = \"restricted\"\n", "Unknown key `mcp.security`"),
        ("[ceiling]\nhost_paths = [\"/\"]\n", "Unknown key `ceiling.host_paths`"),
    ] {
        let error = policy(&[text]).unwrap_err();
        let OperatorError::File(error) = error else { panic!("{text}: {error}") };
        assert!(error.to_string().contains(expected), "{text}: {error}");
    }
}

#[test]
fn the_callers_file_is_found_by_the_xdg_rules() {
    let with = |set: &'static [(&str, &str)]| {
        own_file(move |name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value)))
    };
    let expected = |path: &str| Some(PathBuf::from(path));
    assert_eq!(with(&[("HOME", "/h")]), expected("/h/.config/bathysphere/config.toml"));
    assert_eq!(with(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "/c")]), expected("/c/bathysphere/config.toml"));
    assert_eq!(
        with(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "c")]),
        expected("/h/.config/bathysphere/config.toml")
    );
    assert_eq!(with(&[]), None);
}

#[test]
fn only_images_of_every_list_are_allowed() {
    let one = policy(&["[ceiling]\nimages = [\"default\", \"data\"]\n"]).unwrap();
    assert!(one.apply(one.defaults()).is_ok());
    let message = refusal(&one, |spec| spec.image = "evil\n".to_owned());
    assert!(
        message.starts_with(
            r"The image `evil\n` is not one that the operator allows: default, data, by `images` in [ceiling] of /"
        ),
        "{message}"
    );
    let both = policy(&["[ceiling]\nimages = [\"default\", \"data\"]\n", "[ceiling]\nimages = [\"data\"]\n"])
        .unwrap();
    assert_eq!(both.defaults().image, "data", "the default is one that is allowed");
    assert!(both.apply(both.defaults()).is_ok());
    assert!(refusal(&both, |spec| spec.image = "default".to_owned()).ends_with("/1"));
    let none = policy(&["[ceiling]\nimages = []\n"]).unwrap();
    assert!(matches!(none.apply(none.defaults()), Err(OperatorError::Image { .. })));
}

#[test]
fn agents_have_usual_limits_where_nothing_is_said() {
    let agents = Operator::default().for_agents();
    let allowed = agents.apply(agents.defaults()).unwrap();
    assert_eq!(allowed.spec.max_duration.unwrap().to_string(), "1d");
    assert_eq!(allowed.notes.len(), 1, "{:?}", allowed.notes);
    let message = refusal(&agents, |spec| spec.memory = Size(5 << 30));
    assert!(message.contains("the most is 4G, by the usual `memory` for agents"), "{message}");
    assert!(message.contains("`memory` in [mcp] of /etc/"), "{message}");
    assert!(
        refusal(&agents, |spec| spec.max_duration = Some(Seconds::from_millis(86_400_001))).contains("[mcp]")
    );
    assert!(
        refusal(&agents, |spec| spec.disk = Size(33 << 30)).contains("the most is 32G, by the usual `disk`")
    );
    assert_eq!(agents.sandboxes(), Some(32));
    let repls = agents.for_repls();
    assert_eq!(
        repls.apply(repls.defaults()).unwrap().spec.max_duration,
        None,
        "a REPL lives until it is removed"
    );
    assert!(agents.admit(32).unwrap_err().to_string().contains("the operator allows 32"));
    assert_eq!(agents.for_agents(), agents, "asking twice changes nothing");
}

#[test]
fn agents_choose_no_registry_unless_the_operator_lists_it() {
    let agents = Operator::default().for_agents();
    assert_eq!(agents.defaults().image, "default");
    let message = refusal(&agents, |spec| spec.image = "10.0.0.1:5000/evil".to_owned());
    assert!(message.contains("by the usual `images` for agents"), "{message}");
    for file in ["[ceiling]\nimages = [\"ghcr.io/a/*\"]\n", "[mcp]\nimages = [\"ghcr.io/a/*\"]\n"] {
        let agents = policy(&[file]).unwrap().for_agents();
        let with = |image: &str| agents.apply(SandboxSpec { image: image.to_owned(), ..agents.defaults() });
        assert!(with("ghcr.io/a/b:c").is_ok() && with("ghcr.io/b/c").is_err(), "{file}");
        assert!(with("default").is_err(), "it is not listed");
    }
}

#[test]
fn the_stricter_of_both_ceilings_counts_for_agents() {
    let file = "[ceiling]\nmemory = \"1G\"\nprocesses = 100\nimages = [\"default\", \"data\"]\n\
        [mcp]\nmemory = \"8G\"\nprocesses = 50\nsandboxes = 100\nmax_duration = \"48h\"\nimages = [\"data\"]\n";
    let policy = policy(&[file]).unwrap();
    assert!(
        policy.apply(SandboxSpec { processes: 100, ..policy.defaults() }).is_ok(),
        "others are not held to it"
    );
    assert_eq!(policy.sandboxes(), None);
    let agents = policy.for_agents();
    assert!(refusal(&agents, |spec| spec.memory = Size(2 << 30)).contains("1G, by `memory` in [ceiling]"));
    assert!(refusal(&agents, |spec| spec.processes = 51).contains("50, by `processes` in [mcp]"));
    assert!(refusal(&agents, |spec| spec.image = "default".to_owned()).contains("`images` in [mcp]"));
    assert_eq!(agents.sandboxes(), Some(100), "the operator's word replaces what is usual");
    let two_days = Some(Seconds::from_millis(2 * 86_400_000));
    assert!(agents.apply(SandboxSpec { max_duration: two_days, ..agents.defaults() }).is_ok());
    let repls = agents.for_repls();
    assert_eq!(
        repls.apply(repls.defaults()).unwrap().spec.max_duration,
        two_days,
        "what the operator says holds for REPLs"
    );
}

fn network(preset: &str, rules: &[&str]) -> NetworkPolicy {
    serde_json::from_value(serde_json::json!({ "preset": preset, "rules": rules })).unwrap()
}

#[test]
fn what_any_sandbox_may_reach_is_what_every_file_allows() {
    let one = "[network]\npreset = \"public\"\nrules = [\"deny evil.example\"]\n";
    let two = "[network]\nrules = [\"allow api.example:443\"]\n";
    let both = policy(&[one, "[ceiling]\nmemory = \"1G\"\n", two]).unwrap();
    let expected =
        [network("public", &["deny evil.example"]), network("allow-list", &["allow api.example:443"])];
    assert_eq!(both.network(), expected);
    assert_eq!(both.for_agents().network(), expected);
    let open = SandboxSpec { network: network("open", &["allow private"]), ..both.defaults() };
    assert_eq!(both.apply(open.clone()).unwrap().spec, open, "the gateway keeps to it");
    assert_eq!(policy(&[]).unwrap().network(), []);
    for (text, expected) in [
        ("[network]\npreset = \"pubic\"\n", "public"),
        ("[network]\nrules = [\"allow pubilc\"]\n", "public"),
        ("[network]\nrule = []\n", "unknown field"),
        ("[network]\npreset = \"none\"\nrules = [\"allow public\"]\n", "allow-list"),
        ("[mcp.network]\npreset = \"pubic\"\n", "Bad value of `mcp.network`"),
        ("[ceiling.network]\npreset = \"public\"\n", "Unknown key `ceiling.network`"),
    ] {
        let error = bathy_protocol::chain(&policy(&[text]).unwrap_err());
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn agents_reach_public_addresses_unless_the_operator_says_otherwise() {
    let agents = Operator::default().for_agents();
    let spec = agents.apply(agents.defaults()).unwrap().spec;
    assert_eq!(spec.ceilings, [network("public", &[])]);
    assert_eq!(agents.apply(spec.clone()).unwrap().spec, spec, "asking twice changes nothing");
    for (preset, rules, part) in [
        ("open", &[][..], "open"),
        ("public", &["allow private"], "allow private"),
        ("allow-list", &["allow api.example", "allow host:80"], "allow host:80"),
    ] {
        let message = refusal(&agents, |spec| spec.network = network(preset, rules));
        assert!(message.starts_with(&format!("`{part}` reaches more")), "{message}");
        assert!(message.contains("the usual `network` for agents"), "{message}");
        assert!(message.contains("`network` in [mcp] of /etc/"), "{message}");
    }
    let narrow = network("allow-list", &["allow api.example:443"]);
    let spec = agents.apply(SandboxSpec { network: narrow.clone(), ..agents.defaults() }).unwrap().spec;
    assert_eq!(spec.network, narrow);
    assert_eq!(
        Operator::default().apply(SandboxSpec::default()).unwrap().spec.ceilings,
        [],
        "people have no such limit"
    );
}

#[test]
fn the_operators_word_about_agents_networks_replaces_what_is_usual() {
    let one = "[mcp.network]\nrules = [\"allow api.example:443\"]\n";
    let two = "[mcp]\nmemory = \"1G\"\nnetwork = { preset = \"open\" }\n";
    let both = policy(&[one, two]).unwrap();
    assert_eq!(both.network(), [], "it is for agents only");
    let agents = both.for_agents();
    let spec = agents.apply(agents.defaults()).unwrap().spec;
    assert_eq!(spec.ceilings, [network("allow-list", &["allow api.example:443"]), network("open", &[])]);
    let message = refusal(&agents, |spec| spec.network = network("open", &[]));
    assert!(message.contains("by `network` in [mcp] of /") && message.ends_with("/0"), "{message}");
    assert!(refusal(&agents, |spec| spec.memory = Size(2 << 30)).contains("1G, by `memory` in [mcp]"));
    let wide = policy(&[two]).unwrap().for_agents();
    let private = SandboxSpec { network: network("public", &["allow private"]), ..wide.defaults() };
    assert_eq!(wide.apply(private).unwrap().spec.ceilings, [network("open", &[])]);
    assert_eq!(wide.for_agents(), wide);
}
