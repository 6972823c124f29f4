//! Requests of the owner, the process that started the keeper: new clients, figures, parking.

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bathy_protocol::{Cause, FromKeeper, Usage};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use crate::event_loop::{CHUNK, End, GUEST, Keeper, failed, wait};
use crate::hub::{Demand, OWNER};

/// The most sockets that come with one message.
const SOCKETS_AT_ONCE: usize = 8;

/// What was received from the owner and is not handled yet.
#[derive(Debug, Default)]
pub struct OwnerInbox {
    demands: VecDeque<Demand>,
    /// The sockets of new clients and gateways. They arrive before or with the message that announces them.
    sockets: VecDeque<OwnedFd>,
}

impl OwnerInbox {
    fn take_socket(&mut self, of: &str) -> Result<OwnedFd, End> {
        let missing = || End::Because(Cause::Failed(format!("{of} was announced without its socket")));
        self.sockets.pop_front().ok_or_else(missing)
    }
}

impl Keeper {
    /// Reads what the owner sent, with the sockets that came along, and does it.
    pub(crate) fn serve_owner(&mut self) -> Result<(), End> {
        self.receive_from_owner()?;
        while let Some(demand) = self.inbox.demands.pop_front() {
            self.obey(&demand)?;
        }
        Ok(())
    }

    fn receive_from_owner(&mut self) -> Result<(), End> {
        let Some(owner) = self.clients.socket(OWNER) else { return Err(End::OwnerClosed) };
        let mut buffer = vec![0u8; CHUNK];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS_AT_ONCE))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(owner, &mut [IoSliceMut::new(&mut buffer)], &mut ancillary, flags) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(_) => return Err(End::OwnerClosed),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(sockets) = message {
                self.inbox.sockets.extend(sockets);
            }
        }
        if received.bytes == 0 {
            return Err(End::OwnerClosed);
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(End::Because(Cause::Failed("A client's socket was lost in transit".to_owned())));
        }
        let demands = self.hub.on_client_bytes(OWNER, buffer.get(..received.bytes).unwrap_or_default())?;
        self.inbox.demands.extend(demands);
        Ok(())
    }

    fn obey(&mut self, demand: &Demand) -> Result<(), End> {
        match demand {
            Demand::Kill => Err(End::Because(Cause::Killed)),
            Demand::PowerOff { grace_ms } => {
                let end = (self.clock)().checked_add(Duration::from_millis((*grace_ms).into()));
                self.timers.disk_limits = end.or(self.timers.disk_limits);
                Ok(())
            }
            Demand::Client => {
                let socket = self.inbox.take_socket("A client")?;
                self.add_client(socket)
            }
            Demand::Link => {
                let socket = self.inbox.take_socket("A gateway")?;
                self.connect_link(socket)
            }
            Demand::Usage => {
                let (hub, disk) = (self.hub.usage(), self.devices.disk_usage());
                let usage = Usage {
                    memory: self.parking.occupied_memory(),
                    disk: disk.disk,
                    disk_read: disk.disk_read,
                    disk_written: disk.disk_written,
                    ..hub
                };
                self.hub.send_to_owner(&FromKeeper::Usage(usage));
                Ok(())
            }
            Demand::Park { release_memory } => self.park(*release_memory),
            // The guest is not parked: there is nothing to bring back.
            Demand::Unpark => {
                self.hub.send_to_owner(&FromKeeper::Parked { bytes: 0 });
                Ok(())
            }
        }
    }

    /// Pauses the guest and serves only the owner until it is unparked. The devices must not run meanwhile: while the
    /// guest's memory is in the file, its queues read as zeros.
    fn park(&mut self, release_memory: bool) -> Result<(), End> {
        self.guest.pause();
        if self.guest.has_ended() {
            return Err(self.guest_exited());
        }
        let moved = if release_memory { self.parking.move_out() } else { Ok(0) };
        match &moved {
            Ok(bytes) => self.hub.send_to_owner(&FromKeeper::Parked { bytes: *bytes }),
            Err(reason) => self.hub.send_to_owner(&FromKeeper::NotParked(reason.clone())),
        }
        let memory_is_out = release_memory && moved.is_ok();
        loop {
            // First what came with the request, or while the memory was moved.
            while let Some(demand) = self.inbox.demands.pop_front() {
                match demand {
                    Demand::Unpark => return self.unpark(memory_is_out),
                    Demand::Park { .. } => self.hub.send_to_owner(&FromKeeper::Parked { bytes: 0 }),
                    other => self.obey(&other)?,
                }
            }
            self.flush_owner()?;
            let events =
                wait(self.parking.epoll(), None).map_err(|error| failed("wait while parked", &error))?;
            for (token, _) in events {
                if token == GUEST {
                    return Err(End::GuestExited);
                }
                self.receive_from_owner()?;
            }
        }
    }

    fn unpark(&mut self, memory_is_out: bool) -> Result<(), End> {
        let bytes = if memory_is_out {
            self.parking.move_back().map_err(|error| {
                End::Because(Cause::Failed(format!("Cannot bring the memory back: {error}")))
            })?
        } else {
            0
        };
        self.guest.resume();
        // A parked guest could not send anything.
        self.watchdog.on_activity();
        self.hub.send_to_owner(&FromKeeper::Parked { bytes });
        self.flush_owner()
    }

    fn flush_owner(&mut self) -> Result<(), End> {
        self.clients.flush(OWNER, &mut self.hub).map_err(|_| End::OwnerClosed)
    }
}
