//! What the probe says: one line for each failure, and a last line that counts.

/// Counts what held.
pub struct Report {
    held: u32,
    failed: u32,
    every: bool,
}

impl Report {
    /// Starts counting; `every` also tells what held.
    pub fn new(every: bool) -> Self {
        Self { held: 0, failed: 0, every }
    }

    /// Adds an attempt.
    pub fn add(&mut self, held: bool, name: &str, detail: impl FnOnce() -> String) {
        if held {
            self.held += 1;
            if self.every {
                println!("held {name}");
            }
        } else {
            self.failed += 1;
            println!("LEAK {name}: {}", detail());
        }
    }

    /// The last line.
    pub fn finish(&self) {
        println!("HELD {} FAILED {}", self.held, self.failed);
    }
}
