"""What time is it, and who runs next?

A `World` has a clock that jumps to the next timer, so nothing ever waits. Every simulated process has an event loop of
its own on this clock, which can be paused (its timers and callbacks wait, as after SIGSTOP) or killed (they are gone).
Everything that is random comes from the seed.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any
from unittest.mock import patch

import segue.ids
from segue.accounts.quota import KeyQuota
from segue.cluster.idempotency import SharedIdempotencyKeys
from segue.errors import Fenced, Unavailable

# When the world begins, in seconds since 1970.
EPOCH = 1_800_000_000.0
# Callbacks in one instant: more means that a loop spins without waiting.
INSTANT_MAX = 300_000
# How often a task is cancelled that does something else first.
CLOSINGS_MAX, CLOSING_S = 5, 100.0


class World:
    """The clock, and what is due on it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.loops: list[ProcessLoop] = []
        # What happened, for people: the time and a sentence.
        self.trace: list[tuple[float, str]] = []
        # What must never happen; the first one fails the seed.
        self.broken: list[str] = []
        # What is due: a callback of a process, or a function and its arguments that belong to none.
        self._ready: deque[tuple[ProcessLoop | None, Any]] = deque()
        self._timers: list[tuple[float, int, ProcessLoop | None, Any]] = []
        self._count = 0
        self.is_closing = False

    def note(self, words: str) -> None:
        self.trace.append((self.now, words))

    def fail(self, words: str) -> None:
        if self.is_closing:
            return
        self.broken.append(words)
        self.note(f"BROKEN: {words}")

    def wall(self) -> float:
        """The time of day."""
        return EPOCH + self.now

    def at(self, when: float, call: Callable[..., object], *values: object) -> None:
        """Call this at that time, outside of all processes."""
        self._count += 1
        heapq.heappush(self._timers, (max(when, self.now), self._count, None, (call, values)))

    def after(self, pause_s: float, call: Callable[..., object], *values: object) -> None:
        self.at(self.now + pause_s, call, *values)

    def put(self, loop: ProcessLoop, handle: asyncio.Handle) -> None:
        self._ready.append((loop, handle))

    def put_timer(self, when: float, loop: ProcessLoop, handle: asyncio.Handle) -> None:
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, loop, handle))

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen that is due up to then, or until it is over."""
        while True:
            self._run_ready()
            if is_over() or (self.broken and not self.is_closing):
                return
            if not self._timers or self._timers[0][0] > until:
                self.now = max(self.now, until)
                return
            self.now = max(self.now, self._timers[0][0])
            while self._timers and self._timers[0][0] <= self.now:
                self._ready.append(heapq.heappop(self._timers)[2:])

    def _run_ready(self) -> None:
        ready, current = self._ready, None
        try:
            for _ in range(INSTANT_MAX):
                if not ready:
                    return
                loop, handle = ready.popleft()
                if loop is None:
                    handle[0](*handle[1])
                elif handle._cancelled:
                    continue
                elif loop.is_paused or loop.is_dead:
                    loop.held.append(handle)
                else:
                    if loop is not current:
                        current = loop
                        asyncio._set_running_loop(loop)
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        raise RuntimeError("a process spins without ever waiting")

    def close(self) -> None:
        """End every task, so that nothing of this world is left for the next."""
        self.is_closing = True
        self._timers = [timer for timer in self._timers if timer[2] is not None]
        heapq.heapify(self._timers)
        for loop in self.loops:
            loop.is_dead = False
            loop.resume()
        for _ in range(CLOSINGS_MAX):
            left = [task for loop in self.loops for task in loop.tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.run(self.now + CLOSING_S)
        for loop in self.loops:
            for task in loop.tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.tasks.clear()


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_paused = self.is_dead = False
        # What has become due while the process was paused, or dead.
        self.held: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        world.loops.append(self)

    def resume(self) -> None:
        self.is_paused = False
        for handle in self.held:
            self.world.put(self, handle)
        self.held = []

    # --- what asyncio asks of a loop ---

    def time(self) -> float:
        return self.world.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.world.put(self, handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.put_timer(when, self, handle)
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.world.now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        return task

    def mind(self, task: asyncio.Task[Any]) -> None:
        """This task must not fail."""
        task.add_done_callback(self._look_at)

    def _look_at(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            frames = traceback.format_tb(error.__traceback__)
            cause = f" from {error.__cause__!r}" if error.__cause__ else ""
            self.world.fail(f"{self.name}: {error!r}{cause} {frames[-1]}")

    def run_in_executor(self, executor: object, call: Callable[..., Any], *args: Any) -> Any:
        """A thread of the model works in no time."""
        done = self.create_future()
        try:
            done.set_result(call(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The world skips it when it is due."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_dead and "never retrieved" not in context["message"]:
            self.world.fail(f"{self.name}: {context['message']}: {context.get('exception')!r}")


# What a process may log as an error while its store or its peers are away.
EXPECTED_ERRORS = (
    "the store could not be maintained",
    "the heartbeat could not be written",
    "could not write the events of turn",
    "could not record the usage of",
    "API keys could not be confirmed",
    "old rows could not be deleted",
)


class _Errors(logging.Handler):
    """An error that nobody expects fails the seed."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        is_expected = isinstance(error, Unavailable | Fenced)
        if not is_expected and not str(record.msg).startswith(EXPECTED_ERRORS):
            self._world.fail(f"logged: {record.getMessage()}: {error!r}")


@contextmanager
def ruling(world: World) -> Iterator[None]:
    """While inside, all that asks for time or chance asks this world, and what is logged as an error is looked at."""
    dice = random.Random(world.random.random())
    logger, errors = logging.getLogger("segue"), _Errors(world)
    before = (logger.level, logger.propagate)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.addHandler(errors)
    by_default = {
        KeyQuota.__init__: world_clock(world),
        SharedIdempotencyKeys.__init__: world.wall,
    }
    kept = {function: function.__defaults__ or () for function in by_default}
    for function, clock in by_default.items():
        places = [default in (time.time, time.monotonic) for default in kept[function]]
        assert sum(places) == 1, f"{function.__qualname__} has no clock that could be taken over"
        function.__defaults__ = tuple(
            clock if is_clock else default
            for default, is_clock in zip(kept[function], places, strict=True)
        )
    chance = random.getstate()
    random.seed(world.random.random())
    try:
        with (
            patch.object(time, "time", world.wall),
            patch.object(time, "monotonic", world_clock(world)),
            patch.object(segue.ids, "token_hex", lambda size: dice.randbytes(size).hex()),
        ):
            yield
    finally:
        random.setstate(chance)
        for function, defaults in kept.items():
            function.__defaults__ = defaults
        logger.removeHandler(errors)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def world_clock(world: World) -> Callable[[], float]:
    return lambda: world.now + 1_000.0
