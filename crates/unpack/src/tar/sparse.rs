//! The maps of sparse files: GNU's own, and the three versions of those in PAX headers.

use super::header::Header;
use super::numbers::{decimal, unsigned};
use crate::layer::Refusal;
use crate::limits::Limits;

/// Where a part of a sparse file is in the file, and how long it is.
pub(super) type Part = (u64, u64);

/// The bytes of one entry of GNU's map.
const PART: usize = 24;

/// The parts in a GNU header or in a block behind it, and whether another such block follows.
pub(super) fn gnu_parts(
    fields: &[u8],
    more: u8,
    parts: &mut Vec<Part>,
    limits: &Limits,
) -> Result<bool, Refusal> {
    for field in fields.chunks_exact(PART) {
        // An empty field ends the map.
        if field[0] == 0 {
            break;
        }
        let number = |field| unsigned(field).ok_or(Refusal::SparseMap);
        let part = (number(&field[..12])?, number(&field[12..])?);
        if parts.len() >= limits.segments {
            return Err(Refusal::TooManySegments(limits.segments));
        }
        parts.push(part);
    }
    Ok(more != 0)
}

/// The same of the header, and the size of the file with its holes.
pub(super) fn gnu_header(
    header: &Header,
    parts: &mut Vec<Part>,
    limits: &Limits,
) -> Result<(bool, u64), Refusal> {
    let size = unsigned(&header.block[483..495]).ok_or(Refusal::Number("size"))?;
    Ok((gnu_parts(&header.block[386..482], header.block[482], parts, limits)?, size))
}

/// The parts that the numbers of a PAX header stand for.
pub(super) fn pairs(numbers: &[u64]) -> Result<Vec<Part>, Refusal> {
    let pairs = numbers.chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return Err(Refusal::SparseMap);
    }
    Ok(pairs.map(|pair| (pair[0], pair[1])).collect())
}

/// Reads the map before the data of a file in version 1.0: a decimal number in each line, first that of the parts.
#[derive(Default)]
pub(super) struct Lines {
    /// The digits of a line that goes on in the next block.
    line: Vec<u8>,
    count: Option<u64>,
    numbers: Vec<u64>,
}

impl Lines {
    /// Reads one block, and returns whether the map ends in it.
    pub(super) fn read(&mut self, block: &[u8], limits: &Limits) -> Result<bool, Refusal> {
        for byte in block {
            if self.complete() {
                return Ok(true);
            }
            if *byte != b'\n' {
                if self.line.len() >= 20 {
                    return Err(Refusal::SparseMap);
                }
                self.line.push(*byte);
                continue;
            }
            let number = decimal(&self.line).ok_or(Refusal::SparseMap)?;
            self.line.clear();
            match self.count {
                Some(_) => self.numbers.push(number),
                None if number > limits.segments as u64 => {
                    return Err(Refusal::TooManySegments(limits.segments));
                }
                None => self.count = Some(number),
            }
        }
        Ok(self.complete())
    }

    fn complete(&self) -> bool {
        self.count.is_some_and(|count| self.numbers.len() as u64 == count.saturating_mul(2))
    }

    pub(super) fn into_parts(self) -> Result<Vec<Part>, Refusal> {
        pairs(&self.numbers)
    }
}

/// Checks that parts are in order, within a file of `size` bytes, and have `stored` bytes of data.
pub(super) fn check(parts: &[Part], size: u64, stored: u64) -> Result<(), Refusal> {
    let mut end = 0;
    let mut data = 0_u64;
    for (start, length) in parts {
        if *start < end {
            return Err(Refusal::SparseMap);
        }
        end = start.checked_add(*length).ok_or(Refusal::SparseMap)?;
        data = data.checked_add(*length).ok_or(Refusal::SparseMap)?;
    }
    let largest = i64::MAX.cast_unsigned();
    if end > size || size > largest || data != stored { Err(Refusal::SparseMap) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_have_to_fit() {
        assert!(check(&[(0, 512), (1024, 512), (4096, 0)], 4096, 1024).is_ok());
        assert!(check(&[], 1 << 40, 0).is_ok());
        let wrong: [(&[Part], u64, u64); 7] = [
            (&[(0, 1024), (512, 512)], 4096, 1536),
            (&[(1024, 512), (0, 512)], 4096, 1024),
            (&[(0, 512)], 511, 512),
            (&[(0, 512)], 512, 513),
            (&[(0, 512)], 512, 511),
            (&[(u64::MAX, 512)], u64::MAX, 512),
            (&[(0, u64::MAX), (u64::MAX, u64::MAX)], u64::MAX, 0),
        ];
        for (parts, size, stored) in wrong {
            assert!(check(parts, size, stored).is_err(), "{parts:?} {size} {stored}");
        }
        assert!(check(&[], u64::MAX, 0).is_err());
    }

    #[test]
    fn lines_go_on_in_the_next_block() {
        let limits = Limits::default();
        let mut lines = Lines::default();
        assert!(!lines.read(b"2\n0\n51", &limits).unwrap());
        assert!(lines.read(b"2\n4096\n1\n\0\0\0", &limits).unwrap());
        assert_eq!(lines.into_parts().unwrap(), [(0, 512), (4096, 1)]);
        assert!(Lines::default().read(b"0\n", &limits).unwrap());
    }

    #[test]
    fn lines_that_lie_are_refused() {
        let limits = Limits::default();
        for text in [b"x\n".as_slice(), b"\n", b"-1\n", b"1\n\0\n", b"999999999999999999999", b"99999999\n"] {
            assert!(Lines::default().read(text, &limits).is_err(), "{text:?}");
        }
    }
}
