"""Servers that know no protocol: echo, discard, source, one that trades, one that ends first, one that speaks first, and datagrams that come back."""

import asyncio
import socket
import threading
import time

CHUNK = 1 << 18
# Seconds that one connection may be busy.
LONGEST = 60


async def echo(sock, _contact):
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(sock, CHUNK):
        await loop.sock_sendall(sock, data)


async def speaks_first(sock, contact):
    await asyncio.get_running_loop().sock_sendall(sock, b"SSH-2.0-test\r\n")
    await echo(sock, contact)


async def ends_first(sock, _contact):
    """Ends its side at once, and never reads: what it is sent stays with the sender."""
    sock.shutdown(socket.SHUT_WR)
    await asyncio.sleep(LONGEST)


async def trade(sock, _contact):
    """Is told in a first line how many bytes come, with the line, and how many it then sends. It does not end the connection."""
    loop, data = asyncio.get_running_loop(), b""
    while b"\n" not in data:
        data += await received(sock)
    wanted, sends = (int(number) for number in data.split(b"\n")[0].split())
    came = len(data)
    while came < wanted:
        came += len(await received(sock))
    await loop.sock_sendall(sock, bytes(sends))
    await received(sock)


async def received(sock):
    data = await asyncio.get_running_loop().sock_recv(sock, CHUNK)
    if not data:
        raise EOFError
    return data


async def discard(sock, contact):
    """Reads to the end, or to a line break, and then says how many bytes came, as a line."""
    await in_thread(read_all, sock, contact)


async def source(sock, contact):
    """Sends zeros until the other side has enough."""
    await in_thread(write_on, sock, contact)


def read_all(sock, contact):
    buffer, total, end = bytearray(CHUNK), 0, time.monotonic() + LONGEST
    while time.monotonic() < end and (count := sock.recv_into(buffer)):
        total += count
        if buffer[count - 1] == ord("\n"):
            break
    contact.note("discarded", detail=str(total))
    sock.sendall(b"%d\n" % total)


def write_on(sock, _contact):
    zeros, end = bytes(CHUNK), time.monotonic() + LONGEST
    while time.monotonic() < end:
        sock.sendall(zeros)


async def in_thread(serve, sock, contact):
    """In a thread with a socket that waits: these are measured, and a loop of events would be what is measured."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    sock.setblocking(True)
    sock.settimeout(LONGEST)

    def run():
        try:
            serve(sock, contact)
        except OSError:
            pass
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, daemon=True).start()
    await done.wait()


def echo_datagram(data, contact, reply):
    contact.note("udp", detail=data[:64].hex())
    reply(data)
