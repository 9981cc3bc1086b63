"""How many jobs may this process have at a server of an engine, so that all processes together keep to its limit?

The store knows how many slots of a server each process holds, as it does for the places of API keys: a process draws
more when jobs wait, and gives back what it has not needed for a while, so that a turn seldom waits for that. What a
dead process held comes back with its lease. A process that gets less than it needs tells the others: they give back
at once what they do not use, and as their jobs end what is more than their fair part.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import ceil

import msgspec
from msgspec import Struct

from segue.aio import run_forever
from segue.engines.queued import QueuedEngine
from segue.errors import ApiError
from segue.limits import slots_draw
from segue.seams.access import SharedLimits
from segue.seams.bus import OtherProcesses

# How often a process looks again that is short, or whose slots are wanted by others.
LOOK_S = 0.05
# How long slots are kept that are not needed.
KEEP_S = 2.0
# What is held is reported again this often: a store that was restarted, or that could not be asked, may not know of it,
# and what a process held that was taken for dead was given to others.
REPEAT_S = 10.0
# How long a process counts as short after it has said so, and how often it says so.
SHORT_S, SAY_S = 1.0, 0.25


class Shortage(Struct, frozen=True, array_like=True):
    """A process needs more slots of a server than it holds."""

    replica: str
    held: int


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Shortage).decode


class SlotShare:
    """What this process holds of the slots of one server."""

    def __init__(self, name: str, server: QueuedEngine, shared: SharedSlots) -> None:
        """`name` is that of the model and of the server."""
        self.limit = 0
        self.held = 0
        # Whether the server takes jobs; the queue of one that does not lets everybody through, to go elsewhere.
        self.is_open = True
        self._name = name
        self._server = server
        self._queue = server.queue
        self._shared = shared
        # Processes that are short: until when, and whether they hold nothing.
        self._rivals: dict[str, tuple[float, bool]] = {}
        self._said_at = 0.0
        self._drawn_at = 0.0
        self._unneeded_since: float | None = None
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        """A job has to wait, the limit has changed, or others are short."""
        server = self._server
        if (server.slots, server.is_open) != (self.limit, self.is_open):
            self.limit, self.is_open = server.slots, server.is_open
            if self.is_open:
                self._queue.resize(min(self.held, self.limit))
        self._due.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(run_forever("engine_slots", self._settle))

    def note_short(self, worker: str, shortage: Shortage) -> None:
        """Another process is short."""
        if self.held:
            until = asyncio.get_running_loop().time() + SHORT_S
            self._rivals[worker] = (until, not shortage.held)
            self.look()

    def stop(self) -> None:
        """Another one takes its place."""
        if self._task is not None:
            self._task.cancel()

    async def give_back(self) -> None:
        """This process stops."""
        self.stop()
        with suppress(ApiError):
            await self._shared.draw(self._name, 0, self.limit)

    async def _settle(self) -> None:
        """Until nothing is held that may have to be given back."""
        while self.held or self._queue.waiting:
            self._due.clear()
            delay_s = await self._look_once()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), delay_s)

    async def _look_once(self) -> float:
        """Draw or give back; how long until it should be looked at again."""
        now = asyncio.get_running_loop().time()
        self._rivals = {name: rival for name, rival in self._rivals.items() if rival[0] > now}
        queue, part = self._queue, self._part()
        needed = min(queue.running + queue.waiting, self.limit) if self.is_open else queue.running
        wanted = max(queue.running, min(needed, part))
        if wanted > self.held:
            ahead = 0 if self._rivals else max(needed, self.limit // 16)
            await self._hold(min(part, needed + ahead))
        elif wanted < self.held and self._rivals:
            await self._hold(wanted)
        elif wanted < self.held and self._is_unneeded(now):
            await self._hold(max(wanted, self.held // 2))
        elif self.held and now >= self._drawn_at + REPEAT_S:
            await self._hold(self.held)
        else:
            self._resize()
        if self.held >= wanted:
            return LOOK_S if self._rivals else KEEP_S
        if now >= self._said_at + SAY_S:
            self._said_at = now
            await self._shared.say_short(Shortage(self._name, self.held))
        return LOOK_S

    def _part(self) -> int:
        """What this process may hold while others are short: one less than its part if one of them has nothing."""
        if not self._rivals:
            return self.limit
        is_one_without = any(has_none for _, has_none in self._rivals.values())
        return max(0, ceil(self.limit / (1 + len(self._rivals))) - is_one_without)

    def _is_unneeded(self, now: float) -> bool:
        """Whether more than needed was held for a while."""
        if self._unneeded_since is None:
            self._unneeded_since = now
        return now - self._unneeded_since >= KEEP_S

    async def _hold(self, slots: int) -> None:
        self.held = await self._shared.draw(self._name, slots, self.limit)
        self._drawn_at = asyncio.get_running_loop().time()
        self._unneeded_since = None
        self._resize()

    def _resize(self) -> None:
        if self.is_open:
            self._queue.resize(min(self.held, self._part()))


class SharedSlots:
    """The slots of all servers, as this process shares them with others."""

    def __init__(self, peers: OtherProcesses, shared_limits: SharedLimits) -> None:
        self._peers = peers
        self._limits = shared_limits
        self._shares: dict[str, SlotShare] = {}
        peers.on_message("slots", self._note_short)

    def share(self, model: str, server: QueuedEngine) -> SlotShare:
        """The part of this process in the slots of this server of a model, for its queue."""
        name = f"{model} {server.name}"
        known = self._shares.get(name)
        if known is not None:
            # The server was removed and has come back; what still runs there is counted no more.
            known.stop()
        share = self._shares[name] = SlotShare(name, server, self)
        server.queue.resize(0)
        server.on_demand = share.look
        share.look()
        return share

    async def give_back(self) -> None:
        """This process stops."""
        for share in self._shares.values():
            await share.give_back()

    async def draw(self, name: str, slots: int, limit: int) -> int:
        """What the store grants. While it cannot be asked, every process has an equal part."""
        try:
            grant = await self._limits.draw(slots_draw(name, slots, limit))
        except ApiError:
            return min(slots, max(1, limit // (1 + len(self._peers.others))))
        return grant.held.lanes

    async def say_short(self, shortage: Shortage) -> None:
        """Tell the others."""
        await self._peers.send("slots", _encode(shortage))

    async def _note_short(self, worker: str, body: bytes) -> None:
        shortage = _decode(body)
        if (share := self._shares.get(shortage.replica)) is not None:
            share.note_short(worker, shortage)
