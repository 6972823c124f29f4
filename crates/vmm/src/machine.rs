//! The virtual machine as KVM makes it: memory, interrupt controllers, processors. Nothing runs yet.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bathy_devices::GuestRam;
use kvm_bindings::{
    KVM_BUS_LOCK_DETECTION_EXIT, KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_BUS_LOCK_EXIT,
    KVM_CAP_X86_NOTIFY_VMEXIT, KVM_MAX_CPUID_ENTRIES, KVM_PMU_CAP_DISABLE, KVM_X86_NOTIFY_VMEXIT_ENABLED,
    KVM_X86_NOTIFY_VMEXIT_USER, kvm_enable_cap,
};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, VcpuFd, VmFd};
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use crate::arch::{cpuid, layout, registers};
use crate::sys;

/// The version of KVM's interface that has not changed since 2007.
const KVM_VERSION: i32 = 12;

/// The most processors that the microVM kernel is built for.
const MOST_PROCESSORS: usize = 64;

/// What we cannot do without.
const NEEDED: [(Cap, &str); 5] = [
    (Cap::UserMemory, "memory of our own"),
    (Cap::Irqchip, "interrupt controllers"),
    (Cap::Ioeventfd, "notifications by descriptor"),
    (Cap::Irqfd, "interrupts by descriptor"),
    (Cap::ImmediateExit, "processors that can be stopped"),
];

/// What KVM did not do.
#[derive(Debug, Error)]
pub enum MachineError {
    /// Not KVM, or one from another time.
    #[error("/dev/kvm speaks version {0} of its interface, not {KVM_VERSION}. Use --engine uml")]
    Version(i32),
    #[error("This machine's KVM offers no {0}, which the kvm engine needs. Use --engine uml")]
    Lacks(&'static str),
    /// More processors than KVM can have.
    #[error(
        "A guest with {wanted} processors is more than this machine's KVM can have: {most}. Use fewer --cpus"
    )]
    Processors { wanted: u8, most: usize },
    #[error("KVM refused to {0}. `bathy doctor` tests it; --engine uml does without it")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// The description of the processors does not fit.
    #[error("The description of the guest's processors is too long: {0:?}")]
    Identity(vmm_sys_util::fam::Error),
    /// A descriptor could not be made.
    #[error("A descriptor cannot be made")]
    Descriptor(#[source] std::io::Error),
}

#[derive(Debug)]
pub struct Machine {
    vm: VmFd,
    cpus: Vec<VcpuFd>,
    /// Held, so that the memory stays mapped for as long as the machine exists.
    ram: Arc<GuestRam>,
}

impl Machine {
    /// Makes a machine with `count` processors on an opened `/dev/kvm`, which is closed afterwards.
    ///
    /// # Errors
    /// When KVM cannot do what is needed.
    pub fn new(device: OwnedFd, ram: Arc<GuestRam>, count: u8) -> Result<Self, MachineError> {
        let kvm = sys::kvm(device);
        let version = kvm.get_api_version();
        if version != KVM_VERSION {
            return Err(MachineError::Version(version));
        }
        if let Some((_, name)) = NEEDED.iter().find(|(needed, _)| !kvm.check_extension(*needed)) {
            return Err(MachineError::Lacks(name));
        }
        // What the guest kernel is built for, at most.
        let most = kvm.get_max_vcpus().min(MOST_PROCESSORS);
        if usize::from(count) > most {
            return Err(MachineError::Processors { wanted: count, most });
        }
        let vm = kvm.create_vm().map_err(refused("create a machine"))?;
        let task_state = usize::try_from(layout::TASK_STATE).unwrap_or(usize::MAX);
        vm.set_tss_address(task_state).map_err(refused("take the address of its own pages"))?;
        sys::give_memory(&vm, &ram).map_err(refused("take the guest's memory"))?;
        vm.create_irq_chip().map_err(refused("create interrupt controllers"))?;
        disable_counters(&kvm, &vm).map_err(refused("do without performance counters"))?;
        leave_for_locks_and_hangs(&kvm, &vm).map_err(refused("leave the guest for locks and hangs"))?;
        let cpus = (0..count).map(|number| processor(&kvm, &vm, number, count)).collect::<Result<_, _>>()?;
        Ok(Self { vm, cpus, ram })
    }

    /// Lets every write to `event` interrupt the guest on `line`.
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn connect_line(&self, event: &EventFd, line: u32) -> Result<(), MachineError> {
        self.vm.register_irqfd(event, line).map_err(refused("connect an interrupt line"))
    }

    /// A descriptor that, written to, interrupts the guest on `line`.
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn line(&self, line: u32) -> Result<EventFd, MachineError> {
        let event = sys::event().map_err(MachineError::Descriptor)?;
        self.connect_line(&event, line)?;
        Ok(event)
    }

    /// A descriptor that becomes readable when the guest writes the 32-bit `value` to `address`, without any of our
    /// threads taking part.
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn notification(&self, address: u64, value: u32) -> Result<EventFd, MachineError> {
        let event = sys::event().map_err(MachineError::Descriptor)?;
        let address = IoEventAddress::Mmio(address);
        self.vm.register_ioevent(&event, &address, value).map_err(refused("connect a notification"))?;
        Ok(event)
    }

    /// The first processor is to begin at `entry`.
    ///
    /// # Errors
    /// When KVM refuses.
    pub fn enter_at(&self, entry: u64) -> Result<(), MachineError> {
        let Some(first) = self.cpus.first() else { return Ok(()) };
        registers::set_first(first, entry).map_err(refused("set the first processor's registers"))
    }

    /// The machine's parts: the machine itself, which has to stay open, and its processors, to be run.
    pub(crate) fn into_parts(self) -> (VmFd, Vec<VcpuFd>, Arc<GuestRam>) {
        (self.vm, self.cpus, self.ram)
    }
}

/// Disables performance counters, which reveal more about a guest's neighbours than about itself. Where KVM cannot disable them,
/// they are only left out of what CPUID offers.
fn disable_counters(kvm: &Kvm, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
    let offered = kvm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into());
    if u32::try_from(offered).is_ok_and(|offered| offered & KVM_PMU_CAP_DISABLE != 0) {
        let args = [KVM_PMU_CAP_DISABLE.into(), 0, 0, 0];
        let cap = kvm_enable_cap { cap: KVM_CAP_PMU_CAPABILITY, args, ..kvm_enable_cap::default() };
        vm.enable_cap(&cap)?;
    }
    Ok(())
}

/// Has the guest leave for two things that slow the whole host down: locked accesses across two cache lines, which lock the
/// bus for all processors, and code that lets no interrupt in. Only newer processors can; on the others there is nothing to ask for.
fn leave_for_locks_and_hangs(kvm: &Kvm, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
    let notify = KVM_X86_NOTIFY_VMEXIT_ENABLED | KVM_X86_NOTIFY_VMEXIT_USER;
    for (cap, wanted) in
        [(KVM_CAP_X86_BUS_LOCK_EXIT, KVM_BUS_LOCK_DETECTION_EXIT), (KVM_CAP_X86_NOTIFY_VMEXIT, notify)]
    {
        let offered = u32::try_from(kvm.check_extension_raw(cap.into())).unwrap_or(0);
        if offered & wanted == wanted {
            vm.enable_cap(&kvm_enable_cap { cap, args: [wanted.into(), 0, 0, 0], ..Default::default() })?;
        }
    }
    Ok(())
}

fn processor(kvm: &Kvm, vm: &VmFd, number: u8, count: u8) -> Result<VcpuFd, MachineError> {
    let cpu = vm.create_vcpu(number.into()).map_err(refused("create a processor"))?;
    let offered =
        kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(refused("tell what its processors can do"))?;
    let who = cpuid::ProcessorId {
        number,
        count,
        deadline_timer: vm.check_extension(Cap::TscDeadlineTimer),
        no_extended_state: sys::host_is_emulated(),
    };
    let entries = cpuid::filtered(&offered, who).map_err(MachineError::Identity)?;
    cpu.set_cpuid2(&entries).map_err(refused("take what its processors can do"))?;
    registers::enable_fast_strings(&cpu).map_err(refused("let its processors copy quickly"))?;
    Ok(cpu)
}

fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> MachineError {
    move |error| MachineError::Kvm(what, error)
}
