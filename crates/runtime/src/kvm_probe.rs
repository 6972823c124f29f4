//! Whether `/dev/kvm` is hardware virtualization: a guest of a few instructions is run and timed.
//!
//! The device's presence proves nothing. Some hosts offer one that emulates instruction by instruction, a thousand times
//! too slow for a guest. So a counting loop has to finish within a limit of processor time, in a process of its own that
//! the kernel ends when it does not. Wall time would take a busy machine for one without hardware virtualization.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit};
use rustix::process::{Resource, Rlimit, Signal, setrlimit};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::sys::GuestPage;

pub const DEVICE: &str = "/dev/kvm";
/// The hidden verb of `bathy` that runs the probe guest.
pub const VERB: &str = "probe-kvm";
/// How often the probe guest counts. Hardware does that in well under a tenth of the limit, emulation in ten times the limit.
const LOOPS: u32 = 50_000_000;
/// What the guest runs of them, as it is told: each turn is two instructions.
const MILLION_INSTRUCTIONS: u32 = LOOPS / 1_000_000 * 2;
/// Seconds of processor time for the probe.
const CPU_LIMIT: u64 = 2;
/// How long the probe may take in all. A machine that does not give it that much until then is too busy to tell.
const DEADLINE: Duration = Duration::from_secs(20);
/// Where the guest's code lies in its memory.
const CODE: u64 = 0x1000;

/// The probe could not be run.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// A call to KVM failed.
    #[error("KVM refused to {0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    #[error("No memory for the probe guest")]
    Memory(#[source] io::Error),
    /// Nothing would end the probe.
    #[error("The probe's processor time cannot be limited")]
    Limit(#[source] io::Error),
    /// The guest did something else than counting and halting.
    #[error("The probe guest ended unexpectedly: {0}")]
    Exit(String),
}

/// What the device is good for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// Guests run at full speed.
    Hardware {
        /// How long the probe guest took.
        milliseconds: u64,
    },
    /// There is a device, and the probe guest did not finish in time.
    NotHardware {
        /// The limit of processor time.
        milliseconds: u64,
    },
    /// There is no device.
    Absent,
    /// There is one, and we may not use it.
    NoPermission {
        /// The group that may.
        group: String,
    },
    /// There is one that we may use, and the processor has nothing that could make it fast. No guest was tried.
    NoProcessor,
    Broken {
        reason: String,
    },
}

impl Verdict {
    /// Whether guests run at full speed.
    pub fn is_hardware(&self) -> bool {
        matches!(self, Self::Hardware { .. })
    }

    /// Whether a guest was tried and its time taken. A failure may have been about anything, and for a moment only.
    pub fn is_measurement(&self) -> bool {
        matches!(self, Self::Hardware { .. } | Self::NotHardware { .. })
    }

    /// What the user can do about it, if anything.
    pub fn cure(&self) -> Option<String> {
        match self {
            Self::NoPermission { group } if group == "root" => Some(format!(
                "To use it, give it to a group: groupadd -f kvm; chgrp kvm {DEVICE}; chmod g+rw {DEVICE}; usermod -aG kvm $USER; then log in again"
            )),
            Self::NoPermission { group } => {
                Some(format!("To use it: usermod -aG {group} $USER, then log in again"))
            }
            _ => None,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hardware { milliseconds } => {
                write!(out, "{DEVICE} is hardware virtualization (a probe guest took {milliseconds} ms)")
            }
            Self::NotHardware { milliseconds } => write!(
                out,
                "{DEVICE} is not hardware virtualization: a probe guest of {MILLION_INSTRUCTIONS} million instructions did not finish in {milliseconds} ms of processor time"
            ),
            Self::Absent => write!(out, "there is no {DEVICE}"),
            Self::NoPermission { group } if group == "root" => {
                write!(out, "{DEVICE} may only be used by root")
            }
            Self::NoPermission { group } => {
                write!(out, "{DEVICE} may only be used by root and the group {group}")
            }
            Self::NoProcessor => {
                write!(
                    out,
                    "{DEVICE} is not hardware virtualization: the processor offers neither VMX nor SVM"
                )
            }
            Self::Broken { reason } => write!(out, "{DEVICE} failed the probe: {reason}"),
        }
    }
}

/// Opens the device, or says why that cannot be.
pub fn open() -> Result<File, Verdict> {
    File::options().read(true).write(true).open(DEVICE).map_err(|error| match error.kind() {
        // The second and third: a node without a driver behind it.
        io::ErrorKind::NotFound => Verdict::Absent,
        _ if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => Verdict::Absent,
        io::ErrorKind::PermissionDenied => Verdict::NoPermission { group: group_of(Path::new(DEVICE)) },
        _ => Verdict::Broken { reason: error.to_string() },
    })
}

/// Finds out what an opened device is good for, by running `prober` (the program `bathy` with [`VERB`]).
pub fn measure(prober: &mut Command) -> Verdict {
    match timed(prober, DEADLINE) {
        Ok(verdict) => verdict,
        Err(error) => Verdict::Broken { reason: error.to_string() },
    }
}

fn timed(prober: &mut Command, deadline: Duration) -> io::Result<Verdict> {
    let started = Instant::now();
    let mut child = prober.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if started.elapsed() > deadline {
            child.kill()?;
            child.wait()?;
            let reason =
                format!("the probe did not finish within {} s; the machine may be busy", deadline.as_secs());
            return Ok(Verdict::Broken { reason });
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    if status.success() {
        let milliseconds = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        return Ok(Verdict::Hardware { milliseconds });
    }
    // Killed earlier, it was not by the limit.
    let used_up = started.elapsed() >= Duration::from_secs(CPU_LIMIT);
    if status.signal() == Some(Signal::KILL.as_raw()) && used_up {
        return Ok(Verdict::NotHardware { milliseconds: CPU_LIMIT * 1000 });
    }
    let mut reason = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut reason)?;
    }
    Ok(Verdict::Broken { reason: reason.trim().to_owned() })
}

/// Runs the probe guest in this process, which the kernel ends if that takes too much processor time.
pub fn run_guest() -> Result<(), ProbeError> {
    // At the hard limit the kernel kills: that can be neither ignored nor dumped.
    let limit = Rlimit { current: Some(CPU_LIMIT), maximum: Some(CPU_LIMIT) };
    setrlimit(Resource::Cpu, limit).map_err(|error| ProbeError::Limit(error.into()))?;
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
    loop {
        match cpu.run() {
            Ok(VcpuExit::Hlt) => return Ok(()),
            Ok(other) => return Err(ProbeError::Exit(format!("{other:?}"))),
            // A signal, such as that of being stopped for a while.
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => return Err(ProbeError::Kvm("run the guest", error)),
        }
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
    fn every_verdict_says_what_was_found_and_who_may_is_named() {
        let verdicts = [
            (Verdict::Hardware { milliseconds: 30 }, "is hardware virtualization"),
            (
                Verdict::NotHardware { milliseconds: 2000 },
                "100 million instructions did not finish in 2000 ms of processor time",
            ),
            (Verdict::Absent, "there is no /dev/kvm"),
            (Verdict::NoPermission { group: "kvm".to_owned() }, "root and the group kvm"),
            (Verdict::NoProcessor, "neither VMX nor SVM"),
            (Verdict::Broken { reason: "no memory".to_owned() }, "no memory"),
        ];
        for (verdict, words) in verdicts {
            assert!(verdict.to_string().contains(words), "{verdict}");
            let text = serde_json::to_string(&verdict).unwrap();
            assert_eq!(serde_json::from_str::<Verdict>(&text).unwrap(), verdict, "{text}");
        }
        let cure = |group: &str| Verdict::NoPermission { group: group.to_owned() }.cure().unwrap();
        assert!(cure("kvm").contains("usermod -aG kvm $USER"));
        assert!(cure("root").contains("chgrp kvm"), "nobody is told to join the group root");
    }

    /// Longer than any machine is busy.
    const PATIENCE: Duration = Duration::from_secs(200);

    #[test]
    fn a_probe_that_is_killed_by_others_tells_nothing() {
        let killed = timed(Command::new("sh").args(["-c", "kill -9 $$"]), PATIENCE).unwrap();
        assert!(matches!(killed, Verdict::Broken { .. }), "{killed:?}");
    }

    #[test]
    fn a_probe_that_uses_up_its_processor_time_is_no_hardware() {
        let mut busy = Command::new("sh");
        busy.args(["-c", &format!("ulimit -t {CPU_LIMIT}; while :; do :; done")]);
        let verdict = timed(&mut busy, PATIENCE).unwrap();
        assert_eq!(verdict, Verdict::NotHardware { milliseconds: CPU_LIMIT * 1000 });
    }

    #[test]
    fn a_probe_that_gets_no_processor_tells_nothing_about_the_hardware() {
        // Longer than the old limit of wall time, and hardly any processor time: as on a busy machine.
        let slow = timed(Command::new("sleep").arg("2"), PATIENCE).unwrap();
        assert!(slow.is_hardware(), "{slow:?}");
        let stuck = timed(Command::new("sleep").arg("60"), Duration::from_millis(50)).unwrap();
        assert!(matches!(&stuck, Verdict::Broken { reason } if reason.contains("busy")), "{stuck:?}");
        assert!(!stuck.is_measurement(), "it is tried again at the next start");
    }

    #[test]
    fn a_probe_that_fails_says_why() {
        let verdict =
            timed(Command::new("sh").args(["-c", "echo no guests today >&2; exit 1"]), DEADLINE).unwrap();
        assert_eq!(verdict, Verdict::Broken { reason: "no guests today".to_owned() });
    }

    #[test]
    fn a_probe_that_finishes_is_hardware() {
        assert!(matches!(timed(&mut Command::new("true"), DEADLINE).unwrap(), Verdict::Hardware { .. }));
    }
}
