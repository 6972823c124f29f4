use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;

use bathy_protocol::archive::ArchiveDecoder;

use super::*;

/// The reported size of the file, and the content that was sent.
fn read_range(path: &Path, offset: u64, limit: u64) -> Result<(u64, Vec<u8>), TransferError> {
    let mut wire = Vec::new();
    range(&mut wire, path.as_os_str().as_bytes(), offset, limit)?;
    let mut decoder = ArchiveDecoder::default();
    decoder.push(&wire);
    let (mut total, mut content) = (None, Vec::new());
    while let Some(record) = decoder.next_record().unwrap() {
        match record {
            ArchiveRecord::File { size, .. } => total = Some(size),
            ArchiveRecord::Data(bytes) => content.extend(bytes),
            ArchiveRecord::FileEnd | ArchiveRecord::End => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(decoder.is_complete());
    Ok((total.unwrap(), content))
}

#[test]
fn only_the_wanted_bytes_are_sent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let content: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(&path, &content).unwrap();
    for (offset, limit) in [(0, 10), (399_990, 100), (5, 100_000), (0, u64::MAX), (7, 0)] {
        let (total, got) = read_range(&path, offset, limit).unwrap();
        let begin = usize::try_from(offset).unwrap();
        let end = begin.saturating_add(usize::try_from(limit).unwrap()).min(content.len());
        assert_eq!(total, 400_000);
        assert!(got == content[begin..end], "{offset} {limit}: {} bytes", got.len());
    }
    for offset in [400_000, u64::MAX] {
        assert_eq!(read_range(&path, offset, u64::MAX).unwrap(), (400_000, Vec::new()));
    }
}

#[test]
fn a_hole_costs_only_what_is_wanted_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sparse");
    fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    assert_eq!(read_range(&path, 1 << 39, 3).unwrap(), (1 << 40, vec![0; 3]));
}

#[test]
fn links_are_followed_and_the_kernels_files_have_their_true_length() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("link");
    symlink("/proc/self/cmdline", &link).unwrap();
    let whole = fs::read("/proc/self/cmdline").unwrap();
    let (total, content) = read_range(&link, 1, 4).unwrap();
    assert_eq!((total, content.as_slice()), (whole.len() as u64, &whole[1..5]));
}

#[test]
fn what_is_not_a_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let said = |path: &Path| {
        read_range(path, 0, 1).unwrap_err().to_string().replace(folder.path().to_str().unwrap(), "")
    };
    assert_eq!(said(folder.path()), ": is a folder, not a file");
    assert_eq!(said(Path::new("/dev/zero")), "/dev/zero: is a device, not a file");
    assert_eq!(said(&folder.path().join("none")), "/none: No such file or directory");
    fs::write(folder.path().join("file"), "").unwrap();
    assert_eq!(said(&folder.path().join("file/below")), "/file/below: Not a directory");
    let fifo = folder.path().join("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    assert_eq!(said(&fifo), "/fifo: is a fifo, not a file");
}
