use std::fs;

use super::*;
use crate::config::{FILE_NAME, Layers, fields, load};
use crate::{Security, Size};

/// Each with the refused value, the limit, and the option that sets it explicitly.
const TOO_MUCH: [(&str, &str, &str, &str, &str); 34] = [
    ("image = \"debian\"", "image", "debian", "from a registry", "--image"),
    ("auto_remove = true", "auto_remove", "true", "disk and logs", "--rm"),
    ("[network]\npreset = \"open\"", "network", "open", "public addresses", "--allow"),
    (
        "[network]\nrules = [\"allow a.example\", \"allow private:443\"]",
        "network",
        "allow private:443",
        "public addresses",
        "--allow",
    ),
    ("[network]\nrules = [\"allow host\"]", "network", "allow host", "public addresses", "--allow"),
    (
        "[network]\nrules = [\"allow 169.254.169.254\"]",
        "network",
        "allow 169.254.169.254",
        "public addresses",
        "--allow",
    ),
    ("ports = [\"8080:80\", \"0.0.0.0:8081:81\"]", "ports", "0.0.0.0:8081:81", "other machines", "--publish"),
    ("ports = [\"[::]:8081:81/udp\"]", "ports", "[::]:8081:81/udp", "other machines", "--publish"),
    ("ports = [\"1024:80\", \"1023:80\"]", "ports", "1023:80", "machine's own services", "--publish"),
    ("engine = \"uml\"", "engine", "uml", "weaker boundary", "--engine"),
    ("memory = \"23G\"", "memory", "23G", "default of 512M", "--memory"),
    ("memory = 536870913", "memory", "536870913", "default of 512M", "--memory"),
    ("disk = \"5G\"", "disk", "5G", "default of 4G", "--disk"),
    ("processes = 32000", "processes", "32000", "default of 1024", "--processes"),
    ("cpus = 2", "cpus", "2", "default of 1", "--cpus"),
    ("log_size = \"1G\"", "log_size", "1G", "default of 16M", "--log-size"),
    ("ready_timeout_ms = 30001", "ready_timeout_ms", "30001", "default of 30000", "--ready-timeout"),
    ("pause_idle = 59.999", "pause_idle", "59999ms", "less than 1m", "--pause-idle"),
    (
        "[disk_limits]\nwrite_bandwidth = \"129M\"",
        "disk_limits.write_bandwidth",
        "129M",
        "default of 128M",
        "--disk-write-bandwidth",
    ),
    ("[disk_limits]\nflushes = 501", "disk_limits.flushes", "501", "default of 500", "--disk-flushes"),
    (
        "[network_limits]\nconnections = 1025",
        "network_limits.connections",
        "1025",
        "default of 1024",
        "--config",
    ),
    (
        "[network_limits]\nnew_connections = 251",
        "network_limits.new_connections",
        "251",
        "default of 250",
        "--config",
    ),
    (
        "[network_limits]\nbytes = 2147483649",
        "network_limits.bytes",
        "2147483649",
        "default of 2147483648",
        "--config",
    ),
    (
        "[network_limits]\npackets = 250001",
        "network_limits.packets",
        "250001",
        "default of 250000",
        "--config",
    ),
    ("[network_limits]\nqueries = 101", "network_limits.queries", "101", "default of 100", "--config"),
    ("writable_root = true", "writable_root", "true", "restricted security", "--writable-root"),
    ("user = \"root\"", "user", "root", "a number from 1000", "--user"),
    ("user = \"0\"", "user", "0", "a number from 1000", "--user"),
    ("user = \"999\"", "user", "999", "a number from 1000", "--user"),
    ("user = \"+0\"", "user", "+0", "a number from 1000", "--user"),
    ("user = \"1000:0\"", "user", "1000:0", "a number from 1000", "--user"),
    ("user = \"1000:root\"", "user", "1000:root", "a number from 1000", "--user"),
    ("user = \"4294967295\"", "user", "4294967295", "a number from 1000", "--user"),
    ("[labels]\ncreated-by = \"mcp\"", "labels", "created-by=mcp", "to agents", "--label"),
];

fn found_over(usual: &SandboxSpec, text: &str, replaced: &[&str]) -> Result<SandboxSpec, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE_NAME);
    fs::write(&path, text).unwrap();
    assert!(load(&path).is_ok(), "it may be named: {text}");
    let found = Layers::over(usual).found(&path, replaced).and_then(Layers::build);
    found.map_err(|error| error.to_string().replace(&path.display().to_string(), FILE_NAME))
}

fn found(text: &str, replaced: &[&str]) -> Result<SandboxSpec, String> {
    found_over(&SandboxSpec::default(), text, replaced)
}

#[test]
fn c6_a_file_that_was_only_found_raises_no_limit_and_weakens_no_boundary() {
    for (text, key, part, limit, option) in TOO_MUCH {
        let error = found(text, &[]).unwrap_err();
        let location = format!("{FILE_NAME} was only found here, and its `{key}` has `{part}`, which ");
        let hints = [limit, &format!("--config {FILE_NAME}"), option, "--no-config"];
        assert!(error.starts_with(&location) && hints.iter().all(|hint| error.contains(hint)), "{error}");
        let key = key.split('.').next().unwrap();
        if key != "labels" {
            assert_eq!(found(text, &[key]), Ok(SandboxSpec::default()), "the caller says it: {text}");
        }
    }
}

#[test]
fn c6_a_file_that_was_only_found_holds_the_sandbox_back() {
    for text in [
        "memory = \"512M\"\nengine = \"kvm\"\nprocesses = 16\ndisk = \"64M\"\nlog_size = \"1M\"\ncpu_quota = 0.5",
        "security = \"restricted\"\numl_mode = \"ptrace\"\nuser = \"1000:65534\"\nready_timeout_ms = 1",
        "max_duration = 5\nidle_timeout = 5\npause_idle = 60\nworkdir = \"/tmp\"",
        "command = [\"true\"]\n[env]\nA = \"b\"\n[labels]\nteam = \"a\"",
        "[disk_limits]\nwrite_bandwidth = \"1M\"\nread_bandwidth = \"9G\"\nflushes = 500",
        "[network]\npreset = \"none\"\n[network_limits]\nconnections = 1024\nqueries = 1",
        "ports = [\"8080:80\", \"[::1]:8080:80\", \"0:22\"]\n[network]\nrules = [\"allow *.example:443\", \"deny public\"]",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let named = folder.path().join("named");
        fs::write(&named, text).unwrap();
        assert_eq!(found(text, &[]), load(&named).map_err(|error| error.to_string()), "{text}");
    }
    assert_eq!(found("security = \"default\"", &[]).unwrap().security, Security::Default);
}

#[test]
fn c6_what_is_usual_is_what_the_operator_leaves_of_it() {
    let usual = SandboxSpec { memory: Size(128 << 20), ..SandboxSpec::default() };
    assert!(found_over(&usual, "memory = \"256M\"", &[]).unwrap_err().contains("default of 128M"));
    let limits = DiskLimits { read_bandwidth: Some(Size(5 << 20)), ..DiskLimits::default() };
    let usual = SandboxSpec { disk_limits: limits, ..usual };
    let error = found_over(&usual, "[disk_limits]\nread_bandwidth = \"6M\"", &[]).unwrap_err();
    assert!(error.contains("disk_limits.read_bandwidth") && error.contains("default of 5M"), "{error}");
    assert!(found_over(&usual, "[disk_limits]\nflushes = 20", &[]).unwrap_err().contains("read_bandwidth"));
    assert_eq!(found_over(&usual, "processes = 99", &[]).unwrap().memory, usual.memory);
    let usual = SandboxSpec { security: Security::Restricted, ..SandboxSpec::default() };
    for (text, limit) in
        [("security = \"default\"", "less than restricted"), ("uml_mode = \"seccomp\"", "the mode ptrace")]
    {
        let error = found_over(&usual, text, &[]).unwrap_err();
        assert!(error.contains(limit), "{error}");
    }
}

#[test]
fn variables_and_labels_of_the_file_stay_beside_those_of_the_caller() {
    let spec = found("[env]\nA = \"1\"\n[labels]\nteam = \"a\"", &["env", "labels"]).unwrap();
    assert_eq!((spec.env.len(), spec.labels.len()), (1, 1));
}

/// Fields that a file may set freely: they cost the host nothing and only concern the guest, or can only
/// restrict.
const FREE: [&str; 6] = ["env", "workdir", "command", "cpu_quota", "max_duration", "idle_timeout"];

#[test]
fn c6_every_field_of_the_description_is_decided_about() {
    let mut decided: Vec<_> = TOO_MUCH.iter().map(|row| row.1.split('.').next().unwrap()).collect();
    decided.extend(FREE);
    decided.extend(["security", "uml_mode"]);
    decided.sort_unstable();
    decided.dedup();
    let mut all: Vec<_> = fields(&SandboxSpec::default()).into_iter().map(|(key, _)| key).collect();
    all.sort_unstable();
    assert_eq!(decided, all);
    assert!(FREE.iter().all(|key| TOO_MUCH.iter().all(|row| row.1 != *key)));
}
