"""How does a client get the events that it has missed? Pure.

It asks for those after a number. A turn whose ring still has them sends them itself; this table is for what is left: a
turn that has gone further, that runs elsewhere, or that is over.

    the turn            the log has after it   the stored response    the client gets
    runs nowhere        anything               has not ended          an error: its process cannot be reached
    has sent less than  the log has            anything               the same: its process is not up to date
    runs nowhere        (nothing was logged)   failed in the          its end, with the next number: its process died
                                               background             before it had logged anything
    any                 (nothing was logged)   anything else          a refusal: the events are not kept
    runs                some                   anything               them, and then those still to come
    runs                none                   anything               a refusal: the turn has not come that far
    runs nowhere        some, without the end  anything               a refusal: the rest is not kept
    runs nowhere        some, with the end     anything               them
    runs nowhere        none                   has ended              its end, if the client has not had that
    runs nowhere        none                   is not known           nothing: it has had all
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from segue.wire.codec import terminal_event
from segue.wire.events import Event
from segue.wire.response import ENDED, Response

Replay = Literal["unreachable", "not_kept", "logged_then_live", "logged", "end"]


def decide_replay(
    last: int | None, logged: Sequence[Event] | None, stored: Response | None
) -> Replay:
    """What a client gets that has missed events. `last`: the number of the last event of a turn that runs. `logged`:
    those that it has missed; None where nothing was ever logged. `stored`: the response, where the turn is not here."""
    if last is None and goes_on(stored):
        return "unreachable"
    if last is not None and logged and last < logged[-1].number:
        return "unreachable"
    if logged is None:
        has_died = stored is not None and stored.background and stored.status == "failed"
        return "end" if has_died and last is None else "not_kept"
    if last is not None:
        return "logged_then_live" if logged else "not_kept"
    if logged:
        return "logged" if logged[-1].is_terminal else "not_kept"
    return "logged" if stored is None else "end"


def goes_on(stored: Response | None) -> bool:
    """Whether the store knows this response, and not how it ended."""
    return stored is not None and stored.status not in ENDED


def end_after(before: Sequence[Event] | None, stored: Response, number: int) -> list[Event]:
    """The terminal event with this number, if it is not among those that the client has had. What a dead process left
    ends in the log with a number that its clients may have for another event."""
    has_end = before and before[-1].is_terminal and stored.status != "failed"
    return [] if has_end else [terminal_event(stored, number)]
