"""Which items has the model written, and which ids and logprobs belong to them?

In: what a reader has found: an item begins, this is its text, it ends. Out: the `Parsed` values of the turn.

Where logprobs were requested, a token is sent with the first letter of its text. Text may be held back, or turn out to
be a mark and never be sent; `PendingLogprobs` keeps the tokens until their text is sent.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from segue.readers.bound import BoundFamily
from segue.readers.call_json import INPUT_KEYS, InputReader
from segue.seams.model import Ids, ItemClosed, ItemOpened, ItemText, Parsed, Piece, TokenLogprob
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Logprob, TopLogprob

# The logprob of an impossible token: JSON has no infinity, and clients know this number.
LOGPROB_MIN = -9999.0
NOTHING: Mapping[int, None] = MappingProxyType({})


def logprob_of(vocabulary: Vocabulary, id: int, logprobs: TokenLogprob) -> Logprob:
    """A sampled token as the client sees it, in the vocabulary's own bytes."""
    top = [TopLogprob(*_spelled(vocabulary, other, logprob)) for other, logprob in logprobs.top]
    return Logprob(*_spelled(vocabulary, id, logprobs.logprob), top)


def _spelled(vocabulary: Vocabulary, id: int, logprob: float) -> tuple[str, list[int], float]:
    """The token as text, in which bytes that are only part of a character are written out; its bytes; its logprob."""
    data = vocabulary.bytes_of(id)
    return data.decode(errors="backslashreplace"), list(data), max(logprob, LOGPROB_MIN)


class PendingLogprobs:
    """Tokens whose text was decoded and is not sent yet, each with where its text begins and ends.

    Places are counted from the first token with logprobs. A part of a character has no text of its own: it begins and
    ends where the character will stand.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._waiting: deque[tuple[int, int, Logprob]] = deque()
        self._end = 0
        self._sent = 0

    def add_token(self, id: int, logprobs: TokenLogprob | None, chars: int) -> None:
        """This token was decoded to `chars` characters. Special tokens are never text."""
        begin = self._end
        self._end = self._end + chars
        if logprobs is not None and self._vocabulary.bytes_of(id):
            logprob = logprob_of(self._vocabulary, id, logprobs)
            self._waiting.append((begin, self._end, logprob))

    def add_chars(self, chars: int) -> None:
        """Characters that came without a token: what stands for broken ones at the end."""
        self._end += chars

    def start_text(self, rest: int) -> None:
        """A text begins `rest` characters before the end; what was before it is not sent."""
        sent = self._sent = self._end - rest
        while self._waiting:
            begin, end, _ = self._waiting[0]
            if end > sent or begin == end == sent:
                return
            self._waiting.popleft()

    def pop_sent(self, chars: int) -> tuple[Logprob, ...]:
        """The tokens that begin in the next `chars` characters, which are sent now."""
        self._sent += chars
        sent = []
        while self._waiting and self._waiting[0][0] < self._sent:
            sent.append(self._waiting.popleft()[2])
        return tuple(sent)


class ItemWriter:
    """The items of one model turn, of which at most one is open. Every sampled id belongs to an item or to the end."""

    def __init__(self, *, is_single: bool, hidden: Mapping[int, None] = NOTHING) -> None:
        """`is_single`: the turn is over after the first call. `hidden`: letters that are no text."""
        self.parsed: list[Parsed] = []
        # Sampled since the last closed item.
        self.ids = array("I")
        self.open: ItemOpened | None = None
        # Whether the only call that is allowed is whole.
        self.is_over = False
        # Where logprobs were requested: those of tokens whose text is not sent yet.
        self.pending: PendingLogprobs | None = None
        # Text is joined with text that was written since here; as it stands, with none.
        self.joined_from = sys.maxsize
        # How many of the ids belong to the open item, if what is held back becomes a call.
        self.held_from = 0
        self._is_single = is_single
        self._hidden = hidden
        # Reads the arguments of a custom tool, and of code.
        self._input: InputReader | None = None

    def open_item(self, opened: ItemOpened) -> None:
        """An item begins."""
        self.open = opened
        self.parsed.append(opened)

    def open_message(self, rest: int) -> None:
        """A message begins `rest` characters before the end of what was decoded."""
        if self.pending is not None:
            self.pending.start_text(rest)
        self.open = ItemOpened("message")
        self.parsed.append(self.open)

    def close(self, count: int | None = None, *, is_cut: bool = False) -> None:
        """Close what is open, if anything is; the first `count` ids are its own, or all of them."""
        if self.open is None:
            return
        count = len(self.ids) if count is None else count
        self.is_over = self._is_single and self.open.is_call
        self.parsed.append(ItemClosed(self.ids[:count], is_cut))
        self.ids = self.ids[count:]
        self.held_from = 0
        self.open = None

    def write(self, text: str) -> None:
        """More text of the open item."""
        if not text:
            return
        parsed = self.parsed
        logprobs: tuple[Logprob, ...] = ()
        if self.pending is not None and self.open is not None and self.open.kind == "message":
            logprobs = self.pending.pop_sent(len(text))
        text = text.translate(self._hidden) if self._hidden else text
        if not text and not logprobs:
            return
        last = parsed[-1] if len(parsed) > self.joined_from else None
        if isinstance(last, ItemText):
            parsed[-1] = ItemText(last.text + text, last.logprobs + logprobs)
        else:
            parsed.append(ItemText(text, logprobs))

    def write_arguments(self, text: str) -> None:
        """More of the arguments of the open call; of a custom tool, what that adds to its input, and so of code."""
        assert self.open is not None
        if self.open.kind in INPUT_KEYS:
            self._input = self._input or InputReader(INPUT_KEYS[self.open.kind])
            text = self._input.feed(text)
        self.write(text)

    def end_arguments(self) -> None:
        """The arguments are whole."""
        if self._input is not None:
            self.write(self._input.close())
            self._input = None


class _TokenReader(Protocol):
    """What a reader of tokens has for `feed_tokens`."""

    is_over: bool
    _bound: BoundFamily
    _items: ItemWriter
    # Whether plain tokens may pass as they are: an item of text is open and nothing is held back.
    _is_passing: bool

    def _feed_token(self, id: int, logprobs: TokenLogprob | None = None) -> None: ...


def feed_tokens(self: _TokenReader, piece: Piece) -> list[Parsed]:
    """The method `feed` of a reader that lets plain tokens pass as they are and takes the others one by one."""
    assert isinstance(piece, Ids), "this dialect reads tokens"
    items = self._items
    parsed = items.parsed = []
    if piece.logprobs or items.pending is not None:
        # The slow way for every token; the beginning of a forced answer has no logprobs.
        items.pending = items.pending or PendingLogprobs(self._bound.vocabulary)
        logprobs = piece.logprobs or [None] * len(piece.ids)
        for id, logprob in zip(piece.ids, logprobs, strict=True):
            self._feed_token(id, logprob)
    else:
        plain = self._bound.plain_tokens
        for id in piece.ids:
            if self._is_passing and (text := plain.get(id)) is not None:
                items.ids.append(id)
                parsed.append(text)
            else:
                self._feed_token(id)
    self.is_over = items.is_over
    return parsed


def plain_token(data: bytes) -> ItemText | None:
    """The token as it is sent; None if it is no whole characters."""
    try:
        return ItemText(data.decode()) if data else None
    except UnicodeDecodeError:
        return None
