//! Frames of a guest, against a whole gateway that may reach nothing, while time passes: it neither panics, nor ends, nor
//! dials, and what it sends to the guest is a frame to the guest.
#![no_main]

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Once;
use std::time::Duration;

use bathy_fuzz::Input;
use bathy_gateway::Gateway;
use bathy_protocol::network::{
    GATEWAY_MAC, GATEWAY_V4, GATEWAY_V6, GUEST_MAC, GUEST_V4, GUEST_V6, GatewayLaunch, NetworkLimits,
};
use libfuzzer_sys::fuzz_target;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

/// A connection to this one request is answered by the gateway itself, and dialed only once the request was allowed. The fuzzer
/// has no network to connect to.
const POLICIES: &str = r#"{"ceilings":[],"own":{"preset":"allow-list","rules":[
    "allow GET http://93.184.215.14/status", "allow GET http://[2606:2800::1]/status"]}}"#;
const SITE: Ipv4Addr = Ipv4Addr::new(93, 184, 215, 14);
const HTTP_PORT: u16 = 80;
const IPV4: u8 = 4;
const IPV6: u8 = 6;
const MOST_STEPS: usize = 64;
const SYN: u8 = 2;
const ACK: u8 = 16;

fuzz_target!(|data: &[u8]| {
    check_network();
    let mut input = Input::new(data);
    let (control, _owner) = pair();
    let (link, keeper) = pair();
    let launch = GatewayLaunch {
        policies: POLICIES.to_owned(),
        resolvers: Vec::new(),
        limits: NetworkLimits::default(),
        ports: Vec::new(),
        allow_command: String::new(),
        spent: None,
        own: Vec::new(),
    };
    let mut gateway = Gateway::new(launch, control, link, Vec::new()).expect("it can be made");
    let mut clients = [Client::new(1001, IPV4), Client::new(1002, IPV6)];
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        let frames = match input.u8() % 8 {
            0..4 => {
                let (shape, length) = (input.u8(), usize::from(input.u8()));
                vec![frame(shape, input.take(length))]
            }
            4 => {
                gateway.pass(Duration::from_millis(
                    input.choose(&[1, 20, 300, 1100, 3000, 9000, 31000, 121_000]),
                ));
                Vec::new()
            }
            _ => {
                let client = usize::from(input.u8() & 1);
                clients[client].act(&mut input)
            }
        };
        for frame in frames.iter().filter(|frame| !frame.is_empty()) {
            let _ = send(&keeper, frame, SendFlags::DONTWAIT);
            step(&mut gateway, &keeper, &mut clients);
        }
        step(&mut gateway, &keeper, &mut clients);
    }
});

/// Refuses to run where a gateway could reach something.
fn check_network() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a socket can be had");
        // This only looks for a route.
        let result = socket.connect((SITE, HTTP_PORT));
        assert!(result.is_err(), "there is a network; fuzz/run.sh starts it without one");
    });
}

fn step(gateway: &mut Gateway, keeper: &OwnedFd, clients: &mut [Client]) {
    assert!(gateway.step(false).expect("it can wait"), "it serves on");
    let mut answer = [0; 70000];
    while let Ok((count, _)) = recv(keeper, &mut answer, RecvFlags::DONTWAIT) {
        assert!(count >= 14, "a frame");
        assert_eq!(answer[..6], GUEST_MAC);
        assert_eq!(answer[6..12], GATEWAY_MAC);
        for client in &mut *clients {
            client.take(&answer[14..count]);
        }
    }
}

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("sockets can be had")
}

/// The guest's side of a connection. It knows the numbers, and need not keep to them.
struct Client {
    port: u16,
    shape: u8,
    /// The first number that it did not use yet.
    next: u32,
    /// What the gateway sent up to here.
    came: u32,
}

impl Client {
    fn new(port: u16, shape: u8) -> Self {
        Self { port, shape, next: 1000, came: 0 }
    }

    /// Segments with numbers that fit, or nearly so.
    fn act(&mut self, input: &mut Input<'_>) -> Vec<Vec<u8>> {
        let flags =
            input.choose(&[SYN, ACK, ACK, ACK, ACK | 8, ACK | 1, 4, ACK | 4, SYN | ACK, ACK | 32, 0, 255]);
        let first = match input.u8() % 8 {
            0..4 => self.next,
            4 => self.next.wrapping_add(1),
            5 => self.next.wrapping_sub(1),
            6 => self.next.wrapping_add_signed(i32::from(input.u16().cast_signed()) * 16),
            _ => input.u32(),
        };
        let came = self.came.wrapping_add(input.choose(&[0, 0, 0, 0, 1, u32::MAX]));
        let length = input.choose(&[0, 0, 1, 7, 1460, 32768, 65000, 65000]);
        let count = input.choose(&[1, 1, 1, 2, 4, 16]);
        let scale = input.u8();
        let mut at = first;
        let mut frames = Vec::new();
        for _ in 0..count {
            frames.push(frame(self.shape, &self.segment(flags, at, came, length, scale)));
            at = at.wrapping_add(u32::try_from(length).expect("a short one") + u32::from(flags & SYN != 0));
        }
        if flags & SYN != 0 {
            self.next = at;
        }
        frames
    }

    fn segment(&self, flags: u8, first: u32, came: u32, length: usize, scale: u8) -> Vec<u8> {
        let options: &[u8] = match scale {
            _ if flags & SYN == 0 => &[],
            0..32 => &[],
            32..64 => &[2, 4, 0, 1],
            _ => &[3, 3, 7, 1],
        };
        let words = u8::try_from((20 + options.len()) / 4).expect("a short header");
        let mut bytes = [self.port.to_be_bytes(), HTTP_PORT.to_be_bytes()].concat();
        bytes.extend(first.to_be_bytes());
        bytes.extend(came.to_be_bytes());
        bytes.extend([words << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
        bytes.extend(options);
        bytes.resize(bytes.len() + length, b'A');
        bytes
    }

    /// What came up to now, if this packet is of this connection.
    fn take(&mut self, packet: &[u8]) {
        let header = if self.shape == IPV4 { 20 } else { 40 };
        let Some(segment) = packet.get(header..).filter(|segment| segment.len() >= 20) else { return };
        let is_ours = packet[0] >> 4 == self.shape && segment[2..4] == self.port.to_be_bytes();
        if is_ours && segment[13] & 4 == 0 {
            let number = u32::from_be_bytes([segment[4], segment[5], segment[6], segment[7]]);
            let carried = segment.len() - usize::from(segment[12] >> 4) * 4;
            let flags = u32::from(segment[13] & SYN != 0) + u32::from(segment[13] & 1 != 0);
            self.came = number.wrapping_add(u32::try_from(carried).expect("a frame")).wrapping_add(flags);
        }
    }
}

/// As it is, or behind headers that are in order, so that what they carry is reached.
fn frame(shape: u8, bytes: &[u8]) -> Vec<u8> {
    let protocol = [6, 17, 1, 58][usize::from(shape >> 6)];
    let to_gateway = shape & 8 != 0;
    let ethernet = |kind: u16| [&GATEWAY_MAC[..], &GUEST_MAC, &kind.to_be_bytes()].concat();
    let length = u16::try_from(bytes.len()).unwrap_or(0);
    match shape & 7 {
        0 => bytes.to_vec(),
        1 => [ethernet(0x806), bytes.to_vec()].concat(),
        2 => [ethernet(0x800), bytes.to_vec()].concat(),
        3 => [ethernet(0x86dd), bytes.to_vec()].concat(),
        4 | 5 => {
            let mut header = vec![0x45, 0];
            header.extend((20 + length).to_be_bytes());
            header.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
            header.extend(GUEST_V4.octets());
            header.extend(if to_gateway { GATEWAY_V4.octets() } else { SITE.octets() });
            let sum: u32 = header.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
            let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap_or(0);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            [ethernet(0x800), header, bytes.to_vec()].concat()
        }
        _ => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(length.to_be_bytes());
            header.extend([protocol, 255]);
            header.extend(GUEST_V6.octets());
            let public = [0x26, 0x06, 0x28, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
            header.extend(if to_gateway { GATEWAY_V6.octets() } else { public });
            [ethernet(0x86dd), header, bytes.to_vec()].concat()
        }
    }
}
