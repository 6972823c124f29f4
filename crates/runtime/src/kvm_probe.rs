//! Probes whether `/dev/kvm` is hardware virtualization: a guest of a few instructions is run and timed.
//!
//! The device's presence proves nothing. On some hosts it is emulated, a thousand times too slow for a guest.
//! So a counting loop has to finish within a limit of CPU time, in a process of its own that the kernel kills
//! otherwise. A limit of wall time would fail on a busy machine.

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

pub(crate) const DEVICE: &str = "/dev/kvm";
/// The hidden subcommand of `bathy` that runs the probe guest.
pub const VERB: &str = "probe-kvm";
/// The iterations of the loop. Hardware takes well under a tenth of the limit, emulation ten times the limit.
const LOOPS: u32 = 50_000_000;
/// The instructions that the guest executes, for messages: two for each iteration.
const MILLION_INSTRUCTIONS: u32 = LOOPS / 1_000_000 * 2;
/// The CPU time of the probe in seconds.
const CPU_LIMIT: u64 = 2;
/// The wall-time limit of the probe. A machine that does not give it enough CPU time until then is too busy
/// to decide.
const DEADLINE: Duration = Duration::from_secs(20);
/// The address of the guest's code.
const CODE: u64 = 0x1000;

/// The probe could not be run.
#[derive(Debug, Error)]
pub enum ProbeError {
    #[error("KVM refused to {0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    #[error("No memory for the probe guest")]
    Memory(#[source] io::Error),
    /// Without a limit the probe might never end.
    #[error("The probe's processor time cannot be limited")]
    Limit(#[source] io::Error),
    /// The guest did something unexpected.
    #[error("The probe guest ended unexpectedly: {0}")]
    Exit(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum KvmSupport {
    /// Guests run at full speed.
    Hardware {
        /// How long the probe guest took.
        milliseconds: u64,
    },
    /// There is a device, but the probe guest did not finish in time.
    NotHardware {
        /// The limit of CPU time.
        milliseconds: u64,
    },
    Absent,
    /// There is a device, but we have no permission to use it.
    NoPermission {
        /// The group that has permission.
        group: String,
    },
    /// There is a usable device, but the processor has no virtualization support. No guest was run.
    NoProcessor,
    Broken {
        reason: String,
    },
}

impl KvmSupport {
    /// Whether guests run at full speed.
    pub(crate) fn is_hardware(&self) -> bool {
        matches!(self, Self::Hardware { .. })
    }

    /// Whether a guest was run and timed. A failure may have had any cause, including a temporary one.
    pub(crate) fn is_measurement(&self) -> bool {
        matches!(self, Self::Hardware { .. } | Self::NotHardware { .. })
    }

    /// How the user can fix it, if at all.
    pub fn hint(&self) -> Option<String> {
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

impl fmt::Display for KvmSupport {
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

/// Opens the device, or returns why that is not possible.
pub fn open() -> Result<File, KvmSupport> {
    File::options().read(true).write(true).open(DEVICE).map_err(|error| match error.kind() {
        // `ENXIO` and `ENODEV`: a device node without a driver.
        io::ErrorKind::NotFound => KvmSupport::Absent,
        _ if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => KvmSupport::Absent,
        io::ErrorKind::PermissionDenied => KvmSupport::NoPermission { group: group_of(Path::new(DEVICE)) },
        _ => KvmSupport::Broken { reason: error.to_string() },
    })
}

/// Probes an opened device by running `prober` (the program `bathy` with [`VERB`]).
pub fn measure(prober: &mut Command) -> KvmSupport {
    match timed(prober, DEADLINE) {
        Ok(result) => result,
        Err(error) => KvmSupport::Broken { reason: error.to_string() },
    }
}

fn timed(prober: &mut Command, deadline: Duration) -> io::Result<KvmSupport> {
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
            return Ok(KvmSupport::Broken { reason });
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    if status.success() {
        let milliseconds = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        return Ok(KvmSupport::Hardware { milliseconds });
    }
    // If it was killed earlier, then not by the limit.
    let used_up = started.elapsed() >= Duration::from_secs(CPU_LIMIT);
    if status.signal() == Some(Signal::KILL.as_raw()) && used_up {
        return Ok(KvmSupport::NotHardware { milliseconds: CPU_LIMIT * 1000 });
    }
    let mut reason = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut reason)?;
    }
    Ok(KvmSupport::Broken { reason: reason.trim().to_owned() })
}

/// Runs the probe guest in this process, which the kernel kills if it takes too much CPU time.
pub fn run_guest() -> Result<(), ProbeError> {
    // At the hard limit the kernel sends SIGKILL, which can be neither ignored nor dump core.
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
    let mut special = cpu.get_sregs().map_err(failed("read its registers"))?;
    special.cs.base = 0;
    special.cs.selector = 0;
    cpu.set_sregs(&special).map_err(failed("set its registers"))?;
    let mut registers = cpu.get_regs().map_err(failed("read its registers"))?;
    registers.rip = CODE;
    registers.rflags = 2;
    cpu.set_regs(&registers).map_err(failed("set its registers"))?;
    loop {
        match cpu.run() {
            Ok(VcpuExit::Hlt) => return Ok(()),
            Ok(other) => return Err(ProbeError::Exit(format!("{other:?}"))),
            // Interrupted by a signal, such as after a stop.
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
    fn every_verdict_is_described() {
        let results = [
            (KvmSupport::Hardware { milliseconds: 30 }, "is hardware virtualization"),
            (
                KvmSupport::NotHardware { milliseconds: 2000 },
                "100 million instructions did not finish in 2000 ms of processor time",
            ),
            (KvmSupport::Absent, "there is no /dev/kvm"),
            (KvmSupport::NoPermission { group: "kvm".to_owned() }, "root and the group kvm"),
            (KvmSupport::NoProcessor, "neither VMX nor SVM"),
            (KvmSupport::Broken { reason: "no memory".to_owned() }, "no memory"),
        ];
        for (result, text) in results {
            assert!(result.to_string().contains(text), "{result}");
            let text = serde_json::to_string(&result).unwrap();
            assert_eq!(serde_json::from_str::<KvmSupport>(&text).unwrap(), result, "{text}");
        }
        let hint = |group: &str| KvmSupport::NoPermission { group: group.to_owned() }.hint().unwrap();
        assert!(hint("kvm").contains("usermod -aG kvm $USER"));
        assert!(hint("root").contains("chgrp kvm"), "the hint must not be to join the group root");
    }

    /// Longer than any machine is busy.
    const TIMEOUT: Duration = Duration::from_secs(200);

    #[test]
    fn a_probe_that_is_killed_by_others_proves_nothing() {
        let killed = timed(Command::new("sh").args(["-c", "kill -9 $$"]), TIMEOUT).unwrap();
        assert!(matches!(killed, KvmSupport::Broken { .. }), "{killed:?}");
    }

    #[test]
    fn a_probe_that_uses_up_its_processor_time_is_no_hardware() {
        let mut busy = Command::new("sh");
        busy.args(["-c", &format!("ulimit -t {CPU_LIMIT}; while :; do :; done")]);
        let result = timed(&mut busy, TIMEOUT).unwrap();
        assert_eq!(result, KvmSupport::NotHardware { milliseconds: CPU_LIMIT * 1000 });
    }

    #[test]
    fn a_probe_without_cpu_time_proves_nothing_about_the_hardware() {
        // Longer than the former limit of wall time with hardly any CPU time, as on a busy machine.
        let slow = timed(Command::new("sleep").arg("2"), TIMEOUT).unwrap();
        assert!(slow.is_hardware(), "{slow:?}");
        let stuck = timed(Command::new("sleep").arg("60"), Duration::from_millis(50)).unwrap();
        assert!(matches!(&stuck, KvmSupport::Broken { reason } if reason.contains("busy")), "{stuck:?}");
        assert!(!stuck.is_measurement(), "it is tried again at the next start");
    }

    #[test]
    fn a_probe_that_fails_says_why() {
        let result =
            timed(Command::new("sh").args(["-c", "echo no guests today >&2; exit 1"]), DEADLINE).unwrap();
        assert_eq!(result, KvmSupport::Broken { reason: "no guests today".to_owned() });
    }

    #[test]
    fn a_probe_that_finishes_is_hardware() {
        assert!(matches!(timed(&mut Command::new("true"), DEADLINE).unwrap(), KvmSupport::Hardware { .. }));
    }
}
