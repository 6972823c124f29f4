"""Speaks to the guest's agent over a socket, so that another VMM can run the same guest and answer the same questions.

The schema is crates/protocol: frames of twelve header bytes and a payload, messages in postcard's form (integers as
varints, enumerations by number). Only what a benchmark says and hears is here.
"""

import re
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from peers import BenchError

SCHEMA = Path(__file__).resolve().parent.parent / "crates/protocol/src/lib.rs"
HEADER = struct.Struct("<IIB3x")
CONNECTION, COMMAND = 0, 1
CONTROL, STDOUT, STDERR = 0, 2, 3
# The numbers of messages, by their order in crates/protocol/src/message.rs.
HELLO, EXEC = 0, 2
READY, STARTED, REFUSED, GRANT, EOF, EXITED = range(6)
# More than this comes only after a grant, which nothing here gives.
MOST_OUTPUT = 64 * 1024


def schema_version():
    found = re.search(r"pub const VERSION: u16 = (\d+);", SCHEMA.read_text())
    if found is None:
        raise BenchError(f"{SCHEMA} names no version of the schema")
    return int(found[1])


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def text(words):
    return varint(len(words)) + words


def words(items):
    return varint(len(items)) + b"".join(text(item.encode()) for item in items)


class Reader:
    """Takes one value after the other out of a message."""

    def __init__(self, message):
        self.message, self.at = message, 0

    def varint(self):
        number = shift = 0
        while True:
            byte = self.message[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    def text(self):
        length = self.varint()
        self.at += length
        return self.message[self.at - length:self.at].decode(errors="replace")


@dataclass(frozen=True)
class Ready:
    """The agent's answer to a greeting. Nanoseconds since 1970 by this machine's clock."""

    kernel: str
    arrived: int
    # By what the greeting said about the time: early by as long as the greeting took to arrive.
    pid1: int


class AgentPort:
    """The host's end of the control port."""

    def __init__(self, connection):
        self.socket, self.buffer, self.epoch = connection, b"", 0

    def send(self, stream, message):
        self.socket.sendall(HEADER.pack(len(message), stream, CONTROL) + message)

    def receive(self):
        """The next frame: stream, channel, payload."""
        while True:
            if len(self.buffer) >= HEADER.size:
                length, stream, channel = HEADER.unpack_from(self.buffer)
                if len(self.buffer) >= HEADER.size + length:
                    frame, self.buffer = self.buffer[:HEADER.size + length], self.buffer[HEADER.size + length:]
                    return stream, channel, frame[HEADER.size:]
            try:
                arrived = self.socket.recv(1 << 16)
            except (socket.timeout, ConnectionError) as error:
                raise BenchError(f"the agent does not answer: {error}") from None
            if not arrived:
                raise BenchError("the agent's port was closed")
            self.buffer += arrived

    def greet(self):
        """Begins a conversation. The first greeting waits until the agent opens its port: only a later one tells the time."""
        self.epoch += 1
        self.send(CONNECTION, varint(HELLO) + varint(schema_version()) + varint(self.epoch) + varint(time.time_ns()))
        while True:
            stream, channel, payload = self.receive()
            message = Reader(payload)
            if (stream, channel) == (CONNECTION, CONTROL) and message.varint() == READY:
                arrived = time.time_ns()
                _version, _epoch = message.varint(), message.varint()
                kernel = message.text()
                return Ready(kernel, arrived, message.varint())

    def run(self, argv, image_config, user=None):
        """Runs a command to its end, the way that the image's description says, and returns what it printed."""
        environment = [f"{name}={value}" for name, value in sorted(image_config["env"].items())]
        request = varint(EXEC) + words(argv) + words(environment)
        # A folder; no input, no terminal, no restriction.
        folder = "/" if user else image_config["cwd"]
        request += b"\x01" + text(folder.encode()) + text((user or image_config["user"]).encode()) + b"\x00\x00\x00"
        self.send(COMMAND, request)
        outputs = {STDOUT: b"", STDERR: b""}
        while True:
            stream, channel, payload = self.receive()
            if stream != COMMAND:
                continue
            if channel in outputs:
                outputs[channel] += payload
                if len(outputs[channel]) >= MOST_OUTPUT:
                    raise BenchError("a command wrote more than a benchmark's should")
                continue
            message = Reader(payload)
            kind = message.varint()
            if kind == REFUSED:
                raise BenchError(f"the agent refused {argv}: {payload!r}")
            if kind == EXITED:
                by_signal, number = message.varint(), payload[message.at]
                if by_signal or number:
                    shown = (outputs[STDOUT] + outputs[STDERR]).decode(errors="replace")
                    how = "was ended by signal" if by_signal else "ended with code"
                    raise BenchError(f"{argv[0]} {how} {number} in the guest; it printed:\n{shown[-2000:]}")
                return outputs[STDOUT].decode(errors="replace")
