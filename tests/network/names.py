"""The resolver. It answers from a zone: JSON that maps names to what is said about them.

  "A", "AAAA"      lists of addresses
  "CNAME"          another name; what the zone says about that one follows, as a resolver would tell it
  "TXT"            a list of texts
  "HTTPS"          a list of {"priority", "target", "alpn": [names], "ipv4hint": [addresses], "ech": hex}
  "ttl"            seconds, 60 if it is left out
  "turns"          a list of such objects: the first question gets the first, and so on; the last one stays. Each
                   type of question counts by itself
  "rcode"          a number to fail with
  "owner"          the name that the answers are said to be about, instead of the one that was asked for
  "fault"          "silence": never answers; "other-question": repeats another question than it was asked;
                   "wrong-id": the number of another question; "garbage": bytes that are no message
  "delay"          seconds before the answer

A name may begin with "*.": it stands for every name below that the zone does not have. Other names do not exist. What
does not fit into a datagram is cut off, and comes over TCP.
"""

import asyncio
import collections
import ipaddress
import struct

TYPES = {"A": 1, "CNAME": 5, "SOA": 6, "TXT": 16, "AAAA": 28, "OPT": 41, "HTTPS": 65, "ANY": 255}
TYPE_NAMES = {number: name for name, number in TYPES.items()}
NXDOMAIN = 3
LONGEST_CHAIN = 64
TTL = 60
SMALLEST_DATAGRAM = 512
# What the question says about itself, as an answer points to it.
ASKED_NAME = b"\xc0\x0c"


class Query:
    """A question that was read. Raises ValueError, IndexError or struct.error for what is none."""

    def __init__(self, data):
        self.id, _, questions, _, _, more = struct.unpack_from(">6H", data)
        if questions != 1:
            raise ValueError("not one question")
        labels, at = [], 12
        while length := data[at]:
            if length > 63:
                raise ValueError("a compressed question")
            labels.append(data[at + 1 : at + 1 + length].decode("ascii", "backslashreplace").replace(".", "\\."))
            at += 1 + length
        self.name = ".".join(labels).lower()
        self.kind, _ = struct.unpack_from(">2H", data, at + 1)
        self.type = TYPE_NAMES.get(self.kind, f"TYPE{self.kind}")
        self.question = data[12 : at + 5]
        # The option record has the root for its name, and the size of the asker's buffer for its class.
        rest = data[at + 5 :]
        self.extended = more > 0 and rest[:3] == b"\0" + struct.pack(">H", TYPES["OPT"])
        self.room = max(SMALLEST_DATAGRAM, struct.unpack_from(">H", rest, 3)[0]) if self.extended else SMALLEST_DATAGRAM


class Resolver:
    """What a side's resolvers share."""

    def __init__(self, zone):
        self._zone = {name.lower(): said for name, said in zone.items()}
        self._asked = collections.Counter()

    def datagram(self, data, contact, reply):
        query = read(data, contact, "udp")
        if query is None:
            return
        said = self._said(query)
        answer = self._answer(query, said, query.room)
        if answer:
            asyncio.get_running_loop().call_later(said.get("delay", 0), reply, answer)

    async def serve(self, reader, writer, contact):
        """Over a stream: each message after its length."""
        while True:
            try:
                (length,) = struct.unpack(">H", await reader.readexactly(2))
            except asyncio.IncompleteReadError:
                return
            query = read(await reader.readexactly(length), contact, "tcp")
            if query is None:
                return
            said = self._said(query)
            answer = self._answer(query, said, 65535)
            if answer:
                await asyncio.sleep(said.get("delay", 0))
                writer.write(struct.pack(">H", len(answer)) + answer)
                await writer.drain()

    def _about(self, name):
        if name in self._zone:
            return self._zone[name]
        while "." in name:
            name = name.partition(".")[2]
            if "*." + name in self._zone:
                return self._zone["*." + name]
        return None

    def _said(self, query):
        said = self._about(query.name)
        if said is None:
            return {"rcode": NXDOMAIN}
        if "turns" not in said:
            return said
        turn = min(self._asked[query.name, query.type], len(said["turns"]) - 1)
        self._asked[query.name, query.type] += 1
        return {**said, **said["turns"][turn]}

    def _answer(self, query, said, room):
        fault = said.get("fault")
        if fault == "silence":
            return None
        if fault == "garbage":
            return struct.pack(">H", query.id) + b"\xff" * 40
        records = self._records(query, said)
        number = query.id ^ (fault == "wrong-id")
        question = encoded("other.example") + query.question[-4:] if fault == "other-question" else query.question
        # An answer, recursion wanted and had.
        flags = 0x8180 | said.get("rcode", 0)
        options = b"\0" + struct.pack(">HHIH", TYPES["OPT"], 1232, 0, 0) if query.extended else b""
        size = 12 + len(question) + sum(map(len, records)) + len(options)
        if size > room:
            records, flags = [], flags | 0x0200
        counts = struct.pack(">6H", number, flags, 1, len(records), 0, bool(options))
        return counts + question + b"".join(records) + options

    def _records(self, query, said):
        """What is known, along the chain of other names; a circle ends where it closes."""
        found, seen = [], {query.name}
        owner = encoded(said["owner"]) if "owner" in said else ASKED_NAME
        for _ in range(LONGEST_CHAIN):
            kinds = [query.type] if query.type != "ANY" else ["A", "AAAA", "TXT", "HTTPS"]
            for kind in kinds:
                found += [record(owner, kind, said, data) for data in content(kind, said)]
            if "CNAME" not in said:
                break
            name = said["CNAME"].lower()
            found.append(record(owner, "CNAME", said, encoded(name)))
            owner, said = encoded(name), self._about(name) or {}
            if name in seen:
                break
            seen.add(name)
        return found


def read(data, contact, transport):
    try:
        query = Query(data)
    except (ValueError, IndexError, struct.error):
        contact.note("dns", detail=f"no question over {transport}")
        return None
    contact.note("dns", name=query.name, detail=f"{query.type} {transport}")
    return query


def encoded(name):
    labels = [label.encode() for label in name.rstrip(".").split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def record(owner, kind, said, data):
    return owner + struct.pack(">HHIH", TYPES[kind], 1, said.get("ttl", TTL), len(data)) + data


def content(kind, said):
    values = said.get(kind, [])
    if kind in ("A", "AAAA"):
        return [ipaddress.ip_address(value).packed for value in values]
    if kind == "TXT":
        return [bytes([len(value)]) + value.encode() for value in values]
    if kind == "HTTPS":
        return [service(value) for value in values]
    return []


def service(value):
    """An HTTPS record (RFC 9460): a priority, a name, and parameters in the order of their numbers."""
    parameters = {}
    if "alpn" in value:
        parameters[1] = b"".join(bytes([len(name)]) + name.encode() for name in value["alpn"])
    if "ipv4hint" in value:
        parameters[4] = b"".join(ipaddress.ip_address(hint).packed for hint in value["ipv4hint"])
    if "ech" in value:
        parameters[5] = bytes.fromhex(value["ech"])
    rest = b"".join(struct.pack(">HH", key, len(data)) + data for key, data in parameters.items())
    return struct.pack(">H", value.get("priority", 1)) + encoded(value.get("target", ".")) + rest
