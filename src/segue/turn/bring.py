"""What do items change for everything behind them? Pure.

Items can bring tools (`additional_tools`, what a search has found, what a remote server has listed) and settings
(`configuration_update`), which hold from there on, along the chain. A turn keeps what its history has brought, so that
nobody walks a history to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from segue.turn.values import NOTHING_BROUGHT, Brought, Turn
from segue.wire.items import (
    AdditionalTools,
    ConfigurationUpdate,
    Item,
    McpListTools,
    ToolSearchOutput,
)
from segue.wire.tools import Offer, Tool, carried_of, deferred_of, name_of, offers_of


def bring(before: Brought, items: Iterable[Item]) -> Brought:
    """What holds behind these items."""
    brought = before
    for item in items:
        match item.value:
            case AdditionalTools(tools=tools):
                brought = replace(
                    brought,
                    offers=_with(brought.offers, offers_of(tools)),
                    deferred=_with(brought.deferred, deferred_of(tools)),
                    carried=_carried(brought.carried, carried_of(tools)),
                )
            case ToolSearchOutput(tools=tools):
                loaded = offers_of(tools, is_loaded=True)
                brought = replace(brought, offers=_with(brought.offers, loaded))
            case McpListTools(server_label=label, tools=[_, *_]) as listed:
                others = (one for one in brought.listed if one.server_label != label)
                brought = replace(brought, listed=(*others, listed))
            case ConfigurationUpdate(reasoning=reasoning, text=text):
                brought = replace(
                    brought,
                    effort=(reasoning and reasoning.effort) or brought.effort,
                    format=(text and text.format) or brought.format,
                )
            case _:
                pass
    return brought


def brought_by(turn: Turn | None) -> Brought:
    """What this history has brought; counted again for a turn that comes from a store."""
    if turn is None:
        return NOTHING_BROUGHT
    if turn.brought is not None:
        return turn.brought
    rounds = [one for node in turn.lineage() for one in node.rounds]
    return bring(NOTHING_BROUGHT, (item for one in rounds for item in (*one.given, *one.wrote)))


def _carried(old: Sequence[Tool], new: Sequence[Tool]) -> tuple[Tool, ...]:
    names = {name_of(one) for one in new}
    return (*(one for one in old if name_of(one) not in names), *new)


def _with(old: Sequence[Offer], new: Sequence[Offer]) -> tuple[Offer, ...]:
    """All of them; of two with the same name the newer."""
    names = {offer.qualified_name for offer in new}
    return (*(offer for offer in old if offer.qualified_name not in names), *new)
