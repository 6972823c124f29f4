//! Valid and invalid headers of frames. A frame with an invalid header is dropped and counted by its reason; the guest
//! gets its buffers back, and the next frame passes.

use super::*;
use crate::net::Dropped;

const NEEDS_CSUM: u8 = 1;
const TCPV4: u8 = 1;
const UDP: u8 = 3;
const TCPV6: u8 = 4;
const UDP_L4: u8 = 5;
const ECN: u8 = 0x80;

/// A header as Linux writes it for a TCP segment whose checksum is left to the device.
fn tcp(gso_type: u8) -> [u8; 12] {
    [NEEDS_CSUM, gso_type, 54, 0, 0xb4, 5, 34, 0, 16, 0, 0, 0]
}

fn with_checksum(start: u16, offset: u16) -> [u8; 12] {
    let ([s0, s1], [o0, o1]) = (start.to_le_bytes(), offset.to_le_bytes());
    [NEEDS_CSUM, 0, 0, 0, 0, 0, s0, s1, o0, o1, 0, 0]
}

/// Sends the frame, which has to be dropped, and then one that has to pass; returns the reasons of drops so far.
fn dropped(bench: &mut Bench<'_>, header: [u8; 12], bytes: &[u8]) -> Dropped {
    assert!(!bench.passes(header, bytes), "{header:?} with {} bytes", bytes.len());
    assert!(bench.passes(PLAIN, &frame(60, 9)));
    bench.net.counters().dropped
}

#[test]
fn v9_frame_shorter_than_an_ethernet_header_is_dropped() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for length in 0..14 {
        dropped(&mut bench, PLAIN, &frame(length, 1));
    }
    assert!(bench.passes(PLAIN, &frame(14, 1)));
    assert_eq!(bench.net.counters().dropped, Dropped { short: 14, ..Dropped::default() });
}

#[test]
fn v9_frame_longer_than_the_mtu_is_dropped() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    assert!(bench.passes(PLAIN, &frame(MAX_FRAME_BYTES, 1)));
    for length in [MAX_FRAME_BYTES + 1, MAX_LARGE_FRAME_BYTES, 1 << 20] {
        dropped(&mut bench, PLAIN, &frame(length, 1));
    }
    assert_eq!(bench.net.counters().dropped, Dropped { long: 3, ..Dropped::default() });
}

#[test]
fn v9_frame_to_be_segmented_passes_as_it_is_up_to_the_longest_packet() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for kind in [TCPV4, TCPV6] {
        assert!(bench.passes(tcp(kind), &frame(1000, 1)));
        assert!(bench.passes(tcp(kind), &frame(MAX_LARGE_FRAME_BYTES, 1)));
        dropped(&mut bench, tcp(kind), &frame(MAX_LARGE_FRAME_BYTES + 1, 1));
    }
    assert_eq!(bench.net.counters().dropped, Dropped { long: 2, ..Dropped::default() });
}

#[test]
fn v9_lies_about_lengths_of_headers_and_segments_decide_nothing() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for (header_length, segment) in [(0_u16, 0_u16), (u16::MAX, 1), (1, u16::MAX), (u16::MAX, u16::MAX)] {
        let mut header = tcp(TCPV4);
        header[2..4].copy_from_slice(&header_length.to_le_bytes());
        header[4..6].copy_from_slice(&segment.to_le_bytes());
        assert!(bench.passes(header, &frame(100, 1)));
    }
}

#[test]
fn v9_segmentation_that_was_not_accepted_is_dropped() {
    let ram = ram();
    // Without checksums there is no segmentation, whatever else the driver says.
    for (missing, kinds) in [(TSO4, &[TCPV4][..]), (TSO6, &[TCPV6]), (CSUM, &[TCPV4, TCPV6])] {
        let mut bench = Bench::without(&ram, missing);
        for kind in kinds {
            let reasons = dropped(&mut bench, tcp(*kind), &frame(1000, 1));
            assert!(reasons.not_negotiated > 0, "{reasons:?}");
        }
    }
    let mut bench = Bench::new(&ram);
    for kind in [UDP, UDP_L4, TCPV4 | ECN, TCPV6 | ECN] {
        dropped(&mut bench, tcp(kind), &frame(1000, 1));
    }
    assert_eq!(bench.net.counters().dropped, Dropped { not_negotiated: 4, ..Dropped::default() });
}

#[test]
fn v9_unknown_segmentation_is_dropped() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let mut unknown = 0;
    for kind in 0..=u8::MAX {
        if ![0, TCPV4, UDP, TCPV6, UDP_L4].contains(&(kind & !ECN)) {
            unknown += 1;
            assert_eq!(dropped(&mut bench, tcp(kind), &frame(1000, 1)).unknown_gso, unknown);
        }
    }
    // A mark for congestion, but nothing to be marked.
    assert_eq!(dropped(&mut bench, tcp(ECN), &frame(1000, 1)).unknown_gso, unknown + 1);
}

#[test]
fn v9_segmentation_without_a_checksum_is_dropped() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let mut header = tcp(TCPV4);
    header[0] = 0;
    let reasons = dropped(&mut bench, header, &frame(1000, 1));
    assert_eq!(reasons, Dropped { checksum: 1, ..Dropped::default() });
}

#[test]
fn v9_checksum_outside_of_the_frame_is_dropped() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for (start, offset) in [(34, 16), (0, 0), (98, 0), (0, 98), (50, 48)] {
        assert!(bench.passes(with_checksum(start, offset), &frame(100, 1)), "{start}+{offset}");
    }
    let lies =
        [(99, 0), (0, 99), (50, 49), (u16::MAX, 0), (0, u16::MAX), (u16::MAX, u16::MAX), (u16::MAX, 1)];
    for (start, offset) in lies {
        dropped(&mut bench, with_checksum(start, offset), &frame(100, 1));
    }
    assert_eq!(bench.net.counters().dropped, Dropped { checksum: 7, ..Dropped::default() });
}

#[test]
fn v9_checksum_that_was_not_accepted_is_dropped() {
    let ram = ram();
    let mut bench = Bench::without(&ram, CSUM);
    let reasons = dropped(&mut bench, with_checksum(34, 16), &frame(100, 1));
    assert_eq!(reasons, Dropped { not_negotiated: 1, ..Dropped::default() });
}

#[test]
fn v9_frame_that_claims_several_buffers_is_dropped() {
    let ram = ram();
    let header = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    let mut bench = Bench::new(&ram);
    let reasons = dropped(&mut bench, header, &frame(100, 1));
    assert_eq!(reasons, Dropped { num_buffers: 1, ..Dropped::default() });
    // Without mergeable buffers Linux leaves there what was there before.
    let mut bench = Bench::without(&ram, MRG_RXBUF);
    assert!(bench.passes(header, &frame(100, 1)));
}

#[test]
fn flags_that_mean_nothing_in_this_direction_change_nothing() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for flags in [2, 4, 8, 0xfe] {
        let mut header = PLAIN;
        header[0] = flags;
        assert!(bench.passes(header, &frame(100, 1)), "{flags:#x}");
    }
}
