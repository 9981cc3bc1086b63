"""How do bytes get from one machine to another? Lines with delays that keep their order, can be cut, and lose answers.

`Network.connect` and `Network.create_pool` take the place of asyncpg's: the real store and the real bus talk to the
`Database` through them. A line that is cut holds what was sent until it is mended, as TCP does; a line that is reset
loses it, and its end knows. A machine that vanishes says nothing to anybody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from segue.cluster.notify import NOTIFY
from segue.stores.postgres_database import QUERIES
from tests.simulator.clock import ProcessLoop, World
from tests.simulator.database import Call, Database, Session

NAMES = {sql: name for name, sql in QUERIES.items()} | {NOTIFY: "notify"}
assert len(NAMES) == len(QUERIES) + 1, "two statements are the same"

Deliver = Callable[[], None]


class Line:
    """One direction of a connection: what is put in comes out later, in order, unless the path is cut."""

    def __init__(self, network: Network, path: str) -> None:
        self._network = network
        self.path = path
        self._waiting: deque[tuple[float, Deliver]] = deque()
        self._free_at = 0.0
        self.is_closed = False
        network.lines.setdefault(path, []).append(self)

    def put(self, deliver: Deliver) -> None:
        world = self._network.world
        self._free_at = max(self._free_at, world.now + self._network.delay_s())
        self._waiting.append((self._free_at, deliver))
        world.at(self._free_at, self.flush)

    def flush(self) -> None:
        """Deliver what has arrived by now."""
        now = self._network.world.now
        while self._waiting and self._waiting[0][0] <= now:
            if self.path in self._network.cuts:
                return
            _, deliver = self._waiting.popleft()
            if not self.is_closed:
                deliver()

    def close(self) -> None:
        """What is still on its way is lost."""
        self.is_closed = True
        self._network.lines[self.path].remove(self)


class Network:
    """All lines, and what is wrong with them now."""

    def __init__(self, world: World, database: Database, delay_s: Callable[[], float]) -> None:
        self.world = world
        self.database = database
        self.delay_s = delay_s
        # Lines by path; a path is the name of a process and what it reaches: `A/store`, `A/bus`, `A/clients`.
        self.lines: dict[str, list[Line]] = {}
        self.cuts: set[str] = set()
        self.connections: list[Connection] = []
        # Whether the world has ended: then every call fails at once.
        self.is_over = False
        # Whether the next answer to a process that changes something is lost after its commit.
        self.loses_answer: Callable[[str, str], bool] = lambda client, name: False

    def cut(self, path: str) -> None:
        self.cuts.add(path)

    def mend(self, path: str) -> None:
        """The path is whole again: what was held arrives."""
        self.cuts.discard(path)
        for line in tuple(self.lines.get(path, ())):
            line.flush()

    def reset(self, process: str) -> None:
        """A process has died, and its kernel says so to everybody."""
        for connection in tuple(self.connections):
            if connection.client == process:
                connection.terminate()

    def end(self) -> None:
        """The world has ended."""
        self.is_over = True
        for connection in tuple(self.connections):
            connection._lose()

    def vanish(self, process: str) -> None:
        """A machine has lost its power: nobody hears of it."""
        for connection in tuple(self.connections):
            if connection.client == process:
                connection.drop()

    # --- in place of asyncpg's ---

    async def connect(
        self,
        dsn: str = "",
        *,
        timeout: float = 60.0,  # noqa: ASYNC109  # as asyncpg's
        command_timeout: float | None = None,
        server_settings: dict[str, str] | None = None,
        **_: object,
    ) -> Connection:
        if self.is_over:
            raise OSError("the world has ended")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        settings = server_settings or {}
        is_bus = settings.get("application_name", "").endswith("bus")
        path = f"{loop.name}/{'bus' if is_bus else 'store'}"
        connection = Connection(self, loop, path, command_timeout, settings)
        async with asyncio.timeout(timeout):
            try:
                await connection.open()
            except BaseException:
                connection.terminate()
                raise
        return connection

    def create_pool(
        self, dsn: str, *, max_size: int = 10, timeout: float = 60.0, **options: Any
    ) -> Pool:
        return Pool(self, max_size, timeout, options)


class Connection:
    """The part of asyncpg's connection that the code uses."""

    def __init__(
        self,
        network: Network,
        loop: ProcessLoop,
        path: str,
        command_timeout: float | None,
        settings: dict[str, str],
    ) -> None:
        self.client = loop.name
        self._network = network
        self._loop = loop
        self._command_timeout = command_timeout
        self._settings = settings
        self._up, self._down = Line(network, path), Line(network, path)
        self._session: Session | None = None
        self._calls: dict[Call, asyncio.Future[Any]] = {}
        self._listeners: dict[str, Callable[..., None]] = {}
        self._on_end: list[Callable[[Connection], None]] = []
        self._is_closed = False
        network.connections.append(self)

    async def open(self) -> None:
        """A round trip for the line, and one for the session."""
        opened = self._loop.create_future()
        self._up.put(lambda: self._down.put(lambda: self._up.put(lambda: self._enter(opened))))
        await opened

    def _enter(self, opened: asyncio.Future[None]) -> None:
        database = self._network.database
        self._session = database.open(self.client, self._settings, self._push)
        self._down.put(lambda: self._resolve(opened, None))

    # --- from the server ---

    def _resolve(self, future: asyncio.Future[Any], result: object) -> None:
        self._loop.call_soon(_settle, future, result)

    def _push(self, notice: tuple[str, str] | None) -> None:
        if notice is None:
            self._down.put(lambda: self._loop.call_soon(self._lose))
        else:
            channel, payload = notice
            self._down.put(lambda: self._loop.call_soon(self._hear, channel, payload))

    def _hear(self, channel: str, payload: str) -> None:
        if (hear := self._listeners.get(channel)) is not None:
            hear(self, 0, channel, payload)

    def drop(self) -> None:
        """The connection is gone, and nobody hears of it."""
        self._is_closed = True
        self._up.close()
        self._down.close()
        self._network.connections.remove(self)

    def _lose(self) -> None:
        """The connection is gone, and its owner hears of it."""
        if self._is_closed:
            return
        self.drop()
        for future in self._calls.values():
            _settle(future, asyncpg.ConnectionDoesNotExistError("connection was closed"))
        self._calls.clear()
        for call in self._on_end:
            call(self)

    # --- statements ---

    async def _ask(self, name: str, *values: Any) -> Any:
        if self._is_closed:
            raise asyncpg.InterfaceError("connection is closed")
        future: asyncio.Future[Any] = self._loop.create_future()
        call = Call(name, values, lambda result: self._answer(call, result))
        self._calls[call] = future
        self._up.put(lambda: self._arrive(call))
        timer = None
        if self._command_timeout is not None:
            timer = self._loop.call_later(self._command_timeout, _settle, future, TimeoutError())
        try:
            return await future
        finally:
            self._calls.pop(call, None)
            if timer is not None:
                timer.cancel()

    def _arrive(self, call: Call) -> None:
        assert self._session is not None
        self._network.database.take(self._session, call)

    def _answer(self, call: Call, result: object) -> None:
        is_lost = not isinstance(result, Exception) and self._network.loses_answer(
            self.client, call.name
        )
        if is_lost:
            assert self._session is not None
            self._network.database.close(self._session)
            self._down.put(lambda: self._loop.call_soon(self._lose))
        else:
            future = self._calls.get(call)
            if future is not None:
                self._down.put(lambda: self._resolve(future, result))

    async def fetch(self, query: str, *values: Any) -> Any:
        return await self._ask(_name(query), *values)

    async def fetchrow(self, query: str, *values: Any) -> Any:
        rows = await self.fetch(query, *values)
        return rows[0] if rows else None

    async def fetchval(self, query: str, *values: Any) -> Any:
        row = await self.fetchrow(query, *values)
        return None if row is None else row[0]

    async def execute(self, query: str, *values: Any) -> str:
        result = await self._ask(_name(query), *values)
        return result if isinstance(result, str) else f"SELECT {len(result)}"

    async def executemany(self, query: str, values: Sequence[Sequence[Any]]) -> None:
        async with self.transaction():
            for one in values:
                await self._ask(_name(query), *one)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        await self._ask("BEGIN")
        try:
            yield
        except BaseException:
            if not self._is_closed:
                await self._ask("ROLLBACK")
            raise
        await self._ask("COMMIT")

    async def add_listener(self, channel: str, call: Callable[..., None]) -> None:
        self._listeners[channel] = call
        await self._ask("LISTEN", channel)

    async def remove_listener(self, channel: str, call: Callable[..., None]) -> None:
        self._listeners.pop(channel, None)
        if not self._is_closed:
            await self._ask("UNLISTEN", channel)

    def add_termination_listener(self, call: Callable[[Connection], None]) -> None:
        self._on_end.append(call)

    def is_closed(self) -> bool:
        return self._is_closed

    def terminate(self) -> None:
        """Abort: the server hears of it, unless the line is cut just now."""
        if self._is_closed:
            return
        is_heard = self._up.path not in self._network.cuts
        self._lose()
        if is_heard and self._session is not None:
            session = self._session
            self._network.world.after(
                self._network.delay_s(), self._network.database.close, session
            )

    async def close(self) -> None:
        self.terminate()


def _settle(future: asyncio.Future[Any], result: object) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def _name(query: str) -> str:
    name = NAMES.get(query)
    assert name is not None, f"the model does not know this statement: {query[:200]}"
    return name


class Pool:
    """The part of asyncpg's pool that the code uses."""

    def __init__(
        self, network: Network, max_size: int, timeout: float, options: dict[str, Any]
    ) -> None:
        self._network = network
        self._timeout = timeout
        self._options = {
            name: options[name]
            for name in ("command_timeout", "server_settings")
            if name in options
        }
        self._idle: list[Connection] = []
        self._free = max_size
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __await__(self) -> Any:
        return _self(self).__await__()

    async def acquire(self, *, timeout: float | None = None) -> Connection:  # noqa: ASYNC109
        async with asyncio.timeout(timeout):
            while not self._idle and not self._free:
                room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append(room)
                try:
                    await room
                except BaseException:
                    if room.done() and not room.cancelled():
                        self._wake()
                    raise
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_closed():
                    return connection
                self._free += 1
            self._free -= 1
            try:
                return await self._network.connect(timeout=self._timeout, **self._options)
            except BaseException:
                self._free += 1
                self._wake()
                raise

    async def release(self, connection: Connection) -> None:
        if connection.is_closed():
            self._free += 1
        else:
            self._idle.append(connection)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            room = self._waiting.popleft()
            if not room.done():
                room.set_result(None)
                return

    async def close(self) -> None:
        self.terminate()

    def terminate(self) -> None:
        for connection in self._idle:
            connection.terminate()


async def _self(pool: Pool) -> Pool:
    return pool
