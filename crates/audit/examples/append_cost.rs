//! Measures the cost of an append and the speed of verification: `cargo run --release -p bathy-audit
//! --example append_cost [FOLDER]`.
#![allow(clippy::unwrap_used, reason = "a panic is how a measurement reports")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bathy_audit::{Actor, Event, Log, What, event, verify};

const APPENDS: usize = 20_000;

fn main() {
    let folder = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let folder = folder.join(format!("append-cost-{}", std::process::id()));
    let log = Log::open(&folder).unwrap();
    let actor = Actor::this_process("bathy exec");
    let shown = event::argv(&["/bin/sh", "-c", "echo hello; sleep 1; exec true"]);
    let what = What::ExecStarted {
        exec: "0123456789abcdef".into(),
        argv: shown.argv,
        user: "root".into(),
        job: Some(1),
        terminal: false,
        argv_bytes: shown.bytes,
        argv_digest: shown.digest,
    };
    let mut times: Vec<Duration> = (0..APPENDS)
        .map(|_| {
            let event = Event::now(actor.clone(), what.clone()).in_sandbox("b5c0ffee", Some("web".into()));
            let began = Instant::now();
            log.append(&[event]).unwrap();
            began.elapsed()
        })
        .collect();
    times.sort_unstable();
    let at = |part: usize| times[(APPENDS - 1) * part / 1000].as_secs_f64() * 1e6;
    println!(
        "append: p50 {:.0} µs, p99 {:.0} µs, p99.9 {:.0} µs, worst {:.0} µs",
        at(500),
        at(990),
        at(999),
        at(1000)
    );
    let bytes = std::fs::metadata(folder.join("audit.jsonl")).unwrap().len();
    let began = Instant::now();
    let report = verify::verify(&folder, None).unwrap();
    let taken = began.elapsed().as_secs_f64();
    println!(
        "verify: {} lines of {} bytes each, {:.0} MB/s",
        report.lines,
        bytes / report.lines,
        bytes as f64 / taken / 1e6
    );
    std::fs::remove_dir_all(&folder).unwrap();
}
