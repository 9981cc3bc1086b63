"""Turns that are over, made by hand."""

from segue.process.afterwards import MARKS, EndedTurn
from segue.responses.websocket import SessionStatus
from segue.seams.history import UsageEntry
from segue.turn.plan import Receipt, Span, Tally


def settled(
    turn_id: str = "resp_1",
    owner: str = "anna",
    *,
    parent: str | None = None,
    lane: str = "",
    status: str = "completed",
    marks: dict[str, float] | None = None,
) -> EndedTurn:
    """A turn of ten tokens, eight of them reused."""
    entry = UsageEntry(
        turn_id=turn_id,
        owner=owner,
        model="scripted",
        status=status,
        input_tokens=10,
        cached_tokens=0,
        output_tokens=5,
        ended_at=0,
    )
    marks = marks or {}
    tally = Tally(tokens_tokenized=2, tokens_reused=8)
    receipt = Receipt("websocket", received_at=marks.get("received", 0.0))
    tally.spans += [
        Span(stage, marks[name], marks[name]) for name, stage in MARKS.items() if name in marks
    ]
    return EndedTurn(entry, tally, receipt, parent_id=parent, lane=lane)


def glance(number: int, owner: str = "anna", running: int = 0) -> SessionStatus:
    return SessionStatus(
        key=str(number),
        owner=owner,
        opened_at=float(number),
        lanes=2,
        running=running,
        waiting=1,
        turns=number,
        state_bytes=100,
    )
