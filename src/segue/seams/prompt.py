"""What is a prompt? Token ids or messages in chains that share their beginning, and what stands around them. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from segue.wire.requests import ReasoningConfig, TextConfig, ToolChoiceName
from segue.wire.tools import NO_TOOLS, Tools

IdArray = array  # of typecode "I": four bytes a token


def id_array(ids: Sequence[int] = ()) -> IdArray[int]:
    """Token ids, compactly."""
    return array("I", ids)


NO_IDS = id_array()


class ImageAt(NamedTuple):
    """An image, and the ids that stand for it. `url` is a data URL, the very string of the item."""

    begin: int
    end: int
    url: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt as a chain of chunks: appending is O(new), and a fork shares everything before it."""

    before: Tokens | None
    ids: IdArray[int]
    length: int
    # Where in `ids`.
    images: tuple[ImageAt, ...] = field(default=(), kw_only=True)

    def plus(self, ids: IdArray[int]) -> Tokens:
        """These tokens and then some more."""
        return Tokens(self, ids, self.length + len(ids)) if ids else self

    def chunks(self) -> list[IdArray[int]]:
        """The chunks from first to last."""
        found: list[IdArray[int]] = []
        node: Tokens | None = self
        while node is not None:
            found.append(node.ids)
            node = node.before
        found.reverse()
        return found

    def flat(self) -> IdArray[int]:
        """All ids in one array: O(history), for engines that want them all, and for tests."""
        joined = id_array()
        for chunk in self.chunks():
            joined.extend(chunk)
        return joined

    def all_images(self) -> list[ImageAt]:
        """The images from first to last, and where they stand in the whole prompt."""
        found: list[ImageAt] = []
        node: Tokens | None = self
        while node is not None:
            if node.images:
                before = node.length - len(node.ids)
                found[:0] = [ImageAt(before + a, before + b, url) for a, b, url in node.images]
            node = node.before
        return found


NO_TOKENS = Tokens(None, NO_IDS, 0)


class Messages(Struct, frozen=True):
    """A prompt for engines that take chat messages: each serialized once, chained as `Tokens` are."""

    before: Messages | None
    data: bytes
    # In bytes.
    length: int
    # How they were written; others can follow only if they are written alike. None: none can.
    form: object = None
    # About how many tokens these are: what the endpoint has counted, and an estimate of what came since.
    tokens: int = 0

    def plus(self, data: bytes, form: object = None, tokens: int = 0) -> Messages:
        """These messages and then some more, already joined by commas."""
        tokens += self.tokens
        return Messages(self, data, self.length + len(data), form, tokens) if data else self

    def chunks(self) -> list[bytes]:
        """The chunks from first to last."""
        found: list[bytes] = []
        node: Messages | None = self
        while node is not None:
            if node.data:
                found.append(node.data)
            node = node.before
        return found[::-1]


NO_MESSAGES = Messages(None, b"", 0)


Prompt = Tokens | Messages


class Head(Struct, frozen=True):
    """What stands before and around the history in a prompt. Not inherited: each request brings its own."""

    instructions: str | None = None
    tools: Tools = NO_TOOLS
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceName = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
