"""Agents' ways to run code: two MCP clients of `bathy mcp`, and ipykernel through jupyter_client."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import harness
import peers
from peers import BenchError

DEADLINE_SECONDS = 60
REVISION = "2025-11-25"


def value(answer):
    """The text of the last expression, of a structured answer of run_code."""
    for result in answer.get("results", []):
        if result.get("is_main_result"):
            return result["data"]["text/plain"]
    raise BenchError(f"run_code answered without a result: {json.dumps(answer)[:2000]}")


def hang_up(process):
    """Ends a process that ends with its input."""
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class LineClient:
    """The least that an MCP client can be: a line of JSON out, a line of JSON in."""

    def __init__(self, argv, environment):
        self.process = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.number = 0
        self.leftovers = []
        self.request("initialize", protocolVersion=REVISION, capabilities={},
                     clientInfo={"name": "bench", "version": "1"})
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def send(self, message):
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def request(self, method, **parameters):
        self.number += 1
        self.send({"jsonrpc": "2.0", "id": self.number, "method": method, "params": parameters})
        while line := self.process.stdout.readline():
            message = json.loads(line)
            if message.get("id") == self.number and "method" not in message:
                if "error" in message:
                    raise BenchError(f"{method}: {message['error']}")
                return message["result"]
        raise BenchError("bathy mcp hung up")

    def call(self, tool, **arguments):
        """Its structured answer; an error of the tool is one of the benchmark."""
        result = self.request("tools/call", name=tool, arguments=arguments)
        if result.get("isError"):
            raise BenchError(f"{tool}: {result['content']}")
        return result["structuredContent"]

    def remove_leftovers(self):
        while self.leftovers:
            self.call("sandbox_delete", sandbox_id=self.leftovers.pop())

    def close(self):
        with contextlib.suppress(BenchError, OSError):
            self.remove_leftovers()
        hang_up(self.process)


class OfficialClient:
    """The `mcp` package's client, in a process of its own: its event loop is its own."""

    def __init__(self, argv, environment):
        # Its own time is taken by the one who asks; the pipe between them adds some hundredths of a millisecond.
        script = Path(__file__).with_name("official_client.py")
        self.process = subprocess.Popen([sys.executable, script, *argv], env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def call(self, tool, **arguments):
        self.process.stdin.write(json.dumps([tool, arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise BenchError("the mcp package's client ended")
        return json.loads(line)

    def close(self):
        hang_up(self.process)


class Kernel:
    """ipykernel, through the library that notebooks use."""

    def __init__(self):
        from jupyter_client.manager import start_new_kernel
        self.manager, self.client = start_new_kernel(
            startup_timeout=DEADLINE_SECONDS, kernel_name="python3", stderr=subprocess.DEVNULL)

    def run(self, code):
        """The text of the code's last expression."""
        shown = []

        def look(message):
            if message["msg_type"] == "execute_result":
                shown.append(message["content"]["data"]["text/plain"])
        reply = self.client.execute_interactive(code, timeout=DEADLINE_SECONDS, output_hook=look)
        if reply["content"]["status"] != "ok" or not shown:
            raise BenchError(f"ipykernel failed: {reply['content']}")
        return shown[-1]

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@dataclass(frozen=True)
class Bench:
    """What the benchmark works with; all of it is gone when the benchmark ends."""

    program: Path
    scratch: Path
    cleanup: contextlib.ExitStack
    environment: dict
    kernels: list = field(default_factory=list)

    def server(self):
        return [str(self.program), "mcp", "--toolsets", "contexts"]

    def line_client(self):
        client = LineClient(self.server(), self.environment)
        self.cleanup.callback(client.close)
        return client

    def official_client(self):
        client = OfficialClient(self.server(), self.environment)
        self.cleanup.callback(client.close)
        return client

    def kernel(self):
        kernel = Kernel()
        self.cleanup.callback(kernel.close)
        return kernel

    def fresh_kernel(self, code):
        """A kernel's first answer; it ends with `close_kernels`."""
        self.kernels.append(Kernel())
        return self.kernels[-1].run(code)

    def close_kernels(self):
        while self.kernels:
            self.kernels.pop().close()

    def context(self, server, sandbox, number):
        """Milliseconds until a new context is there and has answered."""
        name = f"bench-{number}"
        started = time.perf_counter()
        server.call("context_create", sandbox_id=sandbox, context_id=name, language="python")
        answer = server.call("run_code", language="python", code="1+1", sandbox_id=sandbox, context_id=name)
        elapsed = (time.perf_counter() - started) * 1000
        if value(answer) != "2":
            raise BenchError(f"a new context says that 1+1 is {value(answer)}")
        server.call("context_delete", sandbox_id=sandbox, context_id=name)
        return elapsed

    def versions(self):
        bathy = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        names = ("ipykernel", "jupyter_client", "mcp")
        python = f"Python {sys.version.split()[0]}"
        return {"bathy": bathy, "host": python, **{name: f"{name} {importlib.metadata.version(name)}" for name in names}}

    def remove_all(self):
        """The sandboxes of this run."""
        _, listed = harness.must([self.program, "ls", "-q"], self.environment)
        if ids := listed.split():
            harness.must([self.program, "rm", "--force", *ids], self.environment)


def cache():
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bathysphere" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def enter_packages(requirements):
    """Goes on in a Python that has these packages: one folder for each list of them and each Python."""
    key = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = cache() / f"python-{key}"
    if Path(sys.prefix) == folder:
        return
    if not (folder / "complete").exists():
        harness.log("fetching Python packages")
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], stdout=sys.stderr, check=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements],
                       stdout=sys.stderr, check=True)
        (folder / "complete").touch()
    python = str(folder / "bin/python")
    os.execv(python, [python, *sys.argv])


@contextlib.contextmanager
def bench():
    """Builds what is missing, and makes the folders of one run."""
    program = harness.bathy_program()
    with contextlib.ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="run-", dir=cache())))
        harness.must([program, "setup"], deadline=3600)
        made = Bench(program, scratch, cleanup, peers.with_state(scratch / "state"))
        cleanup.callback(made.remove_all)
        cleanup.callback(made.close_kernels)
        yield made
