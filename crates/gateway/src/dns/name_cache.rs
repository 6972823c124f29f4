//! The names that a sandbox has resolved, by address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use bathy_policy::HostName;

/// How many pairs of name and address are cached. The one that expires first is evicted.
pub const MAX_ENTRIES: usize = 4096;
/// How many names one address may have. Servers of CDNs have many.
pub const MAX_NAMES: usize = 64;
/// How long an entry outlives its TTL: a client that resolved a name at the last moment still connects, and may
/// retransmit.
pub const GRACE: Duration = Duration::from_secs(10);

/// The names that this sandbox has resolved, by address. Only the queried name counts, not the aliases that led to
/// the address. Times are measured from any fixed moment, the same for all calls.
///
/// An IPv4 address inside an IPv6 one is cached as IPv4, because that is how the guest's kernel connects to it.
///
/// Each call costs a look-up and, at most, a pass over the names of one address, besides evicting what has expired.
#[derive(Debug, Default)]
pub struct NameCache {
    entries: BTreeMap<IpAddr, BTreeMap<HostName, Duration>>,
    /// The same entries, by expiry.
    by_expiry: BTreeSet<(Duration, IpAddr, HostName)>,
}

impl NameCache {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that `name` has `address` for `ttl` from `now` on. An entry that expires later is kept.
    pub fn insert(&mut self, name: &HostName, address: IpAddr, ttl: Duration, now: Duration) {
        let address = address.to_canonical();
        self.evict_expired(now);
        let until = now.saturating_add(ttl).saturating_add(GRACE);
        let known = self.of(address).find(|(known, _)| *known == name).map(|(_, until)| *until);
        match known {
            Some(known) if known >= until => return,
            Some(known) => self.remove(&(known, address, name.clone())),
            None if self.of(address).count() >= MAX_NAMES => {
                let first = self.of(address).map(|(name, until)| (*until, address, name.clone())).min();
                first.iter().for_each(|first| self.remove(first));
            }
            None => {}
        }
        if self.by_expiry.len() >= MAX_ENTRIES {
            self.by_expiry.first().cloned().iter().for_each(|first| self.remove(first));
        }
        self.entries.entry(address).or_default().insert(name.clone(), until);
        self.by_expiry.insert((until, address, name.clone()));
    }

    /// The names of `address` that have not expired, in order.
    #[must_use]
    pub fn names(&self, address: IpAddr, now: Duration) -> Vec<HostName> {
        let of = self.of(address.to_canonical());
        of.filter(|(_, until)| **until > now).map(|(name, _)| name.clone()).collect()
    }

    fn of(&self, address: IpAddr) -> impl Iterator<Item = (&HostName, &Duration)> {
        self.entries.get(&address).into_iter().flatten()
    }

    fn evict_expired(&mut self, now: Duration) {
        while let Some(first) = self.by_expiry.first().filter(|(until, ..)| *until <= now).cloned() {
            self.remove(&first);
        }
    }

    fn remove(&mut self, entry: &(Duration, IpAddr, HostName)) {
        let (_, address, name) = entry;
        self.by_expiry.remove(entry);
        if let Some(names) = self.entries.get_mut(address) {
            names.remove(name);
            if names.is_empty() {
                self.entries.remove(address);
            }
        }
    }
}
