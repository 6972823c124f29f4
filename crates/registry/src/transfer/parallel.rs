//! Several blobs at once, each on a thread of its own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::TransferError;
use super::progress::{Event, Progress, Reporter};
use crate::cancel::Cancel;

/// The length of the queue of progress events.
const MAX_EVENTS: usize = 1024;

/// Runs `work` on another thread and reports here what happens there.
pub fn reported<T: Send>(progress: &mut dyn Progress, work: impl FnOnce(&Reporter) -> T + Send) -> T {
    let (sender, receiver): (SyncSender<Event>, _) = sync_channel(MAX_EVENTS);
    thread::scope(|scope| {
        let worker = scope.spawn(move || work(&Reporter(sender)));
        for event in receiver {
            progress.on_event(&event);
        }
        match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Calls `work` for each of the items, `parallel` of them at once. The first failure stops all.
pub fn each<I: Sync>(
    items: &[I],
    parallel: usize,
    work: impl Fn(&mut dyn Iterator<Item = &I>, &Cancel) -> Result<(), TransferError> + Sync,
) -> Result<(), TransferError> {
    let (next, stop, failure) = (AtomicUsize::new(0), Cancel::default(), Mutex::new(None));
    thread::scope(|scope| {
        for _ in 0..parallel.clamp(1, items.len().max(1)) {
            scope.spawn(|| {
                let mut taken = std::iter::from_fn(|| items.get(next.fetch_add(1, Ordering::Relaxed)));
                if let Err(error) = work(&mut taken, &stop) {
                    // The others fail because of this one.
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    stop.cancel();
                }
            });
        }
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
