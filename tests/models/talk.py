"""A conversation that goes on, as the server keeps it and as chat messages.

The chat messages are what any other server would hand to the model's template; they are written here and never come
from the project's own conversion. What a model says is cut out of what its template writes (`judge.py`), read by the
project, and must be what was said: the thought, the words and the calls, and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import msgspec

from segue.dialects.choose import dialect_for
from segue.dialects.family import TokenDialect
from segue.seams.history import Round, Turn
from segue.seams.model import ItemClosed, ItemOpened, ItemText, Parsed, Scene, TurnClosed
from segue.seams.prompt import Head
from segue.turn.commit import warm_after
from segue.vocabularies.load import vocabulary_from_file
from segue.wire.items import Item
from segue.wire.response import Response
from segue.wire.tools import FunctionTool, Tools
from tests.contracts.dialect import flat, item, message, read, reasoning, tools_of
from tests.models.families import BY_NAME, ModelFamily, model_folder
from tests.models.judge import Chat, Judge, Refused, date_of

ROOT_AT = 1_794_700_000
PLACE = {"type": "string", "description": "A city."}
WEATHER = {"type": "object", "properties": {"city": PLACE}, "required": ["city"]}
FILTER = {
    "type": "object",
    "properties": {
        "filter": {
            "type": "object",
            "description": "What to keep.",
            "properties": {
                "kind": {"type": "string", "description": "Which."},
                "sizes": {"type": "array", "items": {"type": "number"}, "description": "How big."},
            },
        },
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Any of them."},
        "limit": {"type": "integer", "description": "How many."},
        "ratio": {"type": "number", "description": "How much."},
        "is_dry": {"type": "boolean", "description": "Whether to only look."},
        "text": {"type": "string", "description": "Words."},
    },
    "required": ["filter"],
}
SCHEMAS = {"get_weather": WEATHER, "search": FILTER}
FIRST = "What is the weather in Paris?"
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


class Absent(Exception):
    """The model has no such thing, so that there is nothing to try."""


def tools() -> Tools:
    return tools_of(
        *(
            FunctionTool(
                name=name,
                description=f"Does {name}.",
                parameters=msgspec.Raw(json.dumps(schema).encode()),
            )
            for name, schema in SCHEMAS.items()
        )
    )


NO_TOOLS = Tools(b"", (), b"", ())
CHAT_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]


@dataclass(frozen=True)
class Called:
    """A call that the model makes."""

    name: str
    arguments: dict[str, Any]


ONE = Called("get_weather", {"city": "Paris"})
TWO = Called("get_weather", {"city": "Rome"})
PROBES = [
    {"id": f"abcdefg{n:02}", "name": one.name, "arguments": one.arguments}
    for n, one in enumerate((ONE, TWO))
]


@dataclass
class Model:
    """A family as the server has it, and its judge."""

    family: ModelFamily
    # Where a prompt had other white space than the template writes around an answer.
    trimmed: str = ""

    @cached_property
    def judge(self) -> Judge:
        return Judge(model_folder(self.family.name), date_of(ROOT_AT), self.family.values)

    @cached_property
    def dialect(self) -> TokenDialect:
        folder = model_folder(self.family.name)
        return dialect_for(
            "auto", folder, vocabulary_from_file(folder), "", dict(self.family.values)
        )

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template has words for tools and calls, and a place for what they return."""
        return self.judge.writes_calls

    @cached_property
    def ignores_tools(self) -> bool:
        chat: Chat = [{"role": "user", "content": FIRST}]
        return not self.needs_tools and self.judge.write(chat, CHAT_TOOLS) == self.judge.write(chat)

    @cached_property
    def needs_tools(self) -> bool:
        """Whether this is a template for conversations with tools only."""
        try:
            self.judge.write([{"role": "user", "content": FIRST}])
        except Refused:
            return True
        return False

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template has a place for instructions, and keeps them once the model has spoken."""
        chat: Chat = [{"role": "system", "content": "Be brief."}, *ASKED]
        later = [*chat, {"role": "assistant", "content": "Yes."}]
        tools = CHAT_TOOLS if self.needs_tools else None
        try:
            return all("Be brief." in self.judge.write(one, tools) for one in (chat, later))
        except Refused:
            return False

    @cached_property
    def is_single(self) -> bool:
        """Whether the template has words for only one call in a message."""
        return not self._writes("Rome", self.judge.answer("", "", PROBES))

    @cached_property
    def keeps_words(self) -> bool:
        """Whether the template keeps what a model says before a call, there and in the same answer."""
        if self.family.declares_otherwise:
            return False
        answer = self.judge.answer("I will look.", "", PROBES[:1])
        following = [result_of(PROBES[0], "18")]
        try:
            said = self.judge.sampled(ASKED, answer, following, CHAT_TOOLS)
        except Refused:
            return False
        before = said.partition("Paris")[0]
        return "I will look." in before and not any(end in before for end in self.judge.ends)

    @cached_property
    def shows_ids(self) -> bool:
        """Whether the template writes the ids of calls into the prompt as they are."""
        chat = [*ASKED, self.judge.answer("", "", PROBES[:1]), result_of(PROBES[0], "18")]
        return PROBES[0]["id"] in self.judge.write(chat, CHAT_TOOLS)

    def _writes(self, text: str, answer: dict[str, Any]) -> bool:
        following = [result_of(one, "18") for one in PROBES[: len(answer["tool_calls"])]]
        try:
            return text in self.judge.write([*ASKED, answer, *following], CHAT_TOOLS)
        except Refused:
            return False

    def sampled(self, talk: Talk, answer: dict[str, Any], following: Chat) -> list[int]:
        return self.judge.ids(self.judge.sampled(talk.chat, answer, following, talk.tools))


def model(name: str) -> Model:
    return Model(BY_NAME[name])


ASKED: Chat = [{"role": "user", "content": FIRST}]


def result_of(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["name"], "content": text}


class Talk:
    """A conversation that goes on, in both forms."""

    def __init__(self, model: Model, *, with_tools: bool = True, instructions: str = "") -> None:
        self.model = model
        self.chat: Chat = []
        self.past: Turn | None = None
        self.sampled: list[int] = []
        self.prompt: list[int] = []
        # As a client has it that sends everything again.
        self.items: list[Item] = []
        self._given: list[Item] = []
        # The calls without an output: as the client knows them, and as chat messages have them.
        self._open: list[tuple[str, dict[str, Any]]] = []
        self._calls = 0
        self.head = Head()
        self.offer(is_offered=with_tools)
        if instructions:
            self.head = msgspec.structs.replace(self.head, instructions=instructions)
            self.chat.append({"role": "system", "content": instructions})

    def offer(self, *, is_offered: bool) -> None:
        """From here on these tools are offered, or none."""
        offered = tools() if is_offered else NO_TOOLS
        self.head = msgspec.structs.replace(self.head, tools=offered)
        self.tools = CHAT_TOOLS if is_offered else None

    def say(self, text: str) -> None:
        self.chat.append({"role": "user", "content": text})
        self._give(message("user", text))

    def give(self, *outputs: str, is_reversed: bool = False) -> None:
        """What the tools returned that were called last, in their order, or in the opposite one."""
        assert len(self._open) == len(outputs), "the call was not read"
        results = [*zip(self._open, outputs, strict=True)]
        given = results[::-1] if is_reversed else results
        # A template that writes no ids knows them by their order.
        for (_, called), text in given if self.model.shows_ids else results:
            self.chat.append(result_of(called, text))
        for (call_id, _), text in given:
            self._give(item("function_call_output", call_id=call_id, output=text))
        self._open = []

    def _give(self, given: Item) -> None:
        self._given.append(given)
        self.items.append(given)

    @property
    def scene(self) -> Scene:
        return Scene(self.head, self.past, tuple(self._given), root_at=ROOT_AT)

    @property
    def resent(self) -> Scene:
        """The same from a client that sends everything again, and nothing of it was kept."""
        return Scene(self.head, None, tuple(self.items), root_at=ROOT_AT)

    def rendered(self) -> list[int]:
        self.prompt = list(flat(self.model.dialect.render(self.scene).prompt))
        return self.prompt

    def expected(self) -> str:
        expected = self.model.judge.write(self.chat, self.tools)
        if self.model.family.declares_otherwise:
            for said in self.chat:
                if said["role"] == "tool":
                    quoted = json.dumps(said["content"], ensure_ascii=False)
                    expected = expected.replace(quoted, said["content"])
        return expected

    def _comparable(self, *texts: str) -> list[str]:
        """What says nothing of tools says it in words of ours; what comes after that is the template's."""
        model = self.model
        if model.family.declares_otherwise:
            texts = tuple(text.replace(" <|constrain|>json", " json") for text in texts)
        if self.tools and (model.ignores_tools or model.family.declares_otherwise):
            return [text[text.index(FIRST) :] for text in texts]
        return [*texts]

    def check(self) -> None:
        """The prompt is what the template writes, run cold; the first one to the id."""
        judge = self.model.judge
        expected = self.expected()
        found, wanted = self.rendered(), judge.ids(expected)
        whole = [judge.shown(found), judge.shown(wanted)]
        shown, canonical = self._comparable(*whole)
        if self.past is None and [shown, canonical] == whole and found != wanted:
            raise AssertionError(f"{differing(shown, canonical)}; {found[-20:]} for {wanted[-20:]}")
        # An empty thought that was sampled stays where it is: the template cannot know of it.
        shown, canonical = (EMPTY_THOUGHT.sub("", text) for text in (shown, canonical))
        if "".join(shown.split()) != "".join(canonical.split()):
            raise AssertionError(differing(shown, canonical))
        if shown != canonical:
            self.model.trimmed = differing(shown, canonical)

    def check_resent(self) -> None:
        """Sent again as items, of which nothing was kept, the prompt is what the template writes, to the letter."""
        judge = self.model.judge
        prompt = flat(self.model.dialect.render(self.resent).prompt)
        shown, canonical = self._comparable(judge.shown(prompt), self.expected())
        pattern = re.escape(canonical)
        for id in {call["id"] for said in self.chat for call in said.get("tool_calls", ())}:
            # A client knows another id; all that counts is that an output has that of its call.
            first, found, rest = pattern.partition(id)
            if found:
                pattern = f"{first}(?P<{id}>[A-Za-z0-9_.:-]+){rest.replace(id, f'(?P={id})')}"
        assert re.fullmatch(pattern, shown), differing(shown, canonical)

    def answer(
        self, words: str = "", thought: str = "", calls: Sequence[Called] = ()
    ) -> list[Item]:
        """The model answers; what was read of it, as items, must be what it said."""
        numbered = [
            {"id": self._chat_id(one), "name": one.name, "arguments": one.arguments}
            for one in calls
        ]
        begins = self.model.judge.begins_thought_after(self.chat, self.tools)
        said = self.model.judge.answer(words, thought, numbered, begins_thought=begins)
        self.rendered()
        self.sampled = self.model.sampled(self, said, self._following(numbered))
        scene = self.scene
        parsed = read(self.model.dialect, scene, [[id] for id in self.sampled])
        self._check_heard(parsed, words, thought, calls)
        made = self._items(parsed, numbered)
        if calls and self.model.shows_ids:
            self._take_ids(said, numbered)
        closed = [value for value in parsed if isinstance(value, ItemClosed)]
        tail = parsed[-1]
        assert isinstance(tail, TurnClosed)
        last = Round(
            scene.given,
            tuple(made),
            tuple(one.ids for one in closed),
            tail.ids,
            self.model.dialect.fingerprint,
            did_sample=True,
        )
        rendered = self.model.dialect.render(scene)
        self.past = Turn(
            id="resp",
            owner="ada",
            parent_id=None,
            parent=self.past,
            rounds=(last,),
            response=cast(Response, None),
            is_stored=False,
            open_calls={},
            model_turns=0,
            warm=warm_after(self.model.dialect.fingerprint, scene.head, rendered, last),
            root_at=ROOT_AT,
        )
        self._given = []
        self.items += made
        self.chat.append(said)
        return made

    def _take_ids(self, said: dict[str, Any], numbered: Sequence[dict[str, Any]]) -> None:
        """A call to which the model gave no id has that which the client knows."""
        shown = self.model.judge.shown(self.sampled)
        known = {called["id"]: id for id, called in self._open}
        for called, call in zip(numbered, said.get("tool_calls", ()), strict=True):
            if called["id"] not in shown:
                call["id"] = called["id"] = known[called["id"]]

    def _check_heard(
        self, parsed: Sequence[Parsed], words: str, thought: str, calls: Sequence[Called]
    ) -> None:
        """Nothing but this was read, without a mark in it."""
        shown = self.model.judge.shown(self.sampled)
        found = [(opened.kind, opened.name, text) for opened, text in heard(parsed)]
        wanted = [("message", "", words)] if words else []
        wanted += [("function", one.name, "") for one in calls]
        read = [(kind, name, "" if kind == "function" else text) for kind, name, text in found]
        thoughts = [text for kind, _, text in read if kind == "reasoning"]
        assert [one for one in read if one[0] != "reasoning"] == wanted, (
            f"{shown[:400]!r} is read as {found}"
        )
        if thought and thought in shown:
            assert [text.strip() for text in thoughts] == [thought], f"the thoughts are {thoughts}"
        arguments = [loaded(text) for kind, _, text in found if kind == "function"]
        assert arguments == [one.arguments for one in calls], f"{shown[:400]!r}: {arguments}"

    def _chat_id(self, call: Called) -> str:
        """An id that every template takes: nine letters."""
        self._calls += 1
        return f"abcdefg{self._calls:02}"

    def _following(self, calls: Sequence[dict[str, Any]]) -> Chat:
        if not calls:
            return [{"role": "user", "content": "And?"}]
        return [result_of(one, "1") for one in calls]

    def _items(self, parsed: Sequence[Parsed], numbered: Sequence[dict[str, Any]]) -> list[Item]:
        made: list[Item] = []
        for opened, text in heard(parsed):
            if opened.kind == "reasoning":
                made.append(reasoning(text))
            elif opened.kind == "message":
                made.append(message("assistant", text))
            else:
                call_id = f"call_{self._calls}_{len(made)}"
                made.append(
                    item("function_call", call_id=call_id, name=opened.name, arguments=text)
                )
                if len(self._open) < len(numbered):
                    self._open.append((call_id, numbered[len(self._open)]))
        return made


def heard(parsed: Sequence[Parsed]) -> list[tuple[ItemOpened, str]]:
    """The items that were read, with their text."""
    found: list[tuple[ItemOpened, str]] = []
    for value in parsed:
        if isinstance(value, ItemOpened):
            found.append((value, ""))
        elif isinstance(value, ItemText):
            opened, text = found[-1]
            found[-1] = (opened, text + value.text)
    return found


def loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def differing(found: str, expected: str) -> str:
    """Where two texts part."""
    same = 0
    for one, other in zip(found, expected, strict=False):
        if one != other:
            break
        same += 1
    begin = max(0, same - 40)
    return f"ours {found[begin : same + 80]!r}, the template's {expected[begin : same + 80]!r}"
