//! State between messages: names, budgets, and incomplete frames.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use bathy_policy::HostName;

use super::super::limits::WINDOW;
use super::super::name_cache::{GRACE, MAX_ENTRIES, MAX_NAMES};
use super::super::{
    FrameReader, FrameTooLong, LimitConfig, LimitExceeded, MAX_MESSAGE, MAX_QUERY, NameCache, QueryLimits,
    RecordType, frame,
};
use crate::hello::cuts::cuts;

const START: Duration = Duration::from_secs(1000);
const MINUTE: Duration = Duration::from_secs(60);

fn host(text: &str) -> HostName {
    text.parse().unwrap()
}

fn ip(number: usize) -> IpAddr {
    Ipv4Addr::from_bits(0x0a00_0000 + u32::try_from(number).unwrap()).into()
}

#[test]
fn n3_a_name_holds_until_its_time_ends() {
    let mut cache = NameCache::new();
    cache.insert(&host("a.example"), ip(1), MINUTE, START);
    cache.insert(&host("b.example"), ip(1), MINUTE * 2, START);
    let end = START + MINUTE + GRACE;
    assert_eq!(cache.names(ip(1), START), [host("a.example"), host("b.example")]);
    assert_eq!(cache.names(ip(1), end - Duration::from_nanos(1)).len(), 2);
    assert_eq!(cache.names(ip(1), end), [host("b.example")]);
    assert_eq!(cache.names(ip(1), end + MINUTE), []);
    assert_eq!(cache.names(ip(2), START), [], "another address has none of them");
    // A shorter TTL does not shorten an entry; a longer one extends it.
    cache.insert(&host("b.example"), ip(1), Duration::ZERO, START);
    assert_eq!(cache.names(ip(1), end), [host("b.example")]);
    cache.insert(&host("b.example"), ip(1), MINUTE * 9, START);
    assert_eq!(cache.names(ip(1), START + MINUTE * 9), [host("b.example")]);
}

#[test]
fn n3_a_mapped_address_is_the_one_inside() {
    let mut cache = NameCache::new();
    let mapped: IpAddr = "::ffff:192.0.2.1".parse().unwrap();
    let plain: IpAddr = "192.0.2.1".parse().unwrap();
    cache.insert(&host("a.example"), mapped, MINUTE, START);
    assert_eq!(cache.names(plain, START), [host("a.example")]);
    assert_eq!(cache.names(mapped, START), [host("a.example")]);
}

#[test]
fn r5_the_name_cache_is_bounded_and_evicts_what_expires_first() {
    let mut cache = NameCache::new();
    for number in 0..MAX_ENTRIES * 2 {
        let ttl = Duration::from_secs(u64::try_from(number).unwrap());
        cache.insert(&host("a.example"), ip(number), ttl, START);
    }
    let known = (0..MAX_ENTRIES * 2).filter(|number| !cache.names(ip(*number), START).is_empty());
    assert_eq!(known.collect::<Vec<_>>(), (MAX_ENTRIES..MAX_ENTRIES * 2).collect::<Vec<_>>());
    let mut cache = NameCache::new();
    for number in 0..MAX_NAMES + 5 {
        let ttl = Duration::from_secs(u64::try_from(number).unwrap());
        cache.insert(&host(&format!("n{number}.example")), ip(1), ttl, START);
    }
    let names = cache.names(ip(1), START);
    assert_eq!(names.len(), MAX_NAMES);
    assert!(!names.contains(&host("n4.example")) && names.contains(&host("n5.example")));
}

#[test]
fn r5_a_full_name_cache_costs_no_more_than_an_empty_one() {
    let time = |entries: usize| {
        let mut cache = NameCache::new();
        (0..entries).for_each(|number| cache.insert(&host("a.example"), ip(number), MINUTE, START));
        let began = std::time::Instant::now();
        for number in 0..5_000 {
            cache.insert(&host("a.example"), ip(number % entries), MINUTE * 2, START);
            assert_eq!(cache.names(ip(number % entries), START).len(), 1);
        }
        began.elapsed()
    };
    // Walking over all entries would take some thousand times as long.
    let (few, all) = (time(4), time(MAX_ENTRIES));
    assert!(all < few * 100, "{few:?} and {all:?}");
}

fn limits(config: LimitConfig) -> QueryLimits {
    QueryLimits::new(config, START)
}

/// How many of these names are admitted at once.
fn admitted(limits: &mut QueryLimits, names: impl Iterator<Item = String>, now: Duration) -> usize {
    names.filter(|name| limits.admit(&host(name), RecordType::A, now).is_ok()).count()
}

const LOOSE: LimitConfig =
    LimitConfig { rate: 1_000_000, burst: 1_000_000, domain_bytes: 4096, total_bytes: 65536 };

#[test]
fn n4_queries_have_a_rate() {
    let mut limits = limits(LimitConfig { rate: 10, burst: 30, ..LOOSE });
    let same = |count: usize| std::iter::repeat_n("a.example".to_owned(), count);
    assert_eq!(admitted(&mut limits, same(100), START), 30);
    assert_eq!(limits.admit(&host("a.example"), RecordType::A, START), Err(LimitExceeded::Rate(10)));
    assert_eq!(admitted(&mut limits, same(100), START + Duration::from_secs(1)), 10);
    assert_eq!(admitted(&mut limits, same(100), START), 0, "a clock that goes back gives nothing");
    assert_eq!(admitted(&mut limits, same(100), START + MINUTE), 30);
}

#[test]
fn n4_a_tunnel_has_a_budget_per_domain() {
    let tunnel = |domain: &'static str| (0..2000).map(move |number| format!("{number:060}.{domain}"));
    for domain in ["evil.example", "abc.io", "t.co", "evil.co.uk", "x.evil.com", "xy.ai"] {
        let mut limits = limits(LOOSE);
        let bytes = admitted(&mut limits, tunnel(domain), START) * 60;
        assert!((2000..=4096).contains(&bytes), "{domain}: {bytes} bytes left");
        assert!(
            limits.admit(&host("other.example"), RecordType::A, START).is_ok(),
            "others are not concerned"
        );
        assert_eq!(admitted(&mut limits, tunnel(domain), START + WINDOW) * 60, bytes, "a minute later");
    }
    // The same where the data is in the label that could be the registered one.
    for ending in ["abc.io", "xy.ai", "t.co"] {
        let mut limits = limits(LOOSE);
        let names = (0..2000).map(|number| format!("{number:060}.{ending}"));
        assert!(admitted(&mut limits, names, START) * 60 <= 4096, "{ending}");
    }
}

#[test]
fn n4_all_domains_together_have_a_budget() {
    let mut limits = limits(LOOSE);
    let names = (0..10_000).map(|number| format!("{number:030}.com"));
    let bytes = admitted(&mut limits, names, START) * 34;
    assert!((60_000..=65_536).contains(&bytes), "{bytes}");
    let long = host(&format!("{}.example", "x".repeat(60)));
    assert_eq!(limits.admit(&long, RecordType::A, START), Err(LimitExceeded::Total));
}

#[test]
fn n4_the_order_of_known_names_is_no_free_channel() {
    // What the server sees: repetitions carry no information.
    let changes = |ask: &dyn Fn(usize) -> (HostName, RecordType)| {
        let mut limits = limits(LOOSE);
        let mut asked: Vec<_> =
            (0..20_000).map(ask).filter(|(name, kind)| limits.admit(name, *kind, START).is_ok()).collect();
        asked.dedup();
        asked.len()
    };
    assert!(changes(&|number| (host(&format!("n{}.evil.example", number % 16)), RecordType::A)) <= 4096 / 2);
    let kinds = [RecordType::TXT, RecordType::MX, RecordType::A];
    assert!(changes(&|number| (host("a.evil.example"), kinds[number % 3])) <= 4096 / 2);
}

#[test]
fn honest_clients_stay_below_the_budgets() {
    let mut limits = limits(LOOSE);
    // A program without a cache that connects to one host over and over.
    for _ in 0..10_000 {
        assert_eq!(limits.admit(&host("pypi.example.org"), RecordType::A, START), Ok(()));
        assert_eq!(limits.admit(&host("pypi.example.org"), RecordType::AAAA, START), Ok(()));
    }
    // A browser: many hosts of many domains.
    let names = (0..400).map(|number| format!("static{}.site{}.example", number % 10, number / 10));
    assert_eq!(admitted(&mut limits, names, START), 400);
}

#[test]
fn n4_frames_are_found_in_any_segmentation() {
    let messages: Vec<Vec<u8>> =
        [3, 0, 1, 255, 256, MAX_QUERY].iter().map(|length| vec![0xab; *length]).collect();
    let stream: Vec<u8> = messages.iter().flat_map(|message| frame(message).unwrap()).collect();
    for pieces in cuts(&stream) {
        let mut reader = FrameReader::new(MAX_QUERY);
        let mut found = Vec::new();
        for piece in pieces {
            reader.push(piece);
            while let Some(message) = reader.next().unwrap() {
                found.push(message);
            }
        }
        assert_eq!(found, messages);
    }
}

#[test]
fn r5_long_frames_are_refused_at_their_length() {
    let mut reader = FrameReader::new(MAX_QUERY);
    reader.push(&[0, 1, 9, 4, 1]);
    assert_eq!(reader.next(), Ok(Some(vec![9])));
    let too_long = Err(FrameTooLong { length: MAX_QUERY + 1, limit: MAX_QUERY });
    assert_eq!(reader.next(), too_long);
    reader.push(&[0; 100]);
    assert_eq!(reader.next(), too_long, "there is no way back into step");
    assert!(frame(&vec![0; MAX_MESSAGE]).is_ok() && frame(&vec![0; MAX_MESSAGE + 1]).is_err());
}

#[test]
fn r5_many_empty_frames_cost_linear_time() {
    let mut reader = FrameReader::new(MAX_QUERY);
    reader.push(&vec![0; 1 << 20]);
    let began = std::time::Instant::now();
    let mut count = 0;
    while let Some(message) = reader.next().unwrap() {
        assert!(message.is_empty());
        count += 1;
    }
    assert_eq!(count, 1 << 19);
    assert!(began.elapsed() < MINUTE, "{:?}", began.elapsed());
}
