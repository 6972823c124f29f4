//! Rows of attacks: what is tried, the outcome, whether the defence held. Every row is printed, and written to a file of its
//! test, from which `tests/network/table.py` makes a table.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use super::World;
use crate::repository;
use serde_json::Value;

use super::guest::{Guest, Outcome};

/// Everything that a policy can allow.
pub const UNDEFENDED: [&str; 14] = [
    "--net",
    "open",
    "--allow",
    "any",
    "--allow",
    "private",
    "--allow",
    "loopback",
    "--allow",
    "link-local",
    "--allow",
    "metadata",
    "--allow",
    "host",
];

thread_local! {
    /// The file of the test that this thread runs.
    static FILE: RefCell<Option<File>> = const { RefCell::new(None) };
}

#[derive(Debug)]
pub struct Attack {
    pub id: &'static str,
    /// A description of the attack.
    pub what: String,
    pub row: Value,
    /// Whether the row gets through without a defence.
    pub works: bool,
}

/// A row that gets through without a defence.
pub fn attack(id: &'static str, what: impl Into<String>, row: Value) -> Attack {
    Attack { id, what: what.into(), row, works: true }
}

/// A row that no policy lets through: there is no server that would answer, or it is always refused.
pub fn hopeless(id: &'static str, what: impl Into<String>, row: Value) -> Attack {
    Attack { works: false, ..attack(id, what, row) }
}

/// A step before a row that is not an attack.
pub fn step(row: Value) -> Attack {
    hopeless("", "", row)
}

/// The rows in the probe's format.
pub fn rows(attacks: &[Attack]) -> Vec<Value> {
    attacks.iter().map(|attack| attack.row.clone()).collect()
}

/// The folder of the files: the results of the nested test bed, or cargo's target folder.
fn folder() -> PathBuf {
    let target =
        || std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
    std::env::var_os("BED_RESULTS").map_or_else(target, PathBuf::from).join("attack-table")
}

/// A file of its own for each test, named after it: tests run at the same time, and a second run replaces the first.
fn begun() -> File {
    let folder = folder();
    fs::create_dir_all(&folder).expect("the folder for results can be written");
    let test = std::thread::current().name().unwrap_or("other").replace("::", ".");
    File::create(folder.join(format!("{test}.tsv"))).expect("the folder for results can be written")
}

/// Records a row: the attack's number, its description, the outcome, and whether that is good in one word.
fn note(id: &str, what: &str, outcome: &str, result: &str) {
    let clean = |text: &str| text.replace(|character: char| character.is_control(), " ");
    let (what, outcome) = (clean(what), clean(outcome));
    println!("{id:3} {what:60} {outcome:20} {result}");
    FILE.with_borrow_mut(|file| {
        let file = file.get_or_insert_with(begun);
        writeln!(file, "{id}\t{what}\t{outcome}\t{result}").expect("the file for results can be written");
    });
}

/// Records a row and asserts that its defence held.
#[track_caller]
pub fn row(id: &str, what: &str, outcome: &str, held: bool) {
    note(id, what, outcome, if held { "held" } else { "NOT HELD" });
    assert!(held, "{id} {what}: {outcome}");
}

/// Records a row and asserts that it got through without its defence.
#[track_caller]
pub fn undefended(id: &str, what: &str, outcome: &str, through: bool) {
    note(id, what, outcome, if through { "through" } else { "NOT THROUGH" });
    assert!(through, "{id} {what}: without the defence it has to work: {outcome}");
}

/// Tries all rows: each is denied, and nothing is reached beyond what is allowed.
#[track_caller]
pub fn all_held(guest: &Guest<'_>, more: &str, attacks: &[Attack], allowed: &[&str]) -> Vec<Outcome> {
    all_held_by(guest, more, attacks, allowed, Outcome::was_denied)
}

/// As [`all_held`], where `holds` decides whether a row was held.
#[track_caller]
pub fn all_held_by(
    guest: &Guest<'_>,
    more: &str,
    attacks: &[Attack],
    allowed: &[&str],
    holds: impl Fn(&Outcome) -> bool,
) -> Vec<Outcome> {
    guest.world.forget_contacts();
    let outcomes = guest.try_with(more, &rows(attacks));
    for (attack, outcome) in attacks.iter().zip(&outcomes).filter(|(attack, _)| !attack.id.is_empty()) {
        note(attack.id, &attack.what, outcome.word(), if holds(outcome) { "held" } else { "NOT HELD" });
    }
    let failed: Vec<_> = outcomes.iter().filter(|outcome| !holds(outcome)).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert_eq!(guest.world.contacts_beyond(allowed), []);
    outcomes
}

/// Whether a row got through.
pub fn is_through(outcome: &Outcome) -> bool {
    ["open", "answered", "status 200", "code 0", "believed"].contains(&outcome.word())
}

/// Tries the same rows without a defence: each one that can get through does.
#[track_caller]
pub fn all_work(world: &World, more: &str, attacks: &[Attack]) {
    all_work_allowing(world, &[], more, attacks);
}

/// As [`all_work`], with more allowed targets: an address that embeds another one has to be allowed by itself.
#[track_caller]
pub fn all_work_allowing(world: &World, allowed: &[&str], more: &str, attacks: &[Attack]) {
    let rules: Vec<_> = allowed.iter().flat_map(|target| ["--allow", target]).collect();
    let open = Guest::start(world, "undefended", &[&UNDEFENDED[..], &rules].concat());
    let possible: Vec<_> = attacks.iter().filter(|attack| attack.works).collect();
    all_work_in(&open, more, &possible, is_through);
    world.ok(&["rm", "-f", "undefended"]);
}

/// As [`all_work`], in an existing sandbox, where `is_through` decides whether a row got through. Rows that cannot get through
/// are tried, too, because later ones may need them.
#[track_caller]
pub fn all_work_in(open: &Guest<'_>, more: &str, attacks: &[&Attack], is_through: impl Fn(&Outcome) -> bool) {
    let rows: Vec<_> = attacks.iter().map(|attack| attack.row.clone()).collect();
    for (attack, outcome) in attacks.iter().zip(open.try_with(more, &rows)) {
        if attack.works {
            let through = is_through(&outcome);
            let reported = if through { outcome.word().to_owned() } else { outcome.result.to_string() };
            undefended(attack.id, &attack.what, &reported, through);
        }
    }
}
