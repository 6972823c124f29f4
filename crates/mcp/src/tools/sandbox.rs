//! Sandboxes: making, listing, looking at and removing them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bathy_manager::Sandboxed;
use bathy_protocol::unix_ns;
use bathy_spec::operator::Operator;
use bathy_spec::{Seconds, Size};
use serde::Deserialize;
use serde_json::{Value, json};

use super::network::{self, Network};
use super::{ADDS, READS, SETTLES, Spec, sandbox_id};
use crate::answer::{Answer, arguments};
use crate::call::{Call, IDLE_SECONDS, LABEL, LIFETIME_SECONDS};
use crate::error::ToolError;
use crate::host;
use crate::schema::Field;
use crate::shown::object;

/// A mebibyte.
pub const MIB: u64 = 1 << 20;
/// The most that can be asked for, in MiB; the operator allows less.
pub const MAX_MIB: u64 = 1 << 20;
/// The longest time that can be asked for, in seconds; the operator allows less.
const MAX_SECONDS: u64 = 365 * 86_400;

/// The tools.
pub fn tools() -> Vec<Spec> {
    vec![sandbox_create(), sandbox_list(), sandbox_info(), sandbox_delete()]
}

fn sandbox_create() -> Spec {
    Spec {
        name: "sandbox_create",
        title: "Create a sandbox",
        description: "Makes and starts a sandbox with its own Linux kernel and returns its sandbox_id for the other tools. Use \
            it when the defaults of run_code do not fit: more memory, another image, a longer life, less of the network. \
            It is removed with all its files when its lifetime is over (one hour by default), or after idle_seconds \
            without use (15 minutes by default). It reaches the public internet only, and less of it by `network`, \
            `allow` and `deny`; private networks, the host and whatever else the operator keeps from agents stay out of \
            reach, whatever is allowed here. It sees nothing of the host; directories of the host cannot be mounted. \
            The operator's limits hold; a refusal names the limit.",
        hints: ADDS,
        takes: || {
            let mut fields = vec![
                Field::text("name", "A name for it; letters, digits, '_', '.' and '-'")
                    .not_empty()
                    .at_most(63),
                Field::text("image", "The root image").not_empty().at_most(256).default("default"),
                Field::integer("memory_mb", "Memory in MiB").between(64, MAX_MIB),
                Field::integer("disk_mb", "Size of its disk in MiB").between(16, MAX_MIB),
                Field::integer("lifetime_seconds", "After how long it is removed, used or not")
                    .between(1, MAX_SECONDS)
                    .default(LIFETIME_SECONDS),
                Field::integer("idle_seconds", "After how long without use it is removed")
                    .between(1, MAX_SECONDS)
                    .default(IDLE_SECONDS),
                Field::map("env", "Environment variables of everything that runs in it, by name"),
                Field::map("labels", "Labels to find it by; the label created-by is always mcp"),
                Field::texts("mounts", "Directories of the host. Always refused: the operator allows none"),
            ];
            fields.extend(network::fields());
            fields
        },
        returns: || {
            let notes = "What the operator made stricter, and what else there is to know";
            let mut fields = vec![Field::texts("notes", notes).required()];
            fields.extend(sandbox_fields());
            fields
        },
        run: create,
    }
}

#[derive(Deserialize)]
struct New {
    name: Option<String>,
    image: Option<String>,
    memory_mb: Option<u64>,
    disk_mb: Option<u64>,
    lifetime_seconds: Option<u64>,
    idle_seconds: Option<u64>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    mounts: Vec<String>,
    #[serde(flatten)]
    network: Network,
}

fn create(call: &Call, given: Value) -> Result<Answer, ToolError> {
    let given: New = arguments(given)?;
    if let Some(path) = given.mounts.first() {
        return Err(bathy_manager::ManagerError::from(Operator::refuse_host_path(PathBuf::from(path))).into());
    }
    let (key, value) = LABEL;
    if given.labels.get(key).is_some_and(|label| label != value) {
        return Err(ToolError::Refused(format!(
            "The label {key} is {value} for every sandbox that an agent makes."
        )));
    }
    let network = given.network.policy()?;
    let (sandbox, notes) = call.make_sandbox(given.name, |spec| {
        if let Some(image) = given.image {
            spec.image = image;
        }
        if let Some(memory) = given.memory_mb {
            spec.memory = Size(memory * MIB);
        }
        if let Some(disk) = given.disk_mb {
            spec.disk = Size(disk * MIB);
        }
        if let Some(seconds) = given.lifetime_seconds {
            spec.max_duration = Some(Seconds::from_millis(seconds * 1000));
        }
        if let Some(seconds) = given.idle_seconds {
            spec.idle_timeout = Some(Seconds::from_millis(seconds * 1000));
        }
        spec.env = given.env;
        spec.labels = given.labels;
        if let Some(network) = network {
            spec.network = network;
        }
        Ok(())
    })?;
    let mut structured = object(describe(&sandbox));
    structured.insert("notes".to_owned(), json!(notes));
    Ok(Answer::json(Value::Object(structured)))
}

/// What is told about a sandbox.
fn sandbox_fields() -> Vec<Field> {
    let status = ["created", "running", "paused", "stopped", "dead"];
    vec![
        Field::text("sandbox_id", "What other tools want to know").required(),
        Field::text("name", "Its name, if it has one"),
        Field::choice("status", "What it is right now", &status).required(),
        Field::text("image", "Its root image").required(),
        Field::choice("engine", "What keeps it apart from the host", &["kvm", "uml"]),
        Field::text("engine_reason", "Why that engine"),
        Field::integer("memory_mb", "Its memory in MiB").required().at_least(0),
        Field::integer("disk_mb", "The size of its disk in MiB").required().at_least(0),
        Field::integer("age_seconds", "How long ago it was made").required().at_least(0),
        Field::integer("remaining_seconds", "How long until its lifetime is over").at_least(0),
        Field::integer("idle_seconds", "After how long without use it is removed").at_least(0),
        Field::map("labels", "Its labels").required(),
    ]
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
    put("engine_reason", record.engine_reason.clone().map(Value::from));
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
    Spec {
        name: "sandbox_list",
        title: "List sandboxes",
        description: "Lists the sandboxes that agents have made and that are still there: their ids, status, age and limits. \
            Changes nothing. Sandboxes whose lifetime or idle time is over are gone and not listed.",
        hints: READS,
        takes: Vec::new,
        returns: || {
            vec![Field::objects("sandboxes", "The sandboxes, the oldest first", sandbox_fields()).required()]
        },
        run: |call, _| {
            let all = call.manager(|manager| Ok(manager.list()?))?;
            let list: Vec<_> = all
                .into_iter()
                .filter_map(|sandbox| call.allowed(sandbox))
                .map(|sandbox| describe(&sandbox))
                .collect();
            Ok(Answer::json(json!({ "sandboxes": list })))
        },
    }
}

fn sandbox_info() -> Spec {
    Spec {
        name: "sandbox_info",
        title: "Describe a sandbox",
        description: "Tells what a sandbox is: its status, image, memory, disk, age, how long it still lives, and what it uses \
            right now if it runs. Changes nothing, and does not count as use.",
        hints: READS,
        takes: || vec![sandbox_id().required()],
        returns: || {
            let mut fields = sandbox_fields();
            fields
                .push(Field::open("usage", "Memory, processor time, processes and disk in use, if it runs"));
            fields
        },
        run: |call, given| {
            let sandbox = call.sandbox(&which(given)?)?;
            call.remember(&sandbox);
            let mut structured = object(describe(&sandbox));
            if sandbox.status == bathy_manager::Status::Running {
                // It may have ended meanwhile.
                let usage = call.manager(|manager| Ok(manager.usage(&sandbox)?)).ok();
                let usage = usage.and_then(|usage| serde_json::to_value(usage).ok());
                structured.extend(usage.map(|usage| ("usage".to_owned(), without_nulls(usage))));
            }
            Ok(Answer::json(Value::Object(structured)))
        },
    }
}

/// What is not known is not there.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(members) => Value::Object(
            members
                .into_iter()
                .filter(|(_, member)| !member.is_null())
                .map(|(name, member)| (name, without_nulls(member)))
                .collect(),
        ),
        other => other,
    }
}

fn sandbox_delete() -> Spec {
    Spec {
        name: "sandbox_delete",
        title: "Delete a sandbox",
        description: "Ends a sandbox at once and removes it with its files, variables and logs; nothing can be brought back. \
            Whatever runs in it is ended. Do this when you are done, so that others have room.",
        hints: SETTLES,
        takes: || vec![sandbox_id().required()],
        returns: || vec![Field::text("sandbox_id", "The sandbox that is gone").required()],
        run: |call, given| {
            let sandbox = call.sandbox(&which(given)?)?;
            call.remember(&sandbox);
            call.state.host.pool.hang_up(&sandbox);
            let warnings = call.manager(|manager| host::remove(manager, &sandbox))?;
            let id = &sandbox.record.id;
            let told = host::told(format!("The sandbox {id} is deleted."), &warnings);
            Ok(Answer::new(json!({ "sandbox_id": id }), told))
        },
    }
}

fn which(given: Value) -> Result<String, ToolError> {
    #[derive(Deserialize)]
    struct Which {
        sandbox_id: String,
    }
    Ok(arguments::<Which>(given)?.sandbox_id)
}
