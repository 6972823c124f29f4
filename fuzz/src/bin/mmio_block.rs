//! A disk behind registers: whatever the guest does to them, the disk keeps its size, and a read-only one its content.
#![no_main]

use bathy_devices::block::{Block, BlockLimits};
use bathy_devices::testing::Driver;
use bathy_devices::{GuestMemory, Outcome};
use bathy_fuzz::Input;
use bathy_fuzz::block::{Disk, push_request};
use bathy_fuzz::mmio::{Target, run};
use libfuzzer_sys::fuzz_target;

struct Requests;

impl Target for Requests {
    type Device = Block;

    fn guest_acts(&mut self, input: &mut Input<'_>, mem: &GuestMemory, drivers: &mut [Driver<'_>; 4]) -> u32 {
        push_request(input, mem, &mut drivers[0]);
        0
    }

    fn host_acts(&mut self, _input: &mut Input<'_>, block: &mut Block) {
        assert_eq!(block.take_host_error(), None);
    }

    fn check(&mut self, block: &Block, outcome: Outcome) {
        let limited = block.save().throttle.limits != BlockLimits::default();
        assert!(limited || outcome.retry_after.is_none());
    }
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let (disk, block) = Disk::new(&mut input);
    let mut mmio = run(&mut input, block, &mut Requests);
    disk.check(mmio.device_mut());
});
