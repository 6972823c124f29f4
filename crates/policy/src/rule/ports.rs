//! The set of ports that a rule matches.

use std::fmt;

use crate::text;

/// The ports of a rule: all of them, or sorted ranges that do not overlap.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ports(Option<Vec<(u16, u16)>>);

/// What is wrong with a list of ports, and the offset.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PortsError {
    Number(usize),
    Order(usize, u16, u16),
}

impl Ports {
    /// The set of all ports.
    pub const fn all() -> Self {
        Self(None)
    }

    /// The set of one port.
    pub fn one(port: u16) -> Self {
        Self(Some(vec![(port, port)]))
    }

    /// Whether the set has all ports.
    pub const fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// Whether a port is in the set.
    pub fn contains(&self, port: u16) -> bool {
        self.0.as_ref().is_none_or(|ranges| ranges.iter().any(|(from, to)| (*from..=*to).contains(&port)))
    }

    /// Whether the rule mentions this number, alone or as the end of a range.
    pub(crate) fn mention(&self, port: u16) -> bool {
        self.0.iter().flatten().any(|(from, to)| *from == port || *to == port)
    }

    /// Parses `80`, `80,443` or `8000-8100,9000`. Errors carry the offset of the part.
    pub(super) fn parse(text: &str) -> Result<Self, PortsError> {
        let mut ranges = Vec::new();
        let mut at = 0;
        for part in text.split(',') {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let from = text::port(from).ok_or(PortsError::Number(at))?;
            let to = text::port(to).ok_or(PortsError::Number(at))?;
            if from > to {
                return Err(PortsError::Order(at, from, to));
            }
            ranges.push((from, to));
            at += part.len() + 1;
        }
        ranges.sort_unstable();
        let mut joined: Vec<(u16, u16)> = Vec::new();
        for (from, to) in ranges {
            match joined.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ => joined.push((from, to)),
            }
        }
        Ok(if joined == [(1, u16::MAX)] { Self::all() } else { Self(Some(joined)) })
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (from, to)) in self.0.iter().flatten().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            if from == to {
                write!(out, "{comma}{from}")?;
            } else {
                write!(out, "{comma}{from}-{to}")?;
            }
        }
        Ok(())
    }
}
