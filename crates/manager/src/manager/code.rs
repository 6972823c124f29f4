//! Code in the interpreters of a running sandbox, each cell recorded.

use bathy_client::command;
use bathy_client::interpreter::{self, CellRequest, ContextInfo, InterpreterError, Language};
use bathy_protocol::Restriction;
use bathy_protocol::cell::{Cell, ContextsRequest, Surroundings};
use bathy_spec::CommandSpec;

use super::{Manager, ManagerError, Sandboxed};

/// The only stream of a connection that is made for one cell.
const STREAM: u32 = 1;

/// A cell that is recorded and ready to be sent.
#[derive(Clone, Debug)]
pub struct BegunCell {
    /// What the agent is asked.
    pub cell: Cell,
    /// Its number in the audit log.
    pub tag: u64,
}

impl Manager {
    /// Records a cell and makes the request for it, after a restart of its interpreter if it wants one; [`interpreter::run_cell`] sends it on any connection.
    pub fn begin_cell(
        &mut self,
        sandbox: &Sandboxed,
        request: &CellRequest,
    ) -> Result<BegunCell, ManagerError> {
        request.check()?;
        if request.restart {
            self.restart_context(sandbox, request.context_name())?;
        }
        // A context that was made by hand has its surroundings already.
        let make = match request.context {
            None => Some(self.surroundings(sandbox, None)?),
            Some(_) => None,
        };
        let cell = request.cell(make, self.floor(sandbox));
        let tag = self.new_tag()?;
        self.note(&sandbox.record, command::code_started(&cell, tag))?;
        Ok(BegunCell { cell, tag })
    }

    /// Makes a context and starts its interpreter.
    pub fn make_context(
        &mut self,
        sandbox: &Sandboxed,
        context: &str,
        language: Language,
        cwd: Option<String>,
    ) -> Result<Vec<ContextInfo>, ManagerError> {
        interpreter::check_context_name(context)?;
        let surroundings = self.surroundings(sandbox, cwd)?;
        let context = context.to_owned();
        self.contexts(sandbox, ContextsRequest::Make { context, language, surroundings })
    }

    /// Asks about, restarts, removes or interrupts contexts. The answer is the list of them.
    pub fn contexts(
        &mut self,
        sandbox: &Sandboxed,
        mut request: ContextsRequest,
    ) -> Result<Vec<ContextInfo>, ManagerError> {
        if let ContextsRequest::Restart { restricted, .. } = &mut request {
            *restricted = Restriction::stricter(self.floor(sandbox), *restricted);
        }
        let mut connection = self.connect(sandbox)?;
        let tag = self.new_tag()?;
        Ok(interpreter::run_contexts(&mut connection, STREAM, request, tag)?)
    }

    /// Starts the interpreter of a context anew, if the context exists: a new one has nothing to lose.
    fn restart_context(&mut self, sandbox: &Sandboxed, context: &str) -> Result<(), ManagerError> {
        let listed = self.contexts(sandbox, ContextsRequest::List)?;
        if listed.iter().any(|known| known.context == context) {
            let request = ContextsRequest::Restart { context: context.to_owned(), restricted: None };
            self.contexts(sandbox, request)?;
        }
        Ok(())
    }

    /// What every command of a sandbox is started with.
    fn surroundings(
        &mut self,
        sandbox: &Sandboxed,
        cwd: Option<String>,
    ) -> Result<Surroundings, ManagerError> {
        let command = CommandSpec { cwd: cwd.map(String::into_bytes), ..CommandSpec::default() };
        let image = self.image_config(sandbox)?;
        Ok(command::surroundings(&command, &sandbox.record.spec, &image, self.floor(sandbox)))
    }

    fn new_tag(&self) -> Result<u64, ManagerError> {
        command::new_tag().map_err(|error| ManagerError::File("/dev/urandom".into(), error))
    }
}

impl From<InterpreterError> for ManagerError {
    fn from(error: InterpreterError) -> Self {
        match error {
            InterpreterError::Connection(error) => Self::Connection(error),
            other => Self::Interpreter(Box::new(other)),
        }
    }
}
