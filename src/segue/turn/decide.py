"""After a round: does the turn go on, wait, or end? Pure.

What became of the round and what arrived in the inbox go in; a decision comes out. A cancel by the client
outweighs a guard, a guard outweighs a shutdown, and all of them outweigh what the model still wanted to say.

    the round ended     and                              the turn
    any way             the client has left              ends, cancelled
    any way             the input was blocked            ends, failed: invalid_prompt
    any way             it ran in the background for     ends, failed: background_timeout
                        too long
    any way             the process goes away            ends, failed
    any way             the answer was blocked           ends, incomplete: content_filter
    by the engine's own content filter                   ends, incomplete: content_filter
    broken off          a steer waits                    ends, incomplete: steered
    broken off          nothing explains it              ends, failed
    at its length                                        ends, incomplete: max_output_tokens
    by itself           our tools answered, a steer      ends, incomplete: steered
                        waits
    by itself           tools were called, and the       ends, incomplete: max_output_tokens
                        answer has used up its tokens
    by itself           only our own tools were called   goes on with what they answered
    by itself           a rollout owes calls             goes on with what was appended, or waits for it
    by itself                                            ends, completed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from segue.errors import ApiError, EngineFailed, ServerFault
from segue.seams.model import Finish
from segue.turn.notices import Abort, Append, Cancel, Drain, Filtered, Notice, Steer
from segue.wire.items import Item


class Again(Struct, frozen=True):
    """Another round, given these."""

    items: tuple[Item, ...]


class Await(Struct, frozen=True):
    """Nothing to do until something arrives in the inbox."""


class End(Struct, frozen=True):
    """How a turn ends, and why where that needs saying."""

    status: Literal["completed", "incomplete", "failed", "cancelled"]
    reason: Literal["max_output_tokens", "steered", "content_filter"] | None = None
    error: ApiError | None = None


Decision = Again | Await | End


def decide(
    finish: Finish | None,
    inbox: Sequence[Notice],
    *,
    is_waiting: bool = False,
    answers: tuple[Item, ...] = (),
    is_used_up: bool = False,
) -> Decision:
    """What follows a round, from the engine's last word and the inbox.

    `is_waiting`: a rollout waits for outputs. `answers`: hosted tools have answered, and no other output is awaited.
    `is_used_up`: the client's limit of tokens leaves none for another round.
    """
    if any(isinstance(notice, Cancel) for notice in inbox):
        return End("cancelled")
    abort = next((notice for notice in inbox if isinstance(notice, Abort)), None)
    if abort is not None:
        return End("failed", error=abort.error)
    if any(isinstance(notice, Drain) for notice in inbox):
        return End("failed", error=ServerFault("The server is shutting down. Please retry."))
    is_filtered = any(isinstance(notice, Filtered) for notice in inbox)
    if is_filtered or (finish is not None and finish.reason == "content_filter"):
        return End("incomplete", reason="content_filter")
    if finish is None and any(isinstance(notice, Steer) for notice in inbox):
        return End("incomplete", reason="steered")
    if finish is None:
        error = EngineFailed("The engine broke off in the middle of a response.")
        return End("failed", error=error)
    if finish.reason == "length":
        return End("incomplete", reason="max_output_tokens")
    if answers and any(isinstance(notice, Steer) for notice in inbox):
        return End("incomplete", reason="steered")
    if is_used_up and (answers or is_waiting):
        return End("incomplete", reason="max_output_tokens")
    if answers:
        return Again(answers)
    if not is_waiting:
        return End("completed")
    appended = next((notice for notice in inbox if isinstance(notice, Append)), None)
    return Await() if appended is None else Again(appended.items)
