"""How do several workers share one engine inside?

    worker: SharedEngine.sample(job) --- unix socket, one connection a job ---> engine's process: EmbeddedEngine
                    ids, ids, …, the finish or an error  <---

In: jobs. Out: what the engine in the other process says, to the id. Closing a connection is the cancel, as closing the
generator is. A long answer waits in the socket where its reader is slow; the model itself is not slowed, as without us.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from segue.engines.grammars import LLGUIDANCE
from segue.errors import ApiError, EngineFailed, InvalidRequest, Unavailable
from segue.turn.seams import Engine
from segue.turn.values import (
    Finish,
    Grammar,
    Head,
    Ids,
    Job,
    JobStarted,
    Piece,
    Sampling,
    Scene,
    TokenLogprob,
    Tokens,
    id_array,
)

log = logging.getLogger(__name__)

# A prompt of sixteen million tokens.
FRAME_BYTES_MAX = 64 * 1024 * 1024
# The engine's process is on this machine: it takes a connection at once, or is not there.
CONNECT_S = 5.0
READY_S = 2.0

KINDS: dict[str, type[ApiError]] = {
    kind.__name__: kind for kind in (InvalidRequest, Unavailable, EngineFailed)
}
NO_SCENE = Scene(Head(), None, ())

_length = struct.Struct("<I")


class Asked(Struct, frozen=True):
    """A job on its way to the engine; without one, the question whether it would be taken."""

    ids: bytes | None = None
    sampling: Sampling = Sampling()
    stops: list[int] = []
    output_tokens_max: int = 0
    schema: bytes | Grammar | None = None
    owner: str = ""
    lane: str = ""


class Wrong(Struct, frozen=True):
    """An error of ours on its way back."""

    kind: str
    message: str
    code: str
    param: str | None = None
    wait_s: float | None = None


class Told(Struct, frozen=True):
    """What the engine says: where it begins, ids, or its last word."""

    begun: JobStarted | None = None
    ids: bytes = b""
    logprobs: list[TokenLogprob | None] = []
    finish: Finish | None = None
    error: Wrong | None = None
    is_ready: bool = False


_asked = msgspec.msgpack.Decoder(Asked).decode
_told = msgspec.msgpack.Decoder(Told).decode
LOST = (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError)


def _write(writer: asyncio.StreamWriter, value: Asked | Told) -> None:
    data = msgspec.msgpack.encode(value)
    writer.write(_length.pack(len(data)) + data)


async def _read(reader: asyncio.StreamReader) -> bytes:
    (size,) = _length.unpack(await reader.readexactly(_length.size))
    if size > FRAME_BYTES_MAX:
        raise ConnectionError("a message is too long")
    return await reader.readexactly(size)


class SharedEngine:
    """An `Engine` in another process of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def can_constrain(self) -> bool:
        """Yes: the engine inside can."""
        return True

    @property
    def grammars(self) -> frozenset[str]:
        """Those of the engine inside."""
        return LLGUIDANCE

    async def is_ready(self) -> bool:
        """Whether a job would be taken now."""
        try:
            async with asyncio.timeout(READY_S), self._asking(Asked()) as reader:
                return _told(await _read(reader)).is_ready
        except (*LOST, TimeoutError, Unavailable):
            return False

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The ids as they are sampled, then the finish."""
        assert isinstance(job.prompt, Tokens), "this engine takes tokens"
        asked = Asked(
            ids=job.prompt.flat().tobytes(),
            sampling=job.sampling,
            stops=sorted(job.stops),
            output_tokens_max=job.output_tokens_max,
            schema=job.schema,
            owner=job.owner,
            lane=job.lane,
        )
        async with self._asking(asked) as reader:
            while True:
                try:
                    told = _told(await _read(reader))
                except LOST:
                    raise EngineFailed("The engine broke off.") from None
                if told.begun is not None:
                    yield told.begun
                if told.ids:
                    ids = id_array()
                    ids.frombytes(told.ids)
                    yield Ids(ids, told.logprobs)
                if told.error is not None:
                    raise _raised(told.error)
                if told.finish is not None:
                    yield told.finish
                    return

    @asynccontextmanager
    async def _asking(self, asked: Asked) -> AsyncIterator[asyncio.StreamReader]:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(str(self._path))
        except (OSError, TimeoutError):
            raise Unavailable("The engine is not ready. Please retry later.") from None
        try:
            _write(writer, asked)
            yield reader
        finally:
            writer.transport.abort()


def _raised(wrong: Wrong) -> ApiError:
    kind = KINDS.get(wrong.kind, EngineFailed)
    return kind(wrong.message, code=wrong.code, param=wrong.param, wait_s=wrong.wait_s)


@asynccontextmanager
async def sharing(engine: Engine, path: Path) -> AsyncIterator[None]:
    """Let others ask this engine here while inside."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _serve(engine, _asked(await _read(reader)), reader, writer)
        except (*LOST, asyncio.CancelledError):
            # A connection's own task: whoever cancels it wants no more than its end.
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield
    finally:
        server.close()


async def _serve(
    engine: Engine, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if asked.ids is None:
        _write(writer, Told(is_ready=await engine.is_ready()))
        await writer.drain()
        return
    saying = asyncio.create_task(_say(engine, asked, writer))
    leaving = asyncio.create_task(reader.read(1))
    try:
        await asyncio.wait([saying, leaving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (saying, leaving):
            task.cancel()
        await asyncio.gather(saying, leaving, return_exceptions=True)


async def _say(engine: Engine, asked: Asked, writer: asyncio.StreamWriter) -> None:
    assert asked.ids is not None
    ids = id_array()
    ids.frombytes(asked.ids)
    job = Job(
        prompt=Tokens(None, ids, len(ids)),
        scene=NO_SCENE,
        sampling=asked.sampling,
        stops=frozenset(asked.stops),
        output_tokens_max=asked.output_tokens_max,
        schema=asked.schema,
        owner=asked.owner,
        lane=asked.lane,
    )
    with suppress(OSError):
        try:
            async with aclosing(engine.sample(job)) as pieces:
                async for piece in pieces:
                    _write(writer, _as_told(piece))
                    await writer.drain()
        except ApiError as error:
            _write(writer, Told(error=_as_wrong(error)))
        except OSError:
            raise
        except Exception:
            log.exception("the shared engine failed")
            _write(writer, Told(error=_as_wrong(EngineFailed("The engine failed."))))
        await writer.drain()


def _as_told(piece: Piece) -> Told:
    if isinstance(piece, Finish):
        return Told(finish=piece)
    if isinstance(piece, JobStarted):
        return Told(begun=piece)
    assert isinstance(piece, Ids), "this engine gives ids"
    return Told(ids=id_array(piece.ids).tobytes(), logprobs=list(piece.logprobs))


def _as_wrong(error: ApiError) -> Wrong:
    return Wrong(type(error).__name__, error.message, error.code, error.param, error.wait_s)
