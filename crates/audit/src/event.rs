//! The events of the audit log and their actors.

use std::fs;
use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The most bytes of a command line in an event.
pub const MAX_ARGV: usize = 4096;

/// Something that crossed the boundary of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// The host's time in nanoseconds since 1970.
    pub time_unix_ns: u64,
    /// The id of the sandbox, if the event is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// The name of the sandbox, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub actor: Actor,
    #[serde(flatten)]
    pub what: What,
}

impl Event {
    /// An event with the present time.
    pub fn now(actor: Actor, what: What) -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time_unix_ns = u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX);
        Self { time_unix_ns, sandbox: None, name: None, actor, what }
    }

    #[must_use]
    pub fn in_sandbox(mut self, id: impl Into<String>, name: Option<String>) -> Self {
        self.sandbox = Some(id.into());
        self.name = name;
        self
    }
}

/// The host process that requested something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actor {
    pub uid: u32,
    /// The user's name, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    pub pid: u32,
    /// The program, for instance `bathy exec`.
    pub program: String,
}

impl Actor {
    pub fn this_process(program: impl Into<String>) -> Self {
        Self::new(rustix::process::getuid().as_raw(), std::process::id(), program)
    }

    /// Another process, for instance the peer of a socket.
    pub fn new(uid: u32, pid: u32, program: impl Into<String>) -> Self {
        Self { uid, user: user_name(uid), pid, program: program.into() }
    }
}

/// Users of a directory service are not in this file; their number is what counts.
fn user_name(uid: u32) -> Option<String> {
    let users = fs::read_to_string("/etc/passwd").ok()?;
    let wanted = uid.to_string();
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == wanted).then(|| name.to_owned())
    })
}

/// The kinds of events. Fields are only added, and as optional ones, so that old logs stay readable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum What {
    /// A sandbox was created.
    SandboxCreated {
        image: String,
        /// The engine: `kvm` or `uml`.
        engine: String,
        /// Guest memory in bytes.
        memory: u64,
        /// The disk's size in bytes.
        disk: u64,
        /// The security mode: `default` or `restricted`.
        security: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        processes: Option<u64>,
        /// Its share of a CPU, as requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cpu: Option<String>,
        /// The maximum duration in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_duration_ms: Option<u64>,
        /// The idle timeout in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        idle_timeout_ms: Option<u64>,
    },
    SandboxStarted {
        /// The engine: `kvm` or `uml`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        engine: Option<String>,
    },
    /// The sandbox has ended.
    SandboxEnded {
        cause: String,
    },
    /// The sandbox was removed with its disk.
    SandboxRemoved,
    SandboxPaused,
    SandboxResumed,
    ExecStarted {
        /// The id of the command, repeated in [`What::ExecEnded`].
        exec: String,
        /// The command line, possibly cut; see [`Argv`].
        argv: Vec<String>,
        /// The user in the guest.
        user: String,
        /// The job number, if it is a job.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        job: Option<u32>,
        /// Whether it has a terminal.
        terminal: bool,
        /// The length of the whole command line in bytes.
        argv_bytes: u64,
        /// The digest of the whole command line, if `argv` is cut or escaped.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        argv_digest: Option<String>,
    },
    /// A cell was sent to an interpreter. Its end is a [`What::ExecEnded`].
    CodeStarted {
        /// The id of the cell, repeated in [`What::ExecEnded`].
        exec: String,
        language: String,
        context: String,
        /// The code, possibly cut.
        code: String,
        /// The length of the whole code in bytes.
        code_bytes: u64,
        /// The digest of the whole code.
        code_digest: String,
    },
    /// An agent called a tool and got the answer.
    ToolCalled {
        tool: String,
        /// The client, by its own account.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        client: Option<String>,
        /// The arguments as JSON, possibly cut.
        arguments: String,
        /// The length of the arguments in bytes.
        arguments_bytes: u64,
        /// The digest of the whole arguments.
        arguments_digest: String,
        /// `ok`, `error`, `refused` or `cancelled`.
        outcome: String,
        /// The length of the answer as JSON in bytes.
        answer_bytes: u64,
        answer_digest: String,
        /// The duration in milliseconds.
        took_ms: u64,
    },
    ExecEnded {
        exec: String,
        /// The job number, if it was a job.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        job: Option<u32>,
        /// The exit status: `code 0`, `signal 9`, `refused: …`.
        exit: String,
    },
    /// Files were copied into a guest.
    FileIn {
        host_path: String,
        guest_path: String,
        files: u64,
        /// Total size in bytes.
        bytes: u64,
        /// The digest of the file or tree.
        digest: String,
    },
    /// Files were copied out of a guest.
    FileOut {
        host_path: String,
        guest_path: String,
        files: u64,
        /// Total size in bytes.
        bytes: u64,
        /// The digest of the file or tree.
        digest: String,
    },
    /// A folder of a guest was listed.
    FolderListed {
        guest_path: String,
        /// How many entries were returned.
        entries: u64,
        /// How many entries the folder has, as the guest reports.
        total: u64,
    },
    /// A copy or a listing failed.
    FileFailed {
        /// `in`, `out` or `list`.
        direction: String,
        path: String,
        error: String,
    },
    /// A limit was reached.
    LimitHit {
        limit: String,
        detail: String,
        /// How many were rejected, for a network limit.
        #[serde(rename = "turned_away", default, skip_serializing_if = "Option::is_none")]
        rejected: Option<u64>,
    },
    /// A signal was sent.
    Killed {
        /// A job, or the sandbox.
        target: String,
        signal: i32,
    },
    /// The network policy of a sandbox was changed.
    PolicyChanged {
        /// The preset, which is the policy's default.
        preset: String,
        /// The rules in order.
        rules: Vec<String>,
        /// How many connections the change closed, if the sandbox is running.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        closed: Option<u32>,
    },
    /// A connection or datagram flow was allowed and begins.
    NetAllowed {
        #[serde(flatten)]
        peer: NetPeer,
        rule: String,
    },
    /// A connection, datagram or request was denied.
    NetDenied {
        #[serde(flatten)]
        peer: NetPeer,
        rule: String,
        /// The target that would have to be allowed, if a rule can allow it.
        #[serde(rename = "cure", default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
        /// How often since the last such event.
        count: u32,
    },
    /// An allowed connection or flow has ended.
    NetClosed {
        #[serde(flatten)]
        peer: NetPeer,
        /// Bytes that the sandbox sent, unless its gateway died without counting them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sent: Option<u64>,
        /// Bytes that the sandbox received, likewise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        received: Option<u64>,
        /// The duration in milliseconds.
        took_ms: u64,
        reason: String,
    },
    NameResolved {
        host: String,
        /// The type of the record.
        kind: String,
        /// The addresses in the answer to the sandbox.
        addresses: Vec<IpAddr>,
        /// Addresses that were removed from the answer.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        removed: Vec<IpAddr>,
    },
    /// A DNS query was not answered.
    NameUnresolved {
        host: String,
        /// The type of the record.
        kind: String,
        reason: String,
        /// Whether the policy denies it.
        denied: bool,
        /// The target that would have to be allowed, if a rule can allow it.
        #[serde(rename = "cure", default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
    /// Invalid frames of a sandbox were dropped.
    NetDropped {
        /// Why they are invalid.
        reason: String,
        /// How many since the last such event.
        count: u64,
    },
    /// The gateway of a sandbox failed, or was restarted after that.
    GatewayLost {
        reason: String,
        /// Whether there is a new gateway.
        restarted: bool,
    },
    /// A sandbox with files but without a record got a new record.
    SandboxAdopted {
        /// The name of its folder.
        folder: String,
    },
    /// The log was not as its last writer should have left it.
    Recovered {
        from: RecoveredFrom,
        detail: String,
        /// The length of the partial line before this line, or of what was removed after a power failure.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        torn_bytes: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        torn_digest: Option<String>,
        /// The number of the first line that was lost in a power failure. The last one is the line before
        /// this one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lost_from: Option<u64>,
    },
    /// The log continues in a new file, which this line begins.
    Rotated {
        /// The present name of the previous file.
        previous_file: String,
        /// The hash of its last line.
        previous_hash: String,
    },
    /// The oldest files of the log were removed, because of the limit on files.
    Pruned {
        files: u64,
        /// The number of the last line that was removed.
        through_seq: u64,
        through_hash: String,
    },
    /// An event of a later version.
    #[serde(other)]
    Unknown,
}

impl What {
    /// A limit was reached, other than a network limit, which counts rejections.
    pub fn limit_hit(limit: &str, detail: impl Into<String>) -> Self {
        Self::LimitHit { limit: limit.to_owned(), detail: detail.into(), rejected: None }
    }
}

/// The peer of a connection or flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetPeer {
    /// `tcp`, `udp`, `icmp` or the number of another protocol.
    pub protocol: String,
    /// `out` if the sandbox connected, `in` if the peer connected to a published port.
    pub direction: String,
    pub address: IpAddr,
    /// The peer's port, or the sandbox's own for an inbound connection.
    pub port: u16,
    /// The name that the sandbox used, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// Why the log had to be recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecoveredFrom {
    /// A writer was killed while writing a line. The partial line is before this one.
    TornLine,
    /// A writer was killed before the line break of its last line.
    MissingNewline,
    /// Lines that the head counts are missing.
    LostLines,
    /// There are bytes that none of our writers leaves.
    ForeignBytes,
    /// There was no valid head, so lines may have been removed.
    LostHead,
    /// The machine stopped before the newest lines were on its disk.
    PowerLoss,
}

/// A command line, cut to the limit of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argv {
    /// The arguments, possibly cut.
    pub argv: Vec<String>,
    /// The length of the whole, with a zero byte after each argument.
    pub bytes: u64,
    /// If `argv` is cut or escaped: the BLAKE3 digest of the arguments, each with a zero byte after it.
    pub digest: Option<String>,
}

/// Formats a command line: bytes that are not text as `\xNN`, and at most [`MAX_ARGV`] bytes in total.
pub fn argv<A: AsRef<[u8]>>(arguments: &[A]) -> Argv {
    let mut shown = Vec::new();
    let mut left = MAX_ARGV;
    let mut exact = true;
    let mut bytes = 0u64;
    for argument in arguments.iter().map(AsRef::as_ref) {
        bytes = bytes.saturating_add(u64::try_from(argument.len()).unwrap_or(u64::MAX)).saturating_add(1);
        if left == 0 {
            exact = false;
            continue;
        }
        let fitting = argument.get(..left - 1).unwrap_or(argument);
        let text = text(fitting);
        exact &= fitting.len() == argument.len() && text.as_bytes() == argument;
        left -= fitting.len() + 1;
        shown.push(text);
    }
    let digest = (!exact).then(|| {
        let mut hasher = blake3::Hasher::new();
        for argument in arguments {
            hasher.update(argument.as_ref()).update(&[0]);
        }
        hasher.finalize().to_hex().to_string()
    });
    Argv { argv: shown, bytes, digest }
}

/// The BLAKE3 digest of `bytes` in hexadecimal.
pub fn digest(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// Bytes as text, with invalid UTF-8 as `\xNN`.
pub fn text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinary_command_line_is_shown_as_it_is() {
        let shown = argv(&["echo", "ü", ""]);
        assert_eq!(
            shown,
            Argv { argv: vec!["echo".into(), "ü".into(), String::new()], bytes: 9, digest: None }
        );
    }

    #[test]
    fn a_long_command_line_is_cut_and_its_digest_covers_the_whole() {
        let long = vec!["x".repeat(1 << 20), "y".into()];
        let shown = argv(&long);
        assert_eq!((shown.argv.len(), shown.argv[0].len(), shown.bytes), (1, MAX_ARGV - 1, (1 << 20) + 3));
        let whole = [long[0].as_bytes(), b"\0y\0"].concat();
        assert_eq!(shown.digest, Some(blake3::hash(&whole).to_hex().to_string()));
        let many = argv(&vec![""; 1_000_000]);
        assert_eq!((many.argv.len(), many.bytes), (MAX_ARGV, 1_000_000));
        assert!(many.digest.is_some());
    }

    #[test]
    fn bytes_that_are_no_text_are_escaped_and_told_apart_by_the_digest() {
        let bytes = argv(&[b"a\xff\xc3".to_vec()]);
        let spelled = argv(&[br"a\xff\xc3".to_vec()]);
        assert_eq!(bytes.argv, spelled.argv);
        assert!(bytes.digest.is_some() && spelled.digest.is_none());
        let cut_inside_a_letter = argv(&[["x".repeat(MAX_ARGV - 2), "ü".into()].concat()]);
        assert!(cut_inside_a_letter.argv[0].ends_with("x\\xc3"));
    }

    #[test]
    fn a_digest_is_that_of_its_bytes() {
        // The digest of nothing, as the algorithm's authors publish it.
        assert_eq!(digest(b""), "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
        assert_ne!(digest(b"a"), digest(b"b"));
    }

    #[test]
    fn this_process_has_a_user() {
        let actor = Actor::this_process("test");
        assert_eq!(actor.pid, std::process::id());
        if actor.uid == 0 {
            assert_eq!(actor.user.as_deref(), Some("root"));
        }
        assert_eq!(Actor::new(4_123_456_789, 1, "x").user, None);
    }

    #[test]
    fn events_of_a_later_version_are_readable() {
        let text =
            r#"{"time_unix_ns":1,"actor":{"uid":0,"pid":1,"program":"x"},"event":"teleported","to":"mars"}"#;
        let event: Event = serde_json::from_str(text).unwrap();
        assert_eq!(event.what, What::Unknown);
    }
}
