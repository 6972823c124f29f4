//! Rate limits of queries, and budgets against DNS tunnels.
//!
//! A DNS tunnel exfiltrates data in names below a domain whose server the attacker runs. So a budget counts the
//! bytes of new names below one domain. A server that forbids caching also sees the order in which known names are
//! repeated, so each change from one name or record type to another is charged too. Repeating the last query is
//! free, and so is querying both A and AAAA.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use bathy_policy::HostName;
use bathy_protocol::network::Spent;
use hickory_proto::rr::RecordType;
use thiserror::Error;

/// The window over which new names are charged. Two adjacent windows together allow twice the budget.
pub const WINDOW: Duration = Duration::from_secs(60);
/// The least that a new name is charged to the budget of all domains, which bounds how many are remembered.
const LEAST_COST: usize = 16;
/// What a known name is charged to the budget of its domain after another one: more bits than the choice among all
/// names within the budget carries.
const CHANGE_COST: usize = 2;
/// Second-level domains below which registries sell names: `co.uk`, `com.br`, `or.jp`. A short label alone proves
/// nothing, since anybody can buy `abc.io`.
const REGISTRY_LABELS: [&str; 10] = ["ac", "co", "com", "edu", "go", "gov", "ne", "net", "or", "org"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitConfig {
    /// Sustained queries per second.
    pub rate: u32,
    /// How many queries may come in a burst.
    pub burst: u32,
    /// The budget of new names below one domain, in bytes per window.
    pub domain_bytes: usize,
    /// The budget of new names over all domains, in bytes per window; a name is charged 16 bytes at least.
    pub total_bytes: usize,
}

impl Default for LimitConfig {
    /// A package manager or browser sends some tens of queries in a burst and a few per second. 4 KiB per minute
    /// hold some 250 host names of one domain, and leak less than 70 bytes per second; 64 KiB hold 4096 names,
    /// which is about what the rate allows.
    fn default() -> Self {
        Self { rate: 100, burst: 500, domain_bytes: 4 * 1024, total_bytes: 64 * 1024 }
    }
}

/// Why a query is rejected.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LimitExceeded {
    #[error("The sandbox sends more than {0} DNS queries per second")]
    Rate(u32),
    /// Too many new names below one domain.
    #[error("The sandbox resolves too many different names below {0} within a minute")]
    Domain(String),
    /// Too many new names over all domains.
    #[error("The sandbox resolves too many different names within a minute")]
    Total,
}

/// Limits the queries of one sandbox. Times are measured from any fixed moment, the same for all calls.
#[derive(Debug)]
pub struct QueryLimits {
    config: LimitConfig,
    /// The tokens of the bucket, in units of [`QUERY`].
    tokens: u128,
    filled: Duration,
    until: Duration,
    seen: HashSet<HostName>,
    domains: HashMap<String, Domain>,
    total: usize,
    /// What any domain may have used in this window before this gateway started.
    before: usize,
    /// The most that one domain has used.
    most: usize,
}

/// What was queried below one domain in this window.
#[derive(Debug, Default)]
struct Domain {
    bytes: usize,
    last: Option<(HostName, RecordType)>,
}

/// One token: a rate of one per second fills it in as many nanoseconds.
const QUERY: u128 = 1_000_000_000;

impl QueryLimits {
    /// Starts with a full bucket.
    #[must_use]
    pub fn new(config: LimitConfig, now: Duration) -> Self {
        Self {
            config,
            tokens: u128::from(config.burst) * QUERY,
            filled: now,
            until: now + WINDOW,
            seen: HashSet::new(),
            domains: HashMap::new(),
            total: 0,
            before: 0,
            most: 0,
        }
    }

    /// Continues with the budgets of an earlier gateway. Which domain used them is unknown, so each is charged the
    /// most; how many queries were sent is unknown too, so there is no burst.
    pub fn carry_over(&mut self, spent: Spent, now: Duration) {
        self.tokens = 0;
        self.until = now + WINDOW.saturating_sub(Duration::from_millis(spent.age_ms));
        self.total = usize::try_from(spent.total).unwrap_or(usize::MAX);
        self.before = usize::try_from(spent.most).unwrap_or(usize::MAX);
        self.most = self.before;
    }

    /// What was used in this window.
    #[must_use]
    pub fn spent(&self, now: Duration) -> Spent {
        let age = WINDOW.saturating_sub(self.until.saturating_sub(now));
        Spent {
            age_ms: u64::try_from(age.as_millis()).unwrap_or(0),
            total: u32::try_from(self.total).unwrap_or(u32::MAX),
            most: u32::try_from(self.most).unwrap_or(u32::MAX),
        }
    }

    /// Charges a query for records of `kind` at `name`.
    ///
    /// # Errors
    /// If it exceeds a limit. It must not be sent then.
    pub fn admit(&mut self, name: &HostName, kind: RecordType, now: Duration) -> Result<(), LimitExceeded> {
        self.take_token(now)?;
        if now >= self.until {
            self.until = now + WINDOW;
            self.seen.clear();
            self.domains.clear();
            (self.total, self.before, self.most) = (0, 0, 0);
        }
        let text = name.to_string();
        let domain = domain(&text);
        let used = self.domains.get(domain);
        // Clients query A and AAAA, in either order.
        let query = (name.clone(), if kind == RecordType::AAAA { RecordType::A } else { kind });
        if used.is_some_and(|used| used.last.as_ref() == Some(&query)) {
            return Ok(());
        }
        let is_new = !self.seen.contains(name);
        let cost = if is_new { (text.len() - domain.len()).max(CHANGE_COST) } else { CHANGE_COST };
        let total = self.total.saturating_add(if is_new { text.len().max(LEAST_COST) } else { 0 });
        if total > self.config.total_bytes {
            return Err(LimitExceeded::Total);
        }
        let bytes = used.map_or(self.before, |used| used.bytes).saturating_add(cost);
        if bytes > self.config.domain_bytes {
            return Err(LimitExceeded::Domain(domain.to_owned()));
        }
        self.domains.insert(domain.to_owned(), Domain { bytes, last: Some(query) });
        self.total = total;
        self.most = self.most.max(bytes);
        self.seen.insert(name.clone());
        Ok(())
    }

    fn take_token(&mut self, now: Duration) -> Result<(), LimitExceeded> {
        let gained = now.saturating_sub(self.filled).as_nanos().saturating_mul(self.config.rate.into());
        self.tokens = self.tokens.saturating_add(gained).min(u128::from(self.config.burst) * QUERY);
        self.filled = self.filled.max(now);
        self.tokens = self.tokens.checked_sub(QUERY).ok_or(LimitExceeded::Rate(self.config.rate))?;
        Ok(())
    }
}

/// The registrable part of a name: the last two labels, or three below suffixes like `co.uk`. It may err on the
/// wide side: domains that are mistaken for one share a budget.
fn domain(name: &str) -> &str {
    let mut dots = name.rmatch_indices('.').map(|(place, _)| place);
    let (Some(last), Some(second)) = (dots.next(), dots.next()) else { return name };
    let is_country = name.len() - last - 1 == 2;
    let is_registry =
        is_country && name.get(second + 1..last).is_some_and(|label| REGISTRY_LABELS.contains(&label));
    let start = if is_registry { dots.next().map_or(0, |third| third + 1) } else { second + 1 };
    name.get(start..).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_what_can_be_registered() {
        for (name, expected) in [
            ("localhost", "localhost"),
            ("example.com", "example.com"),
            ("a.b.example.com", "example.com"),
            ("co.uk", "co.uk"),
            ("example.co.uk", "example.co.uk"),
            ("a.b.example.co.uk", "example.co.uk"),
            ("a.abc.io", "abc.io"),
            ("a.b.co.com", "co.com"),
            ("a.b.com.info", "com.info"),
        ] {
            assert_eq!(domain(name), expected, "{name}");
        }
    }

    /// How many of these names are admitted, and why the first one that is not.
    fn admitted(config: LimitConfig, names: &[&str]) -> (usize, Option<LimitExceeded>) {
        let mut limits = QueryLimits::new(config, Duration::ZERO);
        for (count, name) in names.iter().enumerate() {
            let result = limits.admit(&name.parse().unwrap(), RecordType::A, Duration::ZERO);
            if let Err(limited) = result {
                return (count, Some(limited));
            }
        }
        (names.len(), None)
    }

    #[test]
    fn n4_budgets_are_used_up_to_the_last_byte() {
        let names = ["aaaa.example.com", "bbbb.example.com", "cccc.example.com"];
        let domain = || LimitExceeded::Domain("example.com".to_owned());
        // Each is charged five bytes to its domain, and sixteen to the total.
        for (domain_bytes, total_bytes, expected) in [
            (15, 48, (3, None)),
            (14, 48, (2, Some(domain()))),
            (10, 48, (2, Some(domain()))),
            (9, 48, (1, Some(domain()))),
            (15, 47, (2, Some(LimitExceeded::Total))),
            (15, 32, (2, Some(LimitExceeded::Total))),
            (15, 31, (1, Some(LimitExceeded::Total))),
        ] {
            let config = LimitConfig { domain_bytes, total_bytes, ..LimitConfig::default() };
            assert_eq!(admitted(config, &names), expected, "{domain_bytes} {total_bytes}");
        }
    }

    /// Queries as many names below one domain as are admitted, over gateways that follow each other, `each` per
    /// gateway. Returns the bytes charged to the domain.
    fn exfiltrated(each: usize, pause: Duration, gateways: usize) -> usize {
        let mut spent: Option<(Spent, Duration)> = None;
        let (mut bytes, mut now) = (0, Duration::ZERO);
        for gateway in 0..gateways {
            let mut limits = QueryLimits::new(LimitConfig::default(), now);
            if let Some((spent, at)) = spent {
                let age_ms = spent.age_ms + u64::try_from((now - at).as_millis()).unwrap();
                limits.carry_over(Spent { age_ms, ..spent }, now);
            }
            now += pause;
            for name in 0..each {
                let name = format!("{gateway:020}{name:020}.example.com");
                let admitted = limits.admit(&name.parse().unwrap(), RecordType::A, now).is_ok();
                bytes += usize::from(admitted) * 41;
            }
            spent = Some((limits.spent(now), now));
        }
        bytes
    }

    #[test]
    fn n9_a_budget_is_not_larger_for_a_sandbox_that_has_many_gateways() {
        let budget = LimitConfig::default().domain_bytes;
        for each in [1, 30, 50, 99, 200] {
            let bytes = exfiltrated(each, Duration::from_millis(500), 100);
            assert!(bytes <= budget, "{each}: {bytes} of {budget} within 50 seconds");
        }
        assert!(exfiltrated(99, Duration::from_millis(500), 100) > budget - 41, "it can be used");
        let bytes = exfiltrated(200, Duration::from_secs(1), 119);
        assert!(bytes > budget && bytes <= 2 * budget, "{bytes} within two minutes");
    }

    #[test]
    fn n9_a_gateway_that_is_not_the_first_begins_without_a_burst() {
        let mut limits = QueryLimits::new(LimitConfig::default(), Duration::ZERO);
        limits.carry_over(Spent::default(), Duration::ZERO);
        let name = "a.example".parse().unwrap();
        let mut count = |now| (0..1000).filter(|_| limits.admit(&name, RecordType::A, now).is_ok()).count();
        assert_eq!(count(Duration::ZERO), 0);
        assert_eq!(count(Duration::from_millis(200)), 20);
    }

    #[test]
    fn n9_what_is_not_known_counts_as_used_until_the_window_ends() {
        let mut limits = QueryLimits::new(LimitConfig::default(), Duration::ZERO);
        limits.carry_over(Spent { age_ms: 20_000, total: u32::MAX, most: u32::MAX }, Duration::ZERO);
        let name = "a.example".parse().unwrap();
        let at = Duration::from_secs;
        assert!(limits.admit(&name, RecordType::A, at(39)).is_err());
        assert!(limits.admit(&name, RecordType::A, at(40)).is_ok());
        assert_eq!(limits.spent(at(41)), Spent { age_ms: 1000, total: 16, most: 2 });
    }

    #[test]
    fn n9_the_budget_over_all_domains_is_carried_over_too() {
        let mut limits = QueryLimits::new(LimitConfig::default(), Duration::ZERO);
        limits.carry_over(Spent { age_ms: 0, total: 64 * 1024 - 16, most: 0 }, Duration::ZERO);
        let mut admit =
            |name: &str| limits.admit(&name.parse().unwrap(), RecordType::A, Duration::from_secs(1));
        assert_eq!(admit("a.one.example"), Ok(()));
        assert_eq!(admit("a.two.example"), Err(LimitExceeded::Total));
    }
}
