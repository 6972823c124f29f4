//! Names that are only valid inside a private network.

use crate::HostName;

/// Domains outside the public tree: reserved for private networks, or used there by custom.
const DOMAINS: [&str; 10] = [
    "corp",
    "home",
    "home.arpa",
    "internal",
    "intranet",
    "lan",
    "local",
    "localdomain",
    "localhost",
    "private",
];

/// Whether a name belongs to a private network. The host's resolvers would answer it from the host's own network.
pub fn is_internal_name(name: &HostName) -> bool {
    let name = name.as_str();
    let below =
        |domain: &str| name.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    !name.contains('.') || DOMAINS.iter().any(|domain| below(domain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_private_networks() {
        for name in [
            "printer",
            "nas.local",
            "_ldap._tcp.dc._msdcs.corp.local",
            "x.internal",
            "router.lan",
            "a.home.arpa",
        ] {
            assert!(is_internal_name(&name.parse().unwrap()), "{name}");
        }
        for name in ["example.com", "local.example.com", "mylocal.example", "arpa.net", "internal.dev"] {
            assert!(!is_internal_name(&name.parse().unwrap()), "{name}");
        }
    }
}
