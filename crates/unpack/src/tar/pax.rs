//! Parses PAX extended headers.

use std::collections::BTreeMap;

use super::numbers::{decimal, time};
use crate::layer::Refusal;
use crate::limits::Limits;
use crate::tree::{Namespace, Xattr};

/// The fields of a PAX header, which apply to the next entry.
#[derive(Debug, Default)]
pub(super) struct Pax {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) time: Option<(i64, u32)>,
    pub(super) sparse: PaxSparse,
    xattrs: BTreeMap<XattrName, Box<[u8]>>,
    xattr_bytes: usize,
}

type XattrName = (Namespace, Box<[u8]>);

/// The keys of GNU's sparse files.
#[derive(Debug, Default)]
pub(super) struct PaxSparse {
    pub(super) major: Option<u64>,
    pub(super) minor: Option<u64>,
    pub(super) name: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    /// Starts and lengths of segments, in turn.
    pub(super) map: Option<Vec<u64>>,
}

/// Attributes by which overlayfs would take files of the image for its own records.
const OVERLAY: &[u8] = b"overlay.";

impl Pax {
    pub(super) fn parse(mut bytes: &[u8], limits: &Limits) -> Result<Self, Refusal> {
        let mut pax = Self::default();
        while !bytes.is_empty() {
            let (key, value, rest) = record(bytes).ok_or(Refusal::Pax)?;
            bytes = rest;
            pax.set(key, value, limits)?;
        }
        Ok(pax)
    }

    fn set(&mut self, key: &[u8], value: &[u8], limits: &Limits) -> Result<(), Refusal> {
        if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
            return self.set_xattr(name, value, limits);
        }
        if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
            return self.sparse.set(key, value, limits);
        }
        // An empty value removes an earlier one.
        let given = !value.is_empty();
        match key {
            b"path" => self.path = given.then(|| value.to_vec()),
            b"linkpath" => self.link = given.then(|| value.to_vec()),
            b"size" => self.size = number(value, "size")?,
            b"uid" => self.uid = number(value, "user")?,
            b"gid" => self.gid = number(value, "group")?,
            b"mtime" if given => self.time = Some(time(value).ok_or(Refusal::Number("time"))?),
            b"mtime" => self.time = None,
            _ => {}
        }
        Ok(())
    }

    fn set_xattr(&mut self, name: &[u8], value: &[u8], limits: &Limits) -> Result<(), Refusal> {
        self.xattr_bytes = self.xattr_bytes.saturating_add(name.len() + value.len());
        if self.xattr_bytes > limits.xattrs || value.len() > usize::from(u16::MAX) {
            return Err(Refusal::XattrsTooLong(limits.xattrs));
        }
        let Some((namespace, rest)) = namespace(name) else { return Ok(()) };
        let acl = matches!(namespace, Namespace::AclAccess | Namespace::AclDefault);
        if rest.is_empty() != acl || rest.len() > 255 || rest.contains(&0) {
            return Err(Refusal::XattrName);
        }
        if namespace == Namespace::Trusted && rest.starts_with(OVERLAY) {
            return Ok(());
        }
        self.xattrs.insert((namespace, rest.into()), value.into());
        Ok(())
    }

    pub(super) fn take_xattrs(&mut self) -> Vec<Xattr> {
        let xattrs = std::mem::take(&mut self.xattrs).into_iter();
        xattrs.map(|((namespace, name), value)| Xattr { namespace, name, value }).collect()
    }
}

impl PaxSparse {
    fn set(&mut self, key: &[u8], value: &[u8], limits: &Limits) -> Result<(), Refusal> {
        let number = || decimal(value).ok_or(Refusal::SparseMap);
        match key {
            b"major" => self.major = Some(number()?),
            b"minor" => self.minor = Some(number()?),
            b"name" => self.name = Some(value.to_vec()),
            b"size" | b"realsize" => self.size = Some(number()?),
            b"offset" | b"numbytes" => {
                let map = self.map.get_or_insert_default();
                let turn = if key == b"offset" { 0 } else { 1 };
                if map.len() % 2 != turn {
                    return Err(Refusal::SparseMap);
                }
                push(map, number()?, limits)?;
            }
            b"map" => {
                let mut map = Vec::new();
                for text in value.split(|byte| *byte == b',').filter(|_| !value.is_empty()) {
                    push(&mut map, decimal(text).ok_or(Refusal::SparseMap)?, limits)?;
                }
                self.map = Some(map);
            }
            _ => {}
        }
        Ok(())
    }
}

fn push(map: &mut Vec<u64>, number: u64, limits: &Limits) -> Result<(), Refusal> {
    if map.len() / 2 >= limits.segments {
        return Err(Refusal::TooManySegments(limits.segments));
    }
    map.push(number);
    Ok(())
}

fn number(value: &[u8], name: &'static str) -> Result<Option<u64>, Refusal> {
    if value.is_empty() {
        return Ok(None);
    }
    decimal(value).map(Some).ok_or(Refusal::Number(name))
}

/// The first record, `LENGTH KEY=VALUE\n`, and what follows it. The length is that of all of it.
fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().take(20).position(|byte| *byte == b' ')?;
    let length = usize::try_from(decimal(&bytes[..space])?).ok()?;
    if length > bytes.len() {
        return None;
    }
    let (record, rest) = bytes.split_at(length);
    let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    let (key, value) = (&record[..equals], &record[equals + 1..]);
    if key.is_empty() || key.contains(&0) { None } else { Some((key, value, rest)) }
}

/// The namespace of an attribute, and the rest of its name. Attributes of others have no meaning to Linux or to EROFS.
fn namespace(name: &[u8]) -> Option<(Namespace, &[u8])> {
    let prefixes: [(&[u8], Namespace); 3] =
        [(b"user.", Namespace::User), (b"trusted.", Namespace::Trusted), (b"security.", Namespace::Security)];
    match name {
        b"system.posix_acl_access" => return Some((Namespace::AclAccess, b"")),
        b"system.posix_acl_default" => return Some((Namespace::AclDefault, b"")),
        _ => {}
    }
    prefixes.iter().find_map(|(prefix, namespace)| Some((*namespace, name.strip_prefix(*prefix)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8]) -> Result<Pax, Refusal> {
        Pax::parse(bytes, &Limits::default())
    }

    fn with(key: &str, value: &[u8]) -> Vec<u8> {
        crate::tests::archive::pax_record(key.as_bytes(), value)
    }

    #[test]
    fn records_are_read() {
        let mut all = Vec::new();
        for (key, value) in
            [("path", "a/b\nc=d"), ("size", "12"), ("uid", "3000000"), ("mtime", "1.5"), ("x", "y")]
        {
            all.extend(with(key, value.as_bytes()));
        }
        let pax = parse(&all).unwrap();
        assert_eq!(pax.path.as_deref(), Some(b"a/b\nc=d".as_slice()));
        assert_eq!((pax.size, pax.uid, pax.gid), (Some(12), Some(3_000_000), None));
        assert_eq!(pax.time, Some((1, 500_000_000)));
    }

    #[test]
    fn an_empty_value_takes_back() {
        let all = [with("path", b"a"), with("path", b""), with("size", b"1"), with("size", b"")].concat();
        let pax = parse(&all).unwrap();
        assert_eq!((pax.path, pax.size), (None, None));
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        for bytes in [
            b"99 path=a\n".as_slice(),
            b"5 path=a\n",
            b"0 path=a\n",
            b"10 path=ab",
            b"10 pathab\n",
            b"8 =abcd\n",
            b"10 pa\0h=a\n",
            b"-1 path=a\n",
            b"18446744073709551615 a=b\n",
            b"00000000000000000000000009 a=b\n",
            b"path=a\n",
            b"3 \n",
            b"2 ",
            b"\0",
        ] {
            assert!(matches!(parse(bytes), Err(Refusal::Pax)), "{bytes:?}");
        }
    }

    #[test]
    fn numbers_that_lie_are_refused() {
        for (key, value) in [("size", "-1"), ("size", "1e9"), ("size", "99999999999999999999"), ("uid", "x")]
        {
            assert!(matches!(parse(&with(key, value.as_bytes())), Err(Refusal::Number(_))), "{key} {value}");
        }
    }

    #[test]
    fn attributes_keep_their_namespaces() {
        let mut all = Vec::new();
        for name in [
            "user.x",
            "security.capability",
            "trusted.a.b",
            "system.posix_acl_access",
            "system.nfs4_acl",
            "com.apple.quarantine",
            "trusted.overlay.redirect",
        ] {
            all.extend(with(&format!("SCHILY.xattr.{name}"), b"\x00value\n"));
        }
        let xattrs = parse(&all).unwrap().take_xattrs();
        let names: Vec<_> = xattrs.iter().map(|xattr| (xattr.namespace, &*xattr.name)).collect();
        let wanted: [(Namespace, &[u8]); 4] = [
            (Namespace::User, b"x"),
            (Namespace::AclAccess, b""),
            (Namespace::Trusted, b"a.b"),
            (Namespace::Security, b"capability"),
        ];
        assert_eq!(names, wanted);
        assert!(xattrs.iter().all(|xattr| &*xattr.value == b"\x00value\n"));
    }

    #[test]
    fn attributes_have_limits() {
        let with = |name: &str, size| with(&format!("SCHILY.xattr.{name}"), &vec![b'x'; size]);
        assert!(parse(&with("user.x", 65_000)).is_ok());
        assert!(matches!(parse(&with("user.x", 65_536)), Err(Refusal::XattrsTooLong(_))));
        let many: Vec<u8> = (0..70).flat_map(|_| with("user.x", 1000)).collect();
        assert!(matches!(parse(&many), Err(Refusal::XattrsTooLong(_))), "the last one counts, and all cost");
        assert!(parse(&with(&format!("user.{}", "x".repeat(255)), 1)).is_ok());
        assert!(matches!(parse(&with(&format!("user.{}", "x".repeat(256)), 1)), Err(Refusal::XattrName)));
        assert!(matches!(parse(&with("user.", 1)), Err(Refusal::XattrName)));
    }
}
