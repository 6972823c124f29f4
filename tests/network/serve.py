"""One side of the world: all its servers in one process, which ends when its standard input does."""

import asyncio
import json
import os
import resource
import signal
import sys
from pathlib import Path

import plain
from contacts import ContactLog
from listeners import TcpPort, UdpPort
from names import Resolver
from tls import with_tls, without_tls
from web import Web


def ports(log, folder):
    """Which server is where. A new one is a line here."""
    zone = json.loads((folder / "zone.json").read_text())
    certificate = folder / "certificate.pem"
    web, resolver = Web(log.side, folder / "files"), Resolver(zone)
    tcp = {
        7: plain.echo,
        9: plain.discard,
        13: plain.ends_first,
        17: plain.trade,
        19: plain.source,
        22: plain.speaks_first,
        53: without_tls(resolver.serve),
        80: without_tls(web.serve),
        # Both versions of HTTP, each preferred once: what clients offer is often both.
        443: with_tls(certificate, ["http/1.1", "h2"], web.serve),
        853: with_tls(certificate, ["dot"], resolver.serve),
        8080: without_tls(web.serve),
        8443: with_tls(certificate, ["h2", "http/1.1"], web.serve),
    }
    # QUIC, DNS over QUIC, mDNS and LLMNR among them: it is enough to see them arrive.
    udp = {53: resolver.datagram, **dict.fromkeys([7, 443, 853, 5353, 5355], plain.echo_datagram)}
    return [TcpPort(log, *at) for at in tcp.items()] + [UdpPort(log, *at) for at in udp.items()]


async def until_end(side, folder, before_mark):
    listening = ports(ContactLog(folder / "contacts.jsonl", side), folder)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def command():
        # A line asks for a mark: everything that has arrived by now is in the log when it is answered.
        data = os.read(sys.stdin.fileno(), 1024)
        if not data:
            loop.remove_reader(sys.stdin.fileno())
            ended.set()
        for _ in range(data.count(b"\n")):
            before_mark()
            for port in listening:
                port.drain()
            print("marked", flush=True)

    loop.add_reader(sys.stdin.fileno(), command)
    print("ready", flush=True)
    await ended.wait()


def run(side, folder, before_mark=lambda: None):
    """Serves until standard input ends."""
    # Enough for tests that open everything they can.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(until_end(side, Path(folder), before_mark))
