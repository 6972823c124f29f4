//! Which device a port or an address belongs to. What belongs to no device reads as ones and ignores writes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::arch::layout;
use crate::serial::SerialPort;

/// Registers in the guest's memory addresses. Every processor's thread may call them at any time.
pub trait Registers: Send + Sync {
    /// The guest reads; whatever is not a register of this width reads as zeros.
    fn read(&self, offset: u64, out: &mut [u8]);

    /// The guest writes; whatever is not a register of this width is ignored.
    fn write(&self, offset: u64, data: &[u8]);
}

/// What the guest asked for by writing to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Nothing that concerns the whole machine.
    GoOn,
    /// A reset of the machine.
    Reset,
}

/// All that the guest can reach besides its memory.
pub struct Bus {
    serial: Mutex<SerialPort>,
    devices: Vec<Arc<dyn Registers>>,
}

impl Bus {
    /// A bus with these devices, in the order of their addresses.
    pub fn new(serial: SerialPort, devices: Vec<Arc<dyn Registers>>) -> Self {
        Self { serial: Mutex::new(serial), devices }
    }

    fn serial(&self) -> MutexGuard<'_, SerialPort> {
        // A panic ends the whole process: no thread is left to find the lock poisoned.
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest has ended: passes on the rest of its console output.
    pub fn finish(&self) {
        self.serial().finish();
    }

    /// The guest reads from a port: one value, or several of them one after the other.
    pub fn port_in(&self, port: u16, out: &mut [u8]) {
        out.fill(0xff);
        match port {
            _ if layout::SERIAL_PORTS.contains(&port) => {
                let register = register(port);
                let mut serial = self.serial();
                out.iter_mut().for_each(|byte| *byte = serial.read(register));
            }
            // A controller that is ready for a command and has no output.
            layout::RESET_PORT => out.fill(0),
            _ => {}
        }
    }

    /// The guest writes to a port: one value, or several of them one after the other.
    pub fn port_out(&self, port: u16, data: &[u8]) -> Flow {
        match port {
            _ if layout::SERIAL_PORTS.contains(&port) => {
                let register = register(port);
                let mut serial = self.serial();
                data.iter().for_each(|byte| serial.write(register, *byte));
                Flow::GoOn
            }
            layout::RESET_PORT if data.contains(&layout::RESET_COMMAND) => Flow::Reset,
            _ => Flow::GoOn,
        }
    }

    /// The guest reads from an address that is not memory.
    pub fn read(&self, address: u64, out: &mut [u8]) {
        match self.device(address) {
            Some((device, offset)) => device.read(offset, out),
            None => out.fill(0xff),
        }
    }

    /// The guest writes to an address that is not memory.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((device, offset)) = self.device(address) {
            device.write(offset, data);
        }
    }

    fn device(&self, address: u64) -> Option<(&dyn Registers, u64)> {
        let offset = address.checked_sub(layout::DEVICES)?;
        let index = usize::try_from(offset / layout::DEVICE_SIZE).ok()?;
        let device = self.devices.get(index)?;
        Some((device.as_ref(), offset % layout::DEVICE_SIZE))
    }
}

fn register(port: u16) -> u8 {
    u8::try_from(port - layout::SERIAL_PORTS.start).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{PipeFlags, pipe_with};
    use vmm_sys_util::eventfd::EventFd;

    use super::*;

    /// Remembers what was written where.
    #[derive(Default)]
    struct Notes(Mutex<Vec<(u64, Vec<u8>)>>);

    impl Registers for Notes {
        fn read(&self, offset: u64, out: &mut [u8]) {
            out.fill(u8::try_from(offset & 0x7f).unwrap());
        }

        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    fn bus(devices: &[&Arc<Notes>]) -> Bus {
        let (_, log) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        let serial = SerialPort::new(EventFd::new(libc::EFD_NONBLOCK).unwrap(), log);
        Bus::new(serial, devices.iter().map(|device| Arc::clone(device) as Arc<dyn Registers>).collect())
    }

    #[test]
    fn an_address_belongs_to_one_device() {
        let (first, second) = (Arc::new(Notes::default()), Arc::new(Notes::default()));
        let bus = bus(&[&first, &second]);
        bus.write(layout::DEVICES + layout::DEVICE_SIZE + 0x50, &[1, 0, 0, 0]);
        assert!(first.0.lock().unwrap().is_empty());
        assert_eq!(*second.0.lock().unwrap(), [(0x50, vec![1, 0, 0, 0])]);
        let mut value = [0; 4];
        bus.read(layout::DEVICES + 4, &mut value);
        assert_eq!(value, [4; 4]);
    }

    #[test]
    fn v13_what_belongs_to_nobody_reads_as_ones_in_every_width() {
        let device = Arc::new(Notes::default());
        let bus = bus(&[&device]);
        for width in [1, 2, 4, 8] {
            for address in [0, layout::DEVICES - 1, layout::DEVICES + layout::DEVICE_SIZE, u64::MAX] {
                let mut value = vec![0; width];
                bus.read(address, &mut value);
                assert!(value.iter().all(|byte| *byte == 0xff), "{address:#x}");
                bus.write(address, &value);
            }
        }
        assert!(device.0.lock().unwrap().is_empty());
    }

    #[test]
    fn v13_every_port_takes_every_width_and_only_one_resets() {
        let bus = bus(&[]);
        for port in 0..=u16::MAX {
            // Four bytes at once, and a string of many.
            for width in [1, 2, 4, 4096] {
                let mut value = vec![0; width];
                bus.port_in(port, &mut value);
                if port != layout::RESET_PORT && !layout::SERIAL_PORTS.contains(&port) {
                    assert!(value.iter().all(|byte| *byte == 0xff), "port {port:#x} has no device");
                }
                let flow = bus.port_out(port, &vec![layout::RESET_COMMAND; width]);
                assert_eq!(flow == Flow::Reset, port == layout::RESET_PORT, "port {port:#x}");
            }
            assert_eq!(bus.port_out(port, &[0xd1]), Flow::GoOn);
        }
    }

    #[test]
    fn v13_a_string_of_port_accesses_is_one_access_after_the_other() {
        let (read, log) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        let serial = SerialPort::new(EventFd::new(libc::EFD_NONBLOCK).unwrap(), log);
        let bus = Bus::new(serial, Vec::new());
        bus.port_out(layout::SERIAL_PORTS.start, b"all of it");
        bus.finish();
        let mut said = [0; 64];
        let count = rustix::io::read(&read, &mut said).unwrap();
        assert_eq!(said.get(..count), Some(&b"all of it"[..]));
        // The line's state: each byte of the string is read from it.
        let mut state = [0xff; 8];
        bus.port_in(layout::SERIAL_PORTS.start + 5, &mut state);
        assert!(state.iter().all(|byte| *byte != 0xff && *byte == state[0]), "{state:?}");
    }
}
