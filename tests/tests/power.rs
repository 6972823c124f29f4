//! Power cuts at random moments: what the product had reported as done is there afterwards, and everything works.
//! `tests/power/README.md` explains how it works. `BATHY_POWER_CUTS` is how many cuts, `BATHY_POWER_SEED` the seed,
//! `BATHY_POWER_FS` the file system; with `BATHY_POWER_SURVEY=1` all rounds are run, whatever fails, and each failure is counted.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use bathy_tests::power::check::{Checked, check};
use bathy_tests::power::journal::Journal;
use bathy_tests::power::workload::Worker;
use bathy_tests::power::{Bed, Cut, FileSystem, Machine, copy};
use bathy_tests::random::{Random, seed_of};
use bathy_tests::{pace, repository};
use rustix::process::geteuid;

const SERVER: &str = env!("CARGO_BIN_EXE_power-disk");
/// Large enough for the disks of all sandboxes, and some copies.
const DISK_MEGABYTES: u64 = 1024;
/// Rounds of `./test`.
const CUTS: u64 = 6;
const WORKERS: [&str; 3] = ["a", "b", "c"];
/// The power is cut so many milliseconds after the work began.
const EARLIEST: u64 = 150;
const LATEST: u64 = 3500;
/// And then at the latest, if there are no more writes.
const FAILS_WITHIN: Duration = Duration::from_millis(200);

/// How a round ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The power is cut.
    Cut,
    /// All processes are killed, and the disk keeps what they wrote: shows that the checks find nothing that is not there.
    Kill,
}

/// All rounds of one test.
struct Trial {
    end: End,
    seed: u64,
    random: Random,
    bed: Bed,
    journal: Journal,
    /// What the last cut left.
    image: PathBuf,
    is_survey: bool,
    summary: Summary,
}

#[derive(Default)]
struct Summary {
    cuts: u64,
    failed_rounds: u64,
    unflushed: u64,
    damaged: u64,
    kib: u64,
    done: u64,
    checked: Checked,
    problems: BTreeMap<String, u64>,
    modes: BTreeMap<String, u64>,
    check_time: Duration,
    work_time: Duration,
}

impl Trial {
    fn new(end: End) -> Self {
        let seed = seed_of("BATHY_POWER_SEED");
        println!("BATHY_POWER_SEED={seed}");
        let bed = Bed::new(SERVER, FileSystem::wanted());
        let image = bed.format(DISK_MEGABYTES);
        let journal = Journal::new(&bed.path().join("journal.jsonl"));
        let is_survey = std::env::var_os("BATHY_POWER_SURVEY").is_some();
        Self {
            end,
            seed,
            random: Random::new(seed),
            bed,
            journal,
            image,
            is_survey,
            summary: Summary::default(),
        }
    }

    /// Checks what the last cut left, works, and cuts the power. Without work it is the last check.
    fn round(&mut self, number: u64, works: bool) {
        let options = self.random.pick(FileSystem::wanted().options());
        let began = Instant::now();
        let machine = self.bed.boot(&self.image, options);
        let (checked, mut problems) = check(machine.shell(), &self.journal, &mut self.random);
        self.summary.checked.add(checked);
        self.summary.check_time += began.elapsed();
        if !problems.is_empty() {
            machine.off();
            return self.report(number, &problems);
        }
        if !works {
            return machine.off();
        }
        let began = Instant::now();
        let next = self.bed.path().join(format!("cut-{}.img", number % 2));
        let cut = self.work_until_cut(machine, &next);
        self.summary.work_time += began.elapsed();
        println!("round {number}: {checked}; {options}; {cut}");
        self.summary.add(&cut);
        problems = self.journal.open();
        self.image = next;
        if !problems.is_empty() {
            self.report(number, &problems);
        }
    }

    fn work_until_cut(&mut self, mut machine: Machine, image: &Path) -> Cut {
        let moment = Duration::from_millis(EARLIEST + self.random.below(LATEST - EARLIEST));
        let (seed, noise) = (self.random.number(), self.random.number());
        // Now, or after some more writes, so that the disk has something to lose.
        let writes = if self.random.chance(1, 4) { 0 } else { 1 + self.random.below(40) };
        let shell = machine.shell().clone();
        let worker = |prefix: &&str| Worker {
            shell: shell.clone(),
            journal: &self.journal,
            folder: self.bed.path(),
            prefix: (*prefix).to_owned(),
            random: Random::new(seed ^ u64::from(prefix.as_bytes()[0])),
        };
        let state = shell.state();
        let mut writeback = shell.command(SERVER);
        writeback.args(["writeback", &noise.to_string()]).arg(state);
        let mut writeback = writeback.spawn().expect("power-disk is built");
        let cut = scope(|scope| {
            for worker in WORKERS.iter().map(worker) {
                scope.spawn(|| worker.run());
            }
            sleep(pace(moment));
            self.journal.close();
            if self.end == End::Kill {
                machine.off();
                return Cut::default();
            }
            machine.fail_after(writes, pace(FAILS_WITHIN));
            let cut = machine.cut(seed, image);
            machine.off();
            cut
        });
        if self.end == End::Kill {
            copy(&self.bed.disk(), image);
        }
        writeback.wait().expect("it ended with the machine");
        cut
    }

    /// Keeps what is needed to see what happened, and fails; in a survey it goes on with a new disk.
    fn report(&mut self, number: u64, problems: &[String]) {
        let kept = repository().join(format!("target/power/{}-{number}", self.seed));
        fs::create_dir_all(&kept).expect("the target folder can be written");
        copy(&self.bed.path().join("journal.jsonl"), &kept.join("journal.jsonl"));
        if !self.is_survey {
            copy(&self.image, &kept.join("cut.img"));
        }
        let text = format!("BATHY_POWER_SEED={}, round {number}:\n{}\n", self.seed, problems.join("\n"));
        fs::write(kept.join("problems.txt"), &text).expect("the target folder can be written");
        print!("{text}");
        assert!(self.is_survey, "{} has the image of the cut and the journal. {text}", kept.display());
        self.summary.failed_rounds += 1;
        self.summary.done += self.journal.facts().done;
        for problem in problems {
            let kind = problem.split(": ").next().unwrap_or_default().to_owned();
            *self.summary.problems.entry(kind).or_default() += 1;
        }
        self.image = self.bed.format(DISK_MEGABYTES);
        self.journal = Journal::new(&self.bed.path().join("journal.jsonl"));
    }
}

impl Summary {
    fn add(&mut self, cut: &Cut) {
        self.cuts += 1;
        self.unflushed += cut.writes;
        self.damaged += cut.damaged;
        self.kib += cut.sectors / 2;
        if !cut.mode.is_empty() {
            *self.modes.entry(cut.mode.clone()).or_default() += 1;
        }
    }

    fn print(&self, began: Instant) {
        println!(
            "{} rounds in {:.0?} (checks {:.0?}, work {:.0?}), {} commands were reported as done",
            self.cuts,
            began.elapsed(),
            self.check_time,
            self.work_time,
            self.done
        );
        println!(
            "of {} unflushed writes {} were lost or torn ({} KiB); {:?}",
            self.unflushed, self.damaged, self.kib, self.modes
        );
        println!("checked: {}", self.checked);
        if !self.problems.is_empty() {
            println!("{} rounds failed: {:?}", self.failed_rounds, self.problems);
        }
    }
}

fn cuts() -> u64 {
    std::env::var("BATHY_POWER_CUTS").map_or(CUTS, |text| text.parse().expect("BATHY_POWER_CUTS is a number"))
}

fn run(end: End, rounds: u64) {
    assert!(geteuid().is_root(), "only root may mount a disk: run this test as root");
    let began = Instant::now();
    let mut trial = Trial::new(end);
    for number in 0..=rounds {
        trial.round(number, number < rounds);
    }
    trial.summary.done += trial.journal.facts().done;
    trial.summary.print(began);
    assert!(trial.summary.failed_rounds == 0, "{:?}", trial.summary.problems);
}

#[test]
fn what_was_reported_as_done_survives_power_cuts() {
    run(End::Cut, cuts());
}

#[test]
fn what_was_reported_as_done_survives_when_everything_is_killed() {
    // Fewer: a power cut kills everything as well.
    run(End::Kill, cuts() / 3);
}
