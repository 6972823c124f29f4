//! V9 and N5: frames that no honest guest sends, and frames that it does.

use std::net::Ipv4Addr;

use bathy_protocol::network::{GATEWAY_MAC, GATEWAY_V4, GATEWAY_V6, GUEST_MAC, GUEST_V4, GUEST_V6};
use smoltcp::wire::{Ipv4Packet, TcpPacket};

use super::*;

const REMOTE: Ipv4Addr = Ipv4Addr::new(93, 184, 215, 14);
const REMOTE_V6: Ipv6Addr = Ipv6Addr::new(0x2606, 0x2800, 0x21f, 0xcb07, 0, 0, 0, 1);

fn ethernet(to: [u8; 6], from: [u8; 6], kind: u16, rest: &[u8]) -> Vec<u8> {
    [&to[..], &from, &kind.to_be_bytes(), rest].concat()
}

fn from_guest(kind: u16, rest: &[u8]) -> Vec<u8> {
    ethernet(GATEWAY_MAC, GUEST_MAC, kind, rest)
}

fn v4_with(
    protocol: u8,
    from: Ipv4Addr,
    to: Ipv4Addr,
    payload: &[u8],
    change: impl FnOnce(&mut [u8]),
) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 0, 0, 7, 0x40, 0, 64, protocol, 0, 0];
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(payload);
    let length = u16::try_from(packet.len()).unwrap();
    packet[2..4].copy_from_slice(&length.to_be_bytes());
    change(&mut packet);
    let header = usize::from(packet[0] & 15) * 4;
    if (20..=packet.len()).contains(&header) {
        Ipv4Packet::new_unchecked(&mut packet).fill_checksum();
    }
    packet
}

fn v4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    v4_with(protocol, GUEST_V4, REMOTE, payload, |_| {})
}

fn v6_with(next: u8, from: Ipv6Addr, to: Ipv6Addr, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend(u16::try_from(payload.len()).unwrap().to_be_bytes());
    packet.extend([next, 64]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    packet.extend(payload);
    packet
}

/// A segment between these ports, with these flags.
fn tcp(from: u16, to: u16, flags: u8) -> Vec<u8> {
    let mut segment = Vec::new();
    segment.extend(from.to_be_bytes());
    segment.extend(to.to_be_bytes());
    segment.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    segment
}

fn udp(from: u16, to: u16, length: u16, payload: &[u8]) -> Vec<u8> {
    [&from.to_be_bytes()[..], &to.to_be_bytes(), &length.to_be_bytes(), &[0, 0], payload].concat()
}

const SYN: u8 = 2;

#[test]
fn frames_of_an_honest_guest_are_parsed() {
    let frame = from_guest(0x800, &v4(6, &tcp(40000, 443, SYN)));
    let Ok(GuestPacket::Tcp(segment)) = parse(&frame) else { panic!("a segment") };
    assert_eq!((segment.guest_port, segment.remote), (40000, SocketAddr::from((REMOTE, 443))));
    assert!(segment.opens && !segment.resets);

    let frame = from_guest(0x86dd, &v6_with(17, GUEST_V6, REMOTE_V6, &udp(5, 53, 10, b"ab")));
    let Ok(GuestPacket::Udp(datagram)) = parse(&frame) else { panic!("a datagram") };
    assert_eq!((datagram.payload, datagram.remote), (&b"ab"[..], SocketAddr::from((REMOTE_V6, 53))));

    let frame = from_guest(0x800, &v4(1, &[8, 0, 0, 0, 0, 1, 0, 1]));
    assert!(matches!(parse(&frame), Ok(GuestPacket::Echo { .. })));
    let frame = from_guest(0x86dd, &v6_with(58, GUEST_V6, REMOTE_V6, &[128, 0, 0, 0, 0, 1, 0, 1]));
    assert!(matches!(parse(&frame), Ok(GuestPacket::Echo { remote: IpAddr::V6(REMOTE_V6), .. })));
    let frame = from_guest(0x800, &v4(132, &[0; 12]));
    assert!(matches!(parse(&frame), Ok(GuestPacket::Other { protocol: 132, .. })));
}

#[test]
fn v9_only_an_opening_segment_opens() {
    for (flags, opens) in
        [(SYN, true), (SYN | 16, false), (SYN | 4, false), (SYN | 1, false), (16, false), (0, false)]
    {
        let frame = from_guest(0x800, &v4(6, &tcp(40000, 443, flags)));
        let Ok(GuestPacket::Tcp(segment)) = parse(&frame) else { panic!("a segment") };
        assert_eq!(segment.opens, opens, "{flags:#x}");
    }
}

#[test]
fn v9_foreign_mac_and_ip_addresses_are_dropped() {
    let packet = v4(6, &tcp(1, 443, SYN));
    let foreign = [2, 0, 0, 0, 0, 9];
    let other = Ipv4Addr::new(192, 0, 0, 3);
    let others = |from, to| v4_with(6, from, to, &tcp(1, 443, SYN), |_| {});
    for (frame, reason) in [
        (ethernet(GATEWAY_MAC, foreign, 0x800, &packet), DropReason::ForeignMac),
        (ethernet(GATEWAY_MAC, GATEWAY_MAC, 0x800, &packet), DropReason::ForeignMac),
        (ethernet(foreign, GUEST_MAC, 0x800, &packet), DropReason::UnknownMac),
        (from_guest(0x800, &others(other, REMOTE)), DropReason::ForeignAddress),
        (from_guest(0x800, &others(GATEWAY_V4, REMOTE)), DropReason::ForeignAddress),
        (from_guest(0x800, &others(REMOTE, REMOTE)), DropReason::ForeignAddress),
        (from_guest(0x86dd, &v6_with(6, GATEWAY_V6, REMOTE_V6, &tcp(1, 2, SYN))), DropReason::ForeignAddress),
        (from_guest(0x86dd, &v6_with(6, REMOTE_V6, REMOTE_V6, &tcp(1, 2, SYN))), DropReason::ForeignAddress),
        (from_guest(0x800, &others(GUEST_V4, Ipv4Addr::BROADCAST)), DropReason::Multicast),
        (from_guest(0x800, &others(GUEST_V4, Ipv4Addr::new(224, 0, 0, 251))), DropReason::Multicast),
        (
            from_guest(0x86dd, &v6_with(17, GUEST_V6, "ff02::fb".parse().unwrap(), &udp(1, 2, 8, &[]))),
            DropReason::Multicast,
        ),
    ] {
        assert_eq!(parse(&frame).err(), Some(reason), "{frame:x?}");
    }
}

#[test]
fn v9_shapes_that_the_link_does_not_carry_are_dropped() {
    let good = v4(6, &tcp(1, 443, SYN));
    let with =
        |change: fn(&mut [u8])| from_guest(0x800, &v4_with(6, GUEST_V4, REMOTE, &tcp(1, 443, SYN), change));
    let behind = |next, payload: &[u8]| from_guest(0x86dd, &v6_with(next, GUEST_V6, REMOTE_V6, payload));
    for (frame, reason) in [
        (vec![], DropReason::Malformed),
        (vec![0; 13], DropReason::Malformed),
        (from_guest(0x800, &good[..19]), DropReason::Malformed),
        (from_guest(0x800, &good[..30]), DropReason::Malformed),
        (from_guest(0x8100, &[&[0, 5, 8, 0][..], &good].concat()), DropReason::Vlan),
        (from_guest(0x88a8, &good), DropReason::Vlan),
        (from_guest(0x8847, &good), DropReason::UnknownEtherType),
        (from_guest(0x86dd, &good), DropReason::Malformed),
        // IP options: they would be the first four bytes of the payload.
        (with(|packet| packet[0] = 0x46), DropReason::Options),
        (with(|packet| packet[0] = 0x44), DropReason::Malformed),
        // Fragments: the first, one in the middle, a tiny one.
        (with(|packet| packet[6] = 0x20), DropReason::Fragment),
        (with(|packet| packet[7] = 1), DropReason::Fragment),
        (with(|packet| packet[3] = 200), DropReason::Malformed),
        (behind(44, &[6, 0, 0, 1, 0, 0, 0, 7]), DropReason::Fragment),
        (behind(0, &[6, 0, 1, 4, 0, 0, 0, 0]), DropReason::Options),
        (behind(43, &[6, 0, 0, 0, 0, 0, 0, 0]), DropReason::Options),
        (behind(60, &[6, 0, 1, 4, 0, 0, 0, 0]), DropReason::Options),
        (from_guest(0x800, &v4(6, &tcp(0, 443, SYN))), DropReason::NoPort),
        (from_guest(0x800, &v4(6, &tcp(1, 0, SYN))), DropReason::NoPort),
        (from_guest(0x800, &v4(17, &udp(1, 2, 200, b"x"))), DropReason::Malformed),
        (from_guest(0x800, &v4(17, &udp(1, 2, 3, b"x"))), DropReason::Malformed),
        // A redirect, and a router advertisement.
        (from_guest(0x800, &v4(1, &[5, 1, 0, 0, 192, 0, 0, 1])), DropReason::Announcement),
        (behind(58, &[134, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), DropReason::Announcement),
    ] {
        assert_eq!(parse(&frame).err(), Some(reason), "{frame:x?}");
    }
    let mut wrong_sum = good;
    wrong_sum[10] ^= 1;
    assert_eq!(parse(&from_guest(0x800, &wrong_sum)).err(), Some(DropReason::Malformed));
}

fn arp(operation: u16, mac: [u8; 6], from: Ipv4Addr, wanted: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4];
    packet.extend(operation.to_be_bytes());
    packet.extend(mac);
    packet.extend(from.octets());
    packet.extend([0; 6]);
    packet.extend(wanted.octets());
    ethernet([0xff; 6], GUEST_MAC, 0x806, &packet)
}

#[test]
fn v9_only_the_gateway_answers_for_the_gateway() {
    assert!(matches!(parse(&arp(1, GUEST_MAC, GUEST_V4, GATEWAY_V4)), Ok(GuestPacket::ArpRequest)));
    for (frame, reason) in [
        (arp(2, GUEST_MAC, GATEWAY_V4, GUEST_V4), DropReason::Announcement),
        (arp(1, GUEST_MAC, GATEWAY_V4, GATEWAY_V4), DropReason::ForeignAddress),
        (arp(1, [2, 0, 0, 0, 0, 9], GUEST_V4, GATEWAY_V4), DropReason::ForeignMac),
        (arp(1, GUEST_MAC, GUEST_V4, REMOTE), DropReason::Announcement),
    ] {
        assert_eq!(parse(&frame).err(), Some(reason));
    }
    for (place, what) in [(18, "length of a MAC address"), (19, "length of an address")] {
        let mut frame = arp(1, GUEST_MAC, GUEST_V4, GATEWAY_V4);
        frame[place] += 2;
        frame.extend([0; 8]);
        assert_eq!(parse(&frame).err(), Some(DropReason::Announcement), "{what}");
    }
    let solicits = |from, target: Ipv6Addr| {
        let payload = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target.octets()].concat();
        from_guest(0x86dd, &v6_with(58, from, GATEWAY_V6, &payload))
    };
    assert!(matches!(parse(&solicits(GUEST_V6, GATEWAY_V6)), Ok(GuestPacket::NeighborSolicit(_))));
    assert!(matches!(parse(&solicits(guest_link_local(), GATEWAY_V6)), Ok(GuestPacket::NeighborSolicit(_))));
    assert_eq!(parse(&solicits(REMOTE_V6, GATEWAY_V6)).err(), Some(DropReason::ForeignAddress));
    assert_eq!(parse(&solicits(GUEST_V6, REMOTE_V6)).err(), Some(DropReason::Announcement));
}

#[test]
fn n5_what_comes_with_the_first_segment_is_not_kept() {
    let payload = [tcp(40000, 443, SYN), vec![b'x'; 100]].concat();
    for frame in
        [from_guest(0x800, &v4(6, &payload)), from_guest(0x86dd, &v6_with(6, GUEST_V6, REMOTE_V6, &payload))]
    {
        let Ok(GuestPacket::Tcp(segment)) = parse(&frame) else { panic!("a segment") };
        let bare = segment.without_payload();
        assert_eq!(bare.len(), segment.packet.len() - 100);
        let header = if segment.remote.is_ipv4() { 20 } else { 40 };
        let tcp = TcpPacket::new_checked(&bare[header..]).unwrap();
        assert!(tcp.syn() && tcp.payload().is_empty());
        let told = match segment.remote {
            SocketAddr::V4(_) => Ipv4Packet::new_checked(&bare).unwrap().payload().len(),
            SocketAddr::V6(_) => Ipv6Packet::new_checked(&bare).unwrap().payload().len(),
        };
        assert_eq!(told, bare.len() - header, "its length is that of what is left");
    }
}

#[test]
fn v9_no_frame_of_any_bytes_breaks_it() {
    // A valid frame of each kind, with every byte in turn set to a few values, and cut at every offset.
    let frames = [
        from_guest(0x800, &v4(6, &tcp(40000, 443, SYN))),
        from_guest(0x800, &v4(17, &udp(1, 2, 9, b"x"))),
        from_guest(0x800, &v4(1, &[8, 0, 0, 0, 0, 1, 0, 1])),
        from_guest(0x86dd, &v6_with(6, GUEST_V6, REMOTE_V6, &tcp(1, 2, SYN))),
        from_guest(0x86dd, &v6_with(58, GUEST_V6, GATEWAY_V6, &[135; 32])),
        arp(1, GUEST_MAC, GUEST_V4, GATEWAY_V4),
    ];
    let mut parsed = 0;
    for frame in frames {
        for cut in 0..=frame.len() {
            parsed += u32::from(parse(&frame[..cut]).is_ok());
        }
        for place in 0..frame.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = frame.clone();
                changed[place] = value;
                if let Ok(GuestPacket::Tcp(segment)) = parse(&changed) {
                    parsed += u32::from(!segment.without_payload().is_empty());
                }
            }
        }
    }
    assert!(parsed > 100, "{parsed}");
}

#[test]
fn v9_without_a_port_on_either_side_nothing_is_taken() {
    for (from, to) in [(0, 53), (53, 0), (0, 0)] {
        for payload in [(6, tcp(from, to, SYN)), (17, udp(from, to, 8, b""))] {
            let frame = from_guest(0x800, &v4(payload.0, &payload.1));
            assert_eq!(parse(&frame).err(), Some(DropReason::NoPort), "{from} {to}");
        }
    }
}

#[test]
fn the_link_local_address_of_the_guests_mac() {
    // RFC 4291: the MAC address with the universal/local bit inverted, and ff:fe in its middle.
    let [a, b, c, d, e, f] = GUEST_MAC.map(u16::from);
    let expected =
        Ipv6Addr::new(0xfe80, 0, 0, 0, (a << 8 | b) ^ 0x200, c << 8 | 0xff, 0xfe00 | d, e << 8 | f);
    assert_eq!(guest_link_local(), expected);
}

#[test]
fn each_drop_reason_has_its_own_text() {
    let reasons = [
        DropReason::Malformed,
        DropReason::ForeignMac,
        DropReason::ForeignAddress,
        DropReason::UnknownMac,
        DropReason::Vlan,
        DropReason::UnknownEtherType,
        DropReason::Options,
        DropReason::Fragment,
        DropReason::Multicast,
        DropReason::NoPort,
        DropReason::Announcement,
    ];
    let texts: std::collections::BTreeSet<_> = reasons.iter().map(ToString::to_string).collect();
    assert!(texts.len() == reasons.len() && !texts.contains(""), "{texts:?}");
}
