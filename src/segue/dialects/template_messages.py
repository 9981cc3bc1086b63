"""How does a conversation look to a chat template?

In: items. Out: chat messages as this template takes them. What it takes is tried once, with marked texts: where system
messages may stand, who may speak after whom, in which field it wants thoughts, and how calls and outputs are given.
What it has no place for is written into the text, as Hermes models have it. Nothing is lost in silence, and nothing is
refused that can be said in another way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from segue.derivation.roles import place
from segue.derivation.taken import ASKED, ONE, TOOLS, Probe, Taken
from segue.dialects.chatml import (
    JOINS,
    ROLES,
    content_of,
    definitions_of,
    tools_content,
)
from segue.dialects.parts import Part, Show, blocks_of, dumps, in_call_order, parts_of
from segue.errors import InvalidRequest
from segue.readers.offers import definition_of
from segue.seams.history import Round
from segue.seams.model import Scene
from segue.vocabularies.chat_template import Chat, TemplateRunner
from segue.vocabularies.images import moved_first, stands_first
from segue.vocabularies.shield import Shield
from segue.wire.inner_json import inner_object
from segue.wire.items import Item
from segue.wire.kinds import answer_of, call_of

# Of a model turn of any order.
ANY_ORDER = JOINS | {("talk", "talk"), ("call", "talk"), ("talk", "think"), ("call", "think")}
SHORT_ID_CHARS = 9
SHORT_ID = re.compile(f"[A-Za-z0-9]{{{SHORT_ID_CHARS}}}")
COUNTED_ID = re.compile(r"functions\.[^\s:]+:\d+")
NINE_LETTERS = re.compile(r"length\s*(?P<sign>!=|<)\s*9\b")


class Said(NamedTuple):
    """One round as chat messages: what was given, and what the model wrote."""

    given: Chat
    wrote: Chat


class _WrittenCall(NamedTuple):
    """A call as it is given to the template."""

    name: str
    id: str


# By the id that a client knows.
_Calls = dict[str, _WrittenCall]
# The ids that the model itself gave its calls in a round, by the ids that clients know.
OwnIds = Callable[[Round], Mapping[str, str]]
NO_IDS: Mapping[str, str] = {}


class TemplateMessages:
    """Writes items as messages for one template."""

    def __init__(
        self, runner: TemplateRunner, template: str, shield: Shield, placeholder: str = ""
    ) -> None:
        self._runner = runner
        self._has_images_first = bool(placeholder) and stands_first(runner, placeholder)
        self._shield = shield
        self._has_tools = "tools" in template
        # Mistral's models want ids of nine letters, which they invent; Kimi's models count their calls.
        rule = NINE_LETTERS.search(template)
        self.has_short_ids = rule is not None and rule["sign"] == "!="
        # Some take longer ones, too.
        self._has_least_ids = rule is not None and rule["sign"] == "<"
        self._is_counting = "<|tool_call_argument_begin|>" in template
        self.taken: Taken = Probe(runner, template).taken()

    def rounds(self, scene: Scene, show: Show | None, own_ids: OwnIds) -> list[Said]:
        """Every round that the model still sees, and then what is given now; `show` writes images."""
        rounds = [*scene.history(), Round(scene.given)]
        answered = {
            answer.call_id
            for round in rounds
            for item in round.given
            if (answer := answer_of(item.value)) is not None
        }
        calls: _Calls = {}
        said: list[Said] = []
        before: Sequence[Item] = ()
        for round in rounds:
            given = _whole(round.given, answered)
            if not self.taken.names_ids:
                given = in_call_order(given, before)
            before = round.wrote
            chat = self._messages(given, calls, show)
            own = own_ids(round) if self.taken.names_ids else NO_IDS
            whole = _whole(before, answered)
            wrote = self.wrote(whole, calls, own) if round.did_sample else []
            said.append(Said(chat, wrote))
        return said

    def chat(self, scene: Scene, rounds: Sequence[Said]) -> tuple[Chat, object]:
        """The whole conversation with its head, in an order that the template takes; and the tools."""
        chat = [message for said in rounds for message in (*said.given, *said.wrote)]
        head = scene.head
        tools = None
        if head.tools.offers and self._has_tools:
            tools = [self._shield.value(definition_of(offer)) for offer in head.tools.offers]
        elif head.tools.offers:
            told = self._shield.joined(tools_content(head.tools.offers))
            leads = bool(chat) and head.instructions is None and chat[0]["role"] == "system"
            chat.insert(1 if leads else 0, {"role": "system", "content": told})
        if head.instructions is not None:
            chat.insert(0, self._message("system", head.instructions))
        rule = self.taken.rule
        first = next((message for message in chat if message["role"] != "system"), None)
        if rule.alternates and first is not None and first["role"] != "user":
            # The model must not be the first to speak.
            chat.insert(chat.index(first), {"role": "user", "content": ""})
        return [*self._split(place(chat, rule))], tools

    def wrote(self, items: Sequence[Item], calls: _Calls, own: Mapping[str, str] = NO_IDS) -> Chat:
        """What the model wrote in one go, as one message."""
        parts = parts_of(items)
        if all(part.kind in ("think", "talk", "call") for part in parts):
            self._remember(calls, parts, own)
            return [self._assistant(parts, calls)]
        return self._messages(items, calls)

    def written_call(self, name: str, arguments: Mapping[str, str]) -> str:
        """What the template writes of a conversation with this call; nothing if it has no place for one."""
        call = Part("call", dumps(arguments), name, ONE)
        calls: _Calls = {}
        self._remember(calls, [call])
        try:
            return self._runner.run(
                [ASKED, self._assistant([call], calls)], TOOLS, 0, is_cued=False
            )
        except InvalidRequest:
            return ""

    def looked(self) -> Chat:
        """A small conversation with a call and its output."""
        call = Part("call", '{"q": "x"}', "look", "call")
        output = Part("response", "1", call_id="call")
        calls: _Calls = {}
        self._remember(calls, [call])
        if self.taken.has_outputs:
            answer = self._output(output, calls)
        else:
            answer = {"role": "user", "content": self._shield.joined(content_of([output]))}
        return [{"role": "user", "content": "Hi"}, self._assistant([call], calls), answer]

    def _messages(self, items: Sequence[Item], calls: _Calls, show: Show | None = None) -> Chat:
        chat: Chat = []
        for parts in blocks_of(items, JOINS, definitions_of, show):
            match parts[0].kind:
                case "response" if self.taken.has_outputs and self._has_calls(parts, calls):
                    chat += [self._output(part, calls) for part in parts]
                case "think" | "talk" | "call":
                    self._remember(calls, parts)
                    chat.append(self._assistant(parts, calls))
                case kind:
                    content = self._shield.joined(content_of(parts))
                    if self._has_images_first and show is not None:
                        content = moved_first(content)
                    chat.append({"role": ROLES.get(kind, kind), "content": content})
        return chat

    def _has_calls(self, parts: Sequence[Part], calls: _Calls) -> bool:
        """Whether the calls that these outputs answer are shown; templates refuse outputs of nothing."""
        return not self.taken.has_calls or all(part.call_id in calls for part in parts)

    def _message(self, role: str, text: str) -> dict[str, object]:
        return {"role": role, "content": self._shield.text(text)}

    def _output(self, part: Part, calls: _Calls) -> dict[str, object]:
        call = calls.get(part.call_id) or _WrittenCall("", part.call_id)
        named = {"name": self._shield.text(call.name)} if call.name else {}
        id = self._shield.text(call.id)
        return {**self._message("tool", part.text), "tool_call_id": id, **named}

    def _assistant(self, parts: Sequence[Part], told: _Calls) -> dict[str, object]:
        """One message of the model. What the template has no field for stays in the text."""
        taken = self.taken
        message: dict[str, object] = {"role": "assistant"}
        thought = ""
        if taken.thoughts is not None:
            thoughts = [part.text for part in parts if part.kind == "think"]
            parts = [part for part in parts if part.kind != "think"]
            thought = self._shield.text("\n\n".join(thoughts))
            if thought:
                message[taken.thoughts] = thought
        elif taken.is_dropping:
            parts = [part for part in parts if part.kind != "think"]
        calls = [
            self._call(part, told) for part in parts if part.kind == "call" and taken.has_calls
        ]
        if calls:
            parts = [part for part in parts if part.kind != "call"]
            message["tool_calls"] = calls
        content = self._shield.joined(content_of(parts))
        message["content"] = content if content or not calls else taken.nothing
        if taken.thoughts == "content" and thought:
            words = [{"type": "text", "text": content}] if content else []
            message["content"] = [{"type": "thinking", "thinking": thought}, *words]
        return message

    def _call(self, part: Part, calls: _Calls) -> dict[str, object]:
        arguments: object = part.text
        if not self.taken.is_text:
            found = inner_object(part.text.strip())
            if found is not None:
                arguments = found
            elif self.taken.is_object:
                arguments = {"input": part.text}
        function = {"name": part.name, "arguments": arguments}
        return {
            "type": "function",
            "id": self._shield.text(calls[part.call_id].id),
            "function": self._shield.value(function),
        }

    def _remember(
        self, calls: _Calls, parts: Sequence[Part], own: Mapping[str, str] = NO_IDS
    ) -> None:
        for part in parts:
            if part.kind == "call":
                id = own.get(part.call_id) or self._written_id(part, len(calls))
                calls[part.call_id] = _WrittenCall(part.name, id)

    def _written_id(self, part: Part, count: int) -> str:
        """The id of a call of which it is not known how the model wrote it."""
        if self._is_counting and not COUNTED_ID.fullmatch(part.call_id):
            return f"functions.{part.name}:{count}"
        is_taken = not self.has_short_ids or SHORT_ID.fullmatch(part.call_id)
        if is_taken and not (self._has_least_ids and len(part.call_id) < SHORT_ID_CHARS):
            return part.call_id
        return blake2b(part.call_id.encode(), digest_size=6).hexdigest()[:9]

    def _split(self, chat: Chat) -> Iterator[dict[str, object]]:
        """Where a message may have one call only: each call in its own, and its output after it."""
        if self.taken.is_parallel:
            yield from chat
            return
        waiting: dict[object, dict[str, object]] = {}
        for message in chat:
            calls = message.get("tool_calls")
            if message.get("tool_call_id") in waiting:
                yield waiting.pop(message["tool_call_id"])
            elif waiting:
                yield from waiting.values()
                waiting = {}
            if not isinstance(calls, list) or len(calls) < 2:
                yield message
                continue
            waiting = {
                call["id"]: {**(message if n == 0 else EMPTY), "tool_calls": [call]}
                for n, call in enumerate(calls)
            }
        yield from waiting.values()


EMPTY: dict[str, object] = {"role": "assistant", "content": ""}


def _whole(items: Sequence[Item], answered: set[str | None]) -> Sequence[Item]:
    """Without calls that were cut off and so were never answered: their arguments are broken."""

    def is_broken(item: Item) -> bool:
        if getattr(item.value, "status", None) != "incomplete":
            return False
        call = call_of(item.value)
        return call is not None and call.call_id not in answered

    return [item for item in items if not is_broken(item)]
