"""Sockets that take whatever comes to a port, at every address of their side, IPv4 and IPv6.

Their `drain` takes all that has arrived, at once: a test that asks what was reached gets no answer before that.
"""

import asyncio
import socket
import struct

# Of <linux/in6.h>; Python does not name it. Answers leave from the address that was asked, whichever that is.
IPV6_FREEBIND = 78
IN6_PKTINFO = struct.Struct("=16sI")
LONGEST_DATAGRAM = 65535
BACKLOG = 4096


def bound(kind, port):
    sock = socket.socket(socket.AF_INET6, kind | socket.SOCK_NONBLOCK)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("::", port))
    return sock


class TcpPort:
    """Notes each connection, then hands it to `serve(sock, contact)`, a coroutine, which need not close it."""

    def __init__(self, log, port, serve):
        self._log, self._serve = log, serve
        self._tasks = set()
        self._sock = bound(socket.SOCK_STREAM, port)
        self._sock.listen(BACKLOG)
        asyncio.get_running_loop().add_reader(self._sock, self.drain)

    def drain(self):
        while True:
            try:
                sock, peer = self._sock.accept()
            except OSError:
                # Nothing more has come, or what has come has already gone.
                return
            sock.setblocking(False)
            contact = self._log.contact(sock.getsockname(), peer)
            contact.note("tcp")
            task = asyncio.ensure_future(self._until_served(sock, contact))
            # The loop itself does not keep tasks alive.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _until_served(self, sock, contact):
        try:
            await self._serve(sock, contact)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError):
            # The other side went away or talks nonsense: its right, and the log has what it did.
            pass
        finally:
            sock.close()


class UdpPort:
    """Hands each datagram to `serve(data, contact, reply)`, which notes it; the reply leaves from where it arrived."""

    def __init__(self, log, port, serve):
        self._log, self._serve, self._port = log, serve, port
        self._sock = bound(socket.SOCK_DGRAM, port)
        self._sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        self._sock.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        asyncio.get_running_loop().add_reader(self._sock, self.drain)

    def drain(self):
        while True:
            try:
                data, control, _, peer = self._sock.recvmsg(LONGEST_DATAGRAM, socket.CMSG_SPACE(IN6_PKTINFO.size))
            except OSError:
                return
            arrived = next(value for level, kind, value in control if kind == socket.IPV6_PKTINFO)
            local = socket.inet_ntop(socket.AF_INET6, IN6_PKTINFO.unpack(arrived)[0])
            contact = self._log.contact((local, self._port), peer)
            self._serve(data, contact, lambda answer, to=peer, info=arrived: self._send(answer, to, info))

    def _send(self, answer, peer, info):
        try:
            self._sock.sendmsg([answer], [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, info)], 0, peer)
        except OSError:
            # Lost, as datagrams may be.
            pass
