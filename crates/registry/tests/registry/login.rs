//! A registry with TLS that wants a user and a password.

use std::fs;
use std::path::Path;
use std::process::Command;

use bathy_registry::{Client, Credentials, Keychain, LoginCheck, Logins, Options, Secret};

use crate::daemon::Daemon;
use crate::image::{Image, layer};
use crate::server::{Server, reply};
use crate::tls::Certificates;
use crate::{chain, example, options, pull, refused, run, store_in};

/// `user`, whose password is `secret`, as htpasswd writes it.
const USERS: &str = "user:$2y$05$dCqGHDJloJ48xFkA0JoTjO.PNVfxxpbFBJQ1Ta4rrSFxc9q9dNBzu\n";

fn started() -> (Daemon, Certificates) {
    let folder = tempfile::tempdir().unwrap();
    let certificates = Certificates::new(folder.path());
    let users = folder.path().join("users");
    fs::write(&users, USERS).unwrap();
    let auth = format!("auth:\n  htpasswd:\n    realm: test\n    path: {}\n", users.display());
    let daemon = Daemon::start(folder, &certificates.section(), &auth);
    let layout = daemon.folder.path().join("layout");
    Image::new(vec![layer("one")]).write_layout(&layout, "it");
    daemon.fill(&layout, "it", "name:tag", &["--dest-creds", "user:secret"]);
    (daemon, certificates)
}

fn with(certificates: &Certificates, keychain: Keychain) -> Client {
    let trusted = Some(certificates.authority.clone());
    Client::new(Options { insecure: false, certificates: trusted, ..options() }, keychain)
}

fn password(text: &str) -> Credentials {
    Credentials::Password { user: "user".into(), password: Secret::new(text.into()) }
}

#[test]
fn the_certificate_is_checked_before_anything_is_said() {
    let (daemon, certificates) = started();
    let store = store_in(daemon.folder.path());
    let others = Certificates::new(tempfile::tempdir().unwrap().keep().as_path());
    let error = refused(&with(&others, Keychain::empty()), &store, &daemon.reference("name:tag"));
    assert!(error.contains("not signed by an authority") && error.contains("SSL_CERT_FILE"), "{error}");
    let elsewhere = daemon.reference("name:tag").replace("127.0.0.1", "localhost");
    let error = refused(&with(&certificates, Keychain::empty()), &store, &elsewhere);
    assert!(error.contains("for another name"), "{error}");
    let plain = Client::new(options(), Keychain::empty());
    let error = refused(&plain, &store, &daemon.reference("name:tag"));
    assert!(error.contains("400"), "{error}");
    fs::remove_dir_all(others.key.parent().unwrap()).unwrap();
}

#[test]
fn a_login_is_wanted_checked_and_used() {
    let (daemon, certificates) = started();
    let store = store_in(daemon.folder.path());
    let reference = daemon.reference("name:tag");
    let anonymous = with(&certificates, Keychain::empty());
    let error = refused(&anonymous, &store, &reference);
    assert!(error.ends_with(&format!("bathy login {}", daemon.address)), "{error}");
    let wrong = anonymous.check_login(&daemon.address, &password("hunter2")).unwrap_err();
    assert!(wrong.to_string().contains("does not accept the login"), "{wrong}");
    assert!(!format!("{} {wrong:?}", chain(&wrong)).contains("hunter2"));
    let checking = with(&certificates, Keychain::empty());
    assert_eq!(checking.check_login(&daemon.address, &password("secret")).unwrap(), LoginCheck::Accepted);
    let logins = Logins::at(daemon.folder.path().join("config/registries.json"));
    logins.set(&daemon.address, &password("hunter2")).unwrap();
    let keychain = Keychain::new(Some(logins.clone()), None);
    let error = refused(&with(&certificates, keychain.clone()), &store, &reference);
    assert!(error.contains("does not accept the login"), "{error}");
    logins.set(&daemon.address, &password("secret")).unwrap();
    let client = with(&certificates, keychain);
    let pulled = pull(&client, &store, &reference).unwrap();
    let target = daemon.reference("other:tag").parse().unwrap();
    client.push(&store, &pulled.record, &target, &mut |_: &bathy_registry::Event| {}).unwrap();
    assert_eq!(client.resolve(&target).unwrap(), pulled.record.manifest);
    // `user:secret`, as it was sent.
    assert!(!format!("{client:?}").contains("dXNlcjpzZWNyZXQ"));
}

#[test]
fn the_logins_of_docker_are_used() {
    let (daemon, certificates) = started();
    let store = store_in(daemon.folder.path());
    let file = daemon.folder.path().join("config.json");
    let file_text = file.to_str().unwrap();
    let authority = certificates.authority.parent().unwrap();
    // As another program writes it.
    let (address, folder) = (daemon.address.as_str(), daemon.folder.path().join("certs"));
    fs::create_dir(&folder).unwrap();
    fs::copy(authority.join("authority.pem"), folder.join("ca.crt")).unwrap();
    let folder = folder.to_str().unwrap();
    run(
        "skopeo",
        &["login", "--cert-dir", folder, "--authfile", file_text, "-u", "user", "-p", "secret", address],
    );
    let keychain = Keychain::new(None, Some(file.clone()));
    pull(&with(&certificates, keychain), &store, &daemon.reference("name:tag")).unwrap();
    // Found by the environment, as is whom to trust.
    let reference = daemon.reference("name:tag");
    let try_with = |config: &Path, trusted: &Path| {
        let store = tempfile::tempdir().unwrap();
        let mut command = Command::new(example());
        command.env("DOCKER_CONFIG", config).env("SSL_CERT_FILE", trusted).env_remove("SSL_CERT_DIR");
        let output = command.arg(store.path()).arg(&reference).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let config = file.parent().unwrap();
    assert_eq!(try_with(config, &certificates.authority), (true, String::new()));
    let (is_pulled, errors) = try_with(Path::new(&folder), &certificates.authority);
    assert!(!is_pulled && errors.contains("Login"), "{errors}");
    let (is_pulled, errors) = try_with(config, &certificates.key);
    assert!(!is_pulled && errors.contains("NoRoots"), "{errors}");
}

#[test]
fn each_login_is_checked_for_itself() {
    // `user:secret`.
    let server = Server::start(|asked| match asked.header("authorization") {
        Some("Basic dXNlcjpzZWNyZXQ=") => reply("200 OK", &[], b"{}"),
        _ => reply("401 Unauthorized", &[("WWW-Authenticate", "Basic realm=\"x\"")], b"{}"),
    });
    let (client, address) = (Client::new(options(), Keychain::empty()), server.address.to_string());
    assert_eq!(client.check_login(&address, &password("secret")).unwrap(), LoginCheck::Accepted);
    let error = client.check_login(&address, &password("hunter2")).unwrap_err();
    assert!(error.to_string().contains("does not accept the login"), "{error}");
    let open = Server::start(|_| reply("200 OK", &[], b"{}"));
    let checked = client.check_login(&open.address.to_string(), &password("hunter2"));
    assert_eq!(checked.unwrap(), LoginCheck::NotAsked);
}
