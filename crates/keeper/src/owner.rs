//! What the owner, the process that started the keeper, asks for: new clients, figures, parking.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use bathy_protocol::{Cause, FromKeeper, Usage};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use crate::event_loop::{CHUNK, End, GUEST, Keeper, failed, wait};
use crate::hub::{Demand, OWNER};
use crate::parking;

/// The most sockets that come with one message.
const SOCKETS_AT_ONCE: usize = 8;

impl Keeper {
    /// Reads what the owner sent, with the sockets that came along.
    pub(crate) fn serve_owner(&mut self) -> Result<(), End> {
        self.on_owner_message()?;
        while let Some(demand) = self.demands.pop_front() {
            self.obey(&demand)?;
        }
        Ok(())
    }

    fn on_owner_message(&mut self) -> Result<(), End> {
        let Some(owner) = self.clients.get(&OWNER) else { return Err(End::OwnerGone) };
        let mut buffer = vec![0u8; CHUNK];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS_AT_ONCE))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(owner, &mut [IoSliceMut::new(&mut buffer)], &mut ancillary, flags) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(_) => return Err(End::OwnerGone),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(sockets) = message {
                self.new_clients.extend(sockets);
            }
        }
        if received.bytes == 0 {
            return Err(End::OwnerGone);
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(End::Because(Cause::Failed("A client's socket was lost on its way".to_owned())));
        }
        let demands = self.hub.on_client_bytes(OWNER, buffer.get(..received.bytes).unwrap_or_default())?;
        self.demands.extend(demands);
        Ok(())
    }

    fn obey(&mut self, demand: &Demand) -> Result<(), End> {
        match demand {
            Demand::Kill => Err(End::Because(Cause::Killed)),
            Demand::PowerOff { grace_ms } => {
                self.limits_end = Instant::now().checked_add(Duration::from_millis((*grace_ms).into()));
                Ok(())
            }
            Demand::Client => match self.new_clients.pop_front() {
                Some(socket) => self.take_client(socket),
                None => Err(End::Because(Cause::Failed("A client came without its socket".to_owned()))),
            },
            Demand::Link => match self.new_clients.pop_front() {
                Some(socket) => self.connect_cable(socket),
                None => Err(End::Because(Cause::Failed("A gateway came without its socket".to_owned()))),
            },
            Demand::Usage => {
                let (hub, disk) = (self.hub.usage(), self.devices.disk_usage());
                let usage = Usage {
                    memory: self.ram.occupied(),
                    disk: disk.disk,
                    disk_read: disk.disk_read,
                    disk_written: disk.disk_written,
                    ..hub
                };
                self.hub.tell_owner(&FromKeeper::Usage(usage));
                Ok(())
            }
            Demand::Park { release_memory } => self.park(*release_memory),
            // It does not stand still: nothing to bring back.
            Demand::Unpark => {
                self.hub.tell_owner(&FromKeeper::Parked { bytes: 0 });
                Ok(())
            }
        }
    }

    /// Stands still with the guest until it goes on: a device that looked at the guest's queues while their memory is
    /// away would find nothing.
    fn park(&mut self, release_memory: bool) -> Result<(), End> {
        self.guest.pause();
        if self.guest.has_ended() {
            return Err(self.guest_gone());
        }
        let moved = if release_memory { self.move_memory_away() } else { Ok(0) };
        match &moved {
            Ok(bytes) => self.hub.tell_owner(&FromKeeper::Parked { bytes: *bytes }),
            Err(reason) => self.hub.tell_owner(&FromKeeper::NotParked(reason.clone())),
        }
        let memory_is_away = release_memory && moved.is_ok();
        loop {
            // What came with the request, or while the memory was moved, is next.
            while let Some(demand) = self.demands.pop_front() {
                match demand {
                    Demand::Unpark => return self.unpark(memory_is_away),
                    Demand::Park { .. } => self.hub.tell_owner(&FromKeeper::Parked { bytes: 0 }),
                    other => self.obey(&other)?,
                }
            }
            self.send_to_owner()?;
            let events = wait(&self.asleep, None).map_err(|error| failed("wait while parked", &error))?;
            for (token, _) in events {
                if token == GUEST {
                    return Err(End::GuestGone);
                }
                self.on_owner_message()?;
            }
        }
    }

    fn move_memory_away(&self) -> Result<u64, String> {
        let file = self.parking.as_ref().ok_or("this sandbox is not kept")?;
        parking::park(&self.ram, file).map_err(|error| error.to_string())
    }

    fn unpark(&mut self, memory_is_away: bool) -> Result<(), End> {
        let bytes = match self.parking.as_ref().filter(|_| memory_is_away) {
            Some(file) => parking::unpark(&self.ram, file).map_err(|error| {
                End::Because(Cause::Failed(format!("Cannot bring the memory back: {error}")))
            })?,
            None => 0,
        };
        self.guest.resume();
        // It could not say anything while it stood still.
        self.watchdog.heard();
        self.hub.tell_owner(&FromKeeper::Parked { bytes });
        self.send_to_owner()
    }

    fn send_to_owner(&mut self) -> Result<(), End> {
        self.write_client(OWNER).map_err(|_| End::OwnerGone)
    }
}
