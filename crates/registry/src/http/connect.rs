//! Connects to a server, directly or through a proxy, with or without TLS.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::body::Payload;
use super::tls::TlsError;
use super::url::{Origin, Scheme};
use super::{HttpError, Net, ProxyError};

/// The longest response head that is accepted.
const MAX_HEAD: usize = 64 << 10;
/// The time limit for one address if the host has several.
const NEXT_ADDRESS: Duration = Duration::from_secs(3);

trait Stream: AsyncRead + AsyncWrite + Send {}
impl<S: AsyncRead + AsyncWrite + Send> Stream for S {}

/// Connects to a server and prepares for requests.
pub async fn connect(net: &Net, origin: &Origin) -> Result<SendRequest<Payload>, HttpError> {
    let stream = timeout(net.timeouts.connect, open(net, origin)).await;
    let stream =
        stream.map_err(|_| HttpError::ConnectTimeout(origin.to_string(), net.timeouts.connect))??;
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(MAX_HEAD)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| HttpError::Cut(origin.to_string(), error))?;
    // Errors of the connection are returned by the requests on it.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}

async fn open(net: &Net, origin: &Origin) -> Result<Pin<Box<dyn Stream>>, HttpError> {
    if origin.scheme == Scheme::Http {
        if !net.insecure || !origin.is_loopback() {
            return Err(HttpError::Plain(origin.to_string()));
        }
        return Ok(Box::pin(dial(origin, true).await?));
    }
    let of_proxy = |error| HttpError::Proxy(origin.to_string(), error);
    let stream = match net.proxies.for_origin(origin).map_err(of_proxy)? {
        None => dial(origin, false).await?,
        Some(proxy) => {
            let stream = dial(&proxy.origin, false).await;
            let mut stream = stream.map_err(|error| match error {
                HttpError::Connect(_, error) | HttpError::Resolve(_, error) => {
                    of_proxy(ProxyError::Connect(error))
                }
                other => other,
            })?;
            proxy.connect(&mut stream, origin).await.map_err(of_proxy)?;
            stream
        }
    };
    let of_tls = |error| HttpError::Tls(origin.to_string(), error);
    let config = net.tls.config().map_err(of_tls)?;
    let bare = origin.host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let name =
        ServerName::try_from(bare).map_err(|error| HttpError::ServerName(origin.to_string(), error))?;
    let stream = TlsConnector::from(config).connect(name, stream).await;
    Ok(Box::pin(stream.map_err(|error| of_tls(TlsError::of_handshake(error)))?))
}

async fn dial(origin: &Origin, only_loopback: bool) -> Result<TcpStream, HttpError> {
    let resolve = |error| HttpError::Resolve(origin.to_string(), error);
    let bare = origin.host.trim_start_matches('[').trim_end_matches(']');
    let found = lookup_host((bare, origin.port)).await.map_err(resolve)?;
    let addresses: Vec<SocketAddr> =
        found.filter(|address| !only_loopback || address.ip().is_loopback()).collect();
    if addresses.is_empty() {
        return Err(resolve(io::Error::from(io::ErrorKind::NotFound)));
    }
    let mut last = io::Error::from(io::ErrorKind::TimedOut);
    for (index, address) in addresses.iter().enumerate() {
        let is_last = index + 1 == addresses.len();
        let attempt = TcpStream::connect(address);
        let connected = if is_last { Ok(attempt.await) } else { timeout(NEXT_ADDRESS, attempt).await };
        match connected {
            Ok(Ok(stream)) => {
                // Requests are small, and each waits for its response.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => last = error,
            Err(_) => {}
        }
    }
    Err(HttpError::Connect(origin.to_string(), last))
}
