//! Arguments that several tools have in common.

use std::collections::BTreeMap;
use std::ops::Deref;

use bathy_client::interpreter::Language;
use bathy_client::interpreter::MAX_CODE;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

/// The longest time limit of one call, in seconds.
pub const MAX_TIMEOUT: u64 = 3600;
/// The most that can be asked for, in MiB; the operator allows less.
pub const MAX_MIB: u64 = 1 << 20;

/// sandbox_id of an earlier answer
#[derive(Deserialize, JsonSchema)]
pub struct SandboxId(#[schemars(length(min = 1, max = 128))] String);

/// repl_id of create_python_repl
#[derive(Deserialize, JsonSchema)]
pub struct ReplId(#[schemars(length(min = 1, max = 128))] String);

/// Its context: letters, digits, '.', '_' and '-'
#[derive(Deserialize, JsonSchema)]
pub struct ContextId(#[schemars(length(min = 1, max = 64))] pub String);

/// A name: letters, digits, '_', '.' and '-'
#[derive(Deserialize, JsonSchema)]
pub struct Name(#[schemars(length(min = 1, max = 63))] pub String);

/// Path in the sandbox
#[derive(Deserialize, JsonSchema)]
pub struct Path(#[schemars(length(min = 1, max = 4095))] String);

/// Working directory of this call
#[derive(Deserialize, JsonSchema)]
pub struct Cwd(#[schemars(length(min = 1, max = 4095))] pub String);

/// Code to run
#[derive(Deserialize, JsonSchema)]
pub struct Code(#[schemars(length(max = MAX_CODE))] pub String);

/// Environment variables
#[derive(Default, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Env(pub BTreeMap<String, String>);

macro_rules! is_text {
    ($($name:ident),+) => {
        $(impl Deref for $name {
            type Target = str;
            fn deref(&self) -> &str {
                &self.0
            }
        })+
    };
}
is_text!(SandboxId, ReplId, Path);

/// The languages of run_code.
pub fn languages(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": Language::ALL.map(Language::as_str) })
}
