"""How does a turn become a commit, and what comes after the answer?

`commit` makes the `Turn` that others may name as their parent. `Afterwards` is everything that the client does not wait
for: usage of unstored turns, metrics and whatever else listens. It is one bounded queue of the process, worked off
beside the next turn and drained at shutdown; when it is full the *ending* turn waits, never a starting one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from segue.turn.admit import Plan
from segue.turn.assemble import Assembler
from segue.turn.seams import Ledger
from segue.turn.values import Entry, Rendered, Round, Tally, Turn, Warm
from segue.wire.items import Call, Item, call_of
from segue.wire.response import Response

log = logging.getLogger(__name__)

# A second of very fast turns; each entry is a few hundred bytes.
BACKLOG_MAX = 10_000
BATCH_MAX = 500

# What a node costs beside its payload: the objects themselves, measured with tracemalloc on small turns.
NODE_BYTES = 2_000


def commit(plan: Plan, rendered: Rendered | None, assembler: Assembler) -> Turn:
    """The turn as it will be remembered."""
    resolved = plan.resolved
    turn_round = Round(
        given=resolved.given,
        wrote=tuple(assembler.items),
        ids=tuple(assembler.ids),
        tail=assembler.tail,
        fingerprint=plan.model.dialect.fingerprint,
        did_sample=plan.generates,
    )
    return Turn(
        id=plan.id,
        owner=plan.owner,
        parent_id=resolved.parent.id if resolved.parent else None,
        parent=resolved.parent,
        rounds=(turn_round,),
        response=assembler.response,
        is_stored=plan.is_stored,
        open_calls=resolved.open_calls | _calls(turn_round.wrote),
        model_turns=resolved.model_turns + turn_round.did_sample,
        tools=resolved.head.tools,
        warm=_warm(plan, rendered, turn_round),
        root_at=plan.root_at,
        bytes=_measure(turn_round),
    )


def _calls(wrote: Sequence[Item]) -> dict[str, Call]:
    return {call.call_id: call for item in wrote if (call := call_of(item.value))}


def _warm(plan: Plan, rendered: Rendered | None, turn_round: Round) -> Warm | None:
    """The prompt so far, with what was sampled behind it."""
    if rendered is None:
        return None
    tokens = rendered.context
    if turn_round.did_sample:
        sampled = rendered.cue[:]
        for ids in (*turn_round.ids, turn_round.tail):
            sampled.extend(ids)
        tokens = tokens.plus(sampled)
    return Warm(plan.model.dialect.fingerprint, plan.resolved.head, tokens)


def _measure(turn_round: Round) -> int:
    """Bytes as sent, twice for the typed form beside them, and four for every id, kept and joined."""
    text = sum(len(item.raw) for item in (*turn_round.given, *turn_round.wrote))
    ids = sum(len(one) for one in (*turn_round.ids, turn_round.tail))
    return NODE_BYTES + 3 * text + 8 * ids


@dataclass(frozen=True, slots=True)
class Settled:
    """A turn that is over: what it used and what it cost."""

    entry: Entry
    response: Response
    tally: Tally
    transport: str
    is_stored: bool


Observer = Callable[[Settled], None]


class Afterwards:
    """The work that waits for nobody."""

    def __init__(self, ledger: Ledger, observers: Sequence[Observer]) -> None:
        self._ledger = ledger
        self._observers = observers
        self._queue: asyncio.Queue[Settled] = asyncio.Queue(BACKLOG_MAX)

    @property
    def backlog(self) -> int:
        """How many turns wait to be settled."""
        return self._queue.qsize()

    async def put(self, settled: Settled) -> None:
        """Hand over a turn that is over."""
        await self._queue.put(settled)

    async def drained(self) -> None:
        """Wait until everything handed over so far is done."""
        await self._queue.join()

    async def work(self) -> None:
        """Settle for ever; cancelled when the process ends, after `drained`."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < BATCH_MAX and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            try:
                await self._settle(batch)
            except Exception:
                log.exception("settling %d turns failed", len(batch))
            finally:
                for _ in batch:
                    self._queue.task_done()

    async def _settle(self, batch: Sequence[Settled]) -> None:
        for settled in batch:
            for observe in self._observers:
                observe(settled)
        # A stored turn's row was written with the turn itself.
        unstored = [settled.entry for settled in batch if not settled.is_stored]
        if unstored:
            await self._ledger.settle(unstored)
