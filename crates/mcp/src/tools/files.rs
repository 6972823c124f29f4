//! Files of a sandbox.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::arguments::{Path, SandboxId};
use super::{CHANGES, READS, SETTLES, Spec};
use crate::answer::{Answer, Image, MAX_IMAGE};
use crate::call::Call;
use crate::error::ToolError;
use crate::text;

/// The most of a file that one call reads.
const MAX_READ: u64 = 1 << 20;
/// The largest file that can be edited.
const MAX_EDIT: u64 = 8 << 20;
/// The longest that an edited file may become.
const MAX_GROWN: usize = 32 << 20;
/// The longest text that is searched for with other white space, in bytes.
const CLOSER_LOOK: usize = 64 << 10;
/// The most that one call writes, in characters.
const MAX_WRITE: u64 = 8 << 20;
/// The most entries that one call lists.
const MAX_ENTRIES: u64 = 5000;
/// The most lines that are named where a text occurs several times.
const PLACES: usize = 8;

pub fn tools() -> Vec<Spec> {
    vec![read_file(), write_file(), edit_file(), list_directory()]
}

fn read_file() -> Spec {
    Spec::new(
        "read_file",
        "Read a file",
        READS,
        "Reads a file of a sandbox: text as text, PNG and JPEG pictures as an image, anything else in base64. Use offset and limit \
         for the rest of a larger file. Changes nothing. Relative paths begin in the sandbox's working directory.",
        read,
    )
}

fn read_limit() -> u64 {
    64 * 1024
}

#[derive(Deserialize, JsonSchema)]
struct FileRange {
    sandbox_id: SandboxId,
    path: Path,
    /// Where to begin, in bytes
    #[serde(default)]
    offset: u64,
    /// The most to read, in bytes
    #[serde(default = "read_limit")]
    #[schemars(range(min = 1, max = MAX_READ))]
    limit: u64,
}

fn read(call: &Call, given: FileRange) -> Result<Answer, ToolError> {
    let sandbox = call.running_sandbox(&given.sandbox_id)?;
    let (offset, limit) = (given.offset, given.limit);
    let whole = offset == 0 && limit == read_limit();
    let content = call.manager(|manager| {
        let part = manager.read_file(&sandbox, &given.path, offset, limit)?;
        let small = usize::try_from(part.total).is_ok_and(|total| total <= MAX_IMAGE);
        match image_type(&part.bytes) {
            Some(_) if whole && small && length(&part.bytes) < part.total => {
                Ok(manager.read_file(&sandbox, &given.path, 0, part.total)?)
            }
            _ => Ok(part),
        }
    })?;
    let mut bytes = content.bytes;
    let is_all = offset == 0 && length(&bytes) >= content.total;
    let picture = image_type(&bytes)
        .filter(|_| is_all && bytes.len() <= MAX_IMAGE)
        .and_then(|mime| Image::from_base64(mime, &STANDARD.encode(&bytes)).ok());
    let (encoding, shown) = if picture.is_some() {
        ("image", String::new())
    } else {
        match as_text(&mut bytes, is_all) {
            Some(text) => ("text", text),
            None => ("base64", STANDARD.encode(&bytes)),
        }
    };
    let next = offset + length(&bytes);
    let more = next < content.total && !bytes.is_empty();
    let mut structured = crate::shown::object(json!({
        "path": *given.path,
        "encoding": encoding,
        "content": shown,
        "offset": offset,
        "bytes": bytes.len(),
        "total_bytes": content.total,
    }));
    let mut text = match encoding {
        "image" => format!("{}: a picture of {} bytes", text::line(&given.path, 200), content.total),
        "base64" => format!("{} bytes that are no text, in base64:\n{shown}", bytes.len()),
        _ => shown,
    };
    if more {
        structured.insert("next_offset".to_owned(), next.into());
        text.push_str(&format!("\n[{} of {} bytes; go on with offset {next}]", bytes.len(), content.total));
    }
    let images = picture.into_iter().collect();
    Ok(Answer { structured: Value::Object(structured), text, images, ..Answer::default() })
}

fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

/// The MIME type, if it is a picture that clients show.
fn image_type(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some("image/png"),
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        _ => None,
    }
}

/// Bytes as text, if they are UTF-8. A character that the end of a part cuts off is left for the next part.
fn as_text(bytes: &mut Vec<u8>, is_all: bool) -> Option<String> {
    if let Err(error) = std::str::from_utf8(bytes) {
        let cut_off = error.error_len().is_none() && !is_all && error.valid_up_to() > 0;
        if !cut_off {
            return None;
        }
        bytes.truncate(error.valid_up_to());
    }
    let text = std::str::from_utf8(bytes).ok()?;
    // A file with NUL characters is binary.
    (!text.contains('\0')).then(|| text.to_owned())
}

fn write_file() -> Spec {
    Spec::new(
        "write_file",
        "Write a file",
        SETTLES,
        "Writes a file of a sandbox, with the directories on the way to it. A file that is there is replaced as a whole and keeps \
         its permissions.",
        write,
    )
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Text,
    Base64,
}

#[derive(Deserialize, JsonSchema)]
struct Whole {
    sandbox_id: SandboxId,
    path: Path,
    /// The new content
    #[schemars(length(max = MAX_WRITE))]
    content: String,
    /// What content is
    #[serde(default)]
    encoding: Encoding,
}

fn write(call: &Call, given: Whole) -> Result<Answer, ToolError> {
    let bytes = if given.encoding == Encoding::Base64 {
        let letters: String = given.content.split_ascii_whitespace().collect();
        STANDARD.decode(letters).map_err(|error| {
            ToolError::Failed(format!("`content` is not base64: {error}. Nothing was written."))
        })?
    } else {
        given.content.into_bytes()
    };
    let sandbox = call.running_sandbox(&given.sandbox_id)?;
    call.manager(|manager| Ok(manager.write_file(&sandbox, &given.path, &bytes)?))?;
    let text = format!("{} bytes are written to {}", bytes.len(), text::line(&given.path, 200));
    Ok(Answer::new(json!({ "path": *given.path, "bytes": bytes.len() }), text))
}

fn edit_file() -> Spec {
    Spec::new(
        "edit_file",
        "Edit a file",
        CHANGES,
        "Replaces text in a text file of a sandbox. old_text must occur in it exactly as given, white space included, and only \
         once unless replace_all is set; otherwise nothing is changed and the answer says what was found.",
        edit,
    )
}

#[derive(Deserialize, JsonSchema)]
struct Edit {
    sandbox_id: SandboxId,
    path: Path,
    /// The text to replace
    #[schemars(length(min = 1, max = MAX_WRITE))]
    old_text: String,
    /// Its replacement
    #[schemars(length(max = MAX_WRITE))]
    new_text: String,
    /// Replace every occurrence
    #[serde(default)]
    replace_all: bool,
}

fn edit(call: &Call, given: Edit) -> Result<Answer, ToolError> {
    let sandbox = call.running_sandbox(&given.sandbox_id)?;
    let file = call.manager(|manager| Ok(manager.read_file(&sandbox, &given.path, 0, MAX_EDIT)?))?;
    if file.total > length(&file.bytes) {
        return Err(ToolError::Failed(format!(
            "The file has {} bytes; only files of at most {MAX_EDIT} can be edited. Use run_command with sed, or run_code.",
            file.total
        )));
    }
    let before = String::from_utf8(file.bytes)
        .map_err(|_| ToolError::failed("The file is not text in UTF-8. Use run_code to change it."))?;
    let lines = places(&before, &given.old_text, given.replace_all).map_err(ToolError::Failed)?;
    let count = before.matches(&given.old_text).count();
    let grown = count.checked_mul(given.new_text.len()).and_then(|new| new.checked_add(before.len()));
    if grown.is_none_or(|grown| grown > MAX_GROWN) {
        return Err(ToolError::Failed(format!(
            "{count} replacements would make the file longer than {MAX_GROWN} bytes, and nothing was changed. Use run_code instead."
        )));
    }
    let after = before.replace(&given.old_text, &given.new_text);
    call.manager(|manager| Ok(manager.write_file(&sandbox, &given.path, after.as_bytes())?))?;
    let first = lines.first().copied().unwrap_or(1);
    let text =
        format!("{count} place(s) changed in {}, the first in line {first}", text::line(&given.path, 200));
    Ok(Answer::new(json!({ "path": *given.path, "replacements": count, "first_line": first }), text))
}

/// The lines in which `old` begins, as far as they are named; or why nothing can be replaced.
fn places(text: &str, old: &str, all: bool) -> Result<Vec<usize>, String> {
    let line_of = |at: usize| text.get(..at).unwrap_or_default().matches('\n').count() + 1;
    let lines: Vec<_> = text.match_indices(old).take(PLACES).map(|(at, _)| line_of(at)).collect();
    let count = text.matches(old).count();
    match count {
        0 => Err(not_found(text, old)),
        2.. if !all => {
            let named: Vec<_> = lines.iter().map(ToString::to_string).collect();
            let more = if count > lines.len() { ", …" } else { "" };
            Err(format!(
                "old_text occurs {count} times (lines {}{more}), and nothing was changed. Give more of the text around the place that you mean, or set replace_all.",
                named.join(", ")
            ))
        }
        _ => Ok(lines),
    }
}

/// Why a text may not have been found.
fn not_found(text: &str, old: &str) -> String {
    let begin = "old_text does not occur in the file, and nothing was changed.";
    if text.contains("\r\n") && text.replace("\r\n", "\n").contains(&old.replace("\r\n", "\n")) {
        return format!("{begin} It would, but for line ends: lines of this file end with \\r\\n.");
    }
    // Comparing long texts would take too long.
    if text.len() > CLOSER_LOOK || old.len() > CLOSER_LOOK {
        return format!("{begin} Read the place first, and copy the text as it is there.");
    }
    let bare = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let wanted: Vec<_> = old.lines().map(bare).filter(|line| !line.is_empty()).collect();
    let there: Vec<_> = text
        .lines()
        .enumerate()
        .map(|(number, line)| (number + 1, bare(line)))
        .filter(|(_, line)| !line.is_empty())
        .collect();
    let same =
        |window: &[(usize, String)]| window.iter().zip(&wanted).all(|((_, line), wanted)| line == wanted);
    if !wanted.is_empty()
        && let Some(found) = there.windows(wanted.len()).find(|window| same(window))
    {
        let line = found.first().map_or(1, |(number, _)| *number);
        return format!(
            "{begin} Text that differs only in white space begins in line {line}; read the file and copy it exactly."
        );
    }
    let first = wanted.first();
    if let Some((number, _)) = there.iter().find(|(_, line)| Some(line) == first) {
        return format!(
            "{begin} Its first line is line {number} of the file, but what follows differs. Read the file again."
        );
    }
    format!("{begin} Read the file with read_file and copy the text exactly.")
}

fn list_directory() -> Spec {
    Spec::new(
        "list_directory",
        "List a directory",
        READS,
        "Lists a directory of a sandbox by name, with kind, size and time of last change. Links are not followed. Changes \
         nothing.",
        list,
    )
}

fn entry_limit() -> u64 {
    500
}

#[derive(Deserialize, JsonSchema)]
struct Directory {
    sandbox_id: SandboxId,
    path: Path,
    /// The most entries
    #[serde(default = "entry_limit")]
    #[schemars(range(min = 1, max = MAX_ENTRIES))]
    limit: u64,
}

fn list(call: &Call, given: Directory) -> Result<Answer, ToolError> {
    let sandbox = call.running_sandbox(&given.sandbox_id)?;
    let limit = usize::try_from(given.limit).unwrap_or(usize::MAX);
    let listing = call.manager(|manager| Ok(manager.list_directory(&sandbox, &given.path, limit)?))?;
    let mut text = String::new();
    let mut entries = Vec::with_capacity(listing.entries.len());
    for entry in &listing.entries {
        let (name, kind) = (text::clean(&entry.name), json!(entry.kind));
        let mut value = crate::shown::object(json!({
            "name": name,
            "kind": kind,
            "size": entry.size,
            "mode": format!("{:o}", entry.mode & 0o7777),
            "modified_unix": entry.modified_ns / 1_000_000_000,
        }));
        let target = entry.target.as_deref().map(text::clean);
        let mark = match kind.as_str() {
            Some("directory") => "/".to_owned(),
            Some("symlink") => format!(" -> {}", target.as_deref().unwrap_or("?")),
            Some("file") => format!(" ({} bytes)", entry.size),
            _ => " (special)".to_owned(),
        };
        text.push_str(&format!("{}{mark}\n", name.replace('\n', "\\n")));
        value.extend(target.map(|target| ("target".to_owned(), target.into())));
        entries.push(Value::Object(value));
    }
    let shown = u64::try_from(entries.len()).unwrap_or(u64::MAX);
    if listing.total > shown {
        text.push_str(&format!("[{shown} of {} entries]\n", listing.total));
    } else if entries.is_empty() {
        text.push_str("(empty)\n");
    }
    Ok(Answer::new(json!({ "path": *given.path, "entries": entries, "total": listing.total }), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_found_once_or_the_places_are_named() {
        assert_eq!(places("a\nb\na\n", "b", false), Ok(vec![2]));
        assert_eq!(places("a\nb\na\n", "a", true), Ok(vec![1, 3]));
        let text = places("a\nb\na\n", "a", false).unwrap_err();
        assert!(text.contains("2 times (lines 1, 3)") && text.contains("replace_all"), "{text}");
        assert!(places(&"a\n".repeat(100), "a", false).unwrap_err().contains("8, …"));
    }

    #[test]
    fn a_text_that_is_not_there_is_searched_for_likely_reasons() {
        let text = "def f():\n    return 1\n\nprint(f())\n";
        let reason = |old: &str| places(text, old, false).unwrap_err();
        assert!(reason("def f():\n\treturn 1").contains("white space begins in line 1"));
        assert!(reason("    return  1").contains("line 2"));
        assert!(reason("print(f())\nexit()").contains("first line is line 4"));
        assert!(reason("nothing").contains("Read the file"));
        assert!(places("a\r\nb\r\n", "a\nb", false).unwrap_err().contains("\\r\\n"));
        assert!(places("", "x", false).is_err());
    }

    #[test]
    fn text_is_told_from_other_bytes() {
        let text = |bytes: &[u8], all| as_text(&mut bytes.to_vec(), all);
        assert_eq!(text("ü".as_bytes(), true).as_deref(), Some("ü"));
        assert_eq!(text(b"ab\xc3", false).as_deref(), Some("ab"));
        assert_eq!(text(b"ab\xc3", true), None);
        assert_eq!(text(b"ab\xff", false), None);
        assert_eq!(text(b"a\0b", true), None);
        assert_eq!(image_type(b"\x89PNG\r\n\x1a\n..."), Some("image/png"));
        assert_eq!(image_type(b"\xff\xd8\xff\xe0"), Some("image/jpeg"));
        assert_eq!(image_type(b"GIF89a"), None);
    }
}
