"""How do the processes of a server reach each other?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
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


class OtherProcesses(Protocol):
    """The other processes that share the store, and what they are asked, by subject."""

    @property
    def others(self) -> Sequence[str]:
        """Their names."""

    @property
    def siblings(self) -> Sequence[str]:
        """Those of them that serve the same port."""

    def on_message(
        self, subject: str, call: Callable[[str, bytes], Awaitable[bytes | None]]
    ) -> None:
        """From now on `call` handles questions and messages about this subject."""

    def when_gone(self, call: Callable[[str], None]) -> None:
        """From now on `call` is called with each process that is gone."""

    async def send(self, subject: str, body: bytes) -> None:
        """Send a message that needs no answer to all of them."""

    async def ask(self, subject: str, body: bytes, of: Collection[str]) -> Mapping[str, bytes]:
        """The answers of these processes, by name."""

    async def find(
        self, subject: str, body: bytes, of: Collection[str]
    ) -> tuple[str, bytes] | None:
        """The first of these processes that has an answer, and the answer."""
