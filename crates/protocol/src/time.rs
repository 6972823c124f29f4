//! Timestamps in ISO 8601 format, in UTC.

use serde::Serializer;

const SECOND: u64 = 1_000_000_000;
const DAY: u64 = 86_400;

/// Formats a timestamp with milliseconds, such as `2026-01-31T12:00:00.250Z`.
pub fn iso(unix_ns: u64) -> String {
    let seconds = unix_ns / SECOND;
    let (mut days, of_day) = (seconds / DAY, seconds % DAY);
    let mut year = 1970;
    while days >= days_of_year(year) {
        days -= days_of_year(year);
        year += 1;
    }
    let mut month = 1;
    while days >= days_of_month(year, month) {
        days -= days_of_month(year, month);
        month += 1;
    }
    format!(
        "{year:04}-{month:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
        days + 1,
        of_day / 3600,
        of_day / 60 % 60,
        of_day % 60,
        unix_ns % SECOND / 1_000_000
    )
}

/// The number of days in a year.
pub fn days_of_year(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

/// The number of days in a month, which counts from 1.
pub fn days_of_month(year: u64, month: u64) -> u64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// For `serde(serialize_with)`: nanoseconds since 1970 as text.
///
/// # Errors
/// The serializer fails.
pub fn serialize<S: Serializer>(unix_ns: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&iso(*unix_ns))
}

/// Like [`serialize`], for an optional timestamp.
///
/// # Errors
/// The serializer fails.
pub fn serialize_option<S: Serializer>(unix_ns: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    match unix_ns {
        Some(unix_ns) => serialize(unix_ns, serializer),
        None => serializer.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_in_time_are_iso_8601() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, "2000-02-28T23:59:59.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_798_761_600, "2027-01-01T00:00:00.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(iso(seconds * SECOND), text);
        }
        assert_eq!(iso(250_999_999), "1970-01-01T00:00:00.250Z");
    }
}
