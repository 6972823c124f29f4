"""The contact log: one JSON line for everything that reached a server, written before the server answers."""

import ipaddress
import json
import os


class Contact:
    """One connection or datagram: where it arrived and where it came from."""

    def __init__(self, log, local, peer):
        self._log = log
        self.address, self.port = plain(local), local[1]
        self.peer, self.peer_port = plain(peer), peer[1]

    def note(self, kind, name=None, detail=None):
        self._log.write(self, kind, name, detail)


class ContactLog:
    """Written by both sides at once: a line is one write to a file that is only appended to."""

    def __init__(self, path, side):
        self.side = side
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def contact(self, local, peer):
        return Contact(self, local, peer)

    def write(self, contact, kind, name, detail):
        line = {
            "side": self.side,
            "kind": kind,
            "address": contact.address,
            "port": contact.port,
            "peer": contact.peer,
            "peer_port": contact.peer_port,
            "name": name,
            "detail": detail,
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")


def plain(address):
    """The address of a socket of both families, an IPv4 one as such."""
    ip = ipaddress.IPv6Address(address[0].partition("%")[0])
    return str(ip.ipv4_mapped or ip)
