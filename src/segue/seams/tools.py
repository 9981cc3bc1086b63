"""What may the server do for the model? `Tool`, its call and its result."""

from __future__ import annotations

from typing import Protocol

from msgspec import Raw, Struct

from segue.seams.history import Owner
from segue.wire.items import Item


class HostedCall(Struct, frozen=True):
    """A call that one of our own tools is to answer."""

    owner: Owner
    # The id of the item that the client sees.
    item_id: str
    # The tool as the request gave it, secrets included: never stored, logged or shown.
    definition: Raw
    # Which function of it.
    name: str
    # JSON, as the model wrote it.
    arguments: str
    # How many sources earlier calls of this response have found: those of this call are numbered after them.
    sources_before: int = 0


class Source(Struct, frozen=True):
    """A place that an answer may cite."""

    url: str
    title: str


class ToolResult(Struct, frozen=True):
    """What a hosted tool has done: the words for the model, and the item that the client sees."""

    # Data for the model; never a special token.
    text: str
    # The finished item, such as an `mcp_call`.
    item: Item
    # What the answer may cite.
    sources: tuple[Source, ...] = ()


class Tool(Protocol):
    """What the server may do for the model."""

    async def call(self, call: HostedCall) -> ToolResult:
        """Run the call. What goes wrong outside is returned as a failed item; being cancelled stops the work."""
