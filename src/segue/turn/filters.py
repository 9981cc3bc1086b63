"""What stands between the reader and the client? Filters on the stream of what the model wrote.

`StopStrings` ends the text of a message before the first of the client's stop strings: text is held back as far as it
may become one of them, and what follows it is neither shown nor kept. Reasoning and calls are not looked at. `Summary`
keeps the text of a compaction to itself. Guards are a filter too, in a room of their own (`guards/gate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from segue.seams.model import ItemClosed, ItemOpened, ItemText, Parsed, TurnClosed
from segue.turn.plan import Tally
from segue.wire.items import Logprob


class StopStrings:
    """A `Filter` that ends the answer at these strings."""

    def __init__(self, stops: Sequence[str], tally: Tally | None = None) -> None:
        self._stops = stops
        self._begun = [_Begun(stop) for stop in stops]
        self._tally = tally or Tally()
        self._is_text = False
        self._held = ""
        self._logprobs: tuple[Logprob, ...] = ()
        self.is_shut = False

    async def feed(self, parsed: list[Parsed]) -> list[Parsed]:
        passed: list[Parsed] = []
        for fragment in parsed:
            match fragment:
                case ItemOpened() if not self.is_shut:
                    self._is_text = fragment.kind == "message"
                    passed.append(fragment)
                case ItemText() if self._is_text and not self.is_shut:
                    passed += self._write(fragment)
                case ItemText() if not self.is_shut:
                    passed.append(fragment)
                case ItemClosed() if self._is_text or not self.is_shut:
                    # The message that met its stop is closed once; what comes after it is dropped.
                    passed += self._release() if self._is_text and not self.is_shut else ()
                    passed.append(ItemClosed(fragment.ids, fragment.is_cut and not self.is_shut))
                    self._is_text = False
                case TurnClosed():
                    passed.append(fragment)
                case _:
                    pass
        return passed

    async def close(self, parsed: list[Parsed]) -> list[Parsed]:
        return await self.feed(parsed)

    def _write(self, added: ItemText) -> list[Parsed]:
        text = self._held + added.text
        self._logprobs += added.logprobs
        # The first to be whole, in whatever pieces they come; of two that end together the longer.
        met = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if met:
            self.is_shut = True
            end, at = min(met)
            self._tally.stop_string = text[at:end]
            return self._pass(text[:at])
        held = max(begun.read(added.text) for begun in self._begun)
        self._held = text[len(text) - held :]
        return self._pass(text[: len(text) - held])

    def _release(self) -> list[Parsed]:
        held, self._held = self._held, ""
        for begun in self._begun:
            begun.length = 0
        return self._pass(held)

    def _pass(self, text: str) -> list[Parsed]:
        """This text, with the logprobs of the tokens that begin in it."""
        if not text:
            return []
        size = count = 0
        while count < len(self._logprobs) and size < len(text):
            size += len(self._logprobs[count].token)
            count += 1
        passed, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        return [ItemText(text, passed)]


class _Begun:
    """How much of a string stands at the end of what was written (Knuth, Morris and Pratt): each letter is looked at
    once or twice, however long the string is."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        # How much stands there as well where this is not followed by the next letter, by how much stands there.
        self._less = [0]
        for letter in stop[1:]:
            self._less.append(self._after(self._less[-1], letter))
        self.length = 0

    def read(self, text: str) -> int:
        if (left_out := len(text) - len(self._stop) + 1) > 0:
            text, self.length = text[left_out:], 0
        for letter in text:
            self.length = self._after(self.length, letter)
        return self.length

    def _after(self, length: int, letter: str) -> int:
        while length and self._stop[length] != letter:
            length = self._less[length - 1]
        return length + (self._stop[length] == letter)


class Summary:
    """A `Filter` that lets nothing pass and keeps the text of messages."""

    is_shut = False

    def __init__(self, on_begun: Callable[[], None]) -> None:
        self._on_begun = on_begun
        self._is_text = False
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts).strip()

    async def feed(self, parsed: list[Parsed]) -> list[Parsed]:
        for fragment in parsed:
            if isinstance(fragment, ItemOpened):
                self._is_text = fragment.kind == "message"
            elif isinstance(fragment, ItemText) and self._is_text:
                if not self._texts:
                    self._on_begun()
                self._texts.append(fragment.text)
        return []

    async def close(self, parsed: list[Parsed]) -> list[Parsed]:
        return await self.feed(parsed)
