//! The host user ids of a sandbox's processes.
//!
//! The kernel counts some resources per user, such as in-flight descriptors and epoll watches. With ids of
//! their own, sandboxes cannot use up each other's or the user's share (attacks U7 and U9).

use std::fs;

use bathy_jail::Identity;

use crate::slot::{self, CpuSlot};

/// The first user id that root gives to sandboxes, two for each slot. These are above people and system
/// services (below 2^16), /etc/subuid (100,000 to 600,100,000), systemd's containers (up to 0x6fff_ffff) and
/// the directory ranges of SSSD and FreeIPA (up to 2,000,200,000), and below systemd's foreign images (from
/// 0x7ffe_0000) and podman's automatic user namespaces (from 2^31 - 1).
const FIRST_SANDBOX_USER: u32 = 0x7800_0000;
/// The first user id that root gives to gateways, one for each slot, above all of the others.
const FIRST_GATEWAY_USER: u32 = 0x7c00_0000;
const _: () = assert!(FIRST_SANDBOX_USER + 2 * slot::SLOTS <= FIRST_GATEWAY_USER);
const _: () = assert!(FIRST_GATEWAY_USER + slot::SLOTS < 0x7ffe_0000);
/// The user id that root gives to the processes that unpack layers: that of the last slot's gateway, which no machine has. They
/// have nothing in common but the number.
const UNPACKER_USER: u32 = FIRST_GATEWAY_USER + slot::SLOTS - 1;
/// How many subordinate ids a sandbox of an ordinary user takes: the keeper's, the guest's and the gateway's.
const IDS_PER_SANDBOX: u32 = 3;

/// The user ids of one sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identities {
    /// The ids of the keeper, and of the guest if it has its own.
    pub keeper: Identity,
    pub gateway: Identity,
}

impl Identities {
    /// The ids for the sandbox in this slot.
    pub fn of(slot: &CpuSlot) -> Self {
        let uid = rustix::process::geteuid();
        if uid.is_root() {
            let keeper = Identity::Pair { first: FIRST_SANDBOX_USER + slot.number * 2 };
            return Self { keeper, gateway: Identity::One { id: FIRST_GATEWAY_USER + slot.number } };
        }
        let rank = slot.rank_among(processors());
        Subordinates::of_user(uid.as_raw()).and_then(|ranges| ranges.take(rank)).unwrap_or_else(Self::own)
    }

    /// The fallback when these ids cannot be mapped. Root has none: a guest must not have its id.
    pub(crate) fn fallback(&self) -> Option<Self> {
        matches!(self.keeper, Identity::Subordinate { .. }).then(Self::own)
    }

    /// The user's own id for all processes, which every ordinary user has.
    fn own() -> Self {
        let uid = rustix::process::geteuid().as_raw();
        let own = Identity::Own { uid, gid: rustix::process::getegid().as_raw() };
        Self { keeper: own, gateway: own }
    }

    /// Whether the guest has an id of its own besides the keeper's.
    pub(crate) fn guest_has_its_own(&self) -> bool {
        matches!(self.keeper, Identity::Pair { .. } | Identity::Subordinate { .. })
    }
}

/// The ids of a process that unpacks a layer.
pub(crate) fn of_unpacker() -> Identity {
    let uid = rustix::process::geteuid();
    if uid.is_root() {
        return Identity::One { id: UNPACKER_USER };
    }
    Identity::Own { uid: uid.as_raw(), gid: rustix::process::getegid().as_raw() }
}

/// The ids of root's sandboxes that this user namespace lacks, as text. A container often has only 65,536 ids
/// in all.
pub(crate) fn missing_of_root() -> Option<String> {
    let map = |file: &str| fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
    (!has_all_of_root(&map("uid_map")) || !has_all_of_root(&map("gid_map"))).then(range_of_root)
}

/// The id range of root's sandboxes.
pub(crate) fn range_of_root() -> String {
    format!("{FIRST_SANDBOX_USER} to {}", FIRST_GATEWAY_USER + slot::SLOTS - 1)
}

/// Whether a namespace with this uid map has the ids. The kernel does not map a range that spans two lines.
fn has_all_of_root(map: &str) -> bool {
    let ranges: Vec<Range> = map.lines().filter_map(Range::of_map).collect();
    let has = |first, count| ranges.iter().any(|range| range.contains(Range { first, count }));
    has(FIRST_SANDBOX_USER, 2 * slot::SLOTS) && has(FIRST_GATEWAY_USER, slot::SLOTS)
}

/// The subordinate ids of an ordinary user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Subordinates {
    uids: Range,
    gids: Range,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    first: u32,
    count: u32,
}

impl Subordinates {
    fn of_user(uid: u32) -> Option<Self> {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let passwd = read("/etc/passwd");
        let name = name_of(uid, &passwd);
        let range = |path: &str| Range::of(&read(path), name, uid);
        Some(Self { uids: range("/etc/subuid")?, gids: range("/etc/subgid")? })
    }

    /// The ids of the sandbox in this place, if there are enough. They are allocated from the end of the
    /// range, because podman, buildah and others allocate from the beginning.
    fn take(self, rank: u32) -> Option<Identities> {
        let back = rank.checked_add(1)?.checked_mul(IDS_PER_SANDBOX)?;
        let first =
            |range: Range| range.count.checked_sub(back).and_then(|offset| range.first.checked_add(offset));
        let (uid, gid) = (first(self.uids)?, first(self.gids)?);
        Some(Identities {
            keeper: Identity::Subordinate { uid, gid, count: 2 },
            gateway: Identity::Subordinate { uid: uid + 2, gid: gid + 2, count: 1 },
        })
    }
}

impl Range {
    /// The longest range of a user in the text of /etc/subuid or /etc/subgid.
    fn of(text: &str, name: Option<&str>, uid: u32) -> Option<Self> {
        let number = uid.to_string();
        let parse = |line: &str| {
            let mut fields = line.trim().split(':');
            let owner = fields.next()?;
            let (first, count) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            (Some(owner) == name || owner == number).then_some(Self { first, count })
        };
        text.lines().filter_map(parse).max_by_key(|range| range.count)
    }

    /// The range of a line of a namespace's map, by the namespace's own ids.
    fn of_map(line: &str) -> Option<Self> {
        let mut fields = line.split_whitespace();
        let first = fields.next()?.parse().ok()?;
        Some(Self { first, count: fields.nth(1)?.parse().ok()? })
    }

    fn contains(self, other: Self) -> bool {
        let end = |range: Self| u64::from(range.first) + u64::from(range.count);
        self.first <= other.first && end(other) <= end(self)
    }
}

fn name_of(uid: u32, passwd: &str) -> Option<&str> {
    let is_user = |line: &&str| line.split(':').nth(2).and_then(|field| field.parse().ok()) == Some(uid);
    passwd.lines().find(is_user)?.split(':').next()
}

/// The most processors that this machine can have, which does not change while it runs.
fn processors() -> u32 {
    let possible = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap_or_default();
    let last = possible.trim().rsplit(['-', ',']).next().and_then(|last| last.parse::<u32>().ok());
    last.map_or(1, |last| last.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nanna:x:1000:1000::/home/anna:/bin/sh\n";

    #[test]
    fn a_users_numbers_are_found_by_name_and_by_number() {
        assert_eq!((name_of(1000, PASSWD), name_of(1001, PASSWD)), (Some("anna"), None));
        let text = "bert:1:9\nanna:100000:65536\n1000:500000:70000\nanna:x:1\nanna:1\n\n";
        let range = |first, count| Some(Range { first, count });
        assert_eq!(Range::of(text, Some("anna"), 1000), range(500_000, 70_000), "the longest");
        assert_eq!(Range::of(text, Some("anna"), 7), range(100_000, 65_536));
        assert_eq!(Range::of(text, None, 1000), range(500_000, 70_000));
        assert_eq!(Range::of(text, Some("carl"), 7), None);
    }

    #[test]
    fn every_sandbox_has_three_numbers_and_the_last_one_that_does_not_fit_has_none() {
        let ranges =
            Subordinates { uids: Range { first: 1000, count: 7 }, gids: Range { first: 2000, count: 6 } };
        let taken = |uid, gid| Identities {
            keeper: Identity::Subordinate { uid, gid, count: 2 },
            gateway: Identity::Subordinate { uid: uid + 2, gid: gid + 2, count: 1 },
        };
        assert_eq!(ranges.take(0), Some(taken(1004, 2003)), "the last ones");
        assert_eq!(ranges.take(1), Some(taken(1001, 2000)));
        assert_eq!((ranges.take(2), ranges.take(u32::MAX)), (None, None));
        let at_the_end = Range { first: u32::MAX - 1, count: 100 };
        assert_eq!(Subordinates { uids: at_the_end, gids: at_the_end }.take(0), None);
    }

    #[test]
    fn j10_a_namespace_without_roots_numbers_is_told_from_one_with_them() {
        let has = |map: &str| has_all_of_root(map);
        assert!(has("         0          0 4294967295\n"));
        assert!(has("0 100000 65536\n2013265920 5 134217728\n"));
        assert!(!has("         0     100000      65536\n") && !has("0 0 1\n") && !has(""));
        assert!(!has("0 2013265920 134217728\n"), "the numbers outside do not count");
        assert!(!has("2013265921 5 134217728\n") && !has("2013265920 5 100663295\n"));
        assert!(has("2013265920 5 100663296\n"), "as many as there are");
    }

    #[test]
    fn j10_root_gives_no_sandbox_its_own_number() {
        let root = Identities {
            keeper: Identity::Pair { first: FIRST_SANDBOX_USER },
            gateway: Identity::One { id: FIRST_GATEWAY_USER },
        };
        assert_eq!(root.fallback(), None);
        let range = Range { first: 1000, count: 3 };
        let ordinary = Subordinates { uids: range, gids: range }.take(0).unwrap();
        assert_eq!(ordinary.fallback(), Some(Identities::own()));
        assert_eq!(Identities::own().fallback(), None, "it was tried");
    }

    #[test]
    fn only_the_callers_own_number_is_shared() {
        assert!(!Identities::own().guest_has_its_own());
        assert!(processors() >= 1);
    }
}
