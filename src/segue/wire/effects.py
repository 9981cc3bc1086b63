"""What do items change for everything that follows them? Pure.

Items can bring tools (`additional_tools`, what a search has found, what a remote server has listed) and settings
(`configuration_update`), which hold from there on, along the chain. A turn keeps the effects of its history, so that
the history is not walked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from msgspec import Struct

from segue.wire.items import (
    AdditionalTools,
    ConfigurationUpdate,
    Item,
    McpListTools,
    ToolSearchOutput,
)
from segue.wire.requests import Effort, TextFormat
from segue.wire.tools import (
    Offer,
    ToolDefinition,
    carried_name,
    carried_of,
    offers_of,
    split_offers,
)

T = TypeVar("T")

# Items that bring definitions of tools; items that change anything.
BRINGING = (AdditionalTools, ToolSearchOutput)
EFFECTIVE = (*BRINGING, McpListTools, ConfigurationUpdate)


class Effects(Struct, frozen=True):
    """The effects of the items of a history on what follows them: tools, and settings that override the head's."""

    offers: tuple[Offer, ...] = ()
    # Tools that a search can find.
    deferred: tuple[Offer, ...] = ()
    effort: Effort | None = None
    format: TextFormat | None = None
    # What remote servers have listed: of each label the newest.
    listed: tuple[McpListTools, ...] = ()
    # Tools of the server's own from items, which hold as if the request had listed them; without their secrets.
    carried: tuple[ToolDefinition, ...] = ()


NO_EFFECTS = Effects()


def apply_effects(before: Effects, items: Iterable[Item]) -> Effects:
    """What holds after these items. Of two tools with the same name the newer counts."""
    items = [item for item in items if isinstance(item.value, EFFECTIVE)]
    if not items:
        return before
    effort, format = before.effort, before.format
    offers = _Named(before.offers, lambda offer: offer.qualified_name)
    deferred = _Named(before.deferred, lambda offer: offer.qualified_name)
    carried = _Named(before.carried, carried_name)
    listed = _Named(before.listed, lambda listing: listing.server_label)
    for item in items:
        match item.value:
            case AdditionalTools(tools=tools):
                shown, later = split_offers(tools)
                offers.add(shown)
                deferred.add(later)
                carried.add(carried_of(tools))
            case ToolSearchOutput(tools=tools):
                offers.add(offers_of(tools))
            case McpListTools(tools=[_, *_]) as listing:
                listed.add((listing,))
            case ConfigurationUpdate(reasoning=reasoning, text=text):
                effort = (reasoning and reasoning.effort) or effort
                format = (text and text.format) or format
            case _:
                pass
    return Effects(
        offers=offers.all(),
        deferred=deferred.all(),
        carried=carried.all(),
        listed=listed.all(),
        effort=effort,
        format=format,
    )


class _Named(Generic[T]):
    """Values by name, the newest last; of two with the same name only the newer."""

    def __init__(self, old: tuple[T, ...], name: Callable[[T], str]) -> None:
        self._name = name
        self._by_name = {name(value): value for value in old}

    def add(self, new: Iterable[T]) -> None:
        for value in new:
            name = self._name(value)
            self._by_name.pop(name, None)
            self._by_name[name] = value

    def all(self) -> tuple[T, ...]:
        return tuple(self._by_name.values())
