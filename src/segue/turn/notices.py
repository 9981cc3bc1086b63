"""What may come to a turn while it runs? Values for its inbox."""

from __future__ import annotations

from msgspec import Raw, Struct

from segue.errors import ApiError
from segue.wire.items import Item


class Cancel(Struct, frozen=True):
    """The client has left or has asked us to stop."""


class Drain(Struct, frozen=True):
    """The process is going away and its grace is over."""


class Steer(Struct, frozen=True):
    """The client wants the answer to go another way; it waits for a safe boundary (docs/protocol.md 6.10)."""

    id: str
    input: Raw
    items: tuple[Item, ...]


class Append(Struct, frozen=True):
    """What a waiting rollout was asked for, already paired with its calls, and what that holds in memory."""

    items: tuple[Item, ...]
    bytes: int = 0


class Abort(Struct, frozen=True):
    """The turn ends as failed with this error: a guard blocks its input, no guard could be asked, or it ran for too
    long. What was held never leaves."""

    error: ApiError


class Filtered(Struct, frozen=True):
    """A guard does not let the rest of the answer pass."""


Notice = Cancel | Drain | Steer | Append | Abort | Filtered
