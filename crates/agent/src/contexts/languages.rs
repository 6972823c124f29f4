//! The programs that run each language, and how requests are passed to them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use bathy_protocol::cell::Language;
use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, memfd_create};

use super::{bash, node, python};
use crate::processes::Processes;

/// How a driver gets its source and its requests.
#[derive(Clone, Copy)]
enum Delivery {
    /// Descriptor 5 is its source; requests are length-prefixed fields on descriptor 3.
    Stream(&'static str),
    /// Descriptor 5 is a file with the NUL-terminated fields of the request; a newline on descriptor 3
    /// announces it. The source is among the arguments.
    File,
}

/// The driver of a language.
pub struct Driver {
    /// The program and its arguments.
    pub argv: &'static [&'static str],
    delivery: Delivery,
}

impl Driver {
    pub fn of(language: Language) -> Self {
        match language {
            Language::Python => Self { argv: &python::ARGV, delivery: Delivery::Stream(python::SOURCE) },
            Language::JavaScript | Language::TypeScript => {
                Self { argv: &node::ARGV, delivery: Delivery::Stream(node::SOURCE) }
            }
            Language::Bash => Self { argv: &bash::ARGV, delivery: Delivery::File },
        }
    }

    pub fn program(&self) -> &'static str {
        self.argv.first().copied().unwrap_or_default()
    }

    /// Whether code with a NUL byte is refused.
    pub fn refuses_zero_bytes(&self) -> bool {
        matches!(self.delivery, Delivery::File)
    }
}

/// Descriptor 5 of a driver process.
pub struct Fifth {
    /// The process's own open file description, for reading.
    pub theirs: OwnedFd,
    /// The file for requests, unless it is the driver's source.
    pub requests: Option<OwnedFd>,
}

/// The drivers' sources, as files that are created on demand.
#[derive(Default)]
pub struct Sources {
    files: Vec<(Language, OwnedFd)>,
}

impl Sources {
    /// Creates descriptor 5 for a new process.
    pub fn fifth(&mut self, language: Language, processes: &Processes) -> io::Result<Fifth> {
        let Delivery::Stream(source) = Driver::of(language).delivery else {
            let file = memfd_create("cell", MemfdFlags::CLOEXEC)?;
            // A process that can write to it could also hold a lock that we need.
            fchmod(&file, Mode::RUSR | Mode::RGRP | Mode::ROTH)?;
            let theirs = processes.reopen(file.as_fd())?;
            return Ok(Fifth { theirs, requests: Some(file) });
        };
        if !self.files.iter().any(|(known, _)| *known == language) {
            self.files.push((language, sealed(source.as_bytes())?));
        }
        let file = self.files.iter().find(|(known, _)| *known == language);
        let (_, file) = file.ok_or(io::ErrorKind::NotFound)?;
        // A separate open file description, because a shared one would share the file offset.
        Ok(Fifth { theirs: processes.reopen(file.as_fd())?, requests: None })
    }
}

fn sealed(bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = memfd_create("driver", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    write_all_at_start(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file)
}

/// Writes to the start of a file.
pub fn write_all_at_start(file: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    let mut written = 0;
    while let Some(rest) = bytes.get(written..).filter(|rest| !rest.is_empty()) {
        match rustix::io::pwrite(file, rest, written as u64)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => written += count,
        }
    }
    Ok(())
}

/// Encodes a request for a byte stream.
pub fn length_prefixed(fields: &[&[u8]]) -> Vec<u8> {
    let prefix = |length: usize| u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes();
    let total: usize = fields.iter().map(|field| 4 + field.len()).sum();
    let mut request = Vec::with_capacity(4 + total);
    request.extend_from_slice(&prefix(total));
    for field in fields {
        request.extend_from_slice(&prefix(field.len()));
        request.extend_from_slice(field);
    }
    request
}

/// Encodes a request for a file.
pub fn zero_ended(fields: &[&[u8]]) -> Vec<u8> {
    let mut request = Vec::with_capacity(fields.iter().map(|field| field.len() + 1).sum());
    for field in fields {
        request.extend_from_slice(field);
        request.push(0);
    }
    request
}
