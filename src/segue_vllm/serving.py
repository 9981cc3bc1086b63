"""What does a client of the plugin get? Its questions on one connection, and the answers of all its streams.

In: messages of a client, and what the engine samples. Out: frames, one for all that a step of the engine brought. The
engine is behind an `EngineDoor`, the connection behind a `Socket`: nothing of vLLM is imported here. Whatever cannot be
gone on from is refused in one message, and whatever the engine core does not know is asked once more with all ids.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from segue_vllm.chains import Chains, Part, Unknown
from segue_vllm.frames import (
    PROTOCOL,
    Ask,
    End,
    Failed,
    Forget,
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
from segue_vllm.outputs import Heard, Request, is_asked_wrongly

log = logging.getLogger("vllm.segue")

# What a client may have unread: its answers end then. And how much of it one frame has.
UNREAD_MAX, FRAME_MAX = 100_000, 1_000
# So long it may take to say why the connection ends.
CLOSE_S = 5.0
# What is the request's fault; its words are said, as far as this.
WRONGLY_ASKED = (TypeError, LookupError, msgspec.MsgspecError)
WORDS_MAX = 1_000
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
        # Whether it has ended, or nobody waits for it: what is on its way from the engine is nobody's then.
        self.is_over = False
        self.count = 0

    def tokens(self, ids: Sequence[int], cached: int | None) -> None:
        if self.is_over:
            return
        self.count += len(ids)
        self.connection.chains.add(self.part, ids)  # type: ignore[arg-type]
        self.connection.say(Tokens(self.ask.stream, ids, cached))

    def end(self, reason: str, stop: int | str | None) -> None:
        if self.is_over:
            return
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
        if self.is_over:
            return
        self.connection.over(self)
        self.connection.say(Failed(self.ask.stream, status, words[:WORDS_MAX]))


class Connection:
    """One client with all its answers."""

    def __init__(self, server: SessionServer, socket: Socket) -> None:
        self._server, self._socket = server, socket
        self.chains = server.chains
        self.answers: dict[int, Answer] = {}
        self._unsaid: list[Said] = []
        self._has_something = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        # Code and words of our own close frame.
        self._leaving: tuple[int, str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the client leaves."""
        server = self._server
        await self._socket.accept()
        self.say(Hello(PROTOCOL, server.instance, server.step, server.engine.max_model_len))
        self.flush()
        self._writer = asyncio.create_task(self._write())
        try:
            while (message := await self._received(self._writer)) is not None:
                try:
                    asked = read_asked(message.get("bytes") or b"")
                    ids = ids_of(asked.ids) if isinstance(asked, Ask) else array("I")
                except (msgspec.MsgspecError, ValueError):
                    self._leaving = BAD_MESSAGE, "this message cannot be read"
                    break
                if isinstance(asked, Ask):
                    await self._begin(asked, ids)
                elif isinstance(asked, Forget):
                    self.chains.forget_owner(asked.owner)
                elif (answer := self.answers.get(asked.stream)) is not None:
                    await self._cancel(answer)
        finally:
            self._writer.cancel()
            for answer in list(self.answers.values()):
                await self._cancel(answer)
        if self._leaving is not None:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.close(*self._leaving)

    async def _received(self, writer: asyncio.Task[None]) -> Mapping[str, Any] | None:
        """The next message; None when the client has left, or nothing can be written to it."""
        receiving = asyncio.ensure_future(self._socket.receive())
        try:
            await asyncio.wait((receiving, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            receiving.cancel()
        if not receiving.done() or receiving.exception() is not None or writer.done():
            return None
        message = receiving.result()
        return None if message["type"] == "websocket.disconnect" else message

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
        except Exception as error:
            self.say(Failed(ask.stream, *_failure(error)))
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
        room = server.engine.max_model_len - part.length
        try:
            prompt = ids.tolist() if answer.is_by_key else part.flat().tolist()
            if room < 1:
                raise ValueError(
                    f"This model's maximum context length is {server.engine.max_model_len} tokens, but the prompt "
                    f"has {part.length}."
                )
            request = await server.engine.start(ask, prompt, room, kept, answer)
        except Exception as error:
            answer.failed(*_failure(error))
            self.flush()
            return
        answer.request = request
        if answer.is_over and not request.is_over:
            # It was cancelled meanwhile.
            await self._cancel(answer)
        self.flush()

    def again(self, answer: Answer) -> None:
        """The core does not know what it was to go on from: once more, with all ids."""
        self._server.counts["core_refused"] += 1
        answer.is_by_key = False
        task = asyncio.create_task(self._start_again(answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_again(self, answer: Answer) -> None:
        if not answer.is_over:
            await self._start(answer, None, array("I"))

    async def _cancel(self, answer: Answer) -> None:
        self.over(answer)
        if answer.request is not None:
            try:
                await self._server.engine.abort(answer.request)
            except Exception:
                log.exception("segue: a request could not be cancelled")

    def over(self, answer: Answer) -> None:
        """Nothing more comes of it."""
        if not answer.is_over:
            answer.is_over = True
            del self.answers[answer.ask.stream]
            self.chains.end(answer.part)

    # --- what is said --------------------------------------------------------------------------------

    def say(self, said: Said) -> None:
        """With the next frame."""
        if self._leaving is not None:
            return
        self._unsaid.append(said)
        self._server.spoke.add(self)
        if len(self._unsaid) > UNREAD_MAX:
            self._leaving = TOO_SLOW, "the answers were not read"
            self._unsaid.clear()
            if self._writer is not None:
                self._writer.cancel()

    def flush(self) -> None:
        """Send what there is as one frame, as soon as the client takes it."""
        self._has_something.set()

    async def _write(self) -> None:
        # Whatever the socket raises: the client has left.
        with suppress(Exception):
            while await self._has_something.wait():
                self._has_something.clear()
                said, self._unsaid = self._unsaid, []
                for begin in range(0, len(said), FRAME_MAX):
                    await self._socket.send_bytes(write_said(said[begin : begin + FRAME_MAX]))


def _failure(error: Exception) -> tuple[int, str]:
    """Status and words of a request that could not begin."""
    if isinstance(error, WRONGLY_ASKED) or is_asked_wrongly(error):
        return 400, str(error)[:WORDS_MAX]
    log.warning("segue: a request failed: %s: %s", type(error).__name__, error)
    return 500, "The engine failed."


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
