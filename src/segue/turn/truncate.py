"""Which items go when the history is too long? Pure: whole items, from the start, calls together with their outputs.

Only where the client asked for it (`truncation: "auto"`); otherwise too long is an error. What the model wrote in one
round goes as a whole, because its kept ids belong together. The last item stays, whatever its size, and so do tools and
settings that items have brought: what was said under them still needs them.
"""

from __future__ import annotations

import msgspec

from segue.turn.values import Round, Scene
from segue.wire.items import (
    AdditionalTools,
    ConfigurationUpdate,
    HostedOutput,
    Item,
    McpCall,
    answer_of,
    call_of,
    hosted_call_of,
)


def truncate(scene: Scene, share: float) -> Scene:
    """The same scene without its oldest items: about this share of all bytes goes."""
    rounds = [*scene.history(), Round(scene.given)]
    sizes = [_size(item) for one in rounds for item in (*one.given, *one.wrote)]
    budget = share * sum(sizes)
    dropped_calls: set[str] = set()
    kept: list[Round] = []
    for one in rounds:
        is_last = one is rounds[-1]
        given: list[Item] = []
        for item in one.given:
            is_orphan = _answered_call(item) in dropped_calls
            is_very_last = is_last and item is one.given[-1]
            is_needed = is_very_last or isinstance(
                item.value, AdditionalTools | ConfigurationUpdate
            )
            if is_orphan or (budget > 0 and not is_needed):
                budget -= _size(item)
                _note(item, dropped_calls)
            else:
                given.append(item)
        if one.wrote and budget > 0:
            budget -= sum(map(_size, one.wrote))
            for item in one.wrote:
                _note(item, dropped_calls)
            one = Round(tuple(given))
        if is_last:
            return msgspec.structs.replace(
                scene, past=None, recalled=None, rounds=tuple(kept), given=tuple(given)
            )
        kept.append(msgspec.structs.replace(one, given=tuple(given)))
    raise AssertionError("a scene has at least what is given now")


def _size(item: Item) -> int:
    return len(item.raw)


def _note(item: Item, dropped_calls: set[str]) -> None:
    """An output must not outlive its call."""
    if call := call_of(item.value):
        dropped_calls.add(call.call_id)
    if hosted := hosted_call_of(item.value):
        dropped_calls.add(hosted)


def _answered_call(item: Item) -> str | None:
    match item.value:
        case HostedOutput(call_id=call_id) | McpCall(approval_request_id=str() as call_id):
            return call_id
        case value:
            answer = answer_of(value)
            return None if answer is None else answer.call_id
