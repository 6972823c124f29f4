//! Walking descriptor chains: whatever is handed to a device is a chain inside memory, and never too much of it.
#![no_main]

use bathy_devices::ring::{Chain, run_round};
use bathy_devices::testing::Driver;
use bathy_devices::{Outcome, QueueT};
use bathy_fuzz::{Input, MAX_STEPS, RAM, drive, ram};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let ram = ram();
    let mem = ram.memory();
    let mut driver = Driver::new(mem, 0x1000, 16);
    let mut queue = driver.device_queue();
    queue.set_event_idx(input.u8() & 1 != 0);
    let mut chain = Chain::new();
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        drive(&mut input, &ram, &mut driver);
        let (before, put_back) = (queue.next_used(), input.u8() % 16 == 0);
        let mut popped = 0;
        let outcome = run_round(&mut queue, mem, |ring| {
            while ring.pop(&mut chain)? {
                popped += 1;
                check(&chain);
                if put_back {
                    ring.put_back();
                    break;
                }
                let mut block = [0; 64];
                let read = chain.read(mem, 3, &mut block)?;
                assert_eq!(read, (chain.readable_bytes().saturating_sub(3)).min(64) as usize);
                // Writing may change descriptors that are still to be read: that is the guest's own doing.
                let written = chain.write(mem, 0, &block)?;
                assert_eq!(written, chain.writable_bytes().min(64) as usize);
                ring.complete(&chain, chain.writable_bytes().min(64))?;
            }
            Ok(())
        });
        assert!(popped <= 16, "more chains than the queue has entries");
        assert!(queue.next_used().wrapping_sub(before) <= 16);
        if outcome.is_err() {
            let again = run_round(&mut queue, mem, |_| unreachable!("a stopped queue is worked on"));
            assert_eq!(again.expect("a stopped queue is silent"), Outcome::default());
            return;
        }
    }
});

fn check(chain: &Chain) {
    assert!(chain.readable().len() + chain.writable().len() <= 16);
    for buffer in chain.readable().iter().chain(chain.writable()) {
        assert!(buffer.length > 0);
        assert!(buffer.address.0 + u64::from(buffer.length) <= RAM, "a buffer outside memory");
    }
    let sum = |list: &[bathy_devices::ring::Buffer]| list.iter().map(|b| u64::from(b.length)).sum::<u64>();
    assert_eq!(sum(chain.readable()), u64::from(chain.readable_bytes()));
    assert_eq!(sum(chain.writable()), u64::from(chain.writable_bytes()));
}
