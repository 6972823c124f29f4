"""What a sandbox tries, and what comes of it. Rows are JSON: lists of a function's name and its arguments. For each one,
the result is printed as a line of JSON, with how many milliseconds it took. It is given to the Python of a sandbox whole.
"""

import base64
import errno
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time

# How many times slower than usual the machine is.
SLOWNESS = 1
# What is always waited for to its end need not grow as much.
PAUSE = -(-SLOWNESS // 4)
SECONDS = 3 * SLOWNESS
CLOSED = {errno.ECONNREFUSED: "refused", errno.ECONNRESET: "reset", errno.EPIPE: "reset"}
UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.EADDRNOTAVAIL, errno.EINVAL}


def failure(error):
    """An error in one word. Everything that it does not know is a word of its own, which no test expects."""
    if isinstance(error, socket.gaierror):
        return "unresolved"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ssl.SSLError):
        return "alert" if "ALERT" in str(error) or "EOF" in str(error) else f"tls: {error}"
    if isinstance(error, OSError) and error.errno in UNREACHABLE:
        return "unreachable"
    return CLOSED.get(getattr(error, "errno", None), f"{type(error).__name__}: {error}")


def dialled(host, port, seconds=SECONDS):
    return socket.create_connection((host, port), seconds)


def connect(host, port):
    """Whether a connection can be made."""
    with dialled(host, port):
        return {"outcome": "open"}


def say(host, port, *parts, pause=0.05):
    """Says something over TCP, in parts, and tells what comes back until the other side ends or is silent."""
    with dialled(host, port) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            sock.sendall(part.encode("latin-1"))
            time.sleep(pause if len(parts) > 1 else 0)
        return {"outcome": "open", "heard": heard(sock)}


def heard(sock, most=65536, seconds=1):
    data, end = b"", time.monotonic() + seconds * SLOWNESS
    try:
        while len(data) < most and time.monotonic() < end:
            left = max(0.01, end - time.monotonic())
            # A client that has begun to send does not stop in the middle.
            sock.settimeout(min(left, seconds * PAUSE) if data else left)
            more = sock.recv(4096)
            if not more:
                break
            data += more
    except TimeoutError:
        pass
    except OSError as error:
        return data.decode("latin-1") + f"<{failure(error)}>"
    return data.decode("latin-1")


def datagram(host, port, text, seconds=1):
    """Sends a datagram, and tells what comes back."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(seconds * SLOWNESS)
        sock.connect((host, port))
        sock.send(text.encode("latin-1"))
        return {"outcome": "answered", "heard": sock.recv(65535).decode("latin-1")}


def curl(*arguments):
    """curl: its exit code, the status, and the beginning of the body."""
    command = ["curl", "-sS", "-g", "-k", "-m", str(SECONDS), "-w", "\n%{http_code} %{http_version}", *arguments]
    ran = subprocess.run(command, capture_output=True, timeout=SECONDS + 60)
    body, _, last = ran.stdout.decode("latin-1").rpartition("\n")
    status, version = last.split() if " " in last else ("000", "0")
    words = {6: "unresolved", 7: "refused", 28: "timeout", 35: "alert", 52: "reset", 55: "reset", 56: "reset", 3: "malformed"}
    outcome = words.get(ran.returncode, f"exit {ran.returncode}") if ran.returncode else f"status {status}"
    return {"outcome": outcome, "heard": body[:2000], "version": version, "said": ran.stderr.decode("latin-1")[:300]}


def tls(host, port, name=None, alpn=(), parts=1):
    """A handshake, with a name or without. `parts` cuts the greeting into as many writes."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(list(alpn))
    with dialled(host, port) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = context.wrap_bio(inward, outward, server_hostname=name)
        return {"outcome": "open", "protocol": handshake(session, inward, outward, sock, parts)}


def resumed(host, port, first, second):
    """Two connections, of which the second goes on with the session of the first, under another name."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # Its ticket is there when the handshake is over, and need not be waited for.
    context.maximum_version, session = ssl.TLSVersion.TLSv1_2, None
    for name in (first, second):
        with dialled(host, port) as sock:
            inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
            stream = context.wrap_bio(inward, outward, server_hostname=name, session=session)
            handshake(stream, inward, outward, sock, 1)
            session = stream.session
    return {"outcome": "open"}


def greeting(name):
    """The bytes of a greeting."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(inward, outward, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outward.read()


def handshake(session, inward, outward, sock, parts):
    while True:
        try:
            session.do_handshake()
            return session.version()
        except ssl.SSLWantReadError:
            data = outward.read()
            size = max(1, -(-len(data) // parts))
            for at in range(0, len(data), size):
                sock.sendall(data[at : at + size])
                time.sleep(0.002 if parts > 1 else 0)
            more = sock.recv(65536)
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "it was closed")
            inward.write(more)


def bytes_over_tcp(host, port, text):
    """Sends bytes in base64, and tells the beginning of what comes back, in hexadecimal."""
    with dialled(host, port) as sock:
        sock.sendall(base64.b64decode(text))
        return {"outcome": "open", "heard": heard(sock).encode("latin-1")[:64].hex()}


def websocket(host, port, path, text):
    """Makes a WebSocket, and tells what comes back of a message."""
    with dialled(host, port) as sock:
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        sock.sendall((head + f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n").encode())
        stream = sock.makefile("rb")
        first = stream.readline().decode()
        while stream.readline().strip():
            pass
        if " 101 " not in first:
            return {"outcome": first.strip()}
        mask, data = os.urandom(4), text.encode()
        hidden = bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))
        sock.sendall(bytes([0x81, 0x80 | len(data)]) + mask + hidden)
        length = stream.read(2)[1]
        return {"outcome": "echo", "heard": stream.read(length).decode()}


def question(name, kind=1, more=b"", number=0x6261, flags=0x0100):
    labels = [label if isinstance(label, bytes) else label.encode("latin-1") for label in name]
    body = b"".join(bytes([len(label)]) + label for label in labels) + b"\0" + struct.pack(">HH", kind, 1)
    return struct.pack(">6H", number, flags, 1, 0, 0, 1 if more else 0) + body + more


def names(name, kind=1, server="192.0.0.1", transport="udp", port=53, options=""):
    """Asks for a name, given as text with dots or as a list of labels, and tells the code and the addresses."""
    labels = [label for label in name.split(".") if label] if isinstance(name, str) else name
    message = question(labels, kind, bytes.fromhex(options))
    if transport == "udp":
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.settimeout(SECONDS)
            sock.connect((server, port))
            sock.send(message)
            data = sock.recv(65535)
    else:
        with dialled(server, port) as sock:
            sock.sendall(struct.pack(">H", len(message)) + message)
            stream = sock.makefile("rb")
            length = stream.read(2)
            if len(length) < 2:
                raise ConnectionResetError(errno.ECONNRESET, "it was closed")
            data = stream.read(struct.unpack(">H", length)[0])
    return {"outcome": f"code {data[3] & 15}", "addresses": addresses(data), "length": len(data), "cut": bool(data[2] & 2)}


def addresses(data):
    count = struct.unpack_from(">H", data, 6)[0]
    if not count:
        # A message that could not be read is answered without its question.
        return []
    at, found = skipped(data, 12) + 4, []
    for _ in range(count):
        at = skipped(data, at)
        kind, _, _, length = struct.unpack_from(">HHIH", data, at)
        at += 10
        if kind in (1, 28):
            found.append(socket.inet_ntop(socket.AF_INET if kind == 1 else socket.AF_INET6, data[at : at + length]))
        elif kind != 5:
            found.append(f"type {kind}")
        at += length
    return found


def skipped(data, at):
    while data[at]:
        if data[at] >= 0xC0:
            return at + 2
        at += 1 + data[at]
    return at + 1


def resolved(name):
    """What the C library tells a program."""
    found = sorted({entry[4][0] for entry in socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)})
    return {"outcome": "resolved", "addresses": found}


def shell(script):
    """A script; SECONDS in it is how long something may take."""
    script = script.replace("SECONDS", str(SECONDS))
    ran = subprocess.run(["sh", "-c", script], capture_output=True, timeout=10 * SECONDS + 60)
    return {"outcome": f"exit {ran.returncode}", "heard": ran.stdout.decode("latin-1"), "said": ran.stderr.decode("latin-1")}


def row(name, *arguments):
    started = time.monotonic()
    try:
        result = globals()[name](*arguments)
    except (OSError, subprocess.SubprocessError, struct.error, UnicodeError) as error:
        result = {"outcome": failure(error), "said": str(error)}
    result["ms"] = round((time.monotonic() - started) * 1000)
    return result


if __name__ == "__main__":
    for line in json.loads(sys.argv[1]):
        print(json.dumps(row(*line)), flush=True)
