"""Servers of engines that lie, dribble, burst and cut: real sockets on loopback, with bytes that a test has chosen.

`STREAMS` has a sound answer in each protocol; `mutated` is a strategy that spoils one; `RawServer` sends any bytes in
any pieces, heads included. `answer_from` asks such a server by way of everything that stands between it and a turn.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from hypothesis import strategies as st

from segue.dialects.messages import MessagesDialect
from segue.engines.chat import ChatEngine
from segue.engines.dynamo import DYNAMO
from segue.engines.llamacpp import LLAMACPP
from segue.engines.queued import QueuedEngine
from segue.engines.sglang import SGLANG
from segue.engines.token_engine import TokenEngine
from segue.engines.upstream import Timeouts, Upstream
from segue.engines.vllm import VLLM
from segue.errors import ApiError
from segue.seams.model import Deltas, Engine, Finish, Ids, Job, Sampling, Scene
from segue.seams.prompt import NO_MESSAGES, Head
from tests.engines.asking import STOP, WAIT_S, job, tokens

TIMEOUTS = Timeouts(connect_s=2, first_s=0.5, silence_s=0.3, probe_s=2)
LIMIT = 40


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _choice(**fields: object) -> dict[str, object]:
    return {"id": "r-1", "choices": [{"index": 0, **fields}]}


def _meta(count: int, **fields: object) -> dict[str, object]:
    return {
        "id": "r-1",
        "completion_tokens": count,
        "prompt_tokens": 3,
        "cached_tokens": 2,
        **fields,
    }


USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
CALL = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"a"'}}
DONE = b"data: [DONE]\n\n"

# A sound answer of each kind of server: 7, 8 and a stop, or some words and a call.
STREAMS: dict[str, bytes] = {
    "vllm": b"".join(
        [
            event(_choice(text="", token_ids=[7])),
            event(_choice(text="", token_ids=[8], logprobs=None)),
            event(_choice(text="", token_ids=[STOP], finish_reason="stop", stop_reason=STOP)),
            event({"id": "r-1", "choices": [], "usage": USAGE}),
            DONE,
        ]
    ),
    "dynamo": b"".join(
        [
            event({**_choice(text="so"), "nvext": {"completion_token_ids": [7, 8]}}),
            event(
                {
                    **_choice(text="", finish_reason="stop"),
                    "nvext": {"completion_token_ids": [STOP], "worker_id": {"decode_worker_id": 5}},
                }
            ),
            event({"id": "r-1", "choices": [], "usage": USAGE}),
            DONE,
        ]
    ),
    "sglang": b"".join(
        [
            event({"output_ids": [7], "meta_info": _meta(1)}),
            event({"output_ids": [7, 8], "meta_info": _meta(2)}),
            event(
                {"output_ids": [7, 8, STOP], "meta_info": _meta(3, finish_reason={"type": "stop"})}
            ),
            DONE,
        ]
    ),
    "llamacpp": b"".join(
        [
            event({"tokens": [99], "prompt_progress": {"cache": 2}}),
            event({"content": "a", "tokens": [7], "tokens_predicted": 1}),
            event({"content": "b", "tokens": [8], "tokens_predicted": 2}),
            event({"content": "", "tokens": [STOP], "tokens_predicted": 3}),
            event(
                {"stop": True, "stop_type": "eos", "tokens_evaluated": 3, "timings": {"cache_n": 2}}
            ),
        ]
    ),
    "chat": b"".join(
        [
            event(_choice(delta={"role": "assistant", "content": "<think>hm</think>"})),
            event(_choice(delta={"content": "A bee"}, logprobs=None)),
            event(_choice(delta={"tool_calls": [CALL]})),
            event(_choice(delta={"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]})),
            event(_choice(delta={}, finish_reason="tool_calls")),
            event({"id": "r-1", "choices": [], "usage": USAGE}),
            DONE,
        ]
    ),
}

# What no server should send, as a value somewhere in an event, as a whole event, or between events.
NUMBERS = [
    *("-1", "0", "NaN", "Infinity", "1e400", "1.5", "true", "null", '"7"', "[]", "{}"),
    *(str(2**31), str(2**53), str(2**63), "1" + "0" * 30, "9" * 5_000, "-" + "9" * 400),
]
EVENTS = [
    b"data: {}\n\n",
    b"data: null\n\n",
    b"data: []\n\n",
    b"data: " + b"[" * 3_000 + b"\n\n",
    b'data: {"choices":' * 3 + b"\n\n",
    b"data: \xff\xfe\n\n",
    b'data: {"choices":[{"delta":{"content":"\\ud800"}}]}\n\n',
    b'data: {"choices":[{"index":1,"token_ids":[666],"delta":{"content":"not ours"}}]}\n\n',
    b'data: {"id":"r-2","choices":[{"index":0,"token_ids":[666]}]}\n\n',
    b'data: {"meta_info":{"id":"r-2","completion_tokens":9},"output_ids":[666]}\n\n',
    b'data: {"choices":[{"index":0,"finish_reason":"content_filter","delta":{}}]}\n\n',
    b'data: {"error":{"message":"' + b"no " * 400 + b'","code":"\xc2\xb2"}}\n\n',
    b'data: {"error":{"code":429}}\n\n',
    b'data: {"error":{"code":400,"n_prompt_tokens":-1,"n_ctx":-5}}\n\n',
    b'error: {"code":1e99}\n\n',
    b"data: [DONE]\n\n",
    b": ping\n\n" * 50,
    b"\n" * 500,
    b" " * 5_000,
    b"event: x\r\nid: 1\r\n\r\n",
    b'data: {"choices":[{"index":0,"token_ids":[' + b"7," * 3_000 + b"7]}]}\n\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"' + b"w" * 40_000 + b'"}}]}\n\n',
]


@st.composite
def mutated(draw: st.DrawFn, sound: bytes) -> bytes:
    """An answer that was sound, and is spoilt in a few places."""
    raw = sound
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(raw)))
        match draw(st.sampled_from(["cut", "drop", "twice", "event", "number", "byte"])):
            case "cut":
                raw = raw[:at]
            case "drop":
                raw = raw[:at] + raw[at + draw(st.integers(1, 60)) :]
            case "twice":
                raw = raw[:at] + raw[max(0, at - 80) : at] + raw[at:]
            case "event":
                # Between two events, as a rule.
                end = raw.find(b"\n\n", at) + 2
                raw = raw[:end] + draw(st.sampled_from(EVENTS)) + raw[end:]
            case "number":
                numbers = [*re.finditer(rb"(?<=[:\[ ])\d+", raw)]
                if numbers:
                    found = numbers[at % len(numbers)]
                    value = draw(st.sampled_from(NUMBERS)).encode()
                    raw = raw[: found.start()] + value + raw[found.end() :]
            case _:
                raw = raw[:at] + draw(st.binary(min_size=1, max_size=3)) + raw[at + 1 :]
    return raw


def until_its_end(name: str) -> bytes:
    """The sound answer up to the event with which it is whole."""
    sound = STREAMS[name].removesuffix(DONE)
    end = sound.find(b'"finish_reason": "')
    return sound if end < 0 else sound[: sound.index(b"\n\n", end) + 2]


def chunk(data: bytes) -> bytes:
    """A part of a body that comes in chunks."""
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def whole_response(body: bytes, size: int) -> bytes:
    """A response with this body: chunked, or ended by its connection where `size` is 0."""
    if not size:
        return HEAD + b"\r\n" + body
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(map(chunk, parts))
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@dataclass
class RawServer:
    """Answers a job with these bytes in these pieces, then hangs up, or waits; other requests are not found."""

    pieces: Sequence[bytes]
    hangs_up: bool = True
    url: str = ""
    jobs: int = 0
    paths: frozenset[str] = field(
        default=frozenset({"/v1/completions", "/generate", "/completion", "/v1/chat/completions"})
    )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                size = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(size[1]) if size else 0)
                if path not in self.paths:
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}")
                    continue
                self.jobs += 1
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.hangs_up:
                    return
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def raw_server(pieces: Sequence[bytes], *, hangs_up: bool = True) -> AsyncIterator[RawServer]:
    """Such a server, listening."""
    raw = RawServer(pieces, hangs_up)
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    raw.url = f"http://127.0.0.1:{port}"
    try:
        yield raw
    finally:
        server.close()


def engine_for(name: str, upstream: Upstream) -> Engine:
    if name == "chat":
        return ChatEngine(upstream, "m", MessagesDialect())
    codecs = {"vllm": VLLM, "dynamo": DYNAMO, "sglang": SGLANG, "llamacpp": LLAMACPP}
    return TokenEngine(codecs[name], upstream, "m")


def job_for(name: str, limit: int | None = LIMIT) -> Job:
    if name != "chat":
        return job(tokens([1, 3, 4]), limit)
    prompt = NO_MESSAGES.plus(b'{"role":"user","content":"Go"}', tokens=3)
    return Job(prompt, Scene(Head(), None, ()), Sampling(), frozenset(), limit)


@dataclass
class Heard:
    """What came of a job."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    error: Exception | None = None


async def answer_from(
    name: str, raw: RawServer, wanted: Job, timeouts: Timeouts = TIMEOUTS
) -> Heard:
    """The answer of this server, by the way of every answer; anything but an `ApiError` is raised."""
    upstream = Upstream(raw.url, None, timeouts)
    queued = QueuedEngine("raw", engine_for(name, upstream), model="m")
    queued.down_s_max = 0.0
    heard = Heard()
    try:
        async with asyncio.timeout(WAIT_S), aclosing(queued.sample(wanted)) as pieces:
            async for piece in pieces:
                assert heard.finish is None, "nothing after the end"
                match piece:
                    case Ids(ids):
                        heard.ids += ids
                    case Deltas(deltas):
                        heard.text += "".join(
                            one.text + one.reasoning + one.call_arguments for one in deltas
                        )
                    case Finish():
                        heard.finish = piece
                    case _:
                        pass
    except ApiError as error:
        heard.error = error
    finally:
        await upstream.close()
    return heard
