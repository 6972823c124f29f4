//! Parses the guest's frames. Every frame is hostile: what is not plainly one of the few kinds that the link
//! carries is dropped, with a reason.

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use bathy_protocol::network::{
    FRAME_HEADER, GATEWAY_MAC, GATEWAY_V4, GATEWAY_V6, GUEST_MAC, GUEST_V4, GUEST_V6,
};
use smoltcp::wire::{
    ArpOperation, ArpPacket, EthernetAddress, EthernetFrame, EthernetProtocol, Icmpv4Message, Icmpv4Packet,
    Icmpv6Message, Icmpv6Packet, IpProtocol, Ipv4Packet, Ipv6Packet, TcpPacket, UdpPacket,
};

const VLAN: u16 = 0x8100;
const VLAN_OUTER: u16 = 0x88a8;
const IPV4_HEADER: u8 = 20;
const IPV6_HEADER: usize = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DropReason {
    /// Lengths, checksums or versions that contradict each other.
    Malformed,
    /// The source MAC address is not the guest's.
    ForeignMac,
    /// The source IP address is not the guest's.
    ForeignAddress,
    /// The destination MAC address is not on the link.
    UnknownMac,
    /// The frame has a VLAN tag.
    Vlan,
    UnknownEtherType,
    /// IP options or IPv6 extension headers.
    Options,
    /// A fragment of an IP packet.
    Fragment,
    /// The destination is a multicast or broadcast address.
    Multicast,
    /// Source or destination port 0.
    NoPort,
    /// A control message that only a router sends, or that has no meaning on this link.
    Announcement,
}

impl DropReason {
    /// Whether every guest sends such frames, so that they are not worth an event.
    pub fn is_usual(self) -> bool {
        matches!(self, Self::Multicast | Self::Announcement)
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Malformed => "malformed",
            Self::ForeignMac => "from a foreign MAC address",
            Self::ForeignAddress => "from a foreign IP address",
            Self::UnknownMac => "to an unknown MAC address",
            Self::Vlan => "with a VLAN tag",
            Self::UnknownEtherType => "neither IP nor ARP",
            Self::Options => "with IP options or extension headers",
            Self::Fragment => "fragments",
            Self::Multicast => "multicast or broadcast",
            Self::NoPort => "without a port",
            Self::Announcement => "router announcements",
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    pub guest_port: u16,
    /// The destination address and port.
    pub remote: SocketAddr,
    /// A SYN without ACK, RST or FIN.
    pub opens: bool,
    pub resets: bool,
    pub packet: &'a [u8],
}

impl Segment<'_> {
    /// The packet without its payload, to be kept while the destination is dialed. The guest retransmits data that
    /// it sent with the SYN.
    pub fn without_payload(&self) -> Vec<u8> {
        let header = if self.remote.is_ipv4() { usize::from(IPV4_HEADER) } else { IPV6_HEADER };
        let tcp = self.packet.get(header..).and_then(|payload| TcpPacket::new_checked(payload).ok());
        let end = header + tcp.map_or(0, |tcp| usize::from(tcp.header_len()));
        let mut packet = self.packet.get(..end).unwrap_or_default().to_vec();
        if self.remote.is_ipv4() {
            Ipv4Packet::new_unchecked(&mut packet).set_total_len(u16::try_from(end).unwrap_or(0));
        } else {
            Ipv6Packet::new_unchecked(&mut packet).set_payload_len(u16::try_from(end - header).unwrap_or(0));
        }
        packet
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    pub guest_port: u16,
    /// The destination address and port.
    pub remote: SocketAddr,
    pub payload: &'a [u8],
    pub packet: &'a [u8],
}

/// A packet that the gateway handles.
#[derive(Clone, Copy, Debug)]
pub enum GuestPacket<'a> {
    /// A request for the gateway's MAC address.
    ArpRequest,
    /// The same over IPv6; the answer goes to this address.
    NeighborSolicit(Ipv6Addr),
    /// An ICMP echo request.
    Echo {
        /// The destination address of the request.
        remote: IpAddr,
        packet: &'a [u8],
    },
    Tcp(Segment<'a>),
    Udp(Datagram<'a>),
    /// Any other IP protocol, which is rejected.
    Other {
        /// The destination address of the packet.
        remote: IpAddr,
        /// The IP protocol number.
        protocol: u8,
        packet: &'a [u8],
    },
}

/// Parses a frame of the guest.
///
/// # Errors
/// When the frame is dropped.
pub fn parse(frame: &[u8]) -> Result<GuestPacket<'_>, DropReason> {
    let ethernet = EthernetFrame::new_checked(frame).map_err(|_| DropReason::Malformed)?;
    if ethernet.src_addr() != EthernetAddress(GUEST_MAC) {
        return Err(DropReason::ForeignMac);
    }
    let to = ethernet.dst_addr();
    if to != EthernetAddress(GATEWAY_MAC) && !to.is_broadcast() && !to.is_multicast() {
        return Err(DropReason::UnknownMac);
    }
    let rest = frame.get(FRAME_HEADER..).unwrap_or_default();
    match ethernet.ethertype() {
        EthernetProtocol::Ipv4 => parse_v4(rest),
        EthernetProtocol::Ipv6 => parse_v6(rest),
        EthernetProtocol::Arp => parse_arp(rest),
        EthernetProtocol::Unknown(VLAN | VLAN_OUTER) => Err(DropReason::Vlan),
        EthernetProtocol::Unknown(_) => Err(DropReason::UnknownEtherType),
    }
}

fn parse_arp(rest: &[u8]) -> Result<GuestPacket<'_>, DropReason> {
    let arp = ArpPacket::new_checked(rest).map_err(|_| DropReason::Malformed)?;
    if arp.protocol_len() != 4 || arp.hardware_len() != 6 || arp.operation() != ArpOperation::Request {
        return Err(DropReason::Announcement);
    }
    if arp.source_hardware_addr() != GUEST_MAC {
        return Err(DropReason::ForeignMac);
    }
    // An ARP probe has no source address.
    if arp.source_protocol_addr() != GUEST_V4.octets() && arp.source_protocol_addr() != [0; 4] {
        return Err(DropReason::ForeignAddress);
    }
    if arp.target_protocol_addr() == GATEWAY_V4.octets() {
        Ok(GuestPacket::ArpRequest)
    } else {
        Err(DropReason::Announcement)
    }
}

fn parse_v4(rest: &[u8]) -> Result<GuestPacket<'_>, DropReason> {
    let ip = Ipv4Packet::new_checked(rest).map_err(|_| DropReason::Malformed)?;
    if ip.version() != 4 || !ip.verify_checksum() {
        return Err(DropReason::Malformed);
    }
    if ip.header_len() != IPV4_HEADER {
        return Err(DropReason::Options);
    }
    if ip.src_addr() != GUEST_V4 {
        return Err(DropReason::ForeignAddress);
    }
    if ip.more_frags() || ip.frag_offset() != 0 {
        return Err(DropReason::Fragment);
    }
    if ip.dst_addr().is_multicast() || ip.dst_addr().is_broadcast() {
        return Err(DropReason::Multicast);
    }
    let packet = rest.get(..usize::from(ip.total_len())).ok_or(DropReason::Malformed)?;
    let payload = packet.get(usize::from(IPV4_HEADER)..).ok_or(DropReason::Malformed)?;
    let remote = IpAddr::V4(ip.dst_addr());
    match ip.next_header() {
        IpProtocol::Tcp => parse_tcp(remote, payload, packet),
        IpProtocol::Udp => parse_udp(remote, payload, packet),
        IpProtocol::Icmp => {
            let icmp = Icmpv4Packet::new_checked(payload).map_err(|_| DropReason::Malformed)?;
            match icmp.msg_type() {
                Icmpv4Message::EchoRequest => Ok(GuestPacket::Echo { remote, packet }),
                _ => Err(DropReason::Announcement),
            }
        }
        IpProtocol::Igmp => Err(DropReason::Multicast),
        other => Ok(GuestPacket::Other { remote, protocol: other.into(), packet }),
    }
}

fn parse_v6(rest: &[u8]) -> Result<GuestPacket<'_>, DropReason> {
    let ip = Ipv6Packet::new_checked(rest).map_err(|_| DropReason::Malformed)?;
    if ip.version() != 6 {
        return Err(DropReason::Malformed);
    }
    let packet = rest.get(..ip.total_len()).ok_or(DropReason::Malformed)?;
    let payload = packet.get(IPV6_HEADER..).ok_or(DropReason::Malformed)?;
    if ip.next_header() == IpProtocol::Icmpv6 {
        let icmp = Icmpv6Packet::new_checked(payload).map_err(|_| DropReason::Malformed)?;
        if icmp.msg_type() == Icmpv6Message::NeighborSolicit {
            return parse_solicitation(ip.src_addr(), &icmp);
        }
    }
    if ip.dst_addr().is_multicast() {
        return Err(DropReason::Multicast);
    }
    if ip.src_addr() != GUEST_V6 {
        return Err(DropReason::ForeignAddress);
    }
    let remote = IpAddr::V6(ip.dst_addr());
    match ip.next_header() {
        IpProtocol::Tcp => parse_tcp(remote, payload, packet),
        IpProtocol::Udp => parse_udp(remote, payload, packet),
        IpProtocol::Icmpv6 => {
            let icmp = Icmpv6Packet::new_checked(payload).map_err(|_| DropReason::Malformed)?;
            match icmp.msg_type() {
                Icmpv6Message::EchoRequest => Ok(GuestPacket::Echo { remote, packet }),
                _ => Err(DropReason::Announcement),
            }
        }
        IpProtocol::Ipv6Frag => Err(DropReason::Fragment),
        IpProtocol::HopByHop | IpProtocol::Ipv6Route | IpProtocol::Ipv6Opts | IpProtocol::Ipv6NoNxt => {
            Err(DropReason::Options)
        }
        other => Ok(GuestPacket::Other { remote, protocol: other.into(), packet }),
    }
}

fn parse_solicitation<'a>(from: Ipv6Addr, icmp: &Icmpv6Packet<&[u8]>) -> Result<GuestPacket<'a>, DropReason> {
    // Duplicate address detection has no source, and no answer means that the address is free.
    if from.is_unspecified() || icmp.target_addr() != GATEWAY_V6 {
        return Err(DropReason::Announcement);
    }
    if from == GUEST_V6 || from == guest_link_local() {
        Ok(GuestPacket::NeighborSolicit(from))
    } else {
        Err(DropReason::ForeignAddress)
    }
}

/// The link-local address that the guest's kernel derives from its MAC address.
pub fn guest_link_local() -> Ipv6Addr {
    let [a, b, c, d, e, f] = GUEST_MAC;
    let mut octets = [0; 16];
    octets[..2].copy_from_slice(&[0xfe, 0x80]);
    octets[8..].copy_from_slice(&[a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
    Ipv6Addr::from(octets)
}

fn parse_tcp<'a>(remote: IpAddr, payload: &'a [u8], packet: &'a [u8]) -> Result<GuestPacket<'a>, DropReason> {
    let tcp = TcpPacket::new_checked(payload).map_err(|_| DropReason::Malformed)?;
    if tcp.src_port() == 0 || tcp.dst_port() == 0 {
        return Err(DropReason::NoPort);
    }
    Ok(GuestPacket::Tcp(Segment {
        guest_port: tcp.src_port(),
        remote: SocketAddr::new(remote, tcp.dst_port()),
        opens: tcp.syn() && !tcp.ack() && !tcp.rst() && !tcp.fin(),
        resets: tcp.rst(),
        packet,
    }))
}

fn parse_udp<'a>(remote: IpAddr, payload: &'a [u8], packet: &'a [u8]) -> Result<GuestPacket<'a>, DropReason> {
    let udp = UdpPacket::new_checked(payload).map_err(|_| DropReason::Malformed)?;
    if udp.src_port() == 0 || udp.dst_port() == 0 {
        return Err(DropReason::NoPort);
    }
    let payload = payload.get(8..usize::from(udp.len())).ok_or(DropReason::Malformed)?;
    Ok(GuestPacket::Udp(Datagram {
        guest_port: udp.src_port(),
        remote: SocketAddr::new(remote, udp.dst_port()),
        payload,
        packet,
    }))
}
