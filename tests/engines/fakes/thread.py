"""Runs a FAKE engine in a thread with a loop of its own, so that tasks of the test's loop are only our own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.engines.fakes.server import Fake

WAIT_S = 10


@contextmanager
def remote(make: Callable[[], Fake]) -> Iterator[Fake]:
    """The fake, listening, in its own thread; made there, because its events belong to that loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> Fake:
        fake = make()
        await fake.start()
        return fake

    fake = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_S)
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(fake.stop(), loop).result(WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()
