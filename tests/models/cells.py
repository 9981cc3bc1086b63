"""What must a model family do? One function for each column of the matrix.

Each takes a model, whose own template and tokenizer are the judge, and raises an `AssertionError` where the project
does otherwise, or `Absent` where the model has no such thing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jsonschema
import msgspec

from segue.dialects.choose import dialect_for
from segue.dialects.family import TokenDialect
from segue.seams.history import Round, Turn
from segue.seams.model import Grammar, ItemClosed, ItemOpened, ItemText, Parsed, Scene, TurnClosed
from segue.seams.prompt import Head, Tokens
from segue.turn.commit import warm_after
from segue.vocabularies.load import vocabulary_from_file
from segue.wire.items import Item
from segue.wire.requests import ToolChoiceName
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


CHAT_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]


@dataclass
class Model:
    """A family as the server has it, and its judge."""

    family: ModelFamily
    # Whether a prompt had other white space than the template writes around an answer.
    is_trimmed: bool = False

    @cached_property
    def judge(self) -> Judge:
        return Judge(model_folder(self.family.name), date_of(ROOT_AT), self.family.values)

    @cached_property
    def dialect(self) -> TokenDialect:
        folder = model_folder(self.family.name)
        return dialect_for(
            "auto", folder, vocabulary_from_file(folder), None, dict(self.family.values)
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

    def sampled(self, talk: Talk, answer: dict[str, Any], following: Chat) -> list[int]:
        return self.judge.ids(self.judge.sampled(talk.chat, answer, following, talk.tools))


def model(name: str) -> Model:
    return Model(BY_NAME[name])


# --- a chain, as the server keeps it and as chat messages -----------------------------------------


@dataclass(frozen=True)
class Called:
    """A call that the model makes."""

    name: str
    arguments: dict[str, Any]


class Talk:
    """A conversation that goes on, in both forms."""

    def __init__(self, model: Model, *, with_tools: bool = True) -> None:
        self.model = model
        self.head = Head(tools=tools() if with_tools else Tools(b"", (), b"", ()))
        self.tools = CHAT_TOOLS if with_tools else None
        self.chat: Chat = []
        self.past: Turn | None = None
        self._given: list[Item] = []
        self._open: list[tuple[str, str, str]] = []
        self._calls = 0
        self.sampled: list[int] = []
        self.prompt: list[int] = []

    def say(self, text: str) -> None:
        self.chat.append({"role": "user", "content": text})
        self._given.append(message("user", text))

    def give(self, *outputs: str) -> None:
        """What the tools returned that were called last."""
        assert len(self._open) == len(outputs), "the call was not read"
        for (call_id, chat_id, name), text in zip(self._open, outputs, strict=True):
            said = {"role": "tool", "tool_call_id": chat_id, "name": name, "content": text}
            self.chat.append(said)
            self._given.append(item("function_call_output", call_id=call_id, output=text))
        self._open = []

    @property
    def scene(self) -> Scene:
        return Scene(self.head, self.past, tuple(self._given), root_at=ROOT_AT)

    def rendered(self) -> list[int]:
        self.prompt = list(flat(self.model.dialect.render(self.scene).prompt))
        return self.prompt

    def expected(self) -> str:
        expected = self.model.judge.write(self.chat, self.tools)
        if self.model.family.declares_otherwise:
            for said in self.chat:
                if said["role"] == "tool":
                    expected = expected.replace(json.dumps(said["content"]), said["content"])
        return expected

    def check(self) -> None:
        """The prompt is what the template writes, run cold; the first one to the id."""
        judge = self.model.judge
        expected = self.expected()
        found, wanted = self.rendered(), judge.ids(expected)
        shown, canonical = judge.shown(found), judge.shown(wanted)
        family = self.model.family
        if self.tools and (self.model.ignores_tools or family.declares_otherwise):
            # It says nothing of tools, so that we do; what comes after that is the template's.
            shown, canonical = (text[text.index(FIRST) :] for text in (shown, canonical))
        elif self.past is None and found != wanted:
            raise AssertionError(f"{differing(shown, canonical)}; {found[-20:]} for {wanted[-20:]}")
        # An empty thought that was sampled stays where it is: the template cannot know of it.
        shown, canonical = (EMPTY_THOUGHT.sub("", text) for text in (shown, canonical))
        if "".join(shown.split()) != "".join(canonical.split()):
            raise AssertionError(differing(shown, canonical))
        self.model.is_trimmed = self.model.is_trimmed or shown != canonical

    def answer(
        self, words: str = "", thought: str = "", calls: Sequence[Called] = (), then: str = "user"
    ) -> list[Item]:
        """The model answers; what was read of it, as items."""
        numbered = [
            {"id": self._chat_id(one), "name": one.name, "arguments": one.arguments}
            for one in calls
        ]
        said = self.model.judge.answer(words, thought, numbered)
        self.rendered()
        self.sampled = self.model.sampled(self, said, self._following(numbered))
        scene = self.scene
        parsed = read(self.model.dialect, scene, [[id] for id in self.sampled])
        made = self._items(parsed, numbered)
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
        self.chat.append(said)
        return made

    def _chat_id(self, call: Called) -> str:
        """An id that every template takes: nine letters."""
        self._calls += 1
        return f"abcdefg{self._calls:02}"

    def _following(self, calls: Sequence[dict[str, Any]]) -> Chat:
        if not calls:
            return [{"role": "user", "content": "And?"}]
        return [
            {"role": "tool", "tool_call_id": one["id"], "name": one["name"], "content": "1"}
            for one in calls
        ]

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
                    self._open.append((call_id, numbered[len(self._open)]["id"], opened.name))
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


def differing(found: str, expected: str) -> str:
    """Where two texts part."""
    same = 0
    for one, other in zip(found, expected, strict=False):
        if one != other:
            break
        same += 1
    begin = max(0, same - 40)
    return f"ours {found[begin : same + 80]!r}, the template's {expected[begin : same + 80]!r}"


# --- the columns ----------------------------------------------------------------------------------


def starts(model: Model) -> None:
    """A dialect is found, and the first prompt is, to the id, what the template writes."""
    for with_tools in (False, True):
        if (not with_tools and model.needs_tools) or (with_tools and not model.takes_tools):
            continue
        talk = Talk(model, with_tools=with_tools)
        talk.say(FIRST)
        talk.check()


ONE = Called("get_weather", {"city": "Paris"})
TWO = Called("get_weather", {"city": "Rome"})
NESTED = Called(
    "search",
    {
        "filter": {"kind": "open", "sizes": [1, 2.5]},
        "tags": ["a b", "c"],
        "limit": 3,
        "ratio": 0.25,
        "is_dry": False,
        "text": "12",
    },
)
UNICODE = Called(
    "search",
    {
        "filter": {"kind": "größe"},
        "text": 'Grüße, 漢字 und 😀: "quoted", 1 < 2 & 3 > 2\nsecond line of C:\\data',
    },
)
LONG = Called(
    "search",
    {"filter": {"kind": "open"}, "text": "All work and no play makes Jack a dull boy. " * 20},
)


def calls_of(model: Model, *calls: Called) -> tuple[list[Parsed], list[int]]:
    """What is read, token by token, of the template's own words for these calls."""
    if not model.takes_tools:
        raise Absent("its template has no words for calls")
    talk = Talk(model)
    talk.say(FIRST)
    numbered = [
        {"id": f"abcdefg{n:02}", "name": one.name, "arguments": one.arguments}
        for n, one in enumerate(calls)
    ]
    answer = model.judge.answer("", "I need it.", numbered)
    following = talk._following(numbered)
    sampled = model.sampled(talk, answer, following)
    return read(model.dialect, talk.scene, [[id] for id in sampled]), sampled


def check_calls(model: Model, *calls: Called) -> None:
    parsed, sampled = calls_of(model, *calls)
    items = heard(parsed)
    found = [(opened.name, _loaded(text)) for opened, text in items if opened.kind == "function"]
    said = model.judge.shown(sampled)
    assert found == [(one.name, one.arguments) for one in calls], (
        f"{said[:300]!r} is read as {found or items}"[:700]
    )
    texts = [text for opened, text in items if opened.kind == "message" and text.strip()]
    assert not texts, f"beside the call stands the text {texts}"


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def call_one(model: Model) -> None:
    check_calls(model, ONE)


def call_several(model: Model) -> None:
    try:
        _, sampled = calls_of(model, ONE, TWO)
    except Refused as refused:
        raise Absent(f"its template refuses two calls: {refused}") from refused
    if TWO.arguments["city"] not in model.judge.shown(sampled):
        raise Absent("its template writes only one call")
    check_calls(model, ONE, TWO)


def call_nested(model: Model) -> None:
    check_calls(model, NESTED)


def call_unicode(model: Model) -> None:
    check_calls(model, UNICODE)


def call_streamed(model: Model) -> None:
    """However it is cut the same is read, and a long text comes while it is written."""
    parsed, sampled = calls_of(model, LONG)
    talk = Talk(model)
    talk.say(FIRST)
    scene = talk.scene
    whole = read(model.dialect, scene, [sampled])
    assert heard(whole) == heard(parsed), "another reading token by token"
    for size in (2, 3, 7):
        pieces = [sampled[at : at + size] for at in range(0, len(sampled), size)]
        assert heard(read(model.dialect, scene, pieces)) == heard(whole), (
            f"another reading in pieces of {size}"
        )
    assert [opened.name for opened, _ in heard(whole) if opened.kind == "function"] == ["search"], (
        "no call"
    )
    pieces_of_call = _pieces_of_call(parsed)
    assert pieces_of_call > 10, f"the text of a long argument came in {pieces_of_call} pieces"


def _pieces_of_call(parsed: Sequence[Parsed]) -> int:
    count, kind = 0, ""
    for value in parsed:
        if isinstance(value, ItemOpened):
            kind = value.kind
        elif isinstance(value, ItemText) and kind == "function":
            count += 1
    return count


def turn_2(model: Model) -> None:
    """After an answer and a question: the template run cold over both."""
    talk = Talk(model, with_tools=model.needs_tools)
    talk.say("What is the capital of France?")
    talk.answer("It is Paris.")
    talk.say("And of Italy?")
    talk.check()


def turn_5(model: Model) -> None:
    """Calls, their outputs, answers and questions: at every turn the template run cold."""
    talk = Talk(model, with_tools=model.takes_tools)
    talk.say(FIRST)
    talk.check()
    if not model.takes_tools:
        for n in range(4):
            talk.answer(f"Answer {n}.")
            talk.say(f"Question {n}?")
            talk.check()
        return
    talk.answer(calls=[ONE])
    talk.give("18 degrees")
    talk.check()
    talk.answer("It is 18 degrees.")
    talk.say("And in Rome?")
    talk.check()
    talk.answer(calls=[TWO])
    talk.give("20 degrees")
    talk.check()
    talk.answer("It is 20 degrees.")
    talk.say("Thanks.")
    talk.check()


def thoughts(model: Model) -> None:
    """Thoughts stand in the prompt while the template keeps them, and go when it drops them."""
    if not model.judge.is_thinking:
        raise Absent("it does not think, or is told not to")
    talk = Talk(model, with_tools=model.takes_tools)
    talk.say(FIRST)
    if model.takes_tools:
        talk.answer(thought="I need the weather.", calls=[ONE])
        talk.give("18 degrees")
        talk.check()
        talk.answer(thought="Rome too.", calls=[TWO])
        talk.give("20 degrees")
        talk.check()
    talk.answer("It is 18 degrees.", thought="Now I know.")
    talk.say("And in Rome?")
    talk.check()
    talk.answer("It is 20 degrees.", thought="I saw that.")
    talk.say("Thanks.")
    talk.check()


def codex(model: Model) -> None:
    """Codex's messages: a warm-up with instructions and a developer message, then that message and two of a user; one
    more developer message later. Nothing is refused, and every text is there once. Where system messages go is
    the template's own; among themselves they keep their order, and so do the others."""
    head = Head(instructions="You are Codex.", tools=tools())
    developer, context = "Mind the sandbox.", "<environment>folder</environment>"
    first = message("developer", developer)
    model.dialect.render(Scene(head, None, (first,), root_at=ROOT_AT))
    given = (first, message("user", context), message("user", "Fix the bug."))
    scene = Scene(head, None, given, root_at=ROOT_AT)
    _ordered(model, scene, "You are Codex.", developer)
    _ordered(model, scene, context, "Fix the bug.")
    later = (
        *given,
        message("assistant", "Done."),
        message("developer", "Be quick."),
        message("user", "Next."),
    )
    scene = Scene(head, None, later, root_at=ROOT_AT)
    _ordered(model, scene, "You are Codex.", developer, "Be quick.")
    _ordered(model, scene, context, "Fix the bug.", "Done.", "Next.")


def _ordered(model: Model, scene: Scene, *texts: str) -> None:
    prompt = model.judge.shown(flat(model.dialect.render(scene).prompt))
    for text in texts:
        assert prompt.count(text) == 1, f"{text!r} is {prompt.count(text)} times in the prompt"
    places = [prompt.index(text) for text in texts]
    assert places == sorted(places), f"another order: {prompt!r}"


def forced(model: Model) -> None:
    """A call that must be made, of one tool or of any: what the engine is held to is read as that call."""
    if not model.takes_tools:
        raise Absent("its template has no words for calls")
    for choice in ("required", ToolChoiceName(type="function", name=ONE.name)):
        head = Head(tools=tools(), tool_choice=choice)
        scene = Scene(
            head,
            None,
            (message("user", FIRST),),
            root_at=ROOT_AT,
            can_constrain=True,
            can_follow_tags=True,
        )
        rendered = model.dialect.render(scene)
        if isinstance(rendered.schema, Grammar):
            # What the engine is held to is no JSON.
            from tests.models.forced import check

            return check(model)
        assert isinstance(rendered.schema, bytes), f"nothing holds the engine to a call: {choice}"
        written = [*rendered.lead, *model.judge.ids(_following(rendered.schema))]
        parsed = read(model.dialect, scene, [[id] for id in [*written, min(model.dialect.stops)]])
        found = [(opened.name, _loaded(text)) for opened, text in heard(parsed)]
        said = model.judge.shown(written)
        assert found == [(ONE.name, ONE.arguments)], f"{said!r} is read as {found}"


def _following(schema: bytes) -> str:
    """The call in JSON, in the form that this schema asks for."""
    known = json.loads(schema)
    calls = [{"name": ONE.name, key: ONE.arguments} for key in ("arguments", "parameters")]
    for value in (ONE.arguments, *calls, *([call] for call in calls)):
        try:
            jsonschema.validate(value, known)
        except jsonschema.ValidationError:
            continue
        return json.dumps(value)
    raise AssertionError(f"no call follows this schema: {schema.decode()}")


PICTURE = "data:image/png;base64,iVBORw0KGgo="


def images(model: Model) -> None:
    """A picture stands in the prompt as the template writes it, and goes to the engine beside it."""
    words = {"type": "text", "text": FIRST}
    try:
        plain = model.judge.write([{"role": "user", "content": [words]}])
        seen = model.judge.write([{"role": "user", "content": [words, {"type": "image"}]}])
    except Refused as refused:
        raise Absent(f"its template takes no images: {refused}") from refused
    if seen == plain or "{'type'" in seen or '{"type"' in seen:
        raise Absent("its template takes no images")
    parts = [{"type": "input_text", "text": FIRST}, {"type": "input_image", "image_url": PICTURE}]
    given = (item("message", role="user", content=parts),)
    prompt = model.dialect.render(
        Scene(Head(), None, given, root_at=ROOT_AT, sees_images=True)
    ).prompt
    assert isinstance(prompt, Tokens)
    shown = model.judge.shown(prompt.flat())
    assert shown == seen, differing(shown, seen)
    assert [at.url for at in prompt.all_images()] == [PICTURE], (
        "the picture is not beside the prompt"
    )


Cell = Callable[[Model], None]
CELLS: dict[str, Cell] = {
    "starts": starts,
    "one call": call_one,
    "several": call_several,
    "nested": call_nested,
    "unicode": call_unicode,
    "streamed": call_streamed,
    "turn 2": turn_2,
    "turn 5": turn_5,
    "thoughts": thoughts,
    "Codex": codex,
    "forced": forced,
    "images": images,
}
