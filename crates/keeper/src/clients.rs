//! The sockets of the clients: reading requests, sending answers, and removing clients that disconnect or break a rule.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, shutdown};

use crate::event_loop::{CHUNK, End, Keeper, failed};
use crate::hub::{ClientId, Hub, HubError, OWNER};

/// Clients have tokens from here on, above those of the devices.
pub const FIRST_CLIENT: u64 = 1 << 32;

/// The connected clients. The owner is always among them.
pub struct Clients {
    epoll: Rc<OwnedFd>,
    sockets: BTreeMap<ClientId, OwnedFd>,
    last_id: ClientId,
}

impl Clients {
    /// The owner alone, watched for requests.
    pub fn new(epoll: Rc<OwnedFd>, owner: OwnedFd) -> Result<Self, Errno> {
        let mut clients = Self { epoll, sockets: BTreeMap::new(), last_id: OWNER };
        clients.insert(OWNER, owner)?;
        Ok(clients)
    }

    /// The socket of a client.
    pub fn socket(&self, id: ClientId) -> Option<&OwnedFd> {
        self.sockets.get(&id)
    }

    fn next_id(&mut self) -> ClientId {
        self.last_id += 1;
        self.last_id
    }

    fn insert(&mut self, id: ClientId, socket: OwnedFd) -> Result<(), Errno> {
        epoll::add(&self.epoll, &socket, EventData::new_u64(FIRST_CLIENT + id), EventFlags::IN)?;
        self.sockets.insert(id, socket);
        Ok(())
    }

    pub fn remove(&mut self, id: ClientId) {
        let Some(socket) = self.sockets.remove(&id) else { return };
        // The monitor holds a copy of the socket, to know when the client leaves: closing ours would not end the connection.
        let _ = shutdown(&socket, Shutdown::Both);
        // A copy keeps the socket in the epoll set until it is removed.
        let _ = epoll::delete(&self.epoll, &socket);
    }

    /// Sends as much of a client's queue as its socket accepts.
    pub fn flush(&self, id: ClientId, hub: &mut Hub) -> Result<(), Errno> {
        let Some(client) = self.sockets.get(&id) else { return Ok(()) };
        while !hub.for_client(id).is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(client, hub.for_client(id), flags) {
                Ok(count) => hub.client_took(id, count),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Watches for requests only while they can be handled, and for buffer space only while something is queued.
    pub fn rearm(&self, hub: &Hub) -> Result<(), Errno> {
        for (id, client) in &self.sockets {
            let mut flags = EventFlags::empty();
            let reads = hub.takes_requests() && !hub.has_backlog(*id);
            flags.set(EventFlags::IN, *id == OWNER || reads);
            flags.set(EventFlags::OUT, !hub.for_client(*id).is_empty());
            epoll::modify(&self.epoll, client.as_fd(), EventData::new_u64(FIRST_CLIENT + id), flags)?;
        }
        Ok(())
    }
}

impl Keeper {
    /// Adds a client, or hangs up if there are too many.
    pub(crate) fn add_client(&mut self, socket: OwnedFd) -> Result<(), End> {
        let id = self.clients.next_id();
        if !self.hub.add_client(id) {
            let _ = shutdown(&socket, Shutdown::Both);
            return Ok(());
        }
        self.clients.insert(id, socket).map_err(|error| failed("watch a client", &error))
    }

    /// Handles an event of a client's socket.
    pub(crate) fn on_client_event(&mut self, id: ClientId, hung_up: bool) -> Result<(), End> {
        if self.clients.flush(id, &mut self.hub).is_err() {
            return self.remove_client(id);
        }
        if id == OWNER {
            // The owner is served even if the guest takes no more requests.
            return self.serve_owner();
        }
        if !self.hub.takes_requests() {
            return if hung_up { self.remove_client(id) } else { Ok(()) };
        }
        if self.hub.has_backlog(id) {
            return Ok(());
        }
        let Some(client) = self.clients.socket(id) else { return Ok(()) };
        let mut buffer = [0u8; CHUNK];
        match rustix::net::recv(client, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => self.remove_client(id),
            Ok((count, _)) => match self.hub.on_client_bytes(id, buffer.get(..count).unwrap_or_default()) {
                Ok(_) => Ok(()),
                Err(error) => self.reject_client(id, error),
            },
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(_) => self.remove_client(id),
        }
    }

    /// Handles frames that clients sent earlier, some of each.
    pub(crate) fn serve_backlogs(&mut self) -> Result<(), End> {
        let waiting: Vec<_> = self.hub.clients().filter(|id| self.hub.has_backlog(*id)).collect();
        for id in waiting {
            if !self.hub.takes_requests() {
                break;
            }
            if let Err(error) = self.hub.on_client_bytes(id, &[]) {
                self.reject_client(id, error)?;
            }
        }
        Ok(())
    }

    /// Whether frames of clients wait that can be handled now.
    pub(crate) fn has_backlogs(&self) -> bool {
        self.hub.takes_requests() && self.hub.clients().any(|id| self.hub.has_backlog(id))
    }

    /// Disconnects a client that leaves too much unread.
    pub(crate) fn reject_slow_client(&mut self) -> Result<(), End> {
        match self.hub.slow_client() {
            Some((id, error)) => self.reject_client(id, error),
            None => Ok(()),
        }
    }

    /// Disconnects a client that broke a rule. If it is the owner, the sandbox ends.
    fn reject_client(&mut self, id: ClientId, error: HubError) -> Result<(), End> {
        if id == OWNER { Err(error.into()) } else { self.remove_client(id) }
    }

    fn remove_client(&mut self, id: ClientId) -> Result<(), End> {
        if id == OWNER {
            return Err(End::OwnerClosed);
        }
        self.hub.drop_client(id);
        self.clients.remove(id);
        Ok(())
    }

    /// Sends what is queued for clients.
    pub(crate) fn flush_clients(&mut self) -> Result<(), End> {
        let waiting: Vec<_> = self.hub.clients().filter(|id| !self.hub.for_client(*id).is_empty()).collect();
        for id in waiting {
            if self.clients.flush(id, &mut self.hub).is_err() {
                self.remove_client(id)?;
            }
        }
        Ok(())
    }
}
