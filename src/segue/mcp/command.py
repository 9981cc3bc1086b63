"""How does Segue speak with an MCP server that is a command of this machine? Over its pipes, a message a line.

In: what the session says. Out: the server's messages, within the limits that hold for answers over HTTP; a line that is
no message says nothing. The library's own transport reads lines of any length, copies what it has with each piece of
one, and writes each that it cannot read into the log. The server's stderr may have arguments of calls: it is not kept.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, cast

from segue.aio import cancel_all
from segue.mcp.bounded import (
    ANSWER_BYTES_MAX,
    CHUNKS_AT_ONCE,
    EVENTS_MAX,
    SMALL_BYTES,
    NoMessage,
    TooMuch,
    within_limits,
)

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams
    from mcp.shared.message import SessionMessage

# How long it has to end when its input has, and then when it is told to.
END_S_MAX = 2.0


@asynccontextmanager
async def piped(
    command: Sequence[str], environment: Mapping[str, str], note: Callable[[str], None]
) -> AsyncIterator[TransportStreams]:
    """Runs the command while inside; `note` is called with what is wrong with its output."""
    import anyio
    from mcp.client.stdio import get_default_environment

    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        env=get_default_environment() | dict(environment),
        limit=ANSWER_BYTES_MAX,
        # Ctrl-C is for the server, and what it has started ends with it.
        start_new_session=True,
    )
    heard, hears = anyio.create_memory_object_stream["SessionMessage | Exception"](0)
    says, said = anyio.create_memory_object_stream["SessionMessage"](0)
    pipes = _Pipes(process, note)
    tasks = [asyncio.create_task(pipes.listen(heard)), asyncio.create_task(pipes.speak(said))]
    # When its input or output is closed, the session is over.
    for task in tasks:
        task.add_done_callback(lambda _: heard.close())
    try:
        yield cast("TransportStreams", (hears, says))
    finally:
        # A session that is cancelled is cancelled again at each step.
        with anyio.CancelScope(shield=True):
            await cancel_all(tasks)
            for stream in (heard, hears, says, said):
                stream.close()
            await _end(process)


class _Pipes:
    """What goes in and out of a process."""

    def __init__(self, process: Process, note: Callable[[str], None]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._note = note
        # Since the session last said something.
        self._lines = 0

    async def speak(self, said: MemoryObjectReceiveStream[SessionMessage]) -> None:
        """Write what the session says."""
        with suppress(OSError):
            async for each in said:
                self._lines = 0
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                self._stdin.write(text.encode(errors="replace") + b"\n")
                await self._stdin.drain()

    async def listen(self, heard: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Read what the server says, to its end or the first thing that is too much."""
        from anyio import BrokenResourceError, ClosedResourceError

        try:
            while line := await self._stdout.readuntil():
                await self._count()
                if (message := await _message(line)) is not None:
                    await heard.send(message)
        except asyncio.LimitOverrunError:
            self._note(f"it sent a line of more than {ANSWER_BYTES_MAX:,} bytes")
        except TooMuch as error:
            self._note(str(error))
        except (asyncio.IncompleteReadError, OSError, BrokenResourceError, ClosedResourceError):
            pass

    async def _count(self) -> None:
        self._lines += 1
        if self._lines > EVENTS_MAX:
            raise TooMuch(f"it sent more than {EVENTS_MAX:,} lines at a time")
        if self._lines % CHUNKS_AT_ONCE == 0:
            await asyncio.sleep(0)


async def _message(line: bytes) -> SessionMessage | None:
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    try:
        if len(line) > SMALL_BYTES:
            line = await asyncio.to_thread(within_limits, line)
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except (ValueError, NoMessage):
        return None


async def _end(process: Process) -> None:
    """Let it end by itself; then tell it to, with all that it has started; then make it."""
    assert process.stdin is not None
    has_ended = False
    try:
        process.stdin.close()
        has_ended = await _has_ended(process)
        if not has_ended:
            _signal(process, signal.SIGTERM)
            has_ended = await _has_ended(process)
    finally:
        # Also after a cancel.
        if not has_ended:
            _signal(process, signal.SIGKILL)
            await _has_ended(process)


async def _has_ended(process: Process) -> bool:
    """Whether it ends in time, with all that holds its output."""
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S_MAX):
            # One that still writes does not see the end of its input.
            while await process.stdout.read(SMALL_BYTES):
                pass
            await process.wait()
            return True
    return False


def _signal(process: Process, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
