//! Clients of the control socket that have not sent their request yet, and passing clients to the keeper.

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

/// How many clients may be without a request at once, and how long each may take to send it.
const MAX_PENDING: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(5);

/// A connection whose request has not arrived completely.
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
            if !known || state.pending.len() >= MAX_PENDING || socket.set_nonblocking(true).is_err() {
                continue;
            }
            let client = PendingClient {
                socket: socket.into(),
                decoder: Decoder::new(LIMIT),
                until: Instant::now() + TIMEOUT,
            };
            // Most clients have sent their request already.
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
                Ok(request) => self.answer(client.socket, &request, state),
                Err(error) => refuse(&client.socket, &not_understood(&error)),
            },
            Ok(None) => state.pending.push(client),
            Err(error) => refuse(&client.socket, &not_understood(&error)),
        }
    }

    /// Passes a connection to the keeper and keeps a copy, to notice when the client closes it.
    pub(super) fn connect(&mut self, socket: OwnedFd, state: &mut Loop) {
        let Ok(copy) = socket.try_clone() else { return refuse(&socket, "too many clients") };
        // The answer must come before anything that the keeper sends.
        if self.supervisor.sandbox.connection.unsent() > 0 {
            return refuse(
                &socket,
                "the sandbox's keeper is busy and accepts no clients; `bathy kill` ends it",
            );
        }
        if let Err(error) = try_passing(&socket) {
            return refuse(
                &socket,
                &format!(
                    "the host cannot pass file descriptors at present: {error}. Programs of this user have too many of them in flight; try again later"
                ),
            );
        }
        respond(&socket, &FromMonitor::Connected);
        match self.hand_over(&socket) {
            Ok(true) => {
                state.clients.push(copy);
                state.pause.on_client();
            }
            Ok(false) => {}
            // A temporary shortage on the host is not the keeper's fault: only this client is lost.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock || is_shortage(&error) => {}
            Err(error) => state.ended = Some(format!("its keeper does not accept clients: {error}")),
        }
    }

    fn hand_over(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        match self.supervisor.sandbox.connection.send_with_descriptor(&ToKeeper::Client, socket) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Whether the error is a temporary shortage on the host. In-flight descriptors are counted over all programs
/// of a user, so any of them can cause it (attack U7).
fn is_shortage(error: &io::Error) -> bool {
    let shortages = [Errno::TOOMANYREFS, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|error| shortages.contains(&error))
}

/// Passes a descriptor to ourselves, to check that it works before the client gets its answer.
fn try_passing(descriptor: &OwnedFd) -> Result<(), Errno> {
    let (from, _to) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(&from, &[IoSlice::new(b"x")], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The refusal for a request that is too long or unknown to this version.
fn not_understood(error: &dyn std::error::Error) -> String {
    format!(
        "the sandbox's monitor does not understand the request: {error}. A sandbox that another version of bathy started understands all of them after a restart"
    )
}

pub(super) fn respond(socket: &OwnedFd, answer: &FromMonitor) {
    let mut message = Vec::new();
    if encode(CONNECTION, answer, &mut message).is_ok() {
        // Fits into the buffer of a fresh socket; the client may have closed its end.
        let _ = rustix::net::send(socket, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

pub(super) fn refuse(socket: &OwnedFd, reason: &str) {
    // Answers are limited in size, so a long reason is cut.
    let reason: String = reason.chars().take(800).collect();
    respond(socket, &FromMonitor::Refused(reason));
}
