"""What does the simulator find when a fix is taken out?

Each removal is a switch, by the name of the fix: it patches the real code, or lets the model of the database forget a
rule of its statements. Its emphasis says where to look: what is rare in all seeds is then found in a few.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import segue.server.app
import segue.stores.postgres
from segue.aio import in_background
from segue.errors import ApiError, Unavailable
from segue.limits import Draw, Grant, HeldPlaces, Level, share_out
from segue.process import idempotency, patient_save
from segue.process.registry import TurnRegistry
from segue.seams.history import Turn
from segue.seams.store import Claim
from segue.stores.maintenance import BEAT_S
from segue.turn.loop import Save
from tests.simulator import checks
from tests.simulator.database import Database, Session, Transaction
from tests.simulator.network import Connection
from tests.simulator.seed import EVERYTHING, NETWORKS, Emphasis
from tests.simulator.statements import STATEMENTS, touched


@dataclass(frozen=True)
class Removal:
    """A fix that can be taken out, what then goes wrong, and where to look for that."""

    what: str
    take_out: Callable[[ExitStack], None]
    emphasis: Emphasis


# --- recovery and leases ---


def _lease_task(stack: ExitStack) -> None:
    stack.enter_context(patch.object(segue.server.app, "maintained", _maintained_in_turn))
    stack.enter_context(patch.object(segue.stores.postgres, "BATCH", 1))
    # That it takes long is not what is looked for.
    stack.enter_context(patch.object(checks, "FREE_S", 90.0))


@asynccontextmanager
async def _maintained_in_turn(
    maintenance: Any, retention: Any, on_erased: Any, on_fenced: Callable[[], object], give_up: Any
) -> AsyncIterator[None]:
    """Heartbeat and recovery one after the other, and turn by turn."""

    async def keep() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                if not await maintenance.beat():
                    on_fenced()
                await maintenance.recover()
            except ApiError:
                continue

    async with in_background("lease_heartbeat", keep, give_up):
        yield


# --- fencing ---


def _fencing(stack: ExitStack) -> None:
    stack.enter_context(patch.object(Database, "fences", False))


def _fenced_usage(stack: ExitStack) -> None:
    stack.enter_context(patch.dict(STATEMENTS, settle=_settle_once))


def _settle_once(t: Transaction, *values: Any) -> object:
    """What was entered for a process that seemed dead stays."""
    from tests.simulator.statements import put_usage

    put_usage(t, values)
    return touched(1)


def _end_waits(stack: ExitStack) -> None:
    async def save_or_be_fenced(save: Save, read: object, turn: Turn) -> None:
        await save(turn)

    stack.enter_context(patch.object(patient_save, "_save", save_or_be_fenced))
    # Turn by turn, so that there is time to see it.
    stack.enter_context(patch.object(segue.stores.postgres, "BATCH", 1))


# --- streams ---


def _terminal_on_resume(stack: ExitStack) -> None:
    follow = TurnRegistry.follow

    async def follow_to_the_log(self: TurnRegistry, *given: Any) -> bool:
        return await follow(self, *given[:4], None)

    stack.enter_context(patch.object(TurnRegistry, "follow", follow_to_the_log))


# --- idempotency keys ---


def _repeat_waits(stack: ExitStack) -> None:
    wait = idempotency.Repeats._wait_for_other

    async def wait_for_less(self: idempotency.Repeats, held: Claim, *given: Any) -> Any:
        """Not as long as a lease lasts, and then the key counts as spent."""
        try:
            return await wait(self, held, *given)
        except Unavailable:
            raise idempotency._spent(held) from None

    stack.enter_context(patch.object(idempotency, "REPEAT_S_MAX", BEAT_S))
    stack.enter_context(patch.object(idempotency.Repeats, "_wait_for_other", wait_for_less))


# --- limits ---


def _draw_timeout(stack: ExitStack) -> None:
    stack.enter_context(patch.object(segue.stores.postgres, "_draw", _draw_with_lock))
    stack.enter_context(patch.object(Session, "seconds", lambda self, setting: 0.0))
    stack.enter_context(patch.dict(STATEMENTS, begin_draw=_begin_draw))


def _begin_draw(t: Transaction, key_id: str) -> object:
    return [] if t.lock("meters", key_id) is None else [(1,)]


async def _draw_with_lock(connection: Connection, *, draw: Draw, worker: str) -> Grant:
    """In a transaction of several round trips, with the key's row locked."""
    async with connection.transaction():
        await connection._ask("begin_draw", draw.key_id)
        ((now, version, *held, requests, tokens, at),) = await connection._ask(
            "level", draw.key_id, worker
        )
        level = None if requests is None else Level(requests, tokens, at)
        left, grant = share_out(draw, level, HeldPlaces(*held), now)
        places = (grant.held.connections, grant.held.lanes)
        row = (left.requests, left.tokens, left.at, version, worker, *places)
        await connection._ask("save_level", draw.key_id, *row)
    return grant


def _session_timeouts(stack: ExitStack) -> None:
    stack.enter_context(patch.object(Session, "seconds", lambda self, setting: 0.0))


FAR = NETWORKS[-1:]
LONG = (20.0, 24.0)
REMOVALS: Mapping[str, Removal] = {
    "lease-task": Removal(
        "a healthy process is taken for dead while it ends the turns of another",
        _lease_task,
        Emphasis(processes=(3,), networks=FAR, faults=("kill",), fault_counts=(1,), crowd=1.0),
    ),
    "fencing": Removal(
        "a process that stood still ends a turn again, otherwise than announced",
        _fencing,
        Emphasis(
            stories=("background", "followed", "conversation"), faults=("pause", "cut store"),
            fault_counts=(2,), fault_lengths=LONG,
        ),
    ),
    "fenced-usage": Removal(
        "what a process that stood still has sampled is never counted",
        _fenced_usage,
        Emphasis(stories=("background",), faults=("pause",), fault_counts=(2,), fault_lengths=LONG),
    ),
    "end-waits": Removal(
        "a client hears that a response has failed, and others say for a while that it runs",
        _end_waits,
        Emphasis(
            processes=(2,), networks=FAR, stories=("followed",), story_counts=(30, 40),
            faults=("pause", "cut all"), fault_counts=(1,), fault_lengths=(22.0, 24.0),
        ),
    ),
    "terminal-on-resume": Removal(
        "a stream resumed after a crash ends without a terminal event",
        _terminal_on_resume,
        Emphasis(stories=("followed",), faults=("kill", "vanish"), fault_counts=(1, 2)),
    ),
    "repeat-waits": Removal(
        "a repeat right after a crash is told of a response that does not exist",
        _repeat_waits,
        Emphasis(stories=("plain",), faults=("kill",), fault_counts=(1, 2), keyed=1.0),
    ),
    "draw-timeout": Removal(
        "a machine that vanishes in the middle of a draw keeps a key locked",
        _draw_timeout,
        Emphasis(networks=FAR, stories=("plain",), faults=("vanish",), fault_counts=(2,), limited=1.0),
    ),
    "session-timeouts": Removal(
        "a machine that vanishes in the middle of a transaction keeps rows locked",
        _session_timeouts,
        Emphasis(
            processes=(4,), networks=FAR, stories=("conversation",), story_counts=(12, 16),
            faults=("vanish",), fault_counts=(3,),
        ),
    ),
}  # fmt: skip


@contextmanager
def without(name: str | None) -> Iterator[Emphasis]:
    """While inside, this fix is not there; where to look."""
    with ExitStack() as stack:
        if name is None:
            yield EVERYTHING
        else:
            REMOVALS[name].take_out(stack)
            yield REMOVALS[name].emphasis
