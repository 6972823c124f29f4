//! The numbers of headers: octal, or base 256 where they would not fit; those of PAX headers are decimal.

/// A number that is not negative.
pub(super) fn unsigned(field: &[u8]) -> Option<u64> {
    match field.first() {
        Some(0x80..) => u64::try_from(base_256(field)?).ok(),
        _ => octal(field),
    }
}

/// A number that may be negative.
pub(super) fn signed(field: &[u8]) -> Option<i64> {
    match field.first() {
        Some(0x80..) => base_256(field),
        _ => i64::try_from(octal(field)?).ok(),
    }
}

/// Octal digits among spaces and NUL bytes. An empty field is zero.
fn octal(field: &[u8]) -> Option<u64> {
    let blank = |byte: &u8| matches!(byte, b' ' | 0);
    let first = field.iter().position(|byte| !blank(byte)).unwrap_or(field.len());
    let rest = &field[first..];
    let digits = rest.iter().position(blank).unwrap_or(rest.len());
    if !rest[digits..].iter().all(blank) {
        return None;
    }
    rest[..digits].iter().try_fold(0_u64, |number, byte| {
        let digit = byte.checked_sub(b'0').filter(|digit| *digit < 8)?;
        number.checked_mul(8)?.checked_add(u64::from(digit))
    })
}

/// The first bit only marks the encoding; the second one is the sign of the two's complement.
fn base_256(field: &[u8]) -> Option<i64> {
    let (first, rest) = field.split_first()?;
    let negative = first & 0x40 != 0;
    let first = if negative { first | 0x80 } else { first & 0x7f };
    rest.iter().try_fold(i64::from(first.cast_signed()), |number, byte| {
        number.checked_mul(256)?.checked_add(i64::from(*byte))
    })
}

/// Decimal digits and nothing else.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 20 {
        return None;
    }
    text.iter().try_fold(0_u64, |number, byte| {
        let digit = byte.checked_sub(b'0').filter(|digit| *digit < 10)?;
        number.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// Seconds with a fraction, as whole seconds and nanoseconds beyond them.
pub(super) fn time(text: &[u8]) -> Option<(i64, u32)> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(text) => (true, text),
        None => (false, text),
    };
    let mut parts = text.splitn(2, |byte| *byte == b'.');
    let seconds = i64::try_from(decimal(parts.next()?)?).ok()?;
    let fraction = parts.next().unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digits = fraction.iter().copied().chain(std::iter::repeat(b'0')).take(9);
    let nanoseconds = digits.fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
    match (negative, nanoseconds) {
        (false, nanoseconds) => Some((seconds, nanoseconds)),
        (true, 0) => Some((-seconds, 0)),
        (true, nanoseconds) => Some((-seconds - 1, 1_000_000_000 - nanoseconds)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octal_numbers_are_read() {
        assert_eq!(unsigned(b"0000644\0"), Some(0o644));
        assert_eq!(unsigned(b"  644 \0 "), Some(0o644));
        assert_eq!(unsigned(b"77777777777\0"), Some(0o77_777_777_777));
        assert_eq!(unsigned(b"777777777777"), Some(0o777_777_777_777));
        assert_eq!(unsigned(b"\0\0\0\0"), Some(0));
        assert_eq!(unsigned(b""), Some(0));
    }

    #[test]
    fn what_is_no_number_is_none() {
        for field in
            [b"-1\0".as_slice(), b"0x10", b"8", b"1 2", b"64\x004", b"+1", b"1777777777777777777777777"]
        {
            assert_eq!(unsigned(field), None, "{field:?}");
            assert_eq!(signed(field), None, "{field:?}");
        }
    }

    #[test]
    fn numbers_of_base_256_have_a_sign() {
        assert_eq!(unsigned(b"\x80\0\0\0\0\0\0\x02\0\0\0\0"), Some(2 << 32));
        assert_eq!(signed(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe"), Some(-2));
        assert_eq!(unsigned(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), None);
        assert_eq!(unsigned(b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff"), Some(u64::MAX >> 1));
        assert_eq!(unsigned(b"\x80\0\0\0\x80\0\0\0\0\0\0\0"), None);
        assert_eq!(unsigned(b"\xbf\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), None);
        assert_eq!(signed(b"\xc0\0\0\0\0\0\0\0\0\0\0\0"), None);
    }

    #[test]
    fn decimal_numbers_have_only_digits() {
        assert_eq!(decimal(b"18446744073709551615"), Some(u64::MAX));
        for text in [b"".as_slice(), b"-1", b"+1", b" 1", b"1 ", b"18446744073709551616", b"1e3"] {
            assert_eq!(decimal(text), None, "{text:?}");
        }
    }

    #[test]
    fn times_have_fractions() {
        assert_eq!(time(b"12"), Some((12, 0)));
        assert_eq!(time(b"12.5"), Some((12, 500_000_000)));
        assert_eq!(time(b"12.0000000019"), Some((12, 1)));
        assert_eq!(time(b"-1.25"), Some((-2, 750_000_000)));
        assert_eq!(time(b"-1"), Some((-1, 0)));
        assert_eq!(time(b"1."), Some((1, 0)));
        for text in [b"".as_slice(), b".5", b"1.x", b"--1", b"9223372036854775808"] {
            assert_eq!(time(text), None, "{text:?}");
        }
    }
}
