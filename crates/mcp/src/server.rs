//! The server: tools, resources, and the path of every call from its arguments to the audit log.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use bathy_audit::Log;
use bathy_manager::pool::CONNECTION_AGE;
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData,
    Implementation, JsonObject, ListResourceTemplatesResult, ListResourcesResult, ListToolsResult,
    PaginatedRequestParams, ProgressNotificationParam, ProtocolVersion, ReadResourceRequestParams,
    ReadResourceResponse, ReadResourceResult, ResourceContents, ResourceTemplate, ServerCapabilities,
    ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{RoleServer, ServerHandler};
use serde::Serialize;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::answer::Answer;
use crate::audit::{self, Answered};
use crate::call::{Call, Cancel, Progress};
use crate::error::ToolError;
use crate::host::Host;
use crate::outputs::{Outputs, SCHEME};
use crate::schema;
use crate::tools::{self, Spec, Toolsets};

/// The most calls at the same time.
const MAX_CALLS: usize = 64;
/// How often progress is reported to a client that asked for it.
const TICK: Duration = Duration::from_secs(2);
/// How long a client may cache the list of tools, which never changes.
const TOOLS_TTL_MS: u64 = 3_600_000;
/// The name of the reading of a resource in the audit log.
const READ: &str = "resources/read";

/// The server's instructions for models.
const INSTRUCTIONS: &str = "Bathysphere runs untrusted code in sandboxes with their own Linux kernel. Call run_code with code: \
    without sandbox_id it makes a sandbox and returns its sandbox_id; pass that id to later calls, which then see the same \
    files, variables and imports. run_command runs shell commands, and read_file, write_file, edit_file and list_directory \
    work on the sandbox's files. Sandboxes reach the public internet at most, see nothing of the host, and are removed after \
    an hour or 15 minutes without use; sandbox_delete removes one at once. Use create_python_repl and run_python_in_repl \
    instead where Python state has to last longer than that. Long output is cut in the middle; read_output reads the rest.";

#[derive(Debug, Error)]
pub enum ServerError {
    #[error(transparent)]
    Paths(#[from] bathy_spec::paths::PathsError),
    #[error(transparent)]
    Operator(#[from] bathy_spec::operator::OperatorError),
    #[error("Cannot open the audit log, so the server does not start")]
    Audit(#[from] bathy_audit::LogError),
}

#[derive(Clone, Debug, Default)]
pub struct Options {
    pub toolsets: Toolsets,
    /// Whether agents may use sandboxes that were not made by agents.
    pub all_sandboxes: bool,
    /// The most pictures of one answer, in bytes of base64; without limit if absent.
    pub pictures: Option<usize>,
}

/// State that all calls share.
pub struct State {
    pub options: Options,
    pub host: Host,
    /// Outputs that were too long for an answer.
    pub outputs: Outputs,
    log: Log,
    calls: Semaphore,
    running: Mutex<Vec<Weak<Cancel>>>,
}

/// The MCP server. Clones share their state.
#[derive(Clone)]
pub struct Server {
    state: Arc<State>,
    tools: Arc<Vec<Spec>>,
}

impl Server {
    /// A server with the tools that `options` asks for.
    pub fn new(options: Options) -> Result<Self, ServerError> {
        let log = bathy_runtime::audit::audit_log(&Paths::of_user()?, &Operator::load()?)?;
        Ok(Self::with_log(options, log))
    }

    fn with_log(options: Options, log: Log) -> Self {
        let tools = Arc::new(tools::all(options.toolsets));
        let (host, outputs) = (Host::default(), Outputs::default());
        let calls = Semaphore::new(MAX_CALLS);
        Self {
            state: Arc::new(State { options, host, outputs, log, calls, running: Mutex::default() }),
            tools,
        }
    }

    /// Removes every sandbox that this server has made. Returns failures, in sentences.
    pub fn remove_made(&self) -> Vec<String> {
        self.state.host.remove_made()
    }

    /// Cancels all running calls.
    pub fn cancel_all(&self) {
        let mut running = self.state.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.drain(..).filter_map(|call| call.upgrade()).for_each(|call| call.cancel());
    }

    /// Closes idle connections and reaps monitors that have exited, until it is dropped.
    pub async fn maintain(&self) {
        loop {
            tokio::time::sleep(CONNECTION_AGE / 2).await;
            self.state.host.pool.close_idle();
            bathy_manager::collect_ended();
        }
    }

    /// The tools, as clients see them.
    pub fn tools(&self) -> Vec<Tool> {
        self.tools.iter().map(Spec::tool).collect()
    }

    /// Records a request and its answer.
    fn record<A: Serialize>(
        &self,
        requested: Requested<'_>,
        outcome: &'static str,
        answer: &A,
        about: Option<(String, Option<String>)>,
    ) -> Result<(), String> {
        let client = requested.context.client_info();
        let answered = Answered {
            tool: requested.tool,
            takes: requested.takes,
            client: client.map(|client| format!("{} {}", client.name, client.version)),
            arguments: requested.arguments,
            outcome,
            answer,
            took_ms: u64::try_from(requested.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            about,
        };
        // An answer that cannot be recorded is not sent.
        audit::record(&self.state.log, answered).map_err(|error| {
            let failure = bathy_protocol::chain(&error);
            if audit::has_ended(requested.tool, outcome) {
                return format!("This call is not in the audit log: {failure}");
            }
            format!("The answer cannot be recorded in the audit log, so it is not given: {failure}")
        })
    }

    fn spec(&self, name: &str) -> Option<&Spec> {
        self.tools.iter().find(|spec| spec.name == name)
    }

    fn resource(&self, uri: String) -> Result<ReadResourceResult, ErrorData> {
        let Some((part, next)) = self.state.outputs.read(&uri) else {
            return Err(ErrorData::resource_not_found(
                format!(
                    "There is no resource {:?}, or not any more: newer outputs evict older ones",
                    crate::text::line(&uri, 120)
                ),
                Some(json!({ "uri": uri })),
            ));
        };
        let left = part.total - part.from - part.text.len();
        let mut contents = vec![ResourceContents::text(part.text, uri)];
        if let Some(uri) = next {
            let more = format!("[{left} more bytes: read {uri}]");
            contents.push(ResourceContents::text(more, uri));
        }
        Ok(ReadResourceResult::new(contents).with_cache_scope(CacheScope::Private))
    }

    /// Runs a tool in a thread of its own, which may block, and reports progress.
    async fn run(
        &self,
        spec: &Spec,
        arguments: JsonObject,
        context: &RequestContext<RoleServer>,
    ) -> (Result<Answer, ToolError>, Option<(String, Option<String>)>) {
        let Ok(_permit) = self.state.calls.try_acquire() else {
            let error = ToolError::Refused(format!(
                "{MAX_CALLS} calls are running already, which is as many as there may be. Wait for one to end."
            ));
            return (Err(error), None);
        };
        let cancel = match Cancel::new() {
            Ok(cancel) => Arc::new(cancel),
            Err(error) => return (Err(ToolError::Failed(format!("Cannot start the call: {error}"))), None),
        };
        {
            let mut running = self.state.running.lock().unwrap_or_else(PoisonError::into_inner);
            running.retain(|call| call.strong_count() > 0);
            running.push(Arc::downgrade(&cancel));
        }
        let token = context.meta.get_progress_token();
        let (sender, mut steps) = unbounded_channel();
        let progress = Arc::new(Progress::new(token.is_some().then_some(sender)));
        let call = Arc::new(Call {
            state: Arc::clone(&self.state),
            cancel: Arc::clone(&cancel),
            progress: Arc::clone(&progress),
            about: Mutex::default(),
        });
        let run = Arc::clone(&spec.run);
        let shared = Arc::clone(&call);
        let mut work = tokio::task::spawn_blocking(move || run(&shared, Value::Object(arguments)));
        let reporting = async {
            match token {
                Some(token) => report_progress(context, token, &progress, &mut steps).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(reporting);
        let mut cancelled = false;
        let result = loop {
            tokio::select! {
                result = &mut work => break result,
                () = context.ct.cancelled(), if !cancelled => {
                    cancelled = true;
                    cancel.cancel();
                }
                () = &mut reporting => {}
            }
        };
        let about = call.about.lock().map_or(None, |about| about.clone());
        // A panic would have ended the program; a cancelled runtime ends with it.
        (result.unwrap_or_else(|error| Err(ToolError::Failed(format!("The call broke: {error}")))), about)
    }
}

/// A request of a client, for the audit log.
struct Requested<'a> {
    tool: &'a str,
    takes: &'a JsonObject,
    arguments: &'a JsonObject,
    began: Instant,
    context: &'a RequestContext<RoleServer>,
}

/// Reports the steps of a call, and every [`TICK`] that it is still running.
async fn report_progress(
    context: &RequestContext<RoleServer>,
    token: rmcp::model::ProgressToken,
    progress: &Progress,
    steps: &mut UnboundedReceiver<String>,
) {
    let began = Instant::now();
    let mut ticks = tokio::time::interval(TICK);
    ticks.tick().await;
    let (mut phase, mut reported) = ("starting".to_owned(), 0.0);
    loop {
        let message = tokio::select! {
            step = steps.recv() => match step {
                Some(step) => {
                    phase.clone_from(&step);
                    step
                }
                None => std::future::pending().await,
            },
            _ = ticks.tick() => {
                let seconds = began.elapsed().as_secs();
                match progress.last_line() {
                    Some(line) => format!("{phase}, {seconds} s: {line}"),
                    None => format!("{phase}, {seconds} s"),
                }
            }
        };
        // Progress must increase.
        reported = began.elapsed().as_secs_f64().max(reported + 0.001);
        let param = ProgressNotificationParam::new(token.clone(), reported).with_message(message);
        // The client may have disconnected.
        let _ = context.peer.notify_progress(param).await;
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_resources().build();
        let server = Implementation::new("bathysphere", env!("CARGO_PKG_VERSION"))
            .with_title("Bathysphere")
            .with_description("Sandboxes with their own Linux kernel for untrusted code");
        ServerConfig::new(capabilities).with_server_info(server).with_instructions(INSTRUCTIONS)
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        Cow::Borrowed(ProtocolVersion::KNOWN_VERSIONS)
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.tools())
            .with_ttl_ms(TOOLS_TTL_MS)
            .with_cache_scope(CacheScope::Private))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.spec(name).map(Spec::tool)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let began = Instant::now();
        let arguments = request.arguments.unwrap_or_default();
        let Some(spec) = self.spec(&request.name) else {
            let names: Vec<_> = self.tools.iter().map(|spec| spec.name).collect();
            let name = crate::text::line(&request.name, audit::NAME);
            let error = ErrorData::invalid_params(
                format!("There is no tool {name:?}. The tools are {}", names.join(", ")),
                None,
            );
            // Without a schema no argument is shown.
            let takes = JsonObject::new();
            let requested =
                Requested { tool: &name, takes: &takes, arguments: &arguments, began, context: &context };
            return match self.record(requested, "refused", &error, None) {
                Ok(()) => Err(error),
                Err(unrecorded) => Err(ErrorData::internal_error(unrecorded, None)),
            };
        };
        let takes = &spec.input;
        let (result, about) = match schema::check(spec.name, takes, arguments.clone()) {
            Ok(checked) => self.run(spec, checked, &context).await,
            Err(wrong) => (Err(ToolError::Failed(wrong)), None),
        };
        let (outcome, result) = match result {
            Ok(answer) => (if answer.is_error { "error" } else { "ok" }, CallToolResult::from(answer)),
            Err(error) => (error.outcome(), CallToolResult::from(&error)),
        };
        let outcome = if context.ct.is_cancelled() { "cancelled" } else { outcome };
        let requested = Requested { tool: spec.name, takes, arguments: &arguments, began, context: &context };
        match self.record(requested, outcome, &result, about) {
            Ok(()) => Ok(result.into()),
            // The deletion is done but not recorded: the client learns both.
            Err(unrecorded) if audit::has_ended(spec.name, outcome) => {
                let mut result = result;
                result.content.push(ContentBlock::text(unrecorded));
                Ok(result.into())
            }
            Err(unrecorded) => Ok(CallToolResult::from(&ToolError::Failed(unrecorded)).into()),
        }
    }

    async fn list_resources(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        Ok(ListResourcesResult::with_all_items(self.state.outputs.list())
            .with_ttl_ms(0)
            .with_cache_scope(CacheScope::Private))
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let template = ResourceTemplate::new(format!("{SCHEME}{{id}}/{{stream}}"), "output")
            .with_title("Output of a call")
            .with_description("The whole output of a call whose answer shows only a part of it")
            .with_mime_type("text/plain");
        Ok(ListResourceTemplatesResult::with_all_items(vec![template])
            .with_ttl_ms(TOOLS_TTL_MS)
            .with_cache_scope(CacheScope::Private))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let began = Instant::now();
        let mut arguments = JsonObject::new();
        arguments.insert("uri".to_owned(), request.uri.clone().into());
        // A foreign address may contain a password.
        let ours = request.uri.starts_with(SCHEME);
        let properties = if ours { json!({ "uri": { "type": "string" } }) } else { json!({}) };
        let takes = JsonObject::from_iter([("properties".to_owned(), properties)]);
        let requested =
            Requested { tool: READ, takes: &takes, arguments: &arguments, began, context: &context };
        let result = self.resource(request.uri);
        let recorded = match &result {
            Ok(contents) => self.record(requested, "ok", contents, None),
            Err(error) => self.record(requested, "refused", error, None),
        };
        recorded.map_err(|unrecorded| ErrorData::internal_error(unrecorded, None))?;
        Ok(result?.into())
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
