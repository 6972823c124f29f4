//! A simulated network to run sandboxes in: a host with a network interface, and servers at every address behind it. Nothing
//! reaches a real network.
//!
//! A link joins two network namespaces: inside is the host, where the product runs, outside are all other hosts. The servers log
//! every contact, so that a test can check what was reached. `tests/network` describes them.
//!
//! Worlds are anonymous, so any number of them can exist at once with the same addresses. A world ends when it is dropped, or
//! with the test's process.

pub mod addresses;
mod contact;
pub mod guest;
mod servers;
pub mod table;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, Value};
use tempfile::TempDir;

pub use contact::{Contact, Kind};
pub use servers::{Inside, Side};

use crate::kept::Home;
use crate::{Ran, finish, repository};
use servers::Servers;

/// The interpreter of the programs in `tests/network`.
const PYTHON: &str = "/usr/bin/python3";

/// A simulated network. Dropping it removes its sandboxes, then its processes, then its files.
#[derive(Debug)]
pub struct World {
    home: OnceLock<Home>,
    servers: Servers,
    folder: TempDir,
    /// The number of bytes at the beginning of the contact log to ignore.
    forgotten: AtomicUsize,
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl World {
    /// A world whose resolvers know the names of `tests/network/zone.json`, with all servers ready.
    #[track_caller]
    pub fn new() -> Self {
        Self::with_names(&Value::Null)
    }

    /// A world with this home for its sandboxes.
    #[track_caller]
    pub fn with_home(home: Home) -> Self {
        let world = Self::new();
        world.home.get_or_init(|| home);
        world
    }

    /// A world whose resolvers know these names, too; they override those of the zone. `tests/network/names.py` describes their
    /// form.
    #[track_caller]
    pub fn with_names(more: &Value) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the world can be made");
        let zone = fs::read(programs().join("zone.json")).expect("the zone is in the repository");
        let mut zone: Map<String, Value> = serde_json::from_slice(&zone).expect("the zone is JSON");
        zone.extend(more.as_object().cloned().unwrap_or_default());
        let write =
            |name: &str, text: String| fs::write(folder.path().join(name), text).expect("our own folder");
        write("zone.json", Value::Object(zone).to_string());
        write("resolv.conf", format!("nameserver {}\n", addresses::RESOLVER));
        write("contacts.jsonl", String::new());
        fs::create_dir(folder.path().join("files")).expect("our own folder");
        let servers = Servers::start(folder.path(), &programs().join("world.py"));
        Self { home: OnceLock::new(), servers, folder, forgotten: AtomicUsize::new(0) }
    }

    /// A command on the host.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.servers.command(Side::Inside, program.as_ref())
    }

    /// A command on the outside. A server has to listen on all addresses.
    pub fn outside_command(&self, program: impl AsRef<OsStr>) -> Command {
        self.servers.command(Side::Outside, program.as_ref())
    }

    /// Runs a program of `tests/network` on the host to its end.
    pub fn tool(&self, name: &str, arguments: &[&str]) -> Ran {
        let mut command = self.command(PYTHON);
        command.args(["-B", "-E", "-s"]).arg(programs().join(name)).args(arguments);
        finish(&mut command, b"")
    }

    /// `bathy` with these arguments, on the host, in the world's own home, with the world's resolver.
    pub fn bathy_command<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Command {
        let plain = self.home().command(arguments);
        let mut command = self.command(plain.get_program());
        command.args(plain.get_args());
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(folder) = plain.get_current_dir() {
            command.current_dir(folder);
        }
        command.env("BATHY_RESOLV_CONF", self.folder.path().join("resolv.conf"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs `bathy` with these arguments to its end; its standard input is empty.
    pub fn bathy(&self, arguments: &[&str]) -> Ran {
        finish(&mut self.bathy_command(arguments), b"")
    }

    /// Runs `bathy` with these arguments, which has to succeed, and returns its output.
    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        let ran = self.bathy(arguments);
        assert_eq!(ran.code, Some(0), "bathy {arguments:?}: {ran:?}");
        ran.stdout
    }

    /// The home of this world's sandboxes. Its methods run `bathy` in the network of the calling thread: to start a sandbox use
    /// [`World::bathy`], or call [`World::enter`] first.
    pub fn home(&self) -> &Home {
        self.home.get_or_init(Home::new)
    }

    /// Moves the calling thread to the host, with the sockets and processes that it creates, until the value is dropped. Needs
    /// root.
    pub fn enter(&self) -> Inside<'_> {
        self.servers.enter()
    }

    /// All contacts since the start, or since [`World::forget_contacts`], in order, including those that arrived just before the
    /// call.
    pub fn contacts(&self) -> Vec<Contact> {
        let log = self.contact_log();
        let new = log.get(self.forgotten.load(Ordering::SeqCst)..).unwrap_or_default();
        // A server may be in the middle of its next line.
        let whole = new.rfind('\n').map_or("", |end| &new[..end]);
        whole.lines().map(Contact::from_line).collect()
    }

    /// As [`World::contacts`], for one port of one address.
    #[track_caller]
    pub fn contacts_at(&self, address: &str, port: u16) -> Vec<Contact> {
        let address = parsed(address);
        self.contacts()
            .into_iter()
            .filter(|contact| contact.address == address && contact.port == port)
            .collect()
    }

    /// As [`World::contacts`], except for these addresses and the resolver: contacts that should not exist.
    #[track_caller]
    pub fn contacts_beyond(&self, allowed: &[&str]) -> Vec<Contact> {
        let mut allowed: BTreeSet<IpAddr> = allowed.iter().map(|address| parsed(address)).collect();
        allowed.insert(parsed(addresses::RESOLVER));
        self.contacts().into_iter().filter(|contact| !allowed.contains(&contact.address)).collect()
    }

    /// The names in DNS queries, once for each query.
    pub fn asked_names(&self) -> Vec<String> {
        let asked = self.contacts().into_iter().filter(|contact| contact.kind == Kind::Dns);
        asked.filter_map(|contact| contact.name).collect()
    }

    /// Ignores all contacts so far.
    pub fn forget_contacts(&self) {
        self.forgotten.store(self.contact_log().len(), Ordering::SeqCst);
    }

    /// The folder that web servers serve as `/files/`.
    pub fn files(&self) -> PathBuf {
        self.folder.path().join("files")
    }

    /// The certificate that a client of the TLS servers has to trust.
    pub fn authority(&self) -> PathBuf {
        self.folder.path().join("authority.pem")
    }

    /// All processes in this world's networks, including its servers.
    pub fn processes(&self) -> BTreeSet<u32> {
        self.servers.processes()
    }

    fn contact_log(&self) -> String {
        self.servers.mark();
        fs::read_to_string(self.folder.path().join("contacts.jsonl")).expect("our own file")
    }
}

fn programs() -> PathBuf {
    repository().join(Path::new("tests/network"))
}

#[track_caller]
fn parsed(address: &str) -> IpAddr {
    address.parse().expect("a test writes addresses as they are")
}
