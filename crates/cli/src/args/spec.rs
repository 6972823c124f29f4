//! Options that describe a sandbox: the same for every verb that creates one.
//!
//! There are three layers, each overriding the one before: defaults, a file, options. So every option is optional here, and
//! [`SandboxSpec`] has the defaults.

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bathy_protocol::launch::UmlMode;
use bathy_runtime::images::Pull;
use bathy_spec::config::{self, Layers};
use bathy_spec::operator::Operator;
use bathy_spec::{CpuQuota, Engine, SandboxSpec, Seconds, Security, Size, label};
use serde::Serialize;
use serde_json::Value;

use crate::args::choice::choice;
use crate::args::disk::DiskArgs;
use crate::args::env::EnvArgs;
use crate::args::net::NetArgs;
use crate::ui::{escape, output, time};

/// The description of a sandbox given as options.
#[derive(clap::Args, Debug, Default)]
pub struct SpecArgs {
    /// Read the description of the sandbox from this file; options override it. A file that is not named but found may
    /// only be stricter than the defaults. [default: ./bathysphere.toml, if it exists]
    #[arg(long, value_name = "FILE", help_heading = "Sandbox")]
    config: Option<PathBuf>,
    /// Do not use ./bathysphere.toml.
    #[arg(long, conflicts_with = "config", help_heading = "Sandbox")]
    no_config: bool,
    /// The root image: default, or one from a registry, such as debian:12 or ghcr.io/owner/name@sha256:...
    /// [default: default]
    #[arg(long, help_heading = "Sandbox")]
    image: Option<String>,
    /// When an image is fetched from its registry: always, missing (if it is not on this machine), or never.
    /// [default: missing]
    #[arg(long, value_name = "WHEN", value_parser = choice(&["always", "missing", "never"], parse_pull), hide_possible_values = true, help_heading = "Sandbox")]
    pull: Option<Pull>,
    /// The engine: kvm (a hardware virtual machine), uml (needs no hardware virtualization), or auto (kvm if this machine has
    /// it, else uml). Where the choice is left open, the variable BATHY_ENGINE decides. [default: auto]
    #[arg(long, value_parser = choice(&["auto", "kvm", "uml"], parse_engine), hide_possible_values = true, help_heading = "Sandbox")]
    engine: Option<Engine>,
    /// How the uml engine runs guest processes: seccomp (fast) or ptrace (isolates the guest's users from each other). The
    /// kvm engine has no such mode. [default: seccomp, or ptrace in a restricted sandbox]
    #[arg(long, value_name = "MODE", value_parser = choice(&["seccomp", "ptrace"], parse_mode), hide_possible_values = true, help_heading = "Sandbox")]
    uml_mode: Option<UmlMode>,
    /// The security level of the sandbox's commands: default, or restricted (not root, no new privileges, a read-only root).
    /// [default: default]
    #[arg(long, value_name = "LEVEL", value_parser = choice(SECURITY, parse_security), hide_possible_values = true, help_heading = "Sandbox")]
    security: Option<Security>,
    /// Keep the root file system writable in a restricted sandbox.
    #[arg(long, help_heading = "Sandbox")]
    writable_root: bool,
    /// A label to find the sandbox by. Can be repeated.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = label, help_heading = "Sandbox")]
    label: Vec<(String, String)>,
    #[command(flatten, next_help_heading = "Sandbox")]
    env: EnvArgs,
    /// Working directory in the sandbox.
    #[arg(short, long, value_name = "PATH", help_heading = "Sandbox")]
    workdir: Option<String>,
    /// User in the sandbox: a name or number, optionally with :GROUP.
    #[arg(short, long, help_heading = "Sandbox")]
    user: Option<String>,
    /// Guest memory. [default: 512M]
    #[arg(short, long, value_name = "SIZE", help_heading = "Limits")]
    memory: Option<Size>,
    /// Processors; more than one needs the kvm engine. [default: 1]
    #[arg(long, value_name = "NUMBER", help_heading = "Limits")]
    cpus: Option<u32>,
    /// Limit on processor time, such as 0.5 for half a processor. [default: all of --cpus]
    #[arg(long, value_name = "CPUS", help_heading = "Limits")]
    cpu_quota: Option<CpuQuota>,
    /// Size of the writable disk. [default: 4G]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    disk: Option<Size>,
    #[command(flatten)]
    disk_limits: DiskArgs,
    /// Maximum number of processes in the guest. [default: 1024]
    #[arg(long, value_name = "NUMBER", help_heading = "Limits")]
    processes: Option<u32>,
    /// Size of the logs of output and console; old output makes room for new. [default: 16M]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    log_size: Option<Size>,
    /// End the sandbox after this time, such as 90s, 15m or 2h. [default: never]
    #[arg(long, value_name = "TIME", help_heading = "Limits")]
    max_duration: Option<Seconds>,
    /// End the sandbox after this time without connected clients. [default: never]
    #[arg(long, value_name = "TIME", help_heading = "Limits")]
    idle_timeout: Option<Seconds>,
    /// Pause a persistent sandbox, and move its memory to disk, after this time without connected clients. Its jobs are
    /// paused, too. The next command resumes it. [default: never]
    #[arg(long, value_name = "TIME", help_heading = "Limits")]
    pause_idle: Option<Seconds>,
    /// Remove a persistent sandbox, with its disk and logs, when it ends.
    #[arg(long, help_heading = "Sandbox")]
    rm: bool,
    #[command(flatten)]
    net: NetArgs,
    /// Time limit for the guest's start.
    #[arg(long, value_name = "TIME", value_parser = time::parse_duration, hide = true)]
    ready_timeout: Option<Duration>,
}

/// A file that describes a sandbox.
#[derive(Debug, PartialEq, Eq)]
enum File {
    /// Named by the caller.
    Named(PathBuf),
    /// Found in the current folder.
    Found(PathBuf),
}

impl SpecArgs {
    /// Merges all layers and applies the operator's limits. `command` is the main command, if there is one.
    pub fn spec(&self, command: &[OsString]) -> Result<SandboxSpec, Box<dyn Error>> {
        let operator = Operator::load()?;
        let file = self.file(config::find(Path::new(".")));
        if let Some(File::Found(_)) = &file {
            output::note(format_args!("using ./{}", config::FILE_NAME));
        }
        let spec = self.layered(Layers::over(&operator.defaults()), file.as_ref())?;
        let command = command_texts(command)?;
        let command = if command.is_empty() { spec.command.clone() } else { command };
        let allowed = operator.apply(SandboxSpec { command, ..spec })?;
        let asked = self.layered(Layers::over(&SandboxSpec::default()), file.as_ref())?;
        for note in operator.lowered(&asked, &allowed.spec).iter().chain(&allowed.notes) {
            output::note(escape::text(note));
        }
        Ok(allowed.spec.checked()?)
    }

    /// When a registry is asked for the image.
    pub fn pull(&self) -> Pull {
        self.pull.unwrap_or_default()
    }

    /// Warns of options that have no effect on an ephemeral sandbox.
    pub fn warn_of_no_effect(&self) {
        let names = self.without_effect();
        if !names.is_empty() {
            output::note(format_args!(
                "warning: {} without effect on a sandbox that ends with its command; `bathy run --detach` makes a persistent one",
                names.join(", ")
            ));
        }
    }

    /// The given options that only a persistent sandbox obeys.
    fn without_effect(&self) -> Vec<&'static str> {
        let given = [
            ("--idle-timeout", self.idle_timeout.is_some()),
            ("--pause-idle", self.pause_idle.is_some()),
            ("--log-size", self.log_size.is_some()),
            ("--label", !self.label.is_empty()),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    /// Only the variables and the working directory, for an existing sandbox.
    pub fn variables_and_folder(&self) -> Result<(BTreeMap<String, String>, Option<String>), String> {
        Ok((self.variables()?, self.workdir.clone()))
    }

    fn variables(&self) -> Result<BTreeMap<String, String>, String> {
        let text = |(name, value): (String, Vec<u8>)| (name, String::from_utf8_lossy(&value).into_owned());
        Ok(self.env.variables()?.into_iter().map(text).collect())
    }

    fn file(&self, usual: Option<PathBuf>) -> Option<File> {
        let named = self.config.clone().map(File::Named);
        named.or_else(|| usual.filter(|_| !self.no_config).map(File::Found))
    }

    fn layered(&self, mut layers: Layers, file: Option<&File>) -> Result<SandboxSpec, Box<dyn Error>> {
        let options = self.options()?;
        layers = match file {
            Some(File::Named(path)) => layers.file(path)?,
            Some(File::Found(path)) => {
                let replaced: Vec<_> = options.iter().map(|(key, _)| *key).collect();
                layers.found(path, &replaced)?
            }
            None => layers,
        };
        Ok(options.into_iter().fold(layers, |layers, (key, value)| layers.set(key, value)).build()?)
    }

    /// The options that were given, by their keys in a file.
    fn options(&self) -> Result<Vec<(&'static str, Value)>, Box<dyn Error>> {
        fn some(value: Option<impl Serialize>) -> serde_json::Result<Option<Value>> {
            value.map(serde_json::to_value).transpose()
        }
        let env = self.variables()?;
        let labels: BTreeMap<String, String> = self.label.iter().cloned().collect();
        let ready = self.ready_timeout.map(|time| u64::try_from(time.as_millis())).transpose()?;
        let all = [
            ("image", some(self.image.as_ref())?),
            ("engine", some(self.engine)?),
            ("uml_mode", some(self.uml_mode)?),
            ("security", some(self.security)?),
            ("writable_root", some(self.writable_root.then_some(true))?),
            ("labels", some(Some(labels).filter(|labels| !labels.is_empty()))?),
            ("env", some(Some(env).filter(|env| !env.is_empty()))?),
            ("workdir", some(self.workdir.as_ref())?),
            ("user", some(self.user.as_ref())?),
            ("memory", some(self.memory)?),
            ("cpus", some(self.cpus)?),
            ("cpu_quota", some(self.cpu_quota)?),
            ("disk", some(self.disk)?),
            ("disk_limits", some(self.disk_limits.limits())?),
            ("processes", some(self.processes)?),
            ("log_size", some(self.log_size)?),
            ("max_duration", some(self.max_duration)?),
            ("idle_timeout", some(self.idle_timeout)?),
            ("pause_idle", some(self.pause_idle)?),
            ("auto_remove", some(self.rm.then_some(true))?),
            ("network", some(self.net.policy()?)?),
            ("ports", some(self.net.ports())?),
            ("ready_timeout_ms", some(ready)?),
        ];
        Ok(all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect())
    }
}

/// The main command is stored, so it has to be text.
fn command_texts(command: &[OsString]) -> Result<Vec<String>, String> {
    command
        .iter()
        .map(|argument| {
            argument.to_str().map(str::to_owned).ok_or_else(|| {
                format!("{argument:?} is not UTF-8, which the main command of a sandbox has to be. Use `bathy exec` for it")
            })
        })
        .collect()
}

fn parse_engine(text: &str) -> Result<Engine, String> {
    serde_json::from_value(Value::from(text)).map_err(|_| "the engines are auto, kvm and uml".to_owned())
}

fn parse_pull(text: &str) -> Result<Pull, String> {
    serde_json::from_value(Value::from(text))
        .map_err(|_| "the choices are always, missing and never".to_owned())
}

fn parse_mode(text: &str) -> Result<UmlMode, String> {
    serde_json::from_value(Value::from(text)).map_err(|_| "the modes are seccomp and ptrace".to_owned())
}

/// The levels of security.
pub const SECURITY: &[&str] = &["default", "restricted"];

/// Reads a level of security.
pub fn parse_security(text: &str) -> Result<Security, String> {
    serde_json::from_value(Value::from(text)).map_err(|_| "the levels are default and restricted".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        spec: SpecArgs,
    }

    fn args(line: &[&str]) -> SpecArgs {
        Line::try_parse_from([&["test"], line].concat()).unwrap().spec
    }

    fn layered(line: &[&str], file: &str) -> Result<SandboxSpec, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(config::FILE_NAME);
        std::fs::write(&path, file).unwrap();
        args(line).layered(Layers::new(), Some(&File::Found(path))).map_err(|error| error.to_string())
    }

    #[test]
    fn options_win_over_the_file_and_the_file_over_defaults() {
        let file = "memory = \"384M\"\ncpu_quota = 0.25\nsecurity = \"restricted\"";
        let spec = layered(&["-m", "256M", "--max-duration", "15m"], file).unwrap();
        assert_eq!(spec.memory.to_string(), "256M");
        assert_eq!(spec.cpu_quota.unwrap().to_string(), "0.25");
        assert_eq!(spec.security, Security::Restricted);
        assert_eq!(spec.max_duration.unwrap().to_string(), "15m");
        assert_eq!(spec.disk, SandboxSpec::default().disk);
        assert_eq!((spec.pause_idle, spec.auto_remove), (None, false));
        let spec = layered(&["--pause-idle", "60s", "--rm"], "pause_idle = 5").unwrap();
        assert_eq!(spec.pause_idle.unwrap().to_string(), "1m");
        assert!(spec.auto_remove);
        assert_eq!(layered(&["--security", "default"], file).unwrap().security, Security::Default);
    }

    #[test]
    fn c6_an_option_says_what_a_file_that_was_found_may_not() {
        let file = "memory = \"23G\"\nprocesses = 32000\nuser = \"root\"";
        for (options, key) in [
            (&[][..], "memory"),
            (&["-m", "1G"], "processes"),
            (&["-m", "1G", "--processes", "2000"], "user"),
        ] {
            let error = layered(options, file).unwrap_err();
            assert!(error.contains(&format!("its `{key}` has")), "{error}");
        }
        let spec = layered(&["-m", "1G", "--processes", "2000", "-u", "root"], file).unwrap();
        assert_eq!((spec.memory.to_string().as_str(), spec.processes), ("1G", 2000));
        assert_eq!(spec.user.as_deref(), Some("root"));
    }

    #[test]
    fn options_say_how_fast_a_disk_is_in_place_of_the_file() {
        let file = "[disk_limits]\nwrite_bandwidth = \"2M\"\nflushes = 20";
        let spec = layered(&[], file).unwrap();
        assert_eq!((spec.disk_limits.write_bandwidth, spec.disk_limits.flushes), (Size(2 << 20), 20));
        let spec = layered(&["--disk-read-bandwidth", "3M", "--disk-flushes", "1000"], file).unwrap();
        let usual = SandboxSpec::default().disk_limits;
        assert_eq!(spec.disk_limits.read_bandwidth, Some(Size(3 << 20)));
        assert_eq!(
            (spec.disk_limits.flushes, spec.disk_limits.write_bandwidth),
            (1000, usual.write_bandwidth)
        );
        let spec = layered(&["--disk-write-bandwidth", "1T"], file).unwrap();
        assert_eq!(
            (spec.disk_limits.write_bandwidth, spec.disk_limits.flushes),
            (Size(1 << 40), usual.flushes)
        );
        let error = layered(&[], "[disk_limits]\nflushes = 1000").unwrap_err();
        assert!(error.contains("its `disk_limits.flushes` has `1000`"), "{error}");
    }

    #[test]
    fn variables_and_labels_are_joined() {
        let spec = layered(
            &["-e", "A=option", "-e", "B=option", "-l", "team=a"],
            "[env]\nA = \"file\"\nC = \"file\"\n[labels]\nuse = \"test\"",
        )
        .unwrap();
        let pairs = |map: BTreeMap<String, String>| {
            map.into_iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>()
        };
        assert_eq!(pairs(spec.env), ["A=option", "B=option", "C=file"]);
        assert_eq!(pairs(spec.labels), ["team=a", "use=test"]);
    }

    #[test]
    fn options_for_persistent_sandboxes_are_named_where_they_have_no_effect() {
        assert_eq!(args(&["-m", "1G", "--max-duration", "5m"]).without_effect(), Vec::<&str>::new());
        let all = ["--idle-timeout", "1m", "--pause-idle", "1m", "--log-size", "1M", "-l", "a=b"];
        let names = ["--idle-timeout", "--pause-idle", "--log-size", "--label"];
        assert_eq!(args(&all).without_effect(), names);
    }

    #[test]
    fn no_option_leaves_everything_as_it_is() {
        assert_eq!(layered(&[], "").unwrap(), SandboxSpec::default());
    }

    #[test]
    fn the_help_tells_the_defaults_as_they_are() {
        let help = <Line as clap::CommandFactory>::command().render_long_help().to_string();
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let usual = SandboxSpec::default();
        for (option, default) in [
            ("--image", usual.image),
            ("--memory", usual.memory.to_string()),
            ("--cpus", usual.cpus.to_string()),
            ("--disk", usual.disk.to_string()),
            ("--disk-write-bandwidth", usual.disk_limits.write_bandwidth.to_string()),
            ("--disk-flushes", usual.disk_limits.flushes.to_string()),
            ("--processes", usual.processes.to_string()),
            ("--log-size", usual.log_size.to_string()),
        ] {
            let (_, after) = words.split_once(&format!("{option} <")).unwrap();
            let (_, told) = after.split_once("[default: ").unwrap();
            assert_eq!(told.split(']').next(), Some(default.as_str()), "{option}");
        }
    }

    #[test]
    fn a_misspelt_key_is_named() {
        let error = layered(&[], "memroy = \"1G\"").unwrap_err();
        assert!(error.contains("memroy") && error.contains("memory"), "{error}");
    }

    #[test]
    fn the_usual_file_can_be_replaced_and_ignored() {
        let usual = || Some(PathBuf::from("usual"));
        assert_eq!(args(&[]).file(usual()), usual().map(File::Found));
        assert_eq!(args(&[]).file(None), None);
        assert_eq!(args(&["--no-config"]).file(usual()), None);
        assert_eq!(args(&["--config", "other"]).file(usual()), Some(File::Named("other".into())));
    }

    #[test]
    fn a_file_that_was_found_opens_nothing_and_options_say_what_they_like() {
        let open = "ports = [\"0.0.0.0:80:80\"]\n[network]\nrules = [\"allow private\"]";
        assert!(layered(&[], open).unwrap_err().contains("`allow private`"));
        let error = layered(&["--net", "public"], open).unwrap_err();
        assert!(error.contains("`0.0.0.0:80:80`"), "{error}");
        let spec = layered(&["--allow", "host:80", "-p", "0.0.0.0:81:81"], open).unwrap();
        assert_eq!(spec.network.rules.iter().map(ToString::to_string).collect::<Vec<_>>(), ["allow host:80"]);
        assert_eq!(spec.ports.iter().map(ToString::to_string).collect::<Vec<_>>(), ["0.0.0.0:81:81"]);
    }

    #[test]
    fn impossible_options_are_refused() {
        for line in [
            ["--engine", "qemu"],
            ["--security", "paranoid"],
            ["--uml-mode", "fast"],
            ["--memory", "lots"],
            ["--max-duration", "soon"],
            ["--pause-idle", "often"],
            ["--label", "nokey"],
            ["--env", "=x"],
            ["--cpu-quota", "much"],
        ] {
            assert!(Line::try_parse_from(["test", line[0], line[1]]).is_err(), "{line:?}");
        }
    }

    #[test]
    fn a_main_command_is_text() {
        use std::os::unix::ffi::OsStringExt;
        assert!(command_texts(&[OsString::from_vec(vec![0xff])]).unwrap_err().contains("UTF-8"));
    }
}
