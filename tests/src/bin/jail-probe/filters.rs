//! Rule-by-rule test of a filter (J2): `jail-probe filter TABLE INSTALLED`, and of what is trapped: `jail-probe trapped INSTALLED`.
//!
//! The result is certain: a refused call kills, and nothing but the filter sends that signal.

use bathy_jail::filter::{
    ByAddress, Filter, GATEWAY, GUEST_PTRACE, GUEST_SECCOMP, Group, GuestFilter, KEEPER, KEEPER_KVM,
    KERNEL_TEXT, Otherwise, Rule, STUB_CODE, UNPACKER, VCPU,
};

use crate::report::Report;
use crate::rules::{Case, as_expected, cases, mappings};
use crate::sys::{self, Fate, Gate};

const PAGE: u64 = 4096;

/// A table with the place where it holds.
struct Table {
    table: Filter,
    /// The whole filter with the table in it.
    within: fn(Filter) -> GuestFilter,
    /// Whether calls have to come from the stub's page.
    stub: bool,
}

impl Table {
    fn named(name: &str) -> Result<Self, String> {
        // The real guest filters refuse by an error, which the kernel gives for reasons of its own too.
        let deadly = |table: Filter| Filter { otherwise: Otherwise::Kill, ..table };
        let everywhere = |table| Self { table, within: GuestFilter::Everywhere, stub: false };
        Ok(match name {
            "keeper" => everywhere(KEEPER),
            "keeper-kvm" => everywhere(KEEPER_KVM),
            "gateway" => everywhere(GATEWAY),
            "unpacker" => everywhere(UNPACKER),
            "vcpu" => everywhere(VCPU),
            "guest-seccomp" => Self {
                table: deadly(*GUEST_SECCOMP.kernel()),
                within: |kernel| GuestFilter::ByAddress(ByAddress { kernel, ..by_address() }),
                stub: false,
            },
            "guest-stub" => Self {
                table: deadly(by_address().stub),
                within: |stub| GuestFilter::ByAddress(ByAddress { stub, ..by_address() }),
                stub: true,
            },
            "guest-ptrace" => everywhere(deadly(*GUEST_PTRACE.kernel())),
            other => return Err(format!("there is no table {other:?}")),
        })
    }

    fn cases(&self) -> Vec<Case> {
        let mut all = cases(&self.table);
        if self.stub {
            all.extend(mappings(&KERNEL_TEXT));
        }
        all
    }
}

fn by_address() -> ByAddress {
    match GUEST_SECCOMP {
        GuestFilter::ByAddress(tables) => tables,
        // Then there is no stub whose calls would be filtered.
        GuestFilter::Everywhere(kernel) => ByAddress { kernel, stub: kernel },
    }
}

/// Tries every case of the named table under the filter that `installed` names: "itself", one with a call too many
/// ("wider"), one with a group too few ("narrower"), or none at all ("nothing").
pub fn run(table: &str, installed: &str) -> Result<Report, String> {
    const EXTRA: Group = Group {
        purpose: "show that it is noticed",
        rules: &[Rule { call: libc::SYS_getuid, name: "getuid", forms: &[] }],
    };
    let place = Table::named(table)?;
    let table = place.table;
    let groups: Vec<Group> = match installed {
        "itself" | "nothing" => table.groups.to_vec(),
        "wider" => table.groups.iter().copied().chain([EXTRA]).collect(),
        "narrower" => table.groups.iter().copied().skip(1).collect(),
        other => return Err(format!("there is no filter {other:?}")),
    };
    let filter = (place.within)(Filter { groups: Box::leak(groups.into_boxed_slice()), ..table });
    let program = filter.compile().map_err(|error| error.to_string())?;
    let gate = if place.stub { Some(Gate::open(STUB_CODE)?) } else { None };
    let mut report = Report::new(false);
    for case in place.cases() {
        // Without a filter only such calls are made as are harmless to the machine.
        if installed == "nothing" && !case.altered {
            continue;
        }
        let install = || installed == "nothing" || Filter::install(&program).is_ok();
        let fate = sys::attempt_after(case.call, case.args, gate.as_ref(), install);
        let held = as_expected(&case, fate, Fate::Signal(libc::SIGSYS));
        report.add(held, &format!("call {:#x}", case.call), || format!("{:x?}: {fate:?}", case.args));
    }
    Ok(report)
}

/// Tries every call from addresses where guest programs can be, under the guest's filter ("itself") or under the guest kernel's
/// table wherever a call comes from ("everywhere").
pub fn trapped(installed: &str) -> Result<Report, String> {
    let filter = match installed {
        "itself" => GUEST_SECCOMP,
        "everywhere" => GuestFilter::Everywhere(*GUEST_SECCOMP.kernel()),
        other => return Err(format!("there is no filter {other:?}")),
    };
    let program = filter.compile().map_err(|error| error.to_string())?;
    let [start, end] = [KERNEL_TEXT.start, KERNEL_TEXT.end].map(u64::from);
    let none = Filter { groups: &[], ..*filter.kernel() };
    let mut report = Report::new(false);
    for (place, gate) in [
        // Its next instruction would be the first one of the kernel's.
        ("right before the kernel's text", Gate::ending_at(start)?),
        ("right behind the kernel's text", Gate::open(end)?),
        ("4 GiB above the kernel's text", Gate::open((1 << 32) + start + PAGE)?),
        ("right behind the stub's code", Gate::open(STUB_CODE + PAGE)?),
        ("4 GiB below the stub's code", Gate::open(STUB_CODE - (1 << 32))?),
        ("where libraries are", Gate::open(0x4000_0000)?),
    ] {
        for case in cases(&none) {
            let install = || sys::exit_when_trapped() && Filter::install(&program).is_ok();
            let fate = sys::attempt_after(case.call, case.args, Some(&gate), install);
            let held = as_expected(&case, fate, sys::TRAPPED);
            report.add(held, &format!("call {:#x} {place}", case.call), || format!("{fate:?}"));
        }
    }
    Ok(report)
}
