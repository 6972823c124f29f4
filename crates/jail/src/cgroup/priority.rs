//! What is left of a CPU limit where there are no control groups: a lower priority.

use std::io;

use rustix::process::{Pid, getpriority_process, setpriority_process};

use super::{Cgroup, is_held};

/// The politest value that the scheduler knows.
const POLITEST: i32 = 19;
/// The share of a CPU, and less, for which a process is as polite as can be.
const SMALLEST_SHARE: f64 = 0.1;

/// A scheduler priority, as a substitute where no quota can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Priority {
    nice: Option<i32>,
}

impl Priority {
    /// What it takes for a quota that was asked for, besides the group.
    pub fn for_quota(group: &Cgroup, quota: Option<f64>) -> Self {
        Self { nice: quota.filter(|_| !is_held(&group.enforced().cpu)).map(nice_for) }
    }

    /// Gives a process, and all that it forks from now on, this priority, unless it has a lower one.
    pub fn apply(self, pid: u32) -> io::Result<()> {
        let Some(nice) = self.nice else { return Ok(()) };
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        if getpriority_process(Some(pid))? < nice {
            setpriority_process(Some(pid), nice)?;
        }
        Ok(())
    }

    /// By which mechanism the quota is held: the group's, or `scheduler priority (nice N): why not a group`.
    pub fn describe(self, group: &Cgroup) -> String {
        let group = &group.enforced().cpu;
        match self.nice {
            Some(nice) => {
                format!("scheduler priority (nice {nice}): {}", group.trim_start_matches("none: "))
            }
            None => group.clone(),
        }
    }
}

/// 0 for a whole CPU, 19 for a tenth.
pub(super) fn nice_for(quota: f64) -> i32 {
    let share = |nice: i32| 1.0 - (1.0 - SMALLEST_SHARE) * f64::from(nice) / f64::from(POLITEST);
    let distance = |nice: &i32| (share(*nice) - quota).abs();
    (0..=POLITEST).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0)
}
