"""What the checks with different MCP clients share: the code that they run and what has to come back."""

import base64
import json
import os
import sys
import time

# How many times slower than an ordinary machine this one is.
PATIENCE = int(os.environ.get("BATHY_TEST_PATIENCE", "1"))
# By how much the limits grow that a check waits for.
LIMIT = -(-PATIENCE // 4)

TOOLS = {
    "run_code", "run_command", "create_python_repl", "run_python_in_repl",
    "sandbox_create", "sandbox_list", "sandbox_info", "sandbox_delete",
    "read_file", "write_file", "edit_file", "list_directory", "read_output",
}  # fmt: skip
# The list of tools in characters, of which four are about a token.
MOST_OF_TOOLS = 4 * 3500
ANNOTATIONS = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")

# The revision that each way of opening a connection has to end with.
REVISIONS = {"legacy": "2025-11-25", "modern": "2026-07-28"}

PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 4, 9, 16])\nplt.title('squares')"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
ENDLESS = "begun = True\nwhile True:\n    pass"
FAILS = "def quotient(divisor):\n    return 1 / divisor\nquotient(0)"
# Longer than two of the server's progress intervals.
SLOW = "import time\nfor step in range(6):\n    print('step', step)\n    time.sleep(1)\n'slept'"
# More than 1 MiB, which is the most that the Python client takes in one event over HTTP.
BIG_LINES = 8_000
FILLER = "of many that nobody reads to the end; " * 8
BIG = f"for line in range({BIG_LINES}):\n    print('line', line, {FILLER!r})"
BIG_BYTES = sum(len(f"line {line} {FILLER}\n") for line in range(BIG_LINES))
# The most pieces that a long output may come in.
MOST_PARTS = 20
# More than this in one result would be no truncation.
SHORTENED = BIG_BYTES // 4


class CheckFailed(Exception):
    """The server did something else than it has to."""


def require(holds, problem):
    """Ends the check with `problem` unless something holds."""
    if not holds:
        raise CheckFailed(problem)


def require_png(data):
    """Ends the check unless `data` is a PNG picture in base64."""
    picture = base64.b64decode(data, validate=True)
    require(picture.startswith(PNG_SIGNATURE), f"no PNG signature: {picture[:16]!r}")
    require(len(picture) > 2000, f"a picture of {len(picture)} bytes shows no plot")


def require_tools(tools):
    """Ends the check unless these tools, as JSON, are the server's, each fully described."""
    names = [tool["name"] for tool in tools]
    require(len(names) == len(set(names)), f"a name twice: {sorted(names)}")
    require(TOOLS <= set(names), f"missing: {sorted(TOOLS - set(names))}")
    for tool in tools:
        annotations = tool.get("annotations") or {}
        absent = [key for key in ANNOTATIONS if annotations.get(key) is None]
        absent += [key for key in ("title", "description") if not tool.get(key)]
        absent += [key for key in ("inputSchema",) if (tool.get(key) or {}).get("type") != "object"]
        require(not absent, f"{tool['name']} lacks {absent}")
    size = len(json.dumps(tools, separators=(",", ":"), ensure_ascii=False))
    require(size <= MOST_OF_TOOLS, f"the list of tools has {size} characters")


class Report:
    """One line per check, and whether all held."""

    def __init__(self, where):
        self.where = where
        self.failed = 0

    def add(self, name, began, problem=None):
        """Records a check that was begun at this `time.monotonic()`."""
        self.failed += problem is not None
        seconds = time.monotonic() - began
        line = f"{self.where}: {name}: {'ok' if problem is None else 'FAILED: ' + problem} ({seconds:.1f} s)"
        print(line, flush=True)

    def exit(self):
        """Ends the program with what the checks add up to."""
        sys.exit(1 if self.failed else 0)
