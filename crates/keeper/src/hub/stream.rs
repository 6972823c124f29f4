//! One piece of work: its windows, and the client that it belongs to.

use bathy_protocol::{ReceiveWindow, SendWindow, StdChannel};
use serde::{Deserialize, Serialize};

use super::ClientId;

/// Whose stream a piece of work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub client: ClientId,
    /// The client's own number for the stream.
    pub stream: u32,
}

/// An open stream of the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    pub(super) stdin: SendWindow,
    pub(super) stdout: ReceiveWindow,
    pub(super) stderr: ReceiveWindow,
    /// Output of a job that was logged and not yet granted again, because the log's rate is used up.
    pub(super) owed: [u32; 2],
    /// The client's number for the work.
    pub(super) tag: u64,
    /// The job's number, if it outlives its client.
    pub(super) job: Option<u32>,
    /// Messages that the agent may send once and has sent.
    pub(super) started: bool,
    pub(super) ended_outputs: [bool; 2],
    /// The client has left and nothing is logged: the agent was asked to end it.
    pub(super) abandoned: bool,
    #[serde(skip)]
    pub(super) holder: Option<Holder>,
}

impl Stream {
    pub(super) fn output(&mut self, channel: StdChannel) -> &mut ReceiveWindow {
        match channel {
            StdChannel::Stdout => &mut self.stdout,
            StdChannel::Stderr => &mut self.stderr,
        }
    }

    pub(super) fn owed(&mut self, channel: StdChannel) -> &mut u32 {
        let [stdout, stderr] = &mut self.owed;
        match channel {
            StdChannel::Stdout => stdout,
            StdChannel::Stderr => stderr,
        }
    }

    /// Marks an output as closed; `false` if it was closed before.
    pub(super) fn end_output(&mut self, channel: StdChannel) -> bool {
        let [stdout, stderr] = &mut self.ended_outputs;
        let ended = match channel {
            StdChannel::Stdout => stdout,
            StdChannel::Stderr => stderr,
        };
        !std::mem::replace(ended, true)
    }
}
