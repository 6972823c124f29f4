//! Block requests: whatever is asked, the disk keeps its size, and a read-only one its content.
#![no_main]

use bathy_devices::VirtioDevice;
use bathy_devices::testing::Driver;
use bathy_fuzz::block::{Disk, push_request};
use bathy_fuzz::{Input, MAX_STEPS, drive, ram};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let ram = ram();
    let mem = ram.memory();
    let mut driver = Driver::new(mem, 0x1000, 16);
    let mut queue = driver.device_queue();
    let (disk, mut block) = Disk::new(&mut input);
    block.set_features(block.features());

    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        if input.u8() % 4 == 0 {
            drive(&mut input, &ram, &mut driver);
        } else {
            push_request(&mut input, mem, &mut driver);
        }
        if block.process(0, &mut queue, mem).is_err() {
            break;
        }
    }
    disk.check(&mut block);
});
