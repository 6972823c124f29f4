//! `bathy policy` and `bathy port`: what a sandbox may reach, and its published ports.

use std::error::Error;

use bathy_manager::{ChangedPolicy, Manager, Sandboxed};
use bathy_policy::{Action, NetworkPolicy, PolicyError, Preset, Rule};
use serde_json::json;

use crate::args::choice::choice;
use crate::args::net::PRESETS;
use crate::commands::open_to_look;
use crate::ui::{escape, output};

const PROGRAM: &str = "bathy policy";

/// What can be done with a policy.
#[derive(clap::Subcommand)]
pub enum Verb {
    /// Print what a sandbox may reach.
    Show {
        /// The sandbox: its name, its id or a prefix of its id.
        name: String,
        /// Print it as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Replace a sandbox's policy, at once if it is running. Connections that are no longer allowed are closed.
    Set {
        /// The sandbox: its name, its id or a prefix of its id.
        name: String,
        /// What is allowed where no rule matches: none, public, allow-list or open.
        #[arg(value_parser = choice(PRESETS, str::parse::<Preset>), hide_possible_values = true)]
        preset: Preset,
        /// The rules, in order, each beginning with allow or deny.
        #[arg(value_name = "RULE", value_parser = |text: &str| text.parse::<Rule>())]
        rules: Vec<Rule>,
        /// Print the new policy as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Allow connections to targets, before all other rules.
    Allow(Targets),
    /// Deny connections to targets, before all other rules. Open ones are closed.
    Deny(Targets),
    /// Remove rules, each as `bathy policy show` prints it. Connections that only they allowed are closed.
    Rm {
        /// The sandbox: its name, its id or a prefix of its id.
        name: String,
        /// The rules, each beginning with allow or deny.
        #[arg(required = true, value_name = "RULE", value_parser = |text: &str| text.parse::<Rule>())]
        rules: Vec<Rule>,
        /// Print the new policy as JSON.
        #[arg(long)]
        json: bool,
    },
}

/// A sandbox and targets.
#[derive(clap::Args)]
pub struct Targets {
    /// The sandbox: its name, its id or a prefix of its id.
    name: String,
    /// Targets as for `--allow` and `--deny`, such as api.example:443.
    #[arg(required = true, value_name = "TARGET")]
    targets: Vec<String>,
    /// Print the new policy as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(verb: Verb) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open(PROGRAM)?;
    match verb {
        Verb::Show { name, json } => {
            let sandbox = manager.find(&name)?;
            show(&manager, &sandbox, &sandbox.record.spec.network, json)?;
        }
        Verb::Set { name, preset, rules, json } => {
            let sandbox = manager.find(&name)?;
            let policy = NetworkPolicy::from_options(Some(preset), rules)?;
            change(&mut manager, &sandbox, json, |_| Ok(policy))?;
        }
        Verb::Allow(targets) => add(&mut manager, Action::Allow, &targets)?,
        Verb::Deny(targets) => add(&mut manager, Action::Deny, &targets)?,
        Verb::Rm { name, rules, json } => {
            let sandbox = manager.find(&name)?;
            change(&mut manager, &sandbox, json, |policy| policy.without(&rules))?;
        }
    }
    Ok(0)
}

fn add(manager: &mut Manager, action: Action, targets: &Targets) -> Result<(), Box<dyn Error>> {
    let sandbox = manager.find(&targets.name)?;
    let rule = |target: &String| Rule::parse(action, target);
    let rules = targets.targets.iter().map(rule).collect::<Result<Vec<_>, _>>()?;
    change(manager, &sandbox, targets.json, |policy| {
        // The first target becomes the first rule.
        rules.into_iter().rev().try_fold(policy.clone(), |policy, rule| policy.with_first(rule))
    })
}

fn change(
    manager: &mut Manager,
    sandbox: &Sandboxed,
    json: bool,
    change: impl FnOnce(&NetworkPolicy) -> Result<NetworkPolicy, PolicyError>,
) -> Result<(), Box<dyn Error>> {
    let changed = manager.change_policy(sandbox, change);
    output::warnings(manager);
    let ChangedPolicy { policy, closed } = changed?;
    show(manager, sandbox, &policy, json)?;
    match closed.filter(|_| !json) {
        Some(0) => output::note("holds now"),
        Some(1) => output::note("holds now; 1 connection was closed"),
        Some(count) => output::note(format_args!("holds now; {count} connections were closed")),
        None if !json => output::note("holds when the sandbox is started"),
        None => {}
    }
    Ok(())
}

fn show(
    manager: &Manager,
    sandbox: &Sandboxed,
    own: &NetworkPolicy,
    json: bool,
) -> Result<(), Box<dyn Error>> {
    if json {
        let policies = manager.policies(sandbox);
        let ceilings = policies.ceilings();
        return output::json(&json!({ "sandbox": sandbox.record.id, "policy": own, "ceilings": ceilings }));
    }
    let (every, agents) = (manager.operator().network(), &sandbox.record.spec.ceilings);
    let of = |words: &'static str| move |ceiling| (words, ceiling);
    let ceilings = every.iter().map(of("every sandbox")).chain(agents.iter().map(of("what agents make")));
    for (whom, ceiling) in ceilings {
        output::line(format_args!("# the operator, for {whom}:"))?;
        lines(ceiling)?;
    }
    if !every.is_empty() || !agents.is_empty() {
        output::line("# this sandbox:")?;
    }
    lines(own)
}

fn lines(policy: &NetworkPolicy) -> Result<(), Box<dyn Error>> {
    for rule in &policy.rules {
        output::line(escape::word(&rule.to_string()))?;
    }
    let default = match policy.preset {
        Preset::None => "no network",
        Preset::Public => "otherwise: public addresses",
        Preset::AllowList => "otherwise: nothing",
        Preset::Open => "otherwise: public and private addresses",
    };
    output::line(format_args!("{} ({default})", policy.preset))?;
    Ok(())
}

/// Arguments of `bathy port`.
#[derive(clap::Args)]
pub struct PortArgs {
    /// The sandbox: its name, its id or a prefix of its id.
    name: String,
    /// Print them as JSON.
    #[arg(long)]
    json: bool,
}

pub fn ports(args: &PortArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = open_to_look("bathy port")?;
    let sandbox = manager.find(&args.name)?;
    let ports = manager.ports(&sandbox);
    if !sandbox.is_alive() && !ports.is_empty() {
        output::note(format_args!("`{}` is not running, so its ports are closed", sandbox.name()));
    }
    if args.json {
        let document: Vec<_> = ports
            .iter()
            .map(|port| {
                json!({ "bind": port.bind, "host": port.host, "guest": port.guest, "protocol": port.protocol.name() })
            })
            .collect();
        output::json(&document)?;
    } else {
        for port in ports {
            let host = std::net::SocketAddr::new(port.bind, port.host);
            output::line(format_args!("{}/{} -> {host}", port.guest, port.protocol))?;
        }
    }
    Ok(0)
}
