//! The 512 bytes before each entry.

use super::numbers::{signed, unsigned};
use crate::layer::Refusal;

/// How a header's fields beyond those of version 7 are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    V7,
    Ustar,
    Star,
    Gnu,
}

#[derive(Debug)]
pub(super) struct Header {
    pub(super) block: [u8; 512],
    pub(super) format: Format,
}

const CHECKSUM: std::ops::Range<usize> = 148..156;

impl Header {
    /// Parses a block as a header, if its checksum is right.
    pub(super) fn new(block: [u8; 512]) -> Result<Self, Refusal> {
        let format = match (&block[257..265], &block[508..512]) {
            (b"ustar\x0000", b"tar\0") => Format::Star,
            (b"ustar  \0", _) => Format::Gnu,
            (magic, _) if magic.starts_with(b"ustar\0") => Format::Ustar,
            _ => Format::V7,
        };
        let header = Self { block, format };
        let wanted = unsigned(&header.block[CHECKSUM]).ok_or(Refusal::Checksum)?;
        let summed = |index: &usize| !CHECKSUM.contains(index);
        let bytes = || (0..512).filter(summed).map(|index| header.block[index]);
        let spaces = 8 * i64::from(b' ');
        let sum: i64 = spaces + bytes().map(i64::from).sum::<i64>();
        // Old programs summed signed characters.
        let signed_sum: i64 = spaces + bytes().map(|byte| i64::from(byte.cast_signed())).sum::<i64>();
        if i64::try_from(wanted).is_ok_and(|wanted| wanted == sum || wanted == signed_sum) {
            Ok(header)
        } else {
            Err(Refusal::Checksum)
        }
    }

    pub(super) fn kind(&self) -> u8 {
        self.block[156]
    }

    pub(super) fn path(&self) -> Vec<u8> {
        let name = text(&self.block[..100]);
        let prefix = match self.format {
            Format::Ustar => text(&self.block[345..500]),
            Format::Star => text(&self.block[345..476]),
            Format::V7 | Format::Gnu => b"",
        };
        if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
    }

    pub(super) fn link(&self) -> Vec<u8> {
        text(&self.block[157..257]).to_vec()
    }

    pub(super) fn size(&self) -> Result<u64, Refusal> {
        unsigned(&self.block[124..136]).ok_or(Refusal::Number("size"))
    }

    /// The permission bits. The file's type is in [`Header::kind`].
    pub(super) fn mode(&self) -> Result<u16, Refusal> {
        let mode = unsigned(&self.block[100..108]).ok_or(Refusal::Number("mode"))?;
        u16::try_from(mode & 0o7777).map_err(|_| Refusal::Number("mode"))
    }

    pub(super) fn uid(&self) -> Result<u64, Refusal> {
        unsigned(&self.block[108..116]).ok_or(Refusal::Number("user"))
    }

    pub(super) fn gid(&self) -> Result<u64, Refusal> {
        unsigned(&self.block[116..124]).ok_or(Refusal::Number("group"))
    }

    pub(super) fn seconds(&self) -> Result<i64, Refusal> {
        signed(&self.block[136..148]).ok_or(Refusal::Number("time"))
    }

    /// The numbers of a device, as far as Linux has them.
    pub(super) fn device(&self) -> Result<(u16, u32), Refusal> {
        let part = |range| unsigned(&self.block[range]).ok_or(Refusal::Number("device number"));
        let (major, minor) = match self.format {
            Format::V7 => (0, 0),
            _ => (part(329..337)?, part(337..345)?),
        };
        match (u16::try_from(major), u32::try_from(minor)) {
            (Ok(major @ ..=0xfff), Ok(minor @ ..=0xf_ffff)) => Ok((major, minor)),
            _ => Err(Refusal::Range("device number")),
        }
    }
}

/// What is before the first NUL byte.
pub(super) fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}
