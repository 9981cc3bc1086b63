"""What does a store do beside its turns, and when?

In: a `Maintenance`, how long things are kept, and who hears of erased turns. Every few seconds it is said that this
process lives, turns of dead processes end as failed, and what other processes erased leaves the caches of this one.
Every hour what is too old goes, a few rows at a time, so that nobody who saves a turn waits long behind it. Whatever
fails is tried again; nothing here ends a server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from segue.errors import ApiError
from segue.turn.seams import Maintenance
from segue.turn.values import Owner, Retention

log = logging.getLogger(__name__)

# Often enough that a deletion reaches the caches of other processes soon, and a lease outlives a few missed beats.
BEAT_S = 2.0
SWEEP_EVERY_S = 3_600.0
# Rows in one step of a sweep, and the pause behind it: a write waits for one step at most.
BATCH = 100
PAUSE_S = 0.05
# How long a key stands for its turn.
CLAIM_S = 86_400
# Longer than any turn runs: a save that comes later than this cannot come.
ERASED_S = 86_400
# Erasures are asked for again for this long: a transaction may become visible later than it began.
OVERLAP_S = 15

OnErased = Callable[[Owner, str], Awaitable[object]]


@asynccontextmanager
async def kept_up(
    maintenance: Maintenance, retention: Retention, on_erased: OnErased
) -> AsyncIterator[None]:
    """A store that is kept up for as long as this lasts."""
    task = asyncio.create_task(keep_up(maintenance, retention, on_erased))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def keep_up(maintenance: Maintenance, retention: Retention, on_erased: OnErased) -> None:
    """Both loops for ever; cancelled when the store closes."""
    async with asyncio.TaskGroup() as group:
        group.create_task(keep_alive(maintenance, on_erased))
        group.create_task(keep_tidy(maintenance, retention))


async def keep_alive(maintenance: Maintenance, on_erased: OnErased) -> None:
    """Beat, end what the dead left, and pass on what was erased, each once."""
    told: set[tuple[Owner, str]] = set()
    while True:
        await asyncio.sleep(BEAT_S)
        try:
            if ended := await maintenance.recover():
                log.warning("%d turns of processes that have died were ended as failed", ended)
            erased = set(await maintenance.erasures())
            for owner, turn_id in erased - told:
                await on_erased(owner, turn_id)
                # A sweep elsewhere may have erased thousands.
                await asyncio.sleep(0)
            told = erased
        except ApiError:
            log.exception("the store could not be kept up")


async def keep_tidy(maintenance: Maintenance, retention: Retention) -> None:
    """Sweep once an hour, from the start on."""
    while True:
        try:
            is_more = await maintenance.sweep(retention)
        except ApiError:
            log.exception("the store could not be swept")
            is_more = False
        await asyncio.sleep(PAUSE_S if is_more else SWEEP_EVERY_S)
