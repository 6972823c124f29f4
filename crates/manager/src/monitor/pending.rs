//! Clients of the control socket whose request is not known yet, and passing them on to the keeper.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_protocol::message::{decode, encode};
use bathy_protocol::{CONNECTION, Decoder, ToKeeper};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    recv, sendmsg, socketpair,
};

use super::Monitor;
use super::control::{FromMonitor, LIMIT};
use super::serve::Loop;

/// How many clients may have no known request at once, and how long each may take to send one.
const MOST_PENDING: usize = 64;
const PATIENCE: Duration = Duration::from_secs(5);

/// A connection that has not said what it wants.
pub(super) struct PendingClient {
    pub socket: OwnedFd,
    decoder: Decoder,
    pub until: Instant,
}

impl Monitor {
    pub(super) fn accept_clients(&mut self, state: &mut Loop) {
        while let Ok((socket, _)) = self.listener.accept() {
            let ours = rustix::process::geteuid();
            let known = socket_peercred(&socket).is_ok_and(|peer| peer.uid == ours || peer.uid.is_root());
            if !known || state.pending.len() >= MOST_PENDING || socket.set_nonblocking(true).is_err() {
                continue;
            }
            let client = PendingClient {
                socket: socket.into(),
                decoder: Decoder::new(LIMIT),
                until: Instant::now() + PATIENCE,
            };
            // Most have spoken already.
            self.serve_pending(client, true, state);
        }
    }

    pub(super) fn serve_pending(&mut self, mut client: PendingClient, spoke: bool, state: &mut Loop) {
        if !spoke {
            state.pending.push(client);
            return;
        }
        let mut buffer = [0u8; 512];
        match recv(&client.socket, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((count @ 1.., _)) => client.decoder.push(buffer.get(..count).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => {}
            _ => return,
        }
        match client.decoder.next_frame() {
            Ok(Some(frame)) => match decode(frame.payload) {
                Ok(question) => self.answer(client.socket, &question, state),
                Err(error) => refuse(&client.socket, &not_understood(&error)),
            },
            Ok(None) => state.pending.push(client),
            Err(error) => refuse(&client.socket, &not_understood(&error)),
        }
    }

    /// Hands a connection over to the keeper and keeps a copy, to notice when the client leaves.
    pub(super) fn connect(&mut self, socket: OwnedFd, state: &mut Loop) {
        let Ok(copy) = socket.try_clone() else { return refuse(&socket, "too many clients") };
        // The answer comes before anything that the keeper says.
        if self.supervisor.sandbox.connection.unsent() > 0 {
            return refuse(
                &socket,
                "the sandbox's keeper is busy and takes no clients; `bathy kill` ends it",
            );
        }
        if let Err(error) = try_passing(&socket) {
            return refuse(
                &socket,
                &format!(
                    "the host passes no file descriptors at present: {error}. Programs of this user have too many of them in flight; try again later"
                ),
            );
        }
        say(&socket, &FromMonitor::Connected);
        match self.hand_over(&socket) {
            Ok(true) => {
                state.clients.push(copy);
                state.pause.on_client();
            }
            Ok(false) => {}
            // A shortage of the host's that came about just now is not the keeper's fault: only this client is lost.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock || is_shortage(&error) => {}
            Err(error) => state.ended = Some(format!("its keeper does not take clients: {error}")),
        }
    }

    fn hand_over(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        match self.supervisor.sandbox.connection.tell_with(&ToKeeper::Client, socket) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Whether the host lacks something that it may have again later. Descriptors in flight are counted for all programs of a user
/// together, so any of them can bring this about (attack U7).
fn is_shortage(error: &io::Error) -> bool {
    let shortages = [Errno::TOOMANYREFS, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|error| shortages.contains(&error))
}

/// Passes a descriptor to ourselves, to learn whether that is possible before a client is told that it is connected.
fn try_passing(descriptor: &OwnedFd) -> Result<(), Errno> {
    let (from, _to) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(&from, &[IoSlice::new(b"x")], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// What the sender of a request is told that is too long, or that this version does not know.
fn not_understood(error: &dyn std::error::Error) -> String {
    format!(
        "the sandbox's monitor does not understand the request: {error}. A sandbox that another version of bathy started understands all of them after a restart"
    )
}

pub(super) fn say(socket: &OwnedFd, answer: &FromMonitor) {
    let mut message = Vec::new();
    if encode(CONNECTION, answer, &mut message).is_ok() {
        // Fits into a fresh socket's buffer; whoever asked may be gone.
        let _ = rustix::net::send(socket, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

pub(super) fn refuse(socket: &OwnedFd, reason: &str) {
    // An answer has a limit; a reason that is longer says enough at its beginning.
    let reason: String = reason.chars().take(800).collect();
    say(socket, &FromMonitor::Refused(reason));
}
