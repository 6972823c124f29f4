//! A network link behind registers: whatever the guest does to them, its buffers stay bounded and its state can be saved.
#![no_main]

use bathy_devices::net::Net;
use bathy_devices::testing::Driver;
use bathy_devices::{GuestMemory, Outcome};
use bathy_fuzz::Input;
use bathy_fuzz::mmio::{Target, run};
use bathy_fuzz::net::{check_frame, check_state, guest_acts, host_acts};
use libfuzzer_sys::fuzz_target;

struct Link;

impl Target for Link {
    type Device = Net;

    fn guest_acts(&mut self, input: &mut Input<'_>, mem: &GuestMemory, drivers: &mut [Driver<'_>; 4]) -> u32 {
        u32::from(guest_acts(input, mem, drivers) != 0)
    }

    fn host_acts(&mut self, input: &mut Input<'_>, net: &mut Net) {
        host_acts(input, net);
    }

    fn check(&mut self, net: &Net, outcome: Outcome) {
        assert_eq!(outcome.retry_after, None);
        check_frame(net);
    }
}

fuzz_target!(|data: &[u8]| {
    let mmio = run(&mut Input::new(data), Net::new([2, 0, 0, 0, 0, 1]), &mut Link);
    check_state(mmio.device());
});
