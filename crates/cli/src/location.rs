//! The two sides of `bathy cp`: a path of the host, or `NAME:PATH` in a sandbox.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// The error for `-`, which would otherwise be a file of that name.
const STREAM: &str = "`bathy cp` copies no streams: `bathy exec NAME cat PATH` prints a file, `bathy exec -i NAME tee PATH` writes \
    standard input to one. A file that is called - is written ./-";

/// The source or the destination of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    Host(PathBuf),
    Guest { name: String, path: Vec<u8> },
}

/// A copy into or out of a sandbox.
#[derive(Debug, PartialEq, Eq)]
pub enum Copy {
    In { from: PathBuf, name: String, to: Vec<u8> },
    Out { name: String, from: Vec<u8>, to: PathBuf },
}

/// Parses a location. A sandbox's name precedes the first colon and has no slash, so `./a:b` is a path of the host.
pub fn parse(text: &OsStr) -> Result<Location, String> {
    let bytes = text.as_bytes();
    if bytes.is_empty() {
        return Err("An empty path is no place to copy from or to".to_owned());
    }
    if bytes == b"-" {
        return Err(STREAM.to_owned());
    }
    let Some((name, path)) = split(bytes) else { return Ok(Location::Host(PathBuf::from(text))) };
    let name = std::str::from_utf8(name)
        .ok()
        .filter(|name| !name.is_empty())
        .ok_or_else(|| format!("{text:?} does not begin with a sandbox's name. A path of this machine with a colon in it is written ./PATH"))?;
    if path.is_empty() {
        return Err(format!("{text:?} lacks a path after the colon, such as {name}:/tmp"));
    }
    if path.contains(&0) {
        return Err(format!("{text:?} is not a path"));
    }
    Ok(Location::Guest { name: name.to_owned(), path: path.to_vec() })
}

fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = bytes.iter().position(|byte| *byte == b':')?;
    let (name, rest) = (bytes.get(..colon)?, bytes.get(colon + 1..)?);
    (!name.contains(&b'/')).then_some((name, rest))
}

/// Parses both sides, exactly one of which is in a sandbox. Several sources are on the same side, and their destination is a
/// folder.
pub fn parse_copies(sources: &[OsString], to: &OsString) -> Result<Vec<Copy>, String> {
    let several = sources.len() > 1;
    let mut names = BTreeMap::new();
    for source in sources.iter().filter(|_| several) {
        let path = match parse(source)? {
            Location::Host(path) => path,
            Location::Guest { path, .. } => PathBuf::from(OsString::from_vec(path)),
        };
        // A path like `.` has the name of a folder that is known only later.
        let Some(name) = path.file_name() else { continue };
        if let Some(first) = names.insert(name.to_owned(), source) {
            let (first, source) = (first.display(), source.display());
            return Err(format!(
                "{first} and {source} have the same name, so the second copy would replace the first. Copy them one by one"
            ));
        }
    }
    sources.iter().map(|from| parse_copy(from, to, several)).collect()
}

fn parse_copy(from: &OsString, to: &OsString, into_folder: bool) -> Result<Copy, String> {
    match (parse(from)?, parse(to)?) {
        (Location::Host(from), Location::Guest { name, mut path }) => {
            if into_folder {
                // Only a folder has this entry.
                path.extend(b"/.");
            }
            Ok(Copy::In { from, name, to: path })
        }
        (Location::Guest { .. }, Location::Host(to)) if into_folder && !to.is_dir() => {
            Err(format!("Several sources need a folder to go to, and {} is none", to.display()))
        }
        (Location::Guest { name, path }, Location::Host(to)) => Ok(Copy::Out { name, from: path, to }),
        (Location::Host(_), Location::Host(_)) => {
            Err("Neither side is in a sandbox. Write one of them as NAME:PATH".to_owned())
        }
        (Location::Guest { .. }, Location::Guest { .. }) => {
            Err("Both sides are in sandboxes. Copy to this machine first, then from it".to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(name: &str, path: &str) -> Location {
        Location::Guest { name: name.to_owned(), path: path.as_bytes().to_vec() }
    }

    #[test]
    fn a_colon_after_a_slash_belongs_to_the_path() {
        for (text, place) in [
            ("web:/tmp/x", guest("web", "/tmp/x")),
            ("web:a:b", guest("web", "a:b")),
            ("./a:b", Location::Host("./a:b".into())),
            ("/data/a:b", Location::Host("/data/a:b".into())),
            ("plain", Location::Host("plain".into())),
            ("../x", Location::Host("../x".into())),
        ] {
            assert_eq!(parse(OsStr::new(text)), Ok(place), "{text}");
        }
    }

    #[test]
    fn paths_need_not_be_utf_8() {
        let place = parse(OsStr::from_bytes(b"web:/\xff")).unwrap();
        assert_eq!(place, Location::Guest { name: "web".to_owned(), path: b"/\xff".to_vec() });
        assert_eq!(
            parse(OsStr::from_bytes(b"\xff")),
            Ok(Location::Host(PathBuf::from(OsStr::from_bytes(b"\xff"))))
        );
    }

    #[test]
    fn what_is_no_place_is_refused() {
        for text in [&b""[..], b":x", b"web:", b"\xff:x"] {
            assert!(parse(OsStr::from_bytes(text)).is_err(), "{text:?}");
        }
    }

    #[test]
    fn exactly_one_side_is_in_a_sandbox() {
        let copy = |from: &str, to: &str| parse_copy(&from.into(), &to.into(), false);
        assert_eq!(
            copy("a", "web:/b"),
            Ok(Copy::In { from: "a".into(), name: "web".to_owned(), to: b"/b".to_vec() })
        );
        assert_eq!(
            copy("web:/b", "a"),
            Ok(Copy::Out { name: "web".to_owned(), from: b"/b".to_vec(), to: "a".into() })
        );
        assert!(copy("a", "b").unwrap_err().contains("Neither"));
        assert!(copy("a:b", "c:d").unwrap_err().contains("Both"));
    }

    #[test]
    fn several_sources_need_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let copies = |from: &[&str], to: &str| {
            let from: Vec<_> = from.iter().map(Into::into).collect();
            parse_copies(&from, &to.into())
        };
        let to = |copy: &Copy| match copy {
            Copy::In { to, .. } => String::from_utf8(to.clone()).unwrap(),
            Copy::Out { to, .. } => to.display().to_string(),
        };
        let into: Vec<_> = copies(&["a", "b"], "web:/tmp").unwrap().iter().map(to).collect();
        assert_eq!(into, ["/tmp/.", "/tmp/."]);
        assert_eq!(copies(&["a"], "web:/tmp").unwrap().iter().map(to).collect::<Vec<_>>(), ["/tmp"]);
        for same in [["x/log", "y/log"], ["log", "./log/"]] {
            let error = copies(&same, "web:/tmp").unwrap_err();
            assert!(error.contains("would replace the first"), "{error}");
        }
        let out = ["web:/a/log", "web:log"];
        assert!(copies(&out, folder.path().to_str().unwrap()).unwrap_err().contains("same name"));
        assert!(copies(&["./a:b", "b"], "web:/tmp").is_ok());
        let here = folder.path().to_str().unwrap();
        assert_eq!(copies(&["web:a", "web:b"], here).unwrap().len(), 2);
        assert!(copies(&["web:a", "web:b"], &format!("{here}/none")).unwrap_err().contains("folder"));
        assert!(copies(&["a", "web:b"], "web:/tmp").unwrap_err().contains("Both"));
    }

    #[test]
    fn a_dash_is_no_file() {
        for (from, to) in [("-", "web:/x"), ("web:/x", "-")] {
            assert!(parse_copy(&from.into(), &to.into(), false).unwrap_err().contains("exec"));
        }
        assert!(parse_copy(&"web:/x".into(), &"./-".into(), false).is_ok());
    }
}
