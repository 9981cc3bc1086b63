"""After a round: how does the turn end? Pure.

What the engine said last and what arrived in the inbox go in; an `End` comes out. The client's leaving is stronger than
our own leaving, and both are stronger than anything the model still wanted to say.
"""

from __future__ import annotations

from typing import Literal, assert_never

from msgspec import Struct

from segue.errors import ApiError, EngineFailed, ServerFault
from segue.turn.values import Cancel, Drain, Finish, Notice


class End(Struct, frozen=True):
    """How a turn ends, and why where that needs saying."""

    status: Literal["completed", "incomplete", "failed", "cancelled"]
    reason: Literal["max_output_tokens"] | None = None
    error: ApiError | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the model was stopped in the middle of something."""
        return self.status != "completed"


def decide(finish: Finish | None, notice: Notice | None) -> End:
    """The end of the turn, from the engine's last word and the inbox's."""
    match notice:
        case Cancel():
            return End("cancelled")
        case Drain():
            return End("failed", error=ServerFault("The server is shutting down. Please retry."))
        case None:
            pass
        case _:
            assert_never(notice)
    if finish is None:
        return End(
            "failed", error=EngineFailed("The engine broke off in the middle of a response.")
        )
    if finish.reason == "length":
        return End("incomplete", reason="max_output_tokens")
    return End("completed")
