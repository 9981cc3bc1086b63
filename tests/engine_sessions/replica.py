"""A replica with the plugin and without vLLM: its own serving, chains and kept turns, over an engine without a model.

What the engine samples depends on every id before it, and its blocks know which ids were computed into them: a wrong
prefix or a wrong block gives another answer, or fails here.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

import msgspec

from segue.engine_sessions.engine import ABOUT, SessionEngine
from segue.engine_sessions.frames import accepted
from segue.engine_sessions.link import SessionLink
from segue.engines.upstream import EventStream, Unavailable, Upstream
from segue.engines.vllm import VllmOffer
from segue_vllm.frames import Ask
from segue_vllm.kept import KeptTurns, Refusal
from segue_vllm.outputs import Heard, Request
from segue_vllm.serving import Connection, SessionServer
from tests.engines.asking import TIMEOUTS, played

MODEL = "m"
BLOCK = 4
STREAMS = "/v1/segue/session"
STOP = 2


def answer_to(ids: Sequence[int], limit: int) -> list[int]:
    """What this engine samples after these ids, as far as it may: each id depends on all before it."""
    found: list[int] = []
    for _ in range(limit):
        digest = blake2b(repr([*ids, *found]).encode(), digest_size=8).digest()
        number = int.from_bytes(digest)
        if found and number % 7 == 0:
            found.append(STOP)
            break
        found.append(10 + number % 500)
    return found


# --- the engine core -----------------------------------------------------------------------------------


class Block:
    """Room for the KV of a few ids, and whose KV it is."""

    def __init__(self) -> None:
        self.slots: list[int | None] = [None] * BLOCK
        self.hash: object = None


class FakeRequest:
    """As much of vLLM's `Request` as kept turns look at."""

    def __init__(self, request_id: str, ids: list[int], salt: str | None, lora: object) -> None:
        self.request_id = request_id
        self.prompt_token_ids = ids
        self._all_token_ids = list(ids)
        self.all_token_ids: Any = tuple(ids)
        self.num_prompt_tokens = len(ids)
        self.num_computed_tokens = 0
        self.block_hashes: list[object] = []
        self.cache_salt = salt
        self.lora_request = lora
        self.skip_reading_prefix_cache = False
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.extend(self.fresh(len(self.block_hashes)))

    def fresh(self, known: int = 0) -> list[object]:
        """The hashes after the first ones."""
        ids, found = self._all_token_ids, list(self.block_hashes[:known])
        for place in range(known, len(ids) // BLOCK):
            before = found[-1] if found else (self.cache_salt, self.lora_request)
            found.append(hash((before, tuple(ids[place * BLOCK : place * BLOCK + BLOCK]))))
        return found[known:]


class FakeCore:
    """A scheduler and a prefix cache: what `segue_vllm.scheduler` does with vLLM's."""

    def __init__(self, blocks: int, tokens_max: int) -> None:
        self._free = [Block() for _ in range(blocks)]
        self._cached: dict[object, Block] = {}
        self.kept = KeptTurns(tokens_max, BLOCK, self._give_back)
        self.computed = 0

    def _give_back(self, blocks: list[Block]) -> None:
        self._free.extend(reversed(blocks))

    def _new_block(self, but: str) -> Block:
        while not self._free:
            assert self.kept.let_go_oldest(but=but), "all room is in use"
        # The one that was freed first.
        block = self._free.pop(0)
        if block.hash is not None and self._cached.get(block.hash) is block:
            del self._cached[block.hash]
        block.hash, block.slots = None, [None] * BLOCK
        return block

    def arrive(self, request: FakeRequest, kept: dict[str, Any] | None) -> None:
        """It waits from now on."""
        if kept is not None and kept.get("from") is not None:
            self.kept.go_on(request, kept)

    def run(self, request: FakeRequest, kept: dict[str, Any] | None, limit: int) -> list[int]:
        """Schedule it, compute and sample, and keep what is left."""
        id = request.request_id
        assert request.block_hashes == request.fresh()
        assert list(request.prompt_token_ids) == request._all_token_ids
        claim = self.kept.claims.get(id)
        if claim is not None:
            assert claim.blocks is not None
            blocks, cached = claim.blocks, claim.cached_blocks
            self.kept.taken(claim, len(blocks))
        else:
            blocks, cached = self._found(request)
            request.num_computed_tokens = cached * BLOCK
        ids = request._all_token_ids
        sampled = answer_to(ids, limit)
        ids.extend(sampled)
        request.update_block_hashes()
        # The last one that was sampled is never computed.
        while len(blocks) * BLOCK < len(ids) - 1:
            blocks.append(self._new_block(id))
        for place in range(request.num_computed_tokens, len(ids) - 1):
            blocks[place // BLOCK].slots[place % BLOCK] = ids[place]
            self.computed += 1
        for place in range(len(ids) - 1):
            assert blocks[place // BLOCK].slots[place % BLOCK] == ids[place], "KV of another id"
        frontier = len(ids) - 1
        for place in range(cached, frontier // BLOCK):
            blocks[place].hash = request.block_hashes[place]
            self._cached[blocks[place].hash] = blocks[place]
        if kept is not None and kept.get("keep") is not None:
            self.kept.keep(kept["keep"], request, blocks, frontier // BLOCK, frontier)
        else:
            self._give_back(blocks)
            self.kept.drop(id)
        return sampled

    def _found(self, request: FakeRequest) -> tuple[list[Block], int]:
        """Copies of cached blocks, which a request may share with others."""
        blocks: list[Block] = []
        for hash in request.block_hashes[: (len(request._all_token_ids) - 1) // BLOCK]:
            cached = self._cached.get(hash)
            if cached is None:
                break
            slots = list(cached.slots)
            block = self._new_block(request.request_id)
            block.slots = slots
            blocks.append(block)
        return blocks, len(blocks)


class FakeDoor:
    """The engine, as the plugin's connections need it."""

    max_model_len = 100_000

    def __init__(self, core: FakeCore | None) -> None:
        self.core = core
        self.flush: Callable[[], None] = lambda: None
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.asked: list[list[int]] = []
        self.requests: list[Request] = []
        self.aborted: list[Request] = []
        self.has_aborted = asyncio.Event()
        # Answers wait for this, where a test needs them to.
        self.may_go = asyncio.Event()
        self.may_go.set()
        # Set when one of them waits.
        self.has_waiting = asyncio.Event()

    def adapter(self, model: str) -> Any:
        if model != MODEL:
            raise LookupError(f"The model `{model}` does not exist.")

    async def start(
        self, ask: Ask, ids: list[int], room: int, kept: dict[str, Any] | None, heard: Heard
    ) -> Request:
        self._count += 1
        request = Request(f"r{self._count}", heard)
        self.requests.append(request)
        fields = msgspec.json.decode(ask.sampling)
        limit = min(fields["max_tokens"], room, 40)
        request.task = asyncio.create_task(self._answer(request, ask, ids, kept, limit))
        self._tasks.add(request.task)
        request.task.add_done_callback(self._tasks.discard)
        return request

    async def _answer(
        self, request: Request, ask: Ask, ids: list[int], kept: dict[str, Any] | None, limit: int
    ) -> None:
        if not self.may_go.is_set():
            self.has_waiting.set()
        await self.may_go.wait()
        made = FakeRequest(request.id, list(ids), ask.salt, None)
        core = self.core
        if core is None:
            sampled = answer_to(ids, limit)
        else:
            try:
                core.arrive(made, kept)
                # Others come, are scheduled and end before it is.
                for _ in range(self._count % 4):
                    await asyncio.sleep(0)
            except Refusal:
                core.kept.drop(request.id)
                request.heard.end("error", None)
                self.flush()
                return
            except asyncio.CancelledError:
                core.kept.drop(request.id)
                raise
            sampled = core.run(made, kept, limit)
        self.asked.append(made._all_token_ids[: made.num_prompt_tokens])
        for place, id in enumerate(sampled):
            request.heard.tokens([id], 0 if not place else None)
            self.flush()
            await asyncio.sleep(0)
            await self.may_go.wait()
        request.is_over = True
        is_stop = sampled[-1] == STOP
        request.heard.end("stop" if is_stop else "length", STOP if is_stop else None)
        self.flush()

    async def abort(self, request: Request) -> None:
        self.aborted.append(request)
        self.has_aborted.set()
        request.is_over = True
        if request.task is not None:
            request.task.cancel()


# --- the wire ------------------------------------------------------------------------------------------


class Wire:
    """Both ends of a WebSocket: the plugin's, and the transport of a `Link`. Bytes to the client are cut anywhere."""

    def __init__(self, link: SessionLink, cuts: random.Random) -> None:
        self._link, self._cuts = link, cuts
        self._arrived: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.is_closed = self.is_paused = False
        # After so many it breaks, in whatever they are.
        self.bytes_left: int | None = None
        # Whether whatever is sent gets lost, as on the way to a machine that has lost its power.
        self.is_gone = False

    # The transport.

    def write(self, data: bytes) -> None:
        first, body = unmasked(data)
        if self.is_gone:
            return
        if first & 0x0F == 2:
            self._arrived.put_nowait({"type": "websocket.receive", "bytes": body})
        elif first & 0x0F == 9:
            self.send(server_frame(body, 0x8A))

    def abort(self) -> None:
        self.lose()

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    # The plugin's socket.

    async def accept(self) -> None:
        pass

    async def receive(self) -> Mapping[str, Any]:
        return await self._arrived.get()

    async def send_bytes(self, data: bytes) -> None:
        if self.is_closed:
            raise RuntimeError("closed")
        self.send(server_frame(data))

    def send(self, data: bytes) -> None:
        """To the client, in pieces."""
        if self.bytes_left is not None:
            data = data[: self.bytes_left]
            self.bytes_left -= len(data)
        while data:
            cut = self._cuts.randint(1, len(data))
            piece, data = data[:cut], data[cut:]
            self._link.data_received(piece)
        if self.bytes_left == 0:
            self.lose()

    async def close(self, code: int = 1000, reason: str | None = None) -> None:
        self.lose()

    def lose(self) -> None:
        """The connection breaks."""
        if not self.is_closed:
            self.is_closed = True
            self._arrived.put_nowait({"type": "websocket.disconnect"})
            self._link.connection_lost(None)


def unmasked(data: bytes) -> tuple[int, bytes]:
    """First byte and payload of one whole frame of a client."""
    size, begin = data[1] & 0x7F, 2
    if size >= 126:
        begin = 4 if size == 126 else 10
        size = int.from_bytes(data[2:begin])
    mask, body = data[begin : begin + 4], data[begin + 4 :]
    assert len(body) == size
    assert data[1] & 0x80
    keys = (mask * (size // 4 + 1))[:size]
    return data[0], (int.from_bytes(body) ^ int.from_bytes(keys)).to_bytes(size)


def server_frame(data: bytes, first: int = 0x82) -> bytes:
    """A frame of a server."""
    size = len(data)
    if size < 126:
        return bytes((first, size)) + data
    if size < 1 << 16:
        return bytes((first, 126)) + size.to_bytes(2) + data
    return bytes((first, 127)) + size.to_bytes(8) + data


class Replica(Upstream):
    """The server, as Segue reaches it: by the plugin, and by plain HTTP."""

    def __init__(
        self,
        name: str,
        *,
        step: int = 2,
        tokens_max: int = 20_000,
        blocks: int = 400,
        seed: int = 0,
    ) -> None:
        self.name = name
        self.timeouts = TIMEOUTS
        self._settings = (step, tokens_max, blocks)
        self._cuts = random.Random(seed)
        self.wires: list[Wire] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.has_plugin = self.is_up = True
        self.by_http = 0
        # What it says of its plugin.
        self.about: dict[str, object] = {
            "package": "segue-vllm",
            "version": "1",
            "protocol": 1,
            "step": 2,
            "path": STREAMS,
        }
        self.restart()

    def restart(self) -> None:
        """Everything is forgotten, and all connections break."""
        step, tokens_max, blocks = self._settings
        self.core = FakeCore(blocks, tokens_max) if step == 2 else None
        self.door = FakeDoor(self.core)
        self.server = SessionServer(self.door, tokens_max)
        self.server.step = step
        self.door.flush = self.server.flush
        self.lose()

    def lose(self) -> None:
        """All connections break."""
        wires, self.wires = getattr(self, "wires", []), []
        for wire in wires:
            wire.lose()

    def engine(self) -> SessionEngine:
        """Segue's side of it."""
        made = SessionEngine(self, MODEL)
        made._known = VllmOffer(has_generate=True, has_structured=True)
        made._has_facts = True
        return made

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        if not self.is_up:
            raise Unavailable("The engine does not answer. Please retry later.")
        if path != ABOUT or not self.has_plugin:
            return 404, b"{}"
        return 200, msgspec.json.encode(self.about)

    async def upgrade(self, path: str, key: str, make: Callable[[], Any]) -> Any:
        assert path == STREAMS
        link = make()
        wire = Wire(link, self._cuts)
        link.connection_made(cast(asyncio.Transport, wire))
        self.wires.append(wire)
        wire.send(upgraded(key))
        connection = Connection(self.server, wire)
        self._tasks.append(asyncio.create_task(connection.run()))
        return link

    async def stream(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> EventStream:
        if not self.is_up:
            raise Unavailable("The engine does not answer. Please retry later.")
        self.by_http += 1
        asked = msgspec.json.decode(body)
        limit = min(asked["sampling_params"]["max_tokens"], 40)
        sampled = answer_to(asked["token_ids"], limit)
        self.door.asked.append(asked["token_ids"])
        is_stop = sampled[-1] == STOP
        choice = {"token_ids": sampled, "finish_reason": "stop" if is_stop else "length"}
        events = [msgspec.json.encode({"choices": [choice]}), b"[DONE]"]
        return played([b"".join(b"data: %b\n\n" % event for event in events)])

    async def close(self) -> None:
        self.lose()
        for task in self._tasks:
            await asyncio.wait_for(task, 5)


def upgraded(key: str) -> bytes:
    """The response that opens a WebSocket."""
    found = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    head = (
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {base64.b64encode(found).decode()}\r\n\r\n"
    ).encode()
    assert accepted(head.partition(b"\r\n\r\n")[0], key)
    return head


async def gathered(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]
