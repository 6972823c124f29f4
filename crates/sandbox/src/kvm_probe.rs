//! Whether `/dev/kvm` is hardware virtualization: a guest of a few instructions is run and timed.
//!
//! The device's presence proves nothing. Some hosts offer one that emulates instruction by instruction, a thousand times
//! too slow for a guest. So a counting loop has to finish before a deadline, in a process of its own that can be
//! killed when it does not.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit};
use serde::Serialize;
use thiserror::Error;

use crate::sys::GuestPage;

/// The device.
const DEVICE: &str = "/dev/kvm";
/// How often the probe guest counts. Hardware does that in well under a tenth of the deadline.
const LOOPS: u32 = 50_000_000;
const DEADLINE: Duration = Duration::from_millis(1500);
/// Where the guest's code lies in its memory.
const CODE: u64 = 0x1000;

/// The probe could not be run.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// A call to KVM failed.
    #[error("KVM refused to {0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// Memory.
    #[error("No memory for the probe guest")]
    Memory(#[source] io::Error),
    /// The guest did something else than counting and halting.
    #[error("The probe guest ended unexpectedly: {0}")]
    Exit(String),
}

/// What the device is good for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// Guests run at full speed.
    Hardware {
        /// How long the probe guest took.
        milliseconds: u64,
    },
    /// There is a device, and the probe guest did not finish in time.
    NotHardware {
        /// The deadline.
        milliseconds: u64,
    },
    /// There is no device.
    Absent,
    /// There is one, and we may not use it.
    NoPermission {
        /// The group that may.
        group: String,
    },
    /// It failed.
    Broken {
        /// How.
        reason: String,
    },
}

/// Finds out, by running `prober` (this program, asked to call [`run_guest`]) with a deadline.
pub fn probe(prober: &mut Command) -> Verdict {
    match File::options().read(true).write(true).open(DEVICE) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Verdict::Absent,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Verdict::NoPermission { group: group_of(Path::new(DEVICE)) };
        }
        Err(error) => return Verdict::Broken { reason: error.to_string() },
        Ok(_) => {}
    }
    match timed(prober) {
        Ok(verdict) => verdict,
        Err(error) => Verdict::Broken { reason: error.to_string() },
    }
}

fn timed(prober: &mut Command) -> io::Result<Verdict> {
    let started = Instant::now();
    let mut child = prober.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let milliseconds = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    loop {
        if let Some(status) = child.try_wait()? {
            if status.success() {
                return Ok(Verdict::Hardware { milliseconds: milliseconds(started.elapsed()) });
            }
            let mut reason = String::new();
            if let Some(mut stderr) = child.stderr.take() {
                stderr.read_to_string(&mut reason)?;
            }
            return Ok(Verdict::Broken { reason: reason.trim().to_owned() });
        }
        if started.elapsed() > DEADLINE {
            child.kill()?;
            child.wait()?;
            return Ok(Verdict::NotHardware { milliseconds: milliseconds(DEADLINE) });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs the probe guest in this process. It may take for ever: the caller's caller has the deadline.
pub fn run_guest() -> Result<(), ProbeError> {
    let failed = |what| move |error| ProbeError::Kvm(what, error);
    let mut page = GuestPage::new().map_err(ProbeError::Memory)?;
    page.write(&program());
    let kvm = Kvm::new().map_err(failed("be opened"))?;
    let vm = kvm.create_vm().map_err(failed("create a guest"))?;
    // Needed by processors that run real mode in a virtual-8086 task; others ignore it.
    let _ = vm.set_tss_address(0xfffb_d000);
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: CODE,
        memory_size: GuestPage::SIZE,
        userspace_addr: page.address(),
    };
    page.give_to(&vm, region).map_err(failed("take memory"))?;
    let mut cpu = vm.create_vcpu(0).map_err(failed("create a processor"))?;
    let mut special = cpu.get_sregs().map_err(failed("tell its registers"))?;
    special.cs.base = 0;
    special.cs.selector = 0;
    cpu.set_sregs(&special).map_err(failed("set its registers"))?;
    let mut registers = cpu.get_regs().map_err(failed("tell its registers"))?;
    registers.rip = CODE;
    registers.rflags = 2;
    cpu.set_regs(&registers).map_err(failed("set its registers"))?;
    match cpu.run().map_err(failed("run the guest"))? {
        VcpuExit::Hlt => Ok(()),
        other => Err(ProbeError::Exit(format!("{other:?}"))),
    }
}

/// Real-mode code: count down, halt.
fn program() -> Vec<u8> {
    let [a, b, c, d] = LOOPS.to_le_bytes();
    let load_counter = [0x66, 0xb9, a, b, c, d];
    let decrement = [0x66, 0x49];
    let back_unless_zero = [0x75, 0xfc];
    let halt = [0xf4];
    [&load_counter[..], &decrement, &back_unless_zero, &halt].concat()
}

fn group_of(path: &Path) -> String {
    let gid = std::fs::metadata(path).map(|data| data.gid()).unwrap_or_default().to_string();
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let name = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == gid).then(|| name.to_owned())
    });
    name.unwrap_or(gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_that_hangs_is_ended_at_the_deadline() {
        let started = Instant::now();
        let verdict = timed(Command::new("sleep").arg("60")).unwrap();
        assert!(matches!(verdict, Verdict::NotHardware { .. }), "{verdict:?}");
        assert!(started.elapsed() < DEADLINE * 2);
    }

    #[test]
    fn a_probe_that_fails_says_why() {
        let verdict = timed(Command::new("sh").args(["-c", "echo no guests today >&2; exit 1"])).unwrap();
        assert_eq!(verdict, Verdict::Broken { reason: "no guests today".to_owned() });
    }

    #[test]
    fn a_probe_that_finishes_is_hardware() {
        assert!(matches!(timed(&mut Command::new("true")).unwrap(), Verdict::Hardware { .. }));
    }
}
