"""How does a message get from one worker to the other workers of the same machine?

    worker --- unix socket ---> hub (in the parent) --- to every connection that listens to the topic

A `Hub` does not read messages. It forwards them in the order in which they arrive, and disconnects a worker that does
not read. That worker connects and listens again; messages in between are lost to it. The socket lies in a folder that
only its owner may enter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Literal

import msgspec

from segue.aio import in_background
from segue.cluster.local import TopicListeners
from segue.errors import Unavailable
from segue.framing import CONNECTION_LOST, read_frame, write_frame
from segue.seams.bus import Hear

log = logging.getLogger(__name__)

# What may wait for a worker that does not read.
WAITING_BYTES_MAX = 64 * 1024 * 1024
# The hub is a local process: a slower answer means that it is broken.
ANSWER_S = 5.0
PAUSE_MIN_S = 0.05
PAUSE_MAX_S = 1.0


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A message between a worker and the hub."""

    verb: Literal["listen", "leave", "say", "done"]
    topic: str
    body: bytes = b""
    # Of a `listen`, which the hub answers with `done`.
    number: int = 0


_decode = msgspec.msgpack.Decoder(Frame).decode


class Hub:
    """Forwards messages between the workers of a machine."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[asyncio.StreamWriter]] = {}

    @asynccontextmanager
    async def opened(self, path: str) -> AsyncIterator[None]:
        """Accept connections at this path while inside."""
        server = await asyncio.start_unix_server(self._serve, path)
        try:
            yield
        finally:
            server.close()
            for writer in set().union(*self._listeners.values()):
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self._on_frame(_decode(await read_frame(reader)), writer)
        except (*CONNECTION_LOST, asyncio.CancelledError):
            # The connection's own task: a cancel means no more than its end.
            pass
        finally:
            for topic in tuple(self._listeners):
                self._remove(topic, writer)
            writer.close()

    def _on_frame(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        match frame.verb:
            case "listen":
                self._listeners.setdefault(frame.topic, set()).add(writer)
                write_frame(writer, Frame("done", frame.topic, number=frame.number))
            case "leave":
                self._remove(frame.topic, writer)
            case "say":
                for listener in tuple(self._listeners.get(frame.topic, ())):
                    self._forward(frame, listener)
            case "done":
                log.warning("a worker sent a 'done' frame to the hub; only the hub sends those")

    def _forward(self, frame: Frame, listener: asyncio.StreamWriter) -> None:
        if listener.transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            log.warning("a worker does not read from the hub and is disconnected")
            listener.transport.abort()
        else:
            write_frame(listener, frame)

    def _remove(self, topic: str, writer: asyncio.StreamWriter) -> None:
        listeners = self._listeners.get(topic, set())
        listeners.discard(writer)
        if not listeners:
            self._listeners.pop(topic, None)


class HubBus:
    """A worker's connection to the hub. Made by `open_hub_bus`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._listeners = TopicListeners()
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0
        self._unanswered: dict[int, asyncio.Future[None]] = {}
        self.connected = asyncio.Event()

    async def publish(self, topic: str, body: bytes) -> None:
        writer = self._writer
        if writer is None:
            raise Unavailable("The other workers cannot be reached at the moment.")
        write_frame(writer, Frame("say", topic, body))
        with suppress(OSError):
            await writer.drain()

    @asynccontextmanager
    async def subscribe(self, topic: str, hear: Hear) -> AsyncIterator[None]:
        is_first = self._listeners.add(topic, hear)
        try:
            if is_first:
                await self._listen(topic)
            yield
        finally:
            if self._listeners.remove(topic, hear) and self._writer is not None:
                write_frame(self._writer, Frame("leave", topic))

    async def _listen(self, topic: str) -> None:
        """Without a connection to the hub, the next one listens to all topics that are wanted by then."""
        if self._writer is None:
            return
        self._number += 1
        number = self._number
        done = self._unanswered[number] = asyncio.get_running_loop().create_future()
        write_frame(self._writer, Frame("listen", topic, number=number))
        with suppress(TimeoutError):
            await asyncio.wait_for(done, ANSWER_S)
        self._unanswered.pop(number, None)

    async def work(self) -> None:
        """Stay connected until cancelled."""
        pause_s = PAUSE_MIN_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, 2 * pause_s)
                continue
            pause_s = PAUSE_MIN_S
            await self._receive(reader, writer)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Deliver the messages of one connection until it is lost."""
        self._writer = writer
        self.connected.set()
        for topic in self._listeners.topics:
            write_frame(writer, Frame("listen", topic))
        try:
            while True:
                frame = _decode(await read_frame(reader))
                if frame.verb == "say":
                    self._listeners.deliver(frame.topic, frame.body)
                elif (done := self._unanswered.get(frame.number)) is not None and not done.done():
                    done.set_result(None)
        except CONNECTION_LOST:
            log.warning("the connection to the hub was lost; connecting again")
        finally:
            self._writer = None
            self.connected.clear()
            writer.close()


@asynccontextmanager
async def open_hub_bus(path: str) -> AsyncIterator[HubBus]:
    """A bus over the hub at this path, connected."""
    bus = HubBus(path)
    async with in_background("hub_connection", bus.work):
        async with asyncio.timeout(ANSWER_S):
            await bus.connected.wait()
        yield bus
