//! A guest that reaches its device through registers, and does to them whatever it likes.
//!
//! The input is a script of register accesses of any width, changes of memory, kicks, work of the event loop's and
//! resets. So that every status is reached often, it starts with the driver's own set-up up to some point, and can go
//! through that set-up again at any time.

use std::cell::OnceCell;
use std::sync::Arc;

use bathy_devices::testing::Driver;
use bathy_devices::{GuestMemory, GuestRam, Outcome, VirtioDevice};
use bathy_vmm::mmio::{Effect, Interrupt, Mmio, MmioError, MmioState};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::{ABOVE, Input, MAX_STEPS, RAM, drive};

const STATUS: u64 = 0x70;
const QUEUE_NOTIFY: u64 = 0x50;
const RUNNING: u32 = 0xf;
const ENTRIES: u16 = 16;
/// How much memory there is behind the hole.
const MORE: u64 = 16 << 10;

/// What is different from device to device.
pub trait Target {
    /// The device.
    type Device: VirtioDevice;

    /// The guest does something that makes sense to the device, and returns the queue that it did it to.
    fn guest_acts(&mut self, input: &mut Input<'_>, mem: &GuestMemory, drivers: &mut [Driver<'_>; 4]) -> u32;

    /// The host does something to the device.
    fn host_acts(&mut self, input: &mut Input<'_>, device: &mut Self::Device);

    /// What is true whatever was done.
    fn check(&mut self, device: &Self::Device, outcome: Outcome);
}

/// Memory with a hole behind its first part, zeroed.
fn memory() -> Arc<GuestRam> {
    thread_local! {
        static MEMORY: OnceCell<Arc<GuestRam>> = const { OnceCell::new() };
    }
    let make = || Arc::new(GuestRam::create_around(RAM + MORE, RAM..ABOVE).expect("memory"));
    let ram = MEMORY.with(|cell| Arc::clone(cell.get_or_init(make)));
    ram.memory().write_slice(&[0; RAM as usize], GuestAddress(0)).expect("inside memory");
    ram.memory().write_slice(&[0; MORE as usize], GuestAddress(ABOVE)).expect("inside memory");
    ram
}

fn fresh_drivers(mem: &GuestMemory) -> [Driver<'_>; 4] {
    [0x1000, 0x2000, 0x3000, ABOVE].map(|base| Driver::new(mem, base, ENTRIES))
}

/// Runs the script in `input` against `device`, which is handed back.
pub fn run<T: Target>(input: &mut Input<'_>, device: T::Device, target: &mut T) -> Mmio<T::Device> {
    let ram = memory();
    let mut drivers = fresh_drivers(ram.memory());
    let interrupt = Arc::new(Interrupt::new().expect("an event counter"));
    let mmio = Mmio::new(device, Arc::clone(&ram), interrupt).expect("a device");
    let mut guest = Guest { ram: Arc::clone(&ram), mmio, target };
    let set_up = guest.set_up(&drivers);
    let steps = match input.u8() {
        how_far @ 128.. => usize::from(how_far) % set_up.len(),
        _ => set_up.len(),
    };
    let mut result = guest.write_all(&set_up[..steps]);
    for _ in 0..MAX_STEPS {
        if result.is_err() {
            guest.check_silence(input);
            break;
        }
        if input.is_empty() {
            break;
        }
        result = match input.u8() % 16 {
            0 => {
                drivers = fresh_drivers(ram.memory());
                guest.write_all(&set_up)
            }
            1..4 => guest.write_some_register(input, &drivers),
            4 => {
                let width = input.choose(&[0, 1, 2, 3, 4, 4, 8, 8, 16]);
                let choices = [input_offset(input), input.u8().into(), input.u64()];
                let offset = input.choose(&choices);
                guest.write(offset, input.take(width))
            }
            5 => {
                let mut out = [0xee; 8];
                let width = input.choose(&[0, 1, 2, 4, 8]);
                guest.mmio.read(input_offset(input), &mut out[..width]);
                Ok(())
            }
            6 | 7 => {
                let queue = input.u8() % 4;
                drive(input, &ram, &mut drivers[usize::from(queue)]);
                guest.write(QUEUE_NOTIFY, &u32::from(queue).to_le_bytes())
            }
            8..12 => {
                let queue = guest.target.guest_acts(input, ram.memory(), &mut drivers);
                guest.write(QUEUE_NOTIFY, &queue.to_le_bytes())
            }
            12 => guest.work(|mmio, input| mmio.on_kick(usize::from(input.u8() % 6)), input),
            13 => guest.work(|mmio, _| mmio.service(), input),
            _ => {
                guest.target.host_acts(input, guest.mmio.device_mut());
                guest.work(|mmio, _| mmio.service(), input)
            }
        };
    }
    guest.mmio
}

fn input_offset(input: &mut Input<'_>) -> u64 {
    u64::from(input.u16() % 0x1010)
}

struct Guest<'target, T: Target> {
    ram: Arc<GuestRam>,
    mmio: Mmio<T::Device>,
    target: &'target mut T,
}

impl<T: Target> Guest<'_, T> {
    /// The driver's own way from a reset to a device that runs.
    fn set_up(&self, drivers: &[Driver<'_>; 4]) -> Vec<(u64, u32)> {
        let features = self.mmio.device().features();
        let mut script = vec![(STATUS, 0), (STATUS, 1), (STATUS, 3)];
        script.extend([
            (0x24, 0),
            (0x20, low(features)),
            (0x24, 1),
            (0x20, low(features >> 32)),
            (STATUS, 0xb),
        ]);
        let queues = u32::try_from(self.mmio.device().queue_count()).expect("few queues");
        for (queue, driver) in (0..queues).zip(drivers) {
            script.extend([(0x30, queue), (0x38, ENTRIES.into())]);
            let rings = [driver.descriptor_table(), driver.available_ring(), driver.used_ring()];
            for (register, ring) in [0x80, 0x90, 0xa0].into_iter().zip(rings) {
                script.extend([(register, low(ring)), (register + 4, low(ring >> 32))]);
            }
            script.push((0x44, 1));
        }
        script.push((STATUS, RUNNING));
        script
    }

    fn write_all(&mut self, script: &[(u64, u32)]) -> Result<(), MmioError> {
        script.iter().try_for_each(|(register, value)| self.write(*register, &value.to_le_bytes()))
    }

    /// A register that means something, with a value that may mean something to it.
    fn write_some_register(
        &mut self,
        input: &mut Input<'_>,
        drivers: &[Driver<'_>; 4],
    ) -> Result<(), MmioError> {
        let register = input.choose(&[
            STATUS,
            STATUS,
            STATUS,
            0x14,
            0x20,
            0x24,
            0x30,
            0x30,
            0x38,
            0x44,
            0x44,
            QUEUE_NOTIFY,
            0x64,
            0x80,
            0x84,
            0x90,
            0x94,
            0xa0,
            0xa4,
            0xac,
            0xc0,
        ]);
        let driver = &drivers[usize::from(input.u8() % 4)];
        let rings = [driver.descriptor_table(), driver.available_ring(), driver.used_ring()];
        let value = match (register, input.u8()) {
            (_, 230..) => input.u32(),
            (STATUS, 0..50) => self.mmio.save().status | 0x80,
            (STATUS, _) => input.choose(&[0, 1, 3, 0xb, 0xf, 0x80, 0x81, 0x83, 0x8b, 0x8f, 4, 8, 0x40, 0x4f]),
            (0x20, _) => low(self.mmio.device().features() >> input.choose(&[0_u32, 32])),
            (0x38, _) => input.choose(&[0, 1, 2, 3, 16, 64, 255, 256, 257, 512, 0x1_0010]),
            (0x80 | 0x90 | 0xa0, 0..100) => low(input.choose(&rings)),
            (0x80 | 0x90 | 0xa0, _) => low(input.address()),
            (0x84 | 0x94 | 0xa4, _) => low(input.choose(&[0, 0, 0, 1, u64::MAX])),
            _ => u32::from(input.u8() % 6),
        };
        self.write(register, &value.to_le_bytes())
    }

    /// Writes, and does what the event loop does then.
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), MmioError> {
        let before = self.mmio.save();
        let effect = self.mmio.write(offset, data);
        check_change(self.ram.memory(), &before, &self.mmio.save());
        match effect {
            Effect::None => Ok(()),
            Effect::Kick(queue) => {
                assert!(
                    before.status == RUNNING && before.queues[queue].ready,
                    "a kick of a queue that is not there"
                );
                self.work(|mmio, _| mmio.on_kick(queue), &mut Input::new(&[]))
            }
            Effect::Work => self.work(|mmio, _| mmio.service(), &mut Input::new(&[])),
        }
    }

    fn work(
        &mut self,
        act: impl FnOnce(&mut Mmio<T::Device>, &mut Input<'_>) -> Result<Outcome, MmioError>,
        input: &mut Input<'_>,
    ) -> Result<(), MmioError> {
        let before = self.mmio.save();
        let outcome = act(&mut self.mmio, input)?;
        for (was, is) in before.queues.iter().zip(self.mmio.save().queues) {
            let worked = is.next_used.wrapping_sub(was.next_used);
            assert!(
                worked == 0 || before.status == RUNNING && was.ready,
                "work on a queue that does not run"
            );
        }
        self.target.check(self.mmio.device(), outcome);
        Ok(())
    }

    /// After an error, nothing the guest does has any effect.
    fn check_silence(&mut self, input: &mut Input<'_>) {
        assert!(self.mmio.is_ended());
        let before = self.mmio.save();
        for _ in 0..4 {
            let value = input.u32().to_le_bytes();
            let register = input.choose(&[STATUS, QUEUE_NOTIFY, 0x30, 0x44, 0x20]);
            assert_eq!(self.mmio.write(register, &value), Effect::None);
            assert_eq!(self.mmio.on_kick(usize::from(value[0] % 4)).expect("silence"), Outcome::default());
            assert_eq!(self.mmio.service().expect("silence"), Outcome::default());
        }
        assert_eq!(self.mmio.save(), before);
    }
}

/// What one write may change at all.
fn check_change(mem: &GuestMemory, before: &MmioState, after: &MmioState) {
    assert!(matches!(after.status & !0x80, 0 | 1 | 3 | 0xb | RUNNING), "status {:#x}", after.status);
    for queue in after.queues.iter().filter(|queue| queue.ready) {
        assert!(queue.size.is_power_of_two() && queue.size <= 256);
        let size = usize::try_from(queue.size).expect("small");
        for (start, bytes) in
            [(queue.descriptors, 16 * size), (queue.available, 6 + 2 * size), (queue.used, 6 + 8 * size)]
        {
            assert!(mem.check_range(GuestAddress(start), bytes), "a ring outside memory");
        }
    }
    if after.status == 0 && before.status != 0 {
        assert!(after.queues.iter().all(|queue| *queue == Default::default()), "a reset left something");
        return;
    }
    assert_eq!(after.status & before.status, before.status, "a status bit was taken away");
    if before.queues != after.queues {
        assert_eq!((before.status, after.status), (0xb, 0xb), "a queue was changed when it must not be");
    }
    if before.driver_features != after.driver_features && after.status != 0 {
        assert_eq!((before.status, after.status), (3, 3), "features were changed when they must not be");
    }
}

fn low(value: u64) -> u32 {
    u32::try_from(value & u64::from(u32::MAX)).expect("32 bits")
}
