//! What happened, and who asked for it.

use std::fs;
use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// How many bytes of a command line a line of the log has room for.
pub const MAX_ARGV: usize = 4096;

/// Something that crossed the boundary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, in nanoseconds since 1970, by the host's clock.
    pub time_unix_ns: u64,
    /// The sandbox's id, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// The sandbox's name, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub actor: Actor,
    #[serde(flatten)]
    pub what: What,
}

impl Event {
    /// Something that happens now.
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

/// A process of the host that asked for something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actor {
    pub uid: u32,
    /// That user's name, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    pub pid: u32,
    /// What it was doing, for instance `bathy exec`.
    pub program: String,
}

impl Actor {
    /// The process that calls this.
    pub fn this_process(program: impl Into<String>) -> Self {
        Self::new(rustix::process::getuid().as_raw(), std::process::id(), program)
    }

    /// Another process, for instance the peer of a socket.
    pub fn new(uid: u32, pid: u32, program: impl Into<String>) -> Self {
        Self { uid, user: user_name(uid), pid, program: program.into() }
    }
}

/// Users of a directory service have none here; their number is what counts.
fn user_name(uid: u32) -> Option<String> {
    let users = fs::read_to_string("/etc/passwd").ok()?;
    let wanted = uid.to_string();
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == wanted).then(|| name.to_owned())
    })
}

/// What happened. Fields are only ever added, and optional then: old logs stay readable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum What {
    /// A sandbox was made.
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
        /// Its part of a CPU, as it was asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cpu: Option<String>,
        /// When the host ends it, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_duration_ms: Option<u64>,
        /// After how long without use the host ends it, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        idle_timeout_ms: Option<u64>,
    },
    SandboxStarted {
        /// By which engine: `kvm` or `uml`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        engine: Option<String>,
    },
    /// It does not run any more.
    SandboxEnded {
        cause: String,
    },
    /// It was removed, with its disk.
    SandboxRemoved,
    SandboxPaused,
    SandboxResumed,
    /// A command was started.
    ExecStarted {
        /// Its id: the same in [`What::ExecEnded`].
        exec: String,
        /// The command line, or the beginning of it; see [`Argv`].
        argv: Vec<String>,
        /// The user in the guest.
        user: String,
        /// The job's number, if it is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        job: Option<u32>,
        /// Whether it has a terminal.
        terminal: bool,
        /// How long the whole command line is.
        argv_bytes: u64,
        /// The whole command line's digest, if `argv` is not exactly it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        argv_digest: Option<String>,
    },
    /// Code was given to an interpreter. Its end is a [`What::ExecEnded`].
    CodeStarted {
        /// Its id: the same in [`What::ExecEnded`].
        exec: String,
        language: String,
        context: String,
        /// The code, or the beginning of it.
        code: String,
        /// How long it is.
        code_bytes: u64,
        /// The digest of the whole.
        code_digest: String,
    },
    /// An agent called a tool, and got its answer.
    ToolCalled {
        tool: String,
        /// Who says to be calling.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        client: Option<String>,
        /// The arguments as JSON, or the beginning of them.
        arguments: String,
        /// How long they are.
        arguments_bytes: u64,
        /// The digest of the whole.
        arguments_digest: String,
        /// `ok`, `error`, `refused` or `cancelled`.
        outcome: String,
        /// How long the answer is, as JSON.
        answer_bytes: u64,
        answer_digest: String,
        /// How long it took, in milliseconds.
        took_ms: u64,
    },
    ExecEnded {
        exec: String,
        /// The job's number, if it is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        job: Option<u32>,
        /// How: `code 0`, `signal 9`, `refused: …`.
        exit: String,
    },
    /// Files were copied into a guest.
    FileIn {
        host_path: String,
        guest_path: String,
        files: u64,
        /// Total size in bytes.
        bytes: u64,
        /// The digest of all of it.
        digest: String,
    },
    /// Files were copied out of a guest.
    FileOut {
        host_path: String,
        guest_path: String,
        files: u64,
        /// Total size in bytes.
        bytes: u64,
        /// The digest of all of it.
        digest: String,
    },
    /// The names in a folder of a guest were read.
    FolderListed {
        guest_path: String,
        /// How many were told.
        entries: u64,
        /// How many there are, as the guest says.
        total: u64,
    },
    /// Files were to be copied, or a folder to be listed.
    FileFailed {
        /// `in`, `out` or `list`.
        direction: String,
        /// What was asked for.
        path: String,
        error: String,
    },
    /// A limit was reached.
    LimitHit {
        limit: String,
        detail: String,
        /// How many were turned away, for a limit of the network.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        turned_away: Option<u64>,
    },
    /// Something was sent a signal.
    Killed {
        /// A job, or the sandbox.
        target: String,
        signal: i32,
    },
    /// The network policy of a sandbox was changed.
    PolicyChanged {
        /// What is usual in it.
        preset: String,
        /// Its rules, in order.
        rules: Vec<String>,
        /// How many connections were closed for it, if the sandbox runs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        closed: Option<u32>,
    },
    /// A connection, or a flow of datagrams, was allowed and begins.
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
        /// What would have to be allowed, if that can be.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cure: Option<String>,
        /// How often since the last such event.
        count: u32,
    },
    /// What was allowed has ended.
    NetClosed {
        #[serde(flatten)]
        peer: NetPeer,
        /// Bytes that the sandbox sent, unless its gateway died and had not counted them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sent: Option<u64>,
        /// Bytes that it received, likewise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        received: Option<u64>,
        /// How long it took, in milliseconds.
        took_ms: u64,
        reason: String,
    },
    /// A name was resolved.
    NameResolved {
        host: String,
        /// The kind of record.
        kind: String,
        /// The addresses that the sandbox was told.
        addresses: Vec<IpAddr>,
        /// Those that were kept from it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        removed: Vec<IpAddr>,
    },
    /// A name was not resolved.
    NameUnresolved {
        host: String,
        /// The kind of record.
        kind: String,
        reason: String,
        /// Whether the policy denies it.
        denied: bool,
        /// What would have to be allowed, if a rule can do that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cure: Option<String>,
    },
    /// Frames that no honest sandbox sends were dropped.
    NetDropped {
        /// What was wrong with them.
        reason: String,
        /// How many since the last such event.
        count: u64,
    },
    /// The gateway of a sandbox is gone, and with it the sandbox's network.
    GatewayLost {
        reason: String,
        /// Whether there is a new one.
        restarted: bool,
    },
    /// A sandbox whose files were there, and that the store did not know, was written down again.
    SandboxAdopted {
        /// What its folder was called.
        folder: String,
    },
    /// The log itself was not as its last writer should have left it.
    Recovered {
        from: RecoveredFrom,
        detail: String,
        /// How many bytes before this line are half a line, or were until they were removed after a loss of power.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        torn_bytes: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        torn_digest: Option<String>,
        /// The number of the first line that was lost with the machine's power. The last is the one before this line.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lost_from: Option<u64>,
    },
    /// The log goes on in a new file, which this line begins.
    Rotated {
        /// What the file before is called now.
        previous_file: String,
        /// The hash of its last line.
        previous_hash: String,
    },
    /// The oldest files of the log were removed, because only so many are to be kept.
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
    /// A limit was reached, other than those of the network, which turn many away.
    pub fn limit_hit(limit: &str, detail: impl Into<String>) -> Self {
        Self::LimitHit { limit: limit.to_owned(), detail: detail.into(), turned_away: None }
    }
}

/// The two ends of something in a sandbox's network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetPeer {
    /// `tcp`, `udp`, `icmp`, or the number of another protocol.
    pub protocol: String,
    /// `out` if the sandbox began, `in` if somebody called at a published port.
    pub direction: String,
    pub address: IpAddr,
    /// Its port, or the sandbox's own if it was called.
    pub port: u16,
    /// What the sandbox calls it, as far as that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// What was wrong with the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecoveredFrom {
    /// A writer was killed in the middle of a line. The half is still there, before this line.
    TornLine,
    /// A writer was killed before the end of its last line, which lacks nothing else.
    MissingNewline,
    /// Lines that the head knows are not there.
    LostLines,
    /// There are bytes that no writer of ours leaves.
    ForeignBytes,
    /// There was no usable head, so lines may have been removed.
    LostHead,
    /// The machine stopped before the newest lines had reached its disk.
    PowerLoss,
}

/// A command line, cut to what a line of the log has room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argv {
    /// The arguments, or the beginning of them.
    pub argv: Vec<String>,
    /// How long the whole is, with a zero byte after each argument.
    pub bytes: u64,
    /// If `argv` is cut or has escapes: the BLAKE3 digest of the arguments, each with a zero byte after it.
    pub digest: Option<String>,
}

/// Puts down a command line: bytes that are no text as `\xNN`, and at most [`MAX_ARGV`] bytes of all of it.
pub fn argv<A: AsRef<[u8]>>(arguments: &[A]) -> Argv {
    let mut shown = Vec::new();
    let mut room = MAX_ARGV;
    let mut exact = true;
    let mut bytes = 0u64;
    for argument in arguments.iter().map(AsRef::as_ref) {
        bytes = bytes.saturating_add(u64::try_from(argument.len()).unwrap_or(u64::MAX)).saturating_add(1);
        if room == 0 {
            exact = false;
            continue;
        }
        let fitting = argument.get(..room - 1).unwrap_or(argument);
        let text = text(fitting);
        exact &= fitting.len() == argument.len() && text.as_bytes() == argument;
        room -= fitting.len() + 1;
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

/// The BLAKE3 digest of something, in hexadecimal.
pub fn digest(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// Bytes as text, with what is no UTF-8 as `\xNN`.
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
    fn a_long_command_line_is_cut_and_its_digest_tells_the_whole() {
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
