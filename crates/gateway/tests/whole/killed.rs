//! A gateway in a process and jail of its own, which is killed.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use bathy_jail::spawn::{self, Program};
use bathy_jail::{Identity, Spawned};
use bathy_protocol::counts;
use bathy_protocol::network::{GatewayLaunch, NetEvent, NetworkLimits, encode};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::{Signal, WaitId, WaitIdOptions, getegid, geteuid, pidfd_send_signal, waitid};
use smoltcp::wire::IpProtocol;

use crate::scene::{Client, LOCAL, Scene, accepted, allow, pair, policies};

const PATIENCE: Duration = Duration::from_secs(60);

/// A gateway in a process of its own.
struct Process {
    /// Its link and its control socket. The scene's own gateway has nothing to do.
    scene: Scene,
    spawned: Spawned,
    /// The memory of its byte counts.
    memory: File,
    _idle: (OwnedFd, OwnedFd),
}

fn process(rules: &[&str]) -> Process {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let [config, memory] = ["config", "counts"].map(|name| File::from(memfd_create(name, flags).unwrap()));
    let limits = NetworkLimits { connections: 8, ..NetworkLimits::default() };
    let launch = GatewayLaunch {
        policies: policies(rules),
        resolvers: Vec::new(),
        limits,
        ports: Vec::new(),
        allow_command: String::new(),
        spent: None,
        own: Vec::new(),
    };
    config.write_all_at(&encode(&launch).unwrap(), 0).unwrap();
    memory.set_len(u64::try_from(counts::size(limits.connections)).unwrap()).unwrap();
    fcntl_add_seals(&memory, SealFlags::SHRINK).unwrap();
    let ((control, owner), (its_link, link)) = (pair(), pair());
    let program = File::open(env!("CARGO_BIN_EXE_bathy-gateway")).unwrap();
    let spawned = spawn::gateway(&Program {
        program: program.as_fd(),
        args: &[CString::from(c"bathy-gateway")],
        descriptors: &[config.as_fd(), control.as_fd(), its_link.as_fd(), memory.as_fd()],
        identity: Identity::Own { uid: geteuid().as_raw(), gid: getegid().as_raw() },
        entrance: None,
        before_start: None,
    });
    let Scene { gateway, link: idle_link, owner: idle_owner, events } = Scene::new(&[]);
    let scene = Scene { gateway, link, owner, events };
    Process { scene, spawned: spawned.unwrap(), memory, _idle: (idle_link, idle_owner) }
}

/// The counts in that memory, by number.
fn counted(memory: &File) -> BTreeMap<u64, (u64, u64)> {
    let mut bytes = vec![0; counts::size(8)];
    memory.read_exact_at(&mut bytes, 0).unwrap();
    counts::read(&bytes).map(|count| (count.number, (count.sent, count.received))).collect()
}

#[test]
fn n9_counts_are_there_after_the_process_was_killed() {
    let (listener, datagrams) =
        (TcpListener::bind((LOCAL, 0)).unwrap(), UdpSocket::bind((LOCAL, 0)).unwrap());
    let [stream_to, datagrams_to] = [listener.local_addr().unwrap(), datagrams.local_addr().unwrap()];
    let rules = [allow(stream_to), format!("allow udp://{datagrams_to}")];
    let Process { mut scene, spawned, memory, _idle } = process(&[&rules[0], &rules[1]]);
    let mut client = Client::open(&mut scene, 30000, stream_to, 65000);
    let mut server = accepted(&listener);
    server.set_nonblocking(false).unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    client.pour(&scene, &[7; 50_000], 10_000);
    server.read_exact(&mut [0; 50_000]).unwrap();
    server.write_all(&[7; 30_000]).unwrap();
    scene.until("the answer", |scene| {
        client.receive(scene);
        client.received_bytes.len() == 30_000
    });
    datagrams.set_read_timeout(Some(PATIENCE)).unwrap();
    scene.send_datagram(40000, (LOCAL, datagrams_to.port()), &[7; 777]);
    let (count, from) = datagrams.recv_from(&mut [0; 1000]).unwrap();
    datagrams.send_to(&[7; 77], from).unwrap();
    scene.until("the datagram", |scene| scene.received().is_some_and(|(kind, _)| kind == IpProtocol::Udp));
    pidfd_send_signal(&spawned.pidfd, Signal::KILL).unwrap();
    waitid(WaitId::PidFd(spawned.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
    scene.read_events();
    let number = |port| {
        let is_it = |event: &&NetEvent| matches!(event, NetEvent::Allowed { peer, .. } if peer.port == port);
        match scene.events.iter().find(is_it) {
            Some(NetEvent::Allowed { number, .. }) => *number,
            _ => panic!("{:?}", scene.events),
        }
    };
    let expected = [(number(stream_to.port()), (50_000, 30_000)), (number(datagrams_to.port()), (777, 77))];
    assert_eq!((counted(&memory), count), (BTreeMap::from(expected), 777));
}
