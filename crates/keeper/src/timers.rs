//! When the loop wakes up by itself.

use std::time::Instant;

/// The deadlines of the loop. Each is removed when it is handled.
#[derive(Debug, Default)]
pub struct Timers {
    /// A device has work left, or waits for its rate limit.
    pub devices: Option<Instant>,
    /// The console may be read again.
    pub console: Option<Instant>,
    /// The guest has to be ready.
    pub ready: Option<Instant>,
    /// The log's rate limit is refilled.
    pub log: Option<Instant>,
    /// The watchdog looks again.
    pub watchdog: Option<Instant>,
    /// The disks' rate limits are lifted: a guest that shuts down has to have written its disk by a deadline.
    pub disk_limits: Option<Instant>,
}

impl Timers {
    pub fn next(&self) -> Option<Instant> {
        let all = [self.devices, self.console, self.ready, self.log, self.watchdog, self.disk_limits];
        all.into_iter().flatten().min()
    }

    /// Has the devices served at `at`, or earlier if that is due already.
    pub fn serve_devices_at(&mut self, at: Instant) {
        self.devices = Some(self.devices.map_or(at, |earlier| earlier.min(at)));
    }
}
