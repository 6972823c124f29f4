//! Jobs: commands that outlive the client that started them. The main command is job 0; the others count from
//! 1, and numbers are not reused within a sandbox.

use bathy_protocol::{time, unix_ns};
use serde::Serialize;
use serde_json::Value;

use super::record::{signed, unsigned};
use super::{Changing, Store, StoreError};

/// How many ended jobs of a sandbox are stored.
const REMEMBERED: u32 = 1000;
/// The most bytes of a command line that are stored, for display.
const SHOWN_BYTES: usize = 4096;

/// The record of a job. Times are nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Job {
    /// The job's number in its sandbox.
    pub number: u32,
    /// The command line, escaped for a terminal and possibly cut.
    pub argv: Vec<String>,
    pub user: Option<String>,
    #[serde(rename = "started_at", serialize_with = "time::serialize")]
    pub started_ns: u64,
    #[serde(rename = "ended_at", serialize_with = "time::serialize_option")]
    pub ended_ns: Option<u64>,
    pub exit: Option<String>,
    /// The command's id in the audit log.
    pub exec_id: String,
}

impl Store {
    /// Inserts a new job and returns its number.
    pub(crate) fn next_job(
        &mut self,
        sandbox: &str,
        argv: &[Vec<u8>],
        user: Option<&str>,
        exec_id: &str,
    ) -> Result<u32, StoreError> {
        let change = self.change()?;
        let last = "SELECT coalesce(max(number), 0) FROM jobs WHERE sandbox = ?";
        let number = change.number(last, [sandbox])?.saturating_add(1);
        let forgotten = number.saturating_sub(REMEMBERED);
        if forgotten > 0 {
            let forget =
                "DELETE FROM jobs WHERE sandbox = ? AND number BETWEEN 1 AND ? AND ended_ns IS NOT NULL";
            change.run(forget, (sandbox, forgotten))?;
        }
        insert(&change, sandbox, number, &NewJob { argv, user, exec_id })?;
        change.finish()?;
        Ok(number)
    }

    /// Inserts the main command as job 0 and replaces that of an earlier start.
    pub(crate) fn main_job(
        &mut self,
        sandbox: &str,
        argv: &[Vec<u8>],
        user: Option<&str>,
        exec_id: &str,
    ) -> Result<(), StoreError> {
        let change = self.change()?;
        change.run("DELETE FROM jobs WHERE sandbox = ? AND number = 0", [sandbox])?;
        insert(&change, sandbox, 0, &NewJob { argv, user, exec_id })?;
        change.finish()
    }

    /// Records how a job ended. False if that was recorded before or there is no such job.
    pub(crate) fn end_job(&mut self, sandbox: &str, number: u32, exit: &str) -> Result<bool, StoreError> {
        let change = self.change()?;
        let end =
            "UPDATE jobs SET ended_ns = ?, exit = ? WHERE sandbox = ? AND number = ? AND ended_ns IS NULL";
        let ended = change.run(end, (signed(unix_ns()), exit, sandbox, number))?;
        change.finish()?;
        Ok(ended > 0)
    }

    /// Records this end for every job of a sandbox that is still open.
    pub(crate) fn end_all_jobs(&mut self, sandbox: &str, exit: &str) -> Result<usize, StoreError> {
        let change = self.change()?;
        let end = "UPDATE jobs SET ended_ns = ?, exit = ? WHERE sandbox = ? AND ended_ns IS NULL";
        let ended = change.run(end, (signed(unix_ns()), exit, sandbox))?;
        change.finish()?;
        Ok(ended)
    }

    /// The jobs of a sandbox, by number.
    pub fn jobs(&self, sandbox: &str) -> Result<Vec<Job>, StoreError> {
        let query =
            "SELECT number, argv, user, started_ns, ended_ns, exit, exec_id FROM jobs WHERE sandbox = ?
            ORDER BY number";
        let rows = self.query(query, [sandbox], |row| {
            let job = Job {
                number: row.get(0)?,
                argv: Vec::new(),
                user: row.get(2)?,
                started_ns: unsigned(row.get(3)?),
                ended_ns: row.get::<_, Option<i64>>(4)?.map(unsigned),
                exit: row.get(5)?,
                exec_id: row.get(6)?,
            };
            Ok((job, row.get::<_, String>(1)?))
        })?;
        let parse = |(job, argv): (Job, String)| {
            let argv = serde_json::from_str(&argv).map_err(|source| self.bad_record(sandbox, source))?;
            Ok(Job { argv, ..job })
        };
        rows.into_iter().map(parse).collect()
    }
}

struct NewJob<'a> {
    argv: &'a [Vec<u8>],
    user: Option<&'a str>,
    exec_id: &'a str,
}

fn insert(change: &Changing<'_>, sandbox: &str, number: u32, job: &NewJob<'_>) -> Result<(), StoreError> {
    let argv = Value::from(shown(job.argv)).to_string();
    // Selected from the sandbox's own row: a sandbox that was removed meanwhile has no jobs.
    let inserted = change.run(
        "INSERT INTO jobs (sandbox, number, argv, user, started_ns, exec_id)
            SELECT id, ?, ?, ?, ?, ? FROM sandboxes WHERE id = ?",
        (number, argv, job.user, signed(unix_ns()), job.exec_id, sandbox),
    )?;
    if inserted == 0 { Err(StoreError::Removed(sandbox.to_owned())) } else { Ok(()) }
}

/// Formats a command line for storage: escaped for a terminal and limited in size.
fn shown(argv: &[Vec<u8>]) -> Vec<String> {
    let mut left = SHOWN_BYTES;
    let mut words = Vec::new();
    for word in argv {
        let mut text = String::new();
        for chunk in word.get(..left).unwrap_or(word).utf8_chunks() {
            for c in chunk.valid().chars() {
                // Quotes and backslashes are harmless; invisible characters are not.
                if matches!(c, '"' | '\'') { text.push(c) } else { text.extend(c.escape_debug()) }
            }
            text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
        }
        // An empty word also costs a byte: there may be a million of them.
        let rest = left.checked_sub(word.len() + 1);
        if rest.is_none() {
            text.push('…');
        }
        words.push(text);
        match rest {
            Some(rest) => left = rest,
            None => break,
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_are_harmless_and_short() {
        let argv =
            [b"echo".to_vec(), b"\xff\x1b[2J".to_vec(), "\u{e9} \"a'".as_bytes().to_vec(), b"a\\b".to_vec()];
        assert_eq!(shown(&argv), ["echo", "\\xff\\u{1b}[2J", "\u{e9} \"a'", "a\\\\b"]);
        let long = shown(&[b"x".to_vec(), vec![b'y'; 1 << 20], b"z".to_vec()]);
        assert_eq!(long.len(), 2);
        assert!(long[1].len() < SHOWN_BYTES + 8 && long[1].ends_with('…'));
        assert!(shown(&vec![Vec::new(); 1_000_000]).len() <= SHOWN_BYTES + 1);
    }
}
