//! Registries that attack (C5): what they send is refused by name, and nothing of it stays.

use std::sync::Arc;

use bathy_registry::manifest::media;
use bathy_registry::{Client, Credentials, Digest, Event, Keychain, Logins, Options, Secret};

use crate::image::{Image, descriptor, index, layer, manifest, noise, platform_entry};
use crate::server::{Asked, Reply, Server, Step, head, manifest_reply, reply, serve_image};
use crate::tls::Certificates;
use crate::{assert_nothing, client, names, options, pull, refused, store_in};

const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

fn image() -> Image {
    Image::new(vec![layer("one"), noise(1, 100_000)])
}

/// What is said of a registry that has this under the tag. Nothing of it may be in the store.
fn refusal_of(content: Vec<u8>, media_type: &'static str) -> String {
    let image = image();
    let server = Server::hosting(&image, move |asked| {
        asked.target.ends_with("/manifests/tag").then(|| manifest_reply(&content, media_type))
    });
    let folder = tempfile::tempdir().unwrap();
    let store = store_in(folder.path());
    let error = refused(&client(), &store, &server.reference());
    assert_eq!(server.count("/blobs/"), 0, "nothing else is asked for");
    assert_nothing(&store, "");
    error
}

/// Answers with other content where `part` is in the address.
fn replaced(image: &Image, part: String, content: Vec<u8>) -> Server {
    Server::hosting(image, move |asked| asked.target.contains(&part).then(|| reply("200 OK", &[], &content)))
}

#[test]
fn c5_wrong_content_is_refused_at_every_level() {
    let image = image();
    for (what, blob) in [("The config of", &image.config), ("Layer 1 of", &image.layers[0])] {
        let mut other = blob.clone();
        other[7] ^= 1;
        let digest = Digest::of(blob);
        let server = replaced(&image, digest.hex().to_owned(), other.clone());
        let folder = tempfile::tempdir().unwrap();
        let store = store_in(folder.path());
        let error = refused(&client(), &store, &server.reference());
        assert!(error.contains(what) && error.contains(&format!("expected {digest}")), "{error}");
        assert!(error.contains(&Digest::of(&other).to_string()), "{error}");
        assert_nothing(&store, digest.hex());
        assert_eq!(server.count(digest.hex()), 1, "the same again would not help");
    }
}

#[test]
fn c5_a_manifest_has_the_digest_that_was_asked_for() {
    let image = image();
    let other = Image::new(vec![layer("other")]);
    let content = other.manifest.clone();
    let server = Server::hosting(&image, move |asked| {
        asked.target.contains("/manifests/").then(|| manifest_reply(&content, media::OCI_MANIFEST))
    });
    let folder = tempfile::tempdir().unwrap();
    let store = store_in(folder.path());
    let reference = format!("{}/name@{}", server.address, image.digest());
    let error = refused(&client(), &store, &reference);
    assert!(
        error.contains(&format!("its digest is {}, expected {}", other.digest(), image.digest())),
        "{error}"
    );
    assert_nothing(&store, other.digest().hex());
    let error = client().resolve(&reference.parse().unwrap()).unwrap_err().to_string();
    assert!(error.contains("wrong content"), "{error}");
    // By tag the registry may choose, and is held to what it says.
    let content = other.manifest;
    let said = image.digest().to_string();
    let server = Server::start(move |_| {
        let headers = [("Docker-Content-Digest", said.as_str()), ("Content-Type", media::OCI_MANIFEST)];
        reply("200 OK", &headers, &content)
    });
    let error = refused(&client(), &store, &server.reference());
    assert!(error.contains("wrong content"), "{error}");
    let server = Server::start(|_| reply("200 OK", &[("Docker-Content-Digest", "md5:x")], b"{}"));
    let error = refused(&client(), &store, &server.reference());
    assert!(error.contains("names no digest"), "{error}");
    assert_nothing(&store, "");
}

#[test]
fn c5_a_manifest_of_an_index_has_the_digest_and_the_kind_that_the_index_names() {
    let image = image();
    let entry = platform_entry(&image.manifest, "amd64");
    let text = index(&entry).into_bytes();
    let other = Image::new(vec![layer("other")]);
    let content = other.manifest.clone();
    let inner = image.digest().to_string();
    let (folder, hosted) = (tempfile::tempdir().unwrap(), text.clone());
    let server = Server::hosting(&image, move |asked| {
        let is_inner = asked.target.ends_with(&inner);
        let is_index = asked.target.ends_with("/manifests/tag");
        let of_inner = || manifest_reply(&content, media::OCI_MANIFEST);
        if is_inner { Some(of_inner()) } else { is_index.then(|| manifest_reply(&hosted, media::OCI_INDEX)) }
    });
    let store = store_in(folder.path());
    let error = refused(&client(), &store, &server.reference());
    assert!(
        error.contains(&format!("its digest is {}, expected {}", other.digest(), image.digest())),
        "{error}"
    );
    assert_nothing(&store, image.digest().hex());
    // What is named as a manifest and is an index itself.
    let nested = index(&platform_entry(&text, "amd64")).into_bytes();
    let server = Server::hosting(&image, move |asked| {
        let is_index = asked.target.ends_with("/manifests/tag");
        let content = if is_index { &nested } else { &text };
        asked.target.contains("/manifests/").then(|| manifest_reply(content, media::OCI_INDEX))
    });
    let error = refused(&client(), &store, &server.reference());
    assert!(error.contains("another index"), "{error}");
    assert_nothing(&store, "");
}

#[test]
fn c5_layers_of_any_number_are_bounded() {
    let config = descriptor(media::OCI_CONFIG, &image().config);
    let of = |count: usize| {
        let layers: Vec<String> = (0..count).map(|number| descriptor(GZIP, &number.to_le_bytes())).collect();
        refusal_of(manifest(&config, &layers.join(",")), media::OCI_MANIFEST)
    };
    assert!(of(0).contains("no layers"), "{}", of(0));
    assert!(of(129).contains("129 layers; at most 128"), "{}", of(129));
    let error = of(100_000);
    assert!(error.contains("sends more than 4194304 bytes"), "{error}");
    let large = descriptor(GZIP, b"x").replace("\"size\":1", "\"size\":99999999999999");
    let error = refusal_of(manifest(&config, &large), media::OCI_MANIFEST);
    assert!(error.contains("layer 1 has 99999999999999 bytes"), "{error}");
}

#[test]
fn c5_foreign_layers_are_not_fetched() {
    let elsewhere = Server::start(|_| reply("200 OK", &[], b"x"));
    let urls = format!(r#","urls":["http://{}/layer"]}}"#, elsewhere.address);
    let config = descriptor(media::OCI_CONFIG, &image().config);
    for media_type in [GZIP, "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"] {
        let layer = descriptor(media_type, b"x").replace('}', &urls);
        let error = refusal_of(manifest(&config, &layer), media::OCI_MANIFEST);
        assert!(error.contains("Layer 1 is not in the registry"), "{error}");
    }
    assert_eq!(elsewhere.asked().len(), 0);
}

#[test]
fn c5_other_documents_are_refused() {
    let schema1 = br#"{"schemaVersion":1,"fsLayers":[],"history":[]}"#.to_vec();
    let error = refusal_of(schema1, "application/vnd.docker.distribution.manifest.v1+prettyjws");
    assert!(error.contains("old schema 1"), "{error}");
    let error = refusal_of(b"<html>login here</html>".to_vec(), "text/html");
    assert!(error.contains("manifest cannot be read: expected value at line 1 column 1"), "{error}");
    let md5 = String::from_utf8(image().manifest).unwrap().replace("sha256:", "md5:").into_bytes();
    let error = refusal_of(md5, media::OCI_MANIFEST);
    assert!(error.contains("\"md5\" cannot be checked"), "{error}");
    let chart = String::from_utf8(image().manifest).unwrap().replace("oci.image.config", "cncf.helm.config");
    let error = refusal_of(chart.into_bytes(), media::OCI_MANIFEST);
    assert!(error.contains("not a container image"), "{error}");
}

#[test]
fn c5_an_endless_manifest_is_cut_off() {
    let server = Server::start(|_| {
        let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        let chunk = [b"100000\r\n", &[b' '; 1 << 20][..], b"\r\n"].concat();
        let chunks = (0..100).map(|_| Step::Send(chunk.clone()));
        [Step::Send(head)].into_iter().chain(chunks).collect()
    });
    let folder = tempfile::tempdir().unwrap();
    let error = refused(&client(), &store_in(folder.path()), &server.reference());
    assert!(error.contains("sends more than 4194304 bytes"), "{error}");
    // And an endless head.
    let server = Server::start(|_| {
        let line = format!("X: {}\r\n", "x".repeat(10_000)).into_bytes();
        let lines = (0..100).map(|_| Step::Send(line.clone()));
        [Step::Send(b"HTTP/1.1 200 OK\r\n".to_vec())].into_iter().chain(lines).collect()
    });
    let error = refused(&client(), &store_in(folder.path()), &server.reference());
    assert!(error.contains("was cut"), "{error}");
}

#[test]
fn c5_lengths_that_are_lies_are_refused() {
    let image = image();
    let digest = Digest::of(&image.layers[1]);
    let content = image.layers[1].clone();
    let is_blob = move |asked: &Asked| asked.target.ends_with(&digest.to_string());
    let longer = [content.clone(), b"more".to_vec()].concat();
    let chunked = {
        let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        let chunk = format!("{:x}\r\n", longer.len()).into_bytes();
        move || -> Reply {
            let body = [&chunk, &longer[..], b"\r\n0\r\n\r\n"].concat();
            vec![Step::Send(head.clone()), Step::Send(body)]
        }
    };
    let digest = Digest::of(&image.layers[1]);
    type Lie = Box<dyn Fn() -> Reply + Send + Sync>;
    let short = content;
    let lies: [(Lie, &str); 4] = [
        (Box::new(chunked), "100004 bytes, expected 100000"),
        (
            Box::new(|| vec![Step::Send(head("200 OK", &[], 1 << 50))]),
            "1125899906842624 bytes in the registry",
        ),
        (Box::new(move || reply("200 OK", &[], &short[1..])), "99999 bytes in the registry"),
        (
            Box::new(|| {
                vec![Step::Send(
                    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n".to_vec(),
                )]
            }),
            "was cut",
        ),
    ];
    for (lie, expected) in lies {
        let is_blob = is_blob.clone();
        let server = Server::hosting(&image, move |asked| is_blob(asked).then(&lie));
        let folder = tempfile::tempdir().unwrap();
        let store = store_in(folder.path());
        let error = refused(&client(), &store, &server.reference());
        assert!(error.contains(expected), "{error}");
        assert_eq!(store.references().unwrap(), []);
        assert!(!names(&store, "blobs/sha256").contains(&digest.hex().to_owned()));
    }
}

#[test]
fn c5_a_redirect_gets_the_blob_and_no_credentials() {
    let image = image();
    let (hosted, blobs) = (image.clone(), image.blobs());
    let storage = Server::start_at("127.0.0.2", None, move |asked| serve_image(&hosted, &blobs, asked));
    let (hosted, blobs, target) = (image.clone(), image.blobs(), storage.address);
    let server = Server::start(move |asked| {
        if asked.header("authorization").is_none() {
            return reply("401 Unauthorized", &[("WWW-Authenticate", "Basic realm=x")], b"{}");
        }
        if asked.target.contains("/blobs/") {
            let location = format!("http://{target}{}?signature=abc", asked.target);
            return reply("307 Temporary Redirect", &[("Location", &location)], b"moved");
        }
        serve_image(&hosted, &blobs, asked)
    });
    // The storage ignores the query.
    let folder = tempfile::tempdir().unwrap();
    let logins = Logins::at(folder.path().join("logins"));
    let password = Secret::new("hunter2".into());
    logins.set(&server.address.to_string(), &Credentials::Password { user: "me".into(), password }).unwrap();
    let client = Client::new(options(), Keychain::new(Some(logins), None));
    let store = store_in(folder.path());
    let error = refused(&client, &store, &server.reference());
    assert!(error.contains("has no") && !error.contains("abc"), "{error}");
    assert!(server.asked().iter().any(|asked| asked.header("authorization").is_some()));
    assert!(!storage.asked().is_empty());
    for asked in storage.asked() {
        assert!(asked.header("authorization").is_none(), "{asked:?}");
        assert!(asked.target.ends_with("?signature=abc"));
    }
}

#[test]
fn c5_a_host_that_is_redirected_to_cannot_ask_for_the_login() {
    let image = image();
    let storage = Server::start_at("127.0.0.2", None, |_| {
        reply("401 Unauthorized", &[("WWW-Authenticate", "Basic realm=\"registry\"")], b"{}")
    });
    let (hosted, blobs, target) = (image.clone(), image.blobs(), storage.address);
    let server = Server::start(move |asked| {
        let location = format!("http://{target}{}", asked.target);
        if asked.target.contains("/blobs/") {
            return reply("302 Found", &[("Location", &location)], b"");
        }
        serve_image(&hosted, &blobs, asked)
    });
    let folder = tempfile::tempdir().unwrap();
    let logins = Logins::at(folder.path().join("logins"));
    let password = Credentials::Password { user: "me".into(), password: Secret::new("hunter2".into()) };
    for host in [server.address.to_string(), storage.address.to_string()] {
        logins.set(&host, &password).unwrap();
    }
    let client = Client::new(options(), Keychain::new(Some(logins), None));
    let error = refused(&client, &store_in(folder.path()), &server.reference());
    assert!(error.contains("401"), "{error}");
    assert!(storage.asked().iter().all(|asked| asked.header("authorization").is_none()));
}

#[test]
fn c5_redirects_end_and_stay_as_safe_as_they_were() {
    let image = image();
    let folder = tempfile::tempdir().unwrap();
    let store = store_in(folder.path());
    let server =
        Server::start(|asked| reply("302 Found", &[("Location", &format!("{}x", asked.target))], b""));
    let error = refused(&client(), &store, &server.reference());
    assert!(error.contains("redirects more than 5 times"), "{error}");
    assert_eq!(server.asked().len(), 6);
    let certificates = Certificates::new(folder.path());
    let plain = Server::hosting(&image, |_| None);
    for (location, expected) in [
        (format!("http://{}/", plain.address), "not as safe as TLS"),
        ("http://registry.example.com/".to_owned(), "not as safe as TLS"),
        ("file:///etc/passwd".to_owned(), "redirects to something that is no address"),
        ("https://user:password@127.0.0.1/".to_owned(), "redirects to something that is no address"),
    ] {
        let secure = Server::start_at("127.0.0.1", Some(certificates.server()), move |_| {
            reply("302 Found", &[("Location", &location)], b"")
        });
        let trusted = Some(certificates.authority.clone());
        let options = Options { insecure: false, certificates: trusted, ..options() };
        let error = refused(&Client::new(options, Keychain::empty()), &store, &secure.reference());
        assert!(error.contains(expected), "{error}");
    }
    let server = Server::start(|_| reply("302 Found", &[("Location", "http://registry.example.com/")], b""));
    let error = refused(&client(), &store, &server.reference());
    assert!(error.contains("not as safe as TLS"), "{error}");
    assert_eq!(plain.asked().len(), 0);
}

#[test]
fn over_tls_redirects_to_tls_are_followed() {
    let (image, folder) = (image(), tempfile::tempdir().unwrap());
    let certificates = Certificates::new(folder.path());
    let (hosted, blobs) = (Arc::new(image.clone()), Arc::new(image.blobs()));
    let (image_of, blobs_of) = (hosted.clone(), blobs.clone());
    let storage = Server::start_at("127.0.0.1", Some(certificates.server()), move |asked| {
        serve_image(&image_of, &blobs_of, asked)
    });
    let target = storage.address;
    let server = Server::start_at("127.0.0.1", Some(certificates.server()), move |asked| {
        let location = format!("https://{target}{}", asked.target);
        if asked.target.contains("/blobs/") {
            return reply("307 Temporary Redirect", &[("Location", &location)], b"");
        }
        serve_image(&hosted, &blobs, asked)
    });
    let trusted = Some(certificates.authority);
    let options = Options { insecure: false, certificates: trusted, ..options() };
    pull(&Client::new(options, Keychain::empty()), &store_in(folder.path()), &server.reference()).unwrap();
    assert_eq!(storage.count("/blobs/"), 3);
}

#[test]
fn c5_tokens_are_not_fetched_from_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let store = store_in(folder.path());
    for realm in ["http://auth.example.com/token", "/token", "file:///etc/passwd", ""] {
        let header = format!("Bearer realm=\"{realm}\"");
        let server =
            Server::start(move |_| reply("401 Unauthorized", &[("WWW-Authenticate", &header)], b"{}"));
        let error = refused(&client(), &store, &server.reference());
        assert!(error.contains("not an https address"), "{error}");
    }
    for header in ["Bearer realm=\"x", "Digest realm=\"x\"", "Bearer realm=\"a\", realm=\"b\""] {
        let server =
            Server::start(move |_| reply("401 Unauthorized", &[("WWW-Authenticate", header)], b"{}"));
        let error = refused(&client(), &store, &server.reference());
        assert!(error.contains("asks for a login in"), "{error}");
    }
    for answer in ["", "{}", r#"{"token": ""}"#, r#"{"token": "a\r\nX: y"}"#, "[", r#"{"token": 5}"#] {
        let issuer = Server::start(move |_| reply("200 OK", &[], answer.as_bytes()));
        let header = format!("Bearer realm=\"http://{}/\"", issuer.address);
        let server =
            Server::start(move |_| reply("401 Unauthorized", &[("WWW-Authenticate", &header)], b"{}"));
        let error = refused(&client(), &store, &server.reference());
        assert!(error.contains("a token that cannot be used"), "{error}");
    }
}

#[test]
fn c5_an_upload_to_another_host_carries_no_credentials() {
    let (image, folder) = (image(), tempfile::tempdir().unwrap());
    let store = store_in(folder.path());
    let source = Server::hosting(&image, |_| None);
    let pulled = pull(&client(), &store, &source.reference()).unwrap();
    let other = Server::start_at("127.0.0.2", None, |_| reply("201 Created", &[], b""));
    let target = other.address;
    let registry = Server::start(move |asked| match (asked.header("authorization"), asked.method.as_str()) {
        (None, _) => reply("401 Unauthorized", &[("WWW-Authenticate", "Basic realm=x")], b"{}"),
        (_, "POST") => {
            reply("202 Accepted", &[("Location", &format!("http://{target}/upload?state=1"))], b"")
        }
        (_, "PUT") => reply("201 Created", &[], b""),
        _ => reply("404 Not Found", &[], b""),
    });
    let logins = Logins::at(folder.path().join("logins"));
    let password = Credentials::Password { user: "me".into(), password: Secret::new("hunter2".into()) };
    for host in [registry.address.to_string(), target.to_string()] {
        logins.set(&host, &password).unwrap();
    }
    let client = Client::new(options(), Keychain::new(Some(logins), None));
    let to = registry.reference().parse().unwrap();
    client.push(&store, &pulled.record, &to, &mut |_: &Event| {}).unwrap();
    let uploaded = other.asked();
    assert_eq!(uploaded.len(), 3);
    for asked in &uploaded {
        assert!(
            asked.header("authorization").is_none()
                && asked.target.starts_with("/upload?state=1&digest=sha256%3A")
        );
    }
    let bodies: Vec<Digest> = uploaded.iter().map(|asked| Digest::of(&asked.body)).collect();
    assert!(pulled.layers.iter().all(|layer| bodies.contains(&layer.blob.digest)));
    let manifest = registry.asked().pop().unwrap();
    assert_eq!((manifest.method.as_str(), Digest::of(&manifest.body)), ("PUT", image.digest()));
}
