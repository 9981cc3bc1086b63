"""Which prompts did this process see lately, and what of each new one could have been reused?

After the answer of a turn its first prompt waits to be compared: with the parent's, or, where the client sends its
whole history, with the nearest earlier prompt of the same owner. Prompts are compared one after the other, in the order
in which their turns ended. On most turns the earlier prompt is the beginning of the new one, and that is seen at a
glance; where it is not, long prompts are compared in a thread. What is found is kept in memory only, for its owner,
within a limit of bytes. A turn waits for a comparison only if its client asks for one (`comparison_response_id`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct, structs

from segue.aio import off_loop
from segue.process.afterwards import EndedTurn
from segue.reports.compare import Parting, changed_setting, nearest, part
from segue.reports.diagnose import NOT_FOUND, UNAVAILABLE, diagnose
from segue.reports.prompts import (
    ITEM_SIZE,
    USUAL_TIER,
    KnownPrompt,
    extends,
    items_of,
    of_plan,
    of_turn,
)
from segue.reports.report import WORDS, Earlier, engine_reason, is_lost, summary
from segue.seams.history import Owner, Warm, ancestors
from segue.seams.prompt import Messages, Prompt
from segue.seams.store import Turns
from segue.turn.plan import FirstPrompt, Plan
from segue.wire.cache import CacheDiagnostics, CacheReport, EngineReason, LossReason
from segue.wire.codec import LARGE_BYTES
from segue.wire.items import ITEM_BYTES
from segue.wire.response import ENDED, Response

log = logging.getLogger(__name__)

# What a record costs beside its texts; of a prompt that came as a whole, its items as bytes and as values, and its ids.
RECORD_BYTES = 1_000
ITEM_COST, TOKEN_COST = 3, 4
# Prompts of one owner that may be the nearest earlier one: conversations that run at the same time.
RECENT_MAX = 32
# How often the same reason at the same replica is logged, and of how many that is known.
LOG_S, LOGGED_MAX = 60.0, 1_000

ReportKey = tuple[Owner, str]


class Record(Struct, gc=False):
    """What is kept of one turn."""

    report: CacheReport
    client: str
    tier: str
    ended_at: float
    bytes: int
    # The other turns of which it has words.
    quoted: frozenset[str] = frozenset()
    # Of a request that came as a whole: another one may go on from it.
    known: KnownPrompt | None = None
    known_bytes: int = 0


class Waiting(NamedTuple):
    """A prompt that is still to be compared, and what it holds in memory until then."""

    prompt: FirstPrompt
    bytes: int


class Erased(Protocol):
    """What was erased while turns run: one that goes on from it must not quote it afterwards."""

    def add(self, key: ReportKey, /) -> None:
        """It is erased now."""

    def __contains__(self, key: object, /) -> bool:
        """Whether it was."""


class ReuseWatch:
    """Compares the prompts of this process, and keeps what it finds."""

    def __init__(self, bytes_max: int, erased: Erased) -> None:
        self._bytes_max = bytes_max
        self._erased = erased
        # The oldest first.
        self._records: OrderedDict[ReportKey, Record] = OrderedDict()
        # The turns of an owner whose prompt is kept, the oldest first.
        self._recent: dict[Owner, OrderedDict[str, None]] = {}
        # The turns whose reports have words of this one.
        self._quoting: dict[ReportKey, set[str]] = {}
        self._owner_bytes: Counter[Owner] = Counter()
        self.bytes = 0
        # In the order in which the turns have ended.
        self._waiting: OrderedDict[ReportKey, Waiting] = OrderedDict()
        self.waiting_bytes = 0
        self._comparing = asyncio.Lock()
        self._logged_at: dict[tuple[str | None, EngineReason], float] = {}

    # --- after a turn ---

    async def add(self, prompt: FirstPrompt, held_bytes: int) -> None:
        """The answer is complete: its prompt is to be compared. Where too much waits, that is done at once."""
        key = (prompt.plan.owner, prompt.plan.id)
        if key not in self._erased:
            self._waiting[key] = Waiting(prompt, held_bytes)
            self.waiting_bytes += held_bytes
        if self.waiting_bytes > self._bytes_max:
            await self._catch_up(key)

    def observe(self, ended: EndedTurn) -> Awaitable[None] | None:
        """Compare its prompt, if that waits."""
        key = (ended.entry.owner, ended.entry.turn_id)
        return self._catch_up(key) if key in self._waiting else None

    async def _catch_up(self, key: ReportKey) -> None:
        """Compare the prompts that wait, as far as this one. It never fails a turn."""
        async with self._comparing:
            while key in self._waiting:
                first = next(iter(self._waiting))
                try:
                    await self._compare_first(self._waiting[first].prompt)
                except Exception:
                    log.exception("could not compare the prompt of turn %s", first[1])
                self._leave(first)

    def _leave(self, key: ReportKey) -> None:
        """It does not wait any more; if it was erased meanwhile, it has left already."""
        if (left := self._waiting.pop(key, None)) is not None:
            self.waiting_bytes -= left.bytes

    async def diagnose(self, prompt: FirstPrompt, turn_id: str, turns: Turns) -> CacheDiagnostics:
        """How the prompt of a turn compares with that of an earlier turn. It never fails the turn."""
        try:
            old = await self._known(prompt.plan, turn_id, turns)
            if old is None:
                return NOT_FOUND
            new = _known_now(prompt)
            is_long = old.size + new.size > LARGE_BYTES
            cached = prompt.read.cached_tokens
            found, parting = await off_loop(is_long, diagnose, old, new, cached)
            if parting is not None:
                prompt.plan.tally.parted = (parting.place.part, parting.missed)
            return found
        except Exception:
            log.exception("could not compare the prompt of turn %s", prompt.plan.id)
            return UNAVAILABLE

    async def _known(self, plan: Plan, turn_id: str, turns: Turns) -> KnownPrompt | None:
        """The prompt of an earlier turn of this owner, from memory or from the store."""
        key = (plan.owner, turn_id)
        await self._catch_up(key)
        record = self._records.get(key)
        if record is not None and record.known is not None:
            return record.known
        parent = plan.resolved.parent
        is_parent = parent is not None and parent.id == turn_id
        turn = parent if is_parent else await turns.find(plan.owner, turn_id)
        if turn is None or turn.response.status not in ENDED:
            return None
        return of_turn(turn, record.tier if record is not None else USUAL_TIER)

    async def _compare_first(self, prompt: FirstPrompt) -> None:
        plan = prompt.plan
        parent = plan.resolved.parent
        warm = parent.warm if parent is not None else None
        if parent is not None and warm is not None and _goes_on(prompt, warm, parent.response):
            earlier = Earlier(parent.id, warm.route, parent.response.created_at)
            self._held(prompt, earlier, _tokens(warm.prompt))
            return
        # Many turns may have ended together: others run between two comparisons.
        await asyncio.sleep(0)
        if parent is None:
            await self._compare_whole(prompt)
        else:
            old = of_turn(parent, self._tier(plan.owner, parent.id))
            await self._compare(prompt, parent.id, old, _known_now(prompt))

    async def _compare_whole(self, prompt: FirstPrompt) -> None:
        """A history that came as a whole: it may go on from an earlier prompt, and another one from it."""
        owner, resent = prompt.plan.owner, prompt.plan.resolved.resent
        new = _known_now(prompt)
        beginning = resent.beginning if resent is not None else None
        key = (owner, beginning.turn_id) if beginning is not None else None
        record = self._records.get(key) if key is not None else None
        before = record.known if record is not None else None
        if before is None:
            key, before = await self._nearest(owner, new)
        past = prompt.composed.scene.past
        warm = past.warm if past is not None else None
        if key is None or before is None:
            self._held(prompt, None, 0)
        elif warm is not None and _goes_on(prompt, warm, before.response):
            self._held(prompt, _earlier(key[1], before), _tokens(warm.prompt))
        else:
            await self._compare(prompt, key[1], before, new)
        is_longer = before is not None and len(before.items) < len(new.items)
        # Meanwhile it may have been erased.
        if key is not None and key in self._records and is_longer:
            self._let_go(key)
        self._remember(prompt.plan, new)

    async def _nearest(
        self, owner: Owner, new: KnownPrompt
    ) -> tuple[ReportKey, KnownPrompt] | tuple[None, None]:
        """The earlier prompt of this owner that the new one goes on from, if there is one."""
        kept = [(owner, turn_id) for turn_id in reversed(self._recent.get(owner, ()))]
        prompts = {key: known for key in kept if (known := self._records[key].known) is not None}
        # Of the earlier ones only the digests are looked at, mostly made already.
        size = new.size + ITEM_SIZE * sum(len(known.items) for known in prompts.values())
        found = await off_loop(size > LARGE_BYTES, nearest, prompts.values(), new)
        return next(
            ((key, known) for key, known in prompts.items() if known is found), (None, None)
        )

    async def _compare(
        self, prompt: FirstPrompt, turn_id: str, old: KnownPrompt, new: KnownPrompt
    ) -> None:
        parting = await off_loop(old.size + new.size > LARGE_BYTES, part, old, new)
        if parting is None or not parting.lost:
            expected = old.tokens if parting is None else parting.common
            self._held(prompt, _earlier(turn_id, old), expected)
        else:
            self._lost(prompt, turn_id, parting)

    # --- what is kept ---

    def _held(self, prompt: FirstPrompt, earlier: Earlier | None, expected: int) -> None:
        """The prompt begins with the earlier one; the engine may have lost it all the same."""
        plan, read = prompt.plan, prompt.read
        compared = None if earlier is None else earlier.id
        report = CacheReport(
            response_id=plan.id,
            model=plan.response.model,
            verdict="hit" if compared is not None else "first",
            compared_with=compared,
            comparison=_comparison(plan, compared),
            input_tokens=prompt.composed.length,
            reusable_tokens=expected,
            cached_tokens=read.cached_tokens,
        )
        if earlier is not None and is_lost(expected, read.cached_tokens):
            why, tokens = engine_reason(earlier, read), expected - (read.cached_tokens or 0)
            lost = self._loss(plan, report, why, tokens)
            report = structs.replace(report, verdict="engine_lost", **lost)
            self._log(plan, read.route, why, tokens)
        self._add(plan, report)

    def _log(self, plan: Plan, replica: str | None, reason: EngineReason, tokens: int) -> None:
        """Say it, for each replica and reason now and then."""
        now, key = time.monotonic(), (replica, reason)
        if now < self._logged_at.get(key, 0.0) + LOG_S:
            return
        if len(self._logged_at) >= LOGGED_MAX:
            self._logged_at.clear()
        self._logged_at[key] = now
        log.info(
            "engine %s computed %d tokens of turn %s again (%s): %s",
            replica or plan.response.model, tokens, plan.id, reason, WORDS[reason],
            extra={"request_id": plan.arrival.receipt.request_id},
        )  # fmt: skip

    def _lost(self, prompt: FirstPrompt, compared: str, parting: Parting) -> None:
        """The prompts part."""
        plan = prompt.plan
        report = CacheReport(
            response_id=plan.id,
            model=plan.response.model,
            verdict="prompt_changed",
            compared_with=compared,
            comparison=_comparison(plan, compared),
            input_tokens=prompt.composed.length,
            reusable_tokens=parting.common,
            cached_tokens=prompt.read.cached_tokens,
            place=parting.place,
            before=parting.earlier,
            now=parting.now,
        )
        loss = self._loss(plan, report, parting.reason, parting.lost, parting)
        self._add(plan, structs.replace(report, **loss), _quoted(plan, compared, parting))

    def _loss(
        self,
        plan: Plan,
        report: CacheReport,
        reason: LossReason,
        lost: int,
        parting: Parting | None = None,
    ) -> dict[str, object]:
        """What a report says of a loss: how long it took is its share of the time to the first token."""
        plan.tally.lost = (reason, lost)
        waits = (span for span in plan.tally.spans if span.stage == "first_token")
        took = next((span.ended - span.began for span in waits), None)
        computed = report.input_tokens - (report.cached_tokens or 0)
        ms = None if took is None else round(1000 * took * min(1.0, lost / max(1, computed)), 1)
        words = summary(reason, lost, parting)
        return {"reason": reason, "lost_tokens": lost, "lost_ms": ms, "summary": words}

    def _add(self, plan: Plan, report: CacheReport, quoted: frozenset[str] = frozenset()) -> None:
        owner = plan.owner
        if (owner, plan.id) in self._erased:
            return
        if any((owner, turn_id) in self._erased for turn_id in quoted):
            report, quoted = _without_words(report), frozenset()
        tier = plan.resolved.create.service_tier or USUAL_TIER
        self._records[owner, plan.id] = record = Record(
            report, plan.arrival.receipt.client, tier, time.time(), _size(report), quoted
        )
        for turn_id in quoted:
            self._quoting.setdefault((owner, turn_id), set()).add(plan.id)
        self._count(owner, record.bytes)
        self.shrink(self.bytes - self._bytes_max)

    def _remember(self, plan: Plan, new: KnownPrompt) -> None:
        owner = plan.owner
        record = self._records.get((owner, plan.id))
        if record is None or new.prompt is None:
            return
        record.known = new
        sent = ITEM_COST * plan.tally.bytes_received + ITEM_BYTES * len(new.items)
        # A small request may name large files.
        record.known_bytes = max(sent, plan.resolved.given_bytes) + TOKEN_COST * new.tokens
        self._count(owner, record.known_bytes)
        recent = self._recent.setdefault(owner, OrderedDict())
        recent[plan.id] = None
        if len(recent) > RECENT_MAX:
            self._let_go((owner, next(iter(recent))))
        self.shrink(self.bytes - self._bytes_max)

    def _let_go(self, key: ReportKey) -> None:
        """Keep the report, not the prompt."""
        record = self._records[key]
        if record.known is None:
            return
        self._count(key[0], -record.known_bytes)
        record.known, record.known_bytes = None, 0
        recent = self._recent[key[0]]
        del recent[key[1]]
        if not recent:
            del self._recent[key[0]]

    def _drop(self, key: ReportKey) -> None:
        self._let_go(key)
        self._unquote(key)
        self._count(key[0], -self._records.pop(key).bytes)

    def _unquote(self, key: ReportKey) -> None:
        """Its report has no words of other turns any more."""
        owner, turn_id = key
        for quoted in self._records[key].quoted:
            quoting = self._quoting[owner, quoted]
            quoting.remove(turn_id)
            if not quoting:
                del self._quoting[owner, quoted]

    def _count(self, owner: Owner, size: int) -> None:
        self.bytes += size
        self._owner_bytes[owner] += size
        if not self._owner_bytes[owner]:
            del self._owner_bytes[owner]

    def bytes_of(self, owner: Owner) -> int:
        """What is kept of this owner."""
        return self._owner_bytes[owner]

    def trim(self, owner: Owner, bytes_max: int) -> None:
        """Let go of what this owner has beyond so much, the oldest first."""
        if self._owner_bytes[owner] <= bytes_max:
            return
        for key in [key for key in self._records if key[0] == owner]:
            self._drop(key)
            if self._owner_bytes[owner] <= bytes_max:
                return

    def shrink(self, size: int) -> None:
        """Let go of so many bytes, the oldest first."""
        target = self.bytes - size
        while self._records and self.bytes > target:
            self._drop(next(iter(self._records)))

    # --- what is asked ---

    def _tier(self, owner: Owner, turn_id: str) -> str:
        record = self._records.get((owner, turn_id))
        return USUAL_TIER if record is None else record.tier

    async def find(self, owner: Owner, turn_id: str) -> CacheReport | None:
        """What is known of this turn, once it is compared."""
        await self._catch_up((owner, turn_id))
        record = self._records.get((owner, turn_id))
        return None if record is None else record.report

    async def forget_owner(self, owner: Owner) -> None:
        """Everything of the owner was erased, also what is not compared yet."""
        for key in [key for key in (*self._waiting, *self._records) if key[0] == owner]:
            await self.forget(*key)
        self.trim(owner, 0)

    async def forget(self, owner: Owner, turn_id: str) -> None:
        """The turn is erased: its report goes, and what other reports quote of it."""
        key = (owner, turn_id)
        self._leave(key)
        self._erased.add(key)
        if key in self._records:
            self._drop(key)
        for other in tuple(self._quoting.get(key, ())):
            self._unquote((owner, other))
            record = self._records[owner, other]
            record.report, record.quoted = _without_words(record.report), frozenset()
            self._count(owner, _size(record.report) - record.bytes)
            record.bytes = _size(record.report)

    async def since(self, at: float) -> list[tuple[Owner, str, CacheReport]]:
        """The reports of turns that ended after this time, each with its owner and client, the newest first."""
        if self._waiting:
            await self._catch_up(next(reversed(self._waiting)))
        newest = takewhile(lambda kept: kept[1].ended_at >= at, reversed(self._records.items()))
        return [(owner, record.client, record.report) for (owner, _), record in newest]


def _earlier(turn_id: str, known: KnownPrompt) -> Earlier:
    return Earlier(turn_id, known.route, known.response.created_at)


def _known_now(prompt: FirstPrompt) -> KnownPrompt:
    composed = prompt.composed
    return of_plan(
        prompt.plan,
        composed.scene,
        composed.rendered.context,
        composed.length,
        prompt.read.route,
        is_cut=composed.is_truncated,
    )


def _goes_on(prompt: FirstPrompt, warm: Warm, before: Response) -> bool:
    """Whether the prompt was made by adding to an earlier one, and so begins with it."""
    is_longer = extends(prompt.composed.rendered.context, warm.prompt)
    return is_longer and _is_alike(prompt.plan, warm, before)


def _quoted(plan: Plan, compared: str, parting: Parting) -> frozenset[str]:
    """The turns of which a report has words: the one compared with, and of its ancestors those that brought the items
    in which the prompts part."""
    parent, items = plan.resolved.parent, set(map(id, parting.items))
    links = ancestors(parent) if parent is not None and items else ()
    brought = {
        link.id for link in links if any(id(item) in items for item in items_of(link.rounds))
    }
    return frozenset({compared, *brought})


def _without_words(report: CacheReport) -> CacheReport:
    """The figures of a report."""
    assert report.reason is not None, "it says what was lost"
    words = summary(report.reason, report.lost_tokens, None)
    return structs.replace(report, summary=words, place=None, before=None, now=None)


def _size(report: CacheReport) -> int:
    sides = (side for side in (report.before, report.now) if side is not None)
    return RECORD_BYTES + 4 * sum(len(side.text) for side in sides)


def _is_alike(plan: Plan, warm: Warm, before: Response) -> bool:
    """Whether what stands beside chat messages is the same; of token ids all is in the prompt."""
    if not isinstance(warm.prompt, Messages) or warm.head is plan.resolved.head:
        return True
    return changed_setting(before, plan.response) is None


def _tokens(prompt: Prompt) -> int:
    return prompt.tokens if isinstance(prompt, Messages) else prompt.length


def _comparison(plan: Plan, compared: str | None) -> Literal["parent", "nearest"] | None:
    if compared is None:
        return None
    return "nearest" if plan.resolved.parent is None else "parent"
