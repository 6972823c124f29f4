//! Frames from the guest: every byte of them hostile.

use bathy_protocol::frame;
use bathy_protocol::message::decode;
use bathy_protocol::{
    Answer, CONNECTION, Channel, Frame, FromKeeper, Ready, StdChannel, ToHost, VERSION, WorkEnd,
};

use super::{Hub, HubError, Logged, MAX_FRAMES};

/// The most bytes of a guest's text that are passed on.
const MOST_TEXT: usize = 4096;

impl Hub {
    /// Handles bytes from the guest: at most [`MAX_FRAMES`] frames, how many of which it returns. The rest waits for the next call.
    pub fn on_guest_bytes(&mut self, bytes: &[u8], now: u64) -> Result<usize, HubError> {
        // Taken out so that a frame may borrow it while the hub changes.
        let mut decoder = std::mem::replace(&mut self.from_guest, bathy_protocol::Decoder::new(0));
        decoder.push(bytes);
        let mut count = 0;
        while count < MAX_FRAMES
            && let Some(frame) = decoder.next_frame()?
        {
            self.on_frame(&frame, now)?;
            count += 1;
        }
        self.guest_backlog = decoder.has_frame();
        self.from_guest = decoder;
        Ok(count)
    }

    fn on_frame(&mut self, frame: &Frame<'_>, now: u64) -> Result<(), HubError> {
        match (frame.stream, frame.channel) {
            (CONNECTION, Channel::Control) => match decode(frame.payload)? {
                ToHost::Ready(ready) => self.on_ready(ready, now),
                ToHost::Pong if std::mem::take(&mut self.pinged) => Ok(()),
                ToHost::Pong => Err(HubError::Repeated(CONNECTION)),
                _ => Err(HubError::NoStream(CONNECTION)),
            },
            (stream, Channel::Control) => self.on_message(stream, decode(frame.payload)?),
            (stream, Channel::Stdout) => self.on_output(stream, StdChannel::Stdout, frame.payload),
            (stream, Channel::Stderr) => self.on_output(stream, StdChannel::Stderr, frame.payload),
            (_, Channel::Stdin) => Err(HubError::WrongDirection(Channel::Stdin)),
        }
    }

    fn on_ready(&mut self, ready: Ready, now: u64) -> Result<(), HubError> {
        if ready.version != VERSION {
            return Err(HubError::Version(ready.version));
        }
        if !self.greeted || ready.epoch != self.state.epoch || self.timeline.ready != 0 {
            return Err(HubError::Epoch(ready.epoch));
        }
        self.timeline.pid1 = ready.pid1_unix_ns;
        self.timeline.mounted = ready.mounted_unix_ns;
        self.timeline.kernel = cut(ready.kernel);
        self.timeline.ready = now;
        self.broadcast(&FromKeeper::Ready(self.timeline.clone()));
        Ok(())
    }

    fn on_output(&mut self, number: u32, channel: StdChannel, bytes: &[u8]) -> Result<(), HubError> {
        let stream = self.state.streams.get_mut(&number).ok_or(HubError::NoStream(number))?;
        // An empty frame would be one that no window counts.
        if bytes.is_empty() {
            return Err(HubError::Repeated(number));
        }
        stream.output(channel).received(bytes.len())?;
        let (job, holder, abandoned) = (stream.job, stream.holder, stream.abandoned);
        if let Some(job) = job.filter(|_| !abandoned) {
            self.log(job, channel, bytes);
        }
        match holder {
            Some(holder) => {
                if let Some(client) = self.clients.get_mut(&holder.client) {
                    frame::encode(holder.stream, channel.channel(), bytes, &mut client.outbox);
                }
            }
            // No client reads it: the window closes, and the command waits or is ended.
            None if abandoned || job.is_none() => {}
            None => self.consume_logged(number, channel, u32::try_from(bytes.len()).unwrap_or(u32::MAX)),
        }
        Ok(())
    }

    /// Output of a job that comes in many small frames is written to the log at once.
    fn log(&mut self, job: u32, channel: StdChannel, bytes: &[u8]) {
        match self.to_log.last_mut().filter(|last| (last.job, last.channel) == (job, channel)) {
            Some(last) => last.bytes.extend_from_slice(bytes),
            None => self.to_log.push(Logged { job, channel, bytes: bytes.to_vec() }),
        }
    }

    fn on_message(&mut self, number: u32, message: ToHost) -> Result<(), HubError> {
        let stream = self.state.streams.get_mut(&number).ok_or(HubError::NoStream(number))?;
        let answer = match message {
            ToHost::Started { pid } => {
                if std::mem::replace(&mut stream.started, true) {
                    return Err(HubError::Repeated(number));
                }
                Answer::Started { pid }
            }
            ToHost::Grant { bytes } => {
                if bytes == 0 {
                    return Err(HubError::Repeated(number));
                }
                stream.stdin.grant(bytes)?;
                Answer::Grant { bytes }
            }
            ToHost::Eof(channel) => {
                if !stream.end_output(channel) {
                    return Err(HubError::Repeated(number));
                }
                Answer::Eof(channel)
            }
            ToHost::Exited(exit) => {
                self.end(number, WorkEnd::Exited(exit), &Answer::Exited(exit));
                return Ok(());
            }
            ToHost::Refused(mut refused) => {
                refused.message = cut(refused.message);
                let end = WorkEnd::Refused(refused.message.clone());
                self.end(number, end, &Answer::Refused(refused));
                return Ok(());
            }
            ToHost::Ready(_) | ToHost::Pong => return Err(HubError::NoStream(number)),
        };
        if let Some(holder) = stream.holder {
            self.answer(holder, &answer);
        }
        Ok(())
    }

    /// A command or cell has ended.
    fn end(&mut self, number: u32, end: WorkEnd, answer: &Answer) {
        let Some(stream) = self.state.streams.remove(&number) else { return };
        if let Some(holder) = stream.holder {
            self.answer(holder, answer);
            self.forget(holder);
        }
        self.send_to_owner(&FromKeeper::WorkEnded { tag: stream.tag, job: stream.job, end });
    }
}

/// Truncates a text of the guest's, so that it fits into messages with other fields and the same size limit.
fn cut(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(MOST_TEXT));
    text
}
