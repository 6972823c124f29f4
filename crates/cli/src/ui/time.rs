//! Parses and formats times and durations. All times are UTC.

use bathy_protocol::time::{days_of_month, days_of_year};
use std::time::Duration;

use bathy_spec::{Seconds, SpecError};

const SECOND: u64 = 1_000_000_000;
const DAY: u64 = 24 * 3600;

/// The longest duration that is accepted.
const LONGEST: Duration = Duration::from_secs(366 * DAY);

/// Parses a duration above zero: seconds with or without a fraction, or numbers with units.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let time: Seconds = text.parse().map_err(|error: SpecError| error.to_string())?;
    Some(Duration::from(time))
        .filter(|duration| !duration.is_zero() && *duration <= LONGEST)
        .ok_or_else(|| format!("{text:?} is not between a millisecond and a year"))
}

/// As [`parse_duration`], but accepts zero.
pub fn parse_grace(text: &str) -> Result<Duration, String> {
    if text == "0" { Ok(Duration::ZERO) } else { parse_duration(text) }
}

/// A point in time: an age (`90s`, `10m`, `2h`, `1d`), seconds since 1970, or a date with or without a time of day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// This long before now.
    Ago(Duration),
    /// At this time, in nanoseconds since 1970.
    At(u64),
}

impl Since {
    /// This time in nanoseconds since 1970.
    pub fn unix_ns(self, now: u64) -> u64 {
        match self {
            Self::Ago(ago) => now.saturating_sub(u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX)),
            Self::At(at) => at,
        }
    }
}

pub fn parse_since(text: &str) -> Result<Since, String> {
    let wrong = || {
        format!(
            "{text:?} is not a point in time. Write an age such as 10m or 2h, a date such as 2026-01-31T12:00:00Z, or seconds since 1970"
        )
    };
    if text.ends_with(['s', 'm', 'h', 'd']) {
        return text.parse::<Seconds>().map(|ago| Since::Ago(ago.into())).map_err(|_| wrong());
    }
    let at = if text.contains('-') { parse_date(text) } else { parse_decimal(text) };
    at.map(Since::At).ok_or_else(wrong)
}

/// Seconds, with up to nine digits of a fraction, as nanoseconds.
fn parse_decimal(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || fraction.len() > 9 {
        return None;
    }
    let nanoseconds: u64 = format!("{fraction:0<9}").parse().ok()?;
    whole.parse::<u64>().ok()?.checked_mul(SECOND)?.checked_add(nanoseconds)
}

/// `2026-01-31`, `2026-01-31T12:00:00`, with a fraction and a `Z` or `+01:00` if wanted.
fn parse_date(text: &str) -> Option<u64> {
    let number = |text: Option<&str>, width: usize| {
        text.filter(|text| text.len() == width && text.bytes().all(|byte| byte.is_ascii_digit()))
            .and_then(|text| text.parse::<u64>().ok())
    };
    let (date, clock) = match text.split_once(['T', 't', ' ']) {
        Some((date, clock)) => (date, Some(clock)),
        None => (text, None),
    };
    let mut parts = date.split('-');
    let (year, month, day) = (number(parts.next(), 4)?, number(parts.next(), 2)?, number(parts.next(), 2)?);
    if parts.next().is_some() || year < 1970 || !(1..=12).contains(&month) {
        return None;
    }
    if day == 0 || day > days_of_month(year, month) {
        return None;
    }
    let days = (1970..year).map(days_of_year).sum::<u64>()
        + (1..month).map(|month| days_of_month(year, month)).sum::<u64>()
        + (day - 1);
    let midnight = days.checked_mul(DAY * SECOND)?;
    let Some(clock) = clock else { return Some(midnight) };

    let (clock, east, minutes) = zone(clock)?;
    let mut parts = clock.splitn(3, ':');
    let (hour, minute) = (number(parts.next(), 2)?, number(parts.next(), 2)?);
    let seconds = parts.next().unwrap_or("00");
    if hour > 23 || minute > 59 || seconds.split('.').next()?.len() != 2 {
        return None;
    }
    let seconds = parse_decimal(seconds).filter(|ns| *ns < 61 * SECOND)?;
    let local = midnight.checked_add((hour * 3600 + minute * 60) * SECOND)?.checked_add(seconds)?;
    let offset = minutes * 60 * SECOND;
    if east { local.checked_sub(offset) } else { local.checked_add(offset) }
}

/// Splits a time of day from its zone: whether it is east of Greenwich, and by how many minutes.
fn zone(clock: &str) -> Option<(&str, bool, u64)> {
    if let Some(clock) = clock.strip_suffix(['Z', 'z']) {
        return Some((clock, true, 0));
    }
    let Some(sign) = clock.find(['+', '-']) else { return Some((clock, true, 0)) };
    let (clock, zone) = clock.split_at(sign);
    let (hours, minutes) = zone.get(1..)?.split_once(':')?;
    let (hours, minutes): (u64, u64) = (hours.parse().ok()?, minutes.parse().ok()?);
    (hours < 24 && minutes < 60).then_some((clock, zone.starts_with('+'), hours * 60 + minutes))
}

/// A duration in its two largest units, such as `2h 05m`.
pub fn length(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        3600..DAY => format!("{}h {:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d {:02}h", seconds / DAY, seconds / 3600 % 24),
    }
}

/// The time since `then`, such as `2h 05m ago`.
pub fn ago(then: u64, now: u64) -> String {
    format!("{} ago", length(Duration::from_nanos(now.saturating_sub(then))))
}

#[cfg(test)]
mod tests {
    use bathy_protocol::time::iso;

    use super::*;

    #[test]
    fn times_are_read_as_people_write_them() {
        let now = 1_800_000_000 * SECOND;
        for (text, seconds) in [
            ("90s", 1_799_999_910),
            ("10m", 1_799_999_400),
            ("1m30s", 1_799_999_910),
            ("1d", 1_799_913_600),
            ("1700000000", 1_700_000_000),
            ("1970-01-02", 86_400),
            ("2000-02-29T12:30:45Z", 951_827_445),
            ("2026-11-16T02:31:56+01:00", 1_794_792_716),
            ("2026-11-16 01:31:56", 1_794_792_716),
            ("2026-11-15T20:01:56-05:30", 1_794_792_716),
        ] {
            assert_eq!(parse_since(text).unwrap().unix_ns(now), seconds * SECOND, "{text}");
        }
        assert_eq!(parse_since("1.25"), Ok(Since::At(1_250_000_000)));
        assert_eq!(parse_since("999999d").unwrap().unix_ns(now), 0);
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "m",
            "x",
            "-5m",
            "10 m",
            "ö",
            "1e9",
            "2026-13-01",
            "2600-01-01",
            "2026-02-29",
            "2026-1-1",
            "2026-01-01T25:00:00Z",
            "2026-01-01T00:00:00+1",
            "1.0000000001",
            "99999999999999999999",
            "99999999999999999999h",
            "2026-01-01T",
        ] {
            assert!(parse_since(text).is_err(), "{text}");
        }
    }

    #[test]
    fn dates_are_written_as_they_are_read() {
        for text in ["1970-01-01T00:00:00.000Z", "2000-02-29T12:30:45.250Z", "2099-12-31T23:59:59.999Z"] {
            assert_eq!(iso(parse_since(text).unwrap().unix_ns(0)), text);
        }
        // The last representable moment.
        assert!(iso(u64::MAX).starts_with("2554-07-21T"));
    }

    #[test]
    fn lengths_show_their_two_largest_units() {
        for (seconds, text) in [(0, "0s"), (59, "59s"), (61, "1m 01s"), (7500, "2h 05m"), (90_000, "1d 01h")]
        {
            assert_eq!(length(Duration::from_secs(seconds)), text);
        }
        assert_eq!(ago(5 * SECOND, 2 * SECOND), "0s ago");
    }

    #[test]
    fn lengths_of_time_are_read_in_one_way_and_bounded() {
        assert_eq!(parse_duration("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_duration("1m30s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_grace("0"), Ok(Duration::ZERO));
        for text in ["", "0", "0s", "-1", "1e19", "nan", "inf", "soon", "2 weeks", "367d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert!(parse_duration("soon").unwrap_err().contains("such as 15m"));
    }
}
