"""Are conversations written as chat messages, once, and are an endpoint's deltas read as items?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from segue.dialects.messages import MessagesDialect
from segue.errors import EngineFailed
from segue.seams.history import Round, Turn, Unfinished, Warm, ancestors
from segue.seams.model import (
    Delta,
    Deltas,
    ItemClosed,
    ItemOpened,
    ItemText,
    Parsed,
    Rendered,
    Scene,
    TurnClosed,
)
from segue.seams.prompt import NO_IDS, Head, Messages
from segue.turn.commit import warm_after
from segue.wire.effects import NO_EFFECTS, apply_effects
from segue.wire.items import Item
from segue.wire.response import Response
from segue.wire.tools import Builtin, FunctionTool, Offer, Tools
from tests.contracts.dialect import (
    HEADS,
    OFFERING,
    TOOLS,
    call,
    custom_call,
    heard,
    item,
    message,
    objects,
    output,
    reasoning,
    texts,
)

DIALECT = MessagesDialect()


def written(rendered: Rendered) -> list[dict[str, object]]:
    assert isinstance(rendered.prompt, Messages)
    chunks = rendered.prompt.chunks()
    assert sum(map(len, chunks)) == rendered.prompt.length
    return cast("list[dict[str, object]]", json.loads(b"[" + b",".join(chunks) + b"]"))


def messages_of(
    *items: Item,
    head: Head = HEADS[0],
    dialect: MessagesDialect = DIALECT,
    sees_images: bool = False,
) -> list[dict[str, object]]:
    return written(dialect.render(Scene(head, None, items, sees_images=sees_images)))


# --- writing --------------------------------------------------------------------------------------


def test_instructions_are_the_first_message() -> None:
    assert messages_of(message("user", "Hi"), head=HEADS[1]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_system_and_developer_both_speak_as_system_and_are_one_message_at_the_beginning() -> None:
    found = messages_of(message("system", "a"), message("developer", "b"), message("user", "c"))
    assert found == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]
    later = messages_of(message("user", "c"), message("developer", "b"))
    assert later == [{"role": "user", "content": "c"}, {"role": "system", "content": "b"}]


def test_what_the_model_said_in_one_go_is_one_message() -> None:
    assert messages_of(
        reasoning("Hm."),
        message("assistant", "Let me look."),
        item("function_call", call_id="c1", name="look", arguments='{"q": 1}'),
        item("function_call", call_id="c2", name="read", arguments="{}", namespace="fs"),
        item("function_call_output", call_id="c1", output="one"),
        item("function_call_output", call_id="c2", output="two"),
    ) == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"q": 1}'},
                },
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "fs__read", "arguments": "{}"},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
    ]


def test_call_alone_has_no_content() -> None:
    assert messages_of(call("look", "{}"))[0]["content"] is None


def test_model_that_speaks_again_after_a_call_begins_a_new_message() -> None:
    found = messages_of(call("look", "{}"), message("assistant", "a"), message("assistant", "b"))
    assert [one["content"] for one in found] == [None, "a", "b"]


@pytest.mark.parametrize(
    "arguments, told",
    [('{"a": 1}', '{"a": 1}'), ("", "{}"), ("{broken", '{"arguments": "{broken"}')],
)
def test_arguments_are_always_an_object(arguments: str, told: str) -> None:
    calls = cast(
        "list[dict[str, dict[str, str]]]", messages_of(call("f", arguments))[0]["tool_calls"]
    )
    assert calls[0]["function"]["arguments"] == told


def test_custom_call_is_a_function_with_one_string() -> None:
    calls = cast(
        "list[dict[str, dict[str, str]]]", messages_of(custom_call("patch", 'a"b'))[0]["tool_calls"]
    )
    assert json.loads(calls[0]["function"]["arguments"]) == {"input": 'a"b'}


@pytest.mark.parametrize(
    "name, sent",
    [
        ("reasoning", {"content": "a", "reasoning": "Hm."}),
        ("content", {"content": "<think>\nHm.\n</think>\n\na"}),
        (
            "thinking",
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
                    {"type": "text", "text": "a"},
                ]
            },
        ),
        (
            "reasoning_details",
            {"content": "a", "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]},
        ),
    ],
)
def test_reasoning_goes_back_as_it_came(name: str, sent: dict[str, object]) -> None:
    dialect = MessagesDialect()
    dialect.hear(name)
    said = (reasoning("Hm."), message("assistant", "a"))
    assert messages_of(*said, dialect=dialect) == [{"role": "assistant", **sent}]


def test_reasoning_that_is_refused_stays_at_home() -> None:
    dialect = MessagesDialect()
    form = dialect.otherwise(dialect.form, "property 'messages.1.assistant.reasoning_content'")
    assert form is not None
    dialect.form = form
    said = (reasoning("Hm."), message("assistant", "a"))
    assert messages_of(*said, dialect=dialect) == [{"role": "assistant", "content": "a"}]
    dialect.hear("reasoning_content")
    assert dialect.form.reasoning is None
    dialect.hear("reasoning")
    assert dialect.form.reasoning == "reasoning"


def test_call_that_a_limit_cut_off_is_left_out_unless_it_is_answered() -> None:
    """Endpoints refuse a call without an output, and arguments that are no JSON."""
    cut = item("function_call", call_id="c", name="f", arguments='{"a', status="incomplete")
    said = (message("user", "Hi"), message("assistant", "Well"), cut)
    assert messages_of(*said, message("user", "Go on"))[1] == {
        "role": "assistant",
        "content": "Well",
    }
    answered = messages_of(*said, item("function_call_output", call_id="c", output="no"))
    assert "tool_calls" in answered[1]
    assert answered[2]["role"] == "tool"


def test_call_without_an_id_is_told_in_words() -> None:
    """Endpoints refuse calls that nobody answers, and answers to nothing."""
    found = messages_of(
        message("assistant", "a"),
        item("file_search_call", id="fs_1", queries=["bees"]),
        item("function_call_output", output="hm"),
    )
    assert [one["role"] for one in found] == ["assistant", "assistant", "user"]
    assert "bees" in str(found[1]["content"])
    assert not any("tool_calls" in one for one in found)


def test_added_tools_are_left_to_the_engine() -> None:
    tool = {"type": "function", "name": "later", "parameters": {"type": "object"}}
    assert messages_of(item("additional_tools", tools=[tool])) == []


PICTURE = item(
    "message",
    role="user",
    content=[
        {"type": "input_text", "text": "Look:"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"},
        {"type": "input_file", "filename": "a.pdf"},
    ],
)


def test_picture_is_told_in_words_to_a_model_that_cannot_see() -> None:
    content = messages_of(PICTURE)[0]["content"]
    assert isinstance(content, str)
    assert "cannot see" in content
    assert "AAAA" not in content


def test_picture_is_handed_on_to_a_model_that_sees() -> None:
    content = cast("list[dict[str, object]]", messages_of(PICTURE, sees_images=True)[0]["content"])
    assert content[0] == {"type": "text", "text": "Look:"}
    assert content[1] == {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"},
    }
    assert "a.pdf" in str(content[2]["text"])
    assert messages_of(message("user", "Hi"), sees_images=True)[0]["content"] == "Hi"


def test_picture_from_a_tool_is_shown_behind_all_outputs() -> None:
    """Endpoints want the outputs of one turn together, and a tool's message has no place for a picture."""
    shown = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    parts = [{"type": "input_text", "text": "See"}, shown, {"type": "input_text", "text": "there."}]
    items = (
        item("function_call_output", call_id="a", output=parts),
        item("function_call_output", call_id="b", output="plain"),
        message("user", "Well?"),
    )
    seen = messages_of(*items, sees_images=True)
    assert [one["role"] for one in seen] == ["tool", "tool", "user", "user"]
    assert seen[0]["content"] == "See\n[image: shown after the outputs]\nthere."
    content = cast("list[dict[str, object]]", seen[2]["content"])
    assert content[1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    told = messages_of(*items)
    assert [one["role"] for one in told] == ["tool", "tool", "user"]
    assert "cannot see" in str(told[0]["content"])


def test_address_of_a_picture_is_not_handed_on() -> None:
    """The engine would follow it from inside the operator's network."""
    parts = [{"type": "input_image", "image_url": "http://169.254.169.254/a.png"}]
    output = item("function_call_output", call_id="a", output=parts)
    asked = item("message", role="user", content=parts)
    seen = messages_of(output, asked, sees_images=True)
    assert [one["role"] for one in seen] == ["tool", "user"]
    for one in seen:
        assert (
            one["content"] == "[image: http://169.254.169.254/a.png, which this model cannot see]"
        )


# --- warmth ---------------------------------------------------------------------------------------


def turn_after(scene: Scene, wrote: Sequence[Item]) -> Turn:
    last = Round(
        scene.given,
        tuple(wrote),
        (NO_IDS,) * len(wrote),
        NO_IDS,
        DIALECT.fingerprint,
        did_sample=True,
    )
    return Turn(
        id="resp",
        owner="ada",
        parent_id=None,
        parent=scene.past,
        rounds=(*scene.rounds, last),
        response=cast(Response, None),
        is_stored=False,
        open_calls={},
        model_turns=0,
        warm=warm_after(DIALECT.fingerprint, scene.head, DIALECT.render(scene), last),
    )


def cold(scene: Scene) -> Scene:
    past: Turn | None = None
    for turn in ancestors(scene.past) if scene.past is not None else ():
        past = replace(turn, parent=past, warm=None)
    return msgspec.structs.replace(scene, past=past)


nasty = texts("<|im_end|>", '"role":"system"', "}],")
given_items = st.lists(
    st.one_of(
        st.builds(message, st.sampled_from(["user", "system", "developer", "assistant"]), nasty),
        st.builds(output, nasty),
        st.builds(reasoning, nasty),
        st.builds(call, st.sampled_from(["look", "unknown"]), objects() | nasty),
        st.builds(custom_call, st.just("patch"), nasty),
    ),
    max_size=3,
).map(tuple)
steps = st.lists(st.tuples(given_items, given_items, st.sampled_from(HEADS)), max_size=4)


@given(steps, given_items)
def test_warmth_changes_no_byte(
    chain: list[tuple[tuple[Item, ...], tuple[Item, ...], Head]], last: tuple[Item, ...]
) -> None:
    """Warm or cold, the messages are the same; under the same instructions only the new ones are written, unless
    nobody but developers has spoken so far."""
    past: Turn | None = None
    before: Head | None = None
    is_begun = False
    for given_now, wrote, head in [*chain, (last, (), HEADS[0])]:
        scene = Scene(head, past, given_now)
        warm, bare = DIALECT.render(scene), DIALECT.render(cold(scene))
        assert written(warm) == written(bare)
        assert warm.tokens_reused + warm.tokens_tokenized == warm.context.length
        is_alike = before is not None and before.instructions == head.instructions
        if past is not None and is_alike and is_begun:
            assert past.warm is not None
            assert warm.tokens_reused >= past.warm.prompt.length
        is_begun = any(one["role"] != "system" for one in written(warm))
        past, before = turn_after(scene, wrote), head


def test_other_tools_write_nothing_again() -> None:
    """Tools are the engine's field, so that a change of them leaves the messages alone."""
    past = turn_after(Scene(Head(), None, (message("user", "Hi"),)), [message("assistant", "Ho")])
    rendered = DIALECT.render(Scene(Head(tools=TOOLS), past, (message("user", "And?"),)))
    assert past.warm is not None
    assert rendered.tokens_reused == past.warm.prompt.length


def test_other_instructions_write_everything_again() -> None:
    past = turn_after(Scene(Head(), None, (message("user", "Hi"),)), [message("assistant", "Ho")])
    rendered = DIALECT.render(Scene(HEADS[1], past, (message("user", "And?"),)))
    assert rendered.tokens_reused == 0
    assert [one["content"] for one in written(rendered)] == ["Be brief.", "Hi", "Ho", "And?"]


def test_beginning_that_was_sent_before_is_recalled() -> None:
    """A client that resends everything: what the cache has found stands for the first round."""
    head = HEADS[1]
    first = (message("user", "Hi"),)
    kept = DIALECT.render(Scene(head, None, first)).context
    rest = (message("assistant", "Ho"), message("user", "And?"))
    past = Unfinished(None, (Round(first),), Warm(DIALECT.fingerprint, head, kept))
    scene = Scene(head, past, rest)
    rendered = DIALECT.render(scene)
    assert rendered.tokens_reused == kept.length
    assert written(rendered) == messages_of(*first, *rest, head=head)


# --- reading --------------------------------------------------------------------------------------


def read(*deltas: Delta, is_cut: bool = False, scene: Scene = OFFERING) -> list[Parsed]:
    reader = DIALECT.reader(scene)
    parsed = [one for delta in deltas for one in reader.feed(Deltas((delta,)))]
    return parsed + reader.close(is_cut=is_cut)


def test_reader_opens_writes_and_closes_items() -> None:
    assert read(
        Delta(reasoning="Hm"),
        Delta(reasoning="m."),
        Delta(text="\n\n"),
        Delta(text="Let me "),
        Delta(text="look.\n"),
        Delta(call_index=0, call_name="look"),
        Delta(call_index=0, call_arguments='{"q":'),
        Delta(call_index=0, call_arguments="1}"),
        Delta(call_index=1, call_name="fs__read", call_arguments="{}"),
    ) == [
        ItemOpened("reasoning"),
        ItemText("Hm"),
        ItemText("m."),
        ItemClosed(NO_IDS),
        ItemOpened("message"),
        ItemText("Let me "),
        ItemText("look.\n"),
        ItemClosed(NO_IDS),
        ItemOpened("function", "look"),
        ItemText('{"q":'),
        ItemText("1}"),
        ItemClosed(NO_IDS),
        ItemOpened("function", "read", "fs", is_async=True),
        ItemText("{}"),
        ItemClosed(NO_IDS),
        TurnClosed(NO_IDS),
    ]


def test_blank_text_between_a_thought_and_a_call_is_no_message() -> None:
    parsed = read(
        Delta(reasoning="Hm."),
        Delta(text="\n\n"),
        Delta(call_index=0, call_name="look", call_arguments="{}"),
    )
    assert [one.kind for one in parsed if isinstance(one, ItemOpened)] == ["reasoning", "function"]


def test_blank_text_alone_says_nothing() -> None:
    assert read(Delta(text=" \n")) == [TurnClosed(NO_IDS)]


@pytest.mark.parametrize(
    "pieces, text",
    [
        (['{"input":', '"a\\nb"}'], "a\nb"),
        (['{"input": "cut \\u00e9 of'], "cut é of"),
        (["no JSON"], "no JSON"),
    ],
)
def test_custom_call_gives_its_input_when_it_is_whole(pieces: list[str], text: str) -> None:
    parsed = read(
        Delta(call_index=0, call_name="patch"),
        *(Delta(call_index=0, call_arguments=piece) for piece in pieces),
    )
    (item,) = heard(parsed)
    assert (item.kind, item.name, item.text) == ("custom", "patch", text)


def test_unknown_tool_is_still_a_call() -> None:
    (item,) = heard(read(Delta(call_index=0, call_name="what", call_arguments="{}")))
    assert (item.kind, item.name, item.text) == ("function", "what", "{}")


def test_tool_that_an_item_has_brought_is_known() -> None:
    tool = {"type": "custom", "name": "late.r"}
    given = (item("additional_tools", tools=[tool]),)
    scene = Scene(Head(), None, given, effects=apply_effects(NO_EFFECTS, given))
    (found,) = heard(
        read(Delta(call_index=0, call_name="late__r", call_arguments='{"input":"x"}'), scene=scene)
    )
    assert (found.kind, found.name, found.text) == ("custom", "late.r", "x")


def test_item_that_is_open_at_a_cut_is_cut() -> None:
    (item,) = heard(read(Delta(text="Half a sen"), is_cut=True))
    assert item.is_cut


@pytest.mark.parametrize(
    "deltas",
    [
        [
            Delta(call_index=0, call_name="look"),
            Delta(call_index=1, call_name="look"),
            Delta(call_index=0, call_arguments="{}"),
        ],
        [Delta(call_index=0, call_arguments="{}")],
    ],
)
def test_calls_that_cannot_be_told_apart_are_a_failure(deltas: list[Delta]) -> None:
    with pytest.raises(EngineFailed):
        read(*deltas)


# --- names ----------------------------------------------------------------------------------------

GITHUB = "github_enterprise_production_readonly"
LISTING, DELETING = (
    FunctionTool(name=f"get_pull_request_reviews_{what}") for what in ("list", "delete_all")
)


def offering(*offers: Offer, given: tuple[Item, ...] = ()) -> Scene:
    return Scene(Head(tools=Tools(offers=offers)), None, given)


@pytest.mark.parametrize("builtin", [None, "mcp"])
def test_call_of_a_tool_is_never_read_as_the_call_of_another(builtin: Builtin | None) -> None:
    """For a tool of an MCP server the server itself would run the other one."""
    offers = [Offer(tool, GITHUB, builtin=builtin) for tool in (LISTING, DELETING)]
    for scene in (offering(*offers), offering(*offers[::-1])):
        for offer in offers:
            name = DIALECT.names(scene)(offer.qualified_name)
            opened = read(Delta(call_index=0, call_name=name, call_arguments="{}"), scene=scene)[0]
            assert isinstance(opened, ItemOpened)
            assert (opened.name, opened.namespace) == (offer.tool.name, GITHUB)
            assert opened.kind == offer.kind


def test_history_has_the_names_under_which_tools_are_offered() -> None:
    offers = [Offer(tool, GITHUB) for tool in (LISTING, DELETING)]
    calls = [
        item(
            "function_call",
            call_id=f"c{n}",
            name=one.tool.name,
            namespace=one.namespace,
            arguments="{}",
        )
        for n, one in enumerate(offers)
    ]
    scene = offering(*offers, given=(message("user", "Go"), *calls))
    said = cast("list[dict[str, dict[str, str]]]", written(DIALECT.render(scene))[1]["tool_calls"])

    names = DIALECT.names(scene)
    assert [one["function"]["name"] for one in said] == [
        names(offer.qualified_name) for offer in offers
    ]


def test_name_that_is_shared_from_now_on_is_written_again_in_the_history() -> None:
    """Until then it has the spelling of always; the tool that comes later would be called so too."""
    first, later = (
        Offer(FunctionTool(name="read"), "files"),
        Offer(FunctionTool(name="files__read")),
    )
    asked = (message("user", "Go"),)
    called = {"name": "read", "namespace": "files", "arguments": "{}"}
    wrote = (item("function_call", call_id="c", **called),)
    scene = offering(first, given=asked)
    rendered = DIALECT.render(scene)
    warm = warm_after(DIALECT.fingerprint, scene.head, rendered, Round(asked, wrote))
    past = Unfinished(None, (Round(asked, wrote),), warm)
    given = (item("function_call_output", call_id="c", output="bees"),)

    same = Scene(scene.head, past, given)
    assert DIALECT.render(same).tokens_reused == rendered.context.length
    assert b'"files__read"' in b"".join(DIALECT.render(same).prompt.chunks())
    both = Scene(Head(tools=Tools(offers=(later, first))), past, given)
    found = b"".join(DIALECT.render(both).prompt.chunks())
    assert DIALECT.render(both).tokens_reused == 0
    assert b'"files__read"' not in found
    assert DIALECT.names(both)("files.read").encode() in found
