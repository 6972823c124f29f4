//! Frames that the gateway itself makes, as a guest parses them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use bathy_protocol::network::{
    FRAME_HEADER, GATEWAY_MAC, GATEWAY_V4, GATEWAY_V6, GUEST_MAC, GUEST_V4, GUEST_V6,
};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpPacket, ArpRepr, EthernetAddress, Icmpv4Message, Icmpv4Packet, Icmpv4Repr, Icmpv6Message,
    Icmpv6Packet, Icmpv6Repr, IpAddress, IpProtocol, Ipv4Packet, Ipv6Packet, NdiscNeighborFlags, TcpControl,
    TcpPacket, TcpSeqNumber, UdpPacket,
};

use super::{
    NEIGHBOUR_HOPS, QUOTED, send_arp_reply, send_datagram, send_echo_reply, send_neighbor_advert,
    send_prohibited, send_reset,
};
use crate::frame::Segment;
use crate::link::Link;
use crate::stack::FourTuple;
use crate::stack::guest::Guest;

const V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
const V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7);

struct Keeper(OwnedFd);

fn link() -> (Link, Keeper) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (one, two) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    (Link::new(one), Keeper(two))
}

impl Keeper {
    fn frame(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; 65536];
        let (count, _) = recv(&self.0, &mut *frame, RecvFlags::empty()).ok()?;
        frame.truncate(count);
        Some(frame)
    }

    /// The payload of the next packet, of this protocol and from this address to the guest.
    #[track_caller]
    fn ip_payload(&self, from: IpAddr, protocol: IpProtocol) -> Vec<u8> {
        let packet = self.frame().unwrap().split_off(FRAME_HEADER);
        match from {
            IpAddr::V4(from) => {
                let ip = Ipv4Packet::new_checked(&packet).unwrap();
                assert!(ip.verify_checksum());
                assert_eq!((ip.src_addr(), ip.dst_addr(), ip.next_header()), (from, GUEST_V4, protocol));
                ip.payload().to_vec()
            }
            IpAddr::V6(from) => {
                let ip = Ipv6Packet::new_checked(&packet).unwrap();
                assert_eq!((ip.src_addr(), ip.dst_addr(), ip.next_header()), (from, GUEST_V6, protocol));
                ip.payload().to_vec()
            }
        }
    }
}

#[test]
fn arp_requests_are_answered_with_the_gateways_mac() {
    let (mut link, keeper) = link();
    send_arp_reply(&mut link);
    let frame = keeper.frame().unwrap();
    assert_eq!(frame[..12], [GUEST_MAC, GATEWAY_MAC].concat());
    let ArpRepr::EthernetIpv4 { source_hardware_addr, source_protocol_addr, target_protocol_addr, .. } =
        ArpRepr::parse(&ArpPacket::new_checked(&frame[FRAME_HEADER..]).unwrap()).unwrap()
    else {
        unreachable!("there is no other kind")
    };
    assert_eq!(source_hardware_addr, EthernetAddress(GATEWAY_MAC));
    assert_eq!((source_protocol_addr, target_protocol_addr), (GATEWAY_V4, GUEST_V4));
}

#[test]
fn neighbor_solicitations_are_answered_with_the_gateways_mac() {
    let (mut link, keeper) = link();
    send_neighbor_advert(&mut link, GUEST_V6);
    let packet = keeper.frame().unwrap().split_off(FRAME_HEADER);
    let ip = Ipv6Packet::new_checked(&packet).unwrap();
    assert_eq!((ip.src_addr(), ip.dst_addr(), ip.hop_limit()), (GATEWAY_V6, GUEST_V6, NEIGHBOUR_HOPS));
    assert_eq!(packet.len(), 40 + usize::from(ip.payload_len()));
    let advert = Icmpv6Packet::new_checked(ip.payload()).unwrap();
    assert!(advert.verify_checksum(&GATEWAY_V6, &GUEST_V6));
    assert_eq!((advert.msg_type(), advert.target_addr()), (Icmpv6Message::NeighborAdvert, GATEWAY_V6));
    assert_eq!(advert.neighbor_flags(), NdiscNeighborFlags::all());
    assert!(ip.payload().ends_with(&GATEWAY_MAC));
}

#[test]
fn an_echo_brings_back_what_was_sent() {
    let sums = ChecksumCapabilities::default();
    let data = b"some data";
    let (mut link, keeper) = link();

    let asked = Icmpv4Repr::EchoRequest { ident: 7, seq_no: 9, data };
    let mut packet = vec![0; 20 + asked.buffer_len()];
    asked.emit(&mut Icmpv4Packet::new_unchecked(&mut packet[20..]), &sums);
    send_echo_reply(&mut link, GATEWAY_V4.into(), &packet);
    let ip_payload = keeper.ip_payload(GATEWAY_V4.into(), IpProtocol::Icmp);
    let answer = Icmpv4Repr::parse(&Icmpv4Packet::new_checked(&ip_payload).unwrap(), &sums).unwrap();
    assert_eq!(answer, Icmpv4Repr::EchoReply { ident: 7, seq_no: 9, data });

    let asked = Icmpv6Repr::EchoRequest { ident: 7, seq_no: 9, data };
    let mut packet = vec![0; 40 + asked.buffer_len()];
    asked.emit(&GUEST_V6, &GATEWAY_V6, &mut Icmpv6Packet::new_unchecked(&mut packet[40..]), &sums);
    send_echo_reply(&mut link, GATEWAY_V6.into(), &packet);
    let ip_payload = keeper.ip_payload(GATEWAY_V6.into(), IpProtocol::Icmpv6);
    let packet = Icmpv6Packet::new_checked(&ip_payload).unwrap();
    let answer = Icmpv6Repr::parse(&GATEWAY_V6, &GUEST_V6, &packet, &sums).unwrap();
    assert_eq!(answer, Icmpv6Repr::EchoReply { ident: 7, seq_no: 9, data });

    send_echo_reply(&mut link, GATEWAY_V4.into(), &[0; 21]);
    assert!(keeper.frame().is_none(), "that was no request");
}

/// A segment from the guest to this address.
fn sent(remote: IpAddr, control: TcpControl, acknowledged: Option<TcpSeqNumber>, payload: &[u8]) -> Vec<u8> {
    let (mut guest, _) = Guest::new(FourTuple { guest_port: 30000, remote: SocketAddr::new(remote, 443) });
    guest.acknowledged = acknowledged;
    guest.packet(control, payload)
}

#[test]
fn a_prohibited_packet_comes_back_as_far_as_it_is_needed() {
    let (mut link, keeper) = link();
    let long = vec![7; 2 * QUOTED];
    let packet = sent(V4.into(), TcpControl::Syn, None, &long);
    send_prohibited(&mut link, V4.into(), &packet);
    let ip_payload = keeper.ip_payload(GATEWAY_V4.into(), IpProtocol::Icmp);
    let message = Icmpv4Packet::new_checked(&ip_payload).unwrap();
    assert!(message.verify_checksum());
    assert_eq!((message.msg_type(), message.msg_code()), (Icmpv4Message::DstUnreachable, 13));
    assert_eq!(ip_payload.len(), 8 + 20 + QUOTED);
    assert_eq!(ip_payload[28..], packet[20..][..QUOTED], "the guest's own header is before it");

    let packet = sent(V6.into(), TcpControl::Syn, None, &long);
    send_prohibited(&mut link, V6.into(), &packet);
    let ip_payload = keeper.ip_payload(GATEWAY_V6.into(), IpProtocol::Icmpv6);
    let message = Icmpv6Packet::new_checked(&ip_payload).unwrap();
    assert!(message.verify_checksum(&GATEWAY_V6, &GUEST_V6));
    assert_eq!((message.msg_type(), message.msg_code()), (Icmpv6Message::DstUnreachable, 1));
    assert_eq!(ip_payload[48..], packet[40..][..QUOTED], "the guest's own header is before it");
}

#[test]
fn a_rejected_segment_is_reset_with_the_sequence_number_that_the_guest_expects() {
    let (mut link, keeper) = link();
    for remote in [IpAddr::V4(V4), IpAddr::V6(V6)] {
        // The guest's segment, and the sequence and acknowledgement numbers of the answer.
        for (control, acknowledged, payload, expected) in [
            (TcpControl::Syn, None, &b""[..], (0, Some(1001))),
            (TcpControl::Fin, None, b"data", (0, Some(1005))),
            (TcpControl::None, Some(TcpSeqNumber(7000)), b"data", (7000, None)),
        ] {
            let packet = sent(remote, control, acknowledged, payload);
            let mut segment = Segment {
                guest_port: 30000,
                remote: SocketAddr::new(remote, 443),
                opens: false,
                resets: false,
                packet: &packet,
            };
            send_reset(&mut link, &segment);
            let ip_payload = keeper.ip_payload(remote, IpProtocol::Tcp);
            let answer = TcpPacket::new_checked(&ip_payload).unwrap();
            let guest = if remote.is_ipv4() { IpAddress::Ipv4(GUEST_V4) } else { IpAddress::Ipv6(GUEST_V6) };
            assert!(answer.rst() && answer.verify_checksum(&remote.into(), &guest));
            assert_eq!((answer.src_port(), answer.dst_port()), (443, 30000));
            let acknowledges = answer.ack().then(|| answer.ack_number().0);
            assert_eq!((answer.seq_number().0, acknowledges), expected, "{control:?}");
            segment.resets = true;
            send_reset(&mut link, &segment);
            assert!(keeper.frame().is_none(), "a reset is not answered");
        }
    }
}

#[test]
fn a_datagram_has_its_ports_and_a_checksum() {
    let (mut link, keeper) = link();
    for (remote, guest) in
        [(IpAddr::V4(V4), IpAddress::Ipv4(GUEST_V4)), (IpAddr::V6(V6), IpAddress::Ipv6(GUEST_V6))]
    {
        send_datagram(&mut link, SocketAddr::new(remote, 53), 30000, b"payload");
        let ip_payload = keeper.ip_payload(remote, IpProtocol::Udp);
        let udp = UdpPacket::new_checked(&ip_payload).unwrap();
        assert!(udp.checksum() != 0 && udp.verify_checksum(&remote.into(), &guest));
        assert_eq!((udp.src_port(), udp.dst_port(), udp.payload()), (53, 30000, &b"payload"[..]));
    }
}
