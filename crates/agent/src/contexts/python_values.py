# The Python driver, first of three parts: the channel to the agent, and values as MIME bundles.
#
# Nothing is imported here that costs time: an interpreter is ready when this text is compiled. Names are bound now, so
# that a cell which patches `os` or `builtins` for a test does not patch the driver.
import sys
from _json import encode_basestring_ascii as quote
from _thread import allocate_lock, get_ident
from posix import _exit, getpid, write

PACKET = 60_000
MAX_TEXT = 64 << 10  # of text/plain
MAX_VALUE = 8 << 20  # of one MIME type
MAX_BUNDLE = 16 << 20
MAX_DISPLAYS = 64  # of one cell
MAX_PIXELS = 25_000_000
TABLE_ROWS, TABLE_COLUMNS = 60, 20  # of html
JSON_ROWS, JSON_CELLS = 1000, 200_000


class State:
    """What changes while the driver runs."""

    replies = -1
    token = b""
    pid = getpid()
    main = get_ident()
    lock = allocate_lock()
    interruptible = False  # a cell's code runs: SIGINT raises
    sending = False  # not now: half a reply would spoil the next one
    postponed = False  # SIGINT came meanwhile
    in_cell = False
    displays = 0
    figures = []  # shown in this cell already, and not to be shown at its end


def reply(kind, payload):
    """Sends one reply, in pieces if it is long. A forked child sends nothing: it is not the context."""
    if getpid() != State.pid:
        return
    main = get_ident() == State.main
    if main:
        State.sending = True
    room, start, payload = PACKET - 33, 0, memoryview(payload)
    with State.lock:
        try:
            while len(payload) - start > room:
                write(State.replies, State.token + b"p" + payload[start : start + room])
                start += room
            write(State.replies, State.token + kind + payload[start:])
        except OSError:  # the agent has exited, or a cell has closed every descriptor: no reply can be sent
            _exit(1)
    if main:
        State.sending = False
        if State.postponed:
            State.postponed = False
            raise KeyboardInterrupt


# JSON ---------------------------------------------------------------------------------------------------------------


class TooLong(Exception):
    pass


class Json(str):
    """Text that is JSON already."""


def text_json(text):
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate is no character to any other reader
        text = text.encode("utf-8", "replace").decode()
    return quote(str(text))


def to_json(value, limit=MAX_VALUE):
    """The standard encoder, but strict where it is not (NaN, surrogates), kind to strangers, and bounded."""
    out, size = [], 0

    def put(value):
        nonlocal size
        if isinstance(value, Json):
            text = str(value)
        elif isinstance(value, str):
            text = text_json(value)
        elif value is None or value is True or value is False:
            text = {None: "null", True: "true", False: "false"}[value]
        elif isinstance(value, int):
            text = int.__repr__(value)
        elif isinstance(value, float):
            text = float.__repr__(value) if value - value == 0 else "null"
        elif isinstance(value, dict):
            mark = "{"
            for name, item in value.items():
                out.append(mark + text_json(name if isinstance(name, str) else str(name)) + ":")
                put(item)
                mark = ","
            text = "}" if mark == "," else "{}"
        elif isinstance(value, (list, tuple)):
            mark = "["
            for item in value:
                out.append(mark)
                put(item)
                mark = ","
            text = "]" if mark == "," else "[]"
        elif hasattr(type(value), "tolist"):  # numpy's scalars and arrays
            if getattr(value, "size", 0) > limit:
                raise TooLong
            return put(value.tolist())
        else:
            text = text_json(str(value))
        out.append(text)
        size += len(text) + 2
        if size > limit:
            raise TooLong

    put(value)
    return "".join(out)


# text/plain ---------------------------------------------------------------------------------------------------------

BRACKETS = {list: "[]", tuple: "()", set: "{}", frozenset: ("frozenset({", "})"), dict: "{}"}


def bounded_repr(value, limit=MAX_TEXT):
    """repr() that stops writing when the limit is reached. Returns the text and, if it was cut, what the whole is."""
    out, room, inside = [], limit, set()

    def add(text):
        nonlocal room
        out.append(text)
        room -= len(text)
        if room < 0:
            raise TooLong

    def put(value):
        kind = type(value)
        if kind in (str, bytes, bytearray):
            add(repr(value if len(value) <= room else value[: room + 1]))
        elif kind in BRACKETS:
            nested(value, kind, *BRACKETS[kind])
        elif isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) > limit:
            base = next(base for base in BRACKETS if isinstance(value, base))
            nested(value, base, kind.__name__ + "(" + BRACKETS[base][0], BRACKETS[base][1] + ")")
        elif kind is int and value.bit_length() > 8 * limit:
            add("<an integer of %d bits>" % value.bit_length())
        else:
            add(repr(value))

    def nested(value, kind, opening, closing):
        if not value and kind in (set, frozenset):
            return add(kind.__name__ + "()")
        if id(value) in inside:
            return add(opening + "..." + closing)
        inside.add(id(value))
        mark = opening
        for item in value if kind is not dict else value.items():
            add(mark)
            mark = ", "
            if kind is dict:
                put(item[0])
                add(": ")
                put(item[1])
            else:
                put(item)
        if mark is opening:
            add(opening)
        add("," + closing if kind is tuple and len(value) == 1 else closing)
        inside.discard(id(value))

    try:
        put(value)
    except TooLong:
        pass
    text = "".join(out)
    if len(text) <= limit and len(text.encode("utf-8", "replace")) <= limit:
        return text, None
    whole = len(text)
    told = "the text is longer than %d bytes and was cut" % limit
    if hasattr(type(value), "__len__"):
        if isinstance(value, (str, bytes, bytearray)):
            whole = max(whole, len(value))
        told += "; the whole %s has a length of %d" % (type(value).__name__, len(value))
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore"), (whole, told)


# Bundles ------------------------------------------------------------------------------------------------------------

PLAIN = (int, float, complex, bool, str, bytes, bytearray, range, *BRACKETS)


class Bundle:
    """One value as MIME types, each JSON text already, with what was left out."""

    def __init__(self):
        self.parts, self.metadata, self.omitted, self.size = {}, {}, [], 0

    def leave_out(self, mime, size, reason):
        self.omitted.append({"mime": mime, "bytes": size, "reason": reason})

    def add(self, mime, value):
        if value is None:
            return
        if isinstance(value, tuple) and len(value) == 2 and mime != "application/json":
            value, metadata = value
            if isinstance(metadata, dict) and metadata:
                self.metadata[mime] = metadata
        if isinstance(value, (bytes, bytearray, memoryview)):
            from binascii import b2a_base64

            text = '"' + b2a_base64(value, newline=False).decode() + '"'
        elif isinstance(value, str) and not isinstance(value, Json):
            if len(value) > MAX_VALUE:
                return self.leave_out(mime, len(value), "larger than %d bytes" % MAX_VALUE)
            text = text_json(value)
        else:
            try:
                text = to_json(value)
            except TooLong:
                return self.leave_out(mime, MAX_VALUE + 1, "larger than %d bytes" % MAX_VALUE)
        if len(text) > MAX_VALUE:
            return self.leave_out(mime, len(text), "larger than %d bytes" % MAX_VALUE)
        if self.size + len(text) > MAX_BUNDLE:
            return self.leave_out(mime, len(text), "the whole value is larger than %d bytes" % MAX_BUNDLE)
        self.size += len(text)
        self.parts[mime] = Json(text)

    def add_text(self, value):
        text, cut = bounded_repr(value)
        self.add("text/plain", text)
        if cut:
            self.leave_out("text/plain", *cut)

    def send(self, kind):
        whole = {"data": self.parts, "metadata": self.metadata}
        if self.omitted:
            whole["omitted"] = self.omitted
        reply(kind, to_json(whole, 4 * MAX_BUNDLE).encode())


def bundle_of(value):
    bundle = Bundle()
    if isinstance(value, type) or type(value) in PLAIN:  # a class's methods are for its instances
        bundle.add_text(value)
    else:
        need("rich")
        add_rich(bundle, value)
    return bundle


# display() ----------------------------------------------------------------------------------------------------------


def display(*values, raw=False, metadata=None, **_):
    """Shows values at once, each as what it can be: image, html, text and so on."""
    for value in values:
        if not State.in_cell or getpid() != State.pid:
            print(bounded_repr(value)[0])  # of a thread that outlived its cell, or of a forked child
            continue
        State.displays += 1
        if State.displays > MAX_DISPLAYS:
            if State.displays == MAX_DISPLAYS + 1:
                note = Bundle()
                note.add("text/plain", "more than %d displays in one cell: the rest is not shown" % MAX_DISPLAYS)
                note.send(b"d")
            continue
        if hasattr(type(value), "_ipython_display_"):
            value._ipython_display_()
            continue
        if raw and isinstance(value, dict):
            bundle = Bundle()
            for mime, data in value.items():
                bundle.add(str(mime), data)
        else:
            bundle = bundle_of(value)
        bundle.metadata.update(metadata or {})
        flush()
        bundle.send(b"d")


