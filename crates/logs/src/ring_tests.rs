use std::cell::RefCell;
use std::fs;
use std::rc::Rc;

use super::*;
use crate::{LogRecord, Reader, create};

/// The offset and content of a write.
type Call = (u64, Vec<u8>);

/// A file in memory that records all writes.
#[derive(Clone, Default)]
struct RecordingFile {
    bytes: Vec<u8>,
    writes: Rc<RefCell<Vec<Call>>>,
}

impl RecordingFile {
    fn apply(file: &mut [u8], offset: u64, bytes: &[u8]) {
        let offset = usize::try_from(offset).unwrap();
        file[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

impl Store for RecordingFile {
    fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let offset = usize::try_from(offset).unwrap();
        bytes.copy_from_slice(&self.bytes[offset..offset + bytes.len()]);
        Ok(())
    }

    fn write(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        Self::apply(&mut self.bytes, offset, bytes);
        self.writes.borrow_mut().push((offset, bytes.to_vec()));
        Ok(())
    }
}

/// A pseudo-random number generator with a fixed seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }

    fn bytes(&mut self, at_most: u64) -> Vec<u8> {
        let length = self.roll(at_most + 1);
        (0..length).map(|_| u8::try_from(self.roll(256)).unwrap()).collect()
    }
}

fn meta(number: u64) -> Meta {
    Meta { unix_ns: number, source: u32::try_from(number % 7).unwrap(), channel: crate::STDERR }
}

fn read(path: &std::path::Path) -> Vec<LogRecord> {
    let mut reader = Reader::open(path).unwrap();
    let records: Vec<_> = std::iter::from_fn(|| reader.next().unwrap()).collect();
    assert_eq!(reader.lost(), 0);
    records
}

#[test]
fn random_writes_leave_the_newest_of_them_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    for capacity in [4096, 5000, 65_536] {
        for seed in 1..20 {
            let mut dice = Dice(seed * 0x9e37_79b9);
            let _ = fs::remove_file(&path);
            let mut ring = Ring::writer(create(&path, capacity).unwrap(), capacity).unwrap();
            let mut model = vec![];
            let mut total = 0;
            for number in 0..dice.roll(400) {
                let bytes = dice.bytes(if number % 9 == 0 { capacity / 4 } else { 120 });
                ring.write(&meta(number), &bytes).unwrap();
                if dice.roll(10) == 0 {
                    ring = Ring::writer(create(&path, capacity).unwrap(), capacity).unwrap();
                }
                total += bytes.len() as u64;
                // An empty write makes no record.
                if !bytes.is_empty() {
                    model.push((meta(number), bytes));
                }
            }
            let records = read(&path);
            let found: u64 = records.iter().map(|record| record.bytes.len() as u64).sum();
            assert_eq!(total - found, ring.dropped());
            let first = model.len() - records.len();
            for (record, (meta, bytes)) in records.iter().zip(&model[first..]) {
                assert_eq!((&record.meta, &record.bytes), (meta, bytes));
            }
            let used: u64 = records.iter().map(|record| record.next_position - record.position).sum();
            assert!(
                first == 0 || used >= capacity / 2,
                "{used} of {capacity} used though {first} are removed"
            );
            assert_eq!(fs::metadata(&path).unwrap().len(), HEADER + capacity);
        }
    }
}

#[test]
fn long_output_is_split_and_comes_back_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    let mut ring = Ring::writer(create(&path, 1 << 20).unwrap(), 1 << 20).unwrap();
    let bytes = (0..300_000u32).map(|n| n.to_le_bytes()[1]).collect::<Vec<_>>();
    ring.write(&meta(1), &bytes).unwrap();
    let records = read(&path);
    assert!(records.len() > 1);
    assert_eq!(records.into_iter().flat_map(|record| record.bytes).collect::<Vec<_>>(), bytes);
}

/// Kills the writer in the middle of every write, and lets a reader and another writer continue from there.
#[test]
fn a_writer_killed_anywhere_leaves_whole_records() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    let capacity = 4096;
    let empty = vec![0; usize::try_from(HEADER + capacity).unwrap()];
    let tape = RecordingFile { bytes: empty.clone(), ..RecordingFile::default() };
    let writes = tape.writes.clone();
    let mut dice = Dice(77);
    let mut ring = Writer::new(tape, capacity).unwrap();
    let mut model = vec![];
    // How many records were written before each write.
    let mut progress = vec![0; writes.borrow().len()];
    for number in 0..120 {
        let bytes = [vec![b'x'], dice.bytes(200)].concat();
        ring.write(&meta(number), &bytes).unwrap();
        progress.resize(writes.borrow().len(), model.len());
        model.push((meta(number), bytes));
    }
    let mut file = empty;
    for ((offset, bytes), done) in writes.borrow().iter().zip(progress) {
        for part in [0, 1, 9, bytes.len() / 2, bytes.len() - 1, bytes.len()] {
            let mut killed = file.clone();
            RecordingFile::apply(&mut killed, *offset, &bytes[..part.min(bytes.len())]);
            fs::write(&path, &killed).unwrap();
            let Ok(mut reader) = Reader::open(&path) else {
                assert_eq!(done, 0, "only an unfinished ring is invalid");
                continue;
            };
            let records: Vec<_> = std::iter::from_fn(|| reader.next().unwrap()).collect();
            assert_eq!(reader.lost(), 0);
            let newest = records.last().map_or(0, |record| record.meta.unix_ns + 1);
            let newest = usize::try_from(newest).unwrap();
            assert!(newest == done || newest == done + 1, "{newest} records, {done} were written");
            for (record, (meta, bytes)) in records.iter().zip(&model[newest - records.len()..]) {
                assert_eq!((&record.meta, &record.bytes), (meta, bytes));
            }
            let mut next = Ring::writer(create(&path, capacity).unwrap(), capacity).unwrap();
            next.write(&meta(9999), b"after").unwrap();
            assert_eq!(read(&path).last().unwrap().bytes, b"after");
        }
        RecordingFile::apply(&mut file, *offset, bytes);
    }
}

#[test]
fn a_damaged_ring_starts_empty() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    fs::write(&path, vec![0xa5; 20_000]).unwrap();
    let mut ring = Ring::writer(create(&path, 8192).unwrap(), 8192).unwrap();
    ring.write(&meta(1), b"hello").unwrap();
    assert_eq!(read(&path).iter().map(|record| record.bytes.clone()).collect::<Vec<_>>(), [b"hello"]);
    let mut other = Ring::writer(create(&path, 4096).unwrap(), 4096).unwrap();
    other.write(&meta(1), b"smaller").unwrap();
    assert_eq!(read(&path).len(), 1);
}

#[test]
fn damaged_data_is_given_up_when_space_is_needed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    let file = create(&path, 4096).unwrap();
    let mut ring = Ring::writer(file.try_clone().unwrap(), 4096).unwrap();
    for number in 0..20 {
        ring.write(&meta(number), &[b'x'; 100]).unwrap();
    }
    file.write_all_at(&[0xff; 4096], HEADER).unwrap();
    for number in 20..40 {
        ring.write(&meta(number), &[b'y'; 100]).unwrap();
    }
    let records = read(&path);
    assert!(!records.is_empty() && records.iter().all(|record| record.bytes == [b'y'; 100]));
}

#[test]
fn a_full_disk_drops_output_and_harms_nothing() {
    struct Full(RecordingFile, bool);
    impl Store for Full {
        fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
            self.0.read(bytes, offset)
        }
        fn write(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
            if self.1 {
                // The disk accepts a part of the last write.
                self.0.write(&bytes[..bytes.len() / 2], offset)?;
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.0.write(bytes, offset)
        }
    }
    let tape = RecordingFile { bytes: vec![0; 8192], ..RecordingFile::default() };
    let mut ring = Writer::new(Full(tape, false), 4096).unwrap();
    ring.write(&meta(1), b"one").unwrap();
    ring.store.1 = true;
    assert!(matches!(ring.write(&meta(2), b"lost"), Err(RingError::Full(_))));
    ring.store.1 = false;
    ring.write(&meta(3), b"three").unwrap();
    assert_eq!(ring.header.dropped, 4);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    fs::write(&path, &ring.store.0.bytes).unwrap();
    let found: Vec<_> = read(&path).into_iter().map(|record| record.bytes).collect();
    assert_eq!(found, [b"one".to_vec(), b"three".to_vec()]);
}
