//! An entropy device that goes on in another process.

use std::time::Instant;

use super::*;

#[test]
fn a_request_that_waits_is_answered_once_after_a_move_and_not_for_free() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.exhaust();
    bench.driver.push(&[writable(DATA, 1024)]);
    assert!(bench.process().unwrap().retry_after.is_some());

    let json = serde_json::to_string(&bench.entropy.save()).unwrap();
    let state: EntropyState = serde_json::from_str(&json).unwrap();
    assert_eq!(state.tokens, 0);
    bench.entropy = Entropy::restore(state);
    bench.queue = bench.driver.restored_queue(&bench.queue);

    // The new process has a clock of its own, by which tokens come.
    let begin = Instant::now();
    while bench.driver.used_index() == 1 && begin.elapsed() < Duration::from_secs(60) {
        let outcome = bench.process().unwrap();
        std::thread::sleep(outcome.retry_after.unwrap_or_default());
    }
    assert_eq!(bench.driver.take_used(), [(1, 1024)]);
    bench.process().unwrap();
    assert_eq!(bench.driver.take_used(), []);
    assert_ne!(bench.bytes(DATA, 1024), [0; 1024]);
}
