//! All TCP connections, by four-tuple and by number, with their timers and the queue of turns.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Instant;

use crate::connection::Connection;
use crate::stack::FourTuple;

/// The buffer size of the first connections, each way.
const PLENTY: usize = 512 * 1024;

#[derive(Debug)]
struct Entry {
    connection: Connection,
    timer: Option<Instant>,
    is_queued: bool,
}

#[derive(Debug, Default)]
pub struct Table {
    by_number: BTreeMap<u64, Entry>,
    by_tuple: HashMap<FourTuple, u64>,
    timers: BTreeSet<(Instant, u64)>,
    queue: VecDeque<u64>,
    last: u64,
}

impl Table {
    pub fn count(&self) -> usize {
        self.by_number.len()
    }

    /// The buffer size of the next connection, each way. `others` are sockets that count as connections too. The
    /// first connections have large buffers; the sum is bounded for any number.
    pub fn buffer_size(&self, others: usize) -> usize {
        match self.count().saturating_add(others) {
            0..32 => PLENTY,
            32..256 => 64 * 1024,
            _ => 16 * 1024,
        }
    }

    /// The size of the kernel's send buffer for the next connection; none leaves it to the kernel.
    pub fn send_buffer(&self, others: usize) -> Option<usize> {
        Some(self.buffer_size(others)).filter(|buffer_size| *buffer_size < PLENTY)
    }

    pub fn find(&self, tuple: FourTuple) -> Option<u64> {
        self.by_tuple.get(&tuple).copied()
    }

    pub fn contains(&self, tuple: FourTuple) -> bool {
        self.by_tuple.contains_key(&tuple)
    }

    /// Adds a connection and queues it for a turn.
    pub fn add(&mut self, connection: Connection) -> u64 {
        self.last += 1;
        self.by_tuple.insert(connection.tuple, self.last);
        self.by_number.insert(self.last, Entry { connection, timer: None, is_queued: false });
        self.queue(self.last);
        self.last
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut Connection> {
        self.by_number.get_mut(&number).map(|entry| &mut entry.connection)
    }

    pub fn all(&self) -> impl Iterator<Item = (u64, &Connection)> {
        self.by_number.iter().map(|(number, entry)| (*number, &entry.connection))
    }

    pub fn all_mut(&mut self) -> impl Iterator<Item = (u64, &mut Connection)> {
        self.by_number.iter_mut().map(|(number, entry)| (*number, &mut entry.connection))
    }

    pub fn remove(&mut self, number: u64) -> Option<Connection> {
        let Entry { connection, timer, is_queued: _ } = self.by_number.remove(&number)?;
        self.by_tuple.remove(&connection.tuple);
        if let Some(timer) = timer {
            self.timers.remove(&(timer, number));
        }
        Some(connection)
    }

    /// Queues a connection for a turn, once.
    pub fn queue(&mut self, number: u64) {
        if let Some(entry) = self.by_number.get_mut(&number)
            && !entry.is_queued
        {
            entry.is_queued = true;
            self.queue.push_back(number);
        }
    }

    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    pub fn next_queued(&mut self) -> Option<u64> {
        while let Some(number) = self.queue.pop_front() {
            if let Some(entry) = self.by_number.get_mut(&number) {
                entry.is_queued = false;
                return Some(number);
            }
        }
        None
    }

    /// Sets the timer of a connection to when it needs its next turn.
    pub fn set_timer(&mut self, number: u64, now: Instant) {
        let Some(entry) = self.by_number.get_mut(&number) else { return };
        let due = entry.connection.due(now);
        if due != entry.timer {
            if let Some(old) = entry.timer {
                self.timers.remove(&(old, number));
            }
            if let Some(due) = due {
                self.timers.insert((due, number));
            }
            entry.timer = due;
        }
    }

    pub fn due(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Queues the connections whose timers have expired.
    pub fn fire_timers(&mut self, now: Instant) {
        while let Some((at, number)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, number));
            if let Some(entry) = self.by_number.get_mut(&number) {
                entry.timer = None;
            }
            self.queue(number);
        }
    }
}
