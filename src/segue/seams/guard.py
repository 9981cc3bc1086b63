"""May this pass? `Guard` and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class Verdict(Struct, frozen=True):
    """What a guard says. `reason` is why it blocks, in a word or two and never in those of the text; None: it does
    not."""

    reason: str | None = None


PASSED = Verdict()


class Guard(Protocol):
    """Whether something may pass. A guard keeps nothing of what it is shown; if it cannot say, it raises."""

    @property
    def name(self) -> str:
        """Names the guard and its rules; a verdict that is kept holds only under the same one."""

    async def check(self, texts: Sequence[str]) -> Verdict:
        """Whether the model may be given these; asked beside rendering and sampling."""

    async def watch(self, text: str) -> Verdict:
        """Whether this may be sent to the client: a window of an answer, and a little of what came before it."""
