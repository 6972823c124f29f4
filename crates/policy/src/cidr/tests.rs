use std::net::IpAddr;

use super::Cidr;

#[test]
fn networks_hold_what_begins_like_them() {
    let table = [
        ("10.0.0.0/8", "10.255.255.255", true),
        ("10.0.0.0/8", "11.0.0.0", false),
        ("10.0.0.0/8", "9.255.255.255", false),
        ("0.0.0.0/0", "255.255.255.255", true),
        ("0.0.0.0/0", "::1", false),
        ("::/0", "1.2.3.4", false),
        ("::/0", "ffff::1", true),
        ("1.2.3.4", "1.2.3.4", true),
        ("1.2.3.4", "1.2.3.5", false),
        ("1.2.3.4", "::ffff:1.2.3.4", true),
        ("2001:db8::/32", "2001:db8:ffff::1", true),
        ("2001:db8::/32", "2001:db9::", false),
        ("192.0.2.128/25", "192.0.2.127", false),
        ("192.0.2.128/25", "192.0.2.128", true),
    ];
    for (net, address, held) in table {
        let net: Cidr = net.parse().expect("a network");
        let address: IpAddr = address.parse().expect("an address");
        assert_eq!(net.contains(address), held, "{net} {address}");
        assert_eq!(net.to_string().parse(), Ok(net));
    }
}
