//! A console behind registers: whatever the guest does to them, its buffers stay bounded and its state can be saved.
#![no_main]

use bathy_devices::console::Console;
use bathy_devices::testing::Driver;
use bathy_devices::{GuestMemory, Outcome};
use bathy_fuzz::Input;
use bathy_fuzz::console::{check_buffers, check_state, guest_acts, host_acts};
use bathy_fuzz::mmio::{Target, run};
use libfuzzer_sys::fuzz_target;

struct Port;

impl Target for Port {
    type Device = Console;

    fn guest_acts(&mut self, input: &mut Input<'_>, mem: &GuestMemory, drivers: &mut [Driver<'_>; 4]) -> u32 {
        guest_acts(input, mem, drivers);
        u32::from(input.u8() % 4)
    }

    fn host_acts(&mut self, input: &mut Input<'_>, console: &mut Console) {
        host_acts(input, console);
    }

    fn check(&mut self, console: &Console, outcome: Outcome) {
        assert_eq!(outcome.retry_after, None);
        check_buffers(console);
    }
}

fuzz_target!(|data: &[u8]| {
    let mmio = run(&mut Input::new(data), Console::new(), &mut Port);
    check_state(mmio.device());
});
