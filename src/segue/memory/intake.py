"""How many bytes may be on their way in, and who waits when there are too many?

Counted are half messages, bodies, and whole requests that wait in their lanes: for the process and for each key. Each
connection reads up to its *grant*, which doubles as long as there is room. Without room it is not read any further
until others have finished: nothing is dropped, and small messages go on. Two rules keep it moving:

- An equal share of one half of the limit is always granted, so that large messages cannot stop small ones.
- The oldest message may always go on, so that two halves never wait for each other. If it does not end, `body_s_max`
  ends it.

So all bytes together stay below the limit and one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Granted at once: about what one read from the network brings.
GRANT_BYTES_MIN = 64 * 1024


class _Pool:
    """A limit that several inflows share."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.granted = 0
        self.members = 0
        # Those with a message that is not complete, the oldest first.
        self.unfinished: dict[Inflow, None] = {}

    def has_room(self, inflow: Inflow, wanted: int) -> bool:
        """Whether this inflow may have so many bytes."""
        half = self.bytes_max / 2
        first = next(iter(self.unfinished), None)
        if first is inflow or wanted * self.members <= half:
            return True
        others = self.granted - inflow.grant - (0 if first is None else first.grant)
        return others + wanted <= half


class Intake:
    """All bytes that are on their way into this process."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.pool = _Pool(bytes_max)
        # One key may have half of the process's.
        self._key_bytes_max = bytes_max // 2
        self._by_key: dict[str, _Pool] = {}
        # Who waits for how many bytes, in the order in which they came, and how they are woken.
        self._waiting: dict[Inflow, tuple[int, Callable[[], None]]] = {}
        self._is_due = False

    @property
    def bytes(self) -> int:
        """How many there are now."""
        return self.pool.bytes

    @property
    def waiting(self) -> int:
        """How many connections are not read now."""
        return len(self._waiting)

    def set_closed(self, *, is_closed: bool) -> None:
        """While it is closed, only the oldest message is read on."""
        self.pool.bytes_max = 0 if is_closed else self._bytes_max
        self.wake_soon()

    def pool_of(self, key: str) -> _Pool:
        """The pool of a key, as long as it has members."""
        return self._by_key.setdefault(key, _Pool(self._key_bytes_max))

    def left(self, inflow: Inflow) -> None:
        """An inflow has nothing on its way any more."""
        self._waiting.pop(inflow, None)
        if not self._by_key[inflow.key].members:
            del self._by_key[inflow.key]

    def wait(self, inflow: Inflow, wanted: int, wake: Callable[[], None]) -> None:
        """Call `wake` once this inflow may have so many bytes."""
        assert inflow.arriving, (
            "only what is not complete becomes the oldest, and so comes to its turn"
        )
        self._waiting[inflow] = wanted, wake

    def wake_soon(self) -> None:
        """There may be room."""
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._is_due = False
        for inflow, (wanted, wake) in tuple(self._waiting.items()):
            if inflow.extend(wanted):
                del self._waiting[inflow]
                wake()


class Inflow:
    """What one connection, or one HTTP request, has sent that is not a turn yet."""

    __slots__ = ("_intake", "_pools", "arriving", "grant", "held", "key")

    def __init__(self, intake: Intake, key: str) -> None:
        self._intake = intake
        self.key = key
        # Those of the process and of the key; none while it has nothing.
        self._pools: tuple[_Pool, ...] = ()
        # Bytes of the message that is not complete, and of those that wait for their turn.
        self.arriving = 0
        self.held = 0
        self.grant = 0

    def count(self, arriving: int, held: int) -> None:
        """It has so many bytes now."""
        before, size = self.arriving + self.held, arriving + held
        self.arriving, self.held = arriving, held
        if not self._pools:
            if not size:
                return
            self._enter()
        for pool in self._pools:
            pool.bytes += size - before
            if arriving:
                pool.unfinished.setdefault(self)
            else:
                pool.unfinished.pop(self, None)
        if size > before:
            self._set_grant(max(self.grant, size))
            return
        self._set_grant(size)
        if not size:
            for pool in self._pools:
                pool.members -= 1
            self._pools = ()
            self._intake.left(self)
        self._intake.wake_soon()

    def _enter(self) -> None:
        self._pools = (self._intake.pool, self._intake.pool_of(self.key))
        for pool in self._pools:
            pool.members += 1

    def _set_grant(self, grant: int) -> None:
        for pool in self._pools:
            pool.granted += grant - self.grant
        self.grant = grant

    def extend(self, wanted: int) -> bool:
        """Grant it so many bytes, if there is room."""
        if wanted > self.grant:
            if not self._pools:
                self._enter()
            if not all(pool.has_room(self, wanted) for pool in self._pools):
                return False
            self._set_grant(wanted)
        return True

    def read_on(self, wake: Callable[[], None]) -> bool:
        """Whether the connection may be read on. If not, `wake` is called once it may."""
        size = self.arriving + self.held
        if size < self.grant or self.extend(wanted := max(2 * size, GRANT_BYTES_MIN)):
            return True
        self._intake.wait(self, wanted, wake)
        return False

    async def more(self) -> None:
        """Wait until the next part may be read."""
        size = self.arriving + self.held
        if size >= self.grant:
            await self.room(max(2 * size, GRANT_BYTES_MIN))

    async def room(self, wanted: int) -> None:
        """Wait until it may have so many bytes."""
        if self.extend(wanted):
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._intake.wait(self, wanted, lambda: None if woken.done() else woken.set_result(None))
        await woken
