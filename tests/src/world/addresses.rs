//! Addresses of a world, by kind. All addresses respond, except for [`SILENT`].

/// The resolver that the host uses.
pub const RESOLVER: &str = "10.53.0.53";
/// `site.example`.
pub const SITE: &str = "93.184.215.14";
/// `site.example`.
pub const SITE_V6: &str = "2606:2800:21f:cb07::1";
/// `hang.example`: public, and drops all packets.
pub const SILENT: &str = "151.101.66.66";
/// The host's own address that looks private.
pub const HOST: &str = "192.168.77.2";
/// The host's own addresses, including a secondary one: packets to it have the primary one as source.
pub const HOST_OWN: [&str; 6] =
    [HOST, "93.184.77.2", "93.184.78.2", "93.184.78.3", "fd77::2", "2606:2800:77::2"];
/// Public addresses.
pub const PUBLIC: [&str; 7] =
    [SITE, "1.1.1.1", "8.8.8.8", "151.101.1.10", SITE_V6, "2606:4700:4700::1111", "2001:4860:4860::8888"];
/// Private addresses.
pub const PRIVATE: [&str; 7] =
    ["10.0.0.5", "172.16.0.5", "172.31.255.5", "192.168.1.5", "100.64.0.5", "fd00::5", "fc00::5"];
/// Loopback and unspecified addresses.
pub const LOOPBACK: [&str; 5] = ["127.0.0.1", "127.0.0.53", "127.255.255.254", "0.0.0.0", "::1"];
/// Link-local addresses. IPv6 ones need the interface, `world`.
pub const LINK_LOCAL: [&str; 3] = ["169.254.7.5", "fe80::5", "fe80::1"];
/// Metadata services of clouds.
pub const METADATA: [&str; 14] = [
    "169.254.169.254",
    "169.254.169.253",
    "169.254.169.123",
    "169.254.170.2",
    "169.254.170.23",
    "169.254.42.42",
    "169.254.0.23",
    "168.63.129.16",
    "100.100.100.200",
    "192.0.0.192",
    "fd00:ec2::254",
    "fd00:ec2::23",
    "fd20:ce::254",
    "fe80::a9fe:a9fe",
];
/// Addresses of special-purpose ranges: documentation, benchmarks, reserved, tunnels, translators. Multicast is not among them,
/// because TCP cannot connect to it.
pub const SPECIAL: [&str; 13] = [
    "0.1.2.3",
    "192.0.0.8",
    "192.0.2.5",
    "192.88.99.1",
    "198.18.0.5",
    "198.51.100.5",
    "203.0.113.5",
    "240.0.0.5",
    "2001:db8::5",
    "2001::5",
    "2002:a00:5::1",
    "64:ff9b::a00:5",
    "100::5",
];

/// An address as it is written in an URL.
pub fn in_url(address: &str) -> String {
    if address.starts_with("fe80:") {
        format!("[{address}%25world]")
    } else if address.contains(':') {
        format!("[{address}]")
    } else {
        address.to_owned()
    }
}
