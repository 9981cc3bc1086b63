"""How is a line that changes on every turn kept from the beginning of a prompt? An operator's rules, off by default.

In: a request, whose it is, and which client sent it. Out: the same request, or one in which the lines that a rule finds
in the instructions and in the system messages at the beginning are *moved* to the end of the input, or *pinned*: they
stay as they were in the first turn of the conversation. What was done is in `metadata` of the response.

A conversation is known by its parent, or, where a client sends its whole history, by the first message that is no
system message. Pinned lines are kept in memory only. Pure but for that.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b

import msgspec
from msgspec import Raw, structs

from segue.settings import RepairSettings
from segue.wire.cache import REPAIRS
from segue.wire.requests import Create

# Conversations whose lines are kept, and how much of a line.
PINNED_MAX, LINE_CHARS_MAX = 10_000, 2_000
# System messages that may stand before the first other item.
SYSTEM_MAX = 4
SYSTEM = ("system", "developer")

# What some clients are known to write. `known = "NAME"` in a rule stands for its pattern and what is done.
KNOWN: dict[str, RepairSettings] = {
    # Claude Code's first line: another hash on every request.
    "claude-code": RepairSettings(pattern=r"^x-anthropic-billing-header:.*$", how="pin"),
    # opencode's <env>: the day.
    "opencode": RepairSettings(pattern=r"^\s*Today's date: .*$", how="move"),
    # A line with a date and a time, as many home-made agents begin.
    "timestamp": RepairSettings(
        pattern=r"^.*\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*$|^.*\b\d\d:\d\d:\d\d\b.*$", how="move"
    ),
}

_decode = msgspec.json.Decoder(dict[str, object]).decode
encode = msgspec.json.encode
Replaced = Callable[[re.Match[str]], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """A line that changes, and what to do with it."""

    name: str
    pattern: re.Pattern[str]
    moves: bool
    settings: RepairSettings

    def applies(self, owner: str, client: str, model: str) -> bool:
        """Whether it is meant for this request."""
        wanted = self.settings
        return (
            wanted.owner in ("", owner)
            and fnmatchcase(client.lower(), (wanted.client or "*").lower())
            and fnmatchcase(model, wanted.model or "*")
        )


@dataclass(slots=True)
class RepairedTalk:
    """What was done in the last turn of a conversation."""

    model: str
    # The lines that each rule found first.
    pinned: dict[str, list[str]] = field(default_factory=dict)


def rules_of(settings: Sequence[RepairSettings]) -> list[Rule]:
    """The rules of the operator; those that name a known client have its pattern."""
    rules = []
    for number, one in enumerate(settings, 1):
        known = KNOWN.get(one.known, one)
        pattern = re.compile(one.pattern or known.pattern, re.MULTILINE)
        name = one.name or one.known or f"rule {number}"
        rules.append(Rule(name, pattern, (one.how or known.how) != "pin", one))
    return rules


class Repairs:
    """Applies the rules to requests."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._conversations: OrderedDict[tuple[str, str], RepairedTalk] = OrderedDict()

    def repair(self, create: Create, owner: str, client: str, turn_id: str) -> Create:
        """The request as it is rendered."""
        items = create.input if isinstance(create.input, list) else []
        key, is_new = _conversation(create, items)
        known = self._conversations.get((owner, key))
        model = create.model or (known.model if known is not None else "")
        rules = [rule for rule in self._rules if rule.applies(owner, client, model)]
        if not rules:
            return create
        talk = RepairedTalk(model, {} if known is None or is_new else known.pinned)
        change = _Change(create, items)
        done = [rule.name for rule in rules if change.apply(rule, talk.pinned)]
        for name in dict.fromkeys((key, turn_id)):
            self._conversations[owner, name] = talk
        while len(self._conversations) > PINNED_MAX:
            self._conversations.popitem(last=False)
        return change.result(done) if done else create


def _conversation(create: Create, items: Sequence[Raw]) -> tuple[str, bool]:
    """What a conversation is known by, and whether it begins here."""
    if create.previous_response_id is not None:
        return create.previous_response_id, False
    if create.conversation_id is not None:
        return create.conversation_id, False
    first = next((n for n, raw in enumerate(items) if not _is_system(_opened(raw))), len(items))
    text = create.input if isinstance(create.input, str) else b"".join(items[first : first + 1])
    digest = blake2b(text.encode() if isinstance(text, str) else text, digest_size=16)
    # What follows the first message is there only once the model has spoken.
    return digest.hexdigest(), len(items) <= first + 1


def _opened(raw: Raw) -> dict[str, object]:
    """An item; empty where it is none, which is refused later."""
    try:
        return _decode(raw)
    except msgspec.MsgspecError:
        return {}


def _is_system(item: dict[str, object]) -> bool:
    return item.get("role") in SYSTEM


class _Change:
    """A request on its way to being repaired."""

    def __init__(self, create: Create, items: Sequence[Raw]) -> None:
        self._create = create
        self._instructions = create.instructions
        self._items = list(items)
        self._moved: list[str] = []
        self._system: dict[int, dict[str, object]] = {}
        for number, raw in enumerate(items[:SYSTEM_MAX]):
            item = _opened(raw)
            if not _is_system(item):
                break
            self._system[number] = item

    def apply(self, rule: Rule, pinned: dict[str, list[str]]) -> bool:
        """Whether the rule found a line."""
        found: list[str] = []
        first = list(pinned.get(rule.name, ()))

        def replaced(match: re.Match[str]) -> str:
            line = match[0][:LINE_CHARS_MAX]
            found.append(line)
            if rule.moves:
                return ""
            return first[len(found) - 1] if len(found) <= len(first) else match[0]

        if self._instructions:
            self._instructions = rule.pattern.sub(replaced, self._instructions)
        for item in self._system.values():
            _rewrite(item, rule.pattern, replaced)
        if rule.moves:
            self._moved += filter(None, found)
        elif found and not first:
            pinned[rule.name] = found
        return any(found)

    def result(self, done: Sequence[str]) -> Create:
        """The request with everything in its new place."""
        items = self._items
        for number, item in self._system.items():
            items[number] = Raw(encode(item))
        given: str | list[Raw] | None = items if items else self._create.input
        if self._moved:
            given = _with_line(given, "\n".join(self._moved))
        return structs.replace(
            self._create,
            instructions=self._instructions,
            input=given,
            metadata={**(self._create.metadata or {}), REPAIRS: ", ".join(done)[:512]},
        )


def _rewrite(item: dict[str, object], pattern: re.Pattern[str], replaced: Replaced) -> None:
    """The same in the text of a message."""
    match item:
        case {"content": str() as text}:
            item["content"] = pattern.sub(replaced, text)
        case {"content": [*parts]}:
            for one in parts:
                if isinstance(one, dict) and isinstance(one.get("text"), str):
                    one["text"] = pattern.sub(replaced, one["text"])
        case _:
            pass


def _with_line(given: str | list[Raw] | None, line: str) -> list[Raw]:
    """The input with this text at its end, as a message of the developer: what the client has sent stays as it is."""
    if isinstance(given, str):
        given = [Raw(encode({"type": "message", "role": "user", "content": given}))]
    part = {"type": "input_text", "text": line}
    added = {"type": "message", "role": "developer", "content": [part]}
    return [*(given or ()), Raw(encode(added))]
