"""What must a model family do? One function for each column of the matrix.

Each takes a model, whose own template and tokenizer are the judge, and raises an `AssertionError` where the project
does otherwise, or `Absent` where the model has no such thing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

import jsonschema

from segue.errors import ApiError
from segue.seams.model import ItemOpened, ItemText, Parsed, Scene
from segue.seams.prompt import Head, Tokens
from segue.wire.requests import ToolChoiceName
from tests.contracts.dialect import flat, item, message, read
from tests.models.judge import Refused
from tests.models.talk import (
    FIRST,
    ONE,
    ROOT_AT,
    TWO,
    Absent,
    Called,
    Model,
    Talk,
    differing,
    heard,
    loaded,
    tools,
)

# --- the columns ----------------------------------------------------------------------------------


def starts(model: Model) -> None:
    """A dialect is found, and the first prompt is, to the id, what the template writes."""
    for with_tools in (False, True):
        if (not with_tools and model.needs_tools) or (with_tools and not model.takes_tools):
            continue
        talk = Talk(model, with_tools=with_tools)
        talk.say(FIRST)
        talk.check()


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


def calls_of(
    model: Model, *calls: Called, thought: str = "I need it."
) -> tuple[list[Parsed], list[int]]:
    """What is read, token by token, of the template's own words for these calls."""
    if not model.takes_tools:
        raise Absent("its template has no words for calls")
    talk = Talk(model)
    talk.say(FIRST)
    numbered = [
        {"id": f"abcdefg{n:02}", "name": one.name, "arguments": one.arguments}
        for n, one in enumerate(calls)
    ]
    answer = model.judge.answer("", thought, numbered)
    following = talk._following(numbered)
    sampled = model.sampled(talk, answer, following)
    return read(model.dialect, talk.scene, [[id] for id in sampled]), sampled


def check_calls(model: Model, *calls: Called) -> None:
    parsed, sampled = calls_of(model, *calls)
    items = heard(parsed)
    found = [(opened.name, loaded(text)) for opened, text in items if opened.kind == "function"]
    said = model.judge.shown(sampled)
    assert found == [(one.name, one.arguments) for one in calls], (
        f"{said[:300]!r} is read as {found or items}"[:700]
    )
    texts = [text for opened, text in items if opened.kind == "message" and text.strip()]
    assert not texts, f"beside the call stands the text {texts}"


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


def said(model: Model) -> None:
    """What it says is read without a mark in it, and so is what it thought: with tools on offer and without, before
    a call, and where it is cut off in a thought or stops in one."""
    for with_tools in {model.takes_tools, model.needs_tools}:
        talk = Talk(model, with_tools=with_tools)
        talk.say(FIRST)
        talk.answer("It is **18** degrees.\n\n- a < b", thought="I know.\n\nI do.")
        _thinks_on(model, with_tools)
    if model.takes_tools and model.keeps_words:
        talk = Talk(model)
        talk.say(FIRST)
        talk.answer("I will look.", calls=[ONE])
        talk.give("18 degrees")
        talk.check()


def _thinks_on(model: Model, with_tools: bool) -> None:
    """A thought that does not end: it is a thought, and nothing else."""
    talk = Talk(model, with_tools=with_tools)
    talk.say(FIRST)
    answer = model.judge.answer("It is 18 degrees.", "I wonder")
    shown = model.judge.shown(model.sampled(talk, answer, talk._following([])))
    if "I wonder" not in shown:
        # The template writes no thought of a last answer.
        return
    begun = model.judge.ids(shown[: shown.index("I wonder") + len("I wonder")])
    for is_cut, ids in ((True, begun), (False, [*begun, min(model.dialect.stops)])):
        parsed = read(model.dialect, talk.scene, [[id] for id in ids], is_cut=is_cut)
        found = [(opened.kind, text.strip()) for opened, text in heard(parsed)]
        assert found == [("reasoning", "I wonder")], f"an open thought is read as {found}"


def results(model: Model) -> None:
    """What tools return stands as the template writes it, in its role: empty, JSON, of two calls in any order."""
    if not model.takes_tools:
        raise Absent("its template has no words for calls")
    talk = Talk(model)
    talk.say(FIRST)
    for output in ("", '{"sky": "klar – ☀", "degrees": [18]}', "First line.\n\n  Second line."):
        talk.answer(calls=[ONE])
        talk.give(output)
        talk.check()
    if model.is_single:
        return
    talk.answer(calls=[ONE, TWO])
    talk.give("18 degrees", "20 degrees", is_reversed=True)
    talk.check()


def ids(model: Model) -> None:
    """Where ids of calls stand in the prompt, a call keeps that which the model gave it, and its output has it."""
    if not model.takes_tools or not model.shows_ids:
        raise Absent("its template writes no ids")
    talk = Talk(model)
    talk.say(FIRST)
    for call in (ONE, TWO):
        talk.answer(calls=[call])
        if "abcdefg" not in model.judge.shown(talk.sampled):
            raise Absent("the model gives its calls no ids")
        talk.give("18 degrees")
        talk.check()
        shown = model.judge.shown(talk.prompt)
        ours = re.search(r"call_\d", shown)
        assert ours is None, f"an id of ours: {shown!r}"


def unoffered(model: Model) -> None:
    """Without tools on offer nothing is a call; and calls of earlier turns stay as the template writes them."""
    if not model.takes_tools or model.needs_tools:
        raise Absent(
            "its template has no words for calls, or none for a conversation without tools"
        )
    talk = Talk(model)
    talk.say(FIRST)
    _, sampled = calls_of(model, ONE)
    talk.offer(is_offered=False)
    items = heard(read(model.dialect, talk.scene, [[id] for id in sampled]))
    assert "function" not in [opened.kind for opened, _ in items], f"a call was read: {items}"
    said = "".join(text for opened, text in items if opened.kind == "message")
    assert "Paris" in said, f"what it said is lost: {items}"
    talk.offer(is_offered=True)
    talk.answer(calls=[ONE])
    talk.give("18 degrees")
    talk.answer("It is 18 degrees.")
    talk.offer(is_offered=False)
    talk.say("Thanks.")
    talk.check()


def turn_10(model: Model) -> None:
    """A long conversation with instructions, thoughts, words before calls, two calls at once, and odd texts."""
    talk = Talk(model, with_tools=model.takes_tools, instructions="Be brief." * model.takes_system)
    for _ in _long(talk):
        talk.check()


def resent(model: Model) -> None:
    """The same from a client that sends everything again, of which nothing was kept: to the letter."""
    talk = Talk(model, with_tools=model.takes_tools, instructions="Be brief." * model.takes_system)
    for _ in _long(talk):
        talk.check_resent()


def _long(talk: Talk) -> Iterator[None]:
    """Ten turns of the model, with a look at the prompt of each."""
    model = talk.model
    talk.say(FIRST)
    yield
    if model.takes_tools:
        talk.answer(thought="I need the weather.", calls=[ONE])
        talk.give("18 degrees")
        yield
        talk.answer("I will look." * model.keeps_words, thought="Rome, too.", calls=[TWO])
        talk.give("20 degrees\n")
        yield
    talk.answer("It is 18 degrees, and 20.", thought="Now I know.")
    talk.say("Grüße, 漢字 & <b>😀</b>\n\nAnd what is open?")
    yield
    if model.takes_tools:
        talk.answer(thought="I search.", calls=[NESTED])
        talk.give('{"found": []}')
        yield
        both = [UNICODE] if model.is_single else [UNICODE, ONE]
        talk.answer(calls=both)
        talk.give(*["Nothing.", "19 degrees"][: len(both)])
        yield
    talk.answer("Nothing:\n\n1. `a < b`\n2. done", thought="That is all.")
    talk.say("So?")
    yield
    for n in range(4):
        talk.answer(f"Answer {n}.", thought=f"Thought {n}.")
        talk.say(f"Question {n}?")
        yield


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
    """A call that must be made, of one tool or of any: what the engine is held to is read as that call; and where it
    follows structural tags, it is held to the words of the template."""
    if not model.takes_tools:
        raise Absent("its template has no words for calls")
    for choice in ("required", ToolChoiceName(type="function", name=ONE.name)):
        head = Head(tools=tools(), tool_choice=choice)
        given = (message("user", FIRST),)
        scene = Scene(head, None, given, root_at=ROOT_AT, can_constrain=True)
        try:
            rendered = model.dialect.render(scene)
        except ApiError:
            # The family's own format is no JSON: without tags a call cannot be forced, and that is said.
            continue
        assert isinstance(rendered.schema, bytes), f"nothing holds the engine to a call: {choice}"
        written = [*rendered.lead, *model.judge.ids(_following(rendered.schema))]
        parsed = read(model.dialect, scene, [[id] for id in [*written, min(model.dialect.stops)]])
        found = [(opened.name, loaded(text)) for opened, text in heard(parsed)]
        said = model.judge.shown(written)
        assert found == [(ONE.name, ONE.arguments)], f"{said!r} is read as {found}"
    # That page needs this one.
    from tests.models.forced import check as check_forced

    check_forced(model)


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
    "turn 10": turn_10,
    "resent": resent,
    "thoughts": thoughts,
    "said": said,
    "results": results,
    "ids": ids,
    "no tools": unoffered,
    "Codex": codex,
    "forced": forced,
    "images": images,
}
