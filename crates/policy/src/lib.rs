//! What a sandbox may reach, as a pure function of a policy and a destination.
//!
//! The command line, the configuration and the gateway all use these types, so there is one parser, one address
//! classifier and one meaning of a host name. Nothing in here does input or output.
//!
//! A name rule binds three things together: what the sandbox resolved, what the client asks for (in TLS or HTTP), and what the
//! rule says. Only TLS and HTTP over TCP carry a name that can be inspected, so no rule allows anything else by name. A rule
//! that denies a name is weaker: it stops clients that send the name, and those that cannot resolve it.
//!
//! When a spelling can be read in two ways, an allow rule takes the narrow reading and a deny rule takes the wide one.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod address;
mod cidr;
mod host_name;
mod policy;
mod published;
mod rule;
mod suggest;
mod text;

pub use address::{Class, canonical, classify, is_internal_name, is_metadata_name};
pub use cidr::{Cidr, CidrError};
pub use host_name::{HostName, HostNameError, NamePattern, NamePatternError};
pub use policy::{
    Access, Author, DecidedBy, Decision, Destination, Inspected, InspectedRequest, MAX_RULES, NetworkPolicy,
    Policies, PolicyError, Preset, PresetError, Reason, Unmet,
};
pub use published::{PublishedPort, PublishedPortError};
pub use rule::{
    Action, Direction, HttpMatch, Ports, Protocol, Rule, RuleError, RuleProblem, Target, plain_path,
};
pub use suggest::Hint;
