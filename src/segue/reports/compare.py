"""Where do two prompts part, why, and what did that cost?

In: the prompt of an earlier turn and that of a new one. Out: a `Parting`, or None where all that the model was given
earlier stands at the beginning of the new prompt. Whether they part is decided by token ids (of chat messages, by
bytes); why, by what the requests say; what is *lost* is what stands after the place in both, and so could have been
reused: a new conversation that shares only its first message with another has lost nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from itertools import islice
from typing import get_args

import msgspec
from msgspec import Raw, Struct

from segue.reports.prompts import KnownPrompt
from segue.reports.texts import around, digest, first_difference, line_of, said, same_end, type_of
from segue.seams.prompt import Messages, Tokens
from segue.wire.cache import CacheMissReason, Place, PromptReason, Side
from segue.wire.items import Item, Message, Reasoning
from segue.wire.response import Response, TextEcho

# What the contract calls these reasons: those that are ours are changes of the input.
CONTRACT: dict[PromptReason, CacheMissReason] = {
    **{reason: reason for reason in get_args(CacheMissReason)},
    "reasoning_dropped": "input_changed",
    "history_truncated": "input_changed",
}
# The settings that become part of a prompt, in the order in which they are looked at.
SETTINGS: dict[PromptReason, str] = {
    "tools_changed": "tools",
    "text_format_changed": "text.format",
    "reasoning_effort_changed": "reasoning.effort",
    "verbosity_changed": "text.verbosity",
}
Setting = tuple[PromptReason, str, str]
# A request goes on from an earlier one if it has one of its last so many items, system messages not counted.
LAST_ITEMS = 4

_text = msgspec.json.Decoder(TextEcho).decode
_tools = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_string = msgspec.json.Decoder(str | None).decode


class Parting(Struct, frozen=True):
    """Two prompts part: why, where, and what that cost."""

    reason: PromptReason
    place: Place
    # The texts around the place, of the earlier prompt and of the new one.
    earlier: Side
    now: Side
    # Tokens at the beginning that are the same, tokens of the earlier prompt after that, and how many of those stand in
    # the new prompt too.
    common: int
    missed: int
    lost: int
    # In the input: the items in which the prompts part, of each at most one.
    items: tuple[Item, ...] = ()


def part(old: KnownPrompt, new: KnownPrompt) -> Parting | None:
    """Where the new prompt stops to be like the earlier one."""
    if old.model != new.model:
        return _parted(old, new, "model_changed", 0)
    setting = changed_setting(old.response, new.response)
    leading = _leading_items(old.items, new.items)
    common, is_held = _common(old, new, setting, leading)
    if is_held:
        return None
    return _parted(old, new, _reason(old, new, setting, leading), common, leading)


def _reason(
    old: KnownPrompt, new: KnownPrompt, setting: Setting | None, leading: int
) -> PromptReason:
    if setting is not None and setting[0] == "tools_changed":
        return "tools_changed"
    is_text_same = _is_text_same(old.response, new.response)
    is_same = is_text_same and leading >= min(len(old.items), len(new.items))
    # What stands beside messages counts; of token ids it is not certain that a setting is among them.
    if setting is not None and (is_same or isinstance(new.prompt, Messages)):
        return setting[0]
    if new.has_compaction and not old.has_compaction:
        return "context_compacted"
    if new.is_truncated:
        return "history_truncated"
    if is_text_same and _is_thought_dropped(old.items, new.items, leading):
        return "reasoning_dropped"
    return "input_changed"


def _is_thought_dropped(old: Sequence[Item], new: Sequence[Item], leading: int) -> bool:
    """Whether what was thought is gone: from the input, or, where the input is the same, by the model's template."""
    rest = [item for item in old[leading:] if not isinstance(item.value, Reasoning)]
    if leading == len(old):
        return any(isinstance(item.value, Reasoning) for item in old)
    is_gone = isinstance(old[leading].value, Reasoning)
    return is_gone and (not rest or leading == len(new) or is_same(rest[0], new[leading]))


def nearest(earlier: Collection[KnownPrompt], new: KnownPrompt) -> KnownPrompt | None:
    """The earlier prompt with which a new one has most in common, if it goes on from it or has the same key; of equals
    the first."""
    given = set(new.digests) if earlier else ()
    key, found, most = new.response.prompt_cache_key, None, 0
    for known in earlier:
        is_named = key is not None and known.response.prompt_cache_key == key
        if not is_named and not continues(known, given):
            continue
        sizes = zip(known.items, known.digests, strict=True)
        shared = sum(len(item.raw) for item, one in sizes if one in given) + is_named
        if shared > most:
            found, most = known, shared
    return found


def continues(old: KnownPrompt, given: Container[int]) -> bool:
    """Whether a request whose items have these digests goes on from an earlier one that it does not name."""
    ends = zip(reversed(old.items), reversed(old.digests), strict=True)
    spoken = (one for item, one in ends if not _is_system(item))
    return any(one in given for one in islice(spoken, LAST_ITEMS))


def _is_system(item: Item) -> bool:
    value = item.value
    return isinstance(value, Message) and value.role in ("system", "developer")


# --- how much is the same -------------------------------------------------------------------------


def is_same(one: Item, other: Item) -> bool:
    """Whether the model sees the same of both."""
    if one.raw == other.raw:
        return True
    is_alike = type(one.value) is type(other.value)
    return is_alike and (digest(one) == digest(other) or said(one) == said(other))


def _leading_items(old: Sequence[Item], new: Sequence[Item]) -> int:
    """How many items at the beginning are the same."""
    for count, (one, other) in enumerate(zip(old, new, strict=False)):
        if not is_same(one, other):
            return count
    return min(len(old), len(new))


def _common(
    old: KnownPrompt, new: KnownPrompt, setting: Setting | None, leading: int
) -> tuple[int, bool]:
    """How many tokens at the beginning are the same, and whether these are all of the earlier prompt."""
    match old.prompt, new.prompt:
        case Tokens(), Tokens():
            if old.fingerprint != new.fingerprint:
                return 0, False
            common = first_difference(old.prompt.flat(), new.prompt.flat())
            return common, common >= min(old.tokens, new.prompt.length)
        case Messages(), Messages() if setting is None:
            first, second = (b",".join(one.chunks()) for one in (old.prompt, new.prompt))
            same = first_difference(first, second)
            share = same / max(1, len(first))
            return int(old.tokens * share), same >= min(len(first), len(second))
        case _ if setting is None and _is_text_same(old.response, new.response):
            # Nothing but the items is known.
            sizes = [len(item.raw) for item in old.items]
            share = sum(sizes[:leading]) / max(1, sum(sizes))
            return int(old.tokens * share), leading >= min(len(old.items), len(new.items))
        case _:
            return 0, False


def _lost(old: KnownPrompt, new: KnownPrompt, common: int, first: int, *, is_all: bool) -> int:
    """How many tokens stand after the place in both prompts, by the share of the bytes of the items from there on."""
    rest, given = old.items[first:], new.items[first:]
    size = sum(len(item.raw) for item in rest)
    known, digests = set(new.digests[first:]), old.digests[first:]
    sizes = zip(rest, digests, strict=True)
    kept: float = sum(len(item.raw) for item, one in sizes if one in known)
    if rest and given and digests[0] not in known:
        # The item that changed goes on like before after what changed in it.
        kept += len(rest[0].raw) * same_end(said(rest[0]), said(given[0]))
    share = 1.0 if is_all or not size else kept / size
    return min(round((old.tokens - common) * share), new.tokens - common)


# --- what the requests say ------------------------------------------------------------------------


def changed_setting(old: Response, new: Response) -> Setting | None:
    """The first setting that differs, with both its values."""
    one, other = _text(old.text), _text(new.text)
    values: dict[PromptReason, tuple[Raw | str, Raw | str]] = {
        "tools_changed": (old.tools, new.tools),
        "text_format_changed": (one.format, other.format),
        "reasoning_effort_changed": (old.reasoning.effort or "", new.reasoning.effort or ""),
        "verbosity_changed": (one.verbosity, other.verbosity),
    }
    for reason, (first, second) in values.items():
        if first != second:
            return reason, _written(first), _written(second)
    return None


def _written(value: Raw | str) -> str:
    return value if isinstance(value, str) else bytes(value).decode()


def instructions(response: Response) -> str:
    """The instructions of the request."""
    return _string(response.instructions) or ""


def _is_text_same(old: Response, new: Response) -> bool:
    return old.instructions == new.instructions or instructions(old) == instructions(new)


# --- where it is ----------------------------------------------------------------------------------


def _parted(
    old: KnownPrompt, new: KnownPrompt, reason: PromptReason, common: int, leading: int = 0
) -> Parting:
    place, one, other = _place(old, new, reason, leading)
    at = first_difference(one, other)
    if place.part in ("instructions", "input", "tools"):
        column = at - one.rfind("\n", 0, at) - 1
        place = msgspec.structs.replace(place, character=column, line=line_of(one, at))
    # A change before the input costs all of it. A template that drops thoughts writes everything after them again.
    first = leading if place.part == "input" else 0
    is_all = reason == "context_compacted" or leading == len(old.items)
    lost = max(0, _lost(old, new, common, first, is_all=is_all))
    sides = (around(one, at), around(other, at))
    items: tuple[Item, ...] = ()
    if (number := place.item) is not None and place.part == "input":
        items = (*old.items[number : number + 1], *new.items[number : number + 1])
    return Parting(reason, place, *sides, common, max(0, old.tokens - common), lost, items)


def _place(
    old: KnownPrompt, new: KnownPrompt, reason: PromptReason, leading: int
) -> tuple[Place, str, str]:
    """The part that differs, as it was and as it is."""
    if reason == "model_changed":
        return Place("model"), old.response.model, new.response.model
    if reason == "tools_changed":
        return _tools_place(old.response.tools, new.response.tools)
    if reason in SETTINGS:
        setting = changed_setting(old.response, new.response)
        assert setting is not None, "the reason is a setting"
        return Place(SETTINGS[reason]), setting[1], setting[2]
    one, other = instructions(old.response), instructions(new.response)
    if one != other:
        return Place("instructions"), one, other
    if leading == len(old.items) and reason == "reasoning_dropped":
        leading = next(n for n, item in enumerate(old.items) if isinstance(item.value, Reasoning))
        item = old.items[leading]
        return Place("input", leading, type_of(item)), said(item), ""
    gone, came = old.items[leading : leading + 1], new.items[leading : leading + 1]
    name = next((type_of(item) for item in (*gone, *came)), None)
    texts = ["".join(map(said, items)) for items in (gone, came)]
    return Place("input", leading, name), texts[0], texts[1]


def _tools_place(old: Raw, new: Raw) -> tuple[Place, str, str]:
    before, after = _tools(old), _tools(new)
    written = [[msgspec.json.encode(tool) for tool in tools] for tools in (before, after)]
    at = next(
        (n for n, (a, b) in enumerate(zip(*written, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    # The same tools may be spelt otherwise.
    at = min(at, max(len(before), len(after)) - 1)
    if sorted(written[0]) == sorted(written[1]):
        change = "reordered"
    elif len(before) == len(after):
        change = "changed"
    else:
        change = "added" if len(before) < len(after) else "removed"
    # What is gone is named, else what came.
    tool = (before if change == "removed" or at >= len(after) else after)[at]
    name = bytes(tool.get("name") or tool.get("server_label") or tool["type"])
    return Place("tools", at, _string(name), change=change), _written(old), _written(new)
