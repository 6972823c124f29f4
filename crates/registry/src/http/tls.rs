//! TLS with the system's certificates.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject};
use rustls::{CertificateError, ClientConfig, RootCertStore, crypto};
use thiserror::Error;

/// Why there is no TLS with a server.
#[derive(Debug, Error)]
pub enum TlsError {
    #[error(
        "Its certificate is not signed by an authority that this machine trusts. SSL_CERT_FILE can name a file with further certificates"
    )]
    Issuer(#[source] rustls::Error),
    #[error("Its certificate is for another name")]
    Name(#[source] rustls::Error),
    #[error("Its certificate is not valid at this time. Is this machine's clock right?")]
    Time(#[source] rustls::Error),
    #[error("It does not speak TLS. A registry on this machine can be reached without (`--insecure`)")]
    NotTls(#[source] rustls::Error),
    #[error("It ended the connection instead")]
    Ended(#[source] io::Error),
    #[error("The handshake failed")]
    Handshake(#[source] rustls::Error),
    #[error(
        "This machine trusts no certificates at all. Install the package ca-certificates, or let SSL_CERT_FILE name a file"
    )]
    NoRoots,
    #[error("{0} has no certificates")]
    File(PathBuf, #[source] pem::Error),
    #[error("It cannot be set up")]
    Setup(#[source] rustls::Error),
}

impl TlsError {
    pub fn of_handshake(error: io::Error) -> Self {
        let known = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()).cloned();
        let Some(known) = known else { return Self::Ended(error) };
        match &known {
            rustls::Error::InvalidCertificate(reason) => match reason {
                // A bad signature: the issuer has the same name and another key.
                CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::Issuer(known),
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                    Self::Name(known)
                }
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. } => Self::Time(known),
                _ => Self::Handshake(known),
            },
            rustls::Error::InvalidMessage(_) => Self::NotTls(known),
            _ => Self::Handshake(known),
        }
    }
}

/// What servers are checked against, loaded when the first one is.
#[derive(Debug, Default)]
pub struct Tls {
    file: Option<PathBuf>,
    config: OnceLock<Arc<ClientConfig>>,
}

impl Tls {
    pub fn new(file: Option<PathBuf>) -> Self {
        Self { file, config: OnceLock::new() }
    }

    pub fn config(&self) -> Result<Arc<ClientConfig>, TlsError> {
        if let Some(config) = self.config.get() {
            return Ok(config.clone());
        }
        let mut roots = RootCertStore::empty();
        // Of hundreds some are always of a kind that cannot be used.
        roots.add_parsable_certificates(self.certificates()?);
        if roots.is_empty() {
            return Err(TlsError::NoRoots);
        }
        let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Setup)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(self.config.get_or_init(|| Arc::new(config)).clone())
    }

    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        match &self.file {
            None => Ok(rustls_native_certs::load_native_certs().certs),
            Some(path) => {
                let failed = |error| TlsError::File(path.clone(), error);
                CertificateDer::pem_file_iter(path).map_err(failed)?.collect::<Result<_, _>>().map_err(failed)
            }
        }
    }
}
