//! What a sandbox may reach, as arguments of a call: less than it would otherwise, and never more than the operator allows.

use bathy_policy::{Action, NetworkPolicy, Preset, Rule};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use crate::error::ToolError;

/// The network of a new sandbox.
#[derive(Deserialize, JsonSchema)]
pub struct Network {
    /// What it reaches besides the lists: nothing, public addresses or only `allow`, the default where `allow` is given
    #[serde(default)]
    #[schemars(schema_with = "presets")]
    network: Option<Preset>,
    /// Targets such as api.example:443, *.example.org or `GET http://api.example/v1/*`
    #[serde(default)]
    allow: Vec<String>,
    /// Targets that are denied whatever `allow` says
    #[serde(default)]
    deny: Vec<String>,
}

/// The presets that are left to agents.
fn presets(_: &mut SchemaGenerator) -> Schema {
    let presets = [Preset::None, Preset::Public, Preset::AllowList].map(|preset| preset.to_string());
    json_schema!({ "type": "string", "enum": presets })
}

impl Network {
    /// The policy, if anything was given.
    pub fn policy(&self) -> Result<Option<NetworkPolicy>, ToolError> {
        if self.network.is_none() && self.allow.is_empty() && self.deny.is_empty() {
            return Ok(None);
        }
        let denied = self.deny.iter().map(|target| rule("deny", Action::Deny, target));
        let allowed = self.allow.iter().map(|target| rule("allow", Action::Allow, target));
        let rules = denied.chain(allowed).collect::<Result<_, _>>()?;
        let policy = NetworkPolicy::from_options(self.network, rules);
        policy.map(Some).map_err(|error| ToolError::Failed(error.to_string()))
    }
}

fn rule(argument: &str, action: Action, target: &str) -> Result<Rule, ToolError> {
    Rule::parse(action, target).map_err(|error| ToolError::Failed(format!("`{argument}`: {error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn policy(given: Value) -> Result<Option<String>, String> {
        let given: Network = serde_json::from_value(given).unwrap();
        let text = |policy: NetworkPolicy| {
            let rules: Vec<_> = policy.rules.iter().map(ToString::to_string).collect();
            format!("{}: {}", policy.preset, rules.join(", "))
        };
        given.policy().map(|policy| policy.map(text)).map_err(|error| error.message())
    }

    #[test]
    fn denials_come_first_and_nothing_is_nothing() {
        assert_eq!(policy(json!({})), Ok(None));
        assert_eq!(policy(json!({"network": "none"})), Ok(Some("none: ".to_owned())));
        assert_eq!(
            policy(json!({"allow": ["*.example:443"], "deny": ["a.example"]})),
            Ok(Some("allow-list: deny a.example, allow *.example:443".to_owned()))
        );
        assert_eq!(policy(json!({"deny": ["a.example"]})), Ok(Some("public: deny a.example".to_owned())));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_argument() {
        let error = policy(json!({"allow": ["pubilc"]})).unwrap_err();
        assert!(error.contains("`allow`") && error.contains("public"), "{error}");
        assert!(policy(json!({"deny": ["a b"]})).unwrap_err().contains("`deny`"));
        assert!(policy(json!({"network": "none", "allow": ["public"]})).unwrap_err().contains("allow-list"));
    }
}
