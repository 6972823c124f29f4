//! A registry that wants tokens, and the server of this test that gives them.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use bathy_registry::{Client, Credentials, Event, Keychain, LoginCheck, Logins, Secret};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};

use crate::daemon::Daemon;
use crate::image::{Image, layer};
use crate::server::{Asked, Reply, Server, reply};
use crate::{options, pull, refused, run, store_in};

/// `user:secret` may do everything; who says nothing may pull from `public/`.
struct Issuer {
    key: EcdsaKeyPair,
    certificate: String,
}

impl Issuer {
    fn new(folder: &Path) -> Self {
        let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        run(
            "openssl",
            &[
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-subj",
                "/CN=issuer",
                "-keyout",
                &path("issuer.key"),
                "-out",
                &path("issuer.pem"),
            ],
        );
        run(
            "openssl",
            &[
                "pkcs8",
                "-topk8",
                "-nocrypt",
                "-in",
                &path("issuer.key"),
                "-outform",
                "DER",
                "-out",
                &path("issuer.der"),
            ],
        );
        let der = fs::read(path("issuer.der")).unwrap();
        let key =
            EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &der, &SystemRandom::new()).unwrap();
        let pem = fs::read_to_string(path("issuer.pem")).unwrap();
        let certificate = pem.lines().filter(|line| !line.starts_with('-')).collect();
        Self { key, certificate }
    }

    fn token(&self, asked: &Asked) -> Reply {
        let query = asked.target.split_once('?').map_or("", |(_, query)| query);
        let parameter = |name: &str| {
            let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            value.unwrap_or_default().replace("%3A", ":").replace("%2F", "/").replace("%2C", ",")
        };
        let form = String::from_utf8_lossy(&asked.body);
        let is_known = match (asked.header("authorization"), asked.method.as_str()) {
            (Some(value), _) if value == format!("Basic {}", BASE64_STANDARD.encode("user:secret")) => true,
            (Some(_), _) => return reply("401 Unauthorized", &[], b"{}"),
            (None, "POST") => {
                form.contains("grant_type=refresh_token") && form.contains("refresh_token=identity")
            }
            (None, _) => false,
        };
        let scope = if is_known && !form.is_empty() {
            form.split('&')
                .find_map(|pair| pair.strip_prefix("scope="))
                .unwrap_or_default()
                .replace("%3A", ":")
                .replace("%2F", "/")
        } else {
            parameter("scope")
        };
        let access = match scope.split(':').collect::<Vec<_>>().as_slice() {
            ["repository", name, actions]
                if is_known || (name.starts_with("public/") && *actions == "pull") =>
            {
                let actions: Vec<String> = actions.split(',').map(|action| format!("{action:?}")).collect();
                format!(r#"{{"type":"repository","name":"{name}","actions":[{}]}}"#, actions.join(","))
            }
            _ => String::new(),
        };
        let body = format!(r#"{{"token":"{}","expires_in":300}}"#, self.signed(&access));
        reply("200 OK", &[("Content-Type", "application/json")], body.as_bytes())
    }

    fn signed(&self, access: &str) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let header = format!(r#"{{"typ":"JWT","alg":"ES256","x5c":["{}"]}}"#, self.certificate);
        let claims = format!(
            r#"{{"iss":"issuer","sub":"","aud":"service","exp":{},"nbf":{},"iat":{now},"jti":"1","access":[{access}]}}"#,
            now + 300,
            now - 300
        );
        let encode = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
        let text = format!("{}.{}", encode(header.as_bytes()), encode(claims.as_bytes()));
        let signature = self.key.sign(&SystemRandom::new(), text.as_bytes()).unwrap();
        format!("{text}.{}", encode(signature.as_ref()))
    }
}

fn started() -> (Daemon, Server) {
    let folder = tempfile::tempdir().unwrap();
    let issuer = Arc::new(Mutex::new(Issuer::new(folder.path())));
    let server = Server::start(move |asked| issuer.lock().unwrap().token(asked));
    let auth = format!(
        "auth:\n  token:\n    realm: http://{}/token?a=b\n    service: service\n    issuer: issuer\n    rootcertbundle: {}\n",
        server.address,
        folder.path().join("issuer.pem").display()
    );
    let daemon = Daemon::start(folder, "", &auth);
    let layout = daemon.folder.path().join("layout");
    Image::new((0..5).map(|number| layer(&format!("{number}"))).collect()).write_layout(&layout, "it");
    daemon.fill(&layout, "it", "public/name:tag", &["--dest-creds", "user:secret"]);
    daemon.fill(&layout, "it", "private/name:tag", &["--dest-creds", "user:secret"]);
    (daemon, server)
}

fn client_of(daemon: &Daemon, credentials: &Credentials) -> Client {
    let logins = Logins::at(daemon.folder.path().join("config/registries.json"));
    logins.set(&daemon.address, credentials).unwrap();
    Client::new(options(), Keychain::new(Some(logins), None))
}

fn password(text: &str) -> Credentials {
    Credentials::Password { user: "user".into(), password: Secret::new(text.into()) }
}

#[test]
fn a_token_is_asked_for_once_and_for_no_more_than_is_needed() {
    let (daemon, server) = started();
    let store = store_in(daemon.folder.path());
    let before = server.asked().len();
    pull(&crate::client(), &store, &daemon.reference("public/name:tag")).unwrap();
    let asked = &server.asked()[before..];
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert_eq!(asked[0].target, "/token?a=b&service=service&scope=repository%3Apublic%2Fname%3Apull");
    assert_eq!(asked[0].header("authorization"), None);
    let error = refused(&crate::client(), &store, &daemon.reference("private/name:tag"));
    assert!(error.contains("wants a login, or there is no such repository"), "{error}");
}

#[test]
fn a_login_becomes_a_token() {
    let (daemon, server) = started();
    let store = store_in(daemon.folder.path());
    let reference = daemon.reference("private/name:tag");
    let error = refused(&client_of(&daemon, &password("hunter2")), &store, &reference);
    assert!(error.contains("does not accept the login") && !error.contains("hunter2"), "{error}");
    let checked = crate::client().check_login(&daemon.address, &password("hunter2"));
    assert!(checked.is_err());
    assert_eq!(
        crate::client().check_login(&daemon.address, &password("secret")).unwrap(),
        LoginCheck::Accepted
    );
    let client = client_of(&daemon, &password("secret"));
    let pulled = pull(&client, &store, &reference).unwrap();
    let before = server.asked().len();
    let target = daemon.reference("private/copy:tag").parse().unwrap();
    client.push(&store, &pulled.record, &target, &mut |_: &Event| {}).unwrap();
    let asked = &server.asked()[before..];
    assert!(asked.iter().all(|asked| asked.target.ends_with("copy%3Apull%2Cpush")), "{asked:?}");
    // An identity token is exchanged.
    let client = client_of(&daemon, &Credentials::IdentityToken(Secret::new("identity".into())));
    assert_eq!(client.resolve(&target).unwrap(), pulled.record.manifest);
    let last = server.asked().pop().unwrap();
    assert_eq!(last.method, "POST");
    assert!(!last.target.contains("identity") && last.header("authorization").is_none());
}
