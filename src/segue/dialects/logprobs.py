"""How likely was each token of the text, as the client is told?

In: sampled ids with their odds, and how much text each of them gave. Out: the wire's logprobs, with the text that they
belong to. Text may be held back, or turn out to be a mark and never be said; a `PendingLogprobs` keeps the tokens until their
text is said, and a token goes with the first letter of it. Readers have one only where odds were asked for.
"""

from __future__ import annotations

from collections import deque

from segue.turn.values import TokenLogprob
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Logprob, TopLogprob

# What stands for a token that cannot be: JSON has no infinity, and clients know this number.
LOGPROB_MIN = -9999.0


def logprob_of(vocabulary: Vocabulary, id: int, logprobs: TokenLogprob) -> Logprob:
    """A sampled token as the client sees it, in the vocabulary's own bytes."""
    top = [_top(vocabulary, other, logprob) for other, logprob in logprobs.top]
    data = vocabulary.bytes_of(id)
    return Logprob(_text(data), list(data), max(logprobs.logprob, LOGPROB_MIN), top)


def _top(vocabulary: Vocabulary, id: int, logprob: float) -> TopLogprob:
    data = vocabulary.bytes_of(id)
    return TopLogprob(_text(data), list(data), max(logprob, LOGPROB_MIN))


def _text(data: bytes) -> str:
    """The token as text; bytes that are only part of a character are written out."""
    return data.decode(errors="backslashreplace")


class PendingLogprobs:
    """Tokens whose text was decoded and is not said yet, each with where its text begins and ends.

    Places are counted from the first token with odds. A part of a character has no text of its own: it begins and
    ends where the character will stand.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._waiting: deque[tuple[int, int, Logprob]] = deque()
        self._end = 0
        self._parsed = 0

    def take(self, id: int, logprobs: TokenLogprob | None, chars: int) -> None:
        """This token was decoded to so many characters. Special tokens are never text."""
        begin, self._end = self._end, self._end + chars
        if logprobs is not None and self._vocabulary.bytes_of(id):
            one = logprob_of(self._vocabulary, id, logprobs)
            self._waiting.append((begin, self._end, one))

    def add(self, chars: int) -> None:
        """Characters that came without a token: what stands for broken ones at the end."""
        self._end += chars

    def begin(self, rest: int) -> None:
        """A text begins, so many characters before the end; what was before it is not said."""
        parsed = self._parsed = self._end - rest
        while self._waiting:
            begin, end, _ = self._waiting[0]
            if end > parsed or begin == end == parsed:
                return
            self._waiting.popleft()

    def say(self, chars: int) -> tuple[Logprob, ...]:
        """So many characters more are said: the tokens that begin in them."""
        self._parsed += chars
        found = []
        while self._waiting and self._waiting[0][0] < self._parsed:
            found.append(self._waiting.popleft()[2])
        return tuple(found)
