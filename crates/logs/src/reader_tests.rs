use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::format::{MAX_CHUNK, SLOT_OFFSETS};
use crate::{Ring, create};

const META: Meta = Meta { unix_ns: 0, source: 3, channel: crate::STDOUT };

#[test]
fn a_reader_goes_on_where_another_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    let mut ring = Ring::writer(create(&path, 8192).unwrap(), 8192).unwrap();
    ring.write(&META, b"one").unwrap();
    ring.write(&META, b"two").unwrap();
    let first = Reader::open(&path).unwrap().next().unwrap().unwrap();
    let mut rest = Reader::open(&path).unwrap().from(first.next_position).until_now().unwrap();
    ring.write(&META, b"three").unwrap();
    assert_eq!(rest.next().unwrap().unwrap().bytes, b"two");
    assert_eq!(rest.next().unwrap(), None);
    let mut following = Reader::open(&path).unwrap().from(rest.position());
    assert_eq!(following.wait(Duration::ZERO).unwrap().unwrap().bytes, b"three");
    assert_eq!(following.wait(Duration::from_millis(1)).unwrap(), None);
}

#[test]
fn a_reader_that_was_overtaken_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    let mut ring = Ring::writer(create(&path, 4096).unwrap(), 4096).unwrap();
    let mut reader = Reader::open(&path).unwrap();
    for _ in 0..100 {
        ring.write(&META, &[b'x'; 100]).unwrap();
    }
    let record = reader.next().unwrap().unwrap();
    assert_eq!(reader.lost(), record.position);
    assert!(record.position > 0);
    assert_eq!(reader.dropped().unwrap() % 100, 0);
}

/// Each record is filled with one distinct byte, so that a mixture of two would show.
#[test]
fn a_reader_beside_a_fast_writer_sees_whole_records_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    let capacity = 100_003;
    let mut ring = Ring::writer(create(&path, capacity).unwrap(), capacity).unwrap();
    let mut reader = Reader::open(&path).unwrap();
    let done = AtomicBool::new(false);
    let (mut seen, mut last) = (0u64, 0u64);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=60_000u64 {
                let fill = number.to_le_bytes()[0];
                let bytes = vec![fill; usize::try_from(number * 37 % 5000).unwrap() + 1];
                ring.write(&Meta { unix_ns: number, ..META }, &bytes).unwrap();
            }
            done.store(true, Ordering::Release);
        });
        loop {
            let finished = done.load(Ordering::Acquire);
            while let Some(record) = reader.next().unwrap() {
                let number = record.meta.unix_ns;
                assert!(number > last, "{number} came after {last}");
                assert!(reader.lost() > 0 || number == last + 1);
                assert_eq!(record.bytes.len() as u64, number * 37 % 5000 + 1);
                assert!(record.bytes.iter().all(|byte| *byte == number.to_le_bytes()[0]));
                last = number;
                seen += 1;
            }
            if finished {
                break;
            }
        }
    });
    assert_eq!(last, 60_000);
    assert!(seen > 10);
}

#[test]
fn hostile_files_neither_stop_nor_bloat_a_reader() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    let mut state = 88_172_645_463_325_252_u64;
    let mut roll = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..400 {
        let capacity = 4096 + roll() % 5000;
        let mut file: Vec<u8> = (0..HEADER + capacity).map(|_| roll().to_le_bytes()[3]).collect();
        // Otherwise nothing after the header would be read.
        let end = roll() % (1 << 40);
        let start = end - end.min(roll() % (capacity + 1));
        let header = Header { turn: 2, capacity, start, end, dropped: roll() };
        for offset in SLOT_OFFSETS {
            let offset = usize::try_from(offset).unwrap();
            file[offset..offset + 64].copy_from_slice(&header.encode());
        }
        // A valid prefix that claims more than there is.
        let offset = usize::try_from(HEADER + start % capacity).unwrap();
        if round % 2 == 0 && offset + PREFIX <= file.len() {
            let length = u32::try_from(roll() % 70_000).unwrap();
            let prefix = Prefix { length, meta: META, position: start };
            file[offset..offset + PREFIX].copy_from_slice(&prefix.encode());
        }
        file.truncate(usize::try_from(HEADER + roll() % capacity).unwrap());
        fs::write(&path, &file).unwrap();
        let mut reader = Reader::open(&path).unwrap();
        let mut records = 0;
        while let Some(record) = reader.next().unwrap() {
            assert!(record.bytes.len() <= MAX_CHUNK);
            records += 1;
        }
        assert!(records <= capacity / PREFIX as u64);
        assert!(reader.position() <= end);
    }
}

#[test]
fn files_that_are_no_rings_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    for bytes in [vec![], vec![7; 100], vec![7; 10_000], b"bathring".repeat(2000)] {
        fs::write(&path, bytes).unwrap();
        assert!(matches!(Reader::open(&path), Err(ReaderError::Damaged(_))));
    }
    assert!(matches!(Reader::open(folder.path()), Err(ReaderError::NotAFile(_))));
    assert!(matches!(Reader::open(&folder.path().join("none")), Err(ReaderError::Open(..))));
}

/// Headers that go back and forth must not make a reader return a record twice.
#[test]
fn a_header_that_goes_back_does_not_take_the_reader_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    let file = create(&path, 4096).unwrap();
    let mut ring = Ring::writer(file.try_clone().unwrap(), 4096).unwrap();
    let mut page = vec![0; HEADER_SIZE];
    file.read_exact_at(&mut page, 0).unwrap();
    ring.write(&META, b"once").unwrap();
    let mut reader = Reader::open(&path).unwrap();
    assert!(reader.next().unwrap().is_some());
    file.write_all_at(&page, 0).unwrap();
    assert_eq!(reader.next().unwrap(), None);
    drop(ring);
    let mut again = Ring::writer(file, 4096).unwrap();
    again.write(&META, b"once").unwrap();
    assert_eq!(reader.next().unwrap(), None);
}
