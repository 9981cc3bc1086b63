"""How does a message get from one machine to another? By PostgreSQL's LISTEN and NOTIFY.

A topic is a channel, named by a digest. One connection listens and notifies; it does not belong to the store's pool,
because a session that listens may not be shared. A payload holds 8,000 bytes at most, so a long message travels in
parts, all in one transaction and therefore together and in order. A lost connection is made again and listens again;
messages in between are lost. It must reach the server itself: a pooler that shares sessions loses the LISTEN.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Protocol

import asyncpg  # type: ignore[import-untyped]

from segue.aio import in_background
from segue.cluster.local import TopicListeners
from segue.errors import Unavailable
from segue.seams.bus import Hear

log = logging.getLogger(__name__)

# What is left of 8,000 bytes beside the name and the position of a part; before base64.
PART_BYTES = 5_700
# Incomplete messages that are kept: parts arrive together, so more than a few incomplete ones have lost a part.
PARTIAL_MAX = 64
CONNECT_S = 5.0
STATEMENT_S = 10.0
PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 2.0

# One transaction. PostgreSQL drops equal payloads; the name and the position make each part unique.
NOTIFY = "SELECT pg_notify($1, part) FROM unnest($2::text[]) WITH ORDINALITY AS t (part, place) ORDER BY place"

# A session whose machine has vanished must not hold up the server's queue of notifications.
SESSION = {
    "application_name": "segue bus",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20s",
}

FOREIGN = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)


class _Session(Protocol):
    """What we use of an asyncpg connection."""

    async def execute(self, query: str, *values: object) -> str: ...

    async def add_listener(self, channel: str, call: Callable[..., None]) -> None: ...

    async def remove_listener(self, channel: str, call: Callable[..., None]) -> None: ...

    def add_termination_listener(self, call: Callable[..., None]) -> None: ...

    def is_closed(self) -> bool: ...

    def terminate(self) -> None: ...


def channel_of(topic: str) -> str:
    """The channel of a topic: names of channels have at most 63 bytes."""
    return "segue_" + blake2b(topic.encode(), digest_size=16).hexdigest()


def cut(body: bytes) -> list[str]:
    """A message as payloads: its name, the position of the part, the number of parts, and the part."""
    name = secrets.token_hex(6)
    count = max(1, -(-len(body) // PART_BYTES))
    parts = (body[at * PART_BYTES : (at + 1) * PART_BYTES] for at in range(count))
    return [
        f"{name}.{at}.{count}.{base64.b64encode(part).decode()}" for at, part in enumerate(parts)
    ]


class PartJoiner:
    """Puts the parts of messages together."""

    def __init__(self) -> None:
        self._partial: OrderedDict[str, list[bytes]] = OrderedDict()

    def join(self, payload: str) -> bytes | None:
        """The message, if this was its last part; None before, and for a payload of another program."""
        try:
            name, position, count, part = payload.split(".")
            data = base64.b64decode(part, validate=True)
            is_last = int(position) + 1 == int(count)
        except ValueError:
            return None
        parts = self._partial.setdefault(name, [])
        parts.append(data)
        if not is_last:
            while len(self._partial) > PARTIAL_MAX:
                self._partial.popitem(last=False)
            return None
        del self._partial[name]
        return b"".join(parts) if len(parts) == int(count) else None


class NotifyBus:
    """A bus over a database. Made by `open_notify_bus`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._listeners = TopicListeners()
        self._topics: dict[str, str] = {}
        self._joiner = PartJoiner()
        self._session: _Session | None = None
        # A session runs one statement at a time.
        self._lock = asyncio.Lock()
        self._is_lost = asyncio.Event()

    async def publish(self, topic: str, body: bytes) -> None:
        async with self._lock:
            session = self._session
            if session is None or session.is_closed():
                raise Unavailable("The other workers cannot be reached at the moment.")
            try:
                await session.execute(NOTIFY, channel_of(topic), cut(body))
            except FOREIGN as error:
                self._is_lost.set()
                raise Unavailable("The other workers cannot be reached at the moment.") from error

    @asynccontextmanager
    async def subscribe(self, topic: str, hear: Hear) -> AsyncIterator[None]:
        channel = channel_of(topic)
        is_first = self._listeners.add(topic, hear)
        try:
            if is_first:
                self._topics[channel] = topic
                await self._update(channel)
            yield
        finally:
            if self._listeners.remove(topic, hear):
                self._topics.pop(channel, None)
                await self._update(channel)

    async def _update(self, channel: str) -> None:
        """Listen to this channel if it has a topic, else no longer. Without a connection, the next one listens to all
        topics."""
        async with self._lock:
            if (session := self._session) is not None:
                is_wanted = channel in self._topics
                call = session.add_listener if is_wanted else session.remove_listener
                try:
                    await call(channel, self._receive)
                except FOREIGN:
                    self._is_lost.set()

    def _receive(self, _session: object, _pid: int, channel: str, payload: str) -> None:
        topic = self._topics.get(channel)
        body = self._joiner.join(payload)
        if topic is not None and body is not None:
            self._listeners.deliver(topic, body)

    async def connect(self) -> None:
        """Connect, and listen to all topics."""
        session: _Session = await asyncpg.connect(
            self._url,
            timeout=CONNECT_S,
            command_timeout=STATEMENT_S,
            server_settings=SESSION,
        )
        session.add_termination_listener(lambda _: self._is_lost.set())
        self._is_lost.clear()
        self._session = session
        for channel in tuple(self._topics):
            await self._update(channel)

    async def work(self) -> None:
        """Stay connected until cancelled."""
        pause_s = PAUSE_MIN_S
        while True:
            await self._is_lost.wait()
            self.disconnect()
            log.warning("the LISTEN connection to PostgreSQL was lost; connecting again")
            try:
                await self.connect()
                pause_s = PAUSE_MIN_S
            except FOREIGN:
                await asyncio.sleep(pause_s)
                pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    def disconnect(self) -> None:
        if self._session is not None:
            self._session.terminate()
            self._session = None


@asynccontextmanager
async def open_notify_bus(url: str) -> AsyncIterator[NotifyBus]:
    """A bus over the database at this address, connected."""
    bus = NotifyBus(url)
    try:
        await bus.connect()
    except FOREIGN as error:
        raise Unavailable("The store cannot be reached at the moment.") from error
    try:
        async with in_background("notify_connection", bus.work):
            yield bus
    finally:
        bus.disconnect()
