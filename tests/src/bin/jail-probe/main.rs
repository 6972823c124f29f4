//! The attacker's program: started in place of the guest kernel it tries to get out; started by a test on the host it
//! shows what the same attempts do where nothing confines them.
//!
//! The jail fixes the command line, so each copy of this file contains its role, in [`ROLE`].

// The standard library's own `main` protects a page of a signal stack, which the jail refuses.
#![no_main]

mod attempts;
mod checks;
mod filters;
mod greed;
mod report;
mod roles;
mod rules;
mod sys;

use bathy_jail::filter::{Filter, GUEST_PTRACE, GUEST_SECCOMP};

use crate::report::Report;
use crate::sys::Fate;

/// Exit codes.
pub const SUCCESS: i32 = 0;
pub const FAILURE: i32 = 1;

/// Tests write the role's name over the dots of a copy.
#[used]
static ROLE: [u8; 48] = *b"jail-probe's role is: ..........................";

#[unsafe(no_mangle)]
extern "C" fn main() -> i32 {
    run()
}

fn run() -> i32 {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["outside"] => {
            let mut report = Report::new(true);
            attempts::run(&mut report, false);
            checks::run(&mut report, false);
            report.finish();
        }
        ["crash"] => {
            let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
            let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
            sys::crash(c"crash-outside")
        }
        ["filter", table, installed] => {
            return finish(without_core_dumps().and_then(|()| filters::run(table, installed)));
        }
        ["trapped", installed] => {
            return finish(without_core_dumps().and_then(|()| filters::trapped(installed)));
        }
        guest if guest.iter().any(|word| word.starts_with("memfd=")) => return as_guest(guest),
        _ => {
            eprintln!(
                "jail-probe: usage: jail-probe outside | crash | filter TABLE INSTALLED | trapped INSTALLED"
            );
            return FAILURE;
        }
    }
    SUCCESS
}

/// A host may start a program for each core dump, which every process has that a filter kills. A limit of 1 prevents that.
fn without_core_dumps() -> Result<(), String> {
    let none = rustix::process::Rlimit { current: Some(1), maximum: Some(1) };
    rustix::process::setrlimit(rustix::process::Resource::Core, none).map_err(|error| error.to_string())
}

fn finish(report: Result<Report, String>) -> i32 {
    match report {
        Ok(report) => {
            report.finish();
            SUCCESS
        }
        Err(error) => {
            eprintln!("jail-probe: {error}");
            FAILURE
        }
    }
}

fn as_guest(words: &[&str]) -> i32 {
    let role = std::hint::black_box(&ROLE).split(|byte| *byte == b':').next_back().unwrap_or_default();
    let role = String::from_utf8_lossy(role);
    match role.trim_matches(['.', ' ']) {
        "" => escape(words),
        role => return roles::play(role),
    }
    SUCCESS
}

/// Everything of J3 and U1, from inside.
fn escape(words: &[&str]) {
    let filter = if words.contains(&"seccomp=off") { GUEST_PTRACE } else { GUEST_SECCOMP };
    let mut report = Report::new(false);
    every_call(&mut report, filter.kernel());
    attempts::run(&mut report, true);
    checks::run(&mut report, true);
    report.finish();
}

/// The calls that are not refused are exactly those of the table.
fn every_call(report: &mut Report, filter: &Filter) {
    for case in rules::cases(filter) {
        let fate = sys::attempt(case.call, case.args);
        let held = rules::as_expected(&case, fate, Fate::Error(libc::EPERM));
        report.add(held, &format!("call {:#x}", case.call), || format!("{:x?}: {fate:?}", case.args));
    }
}
