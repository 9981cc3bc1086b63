"""When is a store maintained?

In: a `Maintenance`, how long things are kept, and functions that are called with erased turns, when this process was
taken for dead, and when it cannot go on. Every few seconds this process writes its heartbeat, which waits for nothing
else here; turns of dead processes end as failed, and what other processes erased leaves the caches of this one. Every
hour what is too old is deleted, a few rows at a time, so that no save waits long. A store that is away is tried again;
a heartbeat that fails by a mistake of ours ends the process, whose turns others would end while they run here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from segue.aio import GiveUp, in_background
from segue.errors import ApiError, Outdated
from segue.seams.history import Owner
from segue.seams.store import Maintenance, Retention

log = logging.getLogger(__name__)

# Often enough that a deletion reaches the caches of other processes soon, and a lease outlives a few missed heartbeats.
BEAT_S = 2.0
SWEEP_EVERY_S = 3_600.0
# Rows in one step of a sweep, and the pause after it: a write waits for one step at most.
BATCH = 100
PAUSE_S = 0.05
# How long an idempotency key belongs to its turn.
CLAIM_S = 86_400
# Longer than any turn runs: no save comes later than this.
ERASED_S = 86_400
# What was used on a day counts until the end of its month.
SPENDING_S = 40 * 86_400
# Erasures are read again for this long: a transaction may become visible later than it began.
OVERLAP_S = 15

OnErased = Callable[[Owner, str], Awaitable[object]]
OnFenced = Callable[[], object]


@asynccontextmanager
async def maintained(
    maintenance: Maintenance,
    retention: Retention,
    on_erased: OnErased,
    on_fenced: OnFenced,
    give_up: GiveUp | None = None,
) -> AsyncIterator[None]:
    """Maintain the store while inside: three loops, none of which another can stop."""
    async with (
        in_background("lease_heartbeat", partial(beat_forever, maintenance, on_fenced), give_up),
        in_background("recovery", partial(recover_forever, maintenance, on_erased)),
        in_background("sweep", partial(sweep_forever, maintenance, retention)),
    ):
        yield


async def beat_forever(maintenance: Maintenance, on_fenced: OnFenced) -> None:
    """Write the heartbeat."""
    while True:
        try:
            if not await maintenance.beat():
                log.warning(
                    "this process was paused for longer than its lease: others have ended its responses"
                )
                on_fenced()
        except Outdated:
            # It stood still for so long that a version started that it cannot work beside: it has no lease any more.
            raise
        except ApiError:
            log.exception("the heartbeat could not be written; trying again in %s s", BEAT_S)
        await asyncio.sleep(BEAT_S)


async def recover_forever(maintenance: Maintenance, on_erased: OnErased) -> None:
    """End turns of dead processes, and report what was erased, each turn once."""
    reported: set[tuple[Owner, str]] = set()
    while True:
        await asyncio.sleep(BEAT_S)
        try:
            if ended := await maintenance.recover():
                log.warning("%d turns of dead processes were ended as failed", ended)
            erased = set(await maintenance.erasures())
            reported &= erased
            for owner, turn_id in erased - reported:
                if await _is_reported(on_erased, owner, turn_id):
                    reported.add((owner, turn_id))
                # A sweep elsewhere may have erased thousands.
                await asyncio.sleep(0)
        except ApiError:
            log.exception("the store could not be maintained; trying again in %s s", BEAT_S)


async def _is_reported(on_erased: OnErased, owner: Owner, turn_id: str) -> bool:
    """Report one; False if it has to be reported again. Trouble with one keeps no other one in memory."""
    try:
        await on_erased(owner, turn_id)
    except ApiError:
        log.exception("what was erased was not forgotten everywhere; trying again in %s s", BEAT_S)
        return False
    return True


async def sweep_forever(maintenance: Maintenance, retention: Retention) -> None:
    """Delete what is too old, once an hour and at the start; half of the time at most, so that others are served."""
    loop = asyncio.get_running_loop()
    while True:
        began_at = loop.time()
        try:
            is_more = await maintenance.sweep(retention)
        except ApiError:
            log.exception("old rows could not be deleted; trying again in %s s", SWEEP_EVERY_S)
            is_more = False
        pause_s = max(PAUSE_S, loop.time() - began_at)
        await asyncio.sleep(pause_s if is_more else SWEEP_EVERY_S)
