"""What do items change for everything that follows them? Pure.

Items can bring tools (`additional_tools`, what a search has found, what a remote server has listed) and settings
(`configuration_update`), which hold from there on, along the chain. A turn keeps the effects of its history, so that
the history is not walked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from segue.turn.values import NO_EFFECTS, Effects, Turn
from segue.wire.items import (
    AdditionalTools,
    ConfigurationUpdate,
    Item,
    McpListTools,
    ToolSearchOutput,
)
from segue.wire.tools import Offer, ToolDefinition, carried_of, deferred_of, name_of, offers_of


def apply_effects(before: Effects, items: Iterable[Item]) -> Effects:
    """What holds after these items."""
    effects = before
    for item in items:
        match item.value:
            case AdditionalTools(tools=tools):
                effects = replace(
                    effects,
                    offers=_with(effects.offers, offers_of(tools)),
                    deferred=_with(effects.deferred, deferred_of(tools)),
                    carried=_carried(effects.carried, carried_of(tools)),
                )
            case ToolSearchOutput(tools=tools):
                loaded = offers_of(tools, is_loaded=True)
                effects = replace(effects, offers=_with(effects.offers, loaded))
            case McpListTools(server_label=label, tools=[_, *_]) as listed:
                others = (one for one in effects.listed if one.server_label != label)
                effects = replace(effects, listed=(*others, listed))
            case ConfigurationUpdate(reasoning=reasoning, text=text):
                effects = replace(
                    effects,
                    effort=(reasoning and reasoning.effort) or effects.effort,
                    format=(text and text.format) or effects.format,
                )
            case _:
                pass
    return effects


def effects_of(turn: Turn) -> Effects:
    """The effects of this history, counted again for a turn that comes from a store."""
    if turn.effects is not None:
        return turn.effects
    rounds = [one for node in turn.lineage() for one in node.rounds]
    return apply_effects(NO_EFFECTS, (item for one in rounds for item in (*one.given, *one.wrote)))


def _carried(
    old: Sequence[ToolDefinition], new: Sequence[ToolDefinition]
) -> tuple[ToolDefinition, ...]:
    names = {name_of(one) for one in new}
    return (*(one for one in old if name_of(one) not in names), *new)


def _with(old: Sequence[Offer], new: Sequence[Offer]) -> tuple[Offer, ...]:
    """All of them; of two with the same name the newer."""
    names = {offer.qualified_name for offer in new}
    return (*(offer for offer in old if offer.qualified_name not in names), *new)
