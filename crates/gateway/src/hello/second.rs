//! What a client sends after its hello, as long as that may be another hello in the clear.
//!
//! A TLS 1.3 server may ask for a second hello with other keys. Nothing but good manners makes a client put the same name
//! into it, and some servers act on the second name.

use bathy_policy::HostName;

use super::{
    APPLICATION_DATA, ClientHello, HANDSHAKE, Hello, HelloReader, HelloRefusal, MAX_RECORD, RECORD_HEADER,
};

const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
/// Encryption may make a record so much longer (RFC 5246).
const MAX_EXPANSION: usize = 2048;

/// Watches the client's stream behind its first hello.
///
/// Each piece may be passed on as soon as it was shown here without an error: a second hello that says something else is
/// noticed before its last byte has gone.
#[derive(Debug)]
pub struct SecondHello {
    name: Option<HostName>,
    encrypted_hello: bool,
    /// Whether records with early data may stand between the hellos.
    early_data: bool,
    /// The header of the record that is being read.
    header: Vec<u8>,
    /// How many bytes of that record are still to be skipped.
    skipped: usize,
    /// Whether the client has announced that it encrypts: true in TLS 1.2, and without meaning in TLS 1.3.
    changed_cipher: bool,
    reader: Option<HelloReader>,
    result: Option<Result<(), HelloRefusal>>,
}

impl SecondHello {
    /// Begins right behind the record that the first hello ends with.
    #[must_use]
    pub fn new(first: &ClientHello) -> Self {
        Self {
            name: first.name.clone(),
            encrypted_hello: first.encrypted_hello,
            early_data: first.early_data,
            header: Vec::new(),
            skipped: 0,
            changed_cipher: false,
            reader: None,
            result: None,
        }
    }

    /// Takes the bytes that follow those of the calls before. Says whether more have to be shown.
    ///
    /// # Errors
    ///
    /// If these bytes must not be passed on. The same error comes again.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<bool, HelloRefusal> {
        while self.result.is_none() && !bytes.is_empty() {
            if let Some(reader) = &mut self.reader {
                let hello = reader.push(bytes);
                self.result = self.decide(hello);
                break;
            }
            let (skipped, rest) = bytes.split_at(self.skipped.min(bytes.len()));
            self.skipped -= skipped.len();
            bytes = rest;
            if let Some((byte, rest)) = bytes.split_first() {
                bytes = rest;
                self.header.push(*byte);
                self.result = self.parse_header().transpose();
            }
        }
        self.result.map_or(Ok(true), |result| result.map(|()| false))
    }

    /// `Some` when there is nothing more to watch.
    fn parse_header(&mut self) -> Result<Option<()>, HelloRefusal> {
        match *self.header.as_slice() {
            [HANDSHAKE] => {
                // A client with early data speaks TLS 1.3, so nothing of this type is encrypted.
                let may_be_encrypted = self.changed_cipher && !self.early_data;
                let mut reader = HelloReader { may_be_encrypted, ..HelloReader::default() };
                reader.push(&[HANDSHAKE]);
                self.reader = Some(reader);
            }
            // From here on everything is encrypted.
            [APPLICATION_DATA] if !self.early_data => return Ok(Some(())),
            [CHANGE_CIPHER_SPEC] => self.changed_cipher = true,
            [ALERT | APPLICATION_DATA] => {}
            [_] => return Err(HelloRefusal::Record),
            [_, major, _, high, low] => {
                let length = usize::from(u16::from_be_bytes([high, low]));
                if major != 3 || length > MAX_RECORD + MAX_EXPANSION {
                    return Err(HelloRefusal::Record);
                }
                self.skipped = length;
                self.header.clear();
            }
            _ => {}
        }
        debug_assert!(self.header.len() < RECORD_HEADER);
        Ok(None)
    }

    fn decide(&self, hello: Hello) -> Option<Result<(), HelloRefusal>> {
        match hello {
            Hello::More => None,
            // The handshake of TLS 1.2 goes on: there is no second hello before it is encrypted.
            Hello::Refused(HelloRefusal::NotHello(_)) => Some(Ok(())),
            Hello::Refused(refusal) => Some(Err(refusal)),
            Hello::NotTls => Some(Err(HelloRefusal::Record)),
            Hello::Read(second) => {
                let same = second.name == self.name && (self.encrypted_hello || !second.encrypted_hello);
                Some(if same { Ok(()) } else { Err(HelloRefusal::Changed) })
            }
        }
    }
}
