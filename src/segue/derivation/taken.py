"""What does a chat template take?

It is tried once, with small conversations of marked texts: where system messages may stand, who may speak after whom,
in which field it wants thoughts, and how calls and outputs are given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from msgspec import structs

from segue.derivation.roles import RoleRule, place
from segue.errors import InvalidRequest
from segue.vocabularies.chat_template import Chat, TemplateRunner
from segue.wire.requests import Effort

# The fields in which templates look for what the model thought.
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Thoughts may be shown only where the model is to think.
EFFORTS: tuple[Effort | None, ...] = (None, "high")
# Around a thought that stands in the text.
THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Taken:
    """What a template takes."""

    rule: RoleRule
    # The field for thoughts; None: they stand in the text, or nowhere if the template drops them there. In the field
    # "content" they are parts of it.
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
    # Whether they are known by the ids of their calls; otherwise by their order.
    names_ids: bool = False


def said(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": text}


def called(arguments: object, nothing: str | None, *ids: str) -> dict[str, object]:
    calls = [
        {"type": "function", "id": id, "function": {"name": f"tool_{id}", "arguments": arguments}}
        for id in ids
    ]
    return {"role": "assistant", "content": nothing, "tool_calls": calls}


def answered(id: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": id, "name": f"tool_{id}", "content": f"output {id}"}


ONE = "callnum01"
TWO = "callnum02"
ARGUMENTS = {"q": "argument-47"}
# What a template writes of an object that it wanted as text.
PYTHON_OBJECT = "{'q'"
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
ASKED = said("user", "question-47")


class Probe:
    """Tries small conversations with marked texts."""

    def __init__(self, runner: TemplateRunner, template: str) -> None:
        self._runner = runner
        self._template = template

    def taken(self) -> Taken:
        taken = Taken(rule=self._rule())
        if "tool_calls" in self._template:
            taken = self._with_calls(taken)
        call = called(ARGUMENTS, taken.nothing, ONE) if taken.has_calls else said("assistant", "a")
        if taken.is_text:
            call = called(json.dumps(ARGUMENTS), taken.nothing, ONE)
        has_role = "tool" in self._template
        has_outputs = has_role and self._takes([ASKED, call, answered(ONE)], f"output {ONE}")
        fields = (field for field in THOUGHT_FIELDS if self._shows_thoughts(field, call))
        thoughts = next(fields, None) or ("content" if self._takes_parts() else None)
        taken = replace(taken, has_outputs=has_outputs, thoughts=thoughts)
        if taken.thoughts is None:
            text = f"{THINK}\nthought-47\n{THOUGHT}\n\n"
            is_shown = self._shows("content", text, call) and self._shows_in_answers(text)
            taken = replace(taken, is_dropping=not is_shown)
        if has_outputs:
            goes_on = [ASKED, call, answered(ONE), said("user", "another-47")]
            alternates = taken.rule.alternates or not self._takes(
                goes_on, "question-47", "another-47"
            )
            rule = RoleRule(taken.rule.system, alternates)
            is_forgetful = self._forgets(rule, taken.thoughts, call)
            taken = replace(taken, rule=structs.replace(rule, is_forgetful=is_forgetful))
        return taken

    def _rule(self) -> RoleRule:
        first = said("system", "instruction-47")
        later = said("system", "correction-47")
        answer = said("assistant", "answer-47")
        again = said("user", "another-47")
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
        given: dict[bool, object] = {False: ARGUMENTS, True: json.dumps(ARGUMENTS)}
        # Of two ways to say nothing beside a call, the one of which less is written.
        ways = [
            (PYTHON_OBJECT in text, is_text, len(text), nothing)
            for is_text, arguments in given.items()
            for nothing in ("", None)
            if (text := self._called_with(arguments, nothing))
        ]
        if not ways:
            return taken
        _, is_text, _, nothing = min(ways, key=lambda way: way[:3])
        arguments = given[is_text]
        both = [ASKED, called(arguments, nothing, ONE, TWO), answered(ONE), answered(TWO)]
        names = (f"tool_{ONE}", f"tool_{TWO}", f"output {ONE}", f"output {TWO}")
        bare = [ASKED, called("argument-47", nothing, ONE), answered(ONE)]
        return replace(
            taken,
            has_calls=True,
            is_text=is_text,
            nothing=nothing,
            is_object=not self._takes(bare, "argument-47", tools=TOOLS),
            is_parallel=self._takes(both, *names, tools=TOOLS, is_ordered=False),
            names_ids=self._names_ids(arguments, nothing),
        )

    def _called_with(self, arguments: object, nothing: str | None) -> str:
        """What the template writes of a call with these arguments; nothing if it does not take them."""
        chat = [ASKED, called(arguments, nothing, ONE), answered(ONE)]
        if not self._takes(chat, f"tool_{ONE}", "argument-47", tools=TOOLS, is_ordered=False):
            return ""
        return self._runner.run(chat, TOOLS, 0, is_cued=True)

    def _names_ids(self, arguments: object, nothing: str | None) -> bool:
        """Whether the ids of calls stand in the prompt as they are given."""
        function = {"name": "look", "arguments": arguments}
        call = {"type": "function", "id": ONE, "function": function}
        calling: dict[str, object] = {"role": "assistant", "content": nothing, "tool_calls": [call]}
        output = {**said("tool", "output"), "tool_call_id": ONE, "name": "look"}
        return self._takes([ASKED, calling, output], ONE, tools=TOOLS)

    def _takes_parts(self) -> bool:
        """Whether a thought is shown that is a part of the content."""
        parts = [{"type": "thinking", "thinking": "thought-47"}, {"type": "text", "text": "a-47"}]
        answer: dict[str, object] = {"role": "assistant", "content": parts}
        chat = [ASKED, answer]
        return (
            "thinking" in self._template
            and self._takes(chat, "thought-47", "a-47")
            and (not self._takes(chat, "'thinking'") and not self._takes(chat, '"thinking"'))
        )

    def _shows_thoughts(self, field: str, call: dict[str, object]) -> bool:
        return field in self._template and self._shows(field, "thought-47", call)

    def _shows(self, field: str, text: str, call: dict[str, object]) -> bool:
        """Whether a thought is shown that stands in this field, of an answer or of a call."""
        answer = [ASKED, {**said("assistant", "answer-47"), field: text}]
        if field == "content":
            # The last answer of all is never written: a question follows it.
            answer.append(said("user", "another-47"))
        calling = [ASKED, {**call, field: text}, answered(ONE)]
        return any(
            self._takes(chat, "thought-47", tools=tools, effort=effort)
            for effort in EFFORTS
            for chat, tools in ((answer, None), (calling, TOOLS))
        )

    def _shows_in_answers(self, thought: str) -> bool:
        """Whether a thought that stands in the text is shown in an answer. Where it is not, it is no text before a call
        either: a server that keeps thoughts apart gives the template words only."""
        answer = said("assistant", f"{thought}answer-47")
        asked = [ASKED, answer, said("user", "another-47")]
        return any(
            self._takes(chat, "thought-47", tools=tools, effort=effort)
            for effort in EFFORTS
            for chat in ([ASKED, answer], asked)
            for tools in (None, TOOLS)
        )

    def _forgets(self, rule: RoleRule, field: str | None, call: dict[str, object]) -> bool:
        """Whether instructions after a tool's output, said as a user's, change what stands before it: thoughts are
        dropped, or the tools move."""
        if rule.system == "anywhere":
            return False
        thought = "thought-47" if field else f"{THINK}\nthought-47\n{THOUGHT}\n\n"
        calling = [ASKED, {**call, field or "content": thought}, answered(ONE)]
        asked = place([*calling, said("system", "another-47")], rule)
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
