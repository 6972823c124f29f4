//! J3, J4 and U1: the attacker's program in place of the guest kernel, in the kernel's own jail.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use crate::run::{Run, held_and_failed, probe, probe_on_host};
use crate::user::ordinary_user;

/// Services of the host that a process without a network of its own could reach by a well-known name.
struct Targets {
    datagrams: UnixDatagram,
    streams: UnixListener,
}

fn targets() -> &'static Targets {
    static TARGETS: OnceLock<Targets> = OnceLock::new();
    TARGETS.get_or_init(|| {
        let name = SocketAddr::from_abstract_name("bathysphere-attack-target").expect("a short name");
        let datagrams = UnixDatagram::bind_addr(&name).expect("the name is free");
        let streams = UnixListener::bind_addr(&name).expect("the name is free");
        datagrams.set_nonblocking(true).expect("a socket");
        streams.set_nonblocking(true).expect("a socket");
        Targets { datagrams, streams }
    })
}

fn assert_closed(run: Run) {
    let ran = run.finish(Duration::from_secs(62));
    let (held, failed) = held_and_failed(&ran.stderr);
    assert_eq!(failed, 0, "\n{}", ran.stderr);
    assert!(held > 1300, "only {held} attempts were made");
    assert_eq!(ran.code, Some(125));
    assert!(targets().streams.accept().is_err(), "something connected to a socket of the host");
}

/// A sandbox with the attacker's program as kernel, started when there is something on the host to attack.
fn arguments<'a>(mode: &'a str, kernel: &'a Path) -> [&'a str; 8] {
    targets();
    let kernel = kernel.to_str().expect("build folders are text");
    ["--uml-mode", mode, "--kernel", kernel, "--ready-timeout", "60", "--", "true"]
}

#[test]
fn u1_j3_j4_nothing_answers_in_the_guest_kernels_jail() {
    assert_closed(Run::start(&arguments("seccomp", probe())));
}

#[test]
fn u1_j3_j4_nothing_answers_in_the_guest_kernels_jail_in_ptrace_mode() {
    assert_closed(Run::start(&arguments("ptrace", probe())));
}

#[test]
fn u1_j3_j4_nothing_answers_in_the_jail_of_an_ordinary_user() {
    if rustix::process::geteuid().is_root() {
        let user = ordinary_user();
        assert_closed(user.start(&arguments("seccomp", &user.path("jail-probe"))));
    }
}

/// An attempt that fails for another reason than the jail would prove nothing.
#[test]
fn j3_the_same_attempts_are_noticed_where_there_is_no_jail() {
    targets();
    let ran = probe_on_host(&["outside"]);
    let (held, failed) = held_and_failed(&ran.stdout);
    assert!(targets().datagrams.recv(&mut [0; 16]).is_ok(), "the datagram did not come");
    if rustix::process::geteuid().is_root() {
        let vain: Vec<_> = ran.stdout.lines().filter(|line| line.starts_with("held")).collect();
        assert!(vain.is_empty(), "these attempts fail outside of the jail too: {vain:?}");
    }
    assert!(failed > 200 && held < failed / 4, "{held} held, {failed} did not");
}
