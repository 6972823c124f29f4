//! A server that a test writes the answers of.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::image::Image;
use bathy_registry::Digest;
use bathy_registry::manifest::media;

/// The longest that a connection of a test is open.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Default)]
pub struct Asked {
    pub method: String,
    pub target: String,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Where a Range begins.
    pub fn from(&self) -> usize {
        let from = || self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok();
        from().unwrap_or(0)
    }
}

/// What is done on the connection, one after the other.
pub enum Step {
    Send(Vec<u8>),
    Pause(Duration),
    Close,
}

pub type Reply = Vec<Step>;

pub fn reply(status: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    vec![Step::Send(head(status, headers, body.len())), Step::Send(body.to_vec())]
}

/// The head of an answer of this length.
pub fn head(status: &str, headers: &[(&str, &str)], length: usize) -> Vec<u8> {
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{headers}\r\n").into_bytes()
}

type Handler = dyn Fn(&Asked) -> Reply + Send + Sync;

pub struct Server {
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    stopped: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(handler: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1", None, handler)
    }

    pub fn start_at(
        host: &str,
        tls: Option<Arc<rustls::ServerConfig>>,
        handler: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (asked, stopped) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (handler, log, is_over): (Arc<Handler>, _, _) =
            (Arc::new(handler), asked.clone(), stopped.clone());
        let acceptor = thread::spawn(move || {
            for stream in listener.incoming() {
                if is_over.load(Ordering::SeqCst) {
                    return;
                }
                let (handler, log, tls) = (handler.clone(), log.clone(), tls.clone());
                let stream = stream.unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                thread::spawn(move || match tls {
                    None => serve(stream.try_clone().unwrap(), &*handler, &log),
                    Some(tls) => {
                        let connection = rustls::ServerConnection::new(tls).unwrap();
                        serve(rustls::StreamOwned::new(connection, stream), &*handler, &log);
                    }
                });
            }
        });
        Self { address, asked, stopped, acceptor: Some(acceptor) }
    }

    /// A registry with one image under `name:tag`, that answers as `change` wants where it wants to.
    pub fn hosting(image: &Image, change: impl Fn(&Asked) -> Option<Reply> + Send + Sync + 'static) -> Self {
        let image = image.clone();
        let blobs = image.blobs();
        Self::start(move |asked| change(asked).unwrap_or_else(|| serve_image(&image, &blobs, asked)))
    }

    pub fn reference(&self) -> String {
        format!("{}/name:tag", self.address)
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    /// How often something with this in its address was asked for.
    pub fn count(&self, part: &str) -> usize {
        self.asked().iter().filter(|asked| asked.target.contains(part)).count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

fn serve(stream: impl Read + Write, handler: &Handler, log: &Mutex<Vec<Asked>>) {
    let mut stream = BufReader::new(stream);
    while let Some(asked) = read_request(&mut stream) {
        log.lock().unwrap().push(asked.clone());
        for step in handler(&asked) {
            let sent = match step {
                Step::Send(bytes) if asked.method == "HEAD" && !bytes.starts_with(b"HTTP/") => Ok(()),
                Step::Send(bytes) => {
                    stream.get_mut().write_all(&bytes).and_then(|()| stream.get_mut().flush())
                }
                Step::Pause(time) => {
                    thread::sleep(time);
                    Ok(())
                }
                Step::Close => return,
            };
            if sent.is_err() {
                return;
            }
        }
    }
}

fn read_request(stream: &mut impl BufRead) -> Option<Asked> {
    let mut line = || {
        let mut line = String::new();
        stream.read_line(&mut line).ok()?;
        line.strip_suffix("\r\n").map(str::to_owned)
    };
    let first = line()?;
    let mut words = first.split(' ');
    let mut asked =
        Asked { method: words.next()?.to_owned(), target: words.next()?.to_owned(), ..Asked::default() };
    loop {
        let header = line()?;
        if header.is_empty() {
            break;
        }
        let (name, value) = header.split_once(": ")?;
        asked.headers.insert(name.to_lowercase(), value.to_owned());
    }
    let length = asked.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    asked.body = vec![0; length];
    stream.read_exact(&mut asked.body).ok()?;
    Some(asked)
}

pub fn serve_image(image: &Image, blobs: &BTreeMap<String, Vec<u8>>, asked: &Asked) -> Reply {
    let last = asked.target.rsplit('/').next().unwrap_or_default();
    if asked.target.contains("/manifests/")
        && [image.digest().to_string(), "tag".to_owned()].contains(&last.to_owned())
    {
        return manifest_reply(&image.manifest, media::OCI_MANIFEST);
    }
    match blobs.get(last) {
        Some(blob) if asked.header("range").is_some() => {
            let from = asked.from();
            let range = format!("bytes {from}-{}/{}", blob.len() - 1, blob.len());
            reply("206 Partial Content", &[("Content-Range", &range)], &blob[from..])
        }
        Some(blob) => reply("200 OK", &[], blob),
        None => reply("404 Not Found", &[], b"{}"),
    }
}

pub fn manifest_reply(manifest: &[u8], media_type: &str) -> Reply {
    let digest = Digest::of(manifest).to_string();
    reply("200 OK", &[("Content-Type", media_type), ("Docker-Content-Digest", &digest)], manifest)
}
