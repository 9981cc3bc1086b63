"""Which items go when the history is too long? Pure: whole items, from the start, calls together with their outputs.

Only where the client asked for it (`truncation: "auto"`); otherwise too long is an error. What belongs together is a
*unit*, and stays or goes as one: a call with its outputs, and with everything else that the model wrote in that round,
because its kept ids belong together. What the model is to answer stays whatever its size: the last message of the user,
the last item, and of outputs that end the history all. So do tools and settings that items have brought: what was said
under them still needs them. If that is too long, it is an error after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from msgspec import structs

from segue.turn.values import Round, Scene
from segue.wire.items import AdditionalTools, ConfigurationUpdate, Item, McpCall, Message
from segue.wire.kinds import call_id_of, is_call, is_output


class _Place(NamedTuple):
    """An item, and what it belongs to."""

    item: Item
    unit: int


def truncate(scene: Scene, share: float) -> Scene:
    """The same scene without its oldest items: about this share of all bytes goes. The scene itself if none can go."""
    whole = scene.as_one()
    rounds = [*whole.history(), Round(whole.given)]
    placed = _place(rounds)
    places = [place for one in placed for place in one]
    going = _going(places, share)
    if not going:
        return scene
    kept = [_kept(one, places, going) for one, places in zip(rounds, placed, strict=True)]
    *before, last = kept
    return structs.replace(whole, past=None, rounds=tuple(before), given=last.given)


def _place(rounds: Sequence[Round]) -> list[list[_Place]]:
    """The items of each round, given and then written, with their units, which are numbered by age."""
    numbers = count()
    # By the calls that they hold; and the newest of them, for answers that do not say whose.
    units: dict[str, int] = {}
    newest: int | None = None
    placed: list[list[_Place]] = []
    for one in rounds:
        places: list[_Place] = []
        for item in one.given:
            answered = _answered_call(item)
            unit = None if answered is None else units.get(answered, newest)
            places.append(_Place(item, next(numbers) if unit is None else unit))
            newest = _note(places[-1], units, newest)
        written = next(numbers)
        for item in one.wrote:
            places.append(_Place(item, written))
            newest = _note(places[-1], units, newest)
        placed.append(places)
    return placed


def _note(place: _Place, units: dict[str, int], newest: int | None) -> int | None:
    """Where the answers to this item belong, if it is a call; the newest unit that holds one."""
    calls = _calls(place.item)
    units.update(dict.fromkeys(calls, place.unit))
    return place.unit if calls else newest


def _going(places: Sequence[_Place], share: float) -> set[int]:
    """The units that go: the oldest, but for those that are needed."""
    sizes: dict[int, int] = {}
    for item, unit in places:
        sizes[unit] = sizes.get(unit, 0) + len(item.raw)
    budget = share * sum(sizes.values())
    needed = _needed(places)
    going: set[int] = set()
    for unit in sorted(sizes):
        if budget <= 0:
            break
        if unit not in needed:
            going.add(unit)
            budget -= sizes[unit]
    return going


def _needed(places: Sequence[_Place]) -> set[int]:
    is_setting = [
        isinstance(item.value, AdditionalTools | ConfigurationUpdate) for item, _ in places
    ]
    needed = {unit for (_, unit), setting in zip(places, is_setting, strict=True) if setting}
    parsed = [place for place, setting in zip(places, is_setting, strict=True) if not setting]
    questions = [unit for item, unit in parsed if _is_users(item)]
    needed.update(questions[-1:])
    needed.update(unit for _, unit in parsed[-1:])
    for item, unit in reversed(parsed):
        if _answered_call(item) is None:
            break
        needed.add(unit)
    return needed


def _kept(one: Round, places: Sequence[_Place], going: set[int]) -> Round:
    given = tuple(item for item, unit in places[: len(one.given)] if unit not in going)
    if any(unit in going for _, unit in places[len(one.given) :]):
        return Round(given, is_fresh=one.is_fresh)
    return structs.replace(one, given=given)


def _is_users(item: Item) -> bool:
    return isinstance(item.value, Message) and item.value.role == "user"


def _calls(item: Item) -> list[str]:
    """The id under which this item may be answered, if it is a call."""
    call_id = call_id_of(item.value)
    return [call_id] if call_id and is_call(item.value) else []


def _answered_call(item: Item) -> str | None:
    """The id of the call that this item answers; empty where it answers one and does not say which."""
    match item.value:
        case McpCall(approval_request_id=str() as call_id):
            return call_id
        case value:
            return call_id_of(value) if is_output(value) else None
