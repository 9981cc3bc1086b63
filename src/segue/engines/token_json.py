"""How are the ids of a long prompt written into a request, without writing the old ones again?

In: a prompt as a chain of chunks. Out: its ids in decimal, joined by commas. The text of a chunk is made once and kept
for as long as the chunk itself is held by somebody's history, within a budget; the next turn writes only its own
ids and copies the rest.
"""

from __future__ import annotations

import weakref

import msgspec

from segue.turn.values import IdArray, Tokens

# Six bytes a token: some forty histories of 100,000 tokens. Beyond it the oldest texts go, and are made again at need.
BYTES_MAX = 256 * 1024 * 1024
# A short chunk is written faster than it is looked up and kept.
KEPT_IDS_MIN = 32


class TokenJson:
    """The decimal text of chunks, each for as long as its chunk lives."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # By identity: equal chunks are different ones, and an array has no hash.
        self._kept: dict[int, tuple[weakref.ref[IdArray[int]], bytes]] = {}
        self.bytes = 0
        # How many ids were ever put into decimal, for the proof that it is only the new ones.
        self.ids_written = 0

    def text(self, prompt: Tokens) -> bytes:
        """All ids of the prompt, joined by commas."""
        return b",".join([self._text(chunk) for chunk in prompt.chunks() if chunk])

    def _text(self, chunk: IdArray[int]) -> bytes:
        key = id(chunk)
        kept = self._kept.get(key)
        if kept is not None and kept[0]() is chunk:
            return kept[1]
        text = msgspec.json.encode(chunk.tolist())[1:-1]
        self.ids_written += len(chunk)
        if len(chunk) >= KEPT_IDS_MIN:
            self._keep(key, chunk, text)
        return text

    def _keep(self, key: int, chunk: IdArray[int], text: bytes) -> None:
        self._forget(key)
        self._kept[key] = (weakref.ref(chunk, lambda _: self._forget(key)), text)
        self.bytes += len(text)
        while self.bytes > self._bytes_max:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: int) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.bytes -= len(kept[1])
