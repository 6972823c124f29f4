//! The serial port: the kernel's console output, on its way to the keeper's console log.
//!
//! Each byte costs an exit of the guest, so it is not for much output. While the log's pipe is full, only the end of the output
//! is buffered: a guest that floods the port neither waits nor delays the keeper (attack R4), and its last lines are logged.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use vm_superio::serial::NoEvents;
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

/// How much is collected before it is passed on, if no line ends before.
const LINE: usize = 256;
/// How much is buffered while the log's pipe is full.
const LATE: usize = 4096;

#[derive(Debug)]
pub struct SerialPort(Serial<Line, NoEvents, Lines>);

impl SerialPort {
    /// A port that interrupts by `interrupt` and speaks to `log`, a pipe that does not block.
    pub fn new(interrupt: EventFd, log: OwnedFd) -> Self {
        Self(Serial::new(Line(interrupt), Lines::new(log)))
    }

    /// The guest reads a register.
    pub fn read(&mut self, register: u8) -> u8 {
        self.0.read(register)
    }

    /// The guest writes a register.
    pub fn write(&mut self, register: u8, value: u8) {
        // Output or an interrupt that fails is lost without an error for the guest, as with a real port.
        let _ = self.0.write(register, value);
    }

    /// Writes an unfinished line to the log.
    pub fn finish(&mut self) {
        self.0.writer_mut().pass_on();
    }
}

/// The port's interrupt line.
#[derive(Debug)]
struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Collects lines, so that not every byte is a system call.
#[derive(Debug)]
struct Lines {
    log: OwnedFd,
    line: Vec<u8>,
    /// The end of what the log did not take.
    late: VecDeque<u8>,
}

impl Lines {
    /// All space is allocated here: a processor's thread should not allocate memory.
    fn new(log: OwnedFd) -> Self {
        Self { log, line: Vec::with_capacity(LINE), late: VecDeque::with_capacity(LATE + LINE) }
    }

    fn pass_on(&mut self) {
        while !self.late.is_empty() {
            let (first, _) = self.late.as_slices();
            match rustix::io::write(&self.log, first) {
                Ok(count @ 1..) => drop(self.late.drain(..count)),
                _ => break,
            }
        }
        let taken =
            if self.late.is_empty() { rustix::io::write(&self.log, &self.line).unwrap_or(0) } else { 0 };
        self.late.extend(self.line.get(taken..).unwrap_or_default());
        self.line.clear();
        let excess = self.late.len().saturating_sub(LATE);
        self.late.drain(..excess);
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            self.line.push(*byte);
            if *byte == b'\n' || self.line.len() == LINE {
                self.pass_on();
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    const DATA: u8 = 0;

    fn port() -> (SerialPort, OwnedFd) {
        let (read, write) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        (SerialPort::new(EventFd::new(libc::EFD_NONBLOCK).unwrap(), write), read)
    }

    fn said(pipe: &OwnedFd) -> String {
        let mut buffer = [0; 4096];
        let count = rustix::io::read(pipe, &mut buffer).unwrap_or(0);
        String::from_utf8_lossy(&buffer[..count]).into_owned()
    }

    #[test]
    fn whole_lines_are_passed_on_and_an_unfinished_one_at_the_end() {
        let (mut port, pipe) = port();
        b"one\ntw".iter().for_each(|byte| port.write(DATA, *byte));
        assert_eq!(said(&pipe), "one\n");
        port.finish();
        assert_eq!(said(&pipe), "tw");
    }

    #[test]
    fn r4_a_flood_is_dropped_and_blocks_nobody() {
        let (mut port, pipe) = port();
        for _ in 0..1 << 20 {
            port.write(DATA, b'x');
        }
        b"last words".iter().for_each(|byte| port.write(DATA, *byte));
        let mut taken = 0;
        while let count @ 1.. = said(&pipe).len() {
            taken += count;
        }
        assert!((4096..1 << 20).contains(&taken), "{taken}");
        port.finish();
        let rest = said(&pipe) + &said(&pipe);
        assert!(rest.ends_with("xlast words"), "{}", rest.len());
    }

    #[test]
    fn every_register_can_be_read_and_written() {
        let (mut port, _pipe) = port();
        for register in 0..=u8::MAX {
            for value in [0, 1, 0x80, 0xff] {
                port.write(register, value);
                port.read(register);
            }
        }
    }
}
