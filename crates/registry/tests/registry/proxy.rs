//! Proxies: TLS goes through them, and only the proxy looks up the registry's name.

use std::io::{BufRead, BufReader, Write, copy};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use bathy_registry::http::Proxies;
use bathy_registry::{Client, Keychain, Options};

use crate::image::{Image, layer};
use crate::server::{Server, serve_image};
use crate::tls::Certificates;
use crate::{options, pull, refused, store_in};

/// A proxy that leads everything to one server, or refuses. It ends with its first `connections`.
fn proxy(target: Option<SocketAddr>, connections: usize) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, asked) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let log = asked.clone();
    thread::spawn(move || {
        for stream in listener.incoming().take(connections) {
            let (log, stream) = (log.clone(), stream.unwrap());
            thread::spawn(move || forward(stream, target, &log));
        }
    });
    (address, asked)
}

fn forward(mut client: TcpStream, target: Option<SocketAddr>, log: &Mutex<Vec<String>>) {
    let mut head = String::new();
    let mut reader = BufReader::with_capacity(1, client.try_clone().unwrap());
    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).unwrap() > 0 {}
    log.lock().unwrap().push(head);
    let Some(target) = target else {
        client.write_all(b"HTTP/1.1 403 Not here\r\n\r\n").unwrap();
        return;
    };
    let mut server = TcpStream::connect(target).unwrap();
    client.write_all(b"HTTP/1.1 200 Connected\r\nVia: test\r\n\r\n").unwrap();
    let (mut from_client, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    thread::spawn(move || {
        let _ = copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    let _ = copy(&mut server, &mut client);
}

#[test]
fn a_registry_is_reached_through_a_proxy_that_it_is_not_shown_to() {
    let (image, folder) = (Image::new(vec![layer("one"), layer("two")]), tempfile::tempdir().unwrap());
    let (certificates, blobs) = (Certificates::new(folder.path()), image.blobs());
    let server = Server::start_at("127.0.0.1", Some(certificates.server()), move |asked| {
        serve_image(&image, &blobs, asked)
    });
    let with = |address: SocketAddr| {
        let proxies = Proxies::new(Some(format!("http://me:hunter2@{address}")), "example.com");
        let trusted = Some(certificates.authority.clone());
        let options = Options { insecure: false, certificates: trusted, proxies, ..options() };
        Client::new(options, Keychain::empty())
    };
    let store = store_in(folder.path());
    let (address, asked) = proxy(Some(server.address), 3);
    pull(&with(address), &store, "registry.test/name:tag").unwrap();
    let asked = asked.lock().unwrap().clone();
    assert!(
        asked[0].starts_with("CONNECT registry.test:443 HTTP/1.1\r\nHost: registry.test:443\r\n"),
        "{asked:?}"
    );
    assert!(asked[0].contains("\r\nProxy-Authorization: Basic bWU6aHVudGVyMg==\r\n"), "{asked:?}");
    assert!(server.asked().iter().all(|asked| asked.header("proxy-authorization").is_none()));
    let (address, _) = proxy(None, 1);
    let error = refused(&with(address), &store, "registry.test/other:tag");
    assert!(error.contains("through the proxy: It refuses: \"403 Not here\""), "{error}");
    assert!(!error.contains("hunter2"));
}
