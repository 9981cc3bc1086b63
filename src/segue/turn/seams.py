"""Every way the product may vary, on one page.

A seam is a protocol with a few domain verbs. Each has one contract suite in `tests/contracts/` that every
implementation passes. Only the builders (`app.py`, `builders/`, `models.py`, `storage.py`) name an implementation.
"""

from __future__ import annotations

from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    pass


class OtherProcesses(Protocol):
    """The other processes that share the store, and questions to them, by subject."""

    @property
    def others(self) -> Sequence[str]:
        """Their names."""

    def answer(self, subject: str, call: Callable[[str, bytes], Awaitable[bytes | None]]) -> None:
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
