//! One context: its interpreter, the running cell and the queue.
//!
//! Events change plain fields; [`Context::advance`] then takes every step that has become possible.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use bathy_protocol::cell::{CellEnd, ContextInfo, Interrupter, Language, Surroundings};
use bathy_protocol::{Exit, Refused, Restriction};
use rustix::event::PollFlags;
use rustix::process::Signal;

use super::Means;
use super::background::BackgroundOutput;
use super::cell::{Interrupt, Task, report_of};
use super::languages::Driver;
use super::process::{ChannelRead, Held, InterpreterProcess, ProcessEnd};
use super::stream::AnswerStream;
use crate::spawn::Launching;

/// The event source of a context that became ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextPart {
    /// It is now known whether the interpreter was executed.
    Launch,
    /// The interpreter can read more of a request.
    Requests,
    /// Standard output (0) or error (1) is readable.
    Output(usize),
    /// A packet has arrived.
    Replies,
}

pub struct Context {
    pub name: String,
    pub language: Language,
    /// What its interpreter is started with.
    pub surroundings: Surroundings,
    process: Option<InterpreterProcess>,
    current: Option<Task>,
    waiting: VecDeque<Task>,
    background: BackgroundOutput,
    lost: Option<String>,
    /// Why the last attempt to start its interpreter failed.
    refused: Option<Refused>,
}

impl Context {
    /// A context without an interpreter.
    pub fn new(name: String, language: Language, surroundings: Surroundings) -> Self {
        let (background, waiting) = (BackgroundOutput::default(), VecDeque::new());
        let (process, current, lost, refused) = (None, None, None, None);
        Self { name, language, surroundings, process, current, waiting, background, lost, refused }
    }

    /// The entry for the list of contexts.
    pub fn info(&self) -> ContextInfo {
        ContextInfo {
            context: self.name.clone(),
            language: self.language,
            pid: self.pid(),
            busy: self.current.is_some(),
            waiting: u32::try_from(self.waiting.len()).unwrap_or(u32::MAX),
            cells: self.process.as_ref().map_or(0, |process| process.cells),
        }
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().filter(|process| process.end.is_none()).map(|process| process.pid)
    }

    pub fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.current.iter().chain(&self.waiting)
    }

    pub fn tasks_mut(&mut self) -> impl Iterator<Item = &mut Task> {
        self.current.iter_mut().chain(&mut self.waiting)
    }

    /// The length of the queue.
    pub fn queue_length(&self) -> usize {
        self.waiting.len()
    }

    /// Adds a cell to the queue.
    pub fn enqueue(&mut self, task: Task) {
        self.waiting.push_back(task);
    }

    /// Starts the interpreter, which must not be running.
    pub fn start(&mut self, means: &mut Means<'_>) -> Result<(), Refused> {
        self.refused = None;
        self.process = Some(InterpreterProcess::start(self.language, &self.surroundings, means)?);
        Ok(())
    }

    /// Whether its interpreter, if it has one, is at least this restricted. A running interpreter cannot be
    /// restricted further.
    pub fn covers(&self, wanted: Option<Restriction>) -> bool {
        self.process.is_none() || Restriction::covers(self.surroundings.restricted, wanted)
    }

    /// The refusal for code that requires more restrictions.
    pub fn less_restricted(&self) -> String {
        format!(
            "the context {} was started with fewer restrictions than apply now: run the code in a new context, or \
             restart this one, which loses its state",
            self.name
        )
    }

    /// The next interpreter is restricted at least this far.
    pub fn restrict(&mut self, restricted: Option<Restriction>) {
        self.surroundings.restricted = Restriction::stricter(self.surroundings.restricted, restricted);
    }

    /// Whether its interpreter was executed, or why not; `None` while that is unknown.
    pub fn launched(&self) -> Option<Result<u32, Refused>> {
        if self
            .process
            .as_ref()
            .is_some_and(|process| process.launching.is_some() || process.refused.is_some())
        {
            return None;
        }
        Some(self.refused.clone().map_or_else(|| Ok(self.pid().unwrap_or(0)), Err))
    }

    /// Registers the descriptors to poll.
    pub fn watch<'a>(&'a self, now: Instant, mut add: impl FnMut(ContextPart, BorrowedFd<'a>, PollFlags)) {
        let Some(process) = &self.process else { return };
        if let Some(decided) = process.launching.as_ref().and_then(Launching::decided) {
            add(ContextPart::Launch, decided, PollFlags::IN);
        }
        if let Some(requests) = process.requests().filter(|_| process.is_writing()) {
            add(ContextPart::Requests, requests, PollFlags::OUT);
        }
        for number in 0..2 {
            let wanted = self.accepts_output(number) && process.paused_until(number, now).is_none();
            if let Some(output) = process.output(number).filter(|_| wanted) {
                add(ContextPart::Output(number), output, PollFlags::IN);
            }
        }
        if let Some(replies) = process.replies().filter(|_| self.accepts_packets()) {
            add(ContextPart::Replies, replies, PollFlags::IN);
        }
    }

    pub fn deadline(&self, now: Instant) -> Option<Instant> {
        let process = self.process.as_ref()?;
        let starting = (!process.ready && process.end.is_none()).then_some(process.ready_by);
        let executed = process.launching.as_ref().map(Launching::deadline);
        let running = self.running_deadline();
        let paused_until = |number| process.paused_until(number, now).filter(|_| self.accepts_output(number));
        [executed, starting, process.closed_until(), running, paused_until(0), paused_until(1)]
            .into_iter()
            .flatten()
            .min()
    }

    fn running_deadline(&self) -> Option<Instant> {
        let process = self.process.as_ref()?;
        if process.end.is_some() || matches!(process.held, Some(Held::Finished(_))) {
            return None;
        }
        let running = self.current.as_ref()?.running.as_ref()?;
        match &running.interrupt {
            None => running.timeout,
            Some(interrupt) => Some(interrupt.again.unwrap_or(interrupt.kill)),
        }
    }

    fn running(&self) -> Option<&Task> {
        self.current.as_ref().filter(|task| task.running.is_some())
    }

    fn accepts_output(&self, number: usize) -> bool {
        let owed = |process: &InterpreterProcess| {
            process.held.is_none() || process.owed.get(number).is_some_and(|owed| *owed > 0)
        };
        self.process.as_ref().is_some_and(owed)
            && self.running().is_none_or(|task| task.accepts_output(number))
    }

    fn accepts_packets(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.held.is_none())
            && self.running().is_none_or(|task| task.stream.has_capacity())
    }

    /// Handles a ready event source.
    pub fn serve(&mut self, part: ContextPart, buffer: &mut [u8]) {
        match part {
            ContextPart::Launch => {
                if let Some(process) = &mut self.process {
                    process.settle(self.language, Instant::now());
                }
            }
            ContextPart::Requests => {
                if let Some(process) = &mut self.process {
                    process.write_request();
                }
            }
            ContextPart::Output(number) if self.accepts_output(number) => {
                self.read_output(number, buffer);
            }
            ContextPart::Replies if self.accepts_packets() => {
                self.receive(buffer);
            }
            ContextPart::Output(_) | ContextPart::Replies => {}
        }
    }

    /// Reads an output once. False if there was nothing to read.
    fn read_output(&mut self, number: usize, buffer: &mut [u8]) -> bool {
        let Some(process) = &mut self.process else { return false };
        let Some(bytes) = process.read_output(number, buffer) else { return false };
        match self.current.as_mut().filter(|task| task.running.is_some()) {
            Some(task) => task.output(number, bytes),
            None => self.background.push(bytes),
        }
        true
    }

    /// Reads a packet. False if there was none.
    fn receive(&mut self, buffer: &mut [u8]) -> bool {
        let Some(process) = &mut self.process else { return false };
        let task = self.current.as_mut().filter(|task| task.running.is_some());
        match (process.receive(buffer), task) {
            (ChannelRead::Nothing, _) => return false,
            (ChannelRead::Packet(b'y', _), _) if !process.ready => process.ready = true,
            (ChannelRead::Packet(kind @ (b'p' | b'd' | b'r' | b'e'), json), Some(_)) => {
                process.hold(Held::Value(kind, json));
            }
            // The cell that this report is about was read to its end.
            (ChannelRead::Packet(b'f', json), Some(_)) if !process.is_writing() => {
                process.hold(Held::Finished(json));
            }
            (_, Some(task)) => task.stray(),
            (_, None) => {}
        }
        true
    }

    /// Handles the end of a child. True if it was this context's interpreter.
    pub fn reaped(&mut self, pid: u32, exit: Exit, means: &Means<'_>) -> bool {
        match &mut self.process {
            Some(process) if process.pid == pid => {
                // The launch is decided at the latest now, because the process has ended.
                process.settle(self.language, Instant::now());
                if process.end.is_none() {
                    process.end = Some(ProcessEnd::Died(exit));
                    // Its children would keep writing to pipes that no cell owns.
                    means.processes.end_session(pid);
                }
                true
            }
            _ => false,
        }
    }

    pub fn kill(&mut self, end: ProcessEnd, means: &Means<'_>) {
        if let Some(process) = self.process.as_mut().filter(|process| process.end.is_none()) {
            process.end = Some(end);
            process.kill(means.processes);
        }
    }

    /// Ends the interpreter, the running cell and the queue.
    pub fn clear(&mut self, means: &Means<'_>, done: &mut Vec<AnswerStream>) {
        self.kill(ProcessEnd::Unwanted, means);
        let used = self.process.take().is_some_and(|process| process.cells > 0);
        self.lost = used.then(|| "the context was restarted".to_owned()).or_else(|| self.lost.take());
        self.background = BackgroundOutput::default();
        if let Some(task) = self.current.take() {
            let (end, lost) = match task.running {
                Some(_) => (CellEnd::Killed, true),
                None => (CellEnd::Cancelled, false),
            };
            done.push(task.end(end, lost));
        }
        self.cancel_waiting(done);
    }

    /// Cancels the queued cells.
    pub fn cancel_waiting(&mut self, done: &mut Vec<AnswerStream>) {
        done.extend(self.waiting.drain(..).map(|task| task.end(CellEnd::Cancelled, false)));
    }

    /// Interrupts the cell of this stream, or removes it from the queue.
    pub fn interrupt_stream(&mut self, stream: u32, done: &mut Vec<AnswerStream>) {
        if self.current.as_ref().is_some_and(|task| task.stream.is(stream)) {
            self.interrupt(Interrupter::Asked, done);
        } else if let Some(index) = self.waiting.iter().position(|task| task.stream.is(stream))
            && let Some(task) = self.waiting.remove(index)
        {
            done.push(task.end(CellEnd::Cancelled, false));
        }
    }

    /// Interrupts the running cell.
    pub fn interrupt(&mut self, by: Interrupter, done: &mut Vec<AnswerStream>) {
        let Some(task) = &mut self.current else { return };
        let grace = Duration::from_millis(task.cell.grace_ms.into());
        match (&mut task.running, &self.process) {
            (Some(running), Some(process)) => {
                process.interrupt();
                let now = Instant::now();
                let (again, kill) = (Some(now + grace / 2), now + grace);
                running.interrupt.get_or_insert(Interrupt { by, again, kill });
            }
            // Its interpreter may continue to start, for the next cell.
            _ => done.extend(self.current.take().map(|task| task.end(CellEnd::Cancelled, false))),
        }
    }

    /// The session has ended: no client waits for these cells.
    pub fn end_conversation(&mut self) {
        self.waiting.clear();
        match &mut self.current {
            Some(task) if task.running.is_some() => {
                task.stream.forget();
                self.interrupt(Interrupter::Asked, &mut Vec::new());
            }
            _ => self.current = None,
        }
    }

    /// Takes every step that is possible now.
    pub fn advance(&mut self, means: &mut Means<'_>, buffer: &mut [u8], done: &mut Vec<AnswerStream>) {
        self.keep_time(means, done);
        // Terminates: each step ends something, begins something, or reads a packet that has already arrived.
        while self.forward_held(means, done)
            || self.drain_ended(buffer)
            || self.start_next(means, buffer, done)
        {}
    }

    fn keep_time(&mut self, means: &Means<'_>, done: &mut Vec<AnswerStream>) {
        let now = Instant::now();
        let Some(process) = &mut self.process else { return };
        if process.launching.as_ref().is_some_and(|launching| launching.deadline() <= now) {
            return process.settle(self.language, now);
        }
        if process.closed_until().is_some_and(|until| now >= until) {
            return self.kill(ProcessEnd::ChannelClosed, means);
        }
        if !process.ready && process.end.is_none() && now >= process.ready_by {
            return self.kill(ProcessEnd::NotReady, means);
        }
        if self.running_deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        let running = self.current.as_mut().and_then(|task| task.running.as_mut());
        match running.and_then(|running| running.interrupt.as_mut()) {
            None => self.interrupt(Interrupter::Timeout, done),
            Some(interrupt) if now >= interrupt.kill => self.kill(ProcessEnd::Stuck, means),
            Some(interrupt) => {
                interrupt.again = None;
                if let Some(process) = &self.process {
                    process.interrupt();
                }
            }
        }
    }

    /// Forwards held records, once the output before them is forwarded.
    fn forward_held(&mut self, means: &Means<'_>, done: &mut Vec<AnswerStream>) -> bool {
        let Some(process) = self.process.as_mut().filter(|process| process.owed == [0; 2]) else {
            return false;
        };
        match process.held.take() {
            None => return false,
            Some(Held::Value(kind, json)) => {
                if let Some(task) = &mut self.current {
                    task.value(kind, &json);
                }
            }
            Some(Held::Finished(json)) => {
                done.extend(self.current.take().map(|task| task.end(report_of(&json), false)));
            }
            Some(Held::Ended(end)) => self.mark_dead(end, means, done),
        }
        true
    }

    /// For an ended process: reads what it sent before, then schedules its end as the next record.
    fn drain_ended(&mut self, buffer: &mut [u8]) -> bool {
        let Some((end, process)) = self.process.as_mut().and_then(|process| Some((process.end?, process)))
        else {
            return false;
        };
        if process.held.is_some() {
            return false;
        }
        if matches!(end, ProcessEnd::Died(_)) {
            if !self.accepts_packets() {
                return false;
            }
            if self.receive(buffer) {
                return true;
            }
        }
        if let Some(process) = &mut self.process {
            process.hold(Held::Ended(end));
        }
        true
    }

    /// The process has ended and its output was read: reports its end.
    fn mark_dead(&mut self, end: ProcessEnd, means: &Means<'_>, done: &mut Vec<AnswerStream>) {
        let Some(mut process) = self.process.take() else { return };
        self.refused = process.refused.take();
        let killed = Exit::Signal(u8::try_from(Signal::KILL.as_raw()).unwrap_or(u8::MAX));
        let no_memory =
            end == ProcessEnd::Died(killed) && means.processes.out_of_memory_kills() > process.memory_kills;
        let why = match no_memory {
            true => "memory ran out, and the interpreter was killed".to_owned(),
            false => end.why(Driver::of(self.language).program()),
        };
        // A cell that was about to run in it gets another interpreter.
        if let Some(task) = self.current.take_if(|task| task.running.is_some() || !process.ready) {
            let end = match end {
                ProcessEnd::NotExecuted => CellEnd::NotStarted(
                    self.refused.as_ref().map_or_else(|| why.clone(), |it| it.message.clone()),
                ),
                _ if !process.ready => CellEnd::NotStarted(self.start_failure(why.clone())),
                ProcessEnd::Died(_) if no_memory => CellEnd::OutOfMemory,
                ProcessEnd::Died(exit) => CellEnd::Exited(exit),
                ProcessEnd::ChannelClosed => CellEnd::ChannelClosed,
                ProcessEnd::Stuck | ProcessEnd::NotReady | ProcessEnd::Unwanted => CellEnd::Killed,
            };
            let lost = task.running.is_some();
            done.push(task.end(end, lost));
        }
        if process.cells > 0 {
            self.lost = Some(why);
        }
    }

    /// Why no interpreter became ready, with the end of its output.
    fn start_failure(&mut self, why: String) -> String {
        match self.background.take_excerpt() {
            Some(text) => format!("{why} before it ran anything: {text}"),
            None => format!("{why} before it ran anything"),
        }
    }

    /// Starts the next cell.
    fn start_next(&mut self, means: &mut Means<'_>, buffer: &mut [u8], done: &mut Vec<AnswerStream>) -> bool {
        if means.closing {
            self.cancel_waiting(done);
        }
        if self.current.is_none() {
            self.current = self.waiting.pop_front();
        }
        let Some(task) = self.current.as_mut().filter(|task| task.running.is_none()) else { return false };
        let restricted = task.cell.restricted;
        match &self.process {
            None => {
                if let Some(surroundings) = task.cell.make.take() {
                    self.surroundings = surroundings;
                }
                self.restrict(restricted);
                if let Err(refused) = self.start(means) {
                    let end = CellEnd::NotStarted(refused.message);
                    done.extend(self.current.take().map(|task| task.end(end, false)));
                }
                true
            }
            // It was started for another cell while this one was queued.
            Some(process)
                if process.end.is_none()
                    && !Restriction::covers(self.surroundings.restricted, restricted) =>
            {
                let end = CellEnd::NotStarted(self.less_restricted());
                done.extend(self.current.take().map(|task| task.end(end, false)));
                true
            }
            Some(process) if process.ready && process.end.is_none() && process.held.is_none() => {
                self.begin(means, buffer, done);
                true
            }
            Some(_) => false,
        }
    }

    /// Sends the current cell to the interpreter.
    fn begin(&mut self, means: &Means<'_>, buffer: &mut [u8], done: &mut Vec<AnswerStream>) {
        self.read_leftovers(buffer);
        let (Some(process), Some(mut task)) = (&mut self.process, self.current.take()) else { return };
        process.memory_kills = means.processes.out_of_memory_kills();
        let (bytes, last) = self.background.take();
        task.begin(process.cells == 0, self.lost.take(), (bytes, &last));
        process.cells = process.cells.saturating_add(1);
        let sent = process.send(&task.fields());
        // The large fields were needed until now.
        (task.cell.code, task.cell.env, task.cell.make) = (String::new(), Vec::new(), None);
        match sent {
            Ok(()) => self.current = Some(task),
            Err(error) => {
                let end = CellEnd::NotStarted(format!("the code could not be sent: {error}"));
                done.push(task.end(end, false));
            }
        }
    }

    /// Data that is in the pipes now was written before the next cell.
    fn read_leftovers(&mut self, buffer: &mut [u8]) {
        for number in 0..2 {
            let mut left = self.process.as_ref().map_or(0, |process| process.waiting(number));
            while left > 0 {
                let most = left.min(buffer.len());
                let part = buffer.get_mut(..most).unwrap_or_default();
                let Some(process) = &mut self.process else { return };
                let Some(bytes) = process.read_output(number, part) else { break };
                self.background.push(bytes);
                left = left.saturating_sub(bytes.len());
            }
        }
    }
}
