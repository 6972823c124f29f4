//! Quantities: sizes, durations and shares of a processor. In JSON and TOML each is text or a plain number,
//! so that both `memory = "512M"` and `max_duration = 90` work.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::{MIB, SpecError};

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let wrong = || SpecError::Size(text.to_owned());
        let lower = text.trim().to_ascii_lowercase();
        let unit = lower.trim_start_matches(|c: char| c.is_ascii_digit());
        let number: u64 =
            lower.get(..lower.len() - unit.len()).and_then(|n| n.parse().ok()).ok_or_else(wrong)?;
        let factor = match unit {
            "" | "b" => 1,
            "k" | "kb" | "kib" => 1024,
            "m" | "mb" | "mib" => MIB,
            "g" | "gb" | "gib" => 1024 * MIB,
            "t" | "tb" | "tib" => 1024 * 1024 * MIB,
            _ => return Err(wrong()),
        };
        number.checked_mul(factor).map(Self).ok_or_else(wrong)
    }
}

impl Size {
    /// Formats the size for people, rounded down to a tenth of the largest unit.
    pub fn rounded(self) -> String {
        let units = [(1024 * MIB, "G"), (MIB, "M"), (1024, "K")];
        match units.into_iter().find(|(unit, _)| self.0 >= *unit) {
            Some((unit, letter)) => format!("{}.{}{letter}", self.0 / unit, self.0 % unit * 10 / unit),
            None => self.0.to_string(),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1024 * MIB, "G"), (MIB, "M"), (1024, "K")];
        match units.into_iter().find(|(unit, _)| self.0 >= *unit && self.0.is_multiple_of(*unit)) {
            Some((unit, letter)) => write!(out, "{}{letter}", self.0 / unit),
            None => write!(out, "{}", self.0),
        }
    }
}

/// Serialised as a number of bytes.
impl Serialize for Size {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text_or_number(from, "a size such as \"512M\"")
    }
}

/// A duration, stored in milliseconds and parsed as seconds unless a unit follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seconds(u64);

/// The milliseconds of each unit, largest first.
const TIME_UNITS: [(u64, &str); 5] =
    [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")];

impl Seconds {
    /// A number of milliseconds.
    pub const fn from_millis(milliseconds: u64) -> Self {
        Self(milliseconds)
    }

    pub const fn as_millis(self) -> u64 {
        self.0
    }
}

impl From<Seconds> for Duration {
    fn from(seconds: Seconds) -> Self {
        Self::from_millis(seconds.0)
    }
}

impl FromStr for Seconds {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let lower = text.trim().to_ascii_lowercase();
        milliseconds(&lower).map(Self).ok_or_else(|| SpecError::Seconds(text.to_owned()))
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match TIME_UNITS.into_iter().find(|(unit, _)| self.0 >= *unit && self.0.is_multiple_of(*unit)) {
            Some((unit, name)) => write!(out, "{}{name}", self.0 / unit),
            None => write!(out, "0s"),
        }
    }
}

/// Serialised as a number of seconds.
impl Serialize for Seconds {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(1000) {
            to.serialize_u64(self.0 / 1000)
        } else {
            to.serialize_f64(Duration::from_millis(self.0).as_secs_f64())
        }
    }
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text_or_number(from, "a length of time such as 90 or \"15m\"")
    }
}

/// Parses numbers with units, each unit smaller than the one before, such as `1m30s`. A single number needs no unit.
fn milliseconds(text: &str) -> Option<u64> {
    let mut rest = text;
    let mut sum = 0_u64;
    let mut previous = u64::MAX;
    loop {
        let unit_at = rest.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let (number, from_unit) = rest.split_at(unit_at);
        let next_at = from_unit.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(from_unit.len());
        let (unit, next) = from_unit.split_at(next_at);
        let unit = if unit.is_empty() && rest.len() == text.len() { "s" } else { unit };
        let (factor, _) =
            TIME_UNITS.into_iter().find(|(factor, name)| *name == unit && *factor < previous)?;
        sum = sum.checked_add(thousandths(number)?.checked_mul(factor)? / 1000)?;
        if next.is_empty() {
            return Some(sum);
        }
        (rest, previous) = (next, factor);
    }
}

/// A share of CPU time: 0.5 is half of one processor. Stored in thousandths, so that equality is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuQuota(u32);

impl CpuQuota {
    /// The smallest share that the host's scheduler distinguishes from zero.
    pub const MIN: Self = Self(10);

    /// A number of thousandths of a processor.
    pub const fn from_thousandths(thousandths: u32) -> Self {
        Self(thousandths)
    }

    pub fn as_cpus(self) -> f64 {
        f64::from(self.0) / 1000.0
    }

    pub const fn thousandths(self) -> u32 {
        self.0
    }
}

impl FromStr for CpuQuota {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let number = thousandths(text.trim()).and_then(|number| u32::try_from(number).ok());
        number.map(Self).ok_or_else(|| SpecError::Quota(text.to_owned()))
    }
}

impl fmt::Display for CpuQuota {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", f64::from(self.0) / 1000.0)
    }
}

impl Serialize for CpuQuota {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_f64(f64::from(self.0) / 1000.0)
    }
}

impl<'de> Deserialize<'de> for CpuQuota {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text_or_number(from, "a number of processors such as 0.5")
    }
}

/// Parses `12`, `1.5` or `.25` as thousandths. Further decimals, which come from binary fractions, are
/// dropped.
fn thousandths(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if text.is_empty() || text == "." || !digits(whole) || !digits(fraction) {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let fraction: u64 = format!("{fraction:0<3}").get(..3)?.parse().ok()?;
    whole.checked_mul(1000)?.checked_add(fraction)
}

fn text_or_number<'de, D, T>(from: D, expected: &'static str) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err = SpecError>,
{
    from.deserialize_any(TextOrNumber { expected, amount: PhantomData })
}

struct TextOrNumber<T> {
    expected: &'static str,
    amount: PhantomData<T>,
}

impl<T: FromStr<Err = SpecError>> Visitor<'_> for TextOrNumber<T> {
    type Value = T;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.expected)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [("512M", 512 * MIB), ("1g", 1024 * MIB), ("64KiB", 65536), ("4096", 4096)] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "M", "12X", "-1", "1.5G", "99999999999G"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written_as_they_are_read() {
        for text in ["512M", "4G", "1K", "1000"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn sizes_in_messages_are_short() {
        for (bytes, text) in
            [(24_684_112 << 10, "23.5G"), (512 << 20, "512.0M"), (1 << 40, "1024.0G"), (1000, "1000")]
        {
            assert_eq!(Size(bytes).rounded(), text);
        }
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        let cases =
            [("90", 90_000), ("90s", 90_000), ("15m", 900_000), ("2h", 7_200_000), ("1d", 86_400_000)];
        for (text, milliseconds) in cases.into_iter().chain([
            ("1.5", 1500),
            ("250ms", 250),
            (" 2H ", 7_200_000),
            ("1m30s", 90_000),
            ("1h30m", 5_400_000),
            ("1d1.5h250ms", 91_800_250),
        ]) {
            assert_eq!(text.parse(), Ok(Seconds(milliseconds)), "{text}");
        }
        for text in [
            "",
            "s",
            "-1",
            "1w",
            "30s1m",
            "1m30",
            "1m1m",
            "1m s",
            "1m-30s",
            "1e3",
            "1.2.3",
            ".",
            "99999999999999999999",
            "300000000000000d",
        ] {
            assert!(text.parse::<Seconds>().is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_written_as_they_are_read() {
        for text in ["90s", "15m", "2h", "1d", "250ms", "0s"] {
            assert_eq!(text.parse::<Seconds>().unwrap().to_string(), text);
        }
        assert_eq!("1.5".parse::<Seconds>().unwrap().to_string(), "1500ms");
    }

    #[test]
    fn shares_keep_their_value() {
        for (text, thousandths) in [("1", 1000), ("0.5", 500), (".25", 250), ("1.0004", 1000)] {
            assert_eq!(text.parse(), Ok(CpuQuota(thousandths)), "{text}");
        }
        for text in ["", "-1", "NaN", "inf", "half", "9999999999"] {
            assert!(text.parse::<CpuQuota>().is_err(), "{text}");
        }
        for thousandths in [1, 10, 333, 500, 999, 1000, 12_345] {
            let json = serde_json::to_string(&CpuQuota(thousandths)).unwrap();
            assert_eq!(serde_json::from_str::<CpuQuota>(&json).unwrap(), CpuQuota(thousandths), "{json}");
        }
    }

    #[test]
    fn numbers_and_text_mean_the_same() {
        assert_eq!(serde_json::from_str::<Size>("4096").unwrap(), Size(4096));
        assert_eq!(serde_json::from_str::<Seconds>("1.5").unwrap(), Seconds(1500));
        assert_eq!(serde_json::from_str::<CpuQuota>("\"0.5\"").unwrap(), CpuQuota(500));
        assert!(serde_json::from_str::<Size>("-1").is_err());
        let error = serde_json::from_str::<Size>("true").unwrap_err().to_string();
        assert!(error.contains("expected a size such as"), "{error}");
    }
}
