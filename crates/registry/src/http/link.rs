//! Requests and their answers, one after the other.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, HeaderValue, LOCATION, USER_AGENT};
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

use super::body::{Content, Payload};
use super::connect::connect;
use super::url::{Origin, Scheme, Url};
use super::{HttpError, Net};
use crate::cancel::Cancel;

const MAX_REDIRECTS: usize = 5;
/// The most idle connections: to the registry, its token server and its servers of blobs.
const MAX_IDLE: usize = 4;
/// The least number of bytes that a server has to send within the idle time.
const LEAST: u64 = 16 << 10;
/// The most that is read of an unwanted response, so that its connection can be used again.
const MAX_UNWANTED: u64 = 16 << 10;
const AGENT: &str = concat!("bathysphere/", env!("CARGO_PKG_VERSION"));

/// An HTTP request.
#[derive(Clone)]
pub struct Call {
    pub method: Method,
    pub url: Url,
    pub headers: HeaderMap,
    pub content: Content,
}

impl Call {
    pub fn new(method: Method, url: Url) -> Self {
        Self { method, url, headers: HeaderMap::new(), content: Content::None }
    }

    pub fn get(url: Url) -> Self {
        Self::new(Method::GET, url)
    }

    pub fn with(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.insert(name, value);
        self
    }
}

/// An answer, whose body is still to be read.
pub struct Response {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// Where it came from in the end.
    pub url: Url,
    body: Incoming,
    sender: SendRequest<Payload>,
    pace: Pace,
}

/// How much came in which time.
struct Pace {
    since: Instant,
    bytes: u64,
}

impl Pace {
    fn new() -> Self {
        Self { since: Instant::now(), bytes: 0 }
    }

    /// Whether a server is still worth waiting for after `count` more bytes.
    fn is_kept(&mut self, count: u64, idle: Duration) -> bool {
        self.bytes += count;
        if self.since.elapsed() < idle {
            return true;
        }
        let enough = self.bytes >= LEAST;
        *self = Self::new();
        enough
    }
}

/// What one thread uses to reach servers.
pub struct Link<'a> {
    net: &'a Net,
    /// Set when another thread of the same transfer failed.
    stop: Cancel,
    runtime: Option<Runtime>,
    idle: Vec<(Origin, SendRequest<Payload>)>,
}

impl<'a> Link<'a> {
    pub fn new(net: &'a Net, stop: Cancel) -> Result<Self, HttpError> {
        let runtime = Builder::new_current_thread().enable_all().build().map_err(HttpError::Runtime)?;
        Ok(Self { net, stop, runtime: Some(runtime), idle: Vec::new() })
    }

    /// Sends a request. Those that only read follow redirects.
    pub fn send(&mut self, call: &Call) -> Result<Response, HttpError> {
        let mut call = call.clone();
        let follows = [Method::GET, Method::HEAD].contains(&call.method);
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send_once(&call)?;
            let location = response.headers.get(LOCATION).filter(|_| follows && is_redirect(response.status));
            let Some(location) = location.cloned() else { return Ok(response) };
            let next = self.next_url(&call.url, &location)?;
            if next.origin != call.url.origin {
                call.headers.remove(AUTHORIZATION);
            }
            call.url = next;
            self.discard(response)?;
        }
        Err(HttpError::Redirects(call.url.origin.to_string(), MAX_REDIRECTS))
    }

    /// Where a redirect leads, if it may be followed.
    pub fn next_url(&self, from: &Url, location: &HeaderValue) -> Result<Url, HttpError> {
        let text = location.to_str().unwrap_or_default();
        let next = from.join(text).map_err(|error| HttpError::Location(from.origin.to_string(), error))?;
        let downgrade = from.origin.scheme == Scheme::Https && next.origin.scheme == Scheme::Http;
        let plain = next.origin.scheme == Scheme::Http && !(self.net.insecure && next.origin.is_loopback());
        if downgrade || plain {
            let to = format!("http://{}", next.origin);
            return Err(HttpError::Downgrade(from.origin.to_string(), to));
        }
        Ok(next)
    }

    /// The next part of an answer; none at its end.
    pub fn chunk(&mut self, response: &mut Response) -> Result<Option<Bytes>, HttpError> {
        let idle = self.net.timeouts.idle;
        let origin = response.url.origin.clone();
        loop {
            let frame = self.wait(async { timeout(idle, response.body.frame()).await })?;
            let stalled = || HttpError::Stalled(origin.to_string(), idle);
            let Some(frame) = frame.map_err(|_| stalled())? else { return Ok(None) };
            let frame = frame.map_err(|error| HttpError::Cut(origin.to_string(), error))?;
            let data = frame.into_data().unwrap_or_default();
            if !response.pace.is_kept(data.len() as u64, idle) {
                return Err(stalled());
            }
            if !data.is_empty() {
                return Ok(Some(data));
            }
        }
    }

    /// The whole of an answer that is not longer than `limit`.
    pub fn read(&mut self, mut response: Response, limit: u64) -> Result<Vec<u8>, HttpError> {
        let mut content = Vec::new();
        while let Some(chunk) = self.chunk(&mut response)? {
            if (content.len() + chunk.len()) as u64 > limit {
                return Err(HttpError::Long(response.url.origin.to_string(), limit));
            }
            content.extend_from_slice(&chunk);
        }
        self.finish(response);
        Ok(content)
    }

    /// Discards a response. Its connection is used again if the rest is short.
    pub fn discard(&mut self, mut response: Response) -> Result<(), HttpError> {
        let mut left = MAX_UNWANTED;
        loop {
            match self.chunk(&mut response) {
                Ok(None) => {
                    self.finish(response);
                    return Ok(());
                }
                Ok(Some(chunk)) if chunk.len() as u64 <= left => left -= chunk.len() as u64,
                Err(HttpError::Cancelled) => return Err(HttpError::Cancelled),
                // Its connection is not used again.
                Ok(Some(_)) | Err(_) => return Ok(()),
            }
        }
    }

    /// Returns the connection of a response that was read to its end to the idle ones.
    pub fn finish(&mut self, response: Response) {
        self.idle.truncate(MAX_IDLE - 1);
        self.idle.insert(0, (response.url.origin, response.sender));
    }

    /// Sleeps, unless the transfer is cancelled.
    pub fn pause(&self, time: Duration) -> Result<(), HttpError> {
        self.wait(async { tokio::time::sleep(time).await })
    }

    fn send_once(&mut self, call: &Call) -> Result<Response, HttpError> {
        let origin = &call.url.origin;
        if let Some(index) = self.idle.iter().position(|(kept, _)| kept == origin) {
            let (_, sender) = self.idle.remove(index);
            match self.send_on(sender, call) {
                // Servers close connections that were idle for a while.
                Err(HttpError::Cut(..)) => {}
                sent => return sent,
            }
        }
        let sender = self.wait(connect(self.net, origin))??;
        self.send_on(sender, call)
    }

    fn send_on(&self, mut sender: SendRequest<Payload>, call: &Call) -> Result<Response, HttpError> {
        let origin = &call.url.origin;
        let cut = |error| HttpError::Cut(origin.to_string(), error);
        let (payload, sent) = Payload::new(call.content.clone());
        let mut request = Request::builder()
            .method(&call.method)
            .uri(&call.url.target)
            .body(payload)
            .map_err(HttpError::Request)?;
        *request.headers_mut() = call.headers.clone();
        let host =
            HeaderValue::try_from(origin.authority()).map_err(|error| HttpError::Request(error.into()))?;
        request.headers_mut().insert(HOST, host);
        request.headers_mut().insert(USER_AGENT, HeaderValue::from_static(AGENT));
        let idle = self.net.timeouts.idle;
        let response = self.wait(async {
            let ready = timeout(idle, sender.ready()).await;
            ready.map_err(|_| HttpError::Stalled(origin.to_string(), idle))?.map_err(cut)?;
            let answer = sender.send_request(request);
            tokio::pin!(answer);
            let mut before = 0;
            loop {
                if let Ok(answer) = timeout(idle, &mut answer).await {
                    return answer.map_err(cut);
                }
                // A long upload is no silence.
                let now = sent.load(Ordering::Relaxed);
                if now == before {
                    return Err(HttpError::Stalled(origin.to_string(), idle));
                }
                before = now;
            }
        })??;
        let (head, body) = response.into_parts();
        let (status, headers) = (head.status, head.headers);
        Ok(Response { status, headers, url: call.url.clone(), body, sender, pace: Pace::new() })
    }

    /// Timers have to be made inside of `work`, where there is a runtime.
    fn wait<T>(&self, work: impl Future<Output = T>) -> Result<T, HttpError> {
        let Some(runtime) = &self.runtime else { return Err(HttpError::Cancelled) };
        runtime.block_on(async {
            tokio::select! {
                biased;
                () = self.net.cancel.cancelled() => Err(HttpError::Cancelled),
                () = self.stop.cancelled() => Err(HttpError::Cancelled),
                done = work => Ok(done),
            }
        })
    }
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        // Without waiting for a name that is still being looked up.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{Proxies, Timeouts};

    /// Whatever the callers let through.
    #[test]
    fn nothing_is_sent_without_tls_but_to_this_machine_and_if_asked_for() {
        for (insecure, url) in [(false, "http://127.0.0.1:1/"), (true, "http://registry.example.com/")] {
            let net = Net::new(Timeouts::default(), Proxies::default(), Cancel::default(), insecure);
            let mut link = Link::new(&net, Cancel::default()).unwrap();
            let error = link.send(&Call::get(Url::parse(url).unwrap())).err().unwrap();
            assert!(matches!(error, HttpError::Plain(_)), "{error:?}");
        }
    }
}
