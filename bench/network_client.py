"""What a program behind a network does: streams, requests, connections, names. Runs in every contender alike.

network_client.py SERVER RESOLVER SECONDS ROUND_TRIPS prints one JSON object.
"""

import json
import socket
import struct
import sys
import threading
import time

ECHO, DISCARD, SOURCE, NAMES = 7, 9, 19, 53
CHUNK = 1 << 20
NAME = "site.example"
PATIENCE = 5


def connect(server, port):
    connection = socket.create_connection((server, port), timeout=PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(server, seconds):
    """Bytes per second that arrive."""
    buffer, count = bytearray(CHUNK), 0
    with connect(server, SOURCE) as connection:
        started = time.perf_counter()
        while (now := time.perf_counter()) < started + seconds:
            count += connection.recv_into(buffer)
    return count / (now - started)


def send(server, seconds):
    """Bytes per second that the other side has counted when it has them all."""
    buffer = bytes(CHUNK)
    with connect(server, DISCARD) as connection:
        started = time.perf_counter()
        while time.perf_counter() < started + seconds:
            connection.sendall(buffer)
        # Not by half a close: old versions of passt do not pass on what comes after it.
        connection.sendall(b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += connection.recv(64)
    return int(answer) / (time.perf_counter() - started)


def gigabits(move, server, seconds, streams):
    rates = []
    threads = [threading.Thread(target=lambda: rates.append(move(server, seconds))) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Nothing can be said if one of them failed.
    return sum(rates) * 8 / 1e9 if len(rates) == streams else None


def round_trips(server, count):
    """Microseconds of each request of 64 bytes and its answer, on one connection."""
    request, times = bytes(64), []
    with connect(server, ECHO) as connection:
        for _ in range(count):
            started = time.perf_counter()
            connection.sendall(request)
            left = len(request)
            while left:
                left -= len(connection.recv(left))
            times.append((time.perf_counter() - started) * 1e6)
    return times


def connections(server, seconds):
    """How many connections with one request each, one after the other, in a second."""
    started, count = time.perf_counter(), 0
    while time.perf_counter() < started + seconds:
        with connect(server, ECHO) as connection:
            connection.sendall(b"x")
            if connection.recv(1) != b"x":
                raise SystemExit("the echo is wrong")
        count += 1
    return count / (time.perf_counter() - started)


def questions(resolver, seconds):
    """How many names are resolved in a second, one after the other."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in NAME.split("."))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(PATIENCE)
        asking.connect((resolver, NAMES))
        started, count = time.perf_counter(), 0
        while time.perf_counter() < started + seconds:
            number = count % 65536
            asking.send(struct.pack(">6H", number, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", 1, 1))
            answer = asking.recv(4096)
            if struct.unpack(">H", answer[:2])[0] != number or answer[3] & 15 or answer[6:8] == b"\0\0":
                raise SystemExit("the resolver's answer is wrong")
            count += 1
    return count / (time.perf_counter() - started)


def main():
    server, resolver, seconds, trips = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    round_trips(server, 50)
    print(json.dumps({
        "receive_1": gigabits(receive, server, seconds, 1),
        "receive_8": gigabits(receive, server, seconds, 8),
        "send_1": gigabits(send, server, seconds, 1),
        "send_8": gigabits(send, server, seconds, 8),
        "round_trips": round_trips(server, trips),
        "connections": connections(server, seconds),
        "questions": questions(resolver, seconds),
    }))


main()
