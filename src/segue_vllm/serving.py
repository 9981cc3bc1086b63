"""What does a client of the plugin get? Its questions on one connection, and the answers of all its streams.

In: messages of a client, and what the engine samples. Out: frames, one for all that a step of the engine brought. The
engine is behind an `EngineDoor`, the connection behind a `Socket`: nothing of vLLM is imported here. Whatever cannot be
gone on from is refused in one message, and whatever the engine core does not know is asked once more with all ids.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from segue_vllm.chains import Chains, Part, Unknown
from segue_vllm.frames import (
    PROTOCOL,
    Ask,
    End,
    Failed,
    Hello,
    Refused,
    Said,
    Taken,
    Tokens,
    ids_of,
    read_asked,
    write_said,
)
from segue_vllm.kept import TAIL_IDS
from segue_vllm.outputs import Heard, Request

# What a client may have unread: its answers end then.
UNREAD_MAX = 100_000
# The WebSocket's code for a message that cannot be read, and for one that reads too slowly.
BAD_MESSAGE, TOO_SLOW = 1003, 1008


class Socket(Protocol):
    """A WebSocket, as Starlette has it."""

    async def accept(self) -> None: ...
    async def receive(self) -> Mapping[str, Any]: ...
    async def send_bytes(self, data: bytes) -> None: ...
    async def close(self, code: int = 1000, reason: str | None = None) -> None: ...


class EngineDoor(Protocol):
    """The engine, as a connection needs it."""

    max_model_len: int

    def adapter(self, model: str) -> Any:
        """The LoRA of this name; None for the model itself. Raises `LookupError`."""

    async def start(
        self, ask: Ask, ids: list[int], room: int, kept: dict[str, Any] | None, heard: Heard
    ) -> Request:
        """Sample after these ids as many as there is room for; `kept` is for the scheduler. Raises `ValueError`."""

    async def abort(self, request: Request) -> None:
        """Nobody listens any longer."""


class SessionServer:
    """What all connections of this process share."""

    def __init__(self, engine: EngineDoor, tokens_max: int) -> None:
        self.engine = engine
        self.instance = secrets.token_hex(8)
        self.chains = Chains(tokens_max)
        self.step = 1
        self.counts = dict.fromkeys(("turns", "whole", "core_refused"), 0)
        self.refused: dict[str, int] = {}
        # Connections with something to say.
        self.spoke: set[Connection] = set()

    def flush(self) -> None:
        """Send what a step has brought."""
        for connection in self.spoke:
            connection.flush()
        self.spoke.clear()


class Answer:
    """One answer on one connection."""

    def __init__(self, connection: Connection, ask: Ask, part: Part) -> None:
        self.connection, self.ask, self.part = connection, ask, part
        self.request: Request | None = None
        # Whether the core was asked to go on from what it keeps, which it may refuse.
        self.is_by_key = False
        self.count = 0

    def tokens(self, ids: Sequence[int], cached: int | None) -> None:
        self.count += len(ids)
        self.connection.chains.add(self.part, ids)  # type: ignore[arg-type]
        self.connection.say(Tokens(self.ask.stream, ids, cached))

    def end(self, reason: str, stop: int | str | None) -> None:
        if self.is_by_key and not self.count and reason == "error":
            self.connection.again(self)
            return
        self.connection.over(self)
        if reason in ("stop", "length"):
            stop_id = stop if isinstance(stop, int) else None
            self.connection.say(End(self.ask.stream, reason, stop_id))
        else:
            self.connection.say(Failed(self.ask.stream, 500, "The engine gave the request up."))

    def failed(self, status: int, words: str) -> None:
        self.connection.over(self)
        self.connection.say(Failed(self.ask.stream, status, words))


class Connection:
    """One client with all its answers."""

    def __init__(self, server: SessionServer, socket: Socket) -> None:
        self._server, self._socket = server, socket
        self.chains = server.chains
        self.answers: dict[int, Answer] = {}
        self._unsaid: list[Said] = []
        self._has_something = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the client leaves."""
        server = self._server
        await self._socket.accept()
        self.say(Hello(PROTOCOL, server.instance, server.step, server.engine.max_model_len))
        self.flush()
        writer = asyncio.create_task(self._write())
        try:
            while not writer.done():
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                try:
                    asked = read_asked(message.get("bytes") or b"")
                    ids = ids_of(asked.ids) if isinstance(asked, Ask) else array("I")
                except (msgspec.MsgspecError, ValueError):
                    await self._socket.close(BAD_MESSAGE, "this message cannot be read")
                    break
                if isinstance(asked, Ask):
                    await self._begin(asked, ids)
                elif (answer := self.answers.get(asked.stream)) is not None:
                    await self._cancel(answer)
        except (OSError, RuntimeError):
            pass
        finally:
            for answer in list(self.answers.values()):
                await self._cancel(answer)
            writer.cancel()

    # --- what is asked -------------------------------------------------------------------------------

    async def _begin(self, ask: Ask, ids: array[int]) -> None:
        server = self._server
        server.counts["turns"] += 1
        try:
            if ask.stream in self.answers:
                raise ValueError("the number of this answer is taken")
            scope = (ask.model, server.engine.adapter(ask.model), ask.salt)
            parent = self.chains.parent(ask.handle) if ask.handle else None
            part = self.chains.begin(ask.owner, scope, ask.handle, ask.length, ask.digest, ids)
        except Unknown as unknown:
            server.refused[unknown.why] = server.refused.get(unknown.why, 0) + 1
            self.say(Refused(ask.stream, unknown.why, str(unknown)))
            self.flush()
            return
        except (ValueError, LookupError) as error:
            self.say(Failed(ask.stream, 400, str(error)))
            self.flush()
            return
        answer = self.answers[ask.stream] = Answer(self, ask, part)
        self.say(Taken(ask.stream, part.handle))
        self.flush()
        await self._start(answer, parent, ids)

    async def _start(self, answer: Answer, parent: Part | None, ids: array[int]) -> None:
        """Into the engine: by what the core keeps, or else with all ids."""
        server, ask, part = self._server, answer.ask, answer.part
        kept: dict[str, Any] | None = None
        if server.step == 2:
            part.key = f"{server.instance}:{part.handle}"
            kept = {"keep": part.key}
            if parent is not None and parent.key is not None and part.begin and ids:
                tail = _tail(parent, part.begin)
                kept |= {"from": parent.key, "length": part.begin, "tail": tail}
                answer.is_by_key = True
        if not answer.is_by_key:
            server.counts["whole"] += 1
        prompt = ids.tolist() if answer.is_by_key else part.flat().tolist()
        room = server.engine.max_model_len - part.length
        try:
            if room < 1:
                raise ValueError(
                    f"This model's maximum context length is {server.engine.max_model_len} tokens, but the prompt "
                    f"has {part.length}."
                )
            request = await server.engine.start(ask, prompt, room, kept, answer)
        except (ValueError, TypeError, LookupError, msgspec.MsgspecError) as error:
            answer.failed(400, str(error))
            self.flush()
            return
        answer.request = request
        if self.answers.get(ask.stream) is not answer and not request.is_over:
            # It was cancelled meanwhile.
            await server.engine.abort(request)
        self.flush()

    def again(self, answer: Answer) -> None:
        """The core does not know what it was to go on from: once more, with all ids."""
        self._server.counts["core_refused"] += 1
        answer.is_by_key = False
        task = asyncio.create_task(self._start(answer, None, array("I")))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, answer: Answer) -> None:
        self.over(answer)
        if answer.request is not None:
            await self._server.engine.abort(answer.request)

    def over(self, answer: Answer) -> None:
        """Nothing more comes of it."""
        if self.answers.get(answer.ask.stream) is answer:
            del self.answers[answer.ask.stream]
            self.chains.end(answer.part)

    # --- what is said --------------------------------------------------------------------------------

    def say(self, said: Said) -> None:
        """With the next frame."""
        self._unsaid.append(said)
        self._server.spoke.add(self)

    def flush(self) -> None:
        """Send what there is as one frame, as soon as the client takes it."""
        self._has_something.set()

    async def _write(self) -> None:
        try:
            while True:
                await self._has_something.wait()
                self._has_something.clear()
                said, self._unsaid = self._unsaid, []
                if len(said) > UNREAD_MAX:
                    await self._socket.close(TOO_SLOW, "the answers were not read")
                    return
                if said:
                    await self._socket.send_bytes(write_said(said))
        except (OSError, RuntimeError):
            pass


def _tail(parent: Part, length: int) -> list[int]:
    """The last ids before `length`, which the core compares with its own."""
    tail: list[int] = []
    part: Part | None = parent
    end = length
    while part is not None and len(tail) < TAIL_IDS:
        if end > part.begin:
            first = max(0, end - part.begin - (TAIL_IDS - len(tail)))
            tail[:0] = part.ids[first : end - part.begin]
            end = part.begin + first
        if end > part.begin:
            break
        part = part.before
    return tail
