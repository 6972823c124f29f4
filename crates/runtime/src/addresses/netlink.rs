//! The few messages of the kernel's routing socket that describe a host's own addresses. They come from the
//! kernel, but lengths are checked all the same, and an unknown message is an error, never a missing address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bathy_protocol::network::OwnNetwork;
use thiserror::Error;

const HEADER: usize = 16;
const NOTHING: u16 = 1;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const NEW_ADDRESS: u16 = 20;
pub(crate) const GET_ADDRESS: u16 = 22;
const NEW_ROUTE: u16 = 24;
pub(crate) const GET_ROUTE: u16 = 26;
/// The flags `NLM_F_REQUEST` and `NLM_F_DUMP`.
const DUMP: u16 = 0x301;
/// `NLM_F_DUMP_INTR`: the table changed during the dump.
const INTERRUPTED: u16 = 0x10;

pub const INET: u8 = 2;
pub const INET6: u8 = 10;
const ADDRESS_HEADER: usize = 8;
const ROUTE_HEADER: usize = 12;
const TABLE_LOCAL: u8 = 255;
/// Local, broadcast and anycast routes.
const OWN_ROUTES: [u8; 3] = [2, 3, 4];
/// The attribute type `RTA_DST`.
const ROUTE_TO: u16 = 1;
/// `IFA_ADDRESS` and `IFA_LOCAL`: on a point-to-point link the first is the peer's address and the second our
/// own.
const ADDRESS: u16 = 1;
const LOCAL_ADDRESS: u16 = 2;

/// An answer is unusable.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NetlinkError {
    /// It is truncated, or its lengths do not agree.
    #[error("The kernel's list of addresses is malformed")]
    Malformed,
    /// The kernel returned an error.
    #[error("The kernel refuses to list addresses (error {0})")]
    Refused(i32),
    /// The list has to be read again.
    #[error("The kernel's list of addresses changed while it was read")]
    Interrupted,
}

impl NetlinkError {
    /// Whether a retry may help.
    pub(crate) fn is_temporary(&self) -> bool {
        *self == Self::Interrupted || *self == Self::Refused(libc::EBUSY)
    }

    /// Whether there is nothing to list.
    pub(crate) fn is_absence(&self) -> bool {
        *self == Self::Refused(libc::ENOENT)
    }
}

/// A request for all addresses or local routes of one family.
pub fn request(kind: u16, family: u8, sequence: u32) -> Vec<u8> {
    let mut body = vec![0; if kind == GET_ROUTE { ROUTE_HEADER } else { ADDRESS_HEADER }];
    if let Some(first) = body.first_mut() {
        *first = family;
    }
    if let Some(table) = body.get_mut(4).filter(|_| kind == GET_ROUTE) {
        *table = TABLE_LOCAL;
    }
    let length = u32::try_from(HEADER + body.len()).unwrap_or(0);
    let mut message = Vec::with_capacity(HEADER + body.len());
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(DUMP.to_ne_bytes());
    message.extend(sequence.to_ne_bytes());
    message.extend(0_u32.to_ne_bytes());
    message.extend(body);
    message
}

/// Extracts the networks from a part of an answer. Returns whether it was the last part.
pub fn read_answer(mut bytes: &[u8], sequence: u32, own: &mut Vec<OwnNetwork>) -> Result<bool, NetlinkError> {
    while !bytes.is_empty() {
        let length = usize::try_from(number(bytes, 0)?).map_err(|_| NetlinkError::Malformed)?;
        let message = bytes.get(..length).filter(|_| length >= HEADER).ok_or(NetlinkError::Malformed)?;
        let (kind, flags) = (short(message, 4)?, short(message, 6)?);
        let body = message.get(HEADER..).unwrap_or_default();
        // Messages with another sequence number belong to an earlier answer.
        if number(message, 8)? == sequence {
            if flags & INTERRUPTED != 0 {
                return Err(NetlinkError::Interrupted);
            }
            match kind {
                // The end message reports whether the dump was complete.
                DONE => return failure(body).map_or(Ok(true), Err),
                ERROR => return Err(failure(body).unwrap_or(NetlinkError::Malformed)),
                NEW_ADDRESS => own.extend(address(body)?),
                NEW_ROUTE => own.extend(route(body)?),
                NOTHING => {}
                // This includes an overrun, which means lost messages.
                _ => return Err(NetlinkError::Malformed),
            }
        }
        bytes = bytes.get(aligned(length)..).unwrap_or_default();
    }
    Ok(false)
}

/// The error that a message reports, if any.
fn failure(body: &[u8]) -> Option<NetlinkError> {
    match number(body, 0).map(u32::cast_signed) {
        Ok(0) => None,
        Ok(error) => Some(NetlinkError::Refused(error.wrapping_neg())),
        Err(error) => Some(error),
    }
}

fn address(body: &[u8]) -> Result<Option<OwnNetwork>, NetlinkError> {
    let family = *body.first().ok_or(NetlinkError::Malformed)?;
    let attributes = body.get(ADDRESS_HEADER..).ok_or(NetlinkError::Malformed)?;
    let (mut address, mut local) = (None, None);
    for attribute in Attributes(attributes) {
        match attribute? {
            (ADDRESS, value) => address = Some(ip(family, value)?),
            (LOCAL_ADDRESS, value) => local = Some(ip(family, value)?),
            _ => {}
        }
    }
    let network = |address: IpAddr| OwnNetwork { address, prefix: if address.is_ipv4() { 32 } else { 128 } };
    Ok(local.or(address).map(network))
}

fn route(body: &[u8]) -> Result<Option<OwnNetwork>, NetlinkError> {
    let &[family, prefix, _, _, table, _, _, kind, ..] = body else { return Err(NetlinkError::Malformed) };
    let attributes = body.get(ROUTE_HEADER..).ok_or(NetlinkError::Malformed)?;
    // Kernels that cannot filter send all tables.
    if table != TABLE_LOCAL || !OWN_ROUTES.contains(&kind) {
        return Ok(None);
    }
    let mut to = None;
    for attribute in Attributes(attributes) {
        let (kind, value) = attribute?;
        if kind == ROUTE_TO {
            to = Some(ip(family, value)?);
        }
    }
    let any = || match family {
        INET => Ok(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        INET6 => Ok(IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
        _ => Err(NetlinkError::Malformed),
    };
    Ok(Some(OwnNetwork { address: to.map_or_else(any, Ok)?, prefix }))
}

/// An iterator over attributes, as pairs of type and value.
struct Attributes<'a>(&'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = Result<(u16, &'a [u8]), NetlinkError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let bytes = std::mem::take(&mut self.0);
        let (Ok(length), Ok(kind)) = (short(bytes, 0), short(bytes, 2)) else {
            return Some(Err(NetlinkError::Malformed));
        };
        let length = usize::from(length);
        self.0 = bytes.get(aligned(length)..).unwrap_or_default();
        // The two highest bits are flags.
        Some(bytes.get(4..length).map(|value| (kind & 0x3fff, value)).ok_or(NetlinkError::Malformed))
    }
}

fn ip(family: u8, value: &[u8]) -> Result<IpAddr, NetlinkError> {
    match family {
        INET => <[u8; 4]>::try_from(value).map(IpAddr::from),
        INET6 => <[u8; 16]>::try_from(value).map(IpAddr::from),
        _ => return Err(NetlinkError::Malformed),
    }
    .map_err(|_| NetlinkError::Malformed)
}

const fn aligned(length: usize) -> usize {
    length.saturating_add(3) & !3
}

fn short(bytes: &[u8], at: usize) -> Result<u16, NetlinkError> {
    let bytes = bytes.get(at..at + 2).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u16::from_ne_bytes).ok_or(NetlinkError::Malformed)
}

fn number(bytes: &[u8], at: usize) -> Result<u32, NetlinkError> {
    let bytes = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u32::from_ne_bytes).ok_or(NetlinkError::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEQUENCE: u32 = 7;

    fn message(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEADER + body.len()).unwrap();
        let numbers = [length.to_ne_bytes(), [0; 4], sequence.to_ne_bytes(), [0; 4]];
        let mut bytes = numbers.concat();
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend(body);
        bytes.resize(aligned(bytes.len()), 0);
        bytes
    }

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + value.len()).unwrap();
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(aligned(bytes.len()), 0);
        bytes
    }

    fn a_route(table: u8, kind: u8, prefix: u8, to: &[u8]) -> Vec<u8> {
        let family = if to.len() == 16 { INET6 } else { INET };
        let mut body = vec![family, prefix, 0, 0, table, 2, 254, kind, 0, 0, 0, 0];
        // A metric does not make it another address.
        body.extend(attribute(8, &[8, 0, 2, 0, 0xdc, 5, 0, 0]));
        if !to.is_empty() {
            body.extend(attribute(ROUTE_TO, to));
        }
        message(NEW_ROUTE, 2, SEQUENCE, &body)
    }

    fn read(bytes: &[u8]) -> Result<(Vec<String>, bool), NetlinkError> {
        let mut own = Vec::new();
        let is_last = read_answer(bytes, SEQUENCE, &mut own)?;
        Ok((own.iter().map(|own| format!("{}/{}", own.address, own.prefix)).collect(), is_last))
    }

    #[test]
    fn n10_local_routes_and_addresses_are_read_whatever_their_mtu() {
        let mut body = vec![INET, 24, 0, 0, 1, 0, 0, 0];
        body.extend(attribute(1, &[93, 184, 78, 9]));
        body.extend(attribute(2, &[93, 184, 78, 3]));
        body.extend(attribute(3, b"eth0\0"));
        let answer = [
            a_route(255, 2, 32, &[93, 184, 78, 2]),
            a_route(255, 3, 32, &[93, 184, 78, 255]),
            a_route(255, 2, 0, &[]),
            a_route(254, 2, 32, &[1, 1, 1, 1]),
            a_route(255, 1, 32, &[1, 1, 1, 1]),
            a_route(255, 2, 128, &[1; 16]),
            message(NEW_ADDRESS, 2, SEQUENCE, &body),
            message(NEW_ADDRESS, 2, SEQUENCE + 1, &[]),
            message(DONE, 2, SEQUENCE, &[0; 4]),
        ];
        let (own, is_last) = read(&answer.concat()).unwrap();
        let v6 = format!("{}/128", Ipv6Addr::from([1; 16]));
        let expected = ["93.184.78.2/32", "93.184.78.255/32", "0.0.0.0/0", &v6, "93.184.78.3/32"];
        assert_eq!((own.iter().map(String::as_str).collect::<Vec<_>>(), is_last), (expected.to_vec(), true));
        assert_eq!(read(&answer[0]), Ok((vec!["93.184.78.2/32".to_owned()], false)));
    }

    #[test]
    fn n10_an_answer_that_is_not_whole_is_none() {
        let refused = message(ERROR, 0, SEQUENCE, &(-1_i32).to_ne_bytes());
        assert_eq!(read(&refused), Err(NetlinkError::Refused(1)));
        let cut_short = message(DONE, 2, SEQUENCE, &(-12_i32).to_ne_bytes());
        assert_eq!(read(&cut_short), Err(NetlinkError::Refused(12)));
        for (kind, body) in [(DONE, &[0; 3][..]), (ERROR, &[0; 4]), (4, &[0; 4]), (99, &[])] {
            assert_eq!(read(&message(kind, 2, SEQUENCE, body)), Err(NetlinkError::Malformed), "{kind}");
        }
        assert_eq!(read(&message(NOTHING, 2, SEQUENCE, &[])), Ok((Vec::new(), false)));
        let interrupted = message(DONE, INTERRUPTED, SEQUENCE, &[0; 4]);
        assert_eq!(read(&interrupted), Err(NetlinkError::Interrupted));
        let whole = a_route(255, 2, 32, &[93, 184, 78, 2]);
        for end in 1..whole.len() {
            assert_eq!(read(&whole[..end]), Err(NetlinkError::Malformed), "{end}");
        }
        for (at, value) in [(0, 0), (0, 15), (0, 255), (28, 3), (28, 200), (40, 7), (40, 0), (16, 99)] {
            let mut wrong = whole.clone();
            wrong[at] = value;
            assert_eq!(read(&wrong), Err(NetlinkError::Malformed), "{at} {value}");
        }
    }

    #[test]
    fn n10_no_bytes_break_it() {
        let whole =
            [a_route(255, 2, 32, &[93, 184, 78, 2]), message(NEW_ADDRESS, 2, SEQUENCE, &[INET; 12])].concat();
        for at in 0..whole.len() {
            for value in 0..=255 {
                let mut wrong = whole.clone();
                wrong[at] = value;
                let _ = read(&wrong);
            }
        }
    }
}
