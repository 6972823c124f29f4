//! Which program speaks which language, and how a request is put to it.

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
    /// Descriptor 5 is a file with the fields of the request, each ended by a zero byte; a newline on descriptor 3
    /// announces it. Its source is among its arguments.
    File,
}

/// How a language is spoken.
pub struct Driver {
    /// The program and its arguments.
    pub argv: &'static [&'static str],
    delivery: Delivery,
}

impl Driver {
    /// The driver of a language.
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

    /// Whether code with a zero byte cannot be put to it.
    pub fn refuses_zero_bytes(&self) -> bool {
        matches!(self.delivery, Delivery::File)
    }
}

/// What a process finds as descriptor 5.
pub struct Fifth {
    /// The process's own opening of it, for reading.
    pub theirs: OwnedFd,
    /// Where requests are put, if it is not the driver's source.
    pub requests: Option<OwnedFd>,
}

/// The drivers' sources, as files that are made when they are first needed.
#[derive(Default)]
pub struct Sources {
    files: Vec<(Language, OwnedFd)>,
}

impl Sources {
    /// Descriptor 5 for one more process.
    pub fn fifth(&mut self, language: Language, processes: &Processes) -> io::Result<Fifth> {
        let Delivery::Stream(source) = Driver::of(language).delivery else {
            let file = memfd_create("cell", MemfdFlags::CLOEXEC)?;
            // One who could write to it could also hold it locked while we want to.
            fchmod(&file, Mode::RUSR | Mode::RGRP | Mode::ROTH)?;
            let theirs = processes.reopen(file.as_fd())?;
            return Ok(Fifth { theirs, requests: Some(file) });
        };
        if !self.files.iter().any(|(known, _)| *known == language) {
            self.files.push((language, sealed(source.as_bytes())?));
        }
        let file = self.files.iter().find(|(known, _)| *known == language);
        let (_, file) = file.ok_or(io::ErrorKind::NotFound)?;
        // An opening of its own: the offset of a shared one would be everybody's.
        Ok(Fifth { theirs: processes.reopen(file.as_fd())?, requests: None })
    }
}

fn sealed(bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = memfd_create("driver", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    write_all_at_start(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file)
}

/// Puts these bytes at the beginning of a file.
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

/// A request as a driver reads it from a byte stream.
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

/// A request as a driver reads it from a file.
pub fn zero_ended(fields: &[&[u8]]) -> Vec<u8> {
    let mut request = Vec::with_capacity(fields.iter().map(|field| field.len() + 1).sum());
    for field in fields {
        request.extend_from_slice(field);
        request.push(0);
    }
    request
}
