"""How are the token ids of a long prompt written as JSON, without writing the old ones again?

In: a prompt as a chain of chunks. Out: its ids in decimal, joined by commas. The text of a chunk is made once and
cached for as long as a history refers to the chunk, within a budget; the next turn writes only its own ids and copies
the rest.
"""

from __future__ import annotations

import weakref

import msgspec

from segue.turn.values import IdArray, Tokens

# Six bytes a token: some forty histories of 100,000 tokens. Beyond it the oldest texts are dropped, and made again at
# need.
BYTES_MAX = 256 * 1024 * 1024
# A shorter chunk is written faster than it is looked up and cached.
CACHED_IDS_MIN = 32


class TokenJson:
    """A cache of the JSON text of chunks, each for as long as its chunk lives."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # By identity: an array has no hash.
        self._cached: dict[int, tuple[weakref.ref[IdArray[int]], bytes]] = {}
        self.bytes = 0

    def text(self, prompt: Tokens) -> bytes:
        """All ids of the prompt, joined by commas."""
        return b",".join([self.chunk_text(chunk) for chunk in prompt.chunks() if chunk])

    def chunk_text(self, chunk: IdArray[int]) -> bytes:
        """The ids of one chunk, joined by commas; of a cached chunk the same object each time."""
        key = id(chunk)
        cached = self._cached.get(key)
        if cached is not None and cached[0]() is chunk:
            return cached[1]
        text = msgspec.json.encode(chunk.tolist())[1:-1]
        if len(chunk) >= CACHED_IDS_MIN:
            self._add(key, chunk, text)
        return text

    def _add(self, key: int, chunk: IdArray[int], text: bytes) -> None:
        self._remove(key)
        self._cached[key] = (weakref.ref(chunk, lambda _: self._remove(key)), text)
        self.bytes += len(text)
        while self.bytes > self._bytes_max:
            self._remove(next(iter(self._cached)))

    def _remove(self, key: int) -> None:
        cached = self._cached.pop(key, None)
        if cached is not None:
            self.bytes -= len(cached[1])
