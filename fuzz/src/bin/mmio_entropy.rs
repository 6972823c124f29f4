//! The entropy device behind registers: whatever the guest does to them, it gets no more than the rate allows.
#![no_main]

use std::time::Duration;

use bathy_devices::entropy::{BURST_BYTES, BYTES_PER_SECOND, Entropy};
use bathy_devices::testing::{Driver, TestClock, writable};
use bathy_devices::{GuestMemory, Outcome};
use bathy_fuzz::Input;
use bathy_fuzz::mmio::{Target, run};
use libfuzzer_sys::fuzz_target;

struct Rate {
    clock: TestClock,
    /// The tokens that there were when the device was last looked at.
    tokens: u64,
    /// The time that has passed since they last changed.
    elapsed: Duration,
}

impl Target for Rate {
    type Device = Entropy;

    fn guest_acts(
        &mut self,
        input: &mut Input<'_>,
        _mem: &GuestMemory,
        drivers: &mut [Driver<'_>; 4],
    ) -> u32 {
        drivers[0].push(&[writable(0x8000, input.length() % 0x8000)]);
        0
    }

    fn host_acts(&mut self, input: &mut Input<'_>, _entropy: &mut Entropy) {
        let passed = Duration::from_micros(input.u16().into());
        self.clock.set(self.clock.get() + passed);
        self.elapsed += passed;
    }

    fn check(&mut self, entropy: &Entropy, outcome: Outcome) {
        let tokens = entropy.save().tokens;
        let earned =
            u64::try_from(self.elapsed.as_micros()).expect("short") * BYTES_PER_SECOND / 1_000_000 + 1;
        assert!(tokens <= self.tokens.saturating_add(earned).min(BURST_BYTES), "tokens from nowhere");
        assert!(outcome.retry_after.is_none_or(|wait| wait <= Duration::from_secs(1)));
        if tokens != self.tokens {
            (self.tokens, self.elapsed) = (tokens, Duration::ZERO);
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let clock = TestClock::default();
    let entropy = Entropy::with_clock(clock.for_device());
    let mut rate = Rate { clock, tokens: BURST_BYTES, elapsed: Duration::ZERO };
    let mmio = run(&mut Input::new(data), entropy, &mut rate);
    assert!(Entropy::restore(mmio.device().save()).save() == mmio.device().save());
});
