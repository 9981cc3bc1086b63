"""Where does a client's own stop string end the answer?

A reader around the dialect's reader. The text of a message is held back as far as it may become one of the strings; at
the first of them the message ends before it, and what the model says behind it is neither shown nor kept. Thoughts and
calls are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from segue.turn.seams import Reader
from segue.turn.values import ItemClosed, ItemOpened, ItemText, Parsed, Piece, TurnClosed
from segue.wire.items import Logprob


class StopReader:
    """A `Reader` that ends at these strings."""

    def __init__(self, reader: Reader, stops: Sequence[str]) -> None:
        self._reader = reader
        self._stops = stops
        self._is_text = False
        self._held = ""
        self._logprobs: tuple[Logprob, ...] = ()
        # Whether one of the strings was met.
        self.has_stopped = False

    @property
    def is_over(self) -> bool:
        """Whether the model may say no more."""
        return self.has_stopped or self._reader.is_over

    def feed(self, piece: Piece) -> list[Parsed]:
        """What has become certain, and cannot become a stop."""
        return self._sift(self._reader.feed(piece))

    def close(self, *, is_cut: bool) -> list[Parsed]:
        """As the dialect closes it; an answer that met its stop is whole."""
        return self._sift(self._reader.close(is_cut=is_cut and not self.has_stopped))

    def _sift(self, parsed: list[Parsed]) -> list[Parsed]:
        found: list[Parsed] = []
        for one in parsed:
            match one:
                case ItemOpened() if not self.has_stopped:
                    self._is_text = one.kind == "message"
                    found.append(one)
                case ItemText() if self._is_text and not self.has_stopped:
                    found += self._write(one)
                case ItemText() if not self.has_stopped:
                    found.append(one)
                case ItemClosed() if self._is_text or not self.has_stopped:
                    # The message that met its stop is closed once; what comes behind it is dropped.
                    found += self._let_go() if self._is_text and not self.has_stopped else ()
                    found.append(ItemClosed(one.ids, one.is_cut and not self.has_stopped))
                    self._is_text = False
                case TurnClosed():
                    found.append(one)
                case _:
                    pass
        return found

    def _write(self, wrote: ItemText) -> list[Parsed]:
        text = self._held + wrote.text
        self._logprobs += wrote.logprobs
        # The first to be whole, in whatever pieces they come; of two that end together the longer.
        met = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if met:
            self.has_stopped = True
            return self._parsed(text[: min(met)[1]])
        held = max(_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return self._parsed(text[: len(text) - held])

    def _let_go(self) -> list[Parsed]:
        held, self._held = self._held, ""
        return self._parsed(held)

    def _parsed(self, text: str) -> list[Parsed]:
        """This text, with the odds of the tokens that begin in it."""
        if not text:
            return []
        size = count = 0
        while count < len(self._logprobs) and size < len(text):
            size += len(self._logprobs[count].token)
            count += 1
        told, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        return [ItemText(text, told)]


def _begun(text: str, stop: str) -> int:
    """How much of this string stands at the end."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
