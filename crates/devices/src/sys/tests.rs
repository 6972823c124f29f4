//! Transfers that the host's kernel does in parts.

use std::cell::RefCell;

use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::*;
use crate::GuestRam;

/// Where a call was to start in the file, and which memory it was given: addresses and lengths.
type Call = (libc::off_t, Vec<(usize, usize)>);

/// Pieces of 10, 20 and 30 bytes at the guest's addresses 0x100, 0x200 and 0x300.
fn three_pieces(ram: &GuestRam) -> Pieces<'_> {
    let mut pieces = Pieces::new();
    for (address, length) in [(0x100, 10), (0x200, 20), (0x300, 30)] {
        assert!(pieces.push(&ram.memory().get_slice(GuestAddress(address), length).unwrap()));
    }
    pieces
}

/// Transfers from the file's offset 100 on; each call moves as many bytes as the next of `results`, or fails with the
/// error that it is.
fn transfer(ram: &GuestRam, results: &[Result<isize, libc::c_int>]) -> (io::Result<()>, Vec<Call>) {
    let base = ram.memory().get_slice(GuestAddress(0), 1).unwrap().ptr_guard().as_ptr() as usize;
    let calls = RefCell::new(Vec::new());
    let outcome = three_pieces(ram).transfer(100, |vectors, count, at| {
        // SAFETY: `transfer` passes the first of `count` vectors that live as long as this call.
        let vectors = unsafe { std::slice::from_raw_parts(vectors, usize::try_from(count).unwrap()) };
        let memory = vectors.iter().map(|vector| (vector.iov_base as usize - base, vector.iov_len)).collect();
        calls.borrow_mut().push((at, memory));
        results[calls.borrow().len() - 1].unwrap_or_else(|error| {
            // SAFETY: the address of this thread's own number.
            unsafe { *libc::__errno_location() = error };
            -1
        })
    });
    (outcome, calls.into_inner())
}

#[test]
fn transfer_goes_on_where_the_last_call_ended() {
    let ram = GuestRam::create(4096).unwrap();
    // Inside of the first piece, to its end, into the third, and the rest after an interruption.
    let (outcome, calls) = transfer(&ram, &[Ok(4), Ok(6), Ok(25), Err(libc::EINTR), Ok(25)]);
    outcome.unwrap();
    let expected: [Call; 5] = [
        (100, vec![(0x100, 10), (0x200, 20), (0x300, 30)]),
        (104, vec![(0x104, 6), (0x200, 20), (0x300, 30)]),
        (110, vec![(0x200, 20), (0x300, 30)]),
        (135, vec![(0x305, 25)]),
        (135, vec![(0x305, 25)]),
    ];
    assert_eq!(calls, expected);
}

#[test]
fn transfer_in_one_call_is_one_call() {
    let ram = GuestRam::create(4096).unwrap();
    let (outcome, calls) = transfer(&ram, &[Ok(60)]);
    outcome.unwrap();
    assert_eq!(calls.len(), 1);
}

#[test]
fn file_that_ends_too_early_and_errors_end_the_transfer() {
    let ram = GuestRam::create(4096).unwrap();
    let (outcome, calls) = transfer(&ram, &[Ok(4), Ok(0)]);
    assert_eq!((outcome.unwrap_err().kind(), calls.len()), (io::ErrorKind::UnexpectedEof, 2));
    let (outcome, calls) = transfer(&ram, &[Ok(4), Err(libc::ENOSPC)]);
    assert_eq!((outcome.unwrap_err().kind(), calls.len()), (io::ErrorKind::StorageFull, 2));
}

#[test]
fn pieces_count_their_bytes_and_are_no_more_than_so_many() {
    let ram = GuestRam::create(4096).unwrap();
    assert_eq!(three_pieces(&ram).remaining(), 60);
    let mut pieces = Pieces::new();
    let slice = ram.memory().get_slice(GuestAddress(0), 2).unwrap();
    for _ in 0..MAX_PIECES {
        assert!(pieces.push(&slice));
    }
    assert!(!pieces.push(&slice));
    assert_eq!(pieces.remaining(), 2 * MAX_PIECES);
}

#[test]
fn region_is_described_as_it_is_mapped() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let mapping = Mapping::new(&file, 0, 4096).unwrap();
    let region = mapping.region(FileOffset::new(file, 0)).unwrap();
    assert_eq!(region.prot(), libc::PROT_READ | libc::PROT_WRITE);
    assert_eq!(region.flags(), libc::MAP_SHARED | libc::MAP_NORESERVE);
    assert_eq!((region.size(), region.as_ptr()), (4096, mapping.address));
}
