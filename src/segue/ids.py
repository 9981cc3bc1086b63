"""How do ids look, and which request is served? A prefix for the kind, and mostly 128 random bits.

Of a turn's id 32 bits are the time in seconds, so that turns of one hour are neighbours in the index of a store, which
need not be in memory as a whole. Where there are several workers, the 32 bits before it are the tag of the worker that
begins the turn, so that the others know whom to ask.

The id of an item that we made contains the id of its turn, so that a reference to it can be followed without an index.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from itertools import count
from secrets import token_hex

# Enough to tell thousands of workers apart; with the time, 64 bits are left that cannot be guessed.
TAG_CHARS = 8

# The id of the request that the running task serves, for log lines; set only by the task of a request, and inherited by
# the tasks that it starts.
current_request: ContextVar[str] = ContextVar("current_request", default="")

# A turn has one number, and a prefix for each API. By the first word of a transport, such as "messages_sse".
TURN_PREFIXES = {"messages": "msg_", "chat": "chatcmpl-"}
_TURN = re.compile(r"(?:resp_|msg_|chatcmpl-)(?P<number>[0-9a-f]{32})\Z")
_OF_TURN = re.compile(r"[a-z]+_(?P<turn>[0-9a-f]{32})_?[0-9a-f]+\Z")


def new_id(prefix: str) -> str:
    """A fresh id such as `resp_0f3a…`, with 128 random bits."""
    return f"{prefix}_{token_hex(16)}"


def new_turn_id(home: str = "") -> str:
    """A fresh id for a turn; `home`: the tag of this worker, where there are others."""
    return f"resp_{home}{int(time.time()):08x}{token_hex(12 - len(home) // 2)}"


def turn_id_of(any_id: str) -> str:
    """The id of a turn, whichever API has spelled it; what is no id of a turn stays as it is."""
    match = _TURN.match(any_id)
    return f"resp_{match['number']}" if match else any_id


def shown_id(turn_id: str, transport: str) -> str:
    """The id of a turn as clients of this transport read it."""
    prefix = TURN_PREFIXES.get(transport.partition("_")[0])
    return turn_id if prefix is None else prefix + turn_id.removeprefix("resp_")


def tag_of(any_id: str) -> str:
    """The tag of a worker, or of the worker that began a turn."""
    return any_id.partition("_")[2][:TAG_CHARS]


def item_ids(turn_id: str) -> Callable[[str], str]:
    """A function that makes ids for the items of one turn: the turn's own bits and a number."""
    turn, numbers = turn_id.partition("_")[2], count()
    return lambda prefix: f"{prefix}_{turn}{next(numbers):04x}"


def given_id(turn_id: str, index: int) -> str:
    """The id of an input item that came without an id: always the same for this item of this turn."""
    return f"item_{turn_id.partition('_')[2]}_{index:x}"


def turn_of(item_id: str) -> str | None:
    """The id of the turn that an item belongs to, if the item's id contains it."""
    match = _OF_TURN.match(item_id)
    return f"resp_{match['turn']}" if match else None
