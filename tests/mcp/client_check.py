#!/usr/bin/env python3
"""Checks the MCP server with the official Python client.

client_check.py ERA stdio COMMAND [ARGUMENT...]
client_check.py ERA http URL       with the bearer token in BATHY_MCP_TOKEN

ERA is `legacy` (the initialize handshake, revision 2025-11-25) or `modern` (discovery, revision 2026-07-28). Prints a
line per check; the exit code is 0 if all held.
"""

import os
import re
import sys
import time

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from expected import (
    BIG, BIG_BYTES, BIG_LINES, ENDLESS, FAILS, LIMIT, MOST_PARTS, PATIENCE, PLOT, REVISIONS, SHORTENED, SLOW, CheckFailed,
    Report, require, require_png, require_tools,
)  # fmt: skip

# Seconds that one check, and that all together, may take.
CHECK_SECONDS = 90 * PATIENCE
ALL_SECONDS = 270 * PATIENCE


def text_of(result):
    """All text of a result."""
    return "\n".join(block.text for block in result.content if block.type == "text")


class Checks:
    """The checks, in the order in which they run: later ones use the sandbox of the first ones."""

    def __init__(self, client, era):
        self.client = client
        self.era = era
        self.sandbox = None

    async def call(self, tool, progress=None, **arguments):
        """The result of a tool, whatever it says."""
        return await self.client.call_tool(tool, arguments, progress_callback=progress)

    async def works(self, tool, **arguments):
        """The result of a tool that has to succeed."""
        result = await self.call(tool, **arguments)
        require(not result.is_error, f"{tool} failed: {text_of(result)[:500]}")
        require(isinstance(result.structured_content, dict), f"{tool} has no structured content")
        return result

    async def refused(self, tool, *words, **arguments):
        """A tool's error, which has to be for the model to read and must contain these words."""
        result = await self.call(tool, **arguments)
        text = text_of(result)
        require(result.is_error, f"{tool} accepted {arguments}: {text[:300]}")
        for word in words:
            require(word in text, f"the error of {tool} does not say {word!r}: {text[:500]}")

    async def python(self, code, **arguments):
        """What Python code gives that has to succeed in the first sandbox."""
        return await self.works("run_code", language="python", code=code, sandbox_id=self.sandbox, **arguments)

    async def negotiates(self):
        version = self.client.protocol_version
        require(version == REVISIONS[self.era], f"the connection speaks {version}")
        require(self.client.server_info.name and self.client.server_info.version, "a server without a name")

    async def lists_tools(self):
        listed = await self.client.list_tools()
        require_tools([tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in listed.tools])

    async def keeps_state(self):
        first = await self.works("run_code", language="python", code="kept = 6 * 7")
        self.sandbox = first.structured_content["sandbox_id"]
        require(self.sandbox in text_of(first), "the text does not tell the new sandbox's id")
        second = await self.python("print('seen'); kept")
        require("42" in text_of(second) and "seen" in text_of(second), f"the second call got {text_of(second)!r}")

    async def shows_plot(self):
        result = await self.python(PLOT)
        pictures = [block for block in result.content if block.type == "image"]
        require(len(pictures) == 1, f"{len(pictures)} pictures: {text_of(result)[:300]}")
        require(pictures[0].mime_type == "image/png", pictures[0].mime_type)
        require_png(pictures[0].data)

    async def reports_errors(self):
        await self.refused(
            "run_code", "ZeroDivisionError", "return 1 / divisor", language="python", code=FAILS, sandbox_id=self.sandbox
        )

    async def runs_other_languages(self):
        script = await self.works(
            "run_code", language="javascript", code="const n = [1, 2, 3]; n.length", sandbox_id=self.sandbox
        )
        require("3" in text_of(script), text_of(script))
        typed = await self.works(
            "run_code", language="typescript", code="const word: string = 'typed'; word", sandbox_id=self.sandbox
        )
        require("typed" in text_of(typed), text_of(typed))
        shell = await self.works("run_code", language="bash", code="echo $((40 + 2))", sandbox_id=self.sandbox)
        require("42" in text_of(shell), text_of(shell))
        command = await self.works("run_command", command="echo out; echo err >&2", sandbox_id=self.sandbox)
        require("out" in text_of(command) and "err" in text_of(command), text_of(command))

    async def sends_progress(self):
        heard = []

        async def hear(progress, _total, _message):
            heard.append(progress)

        result = await self.call("run_code", hear, language="python", code=SLOW, sandbox_id=self.sandbox)
        require(not result.is_error and "slept" in text_of(result), text_of(result)[:300])
        require(len(heard) >= 2, f"{len(heard)} progress notifications")
        require(all(early < late for early, late in zip(heard, heard[1:])), f"progress does not rise: {heard}")

    async def cancels(self):
        await self.python("survivor = 'still here'")
        with anyio.move_on_after(3 * LIMIT) as patience:
            await self.call(
                "run_code", language="python", code=ENDLESS, sandbox_id=self.sandbox, timeout_seconds=120 * LIMIT
            )
        require(patience.cancelled_caught, "the endless loop ended by itself")
        # It comes after the loop in the same context: an answer says that the loop is over.
        with anyio.fail_after(20 * PATIENCE):
            result = await self.python("survivor if begun else 'no loop'")
        require("still here" in text_of(result), f"the state is lost: {text_of(result)[:300]}")

    async def times_out(self):
        await self.refused(
            "run_code", "time limit", "preserved",
            language="python", code=ENDLESS, sandbox_id=self.sandbox, timeout_seconds=2 * LIMIT,
        )
        require("still here" in text_of(await self.python("survivor")), "the state is lost")

    async def corrects_arguments(self):
        await self.refused("run_code", "language", "python", "bash", language="cobol", code="1")
        await self.refused("run_code", "code", language="python")
        await self.refused("run_code", "timeout_seconds", language="python", code="1", timeout_seconds="soon")
        await self.refused("run_code", "sandbox_create", language="python", code="1", sandbox_id="no-such-sandbox")
        await self.refused("read_file", "path", sandbox_id=self.sandbox)
        try:
            await self.call("no_such_tool")
        except MCPError:
            return
        raise CheckFailed("a tool that does not exist was called")

    async def shortens_output(self):
        result = await self.python(BIG)
        require(len(text_of(result)) < SHORTENED, f"{len(text_of(result))} characters came back")
        links = [block for block in result.content if block.type == "resource_link"]
        require(len(links) == 1, f"{len(links)} resource links")
        require(str(BIG_BYTES) in text_of(result), f"the full size {BIG_BYTES} is not told")
        whole, next_part = "", links[0].uri
        for _ in range(MOST_PARTS):
            first, *rest = (await self.client.read_resource(next_part)).contents
            whole += first.text
            if not rest:
                break
            next_part = rest[0].uri
        require(f"line {BIG_LINES - 1} of many" in whole, f"the resource lacks the end, {len(whole)} characters")
        require(len(whole) == BIG_BYTES, f"the resource has {len(whole)} characters of {BIG_BYTES}")
        # A model reads no resources, but it calls tools: the text tells with what.
        told = re.search(r'output "([^"]+)", offset (\d+)', text_of(result))
        require(told is not None, f"no call is told that reads the rest: {text_of(result)[-300:]}")
        name, offset = told[1], int(told[2])
        rest = await self.works("read_output", output=name, offset=offset, limit=4000)
        require(rest.structured_content["output"] == whole[offset : offset + 4000], text_of(rest)[:300])
        require(rest.structured_content["next_offset"] == offset + 4000, text_of(rest)[-300:])

    async def keeps_files(self):
        place = {"sandbox_id": self.sandbox, "path": "/tmp/checked/notes.txt"}
        await self.works("write_file", content="one\ntwo\n", **place)
        await self.works("edit_file", old_text="two", new_text="three", **place)
        require("three" in text_of(await self.works("read_file", **place)), "the edit is not in the file")
        listed = await self.works("list_directory", sandbox_id=self.sandbox, path="/tmp/checked")
        require("notes.txt" in text_of(listed), text_of(listed))
        await self.refused("edit_file", "read_file", old_text="absent words", new_text="x", **place)

    async def keeps_repl(self):
        made = (await self.works("create_python_repl")).structured_content
        repl = {"repl_id": made["repl_id"]}
        await self.works("run_python_in_repl", code="total = 41", **repl)
        result = await self.works("run_python_in_repl", code="total + 1", **repl)
        require("42" in text_of(result), text_of(result))

    async def manages_sandboxes(self):
        made = (await self.works("sandbox_create")).structured_content["sandbox_id"]
        listed = text_of(await self.works("sandbox_list"))
        require(made in listed and self.sandbox in listed, f"not listed: {listed[:500]}")
        await self.works("sandbox_info", sandbox_id=made)
        await self.works("sandbox_delete", sandbox_id=made)
        await self.works("sandbox_delete", sandbox_id=made)
        await self.refused("run_code", made, language="python", code="1", sandbox_id=made)

    def all(self):
        """Every check, in order."""
        return [
            self.negotiates, self.lists_tools, self.keeps_state, self.shows_plot, self.reports_errors,
            self.runs_other_languages, self.sends_progress, self.cancels, self.times_out, self.corrects_arguments,
            self.shortens_output, self.keeps_files, self.keeps_repl, self.manages_sandboxes,
        ]  # fmt: skip


async def run_all(target, era, report):
    mode = "legacy" if era == "legacy" else "auto"
    async with Client(target, mode=mode, read_timeout_seconds=CHECK_SECONDS) as client:
        for check in Checks(client, era).all():
            began = time.monotonic()
            problem = None
            try:
                with anyio.fail_after(CHECK_SECONDS):
                    await check()
            except (CheckFailed, TimeoutError, MCPError, KeyError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            report.add(check.__name__, began, problem)


async def main(era, transport, target, arguments):
    report = Report(f"{transport} {era}")
    with anyio.fail_after(ALL_SECONDS):
        if transport == "stdio":
            # The client hands on only a few variables by itself.
            server = StdioServerParameters(command=target, args=arguments, env=dict(os.environ))
            await run_all(server, era, report)
        else:
            headers = {"Authorization": f"Bearer {os.environ['BATHY_MCP_TOKEN']}"}
            async with httpx2.AsyncClient(headers=headers, timeout=CHECK_SECONDS) as http:
                await run_all(streamable_http_client(target, http_client=http), era, report)
    report.exit()


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in REVISIONS or sys.argv[2] not in ("stdio", "http"):
        sys.exit(__doc__)
    anyio.run(main, sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
