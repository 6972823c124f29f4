"""As much of HTTP/2 (RFC 9113) as it takes to give every request the same short answer. Heads are not unpacked."""

import asyncio
import json
import struct

DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
# What follows the part of the greeting that looks like a request.
REST_OF_GREETING = b"SM\r\n\r\n"
LONGEST_FRAME = 1 << 14
SILENCE = 60
# The status 200, as the first entry of its kind in HPACK's table.
STATUS_200 = b"\x88"


def frame(kind, flags, stream, data=b""):
    return struct.pack(">I", len(data))[1:] + struct.pack(">BBI", kind, flags, stream) + data


async def serve(reader, writer, contact):
    """Serves a connection whose greeting was read up to its empty line."""
    if await reader.readexactly(len(REST_OF_GREETING)) != REST_OF_GREETING:
        return
    writer.write(frame(SETTINGS, 0, 0))
    while True:
        try:
            head = await asyncio.wait_for(reader.readexactly(9), SILENCE)
        except asyncio.IncompleteReadError:
            return
        length = int.from_bytes(head[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        if length > LONGEST_FRAME or kind == GOAWAY:
            return
        data = await reader.readexactly(length)
        if kind in (SETTINGS, PING) and not flags & ACK:
            writer.write(frame(kind, ACK, 0, data if kind == PING else b""))
        if kind == HEADERS:
            contact.note("http", detail="HTTP/2")
        if kind == DATA and length:
            more = struct.pack(">I", length)
            writer.write(frame(WINDOW_UPDATE, 0, 0, more) + frame(WINDOW_UPDATE, 0, stream, more))
        if kind in (HEADERS, DATA) and flags & END_STREAM:
            about = {"protocol": "HTTP/2", "address": contact.address, "port": contact.port, "peer": contact.peer}
            body = json.dumps(about).encode() + b"\n"
            writer.write(frame(HEADERS, END_HEADERS, stream, STATUS_200) + frame(DATA, END_STREAM, stream, body))
        await writer.drain()
