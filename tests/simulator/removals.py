"""What does the simulator find when a fix is taken out? Each removal is a switch, by the name of the fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from segue.process.registry import TurnRegistry

follow = TurnRegistry.follow


async def _follow_without_end(
    self: TurnRegistry, owner: str, turn_id: str, subscriber: Any, after: int, ended: Any = None
) -> bool:
    return await follow(self, owner, turn_id, subscriber, after, None)


def _terminal_on_resume(stack: ExitStack) -> None:
    """Finding 8: a stream that is resumed behind the end of the log ends without a terminal event."""
    stack.enter_context(patch.object(TurnRegistry, "follow", _follow_without_end))


REMOVALS: Mapping[str, Any] = {
    "terminal-on-resume": _terminal_on_resume,
}


@contextmanager
def without(name: str | None) -> Iterator[None]:
    """While inside, this fix is not there."""
    with ExitStack() as stack:
        if name is not None:
            REMOVALS[name](stack)
        yield
