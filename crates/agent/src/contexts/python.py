# The Python driver, second part: cells, errors, and the loop.

import builtins
import os
import _ast
import _signal
from posix import chdir, dup2, fchdir, fstat, pread, read
from posix import open as open_fd, close as close_fd

ONLY_AST, TOP_LEVEL_AWAIT, COROUTINE, FUTURES = 0x400, 0x2000, 0x80, 0x1FE0000
MAX_SOURCES = 16 << 20  # of code kept for tracebacks
MAX_ERROR_LINES, MAX_ERROR = 200, 64 << 10
CHECK = "found = 6\nfound * 7"
NO_INPUT = "%s is not available: there is no keyboard input; pass values in the code"

main = sys.modules["__main__"].__dict__
sources = {}  # "<cell N>": code
future = 0  # what `from __future__ import` has switched on
loop = None  # of top-level await, made when first needed

# Descriptors --------------------------------------------------------------------------------------------------------


def need(part):
    """Compiles a part of the driver that not every context needs: it is a third of the time to get ready."""
    if part in later:
        exec(compile(later[part], "<driver>", "exec"), globals())
        later.pop(part, None)


def show_open_figures():
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is not None and helpers.Gcf.figs:
        need("rich")
        show_figures()


def private(fd):
    """A duplicate that programs we start do not get, out of the way of code that closes the first few."""
    from fcntl import F_DUPFD_CLOEXEC, fcntl

    for place in (900, 200, 10):
        try:
            return fcntl(fd, F_DUPFD_CLOEXEC, place)
        except OSError:  # the limit of open files is lower
            pass
    return fd


def identity(fd):
    try:
        found = fstat(fd)
        return found.st_dev, found.st_ino
    except OSError:
        return None


def text_stream(fd):
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


os.set_inheritable(3, False)
os.set_inheritable(4, False)
_, rich, magics = pread(5, fstat(5).st_size, 0).split(b"\f")
later = {"rich": rich, "magics": magics}
close_fd(5)
requests, State.replies = private(3), private(4)
close_fd(3)
channel = (identity(requests), identity(State.replies))
outputs = {fd: (private(fd), identity(fd)) for fd in (1, 2)}
streams = {}


def flush():
    for stream in (sys.stdout, sys.stderr, *streams.values()):
        try:
            stream.flush()
        except Exception:  # closed, replaced, or its disk is full: the cell's own affair
            pass


def mend_outputs():
    """Each cell begins with working standard streams, whatever the last one did to them."""
    for fd, (copy, was) in outputs.items():
        if identity(fd) != was:
            dup2(copy, fd)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = streams.get(fd)
        try:
            usable = not stream.closed and stream.fileno() == fd
        except Exception:  # none yet, or detached
            usable = False
        if not usable:
            streams[fd] = text_stream(fd)
        setattr(sys, name, streams[fd])
        setattr(sys, "__%s__" % name, streams[fd])


def refuse(what):
    raise EOFError(NO_INPUT % what)


class NoInput:
    """sys.stdin: raises an error with the reason, because an end of file would look like empty input."""

    encoding, errors, newlines, closed, mode, name = "utf-8", "strict", None, False, "r", "<stdin>"

    def read(self, *_):
        refuse("standard input")

    readline = readlines = readinto = read1 = __next__ = read

    def __iter__(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def fileno(self):
        return 0

    def isatty(self):
        return False

    def close(self):
        pass

    flush = close

    def readable(self):
        return True

    def writable(self):
        return False

    seekable = writable

    @property
    def buffer(self):
        return self


# Imports that need something done -----------------------------------------------------------------------------------


def register_sources():
    lines = sys.modules["linecache"].cache
    for name, code in sources.items():
        if name not in lines:
            lines[name] = (len(code), None, [line + "\n" for line in code.split("\n")], name)


def prepare_pyplot(pyplot):
    pyplot.show = lambda *_, **__: show_open_figures()
    sys.modules["matplotlib.figure"].Figure.show = lambda figure, warn=True: display(figure)


def prepare_getpass(module):
    module.getpass = lambda *_, **__: refuse("getpass()")


def prepare_pdb(module):
    module.set_trace = lambda *_, **__: refuse("pdb.set_trace()")


AFTER_IMPORT = {
    "pdb": prepare_pdb,
    "linecache": lambda module: register_sources(),
    "getpass": prepare_getpass,
    "matplotlib.pyplot": prepare_pyplot,
    "IPython.core.display_functions": lambda module: setattr(module, "display", display),
}


class Watch:
    """Lets the real finders find, and acts when the module has been made."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        after = AFTER_IMPORT.get(name)
        if after is None:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not Watch else None
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if not isinstance(loader, type):  # a class would be every frozen module's loader
            execute = loader.exec_module

            def exec_module(module):
                execute(module)
                after(module)

            loader.exec_module = exec_module
        return spec


class Substitute:
    """The last finder: a small `IPython.display` where IPython is not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in ("IPython", "IPython.display"):
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, Substitute, is_package=name == "IPython")

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        if module.__name__ == "IPython":
            module.version_info, module.__version__ = (0, 0, 0), "0"
            module.get_ipython = lambda: None
            __import__("IPython.display")
        else:
            need("rich")
            make_display_module(module)


# Cells --------------------------------------------------------------------------------------------------------------

count = 0


def cell_name():
    return "<cell %d>" % count


def parse(code, name):
    flags = ONLY_AST | TOP_LEVEL_AWAIT | future
    try:
        return compile(code, name, "exec", flags, True)
    except SyntaxError:
        if "!" not in code and "%" not in code:
            raise
        need("magics")
        rewritten = rewrite_magics(code)
        if rewritten == code:
            raise
    return compile(rewritten, name, "exec", flags, True)


def silenced(code, last):
    """Whether a semicolon follows the last expression."""
    line = code.split("\n")[last.end_lineno - 1].encode("utf-8", "surrogatepass")
    return line[last.end_col_offset :].lstrip()[:1] == b";"


def compile_cell(code, name):
    """The statements, and the last expression by itself if its value is wanted."""
    global future
    tree = parse(code, name)
    last = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr) and not silenced(code, tree.body[-1]):
        last = tree.body.pop()
    body = compile(tree, name, "exec", TOP_LEVEL_AWAIT | future, True)
    future |= body.co_flags & FUTURES
    if last is not None:
        last = compile(_ast.Expression(last.value), name, "eval", TOP_LEVEL_AWAIT | future, True)
    return body, last


def run_code(parts, space, local=None):
    local = space if local is None else local
    if any(part is not None and part.co_flags & COROUTINE for part in parts):
        return wait_for(run_awaiting(parts, space, local))
    body, last = parts
    eval(body, space, local)
    return eval(last, space, local) if last is not None else None


async def run_awaiting(parts, space, local):
    """One task for both parts: a cell that awaits at its end may start tasks before."""
    value = None
    for part in parts:
        value = eval(part, space, local) if part is not None else None
        if part is not None and part.co_flags & COROUTINE:
            value = await value
    return value


def wait_for(coroutine):
    """Runs a coroutine on the context's one loop, where tasks of earlier cells go on meanwhile."""
    global loop
    import asyncio

    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if not task.done():  # interrupted: its own clean-up runs
            task.cancel()
            try:
                loop.run_until_complete(task)
            except asyncio.CancelledError:
                pass
        raise


def run_cell(code):
    code = code.decode("utf-8-sig")
    if "\r" in code:  # as Python reads files
        code = code.replace("\r\n", "\n").replace("\r", "\n")
    remember(code)
    head, _, body = code.lstrip().partition("\n")
    if head.startswith("%%"):
        need("magics")
        found, arguments = find_magic(CELL_MAGICS, "%%", head[2:].rstrip())
        value = found(arguments, body)
    else:
        value = run_code(compile_cell(code, cell_name()), main)
    if getpid() != State.pid:
        return
    if value is not None:
        main["_"] = value
        bundle = bundle_of(value)
        flush()
        bundle.send(b"r")


def user_frames(trace):
    """Takes our frames out of a traceback and of those it is chained to; what called a cell is ours too."""
    seen = set()
    todo = [trace]
    while todo:
        trace = todo.pop()
        if trace is None or id(trace) in seen:
            continue
        seen.add(id(trace))
        stack = trace.stack
        first = next((at for at, frame in enumerate(stack) if frame.filename.startswith("<cell ")), 0)
        stack[:] = [frame for frame in stack[first:] if frame.filename != "<driver>"]
        todo += [trace.__cause__, trace.__context__, *(getattr(trace, "exceptions", None) or ())]


def error_lines(error):
    import traceback

    register_sources()
    depth, frame = 0, error.__traceback__
    while frame is not None:
        depth, frame = depth + 1, frame.tb_next
    limit = -MAX_ERROR_LINES if depth > 5000 else None
    compact = {"compact": True} if sys.version_info >= (3, 10) else {}  # keeps only the chain that is shown
    trace = traceback.TracebackException(type(error), error, error.__traceback__, limit=limit, **compact)
    user_frames(trace)
    lines = "".join(trace.format()).rstrip("\n").split("\n")
    if not trace.stack and lines[0].startswith("Traceback "):
        del lines[0]  # of nothing
    if len(lines) > MAX_ERROR_LINES:
        half = MAX_ERROR_LINES // 2
        lines[half:-half] = ["... %d lines left out ..." % (len(lines) - 2 * half)]
    room = MAX_ERROR
    for at, line in enumerate(lines):
        lines[at] = line[: max(0, room)] + (" ... cut" if len(line) > room else "")
        room -= len(line) + 1
    return [line for line in lines if line != " ... cut"]


def described(error):
    """An error's text and traceback, or less if even that goes wrong: no memory, an exception whose text raises."""
    value = ""
    try:
        value = str(error)[: MAX_ERROR // 4]
        return value, error_lines(error)
    except BaseException as trouble:  # KeyboardInterrupt and SystemExit too: code of the cell may raise anything
        words = (type(error).__name__, type(trouble).__name__)
        return value, ["%s (and its traceback cannot be shown: %s)" % words]


def send_error(error):
    value, lines = described(error)
    reply(b"e", to_json({"name": type(error).__name__, "value": value, "traceback": lines}).encode())


def out_of_memory(error):
    """Whether the driver itself had no memory, before the cell's code began. Code that is too complex has a message."""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename != "<driver>":
            return False
        frame = frame.tb_next
    return isinstance(error, SystemError) or isinstance(error, MemoryError) and not error.args


def damage(error):
    """What is wrong with the interpreter itself after a cell that failed, if anything is."""
    try:
        compile_cell(CHECK, "<check>")
    except BaseException as trouble:
        return "it cannot run any code (%s)" % type(trouble).__name__
    if out_of_memory(error):
        return "it has no memory to run code with (%s)" % type(error).__name__
    now = vars(builtins)
    changed = [name for name, value in pristine.items() if now.get(name) is not value]
    return "built-ins are replaced (%s)" % ", ".join(changed[:5]) if changed else None


# The loop -----------------------------------------------------------------------------------------------------------


def on_interrupt(number, frame):
    if State.sending:
        State.postponed = State.interruptible
    elif State.interruptible or getpid() != State.pid:
        raise KeyboardInterrupt


def leave_channel():
    """In a forked child: the agent must see the context's end although children of it live on."""
    for fd in (requests, State.replies, 4):
        if identity(fd) in channel:
            close_fd(fd)


def leave_child(error):
    """A child that a cell forked ends where the cell's code does."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        print("\n".join(described(error)[1]), file=sys.stderr)
        status = 1
    flush()
    _exit(status & 0xFF)


def with_surroundings(cwd, variables, work):
    """Runs with a cell's own directory and environment, which end with it."""
    before, back = {}, None
    try:
        if cwd:
            back = open_fd(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            chdir(cwd)
        for variable in variables:
            name, equals, value = variable.partition(b"=")
            if name and equals:
                before.setdefault(name, os.environb.get(name))
                os.environb[name] = value
        work()
    finally:
        State.interruptible = False
        if getpid() == State.pid:
            for name, value in before.items():
                if value is not None:
                    os.environb[name] = value
                else:
                    os.environb.pop(name, None)
            if back is not None:
                fchdir(back)
                close_fd(back)
        State.interruptible = True


def remember(code):
    sources[cell_name()] = code
    while len(sources) > 1 and sum(map(len, sources.values())) > MAX_SOURCES:
        sources.pop(next(iter(sources)))
    if "linecache" in sys.modules:
        register_sources()


def failure_of(work):
    try:
        work()
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the context goes on
        return error


def execute(code, cwd=b"", flags=b"", *variables):
    global count
    count += 1
    State.in_cell, State.displays, State.figures, State.postponed = True, 0, [], False
    error = trouble = None
    try:
        State.interruptible = True
        error = failure_of(lambda: with_surroundings(cwd, variables, lambda: run_cell(code)))
        trouble = failure_of(show_open_figures)
    except BaseException as caught:  # an interrupt in between, or a trace function that fails
        trouble = caught
    State.interruptible = False
    error = trouble if error is None else error
    if isinstance(error, SystemExit) and error.code in (None, 0) and getpid() == State.pid:
        error = None  # the usual end of a script
    if getpid() != State.pid:
        leave_child(error)
    mend()
    flush()
    if error is not None:
        send_error(error)
    State.in_cell = False
    end = {"status": "ok" if error is None else "error", "count": count}
    harm = damage(error) if error is not None else None
    if harm is not None:
        end["damage"] = harm
    reply(b"f", to_json(end).encode())
    # Or their frames, and all that these hold, would live until the garbage collector comes.
    State.figures = error = trouble = None


def mend():
    """Undoes what a cell may have done to the driver's own needs."""
    if sys.getrecursionlimit() < 500:
        sys.setrecursionlimit(1000)
    sys.settrace(None)
    sys.setprofile(None)
    if sys.modules.get("sys") is not sys:  # a second one would have streams of its own
        sys.modules.update(first_modules)
    if _signal.getsignal(_signal.SIGINT) is not on_interrupt:
        _signal.signal(_signal.SIGINT, on_interrupt)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGINT])
    mend_outputs()
    sys.stdin = no_input


def receive(size):
    parts = []
    while size:
        part = read(requests, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def requests_forever():
    while True:
        body = receive(int.from_bytes(receive(4), "little"))
        fields, at = [], 0
        while at < len(body):
            end = at + 4 + int.from_bytes(body[at : at + 4], "little")
            fields.append(body[at + 4 : end])
            at = end
        if fields[0] == b"hello":
            State.token = fields[1]
            reply(b"y", b'{"version":"%d.%d.%d"}' % sys.version_info[:3])
        elif fields[0] == b"execute":
            execute(*fields[1:])


no_input = NoInput()
first_modules = dict(sys.modules)
builtins.display = display
builtins.input = lambda prompt="": refuse("input()")
sys.breakpointhook = lambda *_, **__: refuse("breakpoint()")
pristine = {name: value for name, value in vars(builtins).items() if name != "_"}
sys.meta_path.insert(0, Watch)
sys.meta_path.append(Substitute)
os.environ.setdefault("MPLBACKEND", "Agg")
os.register_at_fork(after_in_child=leave_channel)
mend()
try:
    requests_forever()
except EOFError:  # the agent has closed the context; threads of cells do not keep it
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    flush()
    _exit(0)
