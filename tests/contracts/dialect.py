"""What every `Dialect` must do: builders, strategies, and one function for each promise.

A `DialectCase` is a dialect with what its tests have to know about it. The promises are checked on nasty texts:
spaces and newlines at the edges, nothing at all, letters of several tokens, and marks typed by a user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple, cast

import msgspec
from hypothesis import strategies as st
from msgspec.structs import replace

from segue.dialects.parts import MODEL_TURN, parts_of
from segue.resent.render_cache import is_cut
from segue.seams.history import Round, Turn, Unfinished, Warm, ancestors
from segue.seams.model import (
    Dialect,
    Ids,
    ItemClosed,
    ItemOpened,
    ItemText,
    Parsed,
    Scene,
    TurnClosed,
)
from segue.seams.prompt import Head, IdArray, Prompt, Tokens, id_array
from segue.turn.commit import warm_after
from segue.vocabularies.gguf import read_gguf
from segue.vocabularies.load import CONTROL, USER_DEFINED, vocabulary_from_metadata
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.codec import as_item
from segue.wire.effects import NO_EFFECTS, Effects, apply_effects
from segue.wire.items import CodeInterpreterCall, Item, ItemValue
from segue.wire.response import Response
from segue.wire.tools import CustomTool, FunctionTool, NamespaceTool, Tools, offers_of
from segue_embedded.weights import find_weights


@dataclass(frozen=True, eq=False)
class DialectCase:
    """A dialect under test, and its vocabulary."""

    dialect: Dialect
    vocabulary: Vocabulary
    marks: tuple[str, ...]
    # Whether the second scene makes the family forget what was thought before it.
    forgets: Callable[[Scene, Scene], bool] = lambda scene, following: False
    # What closes a block in history, where that is none of the stops.
    ends: frozenset[int] = frozenset()
    # Whether the cue and what stands behind it in history may be encoded together.
    is_joined: bool = False


class Heard(NamedTuple):
    """An item as the reader gave it."""

    kind: str
    text: str
    name: str = ""
    namespace: str | None = None
    is_async: bool = False
    is_cut: bool = False


def smollm2(*specials: str, texts: tuple[str, ...] = ()) -> Vocabulary:
    """SmolLM2's vocabulary with the special tokens and marks of another family at its end."""
    path = find_weights("smollm2")
    head = read_gguf(path)
    tokens, kinds = head["tokenizer.ggml.tokens"], head["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    head["tokenizer.ggml.tokens"] = [*map(str, tokens), *specials, *texts]
    head["tokenizer.ggml.token_type"] = [
        *(kind for kind in kinds if isinstance(kind, int)),
        *[CONTROL] * len(specials),
        *[USER_DEFINED] * len(texts),
    ]
    return vocabulary_from_metadata(head, path.name)


def special_ids(vocabulary: Vocabulary) -> set[int]:
    return {vocabulary.special(text) for text in vocabulary.specials}


# --- items and scenes -----------------------------------------------------------------------------


def item(type: str, **fields: object) -> Item:
    raw = msgspec.json.encode({"type": type, **fields})
    return Item(raw, msgspec.json.decode(raw, type=ItemValue))


def message(role: str, text: str) -> Item:
    return item("message", role=role, content=text)


def reasoning(text: str) -> Item:
    return item("reasoning", summary=[], content=[{"type": "reasoning_text", "text": text}])


def call(name: str, arguments: str, namespace: str | None = None) -> Item:
    return item("function_call", call_id="c", name=name, arguments=arguments, namespace=namespace)


def custom_call(name: str, text: str) -> Item:
    return item("custom_tool_call", call_id="c", name=name, input=text)


def output(text: str) -> Item:
    return item("function_call_output", call_id="c", output=text)


def tools_of(*definitions: FunctionTool | CustomTool | NamespaceTool) -> Tools:
    raw = msgspec.json.encode(definitions)
    return Tools(raw, definitions, raw, offers_of(definitions))


TOOLS = tools_of(
    FunctionTool(
        name="look",
        description="Looks things up.",
        parameters=msgspec.Raw(b'{"type":"object","properties":{"q":{"type":"string"}}}'),
    ),
    CustomTool(name="patch", description="Applies a patch."),
    NamespaceTool(name="fs", tools=[FunctionTool(name="read", is_async=True)]),
)
HEADS = (
    Head(),
    Head(instructions="Be brief."),
    Head(tools=TOOLS),
    Head(instructions="", tools=TOOLS),
)
BARE = Scene(Head(), None, ())
OFFERING = Scene(Head(tools=TOOLS), None, ())


# --- strategies, each made once: making them costs more than drawing ------------------------------

# Letters that every vocabulary here can spell: no controls but tab and newline, no planes without letters.
letters = st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], max_codepoint=0x3FFFF)
FRAGMENTS = [
    " ", "  ", "\n", "\n\n", " \n", "\t", "a", "Hello", " world", ".", "漢字", "かな", "😀", "👩‍👩‍👧",
    "é", "123", "<", "</", "<<", "{", "}", '"', "\\", '{"a": "<"}', "|>", "assistant", "\u00a0",
]  # fmt: skip


@cache
def texts(*more: str) -> st.SearchStrategy[str]:
    parts = st.one_of(st.sampled_from([*FRAGMENTS, *more]), st.text(letters, max_size=6))
    return st.lists(parts, max_size=8).map("".join)


@cache
def objects() -> st.SearchStrategy[str]:
    """The JSON of an object, spaced or not."""
    leaves = st.one_of(st.none(), st.integers(-9, 9), texts("</tool_call>"))
    inner = st.lists(leaves, max_size=2) | st.dictionaries(texts(), leaves, max_size=2)
    return st.builds(
        lambda value, spaces, is_ascii: json.dumps(value, indent=spaces, ensure_ascii=is_ascii),
        st.dictionaries(texts(), leaves | inner, max_size=3),
        st.sampled_from([None, 1]),
        st.booleans(),
    )


@cache
def given_items(family: DialectCase) -> st.SearchStrategy[list[Item]]:
    """What a client may send, marks included."""
    nasty = texts(*family.marks)
    return st.lists(
        st.one_of(
            st.builds(
                message, st.sampled_from(["user", "system", "developer", "assistant"]), nasty
            ),
            st.builds(output, nasty),
            st.builds(reasoning, nasty),
            st.builds(call, st.sampled_from(["look", "unknown"]), objects() | nasty),
            st.builds(custom_call, st.just("patch"), nasty),
        ),
        max_size=4,
    )


EXTRA = {"type": "function", "name": "extra", "parameters": {"type": "object", "properties": {}}}
# Items that change what holds behind them, or that say nothing, or not always.
ODD: tuple[Callable[[str], Item], ...] = (
    lambda text: item("additional_tools", role="developer", tools=[EXTRA]),
    lambda text: item("additional_tools", role="developer", tools=[{"type": "web_search"}]),
    lambda text: item("configuration_update", reasoning={"effort": "high"}),
    lambda text: item("configuration_update", reasoning={"effort": "none"}),
    lambda text: item("configuration_update", text={"format": {"type": "json_object"}}),
    lambda text: item("tool_search_call", call_id="c", execution="client", arguments={"q": text}),
    lambda text: item("tool_search_output", call_id="c", execution="client", tools=[EXTRA]),
    lambda text: item("mcp_list_tools", id="l", server_label="s", tools=[]),
    lambda text: item("mcp_call", id="m", server_label="s", name="n", arguments="{}", output=text),
    lambda text: item("segue:tool_output", call_id="m", output=text),
    lambda text: item("mcp_approval_response", approval_request_id="a", approve=True),
    lambda text: item("mcp_approval_response", approval_request_id="a", approve=False, reason=text),
    lambda text: item("reasoning", summary=[], encrypted_content="sealed"),
    lambda text: item("web_search_call", id="w", status="completed"),
    lambda text: item("web_search_call", id="w", action={"type": "search", "query": text}),
    lambda text: item("shell_call", call_id="c", action={"commands": [text]}),
)


@cache
def odd_items(family: DialectCase) -> st.SearchStrategy[tuple[Item, ...]]:
    """What a client may send, with anything between it that brings something or says nothing."""
    odd = st.builds(lambda make, text: [make(text)], st.sampled_from(ODD), texts(*family.marks))
    plain = given_items(family).map(lambda items: items[:2])
    return st.lists(plain | odd, max_size=4).map(
        lambda lists: tuple(one for items in lists for one in items)
    )


@cache
def sampled_ids(family: DialectCase) -> st.SearchStrategy[list[int]]:
    """Anything that an engine may emit: what a model would write, odd pieces of it, any tokens at all."""
    encode = family.vocabulary.encode
    pieces = st.one_of(
        st.integers(0, family.vocabulary.size - 1).map(lambda id: [id]),
        st.sampled_from(sorted(family.vocabulary.specials)).map(
            lambda text: [family.vocabulary.special(text)]
        ),
        texts(*family.marks).map(lambda text: encode(text).tolist()),
        objects().map(lambda text: encode(text).tolist()),
        st.sampled_from(family.marks).map(lambda text: encode(text).tolist()),
        spoken().map(lambda items: family.dialect.write(items).tolist()[:-1]),
    )
    joined = st.lists(pieces, max_size=5).map(lambda lists: [id for ids in lists for id in ids])
    return joined.map(lambda ids: [id for id in ids if id not in family.dialect.stops])


@cache
def spoken() -> st.SearchStrategy[list[Item]]:
    """Items of one model turn, in the order in which a model writes them."""
    calls = st.one_of(
        st.builds(call, st.sampled_from(["look", "read_file", "a.b"]), objects()),
        st.builds(call, st.just("read"), objects(), st.just("fs")),
        st.builds(call, st.just("look"), texts().filter(lambda text: text.lstrip()[:1] != "{")),
        st.builds(custom_call, st.just("patch"), texts("</tool_call>")),
    )
    return st.builds(
        lambda thought, parsed, called: [*thought, *parsed, *called],
        st.lists(st.builds(reasoning, texts("<tool_call>")), max_size=1),
        st.lists(
            st.builds(message, st.just("assistant"), texts("<|im_end|>", "</think>")), max_size=1
        ),
        st.lists(calls, max_size=3),
    )


# --- reading --------------------------------------------------------------------------------------


def read(
    dialect: Dialect, scene: Scene, pieces: Sequence[Sequence[int]], *, is_cut: bool = False
) -> list[Parsed]:
    reader = dialect.reader(scene)
    parsed = [value for piece in pieces for value in reader.feed(Ids(piece))]
    return parsed + reader.close(is_cut=is_cut)


def heard(parsed: Sequence[Parsed]) -> list[Heard]:
    """The items, from what was said in a legal order."""
    items: list[Heard] = []
    opened: ItemOpened | None = None
    text = ""
    for value in parsed[:-1]:
        match value:
            case ItemOpened():
                assert opened is None
                opened, text = value, ""
            case ItemText():
                assert opened is not None
                assert value.text
                text += value.text
            case ItemClosed():
                assert opened is not None
                items.append(
                    Heard(
                        opened.kind,
                        text,
                        opened.name,
                        opened.namespace,
                        opened.is_async,
                        value.is_cut,
                    )
                )
                opened = None
            case TurnClosed():
                raise AssertionError("sealed before the end")
    assert opened is None
    assert isinstance(parsed[-1], TurnClosed)
    return items


def all_ids(parsed: Sequence[Parsed]) -> list[int]:
    return [
        id for value in parsed if isinstance(value, ItemClosed | TurnClosed) for id in value.ids
    ]


# --- chains ---------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One turn of a made-up chain; `sampled` None is a warm-up."""

    given: tuple[Item, ...]
    sampled: tuple[int, ...] | None
    head: Head = Head()


@cache
def steps(family: DialectCase, *, is_one_head: bool = True) -> st.SearchStrategy[list[Step]]:
    return st.lists(
        st.builds(
            Step,
            given_items(family).map(tuple),
            st.none() | sampled_ids(family).map(tuple),
            st.sampled_from(HEADS[: 1 if is_one_head else None]),
        ),
        min_size=1,
        max_size=4,
    )


def round_of(dialect: Dialect, scene: Scene, sampled: Sequence[int] | None) -> Round:
    """The round that this scene leads to. Its items are what was read, as a turn would keep them."""
    if sampled is None:
        return Round(scene.given)
    parsed = read(dialect, scene, [sampled])
    closed = [value for value in parsed if isinstance(value, ItemClosed)]
    tail = parsed[-1]
    assert isinstance(tail, TurnClosed)
    return Round(
        scene.given,
        tuple(_item_of(item) for item in heard(parsed)),
        tuple(value.ids for value in closed),
        tail.ids,
        dialect.fingerprint,
        did_sample=True,
    )


def _item_of(value: Heard) -> Item:
    match value.kind:
        case "message":
            return message("assistant", value.text)
        case "reasoning":
            return reasoning(value.text)
        case "code_interpreter":
            return as_item(CodeInterpreterCall(id="ci_1", code=value.text, status="completed"))
        case "custom":
            return custom_call(value.name, value.text)
        case _:
            return call(value.name, value.text, value.namespace)


def turn_after(dialect: Dialect, scene: Scene, sampled: Sequence[int] | None) -> Turn:
    rounds = (*scene.rounds, round_of(dialect, scene, sampled))
    return Turn(
        id="resp",
        owner="ada",
        parent_id=None,
        parent=scene.past,
        rounds=rounds,
        response=cast(Response, None),  # A dialect never looks at it.
        is_stored=False,
        open_calls={},
        model_turns=0,
        warm=warm_after(dialect.fingerprint, scene.head, dialect.render(scene), rounds[-1]),
    )


def chain(dialect: Dialect, steps: Sequence[Step]) -> tuple[list[Scene], Turn]:
    """The scenes of these steps, each behind the turns of those before, and the last turn."""
    past: Turn | None = None
    scenes = []
    for step in steps:
        scenes.append(Scene(step.head, past, step.given))
        past = turn_after(dialect, scenes[-1], step.sampled)
    assert past is not None
    return scenes, past


def flat(prompt: Prompt) -> IdArray[int]:
    assert isinstance(prompt, Tokens)
    return prompt.flat()


def cold(scene: Scene) -> Scene:
    """The same scene with nothing warm, as after a reload."""
    past: Turn | None = None
    for turn in ancestors(scene.past) if scene.past is not None else ():
        past = replace(turn, parent=past, warm=None)
    return msgspec.structs.replace(scene, past=past)


# --- promises -------------------------------------------------------------------------------------


def keeps_every_id(family: DialectCase, ids: Sequence[int]) -> None:
    """Joined, the parts are what was sampled, and then what closes the block."""
    parsed = read(family.dialect, OFFERING, [ids])
    heard(parsed)
    joined = all_ids(parsed)
    assert joined[: len(ids)] == list(ids)
    closing = joined[len(ids) :]
    if not closing:
        assert ids[-1] in family.ends
        return
    assert closing[0] in family.dialect.stops | family.ends
    ended = read(family.dialect, OFFERING, [[*ids, closing[0]]])
    assert all_ids(ended) == joined
    assert heard(ended) == heard(parsed)


def does_not_care_where_pieces_are_cut(
    family: DialectCase, ids: Sequence[int], is_cut: bool
) -> None:
    whole = read(family.dialect, OFFERING, [ids], is_cut=is_cut)
    one_by_one = [[id] for id in ids]
    assert read(family.dialect, OFFERING, one_by_one, is_cut=is_cut) == whole
    for at in range(len(ids) + 1):
        assert read(family.dialect, OFFERING, [ids[:at], ids[at:]], is_cut=is_cut) == whole


def warmth_changes_no_token(family: DialectCase, steps: Sequence[Step]) -> None:
    """Warm or cold, the prompt is the same; warm, only what is given now is encoded."""
    scenes, _ = chain(family.dialect, steps)
    for n, scene in enumerate(scenes):
        warm = family.dialect.render(scene)
        bare = family.dialect.render(cold(scene))
        assert flat(warm.prompt) == flat(bare.prompt)
        assert warm.prompt.length == len(flat(warm.prompt))
        before = steps[n - 1] if n else None
        if before is not None and before.head == steps[n].head:
            assert warm.tokens_reused + warm.tokens_tokenized == warm.context.length
            assert warm.tokens_tokenized <= bare.tokens_tokenized
            if not family.forgets(scenes[n - 1], scene):
                assert warm.tokens_reused >= family.dialect.render(scenes[n - 1]).context.length


def recall_changes_no_token(family: DialectCase, given: tuple[Item, ...], head: Head) -> None:
    """Wherever an earlier request may have ended, what was rendered then stands for its items."""
    render = family.dialect.render
    whole = flat(render(Scene(head, None, given, effects=effects_of(given))).prompt)
    for count in range(1, len(given) + 1):
        if is_cut(given, count):
            first = given[:count]
            before = render(Scene(head, None, first, effects=effects_of(first)))
            warm = Warm(family.dialect.fingerprint, head, before.context)
            past = Unfinished(None, (Round(first),), warm)
            scene = Scene(head, past, given[count:], effects=effects_of(given))
            assert flat(render(scene).prompt) == whole


class OddStep(NamedTuple):
    """One turn of a chain that may begin anew, as behind a compaction."""

    given: tuple[Item, ...]
    sampled: tuple[int, ...] | None
    is_fresh: bool


@cache
def odd_steps(family: DialectCase) -> st.SearchStrategy[list[OddStep]]:
    one = st.builds(
        OddStep,
        odd_items(family),
        st.none() | sampled_ids(family).map(tuple),
        st.integers(0, 4).map(lambda number: number == 0),
    )
    return st.lists(one, min_size=2, max_size=4)


def warmth_survives_oddities(family: DialectCase, steps: Sequence[OddStep], head: Head) -> None:
    """Warm or cold, the prompt is the same, also behind items that bring something, and behind a fresh round."""
    past: Turn | None = None
    effects = NO_EFFECTS
    for step in steps:
        effects = apply_effects(effects, step.given)
        scene = Scene(head, None if step.is_fresh else past, step.given, effects=effects)
        warm, bare = family.dialect.render(scene), family.dialect.render(cold(scene))
        assert flat(warm.prompt) == flat(bare.prompt)
        turn = turn_after(family.dialect, scene, step.sampled)
        if step.is_fresh:
            first, *others = turn.rounds
            first = msgspec.structs.replace(first, is_fresh=True)
            turn = replace(turn, parent=past, rounds=(Round(()), first, *others))
        past = turn


def effects_of(given: Sequence[Item]) -> Effects:
    return apply_effects(NO_EFFECTS, given)


def prompt_goes_on_where_the_engine_stopped(family: DialectCase, steps: Sequence[Step]) -> None:
    """The next prompt begins with the last one and all that was sampled, so that a prefix cache hits."""
    scenes, _ = chain(family.dialect, steps)
    for step, scene, following in zip(steps, scenes, scenes[1:], strict=False):
        sent = family.dialect.render(scene)
        seen = flat(sent.context)
        if step.sampled is not None:
            seen = flat(sent.prompt) + id_array(step.sampled)
        if not family.forgets(scene, following):
            assert flat(family.dialect.render(following).context)[: len(seen)] == seen


def rounds_of_one_turn_are_history_too(family: DialectCase, steps: Sequence[Step]) -> None:
    """Two rounds in one turn are written as two turns with a round each."""
    _, last = chain(family.dialect, steps)
    rounds = tuple(round for turn in ancestors(last) for round in turn.rounds)
    head = steps[0].head
    as_turns = cold(Scene(head, last, (message("user", "And now?"),)))
    as_rounds = Scene(head, None, as_turns.given, rounds)
    assert family.dialect.render(as_rounds) == family.dialect.render(as_turns)


def text_never_becomes_special(
    family: DialectCase, items: Sequence[Item], shape: Sequence[Item]
) -> None:
    """The special ids are those of the same items with harmless words in them."""
    assert _specials(family, items) == _specials(family, shape)


def _specials(family: DialectCase, items: Sequence[Item]) -> list[int]:
    prompt = flat(family.dialect.render(Scene(Head(), None, tuple(items))).prompt)
    specials = special_ids(family.vocabulary)
    return [id for id in prompt if id in specials]


def foreign_ids_are_not_used(family: DialectCase, ids: Sequence[int]) -> None:
    """Ids that another vocabulary made are left; their items are written anew, as a cue and `write`."""
    past = turn_after(family.dialect, OFFERING, ids)
    foreign = msgspec.structs.replace(past.rounds[0], fingerprint="another")
    scene = Scene(OFFERING.head, replace(past, rounds=(foreign,), warm=None), ())
    rendered = family.dialect.render(scene)
    written = family.dialect.write(foreign.wrote)
    before = family.dialect.render(OFFERING).prompt
    if family.ends:
        # The end that a model samples is another one than that in history.
        written = written[:-1]
    expected, found = flat(before) + written, flat(rendered.context)
    is_compared = not family.forgets(OFFERING, scene)
    if is_compared and family.is_joined:
        # A chat template gets one message for a model turn in its usual order, and several for any other.
        kinds = pairwise(part.kind for part in parts_of(foreign.wrote))
        is_compared = all(pair in MODEL_TURN for pair in kinds)
    if is_compared and family.is_joined:
        spell = family.vocabulary.bytes_of
        assert b"".join(map(spell, found)).startswith(b"".join(map(spell, expected)))
    elif is_compared:
        assert found[: len(expected)] == expected
    assert rendered.tokens_reused == 0
