"""How does work run beside a block of code, or beside the event loop?

A background loop has a name and runs until it is cancelled. What it raises is logged at once under that name and
counted in `failures`; then the loop is started again, after a pause that grows. Without a loop that is vital a process
cannot go on: where it raises, `give_up` is called, which is to end the process; until then that loop is retried too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Loop = Callable[[], Awaitable[None]]
GiveUp = Callable[[], None]

# The pause before a loop is started again: short after its first failure, long where it fails every time.
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 60.0
# A loop that ran for longer than the longest pause works again: its next pause is short.
RAN_WELL_S = 120.0

# How often each background loop of this process has failed, by name; 0 for one that never did.
failures: Counter[str] = Counter()


async def run_forever(
    name: str,
    loop: Loop,
    give_up: GiveUp | None = None,
    *,
    clock: Callable[[], float] | None = None,
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Run this loop until it returns or this task is cancelled, whatever it raises."""
    clock = clock or asyncio.get_running_loop().time
    failures[name] += 0
    pause_s = PAUSE_S_MIN
    while True:
        began_at = clock()
        try:
            return await loop()
        except (Exception, asyncio.CancelledError) as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                if isinstance(error, asyncio.CancelledError):
                    raise
                log.exception("background loop %s failed while it was stopped", name)
                return
            # Here a cancel is of something that the loop awaited: an error as any other.
            failures[name] += 1
            if clock() - began_at > RAN_WELL_S:
                pause_s = PAUSE_S_MIN
            if give_up is None:
                log.exception("background loop %s failed; starting it again in %g s", name, pause_s)
            else:
                text = "background loop %s failed; this process cannot go on without it and stops"
                log.critical(text, name, exc_info=True)
                give_up()
        await wait(pause_s)
        pause_s = min(PAUSE_S_MAX, 2 * pause_s)


@asynccontextmanager
async def in_background(
    name: str, loop: Loop, give_up: GiveUp | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """Run this loop as `run_forever` does while inside; cancel it and wait for it on the way out."""
    task = asyncio.create_task(run_forever(name, loop, give_up))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def spawn(work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]]) -> None:
    """Run this as a task of its own, which is in `tasks` until it is done: what it raises ends no other task, and is
    logged at once."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(partial(_done, tasks))


def _done(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        name = getattr(task.get_coro(), "__qualname__", task.get_name())
        log.error("background task %s failed", name, exc_info=error)


async def cancel_all(tasks: Collection[asyncio.Future[T]]) -> None:
    """Cancel these tasks and wait for them."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)


async def off_loop(is_long: bool, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a pure function: here, or in a thread if it takes long, so that the loop goes on meanwhile."""
    return await asyncio.to_thread(call, *args, **kwargs) if is_long else call(*args, **kwargs)
