//! Who holds a connection: strangers give way to whoever has shown the token.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// All connections, in the order in which they came.
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
    known: bool,
    leaving: bool,
    leave: Arc<Notify>,
}

/// One connection's place, until it is dropped.
#[derive(Debug)]
pub struct Place {
    all: Arc<Connections>,
    number: u64,
    leave: Arc<Notify>,
}

impl Connections {
    /// Room for this many.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, held: Mutex::default(), freed: Notify::new() })
    }

    /// A place. If there is none, the stranger who came first is asked to leave; if there is no stranger, somebody has
    /// to leave of their own accord.
    pub async fn place(self: &Arc<Self>) -> Place {
        loop {
            if let Some(place) = self.try_place() {
                return place;
            }
            // One permit is kept, so that a place that is freed just now is not missed.
            self.freed.notified().await;
        }
    }

    fn try_place(self: &Arc<Self>) -> Option<Place> {
        let mut held = self.lock();
        if held.open.len() >= self.most {
            // One leaves for one that comes, and it takes a moment.
            if !held.open.values().any(|one| one.leaving)
                && let Some(stranger) = held.open.values_mut().find(|one| !one.known)
            {
                stranger.leaving = true;
                stranger.leave.notify_one();
            }
            return None;
        }
        let number = held.next;
        held.next += 1;
        let one = One::default();
        let leave = Arc::clone(&one.leave);
        held.open.insert(number, one);
        Some(Place { all: Arc::clone(self), number, leave })
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// It has shown the token.
    pub fn known(&self) {
        let mut held = self.all.lock();
        if let Some(one) = held.open.get_mut(&self.number) {
            one.known = true;
            // It stays, so whoever waits for its place has to ask another one.
            if std::mem::take(&mut one.leaving) {
                self.all.freed.notify_one();
            }
        }
    }

    /// Whether it has shown the token.
    pub fn is_known(&self) -> bool {
        self.all.lock().open.get(&self.number).is_some_and(|one| one.known)
    }

    /// Waits until somebody else needs the place.
    pub async fn wanted(&self) {
        self.leave.notified().await;
    }
}

impl Drop for Place {
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
    async fn the_oldest_stranger_leaves_and_known_ones_stay() {
        let all = Connections::new(3);
        let (first, second, third) = (all.place().await, all.place().await, all.place().await);
        first.known();
        assert!(all.try_place().is_none());
        let soon = |place: &Place| {
            let leave = Arc::clone(&place.leave);
            async move { tokio::time::timeout(Duration::from_millis(20), leave.notified()).await.is_ok() }
        };
        assert!(soon(&second).await && !soon(&first).await && !soon(&third).await);
        drop(second);
        let fourth = all.place().await;
        fourth.known();
        third.known();
        // Nobody is asked when everybody is known, and the next one waits for a place.
        assert!(tokio::time::timeout(Duration::from_millis(20), all.place()).await.is_err());
        assert!(!soon(&first).await && !soon(&third).await && !soon(&fourth).await);
        drop(third);
        let fifth = all.place().await;
        // One that shows the token while it is asked to leave stays, and another one can be asked.
        assert!(all.try_place().is_none() && soon(&fifth).await);
        fifth.known();
        drop(fourth);
        let sixth = all.place().await;
        assert!(all.try_place().is_none() && soon(&sixth).await && !soon(&fifth).await);
        drop(sixth);
        assert!(tokio::time::timeout(Duration::from_secs(5), all.place()).await.is_ok());
    }
}
