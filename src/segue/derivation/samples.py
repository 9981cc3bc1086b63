"""What does this template write for an answer with marked words in it?

In: a template, and an answer with its thought, its words and its calls. Out: what the model would have said: the text
after its cue. Which form of call a template takes is tried first: arguments as an object or as text, an answer without
words as an empty text, as none or without the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from segue.errors import InvalidRequest
from segue.vocabularies.chat_template import Chat, TemplateRunner
from segue.wire.requests import Effort

QUESTION: Chat = [{"role": "user", "content": "Hi"}]
# In these no template can have words of its own.
FIRST_TOOL = "qztool"
OTHER_TOOL = "qzother"
FIRST_KEY = "qzkey"
OTHER_KEY = "qzmore"
VALUE = "qzvalue"
OTHER_VALUE = "qzlast"
WORDS = "qzwords"
THOUGHT = "qzthought"
RESULT = "qzresult"
# Some hundred are usual.
RUNS_MAX = 1_000
# Nine letters, as some templates want them.
IDS = ("qzidentab", "qzidentcd")
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
EFFORTS: tuple[Effort | None, ...] = (None, "high")
NO_WORDS: tuple[dict[str, object], ...] = ({"content": ""}, {"content": None}, {})
# What a template writes that wanted text and got an object, or the other way round.
MISSPELT = ("{'", '{\\"', "None")
# Parts of a content that the template does not know.
DUMPED = re.compile(r"\{[\"']t")
ANYTHING: dict[str, object] = {"description": "Any."}


@dataclass(frozen=True, slots=True)
class SaidCall:
    """A call in a sample."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a model says."""

    text: str
    # What stands before it, up to where the model speaks; and how much of that an answer in history has, too.
    cued: str
    common: str


ONE = SaidCall(FIRST_TOOL, {FIRST_KEY: VALUE})


def tool_of(call: SaidCall) -> dict[str, object]:
    """A definition of the tool that this call calls."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    properties = {
        key: {"type": kinds.get(type(value), "object"), **ANYTHING}
        for key, value in call.arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    function = {"name": call.name, "description": "Does.", "parameters": parameters}
    return {"type": "function", "function": function}


class Samples:
    """Answers as one template writes them."""

    def __init__(self, runner: TemplateRunner, text: str, ends: Sequence[str]) -> None:
        """`ends`: the special tokens that end a turn."""
        self._runner = runner
        self.stops = tuple(ends)
        self._runs = 0
        self._ends = sorted(ends, key=len, reverse=True)
        self._is_text = False
        self._nothing: dict[str, object] = {}
        self.effort: Effort | None = None
        ways = [*self._ways(is_text=False)] or [*self._ways(is_text=True)]
        self.has_calls = bool(ways)
        if ways:
            _, self._is_text, self._nothing = min(ways, key=lambda way: way[0])
        # Where the template looks for a thought: a field, "[]" for parts of the content; None: nowhere.
        self.thought_field = self._field(text)

    def cue(self) -> str:
        """The smallest conversation up to where the model speaks."""
        return self._run(QUESTION, None, is_cued=True)

    def said(
        self,
        words: str = "",
        calls: Sequence[SaidCall] = (),
        thought: str = "",
        *,
        before: Chat = QUESTION,
        is_ended: bool = True,
    ) -> str | None:
        """What the model says after its cue, up to the token that ends its turn; None: the template refuses it."""
        said = self.sampled(words, calls, thought, before=before, is_ended=is_ended)
        return None if said is None else said.text

    def sampled(
        self,
        words: str = "",
        calls: Sequence[SaidCall] = (),
        thought: str = "",
        *,
        before: Chat = QUESTION,
        is_ended: bool = True,
    ) -> Sampled | None:
        """The same, and what stands before it."""
        tools = [tool_of(call) for call in {call.name: call for call in calls}.values()]
        try:
            cued = self._run(before, tools, is_cued=True)
            spoken = self._run([*before, self.answer(words, calls, thought)], tools, is_cued=False)
        except InvalidRequest:
            return None
        same = _same(cued, spoken)
        text = spoken[len(same) :]
        _, asked, cue = cued.rpartition(str(before[-1]["content"]))
        if same != cued and asked and f"{asked}{cue}" in text:
            # The question is written otherwise, once it is answered.
            same, text = cued, text.rpartition(f"{asked}{cue}")[2]
        return Sampled(self._ended(text) if is_ended else text, cued, same)

    def written(self, chat: Chat) -> str | None:
        """The whole conversation; None: the template refuses it."""
        try:
            return self._run(chat, [tool_of(ONE)] if self.has_calls else None, is_cued=False)
        except InvalidRequest:
            return None

    def answer(
        self, words: str, calls: Sequence[SaidCall] = (), thought: str = ""
    ) -> dict[str, object]:
        """The message of this answer."""
        message: dict[str, object] = {"role": "assistant"}
        message |= {"content": words} if words or not calls else self._nothing
        if thought and self.thought_field == "[]":
            parts = [{"type": "thinking", "thinking": thought}]
            message["content"] = [*parts, {"type": "text", "text": words}] if words else parts
        elif thought and self.thought_field is not None:
            message[self.thought_field] = thought
        if calls:
            message["tool_calls"] = [
                self._call(call, id) for call, id in zip(calls, IDS, strict=False)
            ]
        return message

    def result(self, text: str) -> Chat:
        """A call, and what its tool returned."""
        output: dict[str, object] = {
            "role": "tool", "tool_call_id": IDS[0], "name": FIRST_TOOL, "content": text,
        }  # fmt: skip
        return [self.answer("", [ONE]), output]

    def _call(self, call: SaidCall, id: str) -> dict[str, object]:
        arguments: object = dict(call.arguments)
        if self._is_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        return {"type": "function", "id": id, "function": function}

    def _ways(self, *, is_text: bool) -> Iterator[tuple[int, bool, dict[str, object]]]:
        """How an answer without words may be given, and how much the template writes of it."""
        self._is_text = is_text
        self.thought_field = None
        for nothing in NO_WORDS:
            self._nothing = nothing
            said = self.said(calls=[ONE], is_ended=False)
            if said and VALUE in said and not any(sign in said for sign in MISSPELT):
                yield len(said), is_text, nothing

    def _field(self, text: str) -> str | None:
        fields = (*(field for field in THOUGHT_FIELDS if field in text), "[]")
        calls = [ONE] if self.has_calls else []
        for self.effort in EFFORTS:
            for self.thought_field in fields:
                shown = [self.said(WORDS, thought=THOUGHT), self.said("", calls, THOUGHT)]
                if any(said and THOUGHT in said and not DUMPED.search(said) for said in shown):
                    return self.thought_field
        self.effort = None
        return None

    def _run(self, chat: Chat, tools: object, *, is_cued: bool) -> str:
        self._runs += 1
        if self._runs > RUNS_MAX:
            raise InvalidRequest(f"The chat template was tried {RUNS_MAX} times without a result.")
        return self._runner.run(chat, tools, 0, is_cued=is_cued, effort=self.effort)

    def _ended(self, text: str) -> str:
        """Up to the first token that ends a turn after the marked words."""
        last = max((text.rfind(word) + len(word) for word in _MARKED if word in text), default=0)
        at = [text.find(end, last) for end in self._ends]
        return text[: min((n for n in at if n >= 0), default=len(text))]


_MARKED = (VALUE, OTHER_VALUE, WORDS, THOUGHT, FIRST_TOOL, OTHER_TOOL)


def _same(text: str, other: str) -> str:
    """The letters with which both begin, without half a mark or word at the end."""
    count = next((n for n, (letter, wanted) in enumerate(zip(text, other, strict=False)) if letter != wanted),
                 min(len(text), len(other)))  # fmt: skip
    if count == len(text):
        return text
    return re.sub(r"(<[^<>\s]*|\[[A-Z_]*|\w+)\Z", "", text[:count])
