//! Frames of a guest, against a whole gateway that may reach nothing: it neither panics, nor ends, nor dials, and what it sends
//! to the guest is a frame to the guest.
#![no_main]

use std::os::fd::OwnedFd;

use bathy_fuzz::Input;
use bathy_gateway::Gateway;
use bathy_protocol::network::{
    GATEWAY_MAC, GATEWAY_V4, GATEWAY_V6, GUEST_MAC, GUEST_V4, GUEST_V6, GatewayLaunch, NetworkLimits,
};
use libfuzzer_sys::fuzz_target;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

/// Nothing is allowed, so nothing is ever dialled.
const POLICIES: &str = r#"{"ceilings":[],"own":{"preset":"allow-list"}}"#;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let (control, _owner) = pair();
    let (link, keeper) = pair();
    let launch = GatewayLaunch {
        policies: POLICIES.to_owned(),
        resolvers: Vec::new(),
        limits: NetworkLimits::default(),
        ports: Vec::new(),
        cure: String::new(),
    };
    let mut gateway = Gateway::new(launch, control, link, Vec::new()).expect("it can be made");
    for _ in 0..64 {
        let (shape, length) = (input.u8(), usize::from(input.u8()));
        let bytes = input.take(length);
        if bytes.is_empty() && length > 0 {
            break;
        }
        let frame = frame(shape, bytes);
        if !frame.is_empty() {
            let _ = send(&keeper, &frame, SendFlags::DONTWAIT);
        }
        assert!(gateway.step(false).expect("it can wait"), "it serves on");
        let mut answer = [0; 70000];
        while let Ok((count, _)) = recv(&keeper, &mut answer, RecvFlags::DONTWAIT) {
            assert!(count >= 14, "a frame");
            assert_eq!(answer[..6], GUEST_MAC);
            assert_eq!(answer[6..12], GATEWAY_MAC);
        }
    }
});

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("sockets can be had")
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
            header.extend(if to_gateway { GATEWAY_V4.octets() } else { [93, 184, 215, 14] });
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
