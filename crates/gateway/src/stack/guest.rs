//! The guest's end of one connection, segment by segment, for tests.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use bathy_protocol::network::{FRAME_HEADER, GATEWAY_MAC, GUEST_MAC, GUEST_V4, GUEST_V6, MAX_FRAME};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair, sockopt,
};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    IpAddress, IpProtocol, Ipv4Packet, Ipv4Repr, Ipv6Packet, Ipv6Repr, TcpControl, TcpPacket, TcpRepr,
    TcpSeqNumber,
};

use super::{FourTuple, IPV4_HEADER, IPV6_HEADER};
use crate::link::Link;

const BUFFER: usize = 1 << 20;
const SCALE: u8 = 7;

/// Sends without waiting, and records what it receives.
pub(crate) struct Guest {
    link: OwnedFd,
    tuple: FourTuple,
    pub(crate) next: TcpSeqNumber,
    pub(crate) acknowledged: Option<TcpSeqNumber>,
    /// The received payload, in order.
    pub(crate) received: Vec<u8>,
    /// The longest payload of a segment.
    pub(crate) longest: usize,
}

impl Guest {
    /// A guest that has sent nothing yet, and the gateway's end of its link.
    pub(crate) fn new(tuple: FourTuple) -> (Self, Link) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (link, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        sockopt::set_socket_send_buffer_size(&other, BUFFER).unwrap();
        (Self::over(link, tuple), Link::new(other))
    }

    /// A guest at this end of a link.
    pub(crate) fn over(link: OwnedFd, tuple: FourTuple) -> Self {
        Self { link, tuple, next: TcpSeqNumber(1000), acknowledged: None, received: Vec::new(), longest: 0 }
    }

    /// Sends an IPv4 packet over its link.
    pub(crate) fn send(&self, packet: &[u8]) {
        let frame = [&GATEWAY_MAC[..], &GUEST_MAC, &[8, 0], packet].concat();
        send(&self.link, &frame, SendFlags::empty()).unwrap();
    }

    pub(crate) fn syn(&mut self) -> Vec<u8> {
        self.packet(TcpControl::Syn, &[])
    }

    pub(crate) fn ack(&mut self) -> Vec<u8> {
        self.packet(TcpControl::None, &[])
    }

    pub(crate) fn fin(&mut self) -> Vec<u8> {
        self.packet(TcpControl::Fin, &[])
    }

    /// The next packet of the connection.
    pub(crate) fn packet(&mut self, control: TcpControl, payload: &[u8]) -> Vec<u8> {
        let is_syn = control == TcpControl::Syn;
        let segment = TcpRepr {
            src_port: self.tuple.guest_port,
            dst_port: self.tuple.remote.port(),
            control,
            seq_number: self.next,
            ack_number: self.acknowledged,
            window_len: u16::MAX,
            window_scale: is_syn.then_some(SCALE),
            max_seg_size: is_syn.then_some(65500),
            sack_permitted: false,
            sack_ranges: [None; 3],
            timestamp: None,
            payload,
        };
        self.next += payload.len() + usize::from(matches!(control, TcpControl::Syn | TcpControl::Fin));
        let (source, to) = self.addresses();
        let sums = ChecksumCapabilities::default();
        let mut bytes = vec![0; segment.buffer_len()];
        segment.emit(&mut TcpPacket::new_unchecked(&mut bytes), &source, &to, &sums);
        let (payload_len, next_header, hop_limit) = (bytes.len(), IpProtocol::Tcp, 64);
        let mut header = vec![0; self.header()];
        match self.tuple.remote.ip() {
            IpAddr::V4(dst_addr) => {
                let ip = Ipv4Repr { src_addr: GUEST_V4, dst_addr, next_header, payload_len, hop_limit };
                ip.emit(&mut Ipv4Packet::new_unchecked(&mut header), &sums);
            }
            IpAddr::V6(dst_addr) => {
                let ip = Ipv6Repr { src_addr: GUEST_V6, dst_addr, next_header, payload_len, hop_limit };
                ip.emit(&mut Ipv6Packet::new_unchecked(&mut header));
            }
        }
        [header, bytes].concat()
    }

    /// The segments that came since the last call.
    pub(crate) fn segments(&mut self) -> Vec<TcpPacket<Vec<u8>>> {
        let mut frame = vec![0; MAX_FRAME];
        let mut segments = Vec::new();
        while let Ok((count, _)) = recv(&self.link, &mut frame, RecvFlags::empty()) {
            let (header, bytes) = frame[FRAME_HEADER..count].split_at(self.header());
            let segment = TcpPacket::new_checked(bytes.to_vec()).unwrap();
            let (guest, other) = self.addresses();
            assert!(
                segment.verify_checksum(&other, &guest),
                "sums are right for guests that pass packets on"
            );
            assert!(self.tuple.remote.is_ipv6() || Ipv4Packet::new_unchecked(header).verify_checksum());
            let payload = bytes.get(segment.header_len().into()..).unwrap_or_default();
            self.longest = self.longest.max(payload.len());
            if segment.syn() {
                self.acknowledged = Some(segment.seq_number() + 1);
            } else if self.acknowledged == Some(segment.seq_number()) {
                self.received.extend(payload);
                self.acknowledged = Some(segment.seq_number() + payload.len() + usize::from(segment.fin()));
            }
            segments.push(segment);
        }
        segments
    }

    fn addresses(&self) -> (IpAddress, IpAddress) {
        match self.tuple.remote.ip() {
            IpAddr::V4(other) => (IpAddress::Ipv4(GUEST_V4), IpAddress::Ipv4(other)),
            IpAddr::V6(other) => (IpAddress::Ipv6(GUEST_V6), IpAddress::Ipv6(other)),
        }
    }

    fn header(&self) -> usize {
        if self.tuple.remote.is_ipv4() { IPV4_HEADER } else { IPV6_HEADER }
    }
}
