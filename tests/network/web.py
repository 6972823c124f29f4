"""HTTP/1.1, with a WebSocket and a folder of files.

  /bytes/N          N zeros
  /slow[/N]         N (or 200) times 1 KiB, one every 50 ms
  /upload           tells how many bytes came
  /status/N         an empty answer with that status
  /redirect?to=URL  leads there
  /ws               a WebSocket that says everything again
  /files/PATH       what the test put into the world's folder for files; a folder's page is its index.html
  anything else     JSON about the request: host, method, path, headers, address, port, peer, side, body_bytes

HTTP/2 is answered, too, if that is how a connection begins: with other JSON, the same for every request.
"""

import asyncio
import base64
import hashlib
import http
import json
import struct
import urllib.parse
from pathlib import Path

import http2

# Seconds that a connection may be silent.
SILENCE = 60
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\n"
CHUNK = 1 << 16
LONGEST_MESSAGE = 1 << 20
SLOW_STEP = 0.05
SLOW_STEPS = 200
# Of RFC 6455.
WEBSOCKET_KEY = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Request:
    """A head of a request that was read, and how many bytes followed it."""

    def __init__(self, head):
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, self.version = first.split(" ")
        fields = (line.partition(":") for line in lines if line)
        self.headers = {name.lower(): value.strip() for name, _, value in fields}
        self.host = self.headers.get("host")
        self.path, _, self.query = self.target.partition("?")
        self.body_bytes = 0

    def stays(self):
        return self.version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"


class Web:
    """What a side's web servers share."""

    def __init__(self, side, files):
        self._side, self._files = side, Path(files).resolve()

    async def serve(self, reader, writer, contact):
        while True:
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SILENCE)
            except asyncio.IncompleteReadError:
                return
            if head == HTTP2_GREETING:
                return await http2.serve(reader, writer, contact)
            request = Request(head)
            contact.note("http", name=request.host, detail=f"{request.method} {request.target}")
            if request.headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if request.path == "/ws" and "sec-websocket-key" in request.headers:
                return await echo_messages(request, reader, writer)
            request.body_bytes = await read_body(request, reader)
            await self._answer(request, writer, contact)
            await writer.drain()
            if not request.stays():
                return

    async def _answer(self, request, writer, contact):
        _, kind, *rest = request.path.split("/")
        argument = rest[0] if rest else ""
        if kind == "bytes":
            await send_zeros(request, writer, int(argument))
        elif kind == "slow":
            await send_slowly(writer, int(argument or SLOW_STEPS))
        elif kind == "upload":
            send_json(request, writer, {"bytes": request.body_bytes})
        elif kind == "status":
            send(request, writer, int(argument))
        elif kind == "redirect":
            to = urllib.parse.parse_qs(request.query)["to"][0]
            send(request, writer, 302, headers=[f"Location: {to}"])
        elif kind == "files":
            self._send_file(request, writer, "/".join(rest))
        else:
            send_json(request, writer, self._about(request, contact))

    def _about(self, request, contact):
        return {
            "side": self._side,
            "host": request.host,
            "method": request.method,
            "path": request.target,
            "headers": request.headers,
            "address": contact.address,
            "port": contact.port,
            "peer": contact.peer,
            "body_bytes": request.body_bytes,
        }

    def _send_file(self, request, writer, name):
        path = (self._files / urllib.parse.unquote(name)).resolve()
        if path.is_dir():
            path /= "index.html"
        if not path.is_relative_to(self._files) or not path.is_file():
            return send(request, writer, 404)
        kind = "text/html" if path.suffix == ".html" else "application/octet-stream"
        send(request, writer, 200, path.read_bytes(), [f"Content-Type: {kind}"])


def head_of(status, headers):
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = "Other"
    return "\r\n".join([f"HTTP/1.1 {status} {phrase}", *headers, "", ""]).encode()


def send(request, writer, status, body=b"", headers=()):
    writer.write(head_of(status, [f"Content-Length: {len(body)}", *headers]))
    if request.method != "HEAD":
        writer.write(body)


def send_json(request, writer, value):
    send(request, writer, 200, json.dumps(value).encode() + b"\n", ["Content-Type: application/json"])


async def send_zeros(request, writer, count):
    writer.write(head_of(200, [f"Content-Length: {count}"]))
    while count > 0 and request.method != "HEAD":
        part = min(count, CHUNK)
        writer.write(bytes(part))
        await writer.drain()
        count -= part


async def send_slowly(writer, steps):
    writer.write(head_of(200, ["Transfer-Encoding: chunked"]))
    for _ in range(steps):
        writer.write(b"400\r\n" + bytes(1024) + b"\r\n")
        await writer.drain()
        await asyncio.sleep(SLOW_STEP)
    writer.write(b"0\r\n\r\n")


async def read_body(request, reader):
    """Reads what follows the head, and counts it."""
    if request.headers.get("transfer-encoding", "").lower() != "chunked":
        return await skip(reader, int(request.headers.get("content-length", 0)))
    total = 0
    while size := int((await asyncio.wait_for(reader.readline(), SILENCE)).partition(b";")[0], 16):
        total += await skip(reader, size)
        await reader.readline()
    while (await reader.readline()).strip():
        # Trailers.
        pass
    return total


async def skip(reader, count):
    left = count
    while left > 0:
        data = await asyncio.wait_for(reader.read(min(left, CHUNK)), SILENCE)
        if not data:
            raise EOFError
        left -= len(data)
    return count


async def echo_messages(request, reader, writer):
    digest = hashlib.sha1(request.headers["sec-websocket-key"].encode() + WEBSOCKET_KEY).digest()
    accept = f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}"
    writer.write(head_of(101, ["Upgrade: websocket", "Connection: Upgrade", accept]))
    while True:
        first, second = await asyncio.wait_for(reader.readexactly(2), SILENCE)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack(">H", await reader.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", await reader.readexactly(8))
        if length > LONGEST_MESSAGE or not second & 0x80:
            return
        mask = await reader.readexactly(4)
        data = await reader.readexactly(length)
        data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))
        kind = first & 0x0F
        # A ping is answered with a pong, everything else with itself.
        writer.write(message(first & 0xF0 | (10 if kind == 9 else kind), data))
        await writer.drain()
        if kind == 8:
            return


def message(first, data):
    if len(data) < 126:
        return bytes([first, len(data)]) + data
    if len(data) < 1 << 16:
        return bytes([first, 126]) + struct.pack(">H", len(data)) + data
    return bytes([first, 127]) + struct.pack(">Q", len(data)) + data
