//! The entropy device: whatever is asked, it gives no more than its rate allows.
#![no_main]

use std::time::Duration;

use bathy_devices::VirtioDevice;
use bathy_devices::entropy::{BURST_BYTES, BYTES_PER_SECOND, Entropy};
use bathy_devices::testing::{Driver, TestClock};
use bathy_fuzz::{Input, MAX_STEPS, drive, ram};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let ram = ram();
    let mut driver = Driver::new(ram.memory(), 0x1000, 16);
    let mut queue = driver.device_queue();
    let now = TestClock::default();
    let mut entropy = Entropy::with_clock(now.for_device());
    let (mut before, mut elapsed) = (BURST_BYTES, Duration::ZERO);

    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        drive(&mut input, &ram, &mut driver);
        if input.u8() % 4 == 0 {
            elapsed = Duration::from_micros(input.u16().into());
            now.set(now.get() + elapsed);
        }
        let Ok(outcome) = entropy.process(0, &mut queue, ram.memory()) else { break };
        let tokens = entropy.save().tokens;
        let earned = u64::try_from(elapsed.as_micros()).expect("short") * BYTES_PER_SECOND / 1_000_000 + 1;
        assert!(tokens <= before.saturating_add(earned).min(BURST_BYTES), "tokens from nowhere");
        assert!(outcome.retry_after.is_none_or(|wait| wait <= Duration::from_secs(1)));
        (before, elapsed) = (tokens, Duration::ZERO);
    }
    assert!(Entropy::restore(entropy.save()).save() == entropy.save());
});
