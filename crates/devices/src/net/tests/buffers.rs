//! The bounded buffers between the guest and the owner of its link.

use super::*;
use crate::net::frames::Frames;

/// Numbers that look random and are the same every time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

#[test]
fn frames_come_out_as_they_went_in_however_they_wrap() {
    let mut frames = Frames::default();
    let mut expected = std::collections::VecDeque::new();
    let mut numbers = Numbers(1);
    let mut refused = 0;
    for step in 0..20_000 {
        if numbers.below(5) < 2 {
            let dropped = frames.drop_first();
            assert_eq!(dropped, expected.pop_front().is_some());
        } else {
            let length = [14, 60, 1514, MAX_FRAME_BYTES, MAX_LARGE_FRAME_BYTES][numbers.below(5)];
            let seed = u8::try_from(step % 256).unwrap();
            let room = frames.has_room(length);
            let taken = frames.space(length).is_some_and(|space| {
                space.fill(seed);
                true
            });
            assert_eq!(room, taken);
            refused += usize::from(!taken);
            if taken {
                // A frame may be shorter than the space that was reserved for it.
                let committed = if step % 3 == 0 { 14 } else { length };
                assert!(frames.commit(committed));
                expected.push_back((committed, seed));
            }
        }
        let now = frames.first().map(|frame| (frame.len(), frame.first().copied().unwrap()));
        assert_eq!(now, expected.front().copied());
    }
    assert!(refused > 1000, "the buffer was never full");
    for (frame, (length, seed)) in frames.iter().zip(&expected) {
        assert!(frame.len() == *length && frame.iter().all(|byte| byte == seed));
    }
    assert_eq!(frames.clear(), expected.len());
}

#[test]
fn buffer_holds_so_many_frames_and_so_many_bytes() {
    let mut frames = Frames::default();
    assert!(frames.push(&vec![1; BUFFER_BYTES]));
    assert!(!frames.push(&[1; 14]));
    frames.clear();
    assert!(!frames.push(&vec![1; BUFFER_BYTES + 1]));
    for _ in 0..BUFFER_FRAMES {
        assert!(frames.push(&[1; 14]));
    }
    assert!(!frames.push(&[1; 14]));
}

#[test]
fn space_is_committed_once_and_for_no_more_than_it_is() {
    let mut frames = Frames::default();
    assert!(!frames.commit(14), "nothing was given out");
    frames.space(100).unwrap().fill(7);
    assert!(!frames.commit(101));
    frames.space(100).unwrap().fill(7);
    assert!(frames.commit(100));
    assert!(!frames.commit(100));
    assert_eq!(frames.first(), Some(&[7; 100][..]));
}

#[test]
fn space_stays_where_it_is_while_frames_are_removed() {
    let mut frames = Frames::default();
    assert!(frames.push(&[1; 100]));
    assert!(frames.push(&[2; 100]));
    frames.space(100).unwrap().fill(3);
    assert!(frames.drop_first() && frames.drop_first());
    assert!(frames.commit(100));
    assert_eq!(frames.first(), Some(&[3; 100][..]));
}

#[test]
fn owner_is_refused_frames_that_are_none_and_those_without_room() {
    let mut net = Net::new(ADDRESS);
    for length in [0, 13, MAX_FRAME_BYTES + 1] {
        assert_eq!(net.offer(&vec![0; length]), Err(Refused::Length(length)));
    }
    let mut taken = 0;
    while net.wants_frames() {
        net.space().unwrap().fill(taken);
        net.commit(MAX_FRAME_BYTES).unwrap();
        taken += 1;
    }
    assert_eq!(taken, 8);
    assert!(net.space().is_none());
    assert_eq!(net.offer(&[0; 14]), Err(Refused::Full));
    assert_eq!(net.commit(14), Err(Refused::Full));
    assert_eq!(net.save().to_guest.len(), 8);
}

#[test]
fn length_that_is_no_frames_is_not_committed() {
    let mut net = Net::new(ADDRESS);
    net.space().unwrap().fill(1);
    for length in [0, 13, MAX_FRAME_BYTES + 1, usize::MAX] {
        assert_eq!(net.commit(length), Err(Refused::Length(length)));
    }
    assert_eq!(net.follow_up(), None);
    net.commit(14).unwrap();
    assert_eq!(net.save().to_guest, [vec![1; 14]]);
}

#[test]
fn state_that_no_device_had_is_refused() {
    let good = Net::new(ADDRESS).save();
    let many = vec![vec![0; 14]; BUFFER_FRAMES];
    let large = vec![vec![0; MAX_FRAME_BYTES]; 8];
    for frames in [many.clone(), large.clone()] {
        let state = NetState { to_guest: frames.clone(), from_guest: frames, ..good.clone() };
        assert_eq!(Net::restore(&state).unwrap().save(), state);
    }
    let one_more = |frames: &[Vec<u8>]| [frames, &[vec![0; 60]]].concat();
    for frames in
        [one_more(&many), one_more(&large), vec![vec![0; 13]], vec![vec![0; MAX_LARGE_FRAME_BYTES + 1]]]
    {
        let state = NetState { to_guest: frames.clone(), ..good.clone() };
        assert!(matches!(Net::restore(&state), Err(NetError::State)));
        let state = NetState { from_guest: frames, ..good.clone() };
        assert!(matches!(Net::restore(&state), Err(NetError::State)));
    }
    let long = vec![vec![0; MAX_FRAME_BYTES + 1]];
    assert!(matches!(Net::restore(&NetState { to_guest: long, ..good.clone() }), Err(NetError::State)));
    // Features that were never offered are not restored.
    let state = NetState { acked_features: u64::MAX, ..good };
    assert_eq!(Net::restore(&state).unwrap().save().acked_features, Net::new(ADDRESS).features());
}
