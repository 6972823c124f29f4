//! One thread's conversation with one registry: authorization, second attempts, and what errors mean.

use std::sync::Arc;
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use crate::auth::{AuthError, Refused, Scope, Tokens};
use crate::cancel::Cancel;
use crate::client::{Client, ClientError, LoginCheck, retry_after};
use crate::credentials::{Credentials, CredentialsError};
use crate::http::{Call, HttpError, Link, Origin, Response, Url, UrlError};
use crate::reference::{Reference, server};
use crate::text::plain;
use crate::transfer::progress::{Event, Reporter};

/// How much of an error's text is read and shown.
const MAX_ERROR: u64 = 64 << 10;
const SHOWN_ERROR: usize = 200;

pub struct Session<'a> {
    pub(super) client: &'a Client,
    pub(super) link: Link<'a>,
    registry: String,
    repository: String,
    scope: Scope,
    tokens: Arc<Tokens>,
    /// Looked up when the registry asks for them.
    credentials: Option<Option<Credentials>>,
    credentials_error: Option<CredentialsError>,
    reporter: Option<Reporter>,
}

/// An answer that was read.
pub struct Fetched {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub origin: Origin,
    pub body: Vec<u8>,
}

#[derive(Deserialize)]
struct Errors {
    errors: Vec<RegistryError>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RegistryError {
    code: String,
    message: String,
}

impl<'a> Session<'a> {
    /// For these actions on a reference's repository.
    pub fn of(client: &'a Client, reference: &Reference, actions: &str) -> Result<Self, ClientError> {
        Self::stoppable(client, reference, actions, Cancel::default())
    }

    /// The same, ended from another thread by `stop`.
    pub fn stoppable(
        client: &'a Client,
        reference: &Reference,
        actions: &str,
        stop: Cancel,
    ) -> Result<Self, ClientError> {
        let scope = format!("repository:{}:{actions}", reference.repository());
        let mut session = Self::new(client, reference.registry(), Some(scope), stop)?;
        reference.repository().clone_into(&mut session.repository);
        Ok(session)
    }

    /// For a registry, without any repository.
    pub fn new(
        client: &'a Client,
        registry: &str,
        scope: Option<String>,
        stop: Cancel,
    ) -> Result<Self, ClientError> {
        let server = server(registry);
        client.check_insecure(server)?;
        let scheme = if client.options.insecure { "http" } else { "https" };
        let location = |error: UrlError| HttpError::Location(registry.to_owned(), error);
        let origin = Url::parse(&format!("{scheme}://{server}/")).map_err(location)?.origin;
        Ok(Self {
            client,
            link: Link::new(&client.net, stop)?,
            registry: registry.to_owned(),
            repository: String::new(),
            scope: Scope { origin, scope },
            tokens: client.tokens.clone(),
            credentials: None,
            credentials_error: None,
            reporter: None,
        })
    }

    #[must_use]
    pub fn with_reporter(mut self, reporter: &Reporter) -> Self {
        self.reporter = Some(reporter.clone());
        self
    }

    /// Uses these instead of what is kept for the registry, and no token that others led to.
    pub fn use_credentials(&mut self, credentials: Credentials) {
        self.tokens = Arc::default();
        self.credentials = Some(Some(credentials));
    }

    /// Below the repository: `manifests/TAG`, `blobs/DIGEST`.
    pub fn url(&self, path: &str) -> Url {
        let target = format!("/v2/{}/{path}", self.repository);
        Url { origin: self.scope.origin.clone(), target }
    }

    /// Asks whether this is a registry that accepts the credentials.
    pub fn check(&mut self) -> Result<LoginCheck, ClientError> {
        let url = Url { origin: self.scope.origin.clone(), target: "/v2/".to_owned() };
        let fetched = self.fetch(&Call::get(url), MAX_ERROR)?;
        if !fetched.status.is_success() {
            return Err(self.refusal(&fetched, "its version"));
        }
        let is_asked = self.tokens.of(&self.scope).is_some();
        Ok(if is_asked { LoginCheck::Accepted } else { LoginCheck::NotAsked })
    }

    /// Sends a request and reads the answer, again if it was cut.
    pub fn fetch(&mut self, call: &Call, limit: u64) -> Result<Fetched, ClientError> {
        let mut failures = 0;
        loop {
            let response = self.send(call)?;
            let (status, headers) = (response.status, response.headers.clone());
            let origin = response.url.origin.clone();
            let limit = if status.is_success() { limit } else { MAX_ERROR };
            match self.link.read(response, limit) {
                Ok(body) => return Ok(Fetched { status, headers, origin, body }),
                Err(error) => self.recover(error.into(), &mut failures)?,
            }
        }
    }

    /// Sends a request, again if the server cannot answer it now or wants to know who asks.
    pub fn send(&mut self, call: &Call) -> Result<Response, ClientError> {
        let (mut failures, mut is_answered) = (0, false);
        loop {
            let used = self.tokens.of(&self.scope).filter(|_| call.url.origin == self.scope.origin);
            let mut authorized = call.clone();
            authorized.headers.extend(used.clone().map(|value| (AUTHORIZATION, value)));
            let response = match self.link.send(&authorized) {
                Ok(response) => response,
                Err(error) => {
                    self.recover(error.into(), &mut failures)?;
                    continue;
                }
            };
            match response.status.as_u16() {
                // After a redirect to another host, the challenge is not the registry's.
                401 if response.url.origin == self.scope.origin => {
                    let headers = response.headers.clone();
                    self.link.discard(response)?;
                    let answer = if is_answered { None } else { self.answer(&headers, used.as_ref())? };
                    if answer.is_none() {
                        return Err(self.no_login());
                    }
                    is_answered = true;
                }
                429 | 500 | 502 | 503 | 504 => self.back_off(call, response, &mut failures)?,
                _ => return Ok(response),
            }
        }
    }

    fn answer(
        &mut self,
        headers: &HeaderMap,
        used: Option<&http::HeaderValue>,
    ) -> Result<Option<http::HeaderValue>, ClientError> {
        if self.credentials.is_none() {
            // What is public needs none, so that a broken helper matters only if it is asked for.
            let found = self.client.keychain.find(&self.registry);
            self.credentials = Some(found.unwrap_or_else(|error| {
                self.credentials_error = Some(error);
                None
            }));
        }
        let credentials = self.credentials.as_ref().and_then(Option::as_ref);
        let refused = Refused { headers, used };
        match self.tokens.answer(&mut self.link, &self.scope, refused, credentials) {
            Err(AuthError::Rejected(_)) => Err(self.no_login()),
            answer => Ok(answer?),
        }
    }

    fn no_login(&mut self) -> ClientError {
        let registry = self.registry.clone();
        match (self.credentials_error.take(), &self.credentials) {
            (Some(error), _) => ClientError::Credentials(error),
            (None, Some(Some(_))) => ClientError::WrongLogin { registry },
            _ => ClientError::Login { registry },
        }
    }

    /// Pauses after a failure, or returns it if it is final.
    pub fn recover(&mut self, error: ClientError, failures: &mut u32) -> Result<(), ClientError> {
        *failures += 1;
        let pause = self.client.options.retries.pause(*failures).filter(|_| error.is_transient());
        match pause {
            None => Err(error),
            Some(pause) => self.pause(error.to_string(), pause),
        }
    }

    fn pause(&mut self, reason: String, after: Duration) -> Result<(), ClientError> {
        if let Some(reporter) = &self.reporter {
            reporter.report(Event::Retrying { reason, after });
        }
        Ok(self.link.pause(after)?)
    }

    /// Pauses as long as a busy server asks for, within limits.
    fn back_off(&mut self, call: &Call, response: Response, failures: &mut u32) -> Result<(), ClientError> {
        *failures += 1;
        let (status, origin) = (response.status, response.url.origin.clone());
        let asked = retry_after(&response.headers);
        let retries = self.client.options.retries;
        let pause = retries.pause(*failures).map(|pause| asked.unwrap_or(pause));
        match pause.filter(|pause| *pause <= retries.longest) {
            Some(pause) => {
                self.link.discard(response)?;
                self.pause(format!("{origin} answers with {status}"), pause)
            }
            None => {
                let what = call.url.target.split('?').next().unwrap_or_default();
                Err(self.read_refusal(response, what)?)
            }
        }
    }

    /// What an unread answer without success means.
    pub fn read_refusal(&mut self, response: Response, what: &str) -> Result<ClientError, ClientError> {
        let (status, headers) = (response.status, response.headers.clone());
        let origin = response.url.origin.clone();
        let body = match self.link.read(response, MAX_ERROR) {
            Err(HttpError::Cancelled) => return Err(HttpError::Cancelled.into()),
            // The status says enough.
            read => read.unwrap_or_default(),
        };
        Ok(self.refusal(&Fetched { status, headers, origin, body }, what))
    }

    /// What an answer without success means.
    pub fn refusal(&self, fetched: &Fetched, what: &str) -> ClientError {
        let found: Option<Errors> = serde_json::from_slice(&fetched.body).ok();
        let first = found.and_then(|found| found.errors.into_iter().next()).unwrap_or_default();
        let message = match first.message.as_str() {
            "" => String::new(),
            text => format!(": {:?}", plain(text, SHOWN_ERROR)),
        };
        let (registry, repository) = (self.registry.clone(), self.repository.clone());
        let is_registry = fetched.origin == self.scope.origin;
        match (fetched.status.as_u16(), first.code.as_str()) {
            (401 | 403, _) if is_registry => ClientError::Denied { registry, message },
            (429, _) => {
                let (origin, after) = (fetched.origin.clone(), retry_after(&fetched.headers));
                ClientError::Busy { origin, after, message }
            }
            (404, "NAME_UNKNOWN") => ClientError::UnknownRepository { registry, repository },
            (404, "MANIFEST_UNKNOWN") => {
                ClientError::UnknownTag { registry, repository, target: what.to_owned() }
            }
            (404, _) => {
                let what =
                    if repository.is_empty() { what.to_owned() } else { format!("{what} in {repository}") };
                ClientError::NotFound { registry, what, message }
            }
            _ => ClientError::Status {
                origin: fetched.origin.clone(),
                status: fetched.status,
                what: what.to_owned(),
                message,
            },
        }
    }
}
