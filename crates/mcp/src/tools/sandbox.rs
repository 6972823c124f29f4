//! Sandboxes: making, listing, looking at and removing them.

use std::collections::BTreeMap;

use bathy_manager::stats::Stats;
use bathy_manager::{Sandboxed, Status};
use bathy_protocol::unix_ns;
use bathy_spec::{SandboxSpec, Seconds, Size};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::arguments::{Env, MAX_MIB, Name, SandboxId};
use super::network::Network;
use super::{ADDS, READS, SETTLES, Spec};
use crate::answer::Answer;
use crate::call::{Call, IDLE_SECONDS, LABEL, LIFETIME_SECONDS};
use crate::error::ToolError;
use crate::host;
use crate::shown::object;

const MIB: u64 = 1 << 20;
/// The longest time that can be asked for, in seconds; the operator allows less.
const MAX_SECONDS: u64 = 365 * 86_400;

pub fn tools() -> Vec<Spec> {
    vec![sandbox_create(), sandbox_list(), sandbox_info(), sandbox_delete()]
}

fn sandbox_create() -> Spec {
    Spec::new(
        "sandbox_create",
        "Create a sandbox",
        ADDS,
        "Use this when the defaults of run_code do not fit: more memory, a longer life, less of the network. Makes and starts a \
         sandbox and returns its sandbox_id for the other tools. It is removed with all its files when its lifetime is over or \
         when it is idle. It reaches the public internet at most, and less of it by `network`, `allow` and `deny`; private \
         networks and the host stay out of reach. The operator's limits hold; a refusal names the limit.",
        create,
    )
}

/// What a new sandbox, a REPL's included, may ask for.
#[derive(Deserialize, JsonSchema)]
pub struct Shape {
    name: Option<Name>,
    /// Memory in MiB
    #[schemars(range(min = 64, max = MAX_MIB))]
    memory_mb: Option<u64>,
    /// Disk in MiB
    #[schemars(range(min = 16, max = MAX_MIB))]
    disk_mb: Option<u64>,
    #[serde(flatten)]
    network: Network,
}

impl Shape {
    /// Takes the name, and what changes a specification.
    pub fn split(self) -> Result<(Option<String>, impl FnOnce(&mut SandboxSpec)), ToolError> {
        let network = self.network.policy()?;
        let change = move |spec: &mut SandboxSpec| {
            if let Some(memory) = self.memory_mb {
                spec.memory = Size(memory * MIB);
            }
            if let Some(disk) = self.disk_mb {
                spec.disk = Size(disk * MIB);
            }
            if let Some(network) = network {
                spec.network = network;
            }
        };
        Ok((self.name.map(|name| name.0), change))
    }
}

#[derive(Deserialize, JsonSchema)]
struct New {
    #[serde(flatten)]
    shape: Shape,
    /// Root image
    #[schemars(length(min = 1, max = 256))]
    image: Option<String>,
    /// After how long it is removed, used or not
    #[schemars(range(min = 1, max = MAX_SECONDS), extend("default" = LIFETIME_SECONDS))]
    lifetime_seconds: Option<u64>,
    /// After how long without use it is removed
    #[schemars(range(min = 1, max = MAX_SECONDS), extend("default" = IDLE_SECONDS))]
    idle_seconds: Option<u64>,
    #[serde(default)]
    env: Env,
    /// Labels by name
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

fn create(call: &Call, given: New) -> Result<Answer, ToolError> {
    let (key, value) = LABEL;
    if given.labels.get(key).is_some_and(|label| label != value) {
        return Err(ToolError::Refused(format!(
            "The label {key} is {value} for every sandbox that an agent makes."
        )));
    }
    let (name, shape) = given.shape.split()?;
    let (sandbox, notes) = call.make_sandbox(name, |spec| {
        shape(spec);
        if let Some(image) = given.image {
            spec.image = image;
        }
        if let Some(seconds) = given.lifetime_seconds {
            spec.max_duration = Some(Seconds::from_millis(seconds * 1000));
        }
        if let Some(seconds) = given.idle_seconds {
            spec.idle_timeout = Some(Seconds::from_millis(seconds * 1000));
        }
        spec.env = given.env.0;
        spec.labels = given.labels;
        Ok(())
    })?;
    let mut structured = object(describe(&sandbox));
    structured.insert("notes".to_owned(), json!(notes));
    Ok(Answer::json(Value::Object(structured)))
}

fn describe(sandbox: &Sandboxed) -> Value {
    let (record, spec) = (&sandbox.record, &sandbox.record.spec);
    let since = |ns: u64| unix_ns().saturating_sub(ns) / 1_000_000_000;
    let mut members = object(json!({
        "sandbox_id": record.id,
        "status": sandbox.status,
        "image": spec.image,
        "memory_mb": spec.memory.0 / MIB,
        "disk_mb": spec.disk.0 / MIB,
        "age_seconds": since(record.created_ns),
        "labels": spec.labels,
    }));
    let mut put =
        |key: &str, value: Option<Value>| members.extend(value.map(|value| (key.to_owned(), value)));
    put("name", record.name.clone().map(Value::from));
    put("engine", record.engine.map(|engine| engine.as_str().into()));
    put("idle_seconds", spec.idle_timeout.map(|time| (time.as_millis() / 1000).into()));
    let left = |limit: Seconds| {
        record
            .started_ns
            .map(|started| Value::from((limit.as_millis() / 1000).saturating_sub(since(started))))
    };
    put("remaining_seconds", spec.max_duration.filter(|_| sandbox.is_alive()).and_then(left));
    Value::Object(members)
}

fn sandbox_list() -> Spec {
    Spec::new(
        "sandbox_list",
        "List sandboxes",
        READS,
        "Lists the sandboxes that agents have made and that are still there: ids, status, age and limits. Changes nothing.",
        list,
    )
}

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

fn list(call: &Call, _: Nothing) -> Result<Answer, ToolError> {
    let all = call.manager(|manager| Ok(manager.list()?))?;
    let list: Vec<_> = all
        .into_iter()
        .filter_map(|sandbox| call.allowed(sandbox))
        .map(|sandbox| describe(&sandbox))
        .collect();
    Ok(Answer::json(json!({ "sandboxes": list })))
}

fn sandbox_info() -> Spec {
    Spec::new(
        "sandbox_info",
        "Describe a sandbox",
        READS,
        "Describes a sandbox: status, image, memory, disk, age, how long it still lives, and what it uses right now. Changes \
         nothing, and does not count as use.",
        info,
    )
}

#[derive(Deserialize, JsonSchema)]
struct Which {
    sandbox_id: SandboxId,
}

fn info(call: &Call, given: Which) -> Result<Answer, ToolError> {
    let sandbox = call.sandbox(&given.sandbox_id)?;
    call.remember(&sandbox);
    let mut structured = object(describe(&sandbox));
    let reason = sandbox.record.engine_reason.clone();
    structured.extend(reason.map(|reason| ("engine_reason".to_owned(), reason.into())));
    if sandbox.status == Status::Running {
        // It may have ended meanwhile.
        let usage = call.manager(|manager| Ok(manager.usage(&sandbox)?)).ok();
        structured.extend(usage.map(|usage| ("usage".to_owned(), in_use(&usage))));
    }
    Ok(Answer::json(Value::Object(structured)))
}

/// What a sandbox uses, in mebibytes and seconds.
fn in_use(usage: &Stats) -> Value {
    let mib = |bytes: u64| bytes.div_ceil(MIB);
    let mut members = object(json!({
        "cpu_seconds": usage.cpu_ns / 1_000_000_000,
        "memory_mb": mib(usage.memory),
        "disk_mb": mib(usage.disk),
        "commands": usage.commands,
        "uptime_seconds": usage.uptime.as_secs(),
    }));
    // The processes of some engines cannot be counted from outside.
    members.extend(usage.processes.map(|count| ("processes".to_owned(), count.into())));
    Value::Object(members)
}

fn sandbox_delete() -> Spec {
    Spec::new(
        "sandbox_delete",
        "Delete a sandbox",
        SETTLES,
        "Ends a sandbox or REPL at once and removes it with its files, variables and logs; nothing can be restored. Do this \
         when you are done, because the number of sandboxes is limited.",
        delete,
    )
}

fn delete(call: &Call, given: Which) -> Result<Answer, ToolError> {
    let is_unknown = call.manager(|manager| match manager.find(&given.sandbox_id) {
        Err(error) => Ok(error.is_unknown_name()),
        Ok(_) => Ok(false),
    })?;
    if is_unknown && call.state.host.has_deleted(&given.sandbox_id) {
        let id: &str = &given.sandbox_id;
        let text = format!("The sandbox {id} was deleted before.");
        return Ok(Answer::new(json!({ "sandbox_id": id }), text));
    }
    let sandbox = call.sandbox(&given.sandbox_id)?;
    call.remember(&sandbox);
    call.state.host.pool.hang_up(&sandbox);
    let warnings = call.manager(|manager| host::remove(manager, &sandbox))?;
    call.state.host.deleted(&sandbox);
    let id = &sandbox.record.id;
    let text = host::with_warnings(format!("The sandbox {id} is deleted."), &warnings);
    Ok(Answer::new(json!({ "sandbox_id": id }), text))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn use_is_told_in_units_that_people_read() {
        let usage = Stats {
            cpu_ns: 2_500_000_000,
            memory: 100 << 20,
            memory_limit: 512 << 20,
            host_memory: 120 << 20,
            disk: (3 << 20) + 1,
            disk_limit: 1 << 30,
            disk_read: 5,
            disk_written: 6,
            processes: None,
            processes_limit: 100,
            commands: 1,
            clients: 2,
            uptime: Duration::from_millis(61_500),
        };
        let expected =
            json!({"cpu_seconds": 2, "memory_mb": 100, "disk_mb": 4, "commands": 1, "uptime_seconds": 61});
        assert_eq!(in_use(&usage), expected);
    }
}
