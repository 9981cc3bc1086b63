"""Which turn does a repeated request get? The one that its idempotency key stands for already.

A request with a key claims it before it is prepared, under the id that its turn will have. A request that is refused,
or cancelled by its client, releases its key; so does a worker that is known to be dead. A repeat makes the same claim:

    the key is held by      and its turn                         the repeat
    this claim                                                   starts a turn
    another request here    is still being prepared              waits until it is a turn or refused, and claims again
    another digest          any                                  is refused: the key was used for another request
    a turn                  runs here, or its events are kept    follows it, from its first event on
    a stored turn           is over, and its events are logged   gets them from the log
    a stored turn           runs in another worker               follows it there
    any turn elsewhere      is refused meanwhile                 has the key, and starts a turn
    a stored turn           is over, and its events are gone     is refused: the key is spent
    a stored turn           cannot be reached for a while        is refused for now, and may come again
    an unstored turn        cannot be followed from here         is refused after a moment: the key is spent
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import blake2b

from msgspec import UNSET, structs

from segue.aio import spawn
from segue.errors import ApiError, Conflict, Unavailable
from segue.process.registry import TurnRegistry
from segue.seams.history import Owner
from segue.seams.store import Claim, EventLog, IdempotencyKeys, Turns
from segue.turn.assemble import Assembler
from segue.turn.notices import Cancel, Drain
from segue.turn.plan import Arrival, Plan
from segue.turn.running import Running, Subscriber
from segue.wire.codec import encode
from segue.wire.requests import Create
from segue.wire.response import ENDED

# How often a request may find its key held by another request that is then refused.
CLAIMS_MAX = 5
# How long a repeat waits for a turn of another worker that has its key and cannot be followed, and the first and the
# longest pause between two tries. Longer than a dead worker keeps its keys: its lease, and the next check of leases.
REPEAT_S_MAX = 20.0
# When the client may come again after that.
UNDECIDED_S = 2.0
REPEAT_PAUSE_S_MIN, REPEAT_PAUSE_S_MAX = 0.05, 0.5
# The same for an unstored turn, which cannot be followed from here: it may still be refused.
UNSTORED_S_MAX = 0.5


class Repeats:
    """The requests of this process that have idempotency keys."""

    def __init__(
        self,
        keys: IdempotencyKeys,
        log: EventLog,
        registry: TurnRegistry,
        tasks: set[asyncio.Task[None]],
        retry: Callable[[Callable[[], Awaitable[None]]], None],
    ) -> None:
        """`tasks`: what a stop of the process waits for; `retry` tries until the store can be reached."""
        self._keys = keys
        self._log = log
        self._registry = registry
        self._tasks = tasks
        self._retry = retry
        # Requests with a key that are not turns yet; set when that is settled.
        self._preparing: dict[str, asyncio.Event] = {}

    async def begin(
        self,
        arrival: Arrival,
        subscriber: Subscriber,
        start: Callable[[str], Awaitable[Running]],
    ) -> Running:
        """The turn that the key stands for already; or a new one, started under the id of the claim."""
        caller = arrival.caller
        claim = claim_of(arrival.create, caller.owner, self._registry.new_id())
        is_settled = self._preparing[claim.turn_id] = asyncio.Event()
        try:
            held = await self._claim_settled(claim)
            if held.turn_id != claim.turn_id:
                repeated = await self._repeat(held, claim, caller.turns, subscriber)
                if repeated is not None:
                    return repeated
            try:
                return await start(claim.turn_id)
            except BaseException:
                await asyncio.shield(self._release(claim))
                raise
        finally:
            if self._preparing.get(claim.turn_id) is is_settled:
                del self._preparing[claim.turn_id]
            is_settled.set()

    async def ended(self, plan: Plan, running: Running) -> None:
        """Keep the events for a repeat; a turn cancelled by its client or by a shutdown releases its key."""
        has_left = any(isinstance(notice, Cancel) for notice in running.inbox)
        is_drained = running.response.status == "failed" and any(
            isinstance(notice, Drain) for notice in running.inbox
        )
        if not is_drained and (running.is_background or not has_left):
            self._registry.keep_ended(running)
            return
        await self._release(Claim(plan.owner, plan.key, plan.id, b"", plan.is_stored))

    async def _release(self, claim: Claim) -> None:
        """Free the key; where the store cannot be reached now, soon."""
        try:
            await self._keys.release(claim)
        except ApiError:
            self._retry(partial(self._keys.release, claim))

    # --- claiming ---

    async def _claim_settled(self, claim: Claim) -> Claim:
        """The claim that holds the key, once that is settled: a request that is still being prepared may be refused,
        and then the key is free again."""
        for _ in range(CLAIMS_MAX):
            held = await self._claim(claim)
            is_settled = self._preparing.get(held.turn_id)
            if held.turn_id == claim.turn_id or is_settled is None:
                return held
            await is_settled.wait()
            if self._registry.find_any(held.turn_id) is not None:
                return held
        raise Unavailable("Too many concurrent requests use this idempotency key.")

    async def _claim(self, claim: Claim) -> Claim:
        """The claim that holds the key now. A client that leaves meanwhile must not keep the key."""
        claiming = asyncio.create_task(self._keys.claim(claim))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            is_settled = self._preparing[claim.turn_id] = asyncio.Event()
            spawn(self._unclaim(claiming, claim, is_settled), self._tasks)
            raise
        except ApiError:
            # The claim may have been written, though the answer was lost; nothing begins under its id.
            self._retry(partial(self._keys.release, claim))
            raise

    async def _unclaim(
        self, claiming: asyncio.Task[Claim], claim: Claim, is_settled: asyncio.Event
    ) -> None:
        try:
            if (await claiming).turn_id == claim.turn_id:
                await self._release(claim)
        except ApiError:
            self._retry(partial(self._keys.release, claim))
        finally:
            del self._preparing[claim.turn_id]
            is_settled.set()

    # --- repeating ---

    async def _repeat(
        self, held: Claim, claim: Claim, turns: Turns, subscriber: Subscriber
    ) -> Running | None:
        """The turn of this key, from its first event on; None if it was refused, and the key is ours."""
        if held.digest != claim.digest:
            raise Conflict(
                "This idempotency key was used for another request.",
                code="idempotency_key_reused",
                param="idempotency_key",
            )
        running = (
            self._registry.find_any(held.turn_id)
            or await self._replayed(held, turns)
            or await self._wait_for_other(held, claim, turns)
        )
        if running is None:
            return None
        if not running.attach(subscriber):
            async with self._registry.replaying:
                logged = await self._log.read_after(held.owner, held.turn_id, -1)
                if not logged or not running.attach_after(subscriber, logged):
                    raise _spent(held)
        return running

    async def _wait_for_other(self, held: Claim, claim: Claim, turns: Turns) -> Running | None:
        """The turn of a key that another worker holds, while it runs there or once it is over; None if that worker
        released the key, and it is ours."""
        loop = asyncio.get_running_loop()
        pause_s = REPEAT_PAUSE_S_MIN
        until = loop.time() + (REPEAT_S_MAX if held.is_stored else UNSTORED_S_MAX)
        others = self._registry.others
        while True:
            running = await self._reached(held, turns)
            if running is not None:
                return running
            if (await self._claim(claim)).turn_id == claim.turn_id:
                return None
            is_alone = others is None or not others.has_others
            if await _has_ended(held, turns) if held.is_stored else is_alone:
                raise _spent(held)
            if others is None or loop.time() > until:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, REPEAT_PAUSE_S_MAX)
        if not held.is_stored:
            raise _spent(held)
        message = "The process that runs the request with this idempotency key cannot be reached."
        raise Unavailable(message, wait_s=UNDECIDED_S)

    async def _reached(self, held: Claim, turns: Turns) -> Running | None:
        """A turn of another worker, as it runs there or from the store."""
        others = self._registry.others
        running = None
        if held.is_stored and others is not None:
            is_known = await turns.read(held.owner, held.turn_id) is not None
            running = await others.reach(held.owner, held.turn_id, is_known=is_known)
        return running or await self._replayed(held, turns)

    async def _replayed(self, held: Claim, turns: Turns) -> Running | None:
        """A turn that has ended, from the store and its event log."""
        turn = await turns.find(held.owner, held.turn_id)
        logged = await self._log.read_after(held.owner, held.turn_id, -1)
        if turn is None or not logged or not logged[-1].is_terminal:
            return None
        running = Running(held.owner, Assembler.over(turn.response), is_stored=True, turn=turn)
        running.publish(logged)
        return running


async def _has_ended(held: Claim, turns: Turns) -> bool:
    turn = await turns.read(held.owner, held.turn_id)
    return turn is not None and turn.response.status in ENDED


def claim_of(create: Create, owner: Owner, turn_id: str) -> Claim:
    """The claim of a request on its key; how the answer is transported is no part of the digest."""
    assert create.idempotency_key is not None
    meaning = structs.replace(
        create,
        type=UNSET,
        stream=None,
        stream_id=UNSET,
        stream_options=None,
        client_metadata=UNSET,
    )
    return Claim(
        owner=owner,
        key=create.idempotency_key,
        turn_id=turn_id,
        digest=blake2b(encode(meaning), digest_size=16).digest(),
        is_stored=create.store is not False,
    )


def _spent(held: Claim) -> Conflict:
    return Conflict(
        f"The request with this idempotency key became the response '{held.turn_id}', "
        "whose events are not available here.",
        code="idempotency_key_spent",
        param="idempotency_key",
    )
