"""How do several workers share one embedded engine?

    worker: SharedEngine.sample(job) --- unix socket, one connection a job ---> engine's process: EmbeddedEngine
                    ids, ids, …, the finish or an error  <---

In: jobs. Out: the pieces of the engine in the other process, to the id. Closing the connection cancels the job, as
closing the generator does. A long answer waits in the socket if its reader is slow; the model itself is not slowed
down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct

from segue.engines.llamacpp import GRAMMARS
from segue.errors import ApiError, EngineFailed, InvalidRequest, Unavailable
from segue.framing import CONNECTION_LOST, read_frame, write_frame
from segue.seams.model import (
    Engine,
    EngineFacts,
    Finish,
    Grammar,
    Ids,
    Job,
    JobStarted,
    Piece,
    Sampling,
    Scene,
    TokenLogprob,
)
from segue.seams.prompt import Head, IdArray, Tokens, id_array

log = logging.getLogger(__name__)

# The engine's process is on this machine: it takes a connection at once, or is not running.
CONNECT_S = 5.0
READY_S = 2.0

KINDS: dict[str, type[ApiError]] = {
    kind.__name__: kind for kind in (InvalidRequest, Unavailable, EngineFailed)
}
NO_SCENE = Scene(Head(), None, ())


class _JobFrame(Struct, frozen=True):
    """A job on its way to the engine; without `ids`, the question whether the engine is ready."""

    ids: bytes | None = None
    sampling: Sampling = Sampling()
    stops: list[int] = []
    output_tokens_max: int | None = 0
    schema: bytes | Grammar | None = None
    owner: str = ""
    lane: str = ""


class _ErrorFrame(Struct, frozen=True):
    """One of our errors on its way back."""

    kind: str
    message: str
    code: str
    param: str | None = None
    wait_s: float | None = None


class _PieceFrame(Struct, frozen=True):
    """A piece of the answer: the start, ids, the finish, or an error."""

    started: JobStarted | None = None
    ids: bytes = b""
    logprobs: list[TokenLogprob | None] = []
    finish: Finish | None = None
    error: _ErrorFrame | None = None
    is_ready: bool = False


_decode_job = msgspec.msgpack.Decoder(_JobFrame).decode
_decode_piece = msgspec.msgpack.Decoder(_PieceFrame).decode


class SharedEngine:
    """An `Engine` in another process of this machine."""

    can_constrain = True
    grammars = GRAMMARS
    # Its models are in files that every process can read.
    facts = EngineFacts()

    def __init__(self, path: Path) -> None:
        self._path = path

    async def is_ready(self) -> bool:
        try:
            async with asyncio.timeout(READY_S), self._sent(_JobFrame()) as reader:
                return _decode_piece(await read_frame(reader)).is_ready
        except (*CONNECTION_LOST, TimeoutError, Unavailable):
            return False

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        assert isinstance(job.prompt, Tokens), "this engine takes tokens"
        frame = _JobFrame(
            ids=job.prompt.flat().tobytes(),
            sampling=job.sampling,
            stops=sorted(job.stops),
            output_tokens_max=job.output_tokens_max,
            schema=job.schema,
            owner=job.owner,
            lane=job.lane,
        )
        async with self._sent(frame) as reader:
            while True:
                try:
                    piece = _decode_piece(await read_frame(reader))
                except CONNECTION_LOST:
                    raise EngineFailed("The engine broke off.") from None
                if piece.started is not None:
                    yield piece.started
                if piece.ids:
                    yield Ids(_ids(piece.ids), piece.logprobs)
                if piece.error is not None:
                    raise _error(piece.error)
                if piece.finish is not None:
                    yield piece.finish
                    return

    @asynccontextmanager
    async def _sent(self, frame: _JobFrame) -> AsyncIterator[asyncio.StreamReader]:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(str(self._path))
        except (OSError, TimeoutError):
            raise Unavailable("The engine is not ready. Please retry later.") from None
        try:
            write_frame(writer, frame)
            yield reader
        finally:
            writer.transport.abort()


def _ids(data: bytes) -> IdArray[int]:
    ids = id_array()
    ids.frombytes(data)
    return ids


def _error(frame: _ErrorFrame) -> ApiError:
    kind = KINDS.get(frame.kind, EngineFailed)
    return kind(frame.message, code=frame.code, param=frame.param, wait_s=frame.wait_s)


def share_path(folder: str, name: str) -> Path:
    """The socket of the engine of this model, in the folder of a server."""
    return Path(folder) / f"engine-{blake2b(name.encode(), digest_size=8).hexdigest()}"


def note_context(path: Path, tokens: int | None) -> None:
    """Write beside the socket how long the context of its engine is: it follows what memory was free at the start."""
    path.with_suffix(".context").write_text(str(tokens or 0))


def noted_context(path: Path) -> int:
    """What was written there; 0 where no engine has begun yet."""
    note = path.with_suffix(".context")
    return int(note.read_text()) if note.exists() else 0


@asynccontextmanager
async def sharing(engine: Engine, path: Path) -> AsyncIterator[None]:
    """While inside, other processes can use this engine by way of the socket at `path`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _serve(engine, _decode_job(await read_frame(reader)), reader, writer)
        except (*CONNECTION_LOST, asyncio.CancelledError):
            # This task serves one connection: when it is cancelled, the connection is simply closed.
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield
    finally:
        server.close()


async def _serve(
    engine: Engine, frame: _JobFrame, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if frame.ids is None:
        write_frame(writer, _PieceFrame(is_ready=await engine.is_ready()))
        await writer.drain()
        return
    ids = _ids(frame.ids)
    job = Job(
        prompt=Tokens(None, ids, len(ids)),
        scene=NO_SCENE,
        sampling=frame.sampling,
        stops=frozenset(frame.stops),
        output_tokens_max=frame.output_tokens_max,
        schema=frame.schema,
        owner=frame.owner,
        lane=frame.lane,
    )
    # The worker sends nothing after its job: a read returns when it has closed the connection.
    answering = asyncio.create_task(_answer(engine, job, writer))
    closing = asyncio.create_task(reader.read(1))
    try:
        await asyncio.wait([answering, closing], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (answering, closing):
            task.cancel()
        await asyncio.gather(answering, closing, return_exceptions=True)


async def _answer(engine: Engine, job: Job, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        try:
            async with aclosing(engine.sample(job)) as pieces:
                async for piece in pieces:
                    write_frame(writer, _piece_frame(piece))
                    await writer.drain()
        except ApiError as error:
            write_frame(writer, _error_frame(error))
        except OSError:
            raise
        except Exception:
            log.exception("the shared engine failed")
            write_frame(writer, _error_frame(EngineFailed("The engine failed.")))
        await writer.drain()


def _piece_frame(piece: Piece) -> _PieceFrame:
    if isinstance(piece, Finish):
        return _PieceFrame(finish=piece)
    if isinstance(piece, JobStarted):
        return _PieceFrame(started=piece)
    assert isinstance(piece, Ids), "this engine gives ids"
    return _PieceFrame(ids=id_array(piece.ids).tobytes(), logprobs=list(piece.logprobs))


def _error_frame(error: ApiError) -> _PieceFrame:
    fields = type(error).__name__, error.message, error.code, error.param, error.wait_s
    return _PieceFrame(error=_ErrorFrame(*fields))
