"""Asks a resolver, and prints what came back as JSON: ask.py NAME TYPE SERVER [udp|tcp|tls] [SECONDS]

It prints {"answered": false} if nothing came in time. It is one file, so that it can be given to a Python anywhere.
"""

import ipaddress
import json
import socket
import struct
import sys

TYPES = {"A": 1, "CNAME": 5, "TXT": 16, "AAAA": 28, "HTTPS": 65, "ANY": 255}
ID = 0x6261
ROOM = 1232


def question(name, kind):
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".") if label)
    options = b"\0" + struct.pack(">HHIH", 41, ROOM, 0, 0)
    return struct.pack(">6H", ID, 0x0100, 1, 0, 0, 1) + labels + b"\0" + struct.pack(">HH", kind, 1) + options


def ask(message, server, transport, seconds):
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    if transport == "udp":
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.settimeout(seconds)
            sock.connect((server, 53))
            sock.send(message)
            return sock.recv(65535)
    with socket.create_connection((server, 853 if transport == "tls" else 53), seconds) as sock:
        if transport == "tls":
            # Only here: it takes longer than a question.
            import ssl

            sock = ssl._create_unverified_context().wrap_socket(sock, server_hostname=server)
        sock.sendall(struct.pack(">H", len(message)) + message)
        stream = sock.makefile("rb")
        return stream.read(struct.unpack(">H", stream.read(2))[0])


def read_name(data, at):
    labels, end = [], None
    while length := data[at]:
        if length >= 0xC0:
            end = end or at + 2
            at = struct.unpack_from(">H", data, at)[0] & 0x3FFF
            continue
        labels.append(data[at + 1 : at + 1 + length].decode("latin-1"))
        at += 1 + length
    return ".".join(labels), end or at + 1


def read(data):
    number, flags, questions, answers, _, _ = struct.unpack_from(">6H", data)
    result = {"answered": True, "same_id": number == ID, "rcode": flags & 15, "truncated": bool(flags & 0x200)}
    asked, at = read_name(data, 12)
    at += 4
    result |= {"questions": questions, "question": asked, "answers": []}
    for _ in range(answers):
        name, at = read_name(data, at)
        kind, _, ttl, length = struct.unpack_from(">HHIH", data, at)
        at += 10
        value = data[at : at + length]
        if kind in (1, 28):
            text = str(ipaddress.ip_address(value))
        elif kind == 5:
            text = read_name(data, at)[0]
        else:
            text = value.hex()
        kind = next((name for name, number in TYPES.items() if number == kind), str(kind))
        result["answers"].append({"name": name, "type": kind, "ttl": ttl, "data": text})
        at += length
    return result


def main():
    name, kind, server = sys.argv[1:4]
    transport = sys.argv[4] if len(sys.argv) > 4 else "udp"
    seconds = float(sys.argv[5]) if len(sys.argv) > 5 else 5
    try:
        data = ask(question(name, TYPES[kind]), server, transport, seconds)
    except TimeoutError:
        print(json.dumps({"answered": False}))
        return
    try:
        print(json.dumps(read(data)))
    except (IndexError, struct.error, ValueError):
        print(json.dumps({"answered": True, "readable": False}))


if __name__ == "__main__":
    main()
