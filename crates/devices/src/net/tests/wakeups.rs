//! Both sides notify each other only on request, as Linux does, and no frame is left waiting.

use super::*;

/// A driver that kicks a queue and takes interrupts only as the rings say.
struct Polite<'mem> {
    bench: Bench<'mem>,
    available: [u16; 2],
}

impl<'mem> Polite<'mem> {
    fn new(ram: &'mem GuestRam) -> Self {
        let net = Net::new(ADDRESS);
        let features = net.features();
        Self { bench: Bench::with(ram, net, features), available: [0; 2] }
    }

    /// The index after which the device wants a kick.
    fn kick_wanted_after(&self, queue: usize) -> u16 {
        let driver = if queue == RX_QUEUE { &self.bench.rx } else { &self.bench.tx };
        let address = driver.used_ring() + 4 + 8 * u64::from(SIZE);
        u16::from_le(self.bench.mem.read_obj(GuestAddress(address)).unwrap())
    }

    /// Kicks a queue that `added` chains were added to, if the device wants that. Says whether it did.
    fn kick(&mut self, queue: usize, added: u16) -> bool {
        let old = self.available[queue];
        let new = old.wrapping_add(added);
        self.available[queue] = new;
        let since = new.wrapping_sub(self.kick_wanted_after(queue)).wrapping_sub(1);
        let wanted = since < new.wrapping_sub(old);
        if wanted {
            self.bench.process(queue).unwrap();
            self.bench.service();
        }
        wanted
    }

    fn post(&mut self, count: u16, length: u32) -> bool {
        self.bench.post(&vec![length; count.into()]);
        self.kick(RX_QUEUE, count)
    }

    fn send(&mut self, frame: &[u8]) -> bool {
        self.bench.push(PLAIN, frame);
        self.kick(TX_QUEUE, 1)
    }
}

#[test]
fn buffers_that_come_back_are_noticed() {
    let ram = ram();
    let mut driver = Polite::new(&ram);
    driver.post(4, 100);
    // Two frames fit; a third needs one buffer more than there is.
    for seed in 0..3 {
        driver.bench.offer(&frame(150, seed));
    }
    assert_eq!(driver.bench.rx.take_used().len(), 4);
    assert!(!driver.bench.net.save().to_guest.is_empty());
    assert!(driver.post(1, 100), "a kick is wanted though one buffer is not enough");
    assert_eq!(driver.bench.rx.take_used(), []);
    assert!(driver.post(1, 100), "a kick is still wanted");
    assert_eq!(driver.bench.rx.take_used(), [(4, 100), (5, 62)]);
    assert_eq!(driver.bench.net.counters().to_guest.frames, 3);
}

#[test]
fn buffers_that_nothing_waits_for_need_no_kick_and_are_found_later() {
    let ram = ram();
    let mut driver = Polite::new(&ram);
    driver.post(1, 100);
    driver.bench.offer(&frame(60, 1));
    assert!(!driver.post(1, 100) || driver.bench.rx.used_index() == 1);
    driver.bench.offer(&frame(60, 2));
    assert_eq!(driver.bench.rx.used_index(), 2);
}

#[test]
fn queue_that_stalled_is_not_kicked_and_goes_on_when_there_is_room() {
    let ram = ram();
    let mut driver = Polite::new(&ram);
    let kicks = (0..20).filter(|_| driver.send(&frame(MAX_FRAME_BYTES, 1))).count();
    assert_eq!(kicks, 9, "eight that fit, and the one that did not");
    assert_eq!(driver.bench.tx.used_index(), 8);
    let mut taken = 0;
    while driver.bench.net.frame().is_some() {
        driver.bench.net.drop_frame();
        driver.bench.service();
        taken += 1;
    }
    assert_eq!(taken, 20);
    assert!(driver.send(&frame(60, 1)), "an empty queue wants to be kicked again");
}

#[test]
fn driver_that_waits_for_a_full_queue_to_move_is_interrupted() {
    let ram = ram();
    let mut driver = Polite::new(&ram);
    for _ in 0..12 {
        driver.send(&frame(MAX_FRAME_BYTES, 1));
    }
    assert_eq!(driver.bench.tx.used_index(), 8);
    // The driver has filled its queue and waits for two more to be done.
    driver.bench.tx.set_used_event(9);
    driver.bench.net.drop_frame();
    assert!(!driver.bench.service().notify);
    driver.bench.net.drop_frame();
    assert!(driver.bench.service().notify);
}

#[test]
fn nothing_is_left_lying_whatever_the_two_sides_do_in_whatever_order() {
    let ram = ram();
    let mut driver = Polite::new(&ram);
    let mut random: u64 = 7;
    let mut below = |limit: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % limit
    };
    let (mut posted, mut sent, mut taken): (u16, u16, u64) = (0, 0, 0);
    let (mut offered, lengths) = (Vec::new(), [60, 1514, 9000, MAX_FRAME_BYTES]);
    for _ in 0..5000 {
        let bytes = lengths[usize::try_from(below(4)).unwrap()];
        match below(4) {
            0 => {
                let free = SIZE - posted.wrapping_sub(driver.bench.rx.used_index());
                let count = u16::try_from(below(60)).unwrap().min(free);
                posted = posted.wrapping_add(count);
                driver.post(count, 4096);
            }
            1 if driver.bench.net.offer(&frame(bytes, 1)).is_ok() => {
                offered.push(bytes);
                driver.bench.service();
            }
            // Two descriptors for each frame.
            2 if sent.wrapping_sub(driver.bench.tx.used_index()) < SIZE / 2 => {
                sent += 1;
                driver.send(&frame(bytes, 1));
            }
            _ => {
                for _ in 0..below(4) {
                    taken += u64::from(driver.bench.net.frame().is_some());
                    driver.bench.net.drop_frame();
                }
                driver.bench.service();
            }
        }
        let counters = driver.bench.net.counters();
        let in_queue = u64::from(sent) - counters.from_guest.frames;
        assert!(in_queue == 0 || counters.from_guest.frames > taken, "a frame lies there and is not noticed");
        let next = offered.get(usize::try_from(counters.to_guest.frames).unwrap());
        let room = 4096 * usize::from(posted.wrapping_sub(driver.bench.rx.used_index()));
        assert!(next.is_none_or(|bytes| bytes + 12 > room), "a frame waits beside buffers that can hold it");
    }
    assert!(sent > 500 && offered.len() > 500 && taken > 500, "{sent} {} {taken}", offered.len());
}
