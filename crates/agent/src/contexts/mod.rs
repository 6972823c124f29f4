//! The interpreters that run code with state: a registry of contexts, served by the agent's event loop.
//!
//! A context is one process that runs a driver of ours (`python.py` and the like), which reports values and
//! errors on a separate channel. Plain output comes through pipes. Both become records on the stream of the
//! running cell. Nothing here blocks: the server polls the descriptors and deadlines.
//!
//! Memory is bounded: an interpreter is not read while its cell's stream has enough queued (backpressure);
//! output beyond the cell's limit is read, counted and discarded.
//! beyond a cell's own limit is read, counted and thrown away.

mod background;
mod bash;
mod cell;
mod context;
mod languages;
mod node;
mod process;
mod python;
mod stream;
#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;
use std::time::Instant;

use bathy_protocol::cell::{
    Cell, ContextInfo, ContextsRequest, Interrupter, Language, MAX_CODE, RecordKind, Surroundings,
    put_message,
};
use bathy_protocol::{Exit, Refused, ToGuest, ToHost, WindowError};
use rustix::event::PollFlags;

use self::cell::Task;
use self::context::Context;
pub use self::context::ContextPart;
use self::languages::{Driver, Sources};
use self::process::MAX_PACKET;
use self::stream::AnswerStream;
use crate::command::send_message;
use crate::processes::Processes;
use crate::spawn::{Launcher, bad_request};

const MAX_CONTEXTS: usize = 32;
const MAX_WAITING: usize = 64;
const MAX_NAME: usize = 64;

/// The most bytes of queued code and parameters in all contexts together.
const MAX_WAITING_CODE: usize = 32 * 1024 * 1024;

/// What interpreters are started and ended with.
#[derive(Clone, Copy)]
pub struct Tools<'a> {
    pub launcher: &'a Launcher,
    pub processes: &'a Processes,
}

/// [`Tools`], and what the registry adds to them.
struct Means<'a> {
    launcher: &'a Launcher,
    processes: &'a Processes,
    sources: &'a mut Sources,
    /// No interpreter is started any more.
    closing: bool,
}

/// A request that is answered once the context's interpreter is executed.
struct Pending {
    stream: AnswerStream,
    context: String,
    /// The request created the context, which is removed if its interpreter does not start.
    made: bool,
}

/// All contexts of the sandbox.
#[derive(Default)]
pub struct Contexts {
    contexts: Vec<Context>,
    pending: Vec<Pending>,
    /// Ended cells whose records are not sent yet.
    ending: Vec<AnswerStream>,
    sources: Sources,
    buffer: Vec<u8>,
    closing: bool,
}

impl Contexts {
    /// Queues a cell, or refuses it. Returns the pid of the interpreter, or 0 if it has yet to be started.
    pub fn run(&mut self, stream: u32, cell: Cell) -> Result<u32, Refused> {
        check_cell(&cell)?;
        let waiting: usize = self.contexts.iter().flat_map(Context::tasks).map(Task::weight).sum();
        if waiting.saturating_add(cell::weight(&cell)) > MAX_WAITING_CODE {
            return Err(bad_request("too much code waits in this sandbox already"));
        }
        let index = match (self.index(&cell.context), &cell.make) {
            (Ok(index), _) => index,
            (Err(unknown), None) => return Err(unknown),
            (Err(_), Some(surroundings)) => {
                self.check_new(&cell.context)?;
                let language = runs_as(cell.language);
                self.contexts.push(Context::new(cell.context.clone(), language, surroundings.clone()));
                self.contexts.len() - 1
            }
        };
        let Some(context) = self.contexts.get_mut(index) else { return Err(self.unknown(&cell.context)) };
        if !cell.language.runs_in(context.language) {
            return Err(bad_request(&format!(
                "the context {} is for {}, not for {}",
                context.name,
                context.language.as_str(),
                cell.language.as_str()
            )));
        }
        if !context.covers(cell.restricted) {
            return Err(bad_request(&context.less_restricted()));
        }
        if context.queue_length() >= MAX_WAITING {
            return Err(bad_request(&format!("{MAX_WAITING} cells wait in this context already")));
        }
        context.enqueue(Task::new(cell, AnswerStream::new(stream)));
        Ok(context.pid().unwrap_or(0))
    }

    /// Handles a request about contexts, or refuses it. Returns the list of contexts, or `None` if the answer
    /// comes later.
    pub fn change(
        &mut self,
        stream: u32,
        request: ContextsRequest,
        tools: Tools<'_>,
    ) -> Result<Option<u32>, Refused> {
        let stream = AnswerStream::new(stream);
        match request {
            ContextsRequest::List => {}
            ContextsRequest::Make { context, language, surroundings } => {
                self.make(context.clone(), language, surroundings, tools)?;
                self.pending.push(Pending { stream, context, made: true });
                return Ok(None);
            }
            ContextsRequest::Restart { context, restricted } => {
                let index = self.index(&context)?;
                let (mut means, contexts, ending) = self.parts(tools);
                if let Some(context) = contexts.get_mut(index) {
                    context.clear(&means, ending);
                    context.restrict(restricted);
                    context.start(&mut means)?;
                }
                self.pending.push(Pending { stream, context, made: false });
                return Ok(None);
            }
            ContextsRequest::Remove { context } => {
                let mut removed = self.contexts.remove(self.index(&context)?);
                let (means, _, ending) = self.parts(tools);
                removed.clear(&means, ending);
            }
            ContextsRequest::Interrupt { context } => {
                let index = self.index(&context)?;
                if let Some(context) = self.contexts.get_mut(index) {
                    context.interrupt(Interrupter::Asked, &mut self.ending);
                }
            }
        }
        self.list(stream);
        Ok(Some(0))
    }

    /// Answers with the list of contexts.
    fn list(&mut self, mut answer: AnswerStream) {
        let list: Vec<ContextInfo> = self.contexts.iter().map(Context::info).collect();
        answer.put_with(|records| put_message(RecordKind::Contexts, &list, records));
        answer.end(Exit::Code(0));
        self.ending.push(answer);
    }

    /// Answers requests whose interpreters were executed or failed.
    fn settle(&mut self, tools: Tools<'_>, outbox: &mut Vec<u8>) {
        for request in std::mem::take(&mut self.pending) {
            let context = self.contexts.iter().find(|context| context.name == request.context);
            let unknown = || Some(Err(self.unknown(&request.context)));
            match context.map_or_else(unknown, Context::launched) {
                None => self.pending.push(request),
                Some(Ok(pid)) => {
                    send_message(request.stream.number, &ToHost::Started { pid }, outbox);
                    self.list(request.stream);
                }
                Some(Err(refused)) => {
                    send_message(request.stream.number, &ToHost::Refused(refused), outbox);
                    if let Some(index) = self.index(&request.context).ok().filter(|_| request.made) {
                        let mut failed = self.contexts.remove(index);
                        let (means, _, ending) = self.parts(tools);
                        failed.clear(&means, ending);
                    }
                }
            }
        }
    }

    fn make(
        &mut self,
        name: String,
        language: Language,
        surroundings: Surroundings,
        tools: Tools<'_>,
    ) -> Result<(), Refused> {
        if self.contexts.iter().any(|context| context.name == name) {
            return Err(bad_request(&format!("there is a context {name} already")));
        }
        self.check_new(&name)?;
        let mut context = Context::new(name, runs_as(language), surroundings);
        let (mut means, contexts, _) = self.parts(tools);
        context.start(&mut means)?;
        contexts.push(context);
        Ok(())
    }

    fn check_new(&self, name: &str) -> Result<(), Refused> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(allowed) {
            return Err(bad_request(&format!(
                "a context's name is 1 to {MAX_NAME} letters, digits, dots, dashes and underscores"
            )));
        }
        if self.contexts.len() >= MAX_CONTEXTS {
            return Err(bad_request(&format!(
                "there are {MAX_CONTEXTS} contexts already, which is the most: remove one first"
            )));
        }
        Ok(())
    }

    fn index(&self, name: &str) -> Result<usize, Refused> {
        let found = self.contexts.iter().position(|context| context.name == name);
        found.ok_or_else(|| self.unknown(name))
    }

    fn unknown(&self, name: &str) -> Refused {
        let names: Vec<&str> = self.contexts.iter().map(|context| context.name.as_str()).collect();
        let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let name: String = name.chars().take(MAX_NAME).collect();
        bad_request(&format!("there is no context {name:?} (there is: {there})"))
    }

    fn parts<'a>(
        &'a mut self,
        tools: Tools<'a>,
    ) -> (Means<'a>, &'a mut Vec<Context>, &'a mut Vec<AnswerStream>) {
        let Tools { launcher, processes } = tools;
        let means = Means { launcher, processes, sources: &mut self.sources, closing: self.closing };
        (means, &mut self.contexts, &mut self.ending)
    }

    /// Whether a stream belongs to a cell.
    pub fn has(&self, stream: u32) -> bool {
        let tasks = self.contexts.iter().flat_map(Context::tasks).map(|task| &task.stream);
        let pending = self.pending.iter().map(|request| &request.stream);
        tasks.chain(pending).chain(&self.ending).any(|known| known.is(stream))
    }

    /// The number of streams.
    pub fn len(&self) -> usize {
        self.contexts.iter().flat_map(Context::tasks).count() + self.pending.len() + self.ending.len()
    }

    /// Handles a message of the host for a stream, which may have ended already.
    pub fn request(&mut self, number: u32, message: &ToGuest) -> Result<(), WindowError> {
        match message {
            ToGuest::Signal(_) => {
                for context in &mut self.contexts {
                    context.interrupt_stream(number, &mut self.ending);
                }
                Ok(())
            }
            ToGuest::Abandon => {
                if let Some(stream) = self.stream(number) {
                    stream.abandon();
                }
                for context in &mut self.contexts {
                    context.interrupt_stream(number, &mut self.ending);
                }
                Ok(())
            }
            other => self.stream(number).map_or(Ok(()), |stream| stream.request(other)),
        }
    }

    fn stream(&mut self, number: u32) -> Option<&mut AnswerStream> {
        let tasks = self.contexts.iter_mut().flat_map(Context::tasks_mut).map(|task| &mut task.stream);
        let pending = self.pending.iter_mut().map(|request| &mut request.stream);
        tasks.chain(pending).chain(&mut self.ending).find(|stream| stream.is(number))
    }

    /// Registers the descriptors to poll; the number is the context's.
    pub fn watch<'a>(
        &'a self,
        now: Instant,
        mut add: impl FnMut(usize, ContextPart, BorrowedFd<'a>, PollFlags),
    ) {
        for (index, context) in self.contexts.iter().enumerate() {
            context.watch(now, |part, fd, flags| add(index, part, fd, flags));
        }
    }

    pub fn deadline(&self, now: Instant) -> Option<Instant> {
        self.contexts.iter().filter_map(|context| context.deadline(now)).min()
    }

    /// Handles a ready event source.
    pub fn serve(&mut self, index: usize, part: ContextPart) {
        self.buffer.resize(MAX_PACKET, 0);
        if let Some(context) = self.contexts.get_mut(index) {
            context.serve(part, &mut self.buffer);
        }
    }

    /// Handles the end of a child. True if it was an interpreter.
    pub fn reaped(&mut self, pid: u32, exit: Exit, tools: Tools<'_>) -> bool {
        let (means, contexts, _) = self.parts(tools);
        contexts.iter_mut().any(|context| context.reaped(pid, exit, &means))
    }

    /// Advances all contexts and queues records until the outbox holds `limit` bytes.
    pub fn advance(&mut self, tools: Tools<'_>, outbox: &mut Vec<u8>, limit: usize) {
        if self.contexts.is_empty() && self.pending.is_empty() && self.ending.is_empty() {
            return;
        }
        // Sending first makes space for reading.
        self.flush(outbox, limit);
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(MAX_PACKET, 0);
        let (mut means, contexts, ending) = self.parts(tools);
        for context in contexts.iter_mut() {
            context.advance(&mut means, &mut buffer, ending);
        }
        self.buffer = buffer;
        self.settle(tools, outbox);
        self.flush(outbox, limit);
    }

    fn flush(&mut self, outbox: &mut Vec<u8>, limit: usize) {
        for task in self.contexts.iter_mut().flat_map(Context::tasks_mut) {
            task.stream.flush(outbox, limit);
        }
        self.ending.retain_mut(|stream| {
            stream.flush(outbox, limit);
            !stream.is_over(outbox)
        });
    }

    /// The session has ended: no client waits for any cell. The contexts remain.
    pub fn end_conversation(&mut self) {
        self.ending.clear();
        self.pending.clear();
        for context in &mut self.contexts {
            context.end_conversation();
        }
    }

    /// From now on no interpreter is started.
    pub fn close(&mut self) {
        self.closing = true;
    }
}

fn check_cell(cell: &Cell) -> Result<(), Refused> {
    if cell.code.len() > MAX_CODE {
        return Err(bad_request(&format!(
            "the code has {} bytes; the most is {MAX_CODE}: put data into files",
            cell.code.len()
        )));
    }
    if Driver::of(cell.language).refuses_zero_bytes() && cell.code.contains('\0') {
        return Err(bad_request(&format!("{} code cannot contain a zero byte", cell.language.as_str())));
    }
    if cell.cwd.as_ref().is_some_and(|cwd| cwd.contains('\0')) {
        return Err(bad_request("the working directory contains a zero byte"));
    }
    let proper = |entry: &String| !entry.contains('\0') && entry.find('=').is_some_and(|at| at > 0);
    match cell.env.iter().find(|entry| !proper(entry)) {
        Some(entry) => {
            let start: String = entry.chars().take(40).collect();
            Err(bad_request(&format!("{start:?} is no variable: they are given as NAME=value")))
        }
        None => Ok(()),
    }
}

/// The language of the context that runs this one.
fn runs_as(language: Language) -> Language {
    match language {
        Language::TypeScript => Language::JavaScript,
        other => other,
    }
}
