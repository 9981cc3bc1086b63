"""How do the events of a turn look to a client of the echo API? Each event in, its own events out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from segue.wire.events import Event


class Heard(Struct, frozen=True):
    """What is read of a delta."""

    delta: str


_read = msgspec.json.Decoder(Heard).decode


class EchoWriter:
    """Writes the events of one turn: a sound for each delta, then the end. Nothing is written before the first sound,
    so that a turn that fails before it is answered with a status."""

    def __init__(self) -> None:
        self._sounds = 0

    def write(self, events: Sequence[Event]) -> list[bytes]:
        written: list[bytes] = []
        for event in events:
            if event.type == "response.output_text.delta":
                self._sounds += 1
                written.append(_frame("sound", {"text": _read(event.data).delta}))
            elif event.is_terminal and self._sounds:
                ending = event.type.removeprefix("response.")
                written.append(_frame("silence", {"ending": ending, "sounds": self._sounds}))
        return written


def _frame(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
