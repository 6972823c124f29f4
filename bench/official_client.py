"""Calls tools of an MCP server with the `mcp` package: reads `[tool, arguments]`, prints the structured answer, by line."""

import asyncio
import json
import os
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client


async def main():
    server = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:], env=dict(os.environ))
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            tool, arguments = json.loads(line)
            answer = await session.call_tool(tool, arguments)
            structured = getattr(answer, "structuredContent", None) or getattr(answer, "structured_content", None)
            print(json.dumps(structured), flush=True)


asyncio.run(main())
