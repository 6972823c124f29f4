//! J2: every system call, and every allowed form with each of its conditions broken, under the real filters.

use crate::run::{held_and_failed, probe_on_host};

const TABLES: [&str; 8] =
    ["keeper", "keeper-kvm", "vcpu", "gateway", "unpacker", "guest-seccomp", "guest-stub", "guest-ptrace"];

fn assert_tight(table: &str) {
    let ran = probe_on_host(&["filter", table, "itself"]);
    let (held, failed) = held_and_failed(&ran.stdout);
    assert_eq!(failed, 0, "\n{}", ran.stdout);
    assert!(held > 1024, "only {held} calls were tried");
}

#[test]
fn j2_keeper_filter_allows_its_table_and_kills_for_all_else() {
    assert_tight("keeper");
}

#[test]
fn j2_keeper_filter_of_a_virtual_machine_allows_its_table_and_kills_for_all_else() {
    assert_tight("keeper-kvm");
}

#[test]
fn j2_gateway_filter_allows_its_table_and_kills_for_all_else() {
    assert_tight("gateway");
}

#[test]
fn j2_unpacker_filter_allows_its_table_and_kills_for_all_else() {
    assert_tight("unpacker");
}

#[test]
fn j2_virtual_processors_filter_allows_its_table_and_kills_for_all_else() {
    assert_tight("vcpu");
}

#[test]
fn j2_guest_filter_allows_its_table_and_nothing_else() {
    assert_tight("guest-seccomp");
}

#[test]
fn j2_guest_filter_of_ptrace_mode_allows_its_table_and_nothing_else() {
    assert_tight("guest-ptrace");
}

#[test]
fn j2_stubs_filter_allows_its_table_and_nothing_else() {
    assert_tight("guest-stub");
}

#[test]
fn j2_every_call_of_a_guest_program_is_trapped() {
    let ran = probe_on_host(&["trapped", "itself"]);
    let (held, failed) = held_and_failed(&ran.stdout);
    assert_eq!(failed, 0, "\n{}", ran.stdout);
    assert!(held > 6 * 1024, "only {held} calls were tried");
    let (held, failed) = held_and_failed(&probe_on_host(&["trapped", "everywhere"]).stdout);
    // Two calls are never shown to a filter.
    assert!(held <= 12 && failed > 6 * 1024, "without addresses: {held} held, {failed} failed");
}

#[test]
fn j2_a_filter_with_one_call_too_many_is_noticed() {
    for table in TABLES {
        let ran = probe_on_host(&["filter", table, "wider"]);
        assert_eq!(held_and_failed(&ran.stdout).1, 1, "{table}\n{}", ran.stdout);
        assert!(ran.stdout.contains(&format!("LEAK call {:#x}:", libc::SYS_getuid)), "{}", ran.stdout);
    }
}

#[test]
fn j2_a_filter_with_calls_missing_is_noticed() {
    for table in TABLES {
        let ran = probe_on_host(&["filter", table, "narrower"]);
        assert!(held_and_failed(&ran.stdout).1 > 0, "{table}\n{}", ran.stdout);
    }
}

#[test]
fn j2_without_a_filter_every_broken_form_is_noticed() {
    for table in TABLES {
        let (held, failed) = held_and_failed(&probe_on_host(&["filter", table, "nothing"]).stdout);
        assert!(held == 0 && failed > 5, "{table}: {held} held, {failed} failed");
    }
}
