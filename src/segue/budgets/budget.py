"""May a key with a budget start one more turn, and how much of it is used?

In: the budgets of a key, and what the ledger has of it and its owner. Out: nothing, or a refusal that says until when.
The ledger counts the rows of usage themselves, so that a budget outlives restarts and holds for all processes. Who has
plenty left asks it once a second; near the end every turn asks, after the turns that have just ended here are written.
Turns that run when a budget is used up finish.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from segue.errors import OverBudget
from segue.limits import KeyLimits, Spent
from segue.seams.history import Owner

log = logging.getLogger(__name__)

DAY_S = 86_400
# From this share on clients and operators are warned.
WARNED_SHARE = 0.8
# So old the figures may be while plenty is left: more than a tenth, and more than a key uses in a second.
FRESH_S = 1.0
PLENTY_SHARE, PLENTY_TOKENS = 0.1, 1_000_000

# How soon the usage of a turn that has just ended is looked for again, and for how long.
SETTLE_S, SETTLE_S_MAX = 0.005, 2.0

Period = Literal["day", "month"]
BudgetEvent = Literal["warning", "refused"]


class ReadSpent(Protocol):
    """What the ledger has of an owner and of one of its keys, on this day and from the first of the month on."""

    async def __call__(self, owner: Owner, key_id: str, day: int, month: int) -> Spent: ...


class BudgetSources(Struct, frozen=True):
    """What a budget is compared with, and who learns of it."""

    spent: ReadSpent
    # Writes what turns that have ended here have used.
    settle: Callable[[], Awaitable[None]]
    note: Callable[[BudgetEvent, Period], None] = lambda event, period: None
    clock: Callable[[], float] = time.time
    # Of each owner the turns that have ended here, and whose usage the ledger may not have yet.
    unsettled: dict[Owner, set[str]] = msgspec.field(default_factory=dict)

    def settled(self, owner: Owner, turn_id: str) -> None:
        """The usage of this turn is in the ledger."""
        self.unsettled.get(owner, set()).discard(turn_id)


class BudgetLine(Struct, frozen=True):
    """One budget of a key: of what, of which period, how much of it is used, and when it begins anew."""

    of: Literal["key", "owner"]
    period: Period
    tokens_max: int
    used: int
    resets_at: int

    @property
    def left(self) -> int:
        return self.tokens_max - self.used

    @property
    def words(self) -> str:
        """What is used of it, for people."""
        who = "This key has" if self.of == "key" else "The keys of this owner have"
        share = 100 * self.used // self.tokens_max
        return f"{who} used {self.used:,} of {self.tokens_max:,} tokens of this {self.period} (UTC), {share} %."


def day_of(now: float) -> tuple[int, int]:
    """The day of this time, and the first of its month, counted from 1970 (of UTC)."""
    day = int(now) // DAY_S
    return day, day - time.gmtime(now).tm_mday + 1


def next_month(first: int) -> int:
    """The first day of the month after the one that begins on this day."""
    return day_of((first + 31) * DAY_S)[1]


def budget_lines(limits: KeyLimits, spent: Spent, now: float) -> Iterator[BudgetLine]:
    """Every budget of a key with these limits."""
    day, first = day_of(now)
    tomorrow, month_after = (day + 1) * DAY_S, next_month(first) * DAY_S
    rows: tuple[tuple[Literal["key", "owner"], Period, int, int, int], ...] = (
        ("key", "day", limits.budget_tokens_day, spent.day, tomorrow),
        ("key", "month", limits.budget_tokens_month, spent.month, month_after),
        ("owner", "day", limits.owner_budget_tokens_day, spent.owner_day, tomorrow),
        ("owner", "month", limits.owner_budget_tokens_month, spent.owner_month, month_after),
    )
    return (BudgetLine(*row) for row in rows if row[2])


class KeyBudget:
    """The budgets of one key, as this process knows them."""

    def __init__(
        self, limits: KeyLimits, owner: Owner, key_id: str, sources: BudgetSources
    ) -> None:
        self._limits = limits
        self._owner = owner
        self._key_id = key_id
        self._sources = sources
        self._spent = Spent()
        # When the ledger was asked, and for which day and month.
        self._asked_at = float("-inf")
        self._days = (0, 0)
        # What turns that have ended here have used since the ledger was asked.
        self._unread = 0
        self._warned: set[tuple[str, str, int]] = set()
        # One question at a time: who waits for it takes its answer.
        self._lock = asyncio.Lock()

    def add(self, turn_id: str, tokens: int) -> None:
        """A turn has ended here."""
        self._unread += tokens
        self._sources.unsettled.setdefault(self._owner, set()).add(turn_id)

    async def check(self) -> None:
        """Refuse a turn if a budget is used up."""
        came_at = time.monotonic()
        if not self._has_plenty(came_at):
            async with self._lock:
                if self._asked_at < came_at:
                    await self._read()
        now = self._sources.clock()
        for line in self._lines(now):
            if line.left <= 0:
                self._sources.note("refused", line.period)
                raise OverBudget(_refusal(line), wait_s=max(1.0, line.resets_at - now))
            if _is_near(line):
                self._warn(line)

    @property
    def warnings(self) -> list[str]:
        """What the client is told with its answer, as of the last check."""
        return [line.words for line in self._lines(self._sources.clock()) if _is_near(line)]

    def _lines(self, now: float) -> Iterator[BudgetLine]:
        return budget_lines(self._limits, self._spent, now)

    def _has_plenty(self, came_at: float) -> bool:
        """Whether what was read last is good enough."""
        now = self._sources.clock()
        is_fresh = came_at - self._asked_at < FRESH_S and day_of(now) == self._days
        return is_fresh and all(
            line.left - self._unread > max(PLENTY_TOKENS, PLENTY_SHARE * line.tokens_max)
            for line in self._lines(now)
        )

    async def _read(self) -> None:
        ended, unread = {*self._unsettled}, self._unread
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S_MAX):
                await self._settle(ended)
        # What takes longer is not waited for again.
        self._unread -= unread
        if left := self._unsettled - ended:
            self._sources.unsettled[self._owner] = left
        else:
            self._sources.unsettled.pop(self._owner, None)
        asked_at, days = time.monotonic(), day_of(self._sources.clock())
        self._spent = await self._sources.spent(self._owner, self._key_id, *days)
        self._asked_at, self._days = asked_at, days

    @property
    def _unsettled(self) -> set[str]:
        return self._sources.unsettled.get(self._owner, set())

    async def _settle(self, ended: set[str]) -> None:
        """Wait for the usage of these turns, which have just ended here; others end meanwhile."""
        while not ended.isdisjoint(self._unsettled):
            await self._sources.settle()
            if not ended.isdisjoint(self._unsettled):
                # Its client has the end, and its usage is just being handed over.
                await asyncio.sleep(SETTLE_S)

    def _warn(self, line: BudgetLine) -> None:
        """Once for each budget and period."""
        name = (line.of, line.period, line.resets_at)
        if name not in self._warned:
            self._warned.add(name)
            self._sources.note("warning", line.period)
            log.warning("API key %s of owner '%s': %s", self._key_id, self._owner, line.words)


def _is_near(line: BudgetLine) -> bool:
    return line.used >= WARNED_SHARE * line.tokens_max


def _refusal(line: BudgetLine) -> str:
    at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(line.resets_at))
    return f"You exceeded your current quota. {line.words} It begins anew on {at} UTC."
