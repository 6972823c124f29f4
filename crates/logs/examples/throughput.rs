//! Measures how fast a ring is written and read: `cargo run --release -p bathy-logs --example throughput
//! [FOLDER]`.
#![allow(clippy::unwrap_used, reason = "a panic is how a measurement reports")]

use std::path::PathBuf;
use std::time::Instant;

use bathy_logs::{Meta, Reader, Ring, STDOUT, create};

const CAPACITY: u64 = 16 << 20;

fn main() {
    let folder = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let path = folder.join(format!("ring-throughput-{}", std::process::id()));
    let meta = Meta { unix_ns: 1, source: 0, channel: STDOUT };
    for (size, total) in [(32 * 1024, 4 << 30), (4096, 1 << 30), (100, 100 << 20)] {
        let mut ring = Ring::writer(create(&path, CAPACITY).unwrap(), CAPACITY).unwrap();
        let bytes = vec![b'x'; size];
        let began = Instant::now();
        for _ in 0..total / size {
            ring.write(&meta, &bytes).unwrap();
        }
        let taken = began.elapsed();
        let mut reader = Reader::open(&path).unwrap();
        let began = Instant::now();
        let mut read = 0;
        while let Some(record) = reader.next().unwrap() {
            read += record.bytes.len();
        }
        let rate = |bytes: usize, seconds: f64| bytes as f64 / seconds / 1e6;
        println!(
            "records of {size:>5} bytes: written at {:>6.0} MB/s ({:.2} µs each), read at {:>6.0} MB/s",
            rate(total, taken.as_secs_f64()),
            taken.as_secs_f64() * 1e6 / (total / size) as f64,
            rate(read, began.elapsed().as_secs_f64()),
        );
        std::fs::remove_file(&path).unwrap();
    }
}
