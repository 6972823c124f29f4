//! Runs code in the interpreters of a running sandbox and records each cell.

use bathy_audit::What;
use bathy_client::command;
use bathy_client::interpreter::{self, CellRequest, ContextInfo, InterpreterError, Language, PreparedCell};
use bathy_protocol::Restriction;
use bathy_protocol::cell::{ContextsRequest, Surroundings};
use bathy_spec::CommandSpec;

use super::{Manager, ManagerError, Sandboxed};

/// The only stream of a connection that is opened for one cell.
const STREAM: u32 = 1;

impl Manager {
    /// Records a cell and builds its request, then restarts its interpreter if the request asks for that.
    /// [`interpreter::run_cell`] sends it on any connection.
    pub fn begin_cell(
        &mut self,
        sandbox: &Sandboxed,
        request: &CellRequest,
    ) -> Result<PreparedCell, ManagerError> {
        request.check()?;
        // A context that was created explicitly has its environment already.
        let make = match request.context {
            None => Some(self.surroundings(sandbox, None)?),
            Some(_) => None,
        };
        let cell = request.cell(make, self.floor(sandbox));
        let tag = self.new_tag()?;
        self.note(&sandbox.record, command::code_started(&cell, tag))?;
        if request.restart
            && let Err(error) = self.restart_context(sandbox, request.context_name())
        {
            let exit = "not started: its interpreter could not be restarted".to_owned();
            self.note(&sandbox.record, What::ExecEnded { exec: command::tag_text(tag), job: None, exit })?;
            return Err(error);
        }
        Ok(PreparedCell { cell, tag })
    }

    /// Creates a context and starts its interpreter.
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

    /// Lists, restarts, removes or interrupts contexts. Returns the list of contexts.
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

    /// Restarts the interpreter of a context, if the context exists: a new one has nothing to lose.
    fn restart_context(&mut self, sandbox: &Sandboxed, context: &str) -> Result<(), ManagerError> {
        let listed = self.contexts(sandbox, ContextsRequest::List)?;
        if listed.iter().any(|known| known.context == context) {
            let request = ContextsRequest::Restart { context: context.to_owned(), restricted: None };
            self.contexts(sandbox, request)?;
        }
        Ok(())
    }

    /// The environment of every command of a sandbox.
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
