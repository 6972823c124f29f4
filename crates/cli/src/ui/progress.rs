//! Progress of long steps: a live line on a terminal, plain lines elsewhere.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

use crate::ui::{table, terminal, time};

/// How often a bar is drawn.
const REDRAW: Duration = Duration::from_millis(100);
/// How many characters a bar has.
const BAR: u64 = 24;

/// Shows steps on standard error.
pub struct Progress {
    started: Instant,
    live: bool,
    shown: bool,
}

impl Progress {
    /// Nothing is shown until the first step.
    pub fn new() -> Self {
        Self { started: Instant::now(), live: stderr().is_terminal(), shown: false }
    }

    pub fn step(&mut self, text: &str) {
        let seconds = self.started.elapsed().as_secs();
        let text = crate::ui::escape::text(text);
        // Failures to show progress are ignored.
        let _ = if self.live {
            write!(stderr(), "\r\x1b[K[{seconds:>4} s] {text}").and_then(|()| stderr().flush())
        } else {
            writeln!(stderr(), "[{seconds:>4} s] {text}")
        };
        self.shown = true;
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.live && self.shown {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

/// A progress bar for copies, on a terminal only.
pub struct Bar {
    started: Instant,
    drawn: Option<Instant>,
    visible: bool,
}

impl Bar {
    /// A bar that appears with the first bytes, unless `quiet`.
    pub fn new(quiet: bool) -> Self {
        Self { started: Instant::now(), drawn: None, visible: !quiet && stderr().is_terminal() }
    }

    /// Shows that `done` bytes are copied, of `total` if that is known.
    pub fn show(&mut self, done: u64, total: Option<u64>) {
        if !self.visible || self.drawn.is_some_and(|drawn| drawn.elapsed() < REDRAW) {
            return;
        }
        self.drawn = Some(Instant::now());
        // The last column stays free: a terminal may begin a new line after it.
        let room = usize::from(terminal::size().columns).saturating_sub(1);
        let line = table::cut(&bar(done, total, self.started.elapsed()), room);
        let _ = write!(stderr(), "\r\x1b[K{line}").and_then(|()| stderr().flush());
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if self.drawn.is_some() {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

/// The text of a bar.
fn bar(done: u64, total: Option<u64>, elapsed: Duration) -> String {
    let per_second = rate(done, elapsed);
    let speed = format!("{}/s", table::bytes(per_second));
    let Some(total) = total.filter(|total| *total >= done && *total > 0) else {
        return format!("{}  {speed}  {}", table::bytes(done), time::length(elapsed));
    };
    let part = |of: u64| u64::try_from(u128::from(done) * u128::from(of) / u128::from(total)).unwrap_or(of);
    let filled = usize::try_from(part(BAR)).unwrap_or_default();
    let empty = usize::try_from(BAR).unwrap_or_default().saturating_sub(filled);
    let left = (total - done)
        .checked_div(per_second)
        .map_or_else(String::new, |seconds| format!("  {} left", time::length(Duration::from_secs(seconds))));
    format!(
        "[{}{}] {:>3} %  {} of {}  {speed}{left}",
        "#".repeat(filled),
        ".".repeat(empty),
        part(100),
        table::bytes(done),
        table::bytes(total)
    )
}

pub fn rate(bytes: u64, elapsed: Duration) -> u64 {
    let ms = elapsed.as_millis().max(1);
    u64::try_from(u128::from(bytes) * 1000 / ms).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_tells_how_much_how_fast_and_how_long() {
        assert_eq!(
            bar(512 << 20, Some(1 << 30), Duration::from_secs(4)),
            "[############............]  50 %  512.0 MiB of 1.0 GiB  128.0 MiB/s  4s left"
        );
        assert_eq!(
            bar(1 << 20, Some(1 << 20), Duration::from_secs(1)),
            "[########################] 100 %  1.0 MiB of 1.0 MiB  1.0 MiB/s  0s left"
        );
        assert_eq!(bar(0, Some(10), Duration::ZERO), "[........................]   0 %  0 B of 10 B  0 B/s");
    }

    #[test]
    fn without_a_total_there_is_no_bar() {
        assert_eq!(bar(1 << 20, None, Duration::from_secs(2)), "1.0 MiB  512.0 KiB/s  2s");
        // A source that grew in the meantime.
        assert_eq!(bar(11, Some(10), Duration::from_secs(1)), "11 B  11 B/s  1s");
        assert_eq!(bar(0, Some(0), Duration::from_secs(1)), "0 B  0 B/s  1s");
    }
}
