//! What is sent with a request.

use std::fs::File;
use std::io::{self, Read};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, SizeHint};

/// How much of a file is sent at once.
const CHUNK: usize = 1 << 17;

/// A file that is sent.
pub struct FileContent {
    pub file: File,
    pub size: u64,
    /// Called with how many bytes were sent.
    pub notify: Box<dyn Fn(u64) + Send + Sync>,
}

/// What a request carries. It can be sent more than once.
#[derive(Clone, Default)]
pub enum Content {
    #[default]
    None,
    Bytes(Bytes),
    File(Arc<FileContent>),
}

/// The same on its way.
pub struct Payload {
    content: Content,
    /// How much hyper has taken.
    sent: Arc<AtomicU64>,
}

impl Payload {
    pub fn new(content: Content) -> (Self, Arc<AtomicU64>) {
        let sent = Arc::new(AtomicU64::new(0));
        (Self { content, sent: sent.clone() }, sent)
    }

    fn size(&self) -> u64 {
        match &self.content {
            Content::None => 0,
            Content::Bytes(bytes) => bytes.len() as u64,
            Content::File(content) => content.size,
        }
    }

    fn next(&self) -> io::Result<Option<Bytes>> {
        let from = self.sent.load(Ordering::Relaxed);
        let left = self.size() - from;
        if left == 0 {
            return Ok(None);
        }
        let bytes = match &self.content {
            Content::None => return Ok(None),
            Content::Bytes(bytes) => bytes.clone(),
            Content::File(content) => {
                let mut chunk = Vec::new();
                let wanted = left.min(CHUNK as u64);
                At { file: &content.file, offset: from }.take(wanted).read_to_end(&mut chunk)?;
                if chunk.len() as u64 != wanted {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
                }
                (content.notify)(from + wanted);
                chunk.into()
            }
        };
        self.sent.store(from + bytes.len() as u64, Ordering::Relaxed);
        Ok(Some(bytes))
    }
}

/// Reads a file at an offset of its own, so that several uploads may share the file.
struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = std::os::unix::fs::FileExt::read_at(self.file, buffer, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}

impl Body for Payload {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Poll::Ready(self.next().map(|bytes| bytes.map(Frame::data)).transpose())
    }

    fn is_end_stream(&self) -> bool {
        self.size() == self.sent.load(Ordering::Relaxed)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.size() - self.sent.load(Ordering::Relaxed))
    }
}
