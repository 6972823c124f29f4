//! Certificates of a test.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::run;

/// A key, its certificate for 127.0.0.1 and registry.test, and who signed it.
pub struct Certificates {
    pub authority: PathBuf,
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Certificates {
    pub fn new(folder: &Path) -> Self {
        let path = |name: &str| folder.join(name);
        let extensions = path("extensions");
        fs::write(&extensions, "subjectAltName=IP:127.0.0.1,DNS:registry.test\nbasicConstraints=CA:FALSE\n")
            .unwrap();
        let (authority, authority_key) = (path("authority.pem"), path("authority.key"));
        let (key, request, certificate) = (path("key.pem"), path("request.pem"), path("certificate.pem"));
        let ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let openssl = |arguments: &[&str]| run("openssl", arguments);
        openssl(
            &[
                &["req", "-x509", "-subj", "/CN=test authority"],
                &ec[..],
                &["-keyout", &text(&authority_key), "-out", &text(&authority)],
            ]
            .concat(),
        );
        openssl(
            &[&["req", "-subj", "/CN=test"], &ec[..], &["-keyout", &text(&key), "-out", &text(&request)]]
                .concat(),
        );
        openssl(&[
            "x509",
            "-req",
            "-in",
            &text(&request),
            "-CA",
            &text(&authority),
            "-CAkey",
            &text(&authority_key),
            "-CAcreateserial",
            "-extfile",
            &text(&extensions),
            "-days",
            "2",
            "-out",
            &text(&certificate),
        ]);
        Self { authority, certificate, key }
    }

    /// For a server of ours.
    pub fn server(&self) -> Arc<ServerConfig> {
        let certificate = CertificateDer::from_pem_file(&self.certificate).unwrap();
        let key = PrivateKeyDer::from_pem_file(&self.key).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        Arc::new(config.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap())
    }

    /// As a part of docker-registry's `http:`.
    pub fn section(&self) -> String {
        let (certificate, key) = (self.certificate.display(), self.key.display());
        format!("  tls:\n    certificate: {certificate}\n    key: {key}\n")
    }
}
