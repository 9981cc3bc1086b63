"""How do the processes of a server reach each other?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

# Called with the body of a message. Must not wait.
Hear = Callable[[bytes], None]


class Bus(Protocol):
    """Messages between workers. Nothing is kept: a worker that is not connected misses them."""

    async def publish(self, topic: str, body: bytes) -> None:
        """Send to all subscribers of this topic, this process included; `Unavailable` if the bus is away."""

    def subscribe(self, topic: str, hear: Hear) -> AbstractAsyncContextManager[None]:
        """While inside, every message of this topic is delivered; those of one worker in their order."""
