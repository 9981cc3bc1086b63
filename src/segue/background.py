"""How does work run beside a block of code, or beside the event loop?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@asynccontextmanager
async def in_background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run this as a task while inside; cancel it and wait for it on the way out."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def off_loop(is_long: bool, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a pure function: here, or in a thread if it takes long, so that the loop goes on meanwhile."""
    return await asyncio.to_thread(call, *args, **kwargs) if is_long else call(*args, **kwargs)
