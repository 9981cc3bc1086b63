"""How much may one key still use? Requests and tokens a minute, connections, turns at once, requests without a turn.

A bucket holds a minute's worth and fills up steadily, so that a burst is fine and a flood is not. The tokens of a turn
are known when it is over: then they leave the bucket, which may go into debt; a key in debt waits. Every refusal says
for how long.

The limits hold for all processes together. The store knows the level of each bucket and which process holds which
places. A process *draws* on it and uses its *grant* without asking again: a few requests ahead, and places for turns
and connections, which it keeps for a while after their use. So a turn waits for the store only where its process needs
a larger grant. Tokens are reported to the store within a second. Requests that start no turn are the exception: each
process counts those that come to it, because asking the store would cost more than they do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Literal

from segue.aio import in_background
from segue.errors import ApiError, TooMany
from segue.limits import CRUMB, MINUTE_S, Draw, Grant, HeldPlaces, KeyLimits, Rate, rate_of
from segue.seams.access import SharedLimits
from segue.seams.bus import OtherProcesses
from segue.seams.history import Owner

if TYPE_CHECKING:
    from segue.budgets.budget import BudgetSources, KeyBudget

log = logging.getLogger(__name__)

# For this long the other processes may not know what was used here.
REPORT_S = 1.0
# A refusal waits no longer than this for the other processes to give places back.
RECLAIM_S = 0.5
# How soon a turn or a connection of the same key may have ended.
CROWDED_S = 1.0
# How many times a minute's requests are drawn ahead: a twentieth of them, three seconds' worth.
AHEAD = 20
# Requests that were drawn ahead, and places, are given back when they were not used for this long.
UNUSED_S = 2.0
KEEP_S = 30.0
# After a refusal the store is not asked again for this long.
REFUSED_S = 0.25
# What is held is reported again this often, should the store have forgotten it.
REPEAT_S = 60.0

# More bytes than there are, for a key without this limit.
UNBOUNDED = 2**62

_Clock = Callable[[], float]
PlaceKind = Literal["connections", "lanes"]


class Bucket:
    """A minute's worth of something. Without a limit nothing is counted."""

    def __init__(self, per_min: int, clock: _Clock) -> None:
        self._per_min = per_min
        self._clock = clock
        self._level = float(per_min)
        self._filled_at = clock()

    @property
    def level(self) -> float:
        """How much is left; in debt if negative."""
        gained = (self._clock() - self._filled_at) * self._per_min / MINUTE_S
        return min(float(self._per_min), self._level + gained)

    @level.setter
    def level(self, level: float) -> None:
        self._level = level
        self._filled_at = self._clock()

    @property
    def wait_s(self) -> float:
        """Seconds until the bucket is out of debt; 0 if it is now."""
        return max(0.0, -self.level * MINUTE_S / self._per_min) if self._per_min else 0.0


class KeyQuota:
    """What one key uses of this process, within the limits of the key."""

    def __init__(
        self,
        limits: KeyLimits,
        key_id: str = "",
        meter: Meter | None = None,
        clock: _Clock = time.monotonic,
        owner: Owner = "",
    ) -> None:
        self.key_id = key_id
        self.owner = owner
        self.connections = 0
        self.in_flight = 0
        self._meter = meter
        self._clock = clock
        self.limit(limits)
        # Requests that were drawn and not used yet.
        self._requests = 0
        # Tokens that were used and not reported yet.
        self._used_tokens = 0
        self._held = HeldPlaces()
        self._others = HeldPlaces()
        # How many callers wait for a draw.
        self._waiting: dict[str, int] = {"requests": 0, "connections": 0, "lanes": 0}
        self._refused_until = {"requests": 0.0, "connections": 0.0, "lanes": 0.0}
        # When there will be a request again, when each kind was last used, and when the store was last asked.
        self._request_at = 0.0
        self._used_at = dict.fromkeys(self._waiting, 0.0)
        self._drawn_at = 0.0
        self._is_report_due = False
        # One draw at a time, so that each token is reported once.
        self._lock = asyncio.Lock()

    def limit(self, limits: KeyLimits) -> None:
        """From now on these are the limits; what other processes have used comes with the next draw."""
        self.limits = limits
        # None for a key without one.
        self.budget = self._meter.budget(self) if limits.has_budget and self._meter else None
        self._tokens = Bucket(limits.tokens_per_min, self._clock)
        # Requests that no process has drawn.
        self._undrawn = Bucket(limits.requests_per_min, self._clock)
        self._other_requests = Bucket(limits.other_requests_per_min, self._clock)

    # --- what is used ---

    async def count_request(self) -> None:
        """Count a request for a turn, or refuse it."""
        limits = self.limits
        if self.budget is not None:
            await self.budget.check()
        if limits.tokens_per_min or limits.state_bytes_max:
            # Other processes may have used some of it; the next report brings their use, beside this turn.
            self._is_report_due = True
            self._register()
            if wait_s := self._tokens.wait_s:
                raise _too_much(limits.tokens_per_min, "tokens", wait_s)
        if limits.requests_per_min:
            # In a loop, because another request may have taken what was drawn.
            while self._requests < 1:
                await self._more_requests()
            self._requests -= 1
            self._used_at["requests"] = self._clock()

    def count_other_request(self) -> None:
        """Count a request that starts no turn, or refuse it."""
        if per_min := self.limits.other_requests_per_min:
            left = self._other_requests.level - 1
            if left < -CRUMB:
                wait_s = -left * MINUTE_S / per_min
                raise _too_much(per_min, "requests that start no response", wait_s)
            self._other_requests.level = left

    async def hold(self) -> None:
        """Take a place for a turn, or refuse it; `release` gives the place back."""
        if self.limits.lanes_max:
            while self.in_flight >= self._held.lanes:
                most = self.limits.lanes_max
                await self._more("lanes", f"This key may run {most} turns at once.")
            self._used_at["lanes"] = self._clock()
        self.in_flight += 1

    def release(self, turn_id: str = "", tokens: int = 0) -> None:
        """A turn is over, and has used this many tokens; without an id none has run."""
        self.in_flight -= 1
        if self.budget is not None and turn_id:
            self.budget.add(turn_id, tokens)
        if self.limits.tokens_per_min:
            self._tokens.level -= tokens
            self._used_tokens += tokens

    @property
    def rates(self) -> list[Rate]:
        """What is left of a minute's requests and tokens, as this process knows it."""
        limits, requests = self.limits, self._undrawn.level + self._requests
        rates = (
            rate_of("requests", limits.requests_per_min, requests),
            rate_of("tokens", limits.tokens_per_min, self._tokens.level),
        )
        return [rate for rate in rates if rate.limit]

    @property
    def can_connect(self) -> bool:
        """Whether there is a place for one more connection, without asking the store."""
        return not self.limits.connections_max or self.connections < self._held.connections

    async def check_connections(self) -> None:
        """Refuse one connection more than the key may have."""
        while not self.can_connect:
            most = self.limits.connections_max
            await self._more("connections", f"This key may have {most} connections.")

    def connect(self) -> None:
        self.connections += 1
        self._used_at["connections"] = self._clock()
        if self._is_counted:
            self._register()

    def disconnect(self) -> None:
        self.connections -= 1
        self._used_at["connections"] = self._clock()

    @property
    def state_bytes_max(self) -> int:
        """What the connections of this process may keep in memory: their part of the limit, by their number."""
        most, own = self.limits.state_bytes_max or UNBOUNDED, max(1, self.connections)
        return most * own // (own + self._others.connections)

    # --- what is held ---

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost if this quota were forgotten."""
        is_busy = self.connections or self.in_flight or self._requests or self._used_tokens
        return not is_busy and self._held == HeldPlaces() and not self._tokens.wait_s

    @property
    def has_changes(self) -> bool:
        """Whether a report is due: tokens were used, places are not needed any more, or the last one is old."""
        is_old = self._clock() - self._drawn_at > REPEAT_S and self._held != HeldPlaces()
        has_spare = self._requests > 0 and self._is_unused("requests", UNUSED_S)
        is_used = self._is_report_due or self._used_tokens > 0
        return is_used or has_spare or is_old or self._kept() != self._held

    async def report(self) -> None:
        """Report what was used, and give back what was not used for a while."""
        async with self._lock:
            spare = self._requests if self._is_unused("requests", UNUSED_S) else 0
            self._requests -= spare
            await self._draw(self._kept(), -spare)

    async def give_back(self) -> None:
        """Give back at once everything that is not needed now."""
        async with self._lock:
            spare, self._requests = self._requests, 0
            await self._draw(self._needed(), -spare)

    @property
    def _is_counted(self) -> bool:
        """Whether a limit depends on the number of connections."""
        return bool(self.limits.connections_max or self.limits.state_bytes_max)

    def _is_unused(self, what: str, for_s: float) -> bool:
        return self._clock() - self._used_at[what] > for_s

    def _needed(self) -> HeldPlaces:
        """Places that are in use or waited for."""
        connections = self.connections + self._waiting["connections"]
        lanes = self.in_flight + self._waiting["lanes"]
        is_bound = self.limits.lanes_max > 0
        return HeldPlaces(connections if self._is_counted else 0, lanes if is_bound else 0)

    def _kept(self) -> HeldPlaces:
        """The same, and places that were used a moment ago."""
        needed, held = self._needed(), self._held
        are_kept = self.limits.connections_max and not self._is_unused("connections", KEEP_S)
        connections = max(needed.connections, held.connections if are_kept else 0)
        lanes = max(needed.lanes, 0 if self._is_unused("lanes", KEEP_S) else held.lanes)
        return HeldPlaces(connections, lanes)

    # --- drawing ---

    async def _more_requests(self) -> None:
        """Draw for all waiting requests and a few ahead; or refuse."""
        if self._may_ask("requests"):
            self._waiting["requests"] += 1
            try:
                # A client that leaves meanwhile must not cancel a draw for the others.
                await asyncio.shield(asyncio.create_task(self._draw_requests()))
            finally:
                self._waiting["requests"] -= 1
        if not self._may_ask("requests"):
            wait_s = max(CRUMB, self._request_at - self._clock())
            raise _too_much(self.limits.requests_per_min, "requests", wait_s)

    async def _draw_requests(self) -> None:
        async with self._lock:
            if self._requests > 0 or not self._may_ask("requests"):
                return
            ahead = self.limits.requests_per_min // AHEAD
            grant = await self._draw(self._kept(), self._waiting["requests"] + ahead)
            if self._requests < 1:
                self._request_at = self._clock() + grant.wait_s
                self._refuse("requests", min(grant.wait_s, REFUSED_S))

    async def _more(self, kind: PlaceKind, message: str) -> None:
        """Draw places for all waiting callers, reclaimed from other processes if need be; or refuse."""
        if self._may_ask(kind):
            self._waiting[kind] += 1
            try:
                if await asyncio.shield(asyncio.create_task(self._has_grown(kind))):
                    return
                assert self._meter is not None
                await self._meter.reclaim(self.key_id)
                if await asyncio.shield(asyncio.create_task(self._has_grown(kind))):
                    return
                self._refuse(kind, REFUSED_S)
            finally:
                self._waiting[kind] -= 1
        raise TooMany(message, wait_s=CROWDED_S)

    async def _has_grown(self, kind: PlaceKind) -> bool:
        async with self._lock:
            if not self._has_room(kind):
                await self._draw(self._kept())
            return self._has_room(kind)

    def _has_room(self, kind: PlaceKind) -> bool:
        if kind == "connections":
            return self.connections < self._held.connections
        return self.in_flight < self._held.lanes

    async def _draw(self, held: HeldPlaces, requests: int = 0) -> Grant:
        assert self._meter is not None, "a key with limits needs a meter"
        self._register()
        tokens, self._used_tokens = self._used_tokens, 0
        self._is_report_due = False
        try:
            draw = Draw(self.key_id, self.limits, requests, tokens, held)
            grant = await self._meter.draw(draw)
        except BaseException:
            self._used_tokens += tokens
            raise
        self._drawn_at = self._clock()
        self._requests += max(0, grant.requests)
        self._tokens.level = grant.tokens - self._used_tokens
        self._undrawn.level = grant.requests_left
        self._held, self._others = grant.held, grant.others
        return grant

    def _register(self) -> None:
        if self._meter is not None:
            self._meter.register(self)

    def _refuse(self, what: str, for_s: float) -> None:
        self._refused_until[what] = self._clock() + for_s

    def _may_ask(self, what: str) -> bool:
        return self._clock() >= self._refused_until[what]


def _too_much(most: int, what: str, wait_s: float) -> TooMany:
    message = f"This key may use {most} {what} a minute. Please retry in {wait_s:.1f} s."
    return TooMany(message, wait_s=wait_s)


class Meter:
    """The quotas of this process that have limits; `others` is None where one process serves alone."""

    def __init__(
        self,
        shared_limits: SharedLimits,
        others: OtherProcesses | None = None,
        on_report: Callable[[str], None] = lambda key_id: None,
    ) -> None:
        self._shared_limits = shared_limits
        self._others = others
        # Called with the id of a key whose part of the limits may have changed.
        self._on_report = on_report
        self._quotas: dict[str, KeyQuota] = {}
        # What budgets are compared with.
        self.budget_sources: BudgetSources | None = None
        if others is not None:
            others.on_message("short", self._give_back)

    def budget(self, quota: KeyQuota) -> KeyBudget | None:
        """The budget of a key that has one."""
        if self.budget_sources is None:
            return None
        # Imported here: few keys have one.
        from segue.budgets.budget import KeyBudget

        return KeyBudget(quota.limits, quota.owner, quota.key_id, self.budget_sources)

    def register(self, quota: KeyQuota) -> None:
        """Look at this quota regularly from now on."""
        self._quotas[quota.key_id] = quota

    async def draw(self, draw: Draw) -> Grant:
        """What the store grants."""
        return await self._shared_limits.draw(draw)

    async def reclaim(self, key_id: str) -> None:
        """Ask the other processes to give back the places of this key that they do not need."""
        if self._others is not None and self._others.others:
            with suppress(TimeoutError):
                async with asyncio.timeout(RECLAIM_S):
                    await self._others.ask("short", key_id.encode(), self._others.others)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Report to the store every second while inside; give everything back at the end."""
        try:
            async with in_background("key_usage_reports", self._report_forever):
                yield
        finally:
            for quota in tuple(self._quotas.values()):
                with suppress(ApiError):
                    await quota.give_back()

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            if failed := await self.report():
                log.warning("the usage of %d API keys could not be written to the store", failed)

    async def report(self) -> int:
        """Report to the store what has changed, each key by itself, and forget the quotas that hold nothing any more;
        how many reports failed."""
        failed = 0
        for key_id, quota in tuple(self._quotas.items()):
            if quota.has_changes:
                try:
                    await quota.report()
                except ApiError:
                    failed += 1
                    continue
                self._on_report(key_id)
            if quota.is_idle:
                del self._quotas[key_id]
        return failed

    async def _give_back(self, _: str, body: bytes) -> bytes:
        """Another process is short of places of this key."""
        quota = self._quotas.get(body.decode())
        if quota is not None:
            with suppress(ApiError):
                await quota.give_back()
        return b""
