"""Records what real clients send, for the tests that replay it: `tests/golden/wires`.

    python -m tests.clients.record [NAME…]

Each client is run against a real server with a scripted engine; a relay in between writes down its requests. Without
names all recordings are made again.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.clients.agents import run
from tests.clients.coders import CLAUDE, CODERS, Coder, started
from tests.clients.faulty import FaultyChat
from tests.clients.recordings import KEPT_HEADERS, marked, write_recording
from tests.clients.stage import scripted
from tests.clients.task import END, PROMPT, Turns, call, make_repository
from tests.support import served_process

BODY_BYTES_MAX = 1 << 26
STEPS = 12
SUBTASK = "Count the files of this folder."
COUNTED = "There are three files."


@dataclass
class Relay:
    """Passes requests on, and writes down those that ask a model."""

    backend: str
    # Texts that are our own; None where all are kept, because nothing is written to a file.
    ours: frozenset[str] | None
    script: Turns
    # Where the client works: another folder each time, and written down as this one.
    folder: str
    exchanges: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[bytes] = field(default_factory=list)
    port: int = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """One request, there and back."""
        data = await request.read()
        headers = {
            k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")
        }
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, self.backend + request.path_qs, data=data, headers=headers
            ) as answer,
        ):
            response = web.StreamResponse(status=answer.status)
            if "content-type" in answer.headers:
                response.headers["content-type"] = answer.headers["content-type"]
            await response.prepare(request)
            said = b""
            async for piece in answer.content.iter_any():
                said += piece
                await response.write(piece)
            if request.path in ("/v1/messages", "/v1/chat/completions"):
                if answer.status == 200:
                    self.note(request, data, said)
                else:
                    self.refusals.append(said)
        return response

    def note(self, request: web.Request, data: bytes, said: bytes) -> None:
        """Write an exchange down."""
        kept = {key: request.headers[key] for key in KEPT_HEADERS if key in request.headers}
        body = json.loads(self.moved(data))
        self.exchanges.append(
            {
                "path": request.path,
                "headers": kept,
                "body": body if self.ours is None else marked(body, self.ours),
                "turn": json.loads(self.moved(json.dumps(self.scripted(turn_of(said))).encode())),
            }
        )

    def moved(self, data: bytes) -> bytes:
        return data.replace(self.folder.encode(), b"/project")

    def scripted(self, said: dict[str, Any]) -> dict[str, Any]:
        """The entry of the script: a client may have asked not to be shown its thought."""
        shown = {key: value for key, value in said.items() if key != "reasoning"}
        for turn in self.script:
            if shown == {key: value for key, value in turn.items() if key != "reasoning"}:
                return turn
        return said


def turn_of(said: bytes) -> dict[str, Any]:
    """What the model has said, from the events or the object of either API."""
    text = said.decode()
    if text.startswith("{"):
        objects = [json.loads(text)]
    else:
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        objects = [json.loads(line) for line in lines]
    turn: dict[str, Any] = {"reasoning": "", "text": "", "calls": {}}
    for value in objects:
        if "choices" in value:
            for choice in value["choices"]:
                _add_chat(turn, choice["delta"] if "delta" in choice else choice["message"])
        elif value["type"] == "message":
            for index, block in enumerate(value["content"]):
                _add_block(turn, index, block)
        elif value["type"] == "content_block_start":
            _add_block(turn, value["index"], value["content_block"])
        elif value["type"] == "content_block_delta":
            _add_block(turn, value["index"], value["delta"])
    calls = [
        {"name": name, "arguments": json.loads(arguments or "{}")}
        for name, arguments in turn.pop("calls").values()
    ]
    return {key: text for key, text in turn.items() if text} | ({"calls": calls} if calls else {})


def _add_chat(turn: dict[str, Any], message: dict[str, Any]) -> None:
    turn["text"] += message.get("content") or ""
    turn["reasoning"] += message.get("reasoning_content") or ""
    for index, called in enumerate(message.get("tool_calls") or ()):
        row = turn["calls"].setdefault(called.get("index", index), ["", ""])
        row[0] += called["function"].get("name") or ""
        row[1] += called["function"].get("arguments") or ""


def _add_block(turn: dict[str, Any], index: int, block: dict[str, Any]) -> None:
    turn["text"] += block.get("text", "")
    turn["reasoning"] += block.get("thinking", "")
    if block["type"] == "tool_use":
        given = json.dumps(block["input"]) if block["input"] else ""
        turn["calls"][index] = [block["name"], given]
    elif block["type"] == "input_json_delta":
        turn["calls"][index][1] += block["partial_json"]


@asynccontextmanager
async def relayed(*given: Any) -> AsyncIterator[Relay]:
    """A relay in front of a server."""
    relay = Relay(*given)
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.router.add_route("*", "/{path:.*}", relay.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    relay.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    try:
        yield relay
    finally:
        await runner.cleanup()


# --- what is played ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """A client, and what the model does; `make` gets the folder in which the client works."""

    coder: Coder
    make: Callable[[Path], Turns]
    # Another conversation beside the first, which begins with these words.
    others: dict[str, Turns] = field(default_factory=dict)


def steps(name: str, **more: Any) -> Turns:
    """A loop of shell commands, with a thought before each."""
    commands = [f"echo step {number} && seq {number} {number + 40}" for number in range(STEPS)]
    return [
        {"reasoning": f"Step {number} is next.", **call(name, command=command, **more)}
        for number, command in enumerate(commands)
    ] + [{"text": END}]


def png(folder: Path, name: str, shade: int) -> str:
    """A small image in a folder."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = zlib.compress((b"\0" + bytes([shade, 0, 0]) * 16) * 16)
    head = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    path = folder / name
    path.write_bytes(image)
    return str(path)


def two_images(folder: Path) -> Turns:
    """Two images in parallel results, then the loop."""
    paths = [png(folder, f"{shade}.png", shade) for shade in (60, 200)]
    reads = [{"name": "Read", "arguments": {"file_path": path}} for path in paths]
    return [{"text": "I look at both.", "calls": reads}, *steps("Bash")[:3], {"text": END}]


def with_tool_search(folder: Path) -> Turns:
    """Two of the deferred tools are loaded in the middle of the loop."""
    search = call("ToolSearch", query="select:WebFetch,NotebookEdit", max_results=5)
    return [*steps("Bash")[:3], search, *steps("Bash")[3:8], {"text": END}]


def with_subagent(folder: Path) -> Turns:
    """A subagent works beside the loop."""
    task = call(
        "Agent",
        description="Count files",
        prompt=SUBTASK,
        subagent_type="Explore",
        run_in_background=False,
    )
    return [*steps("Bash")[:2], task, *steps("Bash")[2:4], {"text": END}]


def claude(**more: str) -> Coder:
    """Claude Code with more in its environment."""
    start = partial(started, "claude", CLAUDE, api="messages", more=more)
    return replace(CODERS["Claude Code"], start=start)


SUBAGENT = {SUBTASK: [call("Bash", command="ls | wc -l"), {"text": COUNTED}]}
SESSIONS = {
    "claude-code": Session(claude(), lambda folder: steps("Bash")),
    "claude-code-reminder": Session(
        claude(CLAUDE_CODE_TOTAL_TOKENS_REMINDER="fixed"), lambda folder: steps("Bash")
    ),
    "claude-code-tool-search": Session(claude(), with_tool_search),
    "claude-code-subagent": Session(claude(), with_subagent, SUBAGENT),
    "claude-code-images": Session(claude(), two_images),
    "opencode-messages": Session(
        CODERS["opencode, Messages"], lambda folder: steps("bash", description="the next step")
    ),
    "opencode-chat": Session(
        CODERS["opencode, Chat"], lambda folder: steps("bash", description="the next step")
    ),
    "pi-messages": Session(CODERS["pi, Messages"], lambda folder: steps("bash")),
    "pi-chat": Session(CODERS["pi, Chat"], lambda folder: steps("bash")),
    "qwen-code-chat": Session(
        CODERS["Qwen Code, Chat"], lambda folder: steps("run_shell_command", is_background=False)
    ),
    "continue-chat": Session(CODERS["Continue, Chat"], lambda folder: steps("Bash")),
    "langchain-chat": Session(
        CODERS["LangChain, Chat"], lambda folder: CODERS["LangChain, Chat"].turns()
    ),
    "langchain-messages": Session(
        CODERS["LangChain, Messages"], lambda folder: CODERS["LangChain, Messages"].turns()
    ),
    "pydantic-ai-chat": Session(
        CODERS["Pydantic AI, Chat"], lambda folder: CODERS["Pydantic AI, Chat"].turns()
    ),
}


async def record(name: str, session: Session) -> int:
    """Run a client and write down what it sent; the number of exchanges."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        repository = make_repository(folder / "repository")
        turns = session.make(repository)
        engine = FaultyChat(turns=turns, others=session.others)
        async with engine:
            flags = scripted(folder, turns)
            if session.others:
                flags = ["--engine", "chat", "--engine-url", engine.url]
            with served_process(
                "--store", "memory", "--model", "agent", *flags, cwd=folder
            ) as served:
                texts = [text for turn in turns for text in turn.values() if isinstance(text, str)]
                ours = frozenset([PROMPT, SUBTASK, COUNTED, *texts])
                async with relayed(served.url, ours, turns, str(repository)) as relay:
                    url = f"http://127.0.0.1:{relay.port}/v1"
                    command, environment = session.coder.start(url, repository, folder, "agent")
                    ran = await run(command, environment, cwd=repository, run_s_max=120)
                    assert (ran.code, relay.refusals) == (0, []), ran.said[-3000:]
                await asyncio.to_thread(served.stop)
    write_recording(name, session.coder.packages[0], relay.exchanges)
    return len(relay.exchanges)


if __name__ == "__main__":
    for name in sys.argv[1:] or SESSIONS:
        print(name, asyncio.run(record(name, SESSIONS[name])), flush=True)
