//! Pictures made by code: shown on terminals that can, saved where the caller wants.
//!
//! Their bytes come from a guest. A terminal receives only base64 that was checked here, and only of pictures whose size is
//! reasonable to decode.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bathy_client::interpreter::Bundle;

use crate::ui::table;

/// The maximum width and height of a picture on a terminal, in pixels.
const MAX_SIDE: u32 = 10_000;
/// How many characters of base64 one command of the kitty protocol carries.
const KITTY_CHUNK: usize = 4096;
/// How many names are tried before a folder counts as full.
const MAX_FILES: u32 = 100_000;

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG: &[u8] = b"\xff\xd8\xff";

/// The encoding of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Png,
    Jpeg,
    Svg,
}

impl Kind {
    /// All formats, the preferred ones first.
    const ALL: [Self; 3] = [Self::Png, Self::Jpeg, Self::Svg];

    fn mime(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::Svg => "image/svg+xml",
        }
    }

    fn extension(self) -> &'static str {
        match self {
            Self::Png => "png",
            Self::Jpeg => "jpg",
            Self::Svg => "svg",
        }
    }
}

#[derive(Debug)]
pub struct Image {
    kind: Kind,
    bytes: Vec<u8>,
    /// The bytes in base64, without line breaks.
    base64: String,
    /// Width and height in pixels, if they can be parsed.
    size: Option<(u32, u32)>,
}

impl Image {
    /// The picture among the forms of a value. `Err` if its content does not match its type.
    pub fn of(bundle: &Bundle) -> Option<Result<Self, String>> {
        let (kind, text) =
            Kind::ALL.into_iter().find_map(|kind| bundle.text(kind.mime()).map(|text| (kind, text)))?;
        Some(Self::new(kind, text).ok_or_else(|| format!("a value claims to be {}, and is not", kind.mime())))
    }

    fn new(kind: Kind, text: &str) -> Option<Self> {
        if kind == Kind::Svg {
            return Some(Self { kind, bytes: text.as_bytes().to_vec(), base64: String::new(), size: None });
        }
        let base64: String = text.chars().filter(|c| !c.is_ascii_whitespace()).collect();
        let bytes = STANDARD.decode(&base64).ok()?;
        let (magic, size) = match kind {
            Kind::Png => (PNG, png_size(&bytes)),
            _ => (JPEG, jpeg_size(&bytes)),
        };
        bytes.starts_with(magic).then_some(Self { kind, bytes, base64, size })
    }

    /// Writes it into a folder under an unused name, and returns the path.
    pub fn save(&self, folder: &Path) -> io::Result<PathBuf> {
        fs::create_dir_all(folder)?;
        for number in 1..MAX_FILES {
            let path = folder.join(format!("bathy-{number}.{}", self.kind.extension()));
            match File::create_new(&path) {
                Ok(mut file) => return file.write_all(&self.bytes).map(|()| path),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("there are too many pictures in it"))
    }

    /// The sequence that shows it on a terminal, if that terminal supports its format.
    pub fn inline(&self, protocol: Protocol) -> Option<String> {
        let fits =
            self.size.is_some_and(|(width, height)| width.max(height) <= MAX_SIDE && width.min(height) > 0);
        match (protocol, self.kind) {
            _ if !fits => None,
            (Protocol::Kitty, Kind::Png) => Some(self.kitty()),
            (Protocol::Iterm, Kind::Png | Kind::Jpeg) => Some(format!(
                "\x1b]1337;File=inline=1;size={};preserveAspectRatio=1:{}\x07\n",
                self.bytes.len(),
                self.base64
            )),
            _ => None,
        }
    }

    /// Transmits and displays, without a response, which would look like input.
    fn kitty(&self) -> String {
        let mut out = String::with_capacity(self.base64.len() + 256);
        let mut rest = self.base64.as_str();
        let mut keys = "a=T,f=100,q=2,";
        loop {
            let (chunk, after) = rest.split_at_checked(KITTY_CHUNK).unwrap_or((rest, ""));
            let more = u8::from(!after.is_empty());
            out.push_str(&format!("\x1b_G{keys}m={more};{chunk}\x1b\\"));
            if after.is_empty() {
                out.push('\n');
                return out;
            }
            (rest, keys) = (after, "q=2,");
        }
    }
}

impl fmt::Display for Image {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.extension().to_uppercase().replace("JPG", "JPEG");
        write!(out, "{kind}, ")?;
        if let Some((width, height)) = self.size {
            write!(out, "{width}×{height}, ")?;
        }
        write!(out, "{}", table::bytes(u64::try_from(self.bytes.len()).unwrap_or(u64::MAX)))
    }
}

/// A terminal's protocol for pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// The protocol of kitty, for PNG only.
    Kitty,
    Iterm,
}

/// The protocol of the terminal on standard output.
pub fn protocol() -> Option<Protocol> {
    io::stdout().is_terminal().then(|| protocol_of(|name| std::env::var(name).ok())).flatten()
}

fn protocol_of(variable: impl Fn(&str) -> Option<String>) -> Option<Protocol> {
    let text = |name| variable(name).unwrap_or_default();
    let term = text("TERM");
    // Terminal multiplexers pass neither on.
    if !text("TMUX").is_empty() || term.starts_with("screen") || term.starts_with("tmux") {
        return None;
    }
    let program = text("TERM_PROGRAM");
    if program == "iTerm.app" || program == "WezTerm" || text("LC_TERMINAL") == "iTerm2" {
        return Some(Protocol::Iterm);
    }
    let kitty = !text("KITTY_WINDOW_ID").is_empty()
        || program == "ghostty"
        || matches!(term.as_str(), "xterm-kitty" | "xterm-ghostty");
    kitty.then_some(Protocol::Kitty)
}

fn png_size(bytes: &[u8]) -> Option<(u32, u32)> {
    let header = bytes.get(PNG.len()..)?;
    let number = |at: usize| Some(u32::from_be_bytes(header.get(at..at + 4)?.try_into().ok()?));
    (header.get(4..8)? == b"IHDR").then_some((number(8)?, number(12)?))
}

/// The size in the first frame header, which follows any number of other segments.
fn jpeg_size(bytes: &[u8]) -> Option<(u32, u32)> {
    let mut at = 2;
    loop {
        let &[0xff, marker, high, low] = bytes.get(at..at + 4)? else { return None };
        if matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) {
            let &[_, h1, h0, w1, w0] = bytes.get(at + 4..at + 9)? else { return None };
            return Some((u16::from_be_bytes([w1, w0]).into(), u16::from_be_bytes([h1, h0]).into()));
        }
        at += 2 + usize::from(u16::from_be_bytes([high, low]).max(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOT: &str =
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

    fn bundle(mime: &str, text: &str) -> Bundle {
        let mut bundle = Bundle::default();
        bundle.data.insert(mime.to_owned(), text.into());
        bundle
    }

    fn dot() -> Image {
        Image::of(&bundle("image/png", DOT)).unwrap().unwrap()
    }

    #[test]
    fn a_picture_tells_its_kind_and_size() {
        assert_eq!(dot().to_string(), "PNG, 1×1, 70 B");
        // Start, an application segment of four bytes, a frame header of 2 by 3 pixels.
        let jpeg = [0xff, 0xd8, 0xff, 0xe0, 0, 4, 1, 2, 0xff, 0xc0, 0, 11, 8, 0, 3, 0, 2, 1];
        assert_eq!(jpeg_size(&jpeg), Some((2, 3)));
        assert_eq!(jpeg_size(&jpeg[..14]), None);
    }

    #[test]
    fn what_is_no_picture_is_not_taken_for_one() {
        for (mime, text) in [("image/png", "TWFu"), ("image/jpeg", DOT), ("image/png", "\u{1b}]0;owned\u{7}")]
        {
            assert!(Image::of(&bundle(mime, text)).unwrap().is_err(), "{mime} {text:?}");
        }
        assert!(Image::of(&bundle("text/plain", "x")).is_none());
    }

    #[test]
    fn c1_a_terminal_gets_base64_in_its_own_protocol_only() {
        let base64 = |c: char| c.is_ascii_alphanumeric() || "+/=".contains(c);
        let kitty = dot().inline(Protocol::Kitty).unwrap();
        assert_eq!(kitty, format!("\x1b_Ga=T,f=100,q=2,m=0;{DOT}\x1b\\\n"));
        let iterm = dot().inline(Protocol::Iterm).unwrap();
        let (_, picture) = iterm.rsplit_once(':').unwrap();
        assert!(picture.trim_end_matches("\u{7}\n").chars().all(base64));
    }

    #[test]
    fn long_pictures_come_in_chunks() {
        let long = Image { base64: "A".repeat(KITTY_CHUNK * 2 + 4), ..dot() };
        let shown = long.inline(Protocol::Kitty).unwrap();
        let ends: Vec<&str> = shown.trim_end().split("\x1b\\").filter(|part| !part.is_empty()).collect();
        let more: Vec<bool> = ends.iter().map(|part| part.contains("m=1;")).collect();
        assert_eq!(more, [true, true, false]);
    }

    #[test]
    fn huge_pictures_are_not_given_to_a_terminal() {
        let huge = Image { size: Some((20_000, 20_000)), ..dot() };
        assert_eq!(huge.inline(Protocol::Kitty), None);
    }

    #[test]
    fn saved_pictures_never_replace_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b");
        let names: Vec<PathBuf> = (0..2).map(|_| dot().save(&deep).unwrap()).collect();
        assert_eq!(names, [deep.join("bathy-1.png"), deep.join("bathy-2.png")]);
        assert_eq!(fs::read(&names[1]).unwrap(), dot().bytes);
    }

    #[test]
    fn terminals_are_known_by_their_variables() {
        let of = |pairs: &[(&str, &str)]| {
            protocol_of(|name| {
                pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(of(&[("TERM", "xterm-kitty")]), Some(Protocol::Kitty));
        assert_eq!(of(&[("TERM", "xterm-ghostty")]), Some(Protocol::Kitty));
        assert_eq!(of(&[("TERM_PROGRAM", "WezTerm")]), Some(Protocol::Iterm));
        assert_eq!(of(&[("TERM_PROGRAM", "iTerm.app")]), Some(Protocol::Iterm));
        assert_eq!(of(&[("TERM", "xterm-256color")]), None);
        assert_eq!(of(&[("TERM", "tmux-256color"), ("KITTY_WINDOW_ID", "1")]), None);
    }
}
