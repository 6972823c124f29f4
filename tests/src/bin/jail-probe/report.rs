//! The probe's output: one line for each failure, and a last line with counts.

/// The numbers of attempts and failures.
pub struct Report {
    held: u32,
    failed: u32,
    every: bool,
}

impl Report {
    /// An empty report; `every` also prints the attempts that held.
    pub fn new(every: bool) -> Self {
        Self { held: 0, failed: 0, every }
    }

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

    /// Prints the last line.
    pub fn finish(&self) {
        println!("HELD {} FAILED {}", self.held, self.failed);
    }
}
