//! Handles the requests of clients.

use bathy_protocol::cell::{ContextsRequest, Surroundings};
use bathy_protocol::frame;
use bathy_protocol::message::decode;
use bathy_protocol::{
    Answer, CONNECTION, Channel, Exit, FromKeeper, MAX_COMMANDS, MAX_STREAMS, RefusalKind, Refused, Request,
    Restriction, ToGuest, ToKeeper, WindowError, Work, WorkEnd,
};

use super::stream::Holder;
use super::{ClientId, Demand, Hub, HubError, MAX_FRAMES, OWNER, Stream};

impl Hub {
    /// Handles bytes from a client: at most [`MAX_FRAMES`] frames, except of the owner, who is trusted. The rest waits for the next
    /// call.
    pub fn on_client_bytes(&mut self, id: ClientId, bytes: &[u8]) -> Result<Vec<Demand>, HubError> {
        let mut demands = Vec::new();
        let Some(client) = self.clients.get_mut(&id) else { return Ok(demands) };
        // Taken out so that a frame may borrow it while the hub changes.
        let mut decoder = std::mem::replace(&mut client.decoder, bathy_protocol::Decoder::new(0));
        decoder.push(bytes);
        let most = if id == OWNER { usize::MAX } else { MAX_FRAMES };
        let mut count = 0;
        while count < most
            && let Some(frame) = decoder.next_frame()?
        {
            count += 1;
            match (frame.stream, frame.channel) {
                (CONNECTION, Channel::Control) if id == OWNER => {
                    demands.extend(self.obey_owner(&decode(frame.payload)?));
                }
                (CONNECTION, _) => return Err(HubError::NotOwner),
                (stream, Channel::Control) => {
                    self.serve(Holder { client: id, stream }, decode(frame.payload)?)?;
                }
                (stream, Channel::Stdin) => self.feed(Holder { client: id, stream }, frame.payload)?,
                (_, other) => return Err(HubError::WrongDirection(other)),
            }
        }
        if let Some(client) = self.clients.get_mut(&id) {
            client.backlog = decoder.has_frame();
            client.decoder = decoder;
        }
        Ok(demands)
    }

    fn obey_owner(&mut self, message: &ToKeeper) -> Option<Demand> {
        match message {
            ToKeeper::Kill => Some(Demand::Kill),
            ToKeeper::PowerOff { grace_ms } => {
                self.send_to_guest(CONNECTION, &ToGuest::PowerOff { grace_ms: *grace_ms });
                Some(Demand::PowerOff { grace_ms: *grace_ms })
            }
            ToKeeper::Client => Some(Demand::Client),
            ToKeeper::Link => Some(Demand::Link),
            ToKeeper::Usage => Some(Demand::Usage),
            ToKeeper::Park { release_memory } => Some(Demand::Park { release_memory: *release_memory }),
            ToKeeper::Unpark => Some(Demand::Unpark),
        }
    }

    fn feed(&mut self, holder: Holder, bytes: &[u8]) -> Result<(), HubError> {
        // A stream that ended while the bytes were on their way takes no more.
        let Some(number) = self.held(holder) else { return Ok(()) };
        let Some(stream) = self.state.streams.get_mut(&number) else { return Ok(()) };
        let open = stream.stdin.open();
        if bytes.len() > open {
            let (sent, left) = (u32::try_from(bytes.len()), u32::try_from(open));
            let (sent, left) = (sent.unwrap_or(u32::MAX), left.unwrap_or(0));
            return Err(WindowError::Overrun { sent, left }.into());
        }
        stream.stdin.sent(bytes.len());
        frame::encode(number, Channel::Stdin, bytes, &mut self.to_guest);
        Ok(())
    }

    fn serve(&mut self, holder: Holder, request: Request) -> Result<(), HubError> {
        match request {
            Request::Start { work, tag, job } => self.start(holder, work, tag, job),
            Request::Attach { job } => self.attach(holder, job),
            Request::SignalJob { job, signal } => {
                let answer = match self.job(job) {
                    Some(number) => {
                        self.send_to_guest(number, &ToGuest::Signal(signal));
                        Answer::Exited(Exit::Code(0))
                    }
                    None => no_such_job(job),
                };
                self.answer(holder, &answer);
                Ok(())
            }
            Request::Detach => {
                if let Some(number) = self.held(holder) {
                    self.forget(holder);
                    self.release(number);
                }
                Ok(())
            }
            Request::Grant { channel, bytes } => {
                let Some(number) = self.held(holder) else { return Ok(()) };
                if let Some(stream) = self.state.streams.get_mut(&number) {
                    stream.output(channel).granted(bytes)?;
                    self.send_to_guest(number, &ToGuest::Grant { channel, bytes });
                }
                Ok(())
            }
            Request::Signal(signal) => self.pass(holder, &ToGuest::Signal(signal)),
            Request::CloseStdin => self.pass(holder, &ToGuest::CloseStdin),
            Request::Resize(size) => self.pass(holder, &ToGuest::Resize(size)),
        }
    }

    /// Passes a request on, unless its stream ended while it was on its way.
    fn pass(&mut self, holder: Holder, message: &ToGuest) -> Result<(), HubError> {
        if let Some(number) = self.held(holder) {
            self.send_to_guest(number, message);
        }
        Ok(())
    }

    fn start(&mut self, holder: Holder, work: Work, tag: u64, job: Option<u32>) -> Result<(), HubError> {
        let Some(client) = self.clients.get_mut(&holder.client) else { return Ok(()) };
        if client.streams.contains_key(&holder.stream) {
            return Err(HubError::StreamInUse(holder.stream));
        }
        let refusal = if client.streams.len() >= MAX_STREAMS {
            Some("this client runs too many commands at once")
        } else if self.state.streams.len() >= MAX_COMMANDS {
            Some("too many commands run at once in this sandbox")
        } else if job.is_some_and(|job| self.job(job).is_some()) {
            Some("a job with this number runs already")
        } else {
            None
        };
        if let Some(message) = refusal {
            self.answer(holder, &refused(message.to_owned()));
            let end = WorkEnd::Refused(message.to_owned());
            self.send_to_owner(&FromKeeper::WorkEnded { tag, job, end });
            return Ok(());
        }
        let number = self.free_number();
        let stream = Stream { tag, job, holder: Some(holder), ..Stream::default() };
        self.state.streams.insert(number, stream);
        if let Some(client) = self.clients.get_mut(&holder.client) {
            client.streams.insert(holder.stream, number);
        }
        let message = match work {
            Work::Exec(mut exec) => {
                exec.restricted = Restriction::stricter(self.restricted, exec.restricted);
                ToGuest::Exec(exec)
            }
            Work::Transfer(transfer) => ToGuest::Transfer(transfer),
            Work::Cell(mut cell) => {
                cell.restricted = Restriction::stricter(self.restricted, cell.restricted);
                if let Some(surroundings) = &mut cell.make {
                    surroundings.restricted = Restriction::stricter(self.restricted, surroundings.restricted);
                }
                ToGuest::Cell(cell)
            }
            Work::Contexts(mut request) => {
                match &mut request {
                    ContextsRequest::Make { surroundings: Surroundings { restricted, .. }, .. }
                    | ContextsRequest::Restart { restricted, .. } => {
                        *restricted = Restriction::stricter(self.restricted, *restricted);
                    }
                    ContextsRequest::List
                    | ContextsRequest::Remove { .. }
                    | ContextsRequest::Interrupt { .. } => {}
                }
                ToGuest::Contexts(request)
            }
        };
        self.send_to_guest(number, &message);
        Ok(())
    }

    /// A stream number that is not in use; the connection's own is never free.
    fn free_number(&mut self) -> u32 {
        loop {
            self.state.last_stream = self.state.last_stream.wrapping_add(1);
            let number = self.state.last_stream;
            if number != CONNECTION && !self.state.streams.contains_key(&number) {
                return number;
            }
        }
    }

    fn attach(&mut self, holder: Holder, job: u32) -> Result<(), HubError> {
        if self.held(holder).is_some() {
            return Err(HubError::StreamInUse(holder.stream));
        }
        let Some(number) = self.job(job) else {
            self.answer(holder, &no_such_job(job));
            return Ok(());
        };
        let before = self.state.streams.get_mut(&number).and_then(|stream| stream.holder.replace(holder));
        if let Some(before) = before {
            self.answer(before, &Answer::TakenOver);
            self.forget(before);
        }
        self.reopen(number);
        if let Some(client) = self.clients.get_mut(&holder.client) {
            client.streams.insert(holder.stream, number);
        }
        let input = self.state.streams.get(&number).map_or(0, |stream| stream.stdin.open());
        self.answer(holder, &Answer::Attached { input: u32::try_from(input).unwrap_or(0) });
        Ok(())
    }

    /// The stream of a running job.
    fn job(&self, job: u32) -> Option<u32> {
        self.state.streams.iter().find(|(_, stream)| stream.job == Some(job)).map(|(number, _)| *number)
    }

    /// The agent's number for a client's stream.
    fn held(&self, holder: Holder) -> Option<u32> {
        self.clients.get(&holder.client)?.streams.get(&holder.stream).copied()
    }

    pub(super) fn forget(&mut self, holder: Holder) {
        if let Some(client) = self.clients.get_mut(&holder.client) {
            client.streams.remove(&holder.stream);
        }
    }

    pub(super) fn answer(&mut self, holder: Holder, answer: &Answer) {
        if let Some(client) = self.clients.get_mut(&holder.client) {
            client.send(holder.stream, answer);
        }
    }
}

fn refused(message: String) -> Answer {
    Answer::Refused(Refused { kind: RefusalKind::BadRequest, message })
}

fn no_such_job(job: u32) -> Answer {
    refused(format!("there is no running job {job}"))
}
