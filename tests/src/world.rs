//! A world to run sandboxes in: a host with a network card, and behind it servers at every address there is. Nothing of
//! it reaches a real network.
//!
//! Two network namespaces are joined by a cable. Inside is the host, where the product runs. Outside is everybody else.
//! All servers write down who came, so that a test can tell what was reached. What they are and can do:
//! `tests/network`.
//!
//! Worlds have no names on the machine: any number of them can be there at once, with the same addresses. A world ends
//! with its value, or with the test's process, whichever ends first.

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

/// What runs the programs of `tests/network`.
const PYTHON: &str = "/usr/bin/python3";

/// A world of its own. Its sandboxes go first, then its processes, then its files.
#[derive(Debug)]
pub struct World {
    home: OnceLock<Home>,
    servers: Servers,
    folder: TempDir,
    /// How much of the contact log is not asked for any more, in bytes.
    forgotten: AtomicUsize,
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl World {
    /// A world whose resolvers know the names of `tests/network/zone.json`. All its servers are ready.
    #[track_caller]
    pub fn new() -> Self {
        Self::with_names(&Value::Null)
    }

    /// A world whose sandboxes are in this home.
    #[track_caller]
    pub fn with_home(home: Home) -> Self {
        let world = Self::new();
        world.home.get_or_init(|| home);
        world
    }

    /// A world whose resolvers know these names as well, or instead; `tests/network/names.py` tells what can be said
    /// about one.
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

    /// A command where everybody else is. What it listens to, it has to bind at all addresses.
    pub fn outside_command(&self, program: impl AsRef<OsStr>) -> Command {
        self.servers.command(Side::Outside, program.as_ref())
    }

    /// Runs one of the programs of `tests/network` on the host to its end.
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

    /// What `bathy` with these arguments prints; it has to succeed.
    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        let ran = self.bathy(arguments);
        assert_eq!(ran.code, Some(0), "bathy {arguments:?}: {ran:?}");
        ran.stdout
    }

    /// The home of this world's sandboxes. Its own methods run `bathy` where the calling thread is: what starts a
    /// sandbox has to be [`World::bathy`], or come after [`World::enter`].
    pub fn home(&self) -> &Home {
        self.home.get_or_init(Home::new)
    }

    /// Moves the calling thread to the host, with the sockets and processes that it makes from now on, until the value
    /// goes. Only root can.
    pub fn enter(&self) -> Inside<'_> {
        self.servers.enter()
    }

    /// Everything that has reached a server since the start, or since [`World::forget_contacts`], in order. What had
    /// arrived before the call is in it.
    pub fn contacts(&self) -> Vec<Contact> {
        let log = self.contact_log();
        let new = log.get(self.forgotten.load(Ordering::SeqCst)..).unwrap_or_default();
        // A server may be in the middle of its next line.
        let whole = new.rfind('\n').map_or("", |end| &new[..end]);
        whole.lines().map(Contact::from_line).collect()
    }

    /// As [`World::contacts`], of one port at one address.
    #[track_caller]
    pub fn contacts_at(&self, address: &str, port: u16) -> Vec<Contact> {
        let address = parsed(address);
        self.contacts()
            .into_iter()
            .filter(|contact| contact.address == address && contact.port == port)
            .collect()
    }

    /// As [`World::contacts`], without those of these addresses and of the resolver: what nobody should have reached.
    #[track_caller]
    pub fn contacts_beyond(&self, allowed: &[&str]) -> Vec<Contact> {
        let mut allowed: BTreeSet<IpAddr> = allowed.iter().map(|address| parsed(address)).collect();
        allowed.insert(parsed(addresses::RESOLVER));
        self.contacts().into_iter().filter(|contact| !allowed.contains(&contact.address)).collect()
    }

    /// The names that the resolvers were asked for, once for each question.
    pub fn asked_names(&self) -> Vec<String> {
        let asked = self.contacts().into_iter().filter(|contact| contact.kind == Kind::Dns);
        asked.filter_map(|contact| contact.name).collect()
    }

    /// From now on, what has been reached so far is not told any more.
    pub fn forget_contacts(&self) {
        self.forgotten.store(self.contact_log().len(), Ordering::SeqCst);
    }

    /// The folder that web servers offer below `/files/`.
    pub fn files(&self) -> PathBuf {
        self.folder.path().join("files")
    }

    /// The certificate that a client of the TLS servers has to trust.
    pub fn authority(&self) -> PathBuf {
        self.folder.path().join("authority.pem")
    }

    /// All processes whose network is this world's, its servers included.
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
