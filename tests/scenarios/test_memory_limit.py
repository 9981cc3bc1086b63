"""Does the limit of all memory hold? A server of its own is filled in each of the ways in which clients can make it
hold more, until it refuses; what it counts is compared with what the system counts.

What is admitted may still grow, and what the C library has freed is not given back at once: that is the margin.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import websockets

from tests.scenarios.test_connections import narrow_socket
from tests.support import MODEL, Answer, ServedProcess, Wire, fetch, metric, served_process, wire

MIB = 1024 * 1024
LIMIT_BYTES, STEP_BYTES = 48 * MIB, 2_000_000
# What the system counts more than before, at most, in limits and in what the server counts.
GROWN_MAX = 2.0
# The limit must be reached by so many steps.
STEPS_MAX = 1_000
PARTS = r'^segue_memory_bytes\{part="\w+"\} (\S+)$'
RESIDENT = "process_resident_memory_bytes"
FULL = "The server has reached its memory limit."
# While the limit is reached, only the oldest message is read on; others that wait for a lane are refused.
REFUSALS = (FULL, "Too many bytes of requests are waiting on this server. Please retry.")

CALLS = {"turns": [{"calls": [{"name": "f", "arguments": {}}]}]}
LONG = {"turns": [{"text": "x", "pad_tokens": 100_000}]}
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
SHORT = {"turns": [{"text": "Done."}]}
LANES = 16

# Until the server refuses, in steps of about so many bytes; what has to stay open is opened there.
Fill = Callable[[ServedProcess, AsyncExitStack, int], Awaitable[None]]


@contextmanager
def limited(
    tmp_path: Path, limit_bytes: int, script: object, flags: tuple[str, ...]
) -> Iterator[ServedProcess]:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(script))
    more = ("--store", "memory", "--grace-s", "0", "--memory-bytes-max", str(limit_bytes), *flags)
    with served_process("--script", str(path), *more, cwd=tmp_path) as served:
        yield served


def limit_of(served: ServedProcess) -> int:
    arguments = [str(word) for word in served.process.args]
    return int(arguments[arguments.index("--memory-bytes-max") + 1])


async def counted(served: ServedProcess) -> float:
    page = (await fetch(served, "GET", "/metrics")).body.decode()
    return sum(map(float, re.findall(PARTS, page, re.MULTILINE)))


async def until_stop(socket: Wire) -> dict[str, Any]:
    """The stop of a rollout for its tools, or the refusal."""
    while (event := await socket.next())["type"] not in ("response.done", "error"):
        pass
    return event


def form_of(data: bytes, name: bytes) -> tuple[bytes, dict[str, str]]:
    """The body of an upload, and its headers."""
    head = b"--xyz\r\nContent-Disposition: form-data; name="
    body = head + b'"purpose"\r\n\r\nuser_data\r\n'
    body += head + b'"file"; filename="%b"\r\n\r\n%b\r\n--xyz--\r\n' % (name, data)
    return body, {"Content-Type": "multipart/form-data; boundary=xyz"}


async def upload(served: ServedProcess, data: bytes, name: bytes) -> str:
    """The id of a file with these bytes."""
    return str((await fetch(served, "POST", "/v1/files", *form_of(data, name))).json["id"])


def picture(size: int) -> list[dict[str, Any]]:
    return [{"type": "input_image", "image_url": "data:image/png;base64," + "A" * size}]


async def fill_by_appends(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    socket = await open.enter_async_context(wire(served))
    await socket.create(input="x", tools=TOOLS, rollout=True, store=False)
    done = await until_stop(socket)
    for _ in range(STEPS_MAX):
        (call,) = done["required_input"]
        output = {"type": "function_call_output", "call_id": call["call_id"]}
        append = {"type": "response.append", "response_id": done["response_id"]}
        await socket.send({**append, "input": [{**output, "output": picture(size)}]})
        event = await until_stop(socket)
        if event["type"] == "error":
            assert (event["status"], event["error"]["message"]) == (503, FULL)
            return
        done = event
    pytest.fail("no append was refused")


async def fill_by_pictures(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    await fill_by_rollouts(served, open, [{"role": "user", "content": picture(size)}])


async def fill_by_short_messages(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    await fill_by_rollouts(served, open, [{"role": "user", "content": "a"}] * (size // 100))


async def fill_by_rollouts(served: ServedProcess, open: AsyncExitStack, given: object) -> None:
    """Each waits for its client, so that others can begin."""
    for number in range(STEPS_MAX):
        if number % LANES == 0:
            socket = await open.enter_async_context(wire(served))
        asked = {"input": given, "tools": TOOLS, "rollout": True, "store": False}
        await socket.create(stream_id=str(number % LANES), **asked)
        event = await until_stop(socket)
        if event["type"] == "error":
            assert event["error"]["message"] in REFUSALS
            return
    pytest.fail("no rollout was refused")


async def fill_by_histories(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Rollouts that are short themselves and stand on histories, which their connections may forget."""
    given = [{"role": "user", "content": picture(size)}]
    for _ in range(STEPS_MAX):
        socket = await open.enter_async_context(wire(served))
        parent: dict[str, Any] = {}
        for _ in range(4):
            event = await socket.turn(input=given, generate=False, store=False, **parent)
            if event["type"] == "error":
                assert event["error"]["message"] in REFUSALS
                return
            parent = {"previous_response_id": event["response"]["id"]}
        await socket.create(input="x", tools=TOOLS, rollout=True, store=False, **parent)
        event = await until_stop(socket)
        if event["type"] == "error":
            return
    pytest.fail("no turn was refused beside histories that are in use")


async def post(served: ServedProcess, **fields: Any) -> Answer:
    return await fetch(served, "POST", "/v1/responses", {"model": MODEL, **fields})


async def fill_by_queued_turns(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    given = [{"role": "user", "content": picture(size)}]
    for _ in range(STEPS_MAX):
        answer = await post(served, background=True, input=given)
        if answer.status != 200:
            assert (answer.status, answer.json["error"]["message"]) == (503, FULL)
            assert answer.headers["retry-after"]
            return
    pytest.fail("no response in the background was refused")


async def fill_by_unread_streams(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    words = "the " * (size // 40)
    asked = {"model": MODEL, "input": "x", "instructions": words, "stream": True}
    body = json.dumps(asked).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    loop = asyncio.get_running_loop()
    for _ in range(STEPS_MAX):
        reader = open.enter_context(narrow_socket(served.port))
        await loop.sock_sendall(reader, head % len(body) + body)
        if (await post(served, input="x", store=False, max_output_tokens=16)).status == 503:
            break
    else:
        pytest.fail("no turn was refused beside streams that nobody reads")
    # Those that were admitted go on until nothing more may wait for their clients.
    before = 0.0
    while (now := await metric(served, "segue_state_bytes")) != before:
        before = now
        for _ in range(20):
            await metric(served, "segue_unread_bytes")


# What caches keep gives way: so many limits are sent.
LIMITS_SENT = 3


async def fill_by_kept_turns(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Stored turns, each of which may be continued or fetched."""
    for _ in range(LIMITS_SENT * limit_of(served) // size):
        answer = await post(served, input=[{"role": "user", "content": picture(size)}])
        assert answer.status in (200, 503)


async def fill_by_fields(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Stored turns whose fields are long, not their input."""
    named = [{"type": "function", "name": f"f{number}"} for number in range(4_000)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": named}
    schema = {"type": "object", "description": "x" * size}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    about = {"user": "u" * 60_000, "prompt_cache_key": "k" * 60_000}
    for _ in range(LIMITS_SENT * limit_of(served) // size):
        answer = await post(served, input="x", tool_choice=choice, text=text, **about)
        assert answer.status in (200, 503), answer.body


async def fill_by_short_values(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Stored turns whose items have lists of short values."""
    commands = {"commands": ["ls"] * 20_000}
    for number in range(LIMITS_SENT * limit_of(served) // (4 * size)):
        given: list[dict[str, Any]] = []
        for call_id in (f"{number} {index}" for index in range(size // 500_000)):
            call = {"type": "shell_call", "call_id": call_id, "action": commands}
            output = {"type": "shell_call_output", "call_id": call_id, "output": []}
            marked = {"type": "output_text", "text": call_id, "annotations": [{}] * 20_000}
            given += [call, output, {"role": "assistant", "content": [marked]}]
        answer = await post(served, input=[*given, {"role": "user", "content": "x"}])
        assert answer.status in (200, 503), answer.body


async def fill_by_resent_texts(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Texts that are rendered, which the render cache and the reports keep."""
    for number in range(LIMITS_SENT * limit_of(served) // (4 * size)):
        words = f"{number} " + "word " * (size // 10)
        answer = await post(served, input=[{"role": "user", "content": words}], store=False)
        assert answer.status in (200, 503)


async def fill_by_threads(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Threads of the Messages API, which stay in memory."""
    for _ in range(LIMITS_SENT * limit_of(served) // size):
        image = {"type": "base64", "media_type": "image/png", "data": "A" * size}
        content = [{"type": "image", "source": image}, {"type": "text", "text": "x"}]
        asked = {
            "model": MODEL,
            "max_tokens": 16,
            "messages": [{"role": "user", "content": content}],
            "thread": {"type": "create"},
        }
        answer = await fetch(served, "POST", "/v1/messages", asked)
        assert answer.status in (200, 503, 529), answer.body


async def fill_by_chats(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Many short messages of Chat Completions, which are remembered by what they mean."""
    for number in range(LIMITS_SENT * limit_of(served) // (4 * size)):
        said = [{"role": "user", "content": f"{number} {index}"} for index in range(size // 200)]
        asked = {"model": MODEL, "max_tokens": 16, "messages": said}
        answer = await fetch(served, "POST", "/v1/chat/completions", asked)
        assert answer.status in (200, 503), answer.body


async def fill_by_half_bodies(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Requests whose last byte is missing: more than the limit, as far as they are read."""
    head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    for _ in range(min(200, 1 + 2 * limit_of(served) // size)):
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        open.callback(writer.close)
        writer.write(head % size + b" " * (size - 1))
    before = -1.0
    while (now := await metric(served, 'segue_memory_bytes{part="inbound"}')) != before:
        before = now


async def fill_by_half_uploads(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Files whose end does not come: as many as there may be of one owner, with a whole part of each, and as many more
    that are refused."""
    begin = (
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n"
        b"Content-Type: multipart/form-data; boundary=xyz\r\n\r\n"
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    for _ in range(min(256, 1 + 2 * limit_of(served) // MIB)):
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        open.callback(writer.close)
        writer.write(begin + b"x" * (MIB - 64 * 1024))
    before = -1.0
    while (now := await metric(served, 'segue_memory_bytes{part="files"}')) != before:
        before = now
        for _ in range(20):
            await metric(served, "segue_unread_bytes")


async def fill_by_unread_files(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """A file that many clients ask for and nobody reads."""
    file_id = await upload(served, b"x" * 8 * MIB, b"a")
    ask = f"GET /v1/files/{file_id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for _ in range(2 * limit_of(served) // MIB):
        reader = open.enter_context(narrow_socket(served.port))
        await asyncio.get_running_loop().sock_sendall(reader, ask.encode())
    before = -1.0
    while (now := await metric(served, "segue_unread_bytes")) != before:
        before = now
        for _ in range(20):
            await metric(served, "segue_connections")


# Requests at once that name files, and how often each names one.
NAMING, NAMED = 32, 3
# One request may name 48 MiB.
NAMED_BYTES_MAX = 16 * MIB


async def fill_by_named_files(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Small requests that name a large file, all at once."""
    data = bytes(min(limit_of(served) // 16, NAMED_BYTES_MAX))
    part = {"type": "input_file", "file_id": await upload(served, data, b"a.bin")}
    await name_at_once(served, part)


async def fill_by_named_pictures(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    data = bytes(min(limit_of(served) // 16, NAMED_BYTES_MAX))
    part = {"type": "input_image", "file_id": await upload(served, data, b"a.png")}
    await name_at_once(served, part)


async def name_at_once(served: ServedProcess, part: object) -> None:
    given = [{"role": "user", "content": [part] * NAMED}]
    asked = (post(served, input=given, store=index % 2 == 0) for index in range(NAMING))
    answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} <= {200, 503}, answers[0].body


async def fill_by_added_items(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Items of conversations, whose answers have them again and nobody reads."""
    items = [{"role": "user", "content": "word " * (size // 20)}] * 4
    body = json.dumps({"items": items}).encode()
    head = (
        "POST /v1/conversations/{}/items HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    name = (await fetch(served, "POST", "/v1/conversations", {})).json["id"]
    for _ in range(STEPS_MAX):
        reader = open.enter_context(narrow_socket(served.port))
        await loop.sock_sendall(reader, head.format(name, len(body)).encode() + body)
        begun = await loop.sock_recv(reader, 12)
        if begun != b"HTTP/1.1 200":
            assert begun == b"HTTP/1.1 503"
            return
    pytest.fail("no items were refused")


async def unread_gets(served: ServedProcess, open: AsyncExitStack, path: str, count: int) -> None:
    """So many clients ask for this at once, and read nothing."""
    ask = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    for _ in range(count):
        reader = open.enter_context(narrow_socket(served.port))
        await asyncio.get_running_loop().sock_sendall(reader, ask)
    before = -1.0
    while (now := await metric(served, RESIDENT)) != before:
        before = now
        for _ in range(20):
            await metric(served, "segue_unread_bytes")


async def fill_by_replays(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Many clients that follow a long answer again from its beginning, and read nothing."""
    made = (await post(served, input="x", background=True, stream=False)).json
    path = f"/v1/responses/{made['id']}"
    while (await fetch(served, "GET", path)).json["status"] in ("queued", "in_progress"):
        pass
    await unread_gets(served, open, f"{path}?stream=true", 100)


async def fill_by_repeats(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Many repeats of a request whose answer is long, which read nothing."""
    body = json.dumps({"model": MODEL, "input": "x", "stream": True}).encode()
    about = {"Idempotency-Key": "k"}
    assert (await fetch(served, "POST", "/v1/responses", body, about)).status == 200
    head = "POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: k\r\nContent-Length: {}\r\n\r\n"
    for _ in range(100):
        reader = open.enter_context(narrow_socket(served.port))
        asked = head.format(len(body)).encode() + body
        await asyncio.get_running_loop().sock_sendall(reader, asked)
    await unread_gets(served, open, "/health", 1)


async def fill_by_socket_repeats(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """The same over WebSockets that read nothing, on many lanes each."""
    async with wire(served) as socket:
        await socket.create(input="x", idempotency_key="k")
        async with asyncio.timeout(60):
            assert (await socket.events())[-1]["type"] == "response.completed"
    for _ in range(8):
        one = await websockets.connect(
            served.ws_url,
            sock=narrow_socket(served.port),
            max_queue=1,
            compression=None,
            ping_interval=None,
        )
        open.callback(one.transport.abort)
        for lane in range(15):
            await Wire(one).create(input="x", idempotency_key="k", stream_id=str(lane))
    await unread_gets(served, open, "/health", 1)


async def fill_by_input_items(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Many clients that list the large items of a response, and read nothing."""
    answer = await post(served, input=[{"role": "user", "content": picture(2 * size)}] * 3)
    assert answer.status == 200
    path = f"/v1/responses/{answer.json['id']}/input_items?limit=100"
    await unread_gets(served, open, path, 100)


async def fill_by_counted_files(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Requests that only ask how many tokens large files are, all at once."""
    data = bytes(min(limit_of(served) // 16, NAMED_BYTES_MAX))
    part = {"type": "input_file", "file_id": await upload(served, data, b"a.bin")}
    asked = {"model": MODEL, "input": [{"role": "user", "content": [part] * NAMED}]}
    path = "/v1/responses/input_tokens"
    answers = await asyncio.gather(*(fetch(served, "POST", path, asked) for _ in range(NAMING)))
    assert {answer.status for answer in answers} <= {200, 503}, answers[0].body


# Chains that are continued at once, and the turns of each.
CHAINS, CHAIN_TURNS = 16, 4


async def fill_by_cold_chains(served: ServedProcess, open: AsyncExitStack, size: int) -> None:
    """Stored chains that are in no cache any more, all continued at the same moment, each twice."""
    given = [{"role": "user", "content": picture(limit_of(served) // 64)}]
    await continue_cold(served, given)


async def fill_by_cold_short_messages(
    served: ServedProcess, open: AsyncExitStack, size: int
) -> None:
    await continue_cold(served, [{"role": "user", "content": "a"}] * (limit_of(served) // 30_000))


async def continue_cold(served: ServedProcess, given: object) -> None:
    tips = []
    for _ in range(CHAINS):
        parent: dict[str, Any] = {}
        for _ in range(CHAIN_TURNS):
            answer = await post(served, input=given, **parent)
            assert answer.status == 200, answer.body
            parent = {"previous_response_id": answer.json["id"]}
        tips.append(parent)
    asked = (post(served, input="x", **parent) for parent in [*tips, *tips])
    answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} <= {200, 503}, answers[0].body


FILLS: dict[str, tuple[Fill, object, tuple[str, ...]]] = {
    "appends": (fill_by_appends, CALLS, ()),
    "pictures": (fill_by_pictures, CALLS, ()),
    "histories": (fill_by_histories, CALLS, ()),
    "short messages": (fill_by_short_messages, CALLS, ()),
    "queued turns": (fill_by_queued_turns, CALLS, ("--tps", "0.001")),
    "unread streams": (fill_by_unread_streams, LONG, ("--write-s-max", "300")),
    "kept turns": (fill_by_kept_turns, SHORT, ()),
    "fields": (fill_by_fields, SHORT, ()),
    "short values": (fill_by_short_values, SHORT, ()),
    "resent texts": (fill_by_resent_texts, SHORT, ()),
    "threads": (fill_by_threads, SHORT, ()),
    "chats": (fill_by_chats, SHORT, ()),
    "half bodies": (fill_by_half_bodies, SHORT, ()),
    "half uploads": (fill_by_half_uploads, SHORT, ()),
    "unread files": (fill_by_unread_files, SHORT, ("--write-s-max", "300")),
    "named files": (fill_by_named_files, SHORT, ()),
    "added items": (fill_by_added_items, SHORT, ("--write-s-max", "300")),
    "replays": (fill_by_replays, LONG, ("--store", "sqlite:///s.db", "--write-s-max", "300")),
    "repeats": (fill_by_repeats, LONG, ("--store", "sqlite:///s.db", "--write-s-max", "300")),
    "socket repeats": (
        fill_by_socket_repeats,
        LONG,
        ("--store", "sqlite:///s.db", "--write-s-max", "300"),
    ),
    "input items": (
        fill_by_input_items,
        SHORT,
        ("--store", "sqlite:///s.db", "--write-s-max", "300"),
    ),
    "counted files": (fill_by_counted_files, SHORT, ()),
    "named pictures": (fill_by_named_pictures, SHORT, ()),
    "cold chains": (fill_by_cold_chains, SHORT, ("--store", "sqlite:///s.db")),
    "cold messages": (fill_by_cold_short_messages, SHORT, ("--store", "sqlite:///s.db")),
}
# What is read of a body or a file is a small part of the limit; the rest of what has grown is the program's own.
BARELY_COUNTED = {
    "half bodies",
    "half uploads",
    "unread files",
    "named files",
    "named pictures",
    "counted files",
    "replays",
    "repeats",
    "socket repeats",
    "input items",
}
# The cheapest of those that only fill caches.
LONG_FILLS = (
    "resent texts",
    "chats",
    "threads",
    "cold chains",
    "replays",
    "repeats",
    "socket repeats",
)
SHORT_FILLS = [way for way in FILLS if way not in LONG_FILLS]


class Filled(NamedTuple):
    """What the system counts more than before at the peak and at the end, and what the server counts."""

    peak: float
    grown: float
    held: float


async def filled(tmp_path: Path, way: str, limit_bytes: int, step_bytes: int) -> Filled:
    """Fill a server that may hold this much."""
    fill, script, flags = FILLS[way]
    async with AsyncExitStack() as open:
        served = open.enter_context(limited(tmp_path, limit_bytes, script, flags))
        before = await metric(served, RESIDENT)
        if not before:
            pytest.skip("the system does not say how much memory a process has")
        await fill(served, open, step_bytes)
        grown, held = await metric(served, RESIDENT) - before, await counted(served)
        peak = peak_bytes(served.process.pid) - before
        return Filled(peak, grown, held)


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had, where the system says that."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


async def check_limit(tmp_path: Path, way: str, limit_bytes: int, step_bytes: int) -> None:
    """A server that may hold this much holds not much more, and no more than it knows of."""
    peak, grown, held = await filled(tmp_path, way, limit_bytes, step_bytes)
    figures = f"{way}: {peak / MIB:.0f} MiB at the peak, {grown / MIB:.0f} grown, {held / MIB:.0f} MiB counted"
    print(figures)
    assert grown < GROWN_MAX * limit_bytes, figures
    if way not in BARELY_COUNTED:
        assert grown < GROWN_MAX * held, figures


@pytest.mark.parametrize("way", SHORT_FILLS)
async def test_server_holds_no_more_than_its_limit(tmp_path: Path, way: str) -> None:
    await check_limit(tmp_path, way, LIMIT_BYTES, STEP_BYTES)


async def test_small_requests_that_name_large_files_hold_no_more_than_the_limit(
    tmp_path: Path,
) -> None:
    size, limit = 4_000_000, 48 * MIB
    with limited(tmp_path, limit, SHORT, ()) as served:
        name = await upload(served, bytes(size), b"a.bin")
        before = await metric(served, RESIDENT)
        if not before:
            pytest.skip("the system does not say how much memory a process has")
        given = [{"role": "user", "content": [{"type": "input_file", "file_id": name}] * 3}]
        asked = (post(served, input=given, store=False) for _ in range(24))
        statuses = {answer.status for answer in await asyncio.gather(*asked)}
        assert statuses <= {200, 503}
        assert peak_bytes(served.process.pid) - before < 1.5 * limit


async def test_files_that_requests_name_one_after_the_other_count_where_they_are_remembered(
    tmp_path: Path,
) -> None:
    size, limit = 3_000_000, 48 * MIB
    with limited(tmp_path, limit, SHORT, ()) as served:
        name = await upload(served, bytes(size), b"a.bin")
        before = await metric(served, RESIDENT)
        if not before:
            pytest.skip("the system does not say how much memory a process has")
        for number in range(12):
            words = {"type": "input_text", "text": str(number)}
            content = [words, *[{"type": "input_file", "file_id": name}] * 3]
            answer = await post(served, input=[{"role": "user", "content": content}], store=False)
            assert answer.status == 200
        assert peak_bytes(served.process.pid) - before < 1.5 * limit


async def test_client_that_adds_much_to_a_conversation_hears_that_it_is_saved(
    tmp_path: Path,
) -> None:
    flags = ("--store", f"sqlite:///{tmp_path}/s.db")
    with limited(tmp_path, LIMIT_BYTES, SHORT, flags) as served:
        name = (await fetch(served, "POST", "/v1/conversations", {})).json["id"]
        path = f"/v1/conversations/{name}/items"
        items = [{"role": "user", "content": "word " * 500_000}] * 3
        added = await fetch(served, "POST", path, {"items": items})
        assert (added.status, len(added.json["data"])) == (200, 3)


async def test_small_requests_that_continue_a_large_thread_hold_no_more_than_the_limit(
    tmp_path: Path,
) -> None:
    size, limit = 2_000_000, 48 * MIB
    flags = ("--tps", "4", "--context-tokens", "10000000")
    with limited(tmp_path, limit, SHORT, flags) as served:
        usual = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
        first = {**usual, "system": "word " * (size // 5), "thread": {"type": "create"}}
        name = (await fetch(served, "POST", "/v1/messages", first)).json["id"]
        before = await metric(served, RESIDENT)
        if not before:
            pytest.skip("the system does not say how much memory a process has")
        thread = {"type": "continue", "previous_message_id": name}
        asked = (
            fetch(served, "POST", "/v1/messages", {**usual, "thread": thread}) for _ in range(80)
        )
        statuses = {answer.status for answer in await asyncio.gather(*asked)}
        # Where memory is short the thread is dropped, and its client sends everything again.
        assert statuses <= {200, 404, 529}
        assert peak_bytes(served.process.pid) - before < GROWN_MAX * limit


async def test_conversation_that_is_larger_than_the_memory_is_read_in_pages_and_by_no_turn(
    tmp_path: Path,
) -> None:
    size, count = 500_000, 48
    with limited(tmp_path, LIMIT_BYTES, SHORT, ("--store", f"sqlite:///{tmp_path}/s.db")) as served:
        name = (await fetch(served, "POST", "/v1/conversations", {})).json["id"]
        path = f"/v1/conversations/{name}/items"
        before = await metric(served, RESIDENT)
        if not before:
            pytest.skip("the system does not say how much memory a process has")
        items = [{"role": "user", "content": "word " * (size // 5)}] * 4
        for _ in range(count // len(items)):
            assert (await fetch(served, "POST", path, {"items": items})).status == 200
        refused = (await post(served, input="x", conversation=name)).json["error"]
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", "conversation")
        pages: list[list[str]] = []
        has_more = True
        while has_more:
            after = f"&after={pages[-1][-1]}" if pages else ""
            page = (await fetch(served, "GET", f"{path}?limit=100&order=asc{after}")).json
            pages.append([one["id"] for one in page["data"]])
            has_more = page["has_more"]
        assert {*map(len, pages)} == {3}
        assert len({name for names in pages for name in names}) == count
        assert peak_bytes(served.process.pid) - before < LIMIT_BYTES
