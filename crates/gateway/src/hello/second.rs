//! What a client sends after its ClientHello, as long as a second one in plaintext may follow.
//!
//! A TLS 1.3 server may send a HelloRetryRequest. RFC 8446 requires the same name in the second ClientHello, but a
//! client can change it, and some servers use the second name.

use bathy_policy::HostName;

use super::{
    APPLICATION_DATA, ClientHello, HANDSHAKE, Hello, HelloReader, HelloRefusal, MAX_RECORD, RECORD_HEADER,
};

const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
/// How much encryption may lengthen a record (RFC 5246).
const MAX_EXPANSION: usize = 2048;

/// Watches the client's stream behind its first ClientHello.
///
/// Bytes may be forwarded once they were pushed without an error: a changed name is detected before the last byte
/// of the second ClientHello is forwarded.
#[derive(Debug)]
pub struct SecondHello {
    name: Option<HostName>,
    encrypted_hello: bool,
    /// Whether early data may come between the two ClientHellos.
    early_data: bool,
    /// The header of the current record.
    header: Vec<u8>,
    /// How many bytes of the current record are to be skipped.
    skipped: usize,
    /// Whether the client has sent ChangeCipherSpec: what follows is encrypted in TLS 1.2, while TLS 1.3 gives it
    /// no meaning.
    changed_cipher: bool,
    reader: Option<HelloReader>,
    result: Option<Result<(), HelloRefusal>>,
}

impl SecondHello {
    /// Starts behind the record that the first ClientHello ends with.
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

    /// Parses the next bytes. Returns whether more have to be watched.
    ///
    /// # Errors
    /// If these bytes must not be forwarded. The error is final.
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

    /// `Some` when nothing is left to watch.
    fn parse_header(&mut self) -> Result<Option<()>, HelloRefusal> {
        match *self.header.as_slice() {
            [HANDSHAKE] => {
                // Early data exists in TLS 1.3 only, where no record of this type is encrypted.
                let may_be_encrypted = self.changed_cipher && !self.early_data;
                let mut reader = HelloReader { may_be_encrypted, ..HelloReader::default() };
                reader.push(&[HANDSHAKE]);
                self.reader = Some(reader);
            }
            // Everything after this is encrypted.
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
            // The TLS 1.2 handshake continues: no second ClientHello comes before it is encrypted.
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
