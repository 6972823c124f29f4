//! A network device that goes on in another process.

use super::*;

impl Bench<'_> {
    /// The device goes on as one that was made of its saved state, with its queues where they were. The transport works on
    /// what the device then asks for.
    fn move_to_another_process(&mut self) {
        let json = serde_json::to_string(&self.net.save()).unwrap();
        self.net = Net::restore(&serde_json::from_str(&json).unwrap()).unwrap();
        self.queues[RX_QUEUE] = self.rx.restored_queue(&self.queues[RX_QUEUE]);
        self.queues[TX_QUEUE] = self.tx.restored_queue(&self.queues[TX_QUEUE]);
        self.service();
    }
}

#[test]
fn frames_to_the_guest_arrive_once_and_in_order() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for seed in 0..4 {
        bench.offer(&frame(100, seed));
    }
    for seed in 0..4 {
        bench.post(&[2048]);
        bench.move_to_another_process();
        assert_eq!(bench.rx.take_used().len(), 1, "frame {seed}");
        assert_eq!(bench.read(BUFFERS + u64::from(HEADER_BYTES), 100), frame(100, seed));
    }
    bench.post(&[2048]);
    bench.move_to_another_process();
    assert_eq!(bench.rx.take_used(), []);
    assert_eq!(bench.net.counters().to_guest.frames, 4);
}

#[test]
fn frames_from_the_guest_arrive_once_and_in_order_though_its_queue_was_held_back() {
    const FRAMES: u8 = 20;
    const LENGTH: usize = 60_000;
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.write(HEADER, &PLAIN);
    // More than the device buffers, each at a place of its own.
    for seed in 0..FRAMES {
        let address = FRAME + u64::from(seed) * LENGTH as u64;
        bench.write(address, &frame(LENGTH, seed));
        bench.tx.push(&[readable(HEADER, HEADER_BYTES), readable(address, LENGTH.try_into().unwrap())]);
    }
    bench.process(TX_QUEUE).unwrap();
    assert!(bench.tx.used_index() < u16::from(FRAMES), "some stay in the guest's queue");
    for seed in 0..FRAMES {
        if seed % 7 == 0 {
            bench.move_to_another_process();
        }
        bench.service();
        assert!(bench.net.frame() == Some(&frame(LENGTH, seed)[..]), "frame {seed}");
        bench.net.drop_frame();
    }
    bench.move_to_another_process();
    assert_eq!(bench.net.frame(), None);
    assert_eq!(bench.tx.used_index(), u16::from(FRAMES));
    assert_eq!(bench.net.counters().from_guest.frames, u64::from(FRAMES));
}

#[test]
fn a_link_that_is_down_stays_down() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.net.set_link(false);
    bench.move_to_another_process();
    assert!(!bench.net.link_up());
    bench.offer(&frame(60, 1));
    bench.post(&[2048]);
    bench.move_to_another_process();
    assert_eq!(bench.rx.take_used(), []);
    assert_eq!(bench.net.counters().dropped.link_down, 1);
}
