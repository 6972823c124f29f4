//! Packets that the gateway itself sends: ARP and neighbour replies, rejections, datagrams.

#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use bathy_protocol::network::{GATEWAY_MAC, GATEWAY_V4, GATEWAY_V6, GUEST_MAC, GUEST_V4, GUEST_V6};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpOperation, ArpRepr, EthernetAddress, Icmpv4DstUnreachable, Icmpv4Packet, Icmpv4Repr,
    Icmpv6DstUnreachable, Icmpv6Packet, Icmpv6Repr, IpAddress, IpProtocol, IpRepr, Ipv4Packet, Ipv4Repr,
    Ipv6Packet, Ipv6Repr, NdiscNeighborFlags, NdiscRepr, RawHardwareAddress, TcpControl, TcpPacket, TcpRepr,
    TcpSeqNumber, UdpPacket, UdpRepr,
};

use crate::frame::Segment;
use crate::link::{EtherType, Link};

const HOPS: u8 = 64;
/// Neighbour messages with any other hop limit are ignored, because they were routed (RFC 4861).
const NEIGHBOUR_HOPS: u8 = 255;
/// How much of a rejected packet is quoted, so that the guest can match it to a connection.
const QUOTED: usize = 512;
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;

fn checksums() -> ChecksumCapabilities {
    ChecksumCapabilities::default()
}

fn guest(remote: IpAddr) -> IpAddr {
    if remote.is_ipv4() { GUEST_V4.into() } else { GUEST_V6.into() }
}

fn send_ip(
    link: &mut Link,
    remote: IpAddr,
    protocol: IpProtocol,
    length: usize,
    fill: impl FnOnce(&mut [u8]),
) {
    let (from, to) = (IpAddress::from(remote), IpAddress::from(guest(remote)));
    let ip = IpRepr::new(from, to, protocol, length, HOPS);
    link.send(EtherType::of(remote), ip.buffer_len(), |packet| {
        ip.emit(&mut *packet, &checksums());
        fill(packet.get_mut(ip.header_len()..).unwrap_or_default());
    });
}

/// Answers an ARP request for the gateway's MAC address.
pub fn send_arp_reply(link: &mut Link) {
    let arp = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: EthernetAddress(GATEWAY_MAC),
        source_protocol_addr: GATEWAY_V4,
        target_hardware_addr: EthernetAddress(GUEST_MAC),
        target_protocol_addr: GUEST_V4,
    };
    link.send(EtherType::Arp, arp.buffer_len(), |packet| {
        arp.emit(&mut smoltcp::wire::ArpPacket::new_unchecked(packet));
    });
}

/// Answers a neighbour solicitation for the gateway's MAC address.
pub fn send_neighbor_advert(link: &mut Link, to: Ipv6Addr) {
    let advert = Icmpv6Repr::Ndisc(NdiscRepr::NeighborAdvert {
        flags: NdiscNeighborFlags::ROUTER | NdiscNeighborFlags::SOLICITED | NdiscNeighborFlags::OVERRIDE,
        target_addr: GATEWAY_V6,
        lladdr: Some(RawHardwareAddress::from_bytes(&GATEWAY_MAC)),
    });
    let ip = Ipv6Repr {
        src_addr: GATEWAY_V6,
        dst_addr: to,
        next_header: IpProtocol::Icmpv6,
        payload_len: advert.buffer_len(),
        hop_limit: NEIGHBOUR_HOPS,
    };
    link.send(EtherType::V6, ip.buffer_len() + advert.buffer_len(), |packet| {
        ip.emit(&mut Ipv6Packet::new_unchecked(&mut *packet));
        let ip_payload = packet.get_mut(IPV6_HEADER..).unwrap_or_default();
        advert.emit(&GATEWAY_V6, &to, &mut Icmpv6Packet::new_unchecked(ip_payload), &checksums());
    });
}

/// Answers an echo request to the gateway itself.
pub fn send_echo_reply(link: &mut Link, remote: IpAddr, packet: &[u8]) {
    match remote {
        IpAddr::V4(_) => {
            let ip_payload = packet.get(IPV4_HEADER..).unwrap_or_default();
            let Ok(request) = Icmpv4Packet::new_checked(ip_payload) else { return };
            let answer = Icmpv4Repr::EchoReply {
                ident: request.echo_ident(),
                seq_no: request.echo_seq_no(),
                data: request.data(),
            };
            send_ip(link, remote, IpProtocol::Icmp, answer.buffer_len(), |buffer| {
                answer.emit(&mut Icmpv4Packet::new_unchecked(buffer), &checksums());
            });
        }
        IpAddr::V6(_) => {
            let ip_payload = packet.get(IPV6_HEADER..).unwrap_or_default();
            let Ok(request) = Icmpv6Packet::new_checked(ip_payload) else { return };
            let answer = Icmpv6Repr::EchoReply {
                ident: request.echo_ident(),
                seq_no: request.echo_seq_no(),
                data: request.payload(),
            };
            send_ip(link, remote, IpProtocol::Icmpv6, answer.buffer_len(), |buffer| {
                answer.emit(&GATEWAY_V6, &GUEST_V6, &mut Icmpv6Packet::new_unchecked(buffer), &checksums());
            });
        }
    }
}

/// Rejects a packet with an ICMP error: administratively prohibited.
pub fn send_prohibited(link: &mut Link, remote: IpAddr, packet: &[u8]) {
    let quoted = |header: usize| {
        packet.get(header..).map(|rest| rest.get(..QUOTED).unwrap_or(rest)).unwrap_or_default()
    };
    match remote {
        IpAddr::V4(_) => {
            let Ok(ip) = Ipv4Packet::new_checked(packet) else { return };
            let header = Ipv4Repr {
                src_addr: ip.src_addr(),
                dst_addr: ip.dst_addr(),
                next_header: ip.next_header(),
                payload_len: packet.len().saturating_sub(IPV4_HEADER),
                hop_limit: ip.hop_limit(),
            };
            let message = Icmpv4Repr::DstUnreachable {
                reason: Icmpv4DstUnreachable::CommProhibited,
                header,
                data: quoted(IPV4_HEADER),
            };
            send_ip(link, GATEWAY_V4.into(), IpProtocol::Icmp, message.buffer_len(), |buffer| {
                message.emit(&mut Icmpv4Packet::new_unchecked(buffer), &checksums());
            });
        }
        IpAddr::V6(_) => {
            let Ok(ip) = Ipv6Packet::new_checked(packet) else { return };
            let header = Ipv6Repr {
                src_addr: ip.src_addr(),
                dst_addr: ip.dst_addr(),
                next_header: ip.next_header(),
                payload_len: packet.len().saturating_sub(IPV6_HEADER),
                hop_limit: ip.hop_limit(),
            };
            let message = Icmpv6Repr::DstUnreachable {
                reason: Icmpv6DstUnreachable::AdminProhibit,
                header,
                data: quoted(IPV6_HEADER),
            };
            send_ip(link, GATEWAY_V6.into(), IpProtocol::Icmpv6, message.buffer_len(), |buffer| {
                message.emit(&GATEWAY_V6, &GUEST_V6, &mut Icmpv6Packet::new_unchecked(buffer), &checksums());
            });
        }
    }
}

/// Rejects a segment with a TCP reset, so that the client fails at once instead of timing out.
pub fn send_reset(link: &mut Link, segment: &Segment<'_>) {
    if segment.resets {
        return;
    }
    let header = if segment.remote.is_ipv4() { IPV4_HEADER } else { IPV6_HEADER };
    let Some(tcp) =
        segment.packet.get(header..).and_then(|ip_payload| TcpPacket::new_checked(ip_payload).ok())
    else {
        return;
    };
    // RFC 9293: the sequence number is the acknowledged one; without an ACK, the segment itself is acknowledged.
    let (seq_number, ack_number) = if tcp.ack() {
        (tcp.ack_number(), None)
    } else {
        (TcpSeqNumber(0), Some(tcp.seq_number() + tcp.segment_len()))
    };
    let answer = TcpRepr {
        src_port: segment.remote.port(),
        dst_port: segment.guest_port,
        control: TcpControl::Rst,
        seq_number,
        ack_number,
        window_len: 0,
        window_scale: None,
        max_seg_size: None,
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let remote = segment.remote.ip();
    let (from, to) = (IpAddress::from(remote), IpAddress::from(guest(remote)));
    send_ip(link, remote, IpProtocol::Tcp, answer.buffer_len(), |buffer| {
        answer.emit(&mut TcpPacket::new_unchecked(buffer), &from, &to, &checksums());
    });
}

/// Sends a UDP datagram to a port of the guest.
pub fn send_datagram(link: &mut Link, remote: SocketAddr, guest_port: u16, payload: &[u8]) {
    let udp = UdpRepr { src_port: remote.port(), dst_port: guest_port };
    let address = remote.ip();
    let (from, to) = (IpAddress::from(address), IpAddress::from(guest(address)));
    send_ip(link, address, IpProtocol::Udp, udp.header_len() + payload.len(), |buffer| {
        let mut packet = UdpPacket::new_unchecked(buffer);
        udp.emit(
            &mut packet,
            &from,
            &to,
            payload.len(),
            |buffer_size| buffer_size.copy_from_slice(payload),
            &checksums(),
        );
    });
}
