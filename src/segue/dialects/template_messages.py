"""How does a conversation look to a chat template?

In: items. Out: chat messages as this template takes them. What it takes is tried once, with marked texts: where system
messages may stand, who may speak after whom, in which field it wants thoughts, and how calls and outputs are given.
What it has no place for is written into the text, as Hermes models have it. Nothing is lost in silence, and nothing is
refused that can be said in another way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from msgspec import structs

from segue.derivation.roles import RoleRule, place
from segue.dialects.chatml import (
    JOINS,
    ROLES,
    THINK,
    THOUGHT,
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
from segue.vocabularies.shield import Shield
from segue.wire.inner_json import inner_object
from segue.wire.items import Item
from segue.wire.kinds import answer_of, call_of
from segue.wire.requests import Effort

# The fields in which templates look for what the model thought.
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Thoughts may be shown only where the model is to think.
EFFORTS: tuple[Effort | None, ...] = (None, "high")
# Of a model turn of any order.
ANY_ORDER = JOINS | {("talk", "talk"), ("call", "talk"), ("talk", "think"), ("call", "think")}
SHORT_ID = re.compile("[A-Za-z0-9]{9}")
NINE_LETTERS = re.compile(r"length\s*!=\s*9\b")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a template takes."""

    rule: RoleRule
    # The field for thoughts; None: they stand in the text, or nowhere if the template drops them there.
    thoughts: str | None = None
    is_dropping: bool = False
    # Whether there is a field for calls; if not, they stand in the text.
    has_calls: bool = False
    # Arguments as JSON text, not as an object; an object also where they are none; several calls in a message.
    is_text: bool = False
    is_object: bool = False
    is_parallel: bool = True
    # The content of a message that has nothing but calls.
    nothing: str | None = ""
    # Whether the outputs of tools have a role of their own.
    has_outputs: bool = False


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


class TemplateMessages:
    """Writes items as messages for one template."""

    def __init__(self, runner: TemplateRunner, template: str, shield: Shield) -> None:
        self._shield = shield
        self._has_tools = "tools" in template
        # Outputs are known by the ids of their calls; otherwise by their order.
        self._names_ids = "tool_call_id" in template
        # Mistral's models want ids of nine letters, which they invent; Kimi's models count their calls.
        self.has_short_ids = NINE_LETTERS.search(template) is not None
        self._is_counting = "<|tool_call_argument_begin|>" in template
        self.taken = _Probe(runner, template).taken()

    def rounds(self, scene: Scene, show: Show | None) -> list[Said]:
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
            if not self._names_ids:
                given = in_call_order(given, before)
            before = round.wrote
            chat = self._messages(given, calls, show)
            wrote = self.wrote(_whole(before, answered), calls) if round.did_sample else []
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

    def wrote(self, items: Sequence[Item], calls: _Calls) -> Chat:
        """What the model wrote in one go, as one message."""
        parts = parts_of(items)
        if all(part.kind in ("think", "talk", "call") for part in parts):
            self._remember(calls, parts)
            return [self._assistant(parts, calls)]
        return self._messages(items, calls)

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
        if taken.thoughts is not None:
            thoughts = [part.text for part in parts if part.kind == "think"]
            parts = [part for part in parts if part.kind != "think"]
            message[taken.thoughts] = self._shield.text("\n\n".join(thoughts))
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

    def _remember(self, calls: _Calls, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.kind == "call":
                calls[part.call_id] = _WrittenCall(part.name, self._written_id(part, len(calls)))

    def _written_id(self, part: Part, count: int) -> str:
        if self._is_counting:
            return f"functions.{part.name}:{count}"
        if not self.has_short_ids or SHORT_ID.fullmatch(part.call_id):
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


# --- what does this template take? ----------------------------------------------------------------


def _said(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": text}


def _called(arguments: object, nothing: str | None, *ids: str) -> dict[str, object]:
    calls = [
        {"type": "function", "id": id, "function": {"name": f"tool_{id}", "arguments": arguments}}
        for id in ids
    ]
    return {"role": "assistant", "content": nothing, "tool_calls": calls}


def _answered(id: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": id, "name": f"tool_{id}", "content": f"output {id}"}


ONE = "callnum01"
TWO = "callnum02"
ARGUMENTS = {"q": "argument-47"}
TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {
        "type": "object",
        "properties": {"q": {"type": "string", "description": "What"}},
        "required": ["q"],
    },
}
TOOLS = [{"type": "function", "function": TOOL}]
ASKED = _said("user", "question-47")


class _Probe:
    """Tries small conversations with marked texts."""

    def __init__(self, runner: TemplateRunner, template: str) -> None:
        self._runner = runner
        self._template = template

    def taken(self) -> Taken:
        taken = Taken(rule=self._rule())
        if "tool_calls" in self._template:
            taken = self._with_calls(taken)
        call = (
            _called(ARGUMENTS, taken.nothing, ONE) if taken.has_calls else _said("assistant", "a")
        )
        if taken.is_text:
            call = _called(dumps(ARGUMENTS), taken.nothing, ONE)
        has_role = "tool" in self._template
        has_outputs = has_role and self._takes([ASKED, call, _answered(ONE)], f"output {ONE}")
        fields = (field for field in THOUGHT_FIELDS if self._shows_thoughts(field, call))
        taken = replace(taken, has_outputs=has_outputs, thoughts=next(fields, None))
        if taken.thoughts is None:
            text = f"{THINK}\nthought-47\n{THOUGHT}\n\n"
            taken = replace(taken, is_dropping=not self._shows("content", text, call))
        if has_outputs:
            goes_on = [ASKED, call, _answered(ONE), _said("user", "another-47")]
            alternates = taken.rule.alternates or not self._takes(
                goes_on, "question-47", "another-47"
            )
            rule = RoleRule(taken.rule.system, alternates)
            is_forgetful = self._forgets(rule, taken.thoughts, call)
            taken = replace(taken, rule=structs.replace(rule, is_forgetful=is_forgetful))
        return taken

    def _rule(self) -> RoleRule:
        first = _said("system", "instruction-47")
        later = _said("system", "correction-47")
        answer = _said("assistant", "answer-47")
        again = _said("user", "another-47")
        is_alternating = not self._takes([ASKED, again], "question-47", "another-47")
        goes_on = [first, ASKED, answer, again]
        if not self._takes(goes_on, "instruction-47", "question-47", "answer-47", "another-47"):
            # Refused, lost, or moved to the end, where it is lost as soon as a tool answers.
            return RoleRule(system="never", alternates=is_alternating)
        middle = [first, ASKED, answer, later, again]
        marks = ("instruction-47", "question-47", "answer-47", "correction-47", "another-47")
        is_anywhere = self._takes(middle, *marks) and self._takes(
            [first, ASKED, later], "instruction-47", "question-47", "correction-47"
        )
        return RoleRule(system="anywhere" if is_anywhere else "first", alternates=is_alternating)

    def _with_calls(self, taken: Taken) -> Taken:
        ways: list[tuple[bool, str | None]] = [(False, ""), (False, None), (True, ""), (True, None)]
        for is_text, nothing in ways:
            arguments: object = dumps(ARGUMENTS) if is_text else ARGUMENTS
            chat = [ASKED, _called(arguments, nothing, ONE), _answered(ONE)]
            if self._takes(chat, f"tool_{ONE}", "argument-47", tools=TOOLS, is_ordered=False):
                break
        else:
            return taken
        both = [ASKED, _called(arguments, nothing, ONE, TWO), _answered(ONE), _answered(TWO)]
        names = (f"tool_{ONE}", f"tool_{TWO}", f"output {ONE}", f"output {TWO}")
        bare = [ASKED, _called("argument-47", nothing, ONE), _answered(ONE)]
        return replace(
            taken,
            has_calls=True,
            is_text=is_text,
            nothing=nothing,
            is_object=not self._takes(bare, "argument-47", tools=TOOLS),
            is_parallel=self._takes(both, *names, tools=TOOLS, is_ordered=False),
        )

    def _shows_thoughts(self, field: str, call: dict[str, object]) -> bool:
        return field in self._template and self._shows(field, "thought-47", call)

    def _shows(self, field: str, text: str, call: dict[str, object]) -> bool:
        """Whether a thought is shown that stands in this field, of an answer or of a call."""
        answer = [ASKED, {**_said("assistant", "answer-47"), field: text}]
        calling = [ASKED, {**call, field: text}, _answered(ONE)]
        return any(
            self._takes(chat, "thought-47", tools=tools, effort=effort)
            for effort in EFFORTS
            for chat, tools in ((answer, None), (calling, TOOLS))
        )

    def _forgets(self, rule: RoleRule, field: str | None, call: dict[str, object]) -> bool:
        """Whether instructions after a tool's output, said as a user's, change what stands before it: thoughts are
        dropped, or the tools move."""
        if rule.system == "anywhere":
            return False
        thought = "thought-47" if field else f"{THINK}\nthought-47\n{THOUGHT}\n\n"
        calling = [ASKED, {**call, field or "content": thought}, _answered(ONE)]
        asked = place([*calling, _said("system", "another-47")], rule)
        for effort in EFFORTS:
            try:
                text, longer = (
                    self._runner.run(chat, TOOLS, 0, is_cued=False, effort=effort)
                    for chat in (calling, asked)
                )
            except InvalidRequest:
                continue
            if not longer.startswith(text.partition(f"output {ONE}")[0]):
                return True
        return False

    def _takes(
        self,
        chat: Chat,
        *marks: str,
        tools: object = None,
        effort: Effort | None = None,
        is_ordered: bool = True,
    ) -> bool:
        """Whether the template writes all these texts, in this order."""
        try:
            text = self._runner.run(chat, tools, 0, is_cued=True, effort=effort)
        except InvalidRequest:
            return False
        at = 0
        for mark in marks:
            at = text.find(mark, at if is_ordered else 0)
            if at < 0:
                return False
        return True
