"""An MCP server on pipes that answers a call with too much, or with what is no message: its first word says which."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

FLOODS = {
    "line": b"x" * 100_000,
    "words": b"\x1b words\n" * 10_000,
    "blank": b"\n" * 10_000,
    "notes": b'{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}\n',
}
TOOL = {"name": "echo", "inputSchema": {"type": "object"}}


def answer(number: int, result: object) -> None:
    """A message of the protocol."""
    line = json.dumps({"jsonrpc": "2.0", "id": number, "result": result})
    os.write(1, line.encode() + b"\n")


def main(way: str) -> None:
    """Answer each request in turn."""
    for line in sys.stdin:
        asked = json.loads(line)
        match asked["method"]:
            case "initialize":
                version = {"protocolVersion": asked["params"]["protocolVersion"]}
                about = {"name": "flood", "version": "1"}
                answer(asked["id"], {**version, "capabilities": {"tools": {}}, "serverInfo": about})
            case "tools/list":
                answer(asked["id"], {"tools": [TOOL]})
            case "tools/call" if way in FLOODS:
                with suppress(BrokenPipeError):
                    for _ in range(100_000):
                        os.write(1, FLOODS[way])
            case "tools/call":
                os.write(1, b"\xff no message\n\n[]\n" + b"long " * 6_000 + b"\n")
                answer(asked["id"], {"content": [{"type": "text", "text": "said"}]})


if __name__ == "__main__":
    main(sys.argv[1])
