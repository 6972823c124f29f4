//! Downloads one blob from a registry into the store.

use std::time::Duration;

use http::header::{CONTENT_LENGTH, CONTENT_RANGE, HeaderValue, RANGE};
use http::{HeaderMap, StatusCode};

use super::TransferError;
use super::progress::{Event, Reporter};
use super::session::Session;
use crate::client::ClientError;
use crate::content::{BlobWriter, Store};
use crate::http::{Call, HttpError, Response};
use crate::manifest::Descriptor;

/// How often it is looked whether another process has finished.
const WAIT: Duration = Duration::from_millis(50);
/// How many bytes there are at least between two reports.
const REPORTED: u64 = 256 << 10;

/// How much has to arrive between two failures, so that they do not add up.
const PROGRESS: u64 = 64 << 10;

/// What is fetched, and how it is called in messages.
pub struct Wanted<'a> {
    pub descriptor: &'a Descriptor,
    pub what: String,
}

impl Session<'_> {
    /// Brings a blob into the store: what is there already of an earlier attempt is not fetched again.
    pub fn download(
        &mut self,
        store: &Store,
        wanted: &Wanted<'_>,
        reporter: &Reporter,
    ) -> Result<(), TransferError> {
        let Descriptor { digest, size, .. } = wanted.descriptor;
        let mut is_waiting = false;
        let begun = store.begin(digest, *size, &wanted.what, || {
            if !is_waiting {
                is_waiting = true;
                reporter.report(Event::Waiting(digest.clone()));
            }
            self.link.pause(WAIT).map_err(|error| TransferError::from(ClientError::from(error)))
        })?;
        if let Some(writer) = begun {
            self.download_into(writer, wanted, reporter)?;
        }
        reporter.report(Event::Done(digest.clone()));
        Ok(())
    }

    fn download_into(
        &mut self,
        mut writer: BlobWriter,
        wanted: &Wanted<'_>,
        reporter: &Reporter,
    ) -> Result<(), TransferError> {
        let (mut failures, mut is_pieced, mut is_replaced) = (0, writer.is_resumed(), false);
        loop {
            let before = writer.length();
            if before < writer.size() {
                match self.append(&mut writer, wanted, reporter) {
                    Err(TransferError::Client(error)) => {
                        // No progress makes good that all was sent anew: a registry could do so without end.
                        if writer.length() >= before + PROGRESS {
                            failures = writer.restarts();
                        }
                        is_pieced |= writer.length() > 0;
                        self.recover(error, &mut failures)?;
                        continue;
                    }
                    appended => appended?,
                }
            }
            // The pieces may be of different contents, or lost their pages with the power: once more as a whole.
            if is_pieced && !is_replaced && !writer.is_right() {
                writer.restart()?;
                (is_pieced, is_replaced) = (false, true);
                continue;
            }
            return Ok(writer.finish()?);
        }
    }

    /// Fetches the rest of a blob.
    fn append(
        &mut self,
        writer: &mut BlobWriter,
        wanted: &Wanted<'_>,
        reporter: &Reporter,
    ) -> Result<(), TransferError> {
        let digest = &wanted.descriptor.digest;
        let mut call = Call::get(self.url(&format!("blobs/{digest}")));
        if writer.length() > 0 {
            let range = HeaderValue::try_from(format!("bytes={}-", writer.length()));
            call =
                call.with(RANGE, range.map_err(|error| ClientError::from(HttpError::Request(error.into())))?);
        }
        let mut response = self.send(&call)?;
        match response.status {
            StatusCode::OK => {
                if writer.length() > 0 {
                    writer.restart()?;
                }
                check_length(&response.headers, writer.size(), wanted)?;
            }
            StatusCode::PARTIAL_CONTENT => check_range(&response, writer, wanted)?,
            StatusCode::RANGE_NOT_SATISFIABLE if writer.length() > 0 => {
                self.link.discard(response).map_err(ClientError::from)?;
                writer.restart()?;
                return self.append(writer, wanted, reporter);
            }
            _ => return Err(self.read_refusal(response, &wanted.what)?.into()),
        }
        self.copy(&mut response, writer, reporter, digest)?;
        let origin = response.url.origin.clone();
        self.link.finish(response);
        let (found, size) = (writer.length(), writer.size());
        if found == size {
            Ok(())
        } else {
            Err(ClientError::Short { origin, what: wanted.what.clone(), found, size }.into())
        }
    }

    fn copy(
        &mut self,
        response: &mut Response,
        writer: &mut BlobWriter,
        reporter: &Reporter,
        digest: &crate::digest::Digest,
    ) -> Result<(), TransferError> {
        let report = |done| reporter.report(Event::Progress { digest: digest.clone(), done });
        let mut reported = writer.length();
        report(reported);
        while let Some(chunk) = self.link.chunk(response).map_err(ClientError::from)? {
            writer.write(&chunk)?;
            if writer.length() - reported >= REPORTED {
                reported = writer.length();
                report(reported);
            }
        }
        report(writer.length());
        Ok(())
    }
}

/// A whole blob of another length is not worth beginning.
fn check_length(headers: &HeaderMap, expected: u64, wanted: &Wanted<'_>) -> Result<(), ClientError> {
    let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    match length {
        Some(found) if found != expected => {
            Err(ClientError::Size { what: wanted.what.clone(), found, expected })
        }
        _ => Ok(()),
    }
}

/// A part has to be the one that was asked for: `bytes FROM-TO/SIZE`.
fn check_range(response: &Response, writer: &BlobWriter, wanted: &Wanted<'_>) -> Result<(), ClientError> {
    let wrong = || ClientError::Range { origin: response.url.origin.clone(), what: wanted.what.clone() };
    let value = response.headers.get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
    let (range, size) =
        value.and_then(|value| value.strip_prefix("bytes ")?.split_once('/')).ok_or_else(wrong)?;
    let from: u64 = range.split_once('-').and_then(|(from, _)| from.parse().ok()).ok_or_else(wrong)?;
    let is_size = size == "*" || size.parse() == Ok(writer.size());
    if writer.length() > 0 && from == writer.length() && is_size { Ok(()) } else { Err(wrong()) }
}
