"""How does a turn become a commit, and what comes after the answer?

`commit` makes the `Turn` that others may name as their parent. `Afterwards` is everything that the client does not wait
for: usage of unstored turns, metrics and whatever else listens. It is one bounded queue of the process, worked off
beside the next turn and drained at shutdown; when it is full the *ending* turn waits, never a starting one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from segue.turn.effects import apply_effects
from segue.turn.plan import Plan, Resolved, Tally
from segue.turn.seams import Ledger
from segue.turn.values import Head, Owner, Rendered, Round, Tokens, Turn, UsageEntry, Warm
from segue.wire.items import Call, Item
from segue.wire.kinds import call_of, is_hosted_result
from segue.wire.response import NO_USAGE, Response

log = logging.getLogger(__name__)

# A second of very fast turns; each entry is a few hundred bytes.
BACKLOG_MAX = 10_000
BATCH_MAX = 500
# How long turns gather before they are settled together.
GATHER_S = 0.25

# What a node costs beside its payload: the objects themselves, measured with tracemalloc on small turns.
NODE_BYTES = 2_000


def commit(
    plan: Plan,
    response: Response,
    rounds: tuple[Round, ...],
    open_calls: dict[str, Call],
    warm: Warm | None,
    passed: tuple[str, ...] = (),
) -> Turn:
    """The turn as it will be remembered."""
    resolved = plan.resolved
    return Turn(
        id=plan.id,
        owner=plan.owner,
        parent_id=resolved.parent.id if resolved.parent else None,
        parent=resolved.parent,
        rounds=rounds,
        response=response,
        is_stored=plan.is_stored,
        open_calls=open_calls,
        model_turns=resolved.model_turns + sum(one.did_sample for one in rounds),
        tools=resolved.head.tools,
        # Telling again what was given before changes nothing.
        effects=apply_effects(resolved.effects, (item for one in rounds for item in one.given)),
        warm=warm,
        root_at=plan.root_at,
        passed=passed,
        bytes=_measure(rounds, resolved, plan.tally.tokens_tokenized),
    )


def calls_in(wrote: Sequence[Item]) -> dict[str, Call]:
    """The calls among these items that wait for an output."""
    return {call.call_id: call for item in wrote if (call := call_of(item.value))}


def warm_after(
    fingerprint: str, head: Head, rendered: Rendered, last: Round, route: str | None = None
) -> Warm:
    """What to keep after a turn whose last round got this prompt. A round that did not sample leaves no cue."""
    prompt = rendered.context
    if last.did_sample and isinstance(prompt, Tokens):
        sampled = rendered.cue[:]
        for ids in (*last.ids, last.tail):
            sampled.extend(ids)
        prompt = prompt.plus(sampled)
    return Warm(fingerprint, head, prompt, route)


def _measure(rounds: Sequence[Round], resolved: Resolved, tokens_tokenized: int) -> int:
    """What this turn adds: bytes as sent and twice that for the typed form, and four for every id, kept and joined.

    Tools and instructions count where they are not the parent's very own.
    """
    text = sum(len(item.raw) for one in rounds for item in (*one.given, *one.wrote))
    head, parent = resolved.head, resolved.parent
    if parent is None or parent.warm is None or parent.warm.head is not head:
        text += len(head.tools.raw) + len(head.instructions or "")
    ids = 2 * sum(len(ids) for one in rounds for ids in (*one.ids, one.tail)) + tokens_tokenized
    return NODE_BYTES + 3 * text + 4 * ids


def entry_of(owner: Owner, response: Response) -> UsageEntry | None:
    """The usage row of a turn that has ended, for stores and ledger alike; None while it runs."""
    if not response.is_ended:
        return None
    usage = response.usage or NO_USAGE
    return UsageEntry(
        turn_id=response.id,
        owner=owner,
        model=response.model,
        status=response.status,
        input_tokens=usage.input_tokens,
        cached_tokens=usage.input_tokens_details.cached_tokens,
        output_tokens=usage.output_tokens,
        ended_at=response.ended_at,
        tool_calls=sum(map(is_hosted_result, response.output)),
    )


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that is over: what it used, what it cost, and where it stood."""

    entry: UsageEntry
    tally: Tally
    transport: str
    parent_id: str | None = None
    lane: str = ""
    # Why it failed, as the client was told.
    error: str | None = None


Observer = Callable[[EndedTurn], None]


class Afterwards:
    """The work that waits for nobody.

    Turns gather for a moment, so that they share a commit. A process that dies in that moment loses the usage of
    unstored turns only; a clean stop loses nothing.
    """

    def __init__(self, ledger: Ledger, observers: Sequence[Observer]) -> None:
        self._ledger = ledger
        self._observers = observers
        self._queue: asyncio.Queue[EndedTurn] = asyncio.Queue(BACKLOG_MAX)
        # Usage that the ledger has not taken yet.
        self._owed: list[UsageEntry] = []
        self._is_hurried = asyncio.Event()
        self._progress = asyncio.Condition()
        self._put_count = self._done_count = self._waiter_count = 0

    @property
    def backlog(self) -> int:
        """How many turns wait to be settled."""
        return self._queue.qsize()

    async def put(self, settled: EndedTurn) -> None:
        """Hand over a turn that is over."""
        await self._queue.put(settled)
        self._put_count += 1

    async def drained(self) -> None:
        """Wait until everything handed over so far is done; what comes meanwhile is not waited for."""
        target = self._put_count
        self._waiter_count += 1
        self._is_hurried.set()
        try:
            async with self._progress:
                await self._progress.wait_for(lambda: self._done_count >= target)
        finally:
            self._waiter_count -= 1
            if not self._waiter_count:
                self._is_hurried.clear()

    async def work(self) -> None:
        """Settle for ever; cancelled when the process ends, after `drained`."""
        while True:
            batch = [await self._queue.get()]
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_hurried.wait(), GATHER_S)
            while len(batch) < BATCH_MAX and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            try:
                await self._settle(batch)
            finally:
                self._done_count += len(batch)
                async with self._progress:
                    self._progress.notify_all()

    async def _settle(self, batch: Sequence[EndedTurn]) -> None:
        # A saved turn's row was written with the turn itself.
        self._owed += [settled.entry for settled in batch if not settled.tally.is_recorded]
        try:
            if self._owed:
                await self._ledger.settle(self._owed)
                self._owed = []
        except Exception:
            # They are told again with the next batch; the ledger takes each only once.
            log.exception("the usage of %d turns could not be recorded yet", len(self._owed))
            del self._owed[:-BACKLOG_MAX]
        for settled in batch:
            tally = settled.tally
            tally.mark("settled")
            tally.stage_s["settle"] = tally.marks["settled"] - tally.marks["sent"]
            for observe in self._observers:
                try:
                    observe(settled)
                except Exception:
                    log.exception("turn %s could not be observed", settled.entry.turn_id)
