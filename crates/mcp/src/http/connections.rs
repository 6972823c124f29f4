//! Slots for connections. One that has not shown the token is evicted for a new one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// All connections, in the order of their arrival.
#[derive(Debug)]
pub struct Connections {
    most: usize,
    held: Mutex<Held>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Held {
    next: u64,
    open: BTreeMap<u64, One>,
}

#[derive(Debug, Default)]
struct One {
    authenticated: bool,
    evicted: bool,
    leave: Arc<Notify>,
}

/// The slot of one connection, which is free when this is dropped.
#[derive(Debug)]
pub struct Slot {
    all: Arc<Connections>,
    number: u64,
    leave: Arc<Notify>,
}

impl Connections {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, held: Mutex::default(), freed: Notify::new() })
    }

    /// Waits for a slot. If there is none, the oldest connection without the token is told to close; if all have shown
    /// it, one has to close by itself.
    pub async fn slot(self: &Arc<Self>) -> Slot {
        loop {
            if let Some(slot) = self.try_slot() {
                return slot;
            }
            // One permit is kept, so that a slot that becomes free just now is not missed.
            self.freed.notified().await;
        }
    }

    fn try_slot(self: &Arc<Self>) -> Option<Slot> {
        let mut held = self.lock();
        if held.open.len() >= self.most {
            // One eviction at a time: the connection takes a moment to close.
            if !held.open.values().any(|one| one.evicted)
                && let Some(oldest) = held.open.values_mut().find(|one| !one.authenticated)
            {
                oldest.evicted = true;
                oldest.leave.notify_one();
            }
            return None;
        }
        let number = held.next;
        held.next += 1;
        let one = One::default();
        let leave = Arc::clone(&one.leave);
        held.open.insert(number, one);
        Some(Slot { all: Arc::clone(self), number, leave })
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Marks the connection as authenticated: it is not evicted any more.
    pub fn authenticated(&self) {
        let mut held = self.all.lock();
        if let Some(one) = held.open.get_mut(&self.number) {
            one.authenticated = true;
            // It stays, so a waiting connection has to evict another one.
            if std::mem::take(&mut one.evicted) {
                self.all.freed.notify_one();
            }
        }
    }

    /// Whether it has shown the token.
    pub fn is_authenticated(&self) -> bool {
        self.all.lock().open.get(&self.number).is_some_and(|one| one.authenticated)
    }

    /// Waits until the slot is needed for another connection.
    pub async fn evicted(&self) {
        self.leave.notified().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.all.lock().open.remove(&self.number);
        self.all.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn the_oldest_unauthenticated_connection_is_evicted() {
        let all = Connections::new(3);
        let (first, second, third) = (all.slot().await, all.slot().await, all.slot().await);
        first.authenticated();
        assert!(all.try_slot().is_none());
        let soon = |slot: &Slot| {
            let leave = Arc::clone(&slot.leave);
            async move { tokio::time::timeout(Duration::from_millis(20), leave.notified()).await.is_ok() }
        };
        assert!(soon(&second).await && !soon(&first).await && !soon(&third).await);
        drop(second);
        let fourth = all.slot().await;
        fourth.authenticated();
        third.authenticated();
        // None is evicted when all are authenticated, and the next one waits for a slot.
        assert!(tokio::time::timeout(Duration::from_millis(20), all.slot()).await.is_err());
        assert!(!soon(&first).await && !soon(&third).await && !soon(&fourth).await);
        drop(third);
        let fifth = all.slot().await;
        // One that shows the token while it is being evicted stays, and another one can be evicted.
        assert!(all.try_slot().is_none() && soon(&fifth).await);
        fifth.authenticated();
        drop(fourth);
        let sixth = all.slot().await;
        assert!(all.try_slot().is_none() && soon(&sixth).await && !soon(&fifth).await);
        drop(sixth);
        assert!(tokio::time::timeout(Duration::from_secs(5), all.slot()).await.is_ok());
    }
}
