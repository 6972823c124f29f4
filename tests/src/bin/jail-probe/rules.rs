//! Every form of every system call, with the decision of a filter's table.

use std::collections::BTreeMap;
use std::ops::Range;

use bathy_jail::filter::{Condition, Filter, Rule, Test};

use crate::sys::{Args, Fate};

/// Numbers up to here are tried; the kernel's own end far below.
const LAST: i64 = 1024;
/// Marks calls of the x32 interface.
const X32: u64 = 0x4000_0000;
/// The default value of arguments: invalid as descriptor, address, length, signal and process.
const NOTHING: u64 = u64::MAX;

/// One call to try.
#[derive(Debug)]
pub struct Case {
    pub call: u64,
    pub args: Args,
    /// Whether the filter lets it pass.
    pub allowed: bool,
    /// Whether it is a refused form of a call that is allowed in others.
    pub altered: bool,
}

/// The kernel's own helpers for user-space probes, which it shows to no filter (since 6.14). Where they are not called
/// from the kernel's own trampoline, they do nothing but fail in these ways.
const UNFILTERED: [(u64, Fate); 2] = [(335, Fate::Signal(libc::SIGILL)), (336, Fate::Error(libc::ENXIO))];

/// Whether a case ended as the table requires; `refusal` is what the filter does to a call that is not allowed.
pub fn as_expected(case: &Case, fate: Fate, refusal: Fate) -> bool {
    match fate {
        Fate::NoChild | Fate::Hung => false,
        fate if UNFILTERED.contains(&(case.call, fate)) => true,
        fate => (fate == refusal) != case.allowed,
    }
}

/// All cases for a filter.
pub fn cases(filter: &Filter) -> Vec<Case> {
    let rules: BTreeMap<i64, &Rule> = filter.rules().map(|rule| (rule.call, rule)).collect();
    let mut cases = Vec::new();
    for number in 0..=LAST {
        let call = number.cast_unsigned();
        match rules.get(&number) {
            Some(rule) if rule.forms.is_empty() => cases.push(plain(call, true)),
            Some(rule) => cases.extend(forms(rule)),
            None => cases.push(plain(call, false)),
        }
        // Every allowed call has a twin in the x32 interface.
        if rules.contains_key(&number) {
            cases.push(plain(call | X32, false));
        }
    }
    cases.extend([u32::MAX >> 1, u32::MAX].map(|number| plain(number.into(), false)));
    cases
}

/// Mappings of guest memory beside, over and within a range that has to stay empty.
pub fn mappings(empty: &Range<u32>) -> Vec<Case> {
    const PAGE: u64 = 4096;
    let [start, end] = [empty.start, empty.end].map(u64::from);
    let all = [
        (start - PAGE, PAGE, true),
        (PAGE, start - PAGE, true),
        (end, PAGE, true),
        (start + (1 << 32), PAGE, true),
        (start - PAGE, 2 * PAGE, false),
        (start - PAGE, (1 << 32) + PAGE, false),
        (start - PAGE, u64::from(u32::MAX), false),
        (PAGE, start, false),
        (PAGE, u64::MAX, false),
        (start, PAGE, false),
        (start, 0, false),
        (start + PAGE, PAGE, false),
        (end - PAGE, PAGE, false),
    ];
    let flags = u64::from((libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE).unsigned_abs());
    let case = |(address, size, allowed)| Case {
        call: libc::SYS_mmap.cast_unsigned(),
        // An invalid descriptor, so that nothing is mapped even if the filter allows it.
        args: [address, size, 5, flags, NOTHING, 0],
        allowed,
        altered: !allowed,
    };
    all.map(case).into()
}

fn plain(call: u64, allowed: bool) -> Case {
    Case { call, args: [NOTHING; 6], allowed, altered: false }
}

/// Each form of a rule as it is allowed, and with each of its conditions broken in turn.
fn forms(rule: &Rule) -> Vec<Case> {
    let call = rule.call.cast_unsigned();
    let mut cases = Vec::new();
    for form in rule.forms {
        let mut args = [NOTHING; 6];
        for condition in *form {
            set(&mut args, condition, met(condition.test));
        }
        cases.push(Case { call, args, allowed: true, altered: false });
        for condition in *form {
            for value in broken(condition.test) {
                let mut args = args;
                set(&mut args, condition, value);
                // What breaks this form may be another one.
                if !rule.forms.iter().any(|form| form.iter().all(|condition| holds(condition, &args))) {
                    cases.push(Case { call, args, allowed: false, altered: true });
                }
            }
        }
    }
    cases
}

fn set(args: &mut Args, condition: &Condition, value: u64) {
    if let Some(arg) = args.get_mut(usize::from(condition.argument)) {
        *arg = value;
    }
}

fn holds(condition: &Condition, args: &Args) -> bool {
    let whole = args.get(usize::from(condition.argument)).copied().unwrap_or_default();
    // Most conditions look at the lower half only, as the kernel does.
    let arg = whole & u64::from(u32::MAX);
    match condition.test {
        Test::Is(value) => arg == value.into(),
        Test::Without(mask) => arg & u64::from(mask) == 0,
        Test::Masked { mask, value } => arg & u64::from(mask) == value.into(),
        Test::Wide { mask, value } => whole & mask == value,
    }
}

fn met(test: Test) -> u64 {
    match test {
        Test::Is(value) => value.into(),
        Test::Without(mask) => (!mask).into(),
        Test::Masked { mask, value } => (!mask | value).into(),
        // The lowest of them: nothing that the range does not have comes with it.
        Test::Wide { value, .. } => value,
    }
}

fn broken(test: Test) -> Vec<u64> {
    let bits = |mask: u32| (0..u32::BITS).map(|bit| 1 << bit).filter(move |bit| mask & bit != 0);
    let narrow = |values: Vec<u32>| values.into_iter().map(u64::from).collect();
    match test {
        Test::Is(value) => {
            narrow(vec![value.wrapping_add(1), value.wrapping_sub(1), value ^ 0x4000_0000, !value])
        }
        Test::Without(mask) => narrow(bits(mask).map(|bit| !mask | bit).collect()),
        Test::Masked { mask, value } => narrow(bits(mask).map(|bit| (!mask | value) ^ bit).collect()),
        Test::Wide { mask, value } => {
            (0..u64::BITS).map(|bit| 1 << bit).filter(|bit| mask & bit != 0).map(|bit| value ^ bit).collect()
        }
    }
}
