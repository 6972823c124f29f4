# Frames as a hostile kernel would make them. Follows the probe, whose imports it uses.

GUEST_MAC = bytes.fromhex("026261746879")
GATEWAY_MAC = bytes.fromhex("026261746801")
OTHER_MAC = bytes.fromhex("02deadbeef01")
EVERYBODY = b"\xff" * 6
GUEST, GATEWAY, SITE = "192.0.0.2", "192.0.0.1", "93.184.215.14"
GUEST6, GATEWAY6, SITE6 = "fd62:6174:6879::2", "fd62:6174:6879::1", "2606:2800:21f:cb07::1"
FIN, SYN, RST, PSH, ACK, URG = 1, 2, 4, 8, 16, 32


def packed(address):
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def total(data):
    data += b"\0" * (len(data) % 2)
    words = sum(struct.unpack(f">{len(data) // 2}H", data))
    while words >> 16:
        words = (words >> 16) + (words & 0xFFFF)
    return 0xFFFF - words


def ethernet(body, kind=0x0800, source=GUEST_MAC, to=GATEWAY_MAC):
    return to + source + struct.pack(">H", kind) + body


def v4(body, protocol=17, source=GUEST, to=SITE, options=b"", part=0, length=None, words=None, version=4, wrong=0):
    words = 5 + len(options) // 4 if words is None else words
    length = 20 + len(options) + len(body) if length is None else length
    head = struct.pack(">BBHHHBBH", version << 4 | words, 0, length, 7, part, 64, protocol, 0)
    head += packed(source) + packed(to) + options
    return head[:10] + struct.pack(">H", total(head) ^ wrong) + head[12:] + body


def v6(body, following=17, source=GUEST6, to=SITE6, length=None, version=6):
    length = len(body) if length is None else length
    return struct.pack(">IHBB", version << 28, length, following, 255) + packed(source) + packed(to) + body


def checked(body, at, source, to, protocol):
    pseudo = packed(source) + packed(to) + struct.pack(">II" if ":" in to else ">HH", *((len(body), protocol) if ":" in to else (protocol, len(body))))
    return body[:at] + struct.pack(">H", total(pseudo + body)) + body[at + 2 :]


def udp(payload=b"out", port=7, own=5555, source=GUEST, to=SITE, length=None):
    length = 8 + len(payload) if length is None else length
    return checked(struct.pack(">HHHH", own, port, length, 0) + payload, 6, source, to, 17)


def tcp(port=80, own=6666, flags=SYN, number=1000, seen=0, payload=b"", source=GUEST, to=SITE, words=5, urgent=0):
    head = struct.pack(">HHIIBBHHH", own, port, number, seen, words << 4, flags, 65535, 0, urgent)
    return checked(head + payload, 16, source, to, 6)


def icmp(kind, payload=b"\0\0\0\0tunnel", code=0):
    body = struct.pack(">BBH", kind, code, 0) + payload
    return body[:2] + struct.pack(">H", total(body)) + body[4:]


def icmp6(kind, payload, source=GUEST6, to=GATEWAY6):
    return checked(struct.pack(">BBH", kind, 0, 0) + payload, 2, source, to, 58)


def arp(operation, own_mac, own, target_mac, target):
    return struct.pack(">HHBBH", 1, 0x0800, 6, 4, operation) + own_mac + packed(own) + target_mac + packed(target)


def card():
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind(("eth0", 0))
    return sock


def all_frames():
    """Each one carries something that is allowed, so that it would be seen outside if the frame were taken."""
    message, begin = udp(), tcp()
    message6, begin6 = udp(source=GUEST6, to=SITE6), tcp(source=GUEST6, to=SITE6)
    header = lambda following, body, length=0, data=b"\1\4\0\0\0\0": bytes([following, length]) + data + body
    chain = message6
    for _ in range(20):
        chain = header(60 if chain is not message6 else 17, chain)
    ordinary = v4(message)
    big = udp(payload=b"x" * 64)
    return {
        "source card of somebody else": ethernet(ordinary, source=OTHER_MAC),
        "source card of the gateway": ethernet(ordinary, source=GATEWAY_MAC),
        "source card of everybody": ethernet(ordinary, source=EVERYBODY),
        "to another card": ethernet(ordinary, to=OTHER_MAC),
        "VLAN": ethernet(struct.pack(">HH", 7, 0x0800) + ordinary, kind=0x8100),
        "VLAN in VLAN": ethernet(struct.pack(">HHHH", 7, 0x8100, 8, 0x0800) + ordinary, kind=0x88A8),
        "length instead of a kind": ethernet(ordinary, kind=len(ordinary)),
        "LLDP": ethernet(ordinary, kind=0x88CC),
        "PPPoE": ethernet(ordinary, kind=0x8864),
        "MPLS": ethernet(b"\0\1\1\x40" + ordinary, kind=0x8847),
        "ARP answer for the gateway": ethernet(arp(2, GUEST_MAC, GATEWAY, GATEWAY_MAC, GUEST), kind=0x0806),
        "ARP announcement of the gateway": ethernet(arp(1, GUEST_MAC, GATEWAY, b"\0" * 6, GATEWAY), kind=0x0806, to=EVERYBODY),
        "ARP for a foreign card": ethernet(arp(1, OTHER_MAC, GUEST, b"\0" * 6, GATEWAY), kind=0x0806, to=EVERYBODY),
        "ARP cut short": ethernet(arp(1, GUEST_MAC, GUEST, b"\0" * 6, GATEWAY)[:20], kind=0x0806, to=EVERYBODY),
        "neighbour advertisement for the gateway": ethernet(
            v6(icmp6(136, b"\xa0\0\0\0" + packed(GATEWAY6) + b"\2\1" + GUEST_MAC), following=58, to=GATEWAY6), kind=0x86DD
        ),
        "router advertisement": ethernet(
            v6(icmp6(134, b"\x40\0\x07\x08" + b"\0" * 8, to="ff02::1"), following=58, to="ff02::1"), kind=0x86DD
        ),
        "ICMP redirect": ethernet(v4(icmp(5, packed("10.0.0.5") + v4(message)), protocol=1, to=GATEWAY)),
        "source address of the gateway": ethernet(v4(udp(source=GATEWAY), source=GATEWAY)),
        "source address of a private host": ethernet(v4(udp(source="10.0.0.9"), source="10.0.0.9")),
        "source address of the host": ethernet(v4(udp(source="192.168.77.2"), source="192.168.77.2")),
        "source address of loopback": ethernet(v4(udp(source="127.0.0.1"), source="127.0.0.1")),
        "source address of nobody": ethernet(v4(udp(source="0.0.0.0"), source="0.0.0.0")),
        "source address of everybody": ethernet(v4(udp(source="255.255.255.255"), source="255.255.255.255")),
        "IPv6 source of somebody else": ethernet(v6(udp(source="fd00::9", to=SITE6), source="fd00::9"), kind=0x86DD),
        "IPv6 source of loopback": ethernet(v6(udp(source="::1", to=SITE6), source="::1"), kind=0x86DD),
        "IPv4 with the kind of IPv6": ethernet(ordinary, kind=0x86DD),
        "IPv4 of another version": ethernet(v4(message, version=5)),
        "IPv4 with a wrong sum": ethernet(v4(message, wrong=0x1111)),
        "IPv4 header too short": ethernet(v4(message, words=4)),
        "IPv4 longer than its frame": ethernet(v4(message, length=900)),
        "IPv4 shorter than its header": ethernet(v4(message, length=12)),
        "IPv4 loose source route": ethernet(v4(message, options=b"\x83\x07\x04" + packed("10.0.0.5") + b"\0")),
        "IPv4 strict source route": ethernet(v4(message, options=b"\x89\x07\x04" + packed("10.0.0.5") + b"\0")),
        "IPv4 record route": ethernet(v4(message, options=b"\x07\x07\x04" + b"\0" * 5)),
        "IPv4 options that do not end": ethernet(v4(message, options=b"\x83\xff\x04" + b"\1" * 37)),
        "IPv4 first part, tiny": ethernet(v4(begin[:8], protocol=6, part=0x2000)),
        "IPv4 last part": ethernet(v4(begin[8:], protocol=6, part=1)),
        "IPv4 parts that overlap": ethernet(v4(big[:48], part=0x2000)),
        "IPv4 the overlapping part": ethernet(v4(big[40:], part=5)),
        "IPv4 part beyond the end": ethernet(v4(big[:48], part=0x1FFF)),
        "IPv6 of another version": ethernet(v6(message6, version=7), kind=0x86DD),
        "IPv6 longer than its frame": ethernet(v6(message6, length=900), kind=0x86DD),
        "IPv6 jumbo": ethernet(v6(header(17, message6, data=b"\xc2\4\0\1\0\0"), following=0, length=0), kind=0x86DD),
        "IPv6 hop-by-hop options": ethernet(v6(header(17, message6), following=0), kind=0x86DD),
        "IPv6 destination options": ethernet(v6(header(17, message6), following=60), kind=0x86DD),
        "IPv6 routing header": ethernet(
            v6(header(17, message6, length=2, data=b"\0\1\0\0\0\0" + packed("fd00::5")), following=43), kind=0x86DD
        ),
        "IPv6 part": ethernet(v6(bytes([17, 0, 0, 1, 0, 0, 0, 9]) + message6, following=44), kind=0x86DD),
        "IPv6 whole packet as a part": ethernet(v6(bytes([6, 0, 0, 0, 0, 0, 0, 9]) + begin6, following=44), kind=0x86DD),
        "IPv6 chain of twenty headers": ethernet(v6(chain, following=60), kind=0x86DD),
        "IPv6 nothing follows": ethernet(v6(message6, following=59), kind=0x86DD),
        "UDP longer than its packet": ethernet(v4(udp(length=99))),
        "UDP shorter than its header": ethernet(v4(udp(length=4))),
        "UDP to port 0": ethernet(v4(udp(port=0))),
        "UDP from port 0": ethernet(v4(udp(own=0))),
        "UDP cut short": ethernet(v4(message[:5])),
        "TCP from port 0": ethernet(v4(tcp(own=0), protocol=6)),
        "TCP header too short": ethernet(v4(tcp(words=3), protocol=6)),
        "TCP header too long": ethernet(v4(tcp(words=15), protocol=6)),
        "TCP cut short": ethernet(v4(begin[:12], protocol=6)),
        "to the host's loopback": ethernet(v4(tcp(to="127.0.0.1"), protocol=6, to="127.0.0.1")),
        "to the host's loopback, datagram": ethernet(v4(udp(to="127.0.0.1"), to="127.0.0.1")),
        "to IPv6 loopback": ethernet(v6(tcp(source=GUEST6, to="::1"), following=6, to="::1"), kind=0x86DD),
        "to a mapped address": ethernet(v6(tcp(source=GUEST6, to="::ffff:10.0.0.5"), following=6, to="::ffff:10.0.0.5"), kind=0x86DD),
        "to mapped loopback": ethernet(v6(udp(source=GUEST6, to="::ffff:127.0.0.1"), to="::ffff:127.0.0.1"), kind=0x86DD),
        "to nobody": ethernet(v4(tcp(to="0.0.0.0"), protocol=6, to="0.0.0.0")),
        "to a link-local address": ethernet(v6(tcp(source=GUEST6, to="fe80::5"), following=6, to="fe80::5"), kind=0x86DD),
        "to metadata": ethernet(v4(tcp(to="169.254.169.254"), protocol=6, to="169.254.169.254")),
        "to everybody": ethernet(v4(udp(to="255.255.255.255"), to="255.255.255.255"), to=EVERYBODY),
        "to a group": ethernet(v4(udp(to="224.0.0.251", port=5353), to="224.0.0.251"), to=bytes.fromhex("01005e0000fb")),
        "to an IPv6 group": ethernet(
            v6(udp(source=GUEST6, to="ff02::fb", port=5353), to="ff02::fb"), kind=0x86DD, to=bytes.fromhex("3333000000fb")
        ),
        "random bytes": ethernet(os.urandom(200)),
        "random bytes as IPv6": ethernet(os.urandom(200), kind=0x86DD),
        "a header and nothing else": ethernet(b""),
        "less than a header": b"\1" * 9,
        "more than the link carries": ethernet(v4(udp(payload=b"x" * 65000)) + b"y" * 9000),
    }


def good_frames():
    return {"a datagram": ethernet(v4(udp())), "an IPv6 datagram": ethernet(v6(udp(source=GUEST6, to=SITE6)), kind=0x86DD)}


def fire(which, times=5):
    """Sends frames of one sort. What the sandbox's own kernel does not send is counted too: another kernel might."""
    frames, unsent = globals()[which](), []
    with card() as sock:
        for _ in range(times):
            for name, frame in frames.items():
                try:
                    sock.send(frame)
                except OSError:
                    unsent.append(name)
    return {"outcome": "sent", "kinds": list(frames), "unsent": sorted(set(unsent))}


def raw(protocol, to, text):
    """Another protocol on top of IP: what comes back soon."""
    with socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET, socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(0.5 * PAUSE)
        sock.connect((to, 0))
        sock.send(bytes.fromhex(text) if protocol != 1 else icmp(8, bytes.fromhex(text)))
        return {"outcome": "answered", "heard": sock.recv(2000).hex()}


class Stream:
    """TCP by hand, for what no kernel sends. The address has to be taken from the kernel, which would break it off."""

    def __init__(self, to, port, own):
        self.to, self.port, self.own, self.number, self.seen, self.heard = to, port, own, 1000, 0, b""
        self.card = card()
        self.card.settimeout(0.05)

    def segment(self, flags, at=None, payload=b"", urgent=0):
        at = self.number if at is None else at
        body = tcp(self.port, self.own, flags, at, self.seen, payload, to=self.to, urgent=urgent)
        self.card.send(ethernet(v4(body, protocol=6, to=self.to)))

    def listen(self, seconds):
        """What comes, as (flags, payload); acknowledges it."""
        end, found = time.monotonic() + seconds, []
        while time.monotonic() < end:
            try:
                frame = self.card.recv(70000)
            except TimeoutError:
                continue
            if frame[:6] != GUEST_MAC or frame[12:14] != b"\x08\0" or frame[23] != 6 or frame[26:30] != packed(self.to):
                continue
            head = 34
            port, own, number, _, words, flags = struct.unpack_from(">HHIIBB", frame, head)
            if (port, own) != (self.port, self.own):
                continue
            payload = frame[head + (words >> 4) * 4 : 14 + struct.unpack_from(">H", frame, 16)[0]]
            found.append((flags, payload))
            if flags & RST:
                break
            if flags & SYN or number == self.seen:
                self.seen = number + len(payload) + (1 if flags & (SYN | FIN) else 0)
                self.heard += payload
                if payload or flags & (SYN | FIN):
                    if flags & SYN:
                        self.number += 1
                    self.segment(ACK)
            if flags & (SYN | FIN) or len(self.heard) > 5:
                break
        return found

    def open(self, payload=b""):
        self.segment(SYN, payload=payload)
        return any(flags & SYN and flags & ACK for flags, _ in self.listen(2 * SLOWNESS))


def kernel_address(verb):
    """Takes the address from the kernel, or gives it back."""
    if verb == "del":
        commands = ["ip address del 192.0.0.2/29 dev eth0"]
    else:
        commands = ["ip address add 192.0.0.2/29 dev eth0", "ip route add default via 192.0.0.1"]
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)
    return {"outcome": "done"}


def overlap(to, port, order, what, own):
    """Says one thing and another at the same place of the stream. What is heard tells which of them was believed."""
    if what == "tls":
        good = greeting("api.example")
        bad = good.replace(b"api.example", b"bad.example")
        at = good.index(b"api.example")
    else:
        good = b"GET /x HTTP/1.1\r\nHost: api.example\r\nConnection: close\r\n\r\n"
        bad = good.replace(b"api.", b"bad.")
        at = good.index(b"api.")
    end = at + 11
    stream = Stream(to, port, own)
    if not stream.open():
        return {"outcome": "not open"}
    first = stream.number
    orders = {
        "as it should be": [(0, good)],
        "byte for byte": [(index, good[index : index + 1]) for index in range(len(good))],
        "the second is bad": [(0, good[:end]), (at, bad[at:end]), (end, good[end:])],
        "the first is bad": [(0, bad[:end]), (at, good[at:end]), (end, good[end:])],
        "bad is there before its turn": [(at, bad[at:]), (0, good[:end]), (end, good[end:])],
        "good is there before its turn": [(at, good[at:]), (0, bad[:end]), (end, good[end:])],
        "bad comes from behind": [(end, good[end:]), (at - 3, bad[at - 3 : end]), (0, good[: at + 5])],
        "bad and then good at the same place": [(at, bad[at:end]), (at, good[at:end]), (0, good[:at]), (end, good[end:])],
    }
    for offset, payload in orders[order]:
        stream.segment(ACK | PSH, first + offset, payload)
        if order != "byte for byte":
            time.sleep(0.02)
    stream.number = first + len(good)
    stream.listen(1.5 * PAUSE)
    heard = stream.heard[:40].decode("latin-1")
    stream.segment(RST | ACK)
    believed = heard.startswith("\x16") or heard.startswith("HTTP/1.1 200")
    return {"outcome": "believed" if believed else "denied", "heard": heard}


def odd_flags(to, port):
    """Segments that begin nothing."""
    sock = card()
    for index, flags in enumerate([0, FIN, SYN | FIN, SYN | RST, FIN | PSH | URG, 0xFF, ACK, PSH | ACK, SYN | ACK]):
        for _ in range(3):
            body = tcp(port, 7000 + index, flags, 5000, 77, b"GET / HTTP/1.0\r\n\r\n", to=to)
            sock.send(ethernet(v4(body, protocol=6, to=to)))
    return {"outcome": "sent"}


def early(to, port, own, text):
    """Says something together with the first segment, as fast open does, and then nothing more."""
    stream = Stream(to, port, own)
    opened = stream.open(text.encode("latin-1"))
    stream.listen(0.5 * PAUSE)
    return {"outcome": "open" if opened else "not open", "heard": stream.heard[:40].decode("latin-1")}


def urgent(host, port, text, at, extra):
    """Puts an urgent byte into a stream: some receivers take it out of it, others do not."""
    with dialled(host, port) as sock:
        sock.sendall(text[:at].encode("latin-1"))
        time.sleep(0.05)
        sock.send(extra.encode("latin-1"), socket.MSG_OOB)
        time.sleep(0.05)
        sock.sendall(text[at:].encode("latin-1"))
        return {"outcome": "open", "heard": heard(sock)}
