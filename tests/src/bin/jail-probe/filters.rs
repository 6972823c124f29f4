//! Rule-by-rule test of a filter (J2): `jail-probe filter TABLE INSTALLED`.
//!
//! In this way the verdict is certain: a refused call kills, and nothing but the filter sends that signal.

use bathy_jail::filter::{
    Filter, GATEWAY, GUEST_PTRACE, GUEST_SECCOMP, Group, KEEPER, KEEPER_KVM, Otherwise, Rule, VCPU,
};

use crate::report::Report;
use crate::rules::{as_expected, cases};
use crate::sys::{self, Fate};

/// Tries every case of the named table under the filter that `installed` names: "itself", one with a call too many
/// ("wider"), one with a group too few ("narrower"), or none at all ("nothing").
pub fn run(table: &str, installed: &str) -> Result<Report, String> {
    let table = match table {
        "keeper" => KEEPER,
        "keeper-kvm" => KEEPER_KVM,
        "gateway" => GATEWAY,
        "vcpu" => VCPU,
        // The real guest filters refuse by an error, which the kernel gives for reasons of its own too.
        "guest-seccomp" => Filter { otherwise: Otherwise::Kill, ..GUEST_SECCOMP },
        "guest-ptrace" => Filter { otherwise: Otherwise::Kill, ..GUEST_PTRACE },
        other => return Err(format!("there is no table {other:?}")),
    };
    const EXTRA: Group =
        Group { purpose: "show that it is noticed", rules: &[Rule { call: libc::SYS_getuid, forms: &[] }] };
    let groups: Vec<Group> = match installed {
        "itself" | "nothing" => table.groups.to_vec(),
        "wider" => table.groups.iter().copied().chain([EXTRA]).collect(),
        "narrower" => table.groups.iter().copied().skip(1).collect(),
        other => return Err(format!("there is no filter {other:?}")),
    };
    let filter = Filter { groups: Box::leak(groups.into_boxed_slice()), ..table };
    let program = filter.compile().map_err(|error| error.to_string())?;
    let mut report = Report::new(false);
    for case in cases(&table) {
        // Without a filter only such calls are made as are harmless to the machine.
        if installed == "nothing" && !case.altered {
            continue;
        }
        let install = || installed == "nothing" || Filter::install(&program).is_ok();
        let fate = sys::attempt_after(case.call, case.args, install);
        let held = as_expected(&case, fate, Fate::Signal(libc::SIGSYS));
        report.add(held, &format!("call {:#x}", case.call), || format!("{:x?}: {fate:?}", case.args));
    }
    Ok(report)
}
