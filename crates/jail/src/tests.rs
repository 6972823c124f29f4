//! What each part of a jail does to a real process, which reports what is left to it.
//!
//! The process is this test program again, started as a keeper is: in namespaces of its own, as their root. It runs the test
//! that started it, up to [`confined`], where it takes the other branch and reports to a file that it opened before.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::process::{Resource, WaitId, WaitIdOptions, dumpable_behavior, getrlimit, waitid};
use rustix::thread::{
    CapabilitySet, capabilities, capabilities_secure_bits, capability_is_in_bounding_set, no_new_privs,
};

use crate::filter::{Filter, GATEWAY};
use crate::limits::{self, Limit};
use crate::spawn::{self, Identity, Program};
use crate::{privileges, root};

/// Precedes the report's path among the arguments. The test harness takes it for the name of tests to leave out.
const REPORT: &str = "--skip=report:";

/// How a confined process ended, and what it reported.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    status: Option<i32>,
    signal: Option<i32>,
    report: String,
}

/// Runs `part` of a test in a process started as a keeper is, and waits for its end. `None` in that process itself.
fn confined(test: &str, part: fn(&mut File)) -> Option<Outcome> {
    if let Some(path) = std::env::args().find_map(|arg| arg.strip_prefix(REPORT).map(PathBuf::from)) {
        part(&mut File::options().append(true).open(path).unwrap());
        return None;
    }
    let path = std::env::temp_dir().join(format!("bathy-jail-{}-{test}", std::process::id()));
    File::create(&path).unwrap();
    let name = format!("tests::{test}");
    let report = format!("{REPORT}{}", path.display());
    let args = ["test", "--exact", "--test-threads=1", &name, &report].map(|arg| CString::new(arg).unwrap());
    let program = File::open("/proc/self/exe").unwrap();
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let spawned = spawn::keeper(&Program {
        program: program.as_fd(),
        args: &args,
        descriptors: &[],
        identity: Identity::Own { uid, gid },
        entrance: None,
        before_start: None,
    });
    let spawned = spawned.unwrap();
    assert_eq!(spawned.failure(), None);
    let ended = waitid(WaitId::PidFd(spawned.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap().unwrap();
    let report = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    Some(Outcome { status: ended.exit_status(), signal: ended.terminating_signal(), report })
}

/// Runs `part` of a test confined; it has to come to its end, and to report this.
fn reports(test: &str, part: fn(&mut File), expected: &str) {
    if let Some(outcome) = confined(test, part) {
        assert_eq!(outcome, Outcome { status: Some(0), signal: None, report: expected.to_owned() });
    }
}

#[test]
fn limits_hold_for_soft_and_hard_value_and_are_not_raised() {
    let part = |report: &mut File| {
        limits::apply(limits::COMMON).unwrap();
        for value in [20, 1000] {
            limits::apply(&[Limit { resource: Resource::Nofile, value }]).unwrap();
        }
        let common = limits::COMMON.iter().map(|limit| limit.resource);
        for resource in common.chain([Resource::Nofile]) {
            let limit = getrlimit(resource);
            writeln!(report, "{resource:?} {:?} {:?}", limit.current, limit.maximum).unwrap();
        }
    };
    let expected = "\
        Core Some(1) Some(1)\n\
        Memlock Some(0) Some(0)\n\
        Msgqueue Some(0) Some(0)\n\
        Nice Some(0) Some(0)\n\
        Rtprio Some(0) Some(0)\n\
        Nofile Some(20) Some(20)\n";
    reports("limits_hold_for_soft_and_hard_value_and_are_not_raised", part, expected);
}

#[test]
fn the_root_is_empty_and_takes_no_files_devices_or_programs() {
    let part = |report: &mut File| {
        root::enter_empty_root().unwrap();
        writeln!(report, "{:?}", fs::read_dir("/").unwrap().count()).unwrap();
        writeln!(report, "{:?}", std::env::current_dir().unwrap()).unwrap();
        writeln!(report, "{:?}", File::create("/file").unwrap_err().kind()).unwrap();
        writeln!(report, "{:?}", File::open("/../proc/self/exe").unwrap_err().kind()).unwrap();
        let wanted = StatVfsMountFlags::RDONLY
            | StatVfsMountFlags::NOSUID
            | StatVfsMountFlags::NODEV
            | StatVfsMountFlags::NOEXEC;
        writeln!(report, "{}", statvfs("/").unwrap().f_flag.contains(wanted)).unwrap();
    };
    let expected = "0\n\"/\"\nReadOnlyFilesystem\nNotFound\ntrue\n";
    reports("the_root_is_empty_and_takes_no_files_devices_or_programs", part, expected);
}

#[test]
fn no_privilege_is_left_in_any_set_and_none_comes_back() {
    let part = |report: &mut File| {
        let everything = capabilities(None).unwrap();
        assert!(everything.effective.contains(CapabilitySet::SYS_ADMIN), "there is something to give up");
        privileges::drop_all().unwrap();
        let left = capabilities(None).unwrap();
        let sets = [left.effective, left.permitted, left.inheritable].map(|set| set.bits());
        let bounding = (0..u64::BITS).map(|number| CapabilitySet::from_bits_retain(1 << number));
        let bounding = bounding.filter(|one| capability_is_in_bounding_set(*one).unwrap_or(false)).count();
        writeln!(report, "{sets:?} {bounding}").unwrap();
        // Every bit and its lock, except for the bit that keeps capabilities: of that one the lock only.
        writeln!(report, "{:#010b}", capabilities_secure_bits().unwrap().bits()).unwrap();
        writeln!(report, "{} {:?}", no_new_privs().unwrap(), dumpable_behavior().unwrap()).unwrap();
    };
    let expected = "[0, 0, 0] 0\n0b11101111\ntrue NotDumpable\n";
    reports("no_privilege_is_left_in_any_set_and_none_comes_back", part, expected);
}

#[test]
fn a_call_that_is_not_in_the_table_ends_the_process() {
    let outcome = confined("a_call_that_is_not_in_the_table_ends_the_process", |report| {
        Filter::install(&GATEWAY.compile().unwrap()).unwrap();
        // In the table, so that it passes.
        rustix::thread::sched_yield();
        let _ = writeln!(report, "a gateway writes to no file");
    });
    if let Some(outcome) = outcome {
        let expected = Outcome { status: None, signal: Some(libc::SIGSYS), report: String::new() };
        assert_eq!(outcome, expected);
    }
}
