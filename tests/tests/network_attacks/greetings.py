# Greetings of TLS that no library makes. Follows the probe.


def extension(kind, data):
    return struct.pack(">HH", kind, len(data)) + data


def server_names(entries):
    listed = b"".join(struct.pack(">BH", kind, len(name)) + name for kind, name in entries)
    return extension(0, struct.pack(">H", len(listed)) + listed)


def made(extensions, records=1, version=0x0303, kind=1):
    """A greeting of TLS 1.2 with these extensions before the usual ones, in so many records."""
    groups = extension(10, bytes.fromhex("0006001d00170018"))
    points = extension(11, b"\1\0")
    signatures = extension(13, bytes.fromhex("000c040308040401050308050806"))
    rest = b"".join(extensions) + groups + points + signatures
    ciphers = bytes.fromhex("c02bc02fc02cc030cca9cca8009c")
    body = struct.pack(">H", version) + os.urandom(32) + b"\0" + struct.pack(">H", len(ciphers)) + ciphers + b"\1\0"
    body += struct.pack(">H", len(rest)) + rest
    message = bytes([kind]) + len(body).to_bytes(3, "big") + body
    size = -(-len(message) // records)
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(struct.pack(">BHH", 22, 0x0301, len(part)) + part for part in parts)


ALLOWED, OTHER = b"api.example", b"bad.example"


def greet(host, port, which):
    """Sends one of the greetings: `believed` if a server answers it."""
    name = server_names([(0, ALLOWED)])
    hellos = {
        "plain": lambda: made([name]),
        "no name": lambda: made([]),
        "another name": lambda: made([server_names([(0, OTHER)])]),
        "empty name": lambda: made([server_names([(0, b"")])]),
        "an address for a name": lambda: made([server_names([(0, b"151.101.1.10")])]),
        "name with a dot at the end": lambda: made([server_names([(0, ALLOWED + b".")])]),
        "name in capitals": lambda: made([server_names([(0, ALLOWED.upper())])]),
        "name with a NUL": lambda: made([server_names([(0, ALLOWED + b"\0.bad.example")])]),
        "name with a space": lambda: made([server_names([(0, ALLOWED + b" ")])]),
        "name below": lambda: made([server_names([(0, b"x." + ALLOWED)])]),
        "two names": lambda: made([server_names([(0, ALLOWED), (0, OTHER)])]),
        "two names, the other first": lambda: made([server_names([(0, OTHER), (0, ALLOWED)])]),
        "two lists of names": lambda: made([name, server_names([(0, OTHER)])]),
        "two lists, the other first": lambda: made([server_names([(0, OTHER)]), name]),
        "name of another kind": lambda: made([server_names([(1, OTHER), (0, ALLOWED)])]),
        "list longer than it is": lambda: made([extension(0, b"\0\x40" + struct.pack(">BH", 0, 11) + ALLOWED)]),
        "name longer than its list": lambda: made([extension(0, b"\0\x0e" + struct.pack(">BH", 0, 60) + ALLOWED)]),
        "bytes behind the list": lambda: made([extension(0, b"\0\x0e" + struct.pack(">BH", 0, 11) + ALLOWED + b"more")]),
        "encrypted greeting": lambda: made([name, extension(0xFE0D, b"\0\0\1\0\1\7\0\x20" + b"k" * 32 + b"\0\x40" + b"p" * 64)]),
        "encrypted greeting of old drafts": lambda: made([name, extension(0xFFCE, b"e" * 80)]),
        "only an encrypted greeting": lambda: made([extension(0xFE0D, b"\0\0\1\0\1\7\0\x20" + b"k" * 32 + b"\0\x40" + b"p" * 64)]),
        "many records": lambda: made([name], records=60),
        "many records, another name": lambda: made([server_names([(0, OTHER)])], records=60),
        "names that mean nothing": lambda: made([extension(0x1A1A, b""), name, extension(0x2A2A, b"\0")]),
        "a second greeting behind it": lambda: made([name]) + made([server_names([(0, OTHER)])]),
        "TLS 1.1": lambda: made([name], version=0x0302),
        "TLS 1.0": lambda: made([name], version=0x0301),
        "SSL 3": lambda: made([name], version=0x0300),
        "SSL 2": lambda: bytes.fromhex("802e0100020015000000100100800700c0030080060040020080040080") + os.urandom(16),
        "not a greeting": lambda: made([name], kind=2),
        "application data first": lambda: struct.pack(">BHH", 23, 0x0303, 20) + b"x" * 20 + made([name]),
        "an alert first": lambda: struct.pack(">BHHBB", 21, 0x0303, 2, 1, 0) + made([server_names([(0, OTHER)])]),
        "a greeting that never ends": lambda: made([name])[:60],
        "HTTP instead": lambda: b"GET / HTTP/1.1\r\nHost: bad.example\r\n\r\n",
        "nothing readable": lambda: b"\0\1\2\3" * 20,
    }
    with dialled(host, port) as sock:
        sock.sendall(hellos[which]())
        data = heard(sock, most=5, seconds=0.7)
    return {"outcome": "believed" if data.startswith("\x16") else "denied", "heard": data[:300]}
