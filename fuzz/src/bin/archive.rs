//! Archives from a guest: whatever they hold, only the destination changes, within its limits, with no link out of it
//! and no half of a file left behind.
#![no_main]

use std::ffi::{OsStr, c_char};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use bathy_fuzz::{Input, MAX_STEPS};
use bathy_protocol::archive::{ArchiveDecoder, MAX_DATA, ArchiveRecord, encode};
use bathy_client::transfer::unpack::TEMPORARY_PREFIX;
use bathy_client::transfer::{Packer, UnpackLimits, Unpacker};
use libfuzzer_sys::fuzz_target;

const LIMITS: UnpackLimits = UnpackLimits { bytes: 64 << 10, entries: 40 };

/// The sanitizer asks this program for its options. The store's SQLite comes along with the crate under test, and it has
/// equally named constants in several of its functions, which the sanitizer takes for one that is defined twice.
#[unsafe(no_mangle)]
extern "C" fn __asan_default_options() -> *const c_char {
    c"detect_odr_violation=0".as_ptr()
}

/// Few, so that they meet each other.
const NAMES: [&[u8]; 9] = [b"a", b"b", b"c", b"..", b".", b"", b"a/b", b"/a", b"../outside/victim"];
const TARGETS: [&[u8]; 12] = [
    b"a",
    b"b",
    b"..",
    b".",
    b"a/..",
    b"../..",
    b"/",
    b"../a",
    b"./b/c",
    b"c/../..",
    b"../../outside/victim",
    b"",
];

/// What is on the disk afterwards.
#[derive(Default)]
struct Found {
    files: u64,
    folders: u64,
    links: u64,
    bytes: u64,
    /// Something had a mode that kept even its owner out.
    closed: bool,
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let choice = input.u8();
    let archive = if choice & 1 == 0 { raw(&mut input) } else { drawn(&mut input) };
    decode(&archive, choice);

    let memory = Path::new("/dev/shm");
    let place = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let place = place.expect("a folder");
    let (inside, outside) = (place.path().join("inside"), place.path().join("outside"));
    fs::create_dir(&inside).expect("a folder");
    fs::create_dir(&outside).expect("a folder");
    fs::write(outside.join("victim"), "untouched").expect("a file");

    let mut unpacker = Unpacker::new(&inside, OsStr::new("item"), LIMITS).expect("it is a folder");
    let piece = usize::from(choice) + 1;
    let taken = archive.chunks(piece).all(|piece| unpacker.take(piece).is_ok());
    let summary = unpacker.finish();
    assert!(taken || summary.is_err());

    assert_eq!(children(place.path()), ["inside", "outside"]);
    assert_eq!(children(&outside), ["victim"]);
    assert_eq!(fs::read(outside.join("victim")).expect("it is there"), b"untouched");
    assert!(children(&inside).iter().all(|name| name == "item"));
    let mut found = Found::default();
    survey(&inside, &inside.join("item"), &mut found);
    assert!(found.files + found.folders + found.links <= LIMITS.entries);
    assert!(found.bytes <= LIMITS.bytes);

    if let Ok(summary) = summary {
        let there = (found.files, found.folders, found.links);
        // A name that comes twice is written once and counted twice.
        if !found.closed && there == (summary.files, summary.folders, summary.links) {
            let mut packer = Packer::open(&inside.join("item")).expect("it was just written");
            while packer.fill(&mut Vec::new(), 64 << 10).expect("it was just written") {}
            assert_eq!(packer.into_summary().digest, summary.digest);
        }
    }
});

/// Bytes as they are.
fn raw(input: &mut Input<'_>) -> Vec<u8> {
    input.take(usize::MAX).to_vec()
}

/// Records that a guest could think of, in any order.
fn drawn(input: &mut Input<'_>) -> Vec<u8> {
    let mut archive = Vec::new();
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let kind = input.u8();
        let name = NAMES[usize::from(input.u8()) % NAMES.len()].to_vec();
        let mode = 0o700 | u32::from(input.u16());
        let record = match kind % 9 {
            0 | 1 => ArchiveRecord::Enter { name, mode },
            2 => ArchiveRecord::Leave,
            3 | 4 => {
                ArchiveRecord::File { name, mode, size: u64::from(input.u8()), modified: i64::from(input.u32()) }
            }
            5 => ArchiveRecord::Data(vec![kind; usize::from(input.u16()) % (MAX_DATA + 2)]),
            6 => ArchiveRecord::FileEnd,
            7 => ArchiveRecord::Link { name, target: TARGETS[usize::from(input.u8()) % TARGETS.len()].to_vec() },
            _ => ArchiveRecord::Skipped { name, reason: String::new() },
        };
        let file = matches!(record, ArchiveRecord::File { .. });
        encode(&record, &mut archive).expect("it is short enough");
        // Most files are complete, or else hardly any archive would be.
        if file && kind & 0x80 == 0 {
            encode(&ArchiveRecord::FileEnd, &mut archive).expect("it is short enough");
        }
    }
    encode(&ArchiveRecord::End, &mut archive).expect("it is short enough");
    archive
}

/// What decodes encodes to the same bytes' meaning, however it is cut.
fn decode(archive: &[u8], choice: u8) {
    let mut decoder = ArchiveDecoder::default();
    for piece in archive.chunks(usize::from(choice) + 1) {
        decoder.push(piece);
        loop {
            match decoder.next_record() {
                Ok(Some(record)) => encode(&record, &mut Vec::new()).expect("what decodes encodes"),
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

fn children(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("it is there");
    let name = |entry: std::io::Result<fs::DirEntry>| {
        entry.expect("it can be read").file_name().into_string().unwrap_or_default()
    };
    let mut names: Vec<_> = entries.map(name).collect();
    names.sort();
    names
}

/// Looks at everything from `path` on down.
fn survey(top: &Path, path: &Path, found: &mut Found) {
    let Ok(metadata) = fs::symlink_metadata(path) else { return };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    assert!(!name.starts_with(TEMPORARY_PREFIX), "{path:?} was left behind");
    if metadata.is_symlink() {
        found.links += 1;
        if let Ok(end) = fs::canonicalize(path) {
            let item = fs::canonicalize(top.join("item")).expect("it is there");
            assert!(end.starts_with(&item), "{path:?} leads to {end:?}");
        }
        return;
    }
    assert_eq!(metadata.permissions().mode() & 0o7000, 0, "{path:?}");
    if metadata.is_dir() {
        found.folders += 1;
        if metadata.permissions().mode() & 0o700 != 0o700 {
            found.closed = true;
            fs::set_permissions(path, fs::Permissions::from_mode(0o700)).expect("it is ours");
        }
        for entry in fs::read_dir(path).expect("it is there") {
            survey(top, &entry.expect("it can be read").path(), found);
        }
    } else {
        found.files += 1;
        found.closed |= metadata.permissions().mode() & 0o400 == 0;
        found.bytes += metadata.len();
    }
}
