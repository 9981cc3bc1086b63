"""Does the chat engine speak what chat endpoints speak? Against a FAKE that plays recorded shapes, and a REAL one:
llama.cpp's server with SmolLM2."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from segue.border.believed import believed
from segue.border.numbers import EVENTS_MIN, TOKEN_EVENTS_MAX
from segue.dialects.messages import MessageForm, MessagesDialect
from segue.engines.chat import ChatEngine, _ThinkMarks
from segue.errors import EngineFailed, InvalidRequest, ServerFault, TooMany
from segue.seams.model import (
    Delta,
    Deltas,
    EngineFacts,
    Finish,
    ItemClosed,
    ItemOpened,
    ItemText,
    Job,
    Piece,
    Sampling,
    Scene,
)
from segue.seams.prompt import Head
from segue.wire.codec import decode_item
from segue.wire.effects import NO_EFFECTS, apply_effects
from segue.wire.items import Logprob, TopLogprob
from segue.wire.requests import ReasoningConfig, TextConfig, TextFormat, ToolChoiceName
from segue.wire.tools import CustomTool, FunctionTool, NamespaceTool, Tools, offers_of
from tests.contracts.turns import said
from tests.engines.asking import WAIT_S, Played, finish_of, heard, upstream
from tests.engines.fakes.chat import FakeChat, delta, end, usage
from tests.engines.fakes.server import DONE, event
from tests.engines.llama_listener import CONTEXT_TOKENS, KEY, Listener, llama_server

DIALECT = MessagesDialect()
SCHEMA = b'{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}'


def tools_of(*definitions: FunctionTool | CustomTool | NamespaceTool) -> Tools:
    raw = msgspec.json.encode(definitions)
    return Tools(raw, definitions, raw, offers_of(definitions))


TOOLS = tools_of(
    FunctionTool(name="weather", description="Tells it.", parameters=msgspec.Raw(SCHEMA)),
    CustomTool(name="patch", format=msgspec.Raw(b'{"type":"grammar"}')),
    NamespaceTool(name="fs", tools=[FunctionTool(name="read", strict=True)]),
)


def job(head: Head = Head(), output_tokens_max: int | None = None, **fields: object) -> Job:  # noqa: B008
    scene = Scene(head, None, (said("What is the weather in Paris?"),))
    made = Job(
        prompt=DIALECT.render(scene).prompt,
        scene=scene,
        sampling=Sampling(),
        stops=DIALECT.stops,
        output_tokens_max=output_tokens_max,
    )
    return msgspec.structs.replace(made, **fields)


async def sent_for(wanted: Job) -> dict[str, object]:
    """The request that this job becomes."""
    async with FakeChat(events=[end("length")]) as fake, upstream(fake.url) as address:
        await heard(ChatEngine(address, "gpt", MessagesDialect()), wanted)
        return fake.requests[-1]


# --- what is asked --------------------------------------------------------------------------------


async def test_plain_question_is_messages_and_little_else() -> None:
    assert await sent_for(job(Head(instructions="Be brief."))) == {
        "model": "gpt",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is the weather in Paris?"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_settings_are_handed_on() -> None:
    head = Head(reasoning=ReasoningConfig(effort="low"), text=TextConfig(verbosity="low"))
    sent = await sent_for(
        job(head, 50, sampling=Sampling(0.5, 0.9, 0.25, -0.5, seed=7, stop_strings=("END",)))
    )
    assert sent["max_tokens"] == 50
    assert (sent["temperature"], sent["top_p"]) == (0.5, 0.9)
    assert (sent["presence_penalty"], sent["frequency_penalty"]) == (0.25, -0.5)
    assert (sent["seed"], sent["stop"]) == (7, ["END"])
    assert (sent["reasoning_effort"], sent["verbosity"]) == ("low", "low")


async def test_tools_are_functions_with_plain_names() -> None:
    sent = await sent_for(job(Head(tools=TOOLS, parallel_tool_calls=False)))
    assert sent["tool_choice"] == "auto"
    assert sent["parallel_tool_calls"] is False
    functions = [one["function"] for one in cast("list[dict[str, object]]", sent["tools"])]
    assert functions == [
        {"name": "weather", "description": "Tells it.", "parameters": json.loads(SCHEMA)},
        {
            "name": "patch",
            "parameters": {
                "type": "object",
                "properties": {
                    "input": {"type": "string", "description": 'Its format: {"type":"grammar"}'}
                },
                "required": ["input"],
            },
        },
        {
            "name": "fs__read",
            "parameters": {"type": "object", "properties": {}},
            "strict": True,
        },
    ]


ADDED = decode_item(
    json.dumps(
        {
            "type": "additional_tools",
            "tools": [
                {"type": "shell"},
                {
                    "type": "namespace",
                    "name": "crm",
                    "tools": [{"type": "function", "name": "find"}],
                },
                {"type": "web_search"},
            ],
        }
    ).encode(),
    "input[0]",
)


@pytest.mark.parametrize(
    "choice, wanted",
    [
        ("auto", "auto"),
        (ToolChoiceName(type="shell"), {"type": "function", "function": {"name": "shell"}}),
        (
            ToolChoiceName(type="function", name="find"),
            {"type": "function", "function": {"name": "crm__find"}},
        ),
    ],
)
async def test_tools_that_items_bring_stand_behind_those_of_the_request(
    choice: Any, wanted: object
) -> None:
    head = Head(tools=TOOLS, tool_choice=choice)
    effects = apply_effects(NO_EFFECTS, [ADDED])
    asked = job(head)
    scene = msgspec.structs.replace(asked.scene, effects=effects)

    sent = await sent_for(msgspec.structs.replace(asked, scene=scene))

    names = [one["function"]["name"] for one in cast("list[Any]", sent["tools"])]
    assert names == ["weather", "patch", "fs__read", "shell", "crm__find"]
    assert sent["tool_choice"] == wanted


async def test_tools_that_would_be_called_alike_are_offered_and_chosen_by_names_of_their_own() -> (
    None
):
    github = "github_enterprise_production_readonly"
    both = [FunctionTool(name=f"get_pull_request_reviews_{one}") for one in ("list", "delete_all")]
    tools = tools_of(
        NamespaceTool(name=github, tools=[*both]),
        FunctionTool(name="files__read"),
        NamespaceTool(name="files", tools=[FunctionTool(name="read")]),
    )
    for number, namespace, name in (
        (0, github, both[0].name),
        (1, github, both[1].name),
        (2, None, "files__read"),
        (3, "files", "read"),
    ):
        choice = ToolChoiceName(type="function", name=name, namespace=namespace)
        sent = await sent_for(job(Head(tools=tools, tool_choice=choice)))
        names = [one["function"]["name"] for one in cast("list[Any]", sent["tools"])]
        assert len(set(names)) == 4
        assert sent["tool_choice"] == {"type": "function", "function": {"name": names[number]}}


async def test_tool_that_request_and_item_bring_is_offered_once() -> None:
    tool = {"type": "function", "name": "weather"}
    added = json.dumps({"type": "additional_tools", "tools": [tool]}).encode()
    effects = apply_effects(NO_EFFECTS, [decode_item(added, "input[0]")])
    asked = job(Head(tools=TOOLS))
    scene = msgspec.structs.replace(asked.scene, effects=effects)

    sent = await sent_for(msgspec.structs.replace(asked, scene=scene))

    functions = [one["function"] for one in cast("list[Any]", sent["tools"])]
    assert [one["name"] for one in functions] == ["weather", "patch", "fs__read"]
    assert functions[0]["description"] == "Tells it."


async def test_settings_that_items_bring_are_handed_on() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    update = {
        "type": "configuration_update",
        "reasoning": {"effort": "high"},
        "text": {"format": schema},
    }
    effects = apply_effects(NO_EFFECTS, [decode_item(json.dumps(update).encode(), "input[0]")])
    asked = job(Head(reasoning=ReasoningConfig(effort="low")))
    scene = msgspec.structs.replace(asked.scene, effects=effects)

    sent = await sent_for(msgspec.structs.replace(asked, scene=scene))

    assert sent["reasoning_effort"] == "high"
    assert cast("Any", sent["response_format"])["json_schema"]["name"] == "n"


@pytest.mark.parametrize(
    "choice, wanted, count",
    [
        ("none", "none", 3),
        ("required", "required", 3),
        (
            ToolChoiceName(type="function", name="weather"),
            {"type": "function", "function": {"name": "weather"}},
            3,
        ),
        (
            ToolChoiceName(type="function", name="read", namespace="fs"),
            {"type": "function", "function": {"name": "fs__read"}},
            3,
        ),
        (
            ToolChoiceName(type="custom", name="patch"),
            {"type": "function", "function": {"name": "patch"}},
            3,
        ),
        (
            ToolChoiceName(
                type="allowed_tools",
                mode="required",
                tools=[ToolChoiceName(type="function", name="weather")],
            ),
            "required",
            1,
        ),
        (ToolChoiceName(type="web_search"), "auto", 3),
    ],
)
async def test_choice_of_a_tool_is_handed_on(choice: object, wanted: object, count: int) -> None:
    sent = await sent_for(job(msgspec.structs.replace(Head(tools=TOOLS), tool_choice=choice)))
    assert sent["tool_choice"] == wanted
    assert len(cast("list[object]", sent["tools"])) == count


@pytest.mark.parametrize(
    "wanted, sent_format",
    [
        (TextFormat("json_object"), {"type": "json_object"}),
        (
            TextFormat("json_schema", name="place", schema=msgspec.Raw(SCHEMA), strict=True),
            {
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": json.loads(SCHEMA), "strict": True},
            },
        ),
    ],
)
async def test_format_of_the_text_is_handed_on(wanted: TextFormat, sent_format: object) -> None:
    sent = await sent_for(job(Head(text=TextConfig(format=wanted))))
    assert sent["response_format"] == sent_format


async def test_tools_are_translated_once_while_they_stay_the_same() -> None:
    async with FakeChat(events=[end()]) as fake, upstream(fake.url) as address:
        engine = ChatEngine(address, "gpt", MessagesDialect())
        await heard(engine, job(Head(tools=TOOLS)))
        kept = engine._tools
        await heard(engine, job(Head(tools=TOOLS, instructions="Other words.")))
        assert engine._tools is kept
        assert fake.requests[0]["tools"] == fake.requests[1]["tools"]


async def test_endpoint_that_has_another_word_for_the_limit_is_understood() -> None:
    fake = FakeChat(events=[delta(content="Hi"), end()], wants_completion_limit=True)
    async with fake, upstream(fake.url) as address:
        engine = ChatEngine(address, "gpt", MessagesDialect())
        for _ in range(2):
            assert len(await heard(engine, job(output_tokens_max=5))) == 2
        assert [("max_tokens" in one) for one in fake.requests] == [True, False, False]


# --- what is heard --------------------------------------------------------------------------------


async def heard_from(*events: dict[str, object], has_done: bool = True) -> list[object]:
    fake = FakeChat(events=list(events), has_done=has_done)
    async with fake, upstream(fake.url) as address:
        return one_by_one(await heard(ChatEngine(address, "gpt", MessagesDialect()), job()))


def text_of(deltas: Sequence[object]) -> str:
    return "".join(one.text for one in deltas if isinstance(one, Delta))


def one_by_one(pieces: Sequence[Piece]) -> list[object]:
    """The deltas, whichever came together, and the finish."""
    return [
        one for piece in pieces for one in (piece.deltas if isinstance(piece, Deltas) else [piece])
    ]


async def test_text_reasoning_and_calls_become_deltas() -> None:
    """Both names of reasoning; a call in pieces; two calls by their index; counts at the end."""
    assert await heard_from(
        delta(role="assistant", content=None),
        delta(reasoning_content="Hm"),
        delta(reasoning="m."),
        delta(content="Let me "),
        delta(content="look."),
        delta(tool_calls=[{"index": 0, "id": "x", "function": {"name": "weather"}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"city":'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '"Paris"}'}}]),
        delta(tool_calls=[{"index": 1, "function": {"name": "patch", "arguments": "{}"}}]),
        end("tool_calls"),
        usage(100, 20, cached=64, reasoning=5),
    ) == [
        Delta(reasoning="Hm"),
        Delta(reasoning="m."),
        Delta(text="Let me "),
        Delta(text="look."),
        Delta(call_index=0, call_name="weather"),
        Delta(call_index=0, call_arguments='{"city":'),
        Delta(call_index=0, call_arguments='"Paris"}'),
        Delta(call_index=1, call_name="patch", call_arguments="{}"),
        Finish("stop", 64, 100, 20, 5),
    ]


@pytest.mark.parametrize(
    "said, stop_string",
    [
        ({"stop_reason": "END"}, "END"),
        ({"matched_stop": "END"}, "END"),
        ({"stop_reason": None}, None),
        ({"stop_reason": 151_645}, None),
        ({"matched_stop": {"odd": True}}, None),
        ({}, None),
    ],
)
async def test_stop_string_is_named_where_the_endpoint_says_it(
    said: dict[str, object], stop_string: str | None
) -> None:
    last = {"choices": [{"delta": {}, "finish_reason": "stop", **said}]}
    finish = (await heard_from(delta(content="One"), last))[-1]
    assert finish == Finish("stop", stop_string=stop_string)


async def test_same_reasoning_under_both_names_is_heard_once() -> None:
    pieces = await heard_from(delta(reasoning_content="Hm", reasoning="Hm"), end())
    assert pieces[:-1] == [Delta(reasoning="Hm")]


def call(name: str = "", arguments: str = "", **fields: object) -> dict[str, object]:
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return {**fields, "function": function}


@pytest.mark.parametrize(
    "calls, numbers",
    [
        # Whole calls under one index or none, told apart by their ids, or because the last one is whole.
        ([call("f", "{}", index=0, id="a"), call("f", "{}", index=0, id="b")], [0, 1]),
        ([call("f", "{}", id="a"), call("f", "{}", id="b")], [0, 1]),
        ([call("f", "{}"), call("f", "{}"), call("f", "{}")], [0, 1, 2]),
        # In pieces, with the id or the name repeated.
        ([call("f", "{", index=0, id="a"), call("", "}", index=0, id="a")], [0, 0]),
        ([call("f", "{", index=0, id="a"), call("f", "}", index=0, id="a")], [0, 0]),
        ([call("f", "", index=0), call("f", "{", index=0), call("f", "}", index=0)], [0, 0, 0]),
        ([call("f", '{"a":', id="a"), call("", "{}}"), call("f", "{}", id="b")], [0, 0, 1]),
        ([call("f", "{}", index=0, id=""), call("g", "{}", index=1, id="")], [0, 1]),
    ],
)
async def test_calls_are_told_apart(calls: list[dict[str, object]], numbers: list[int]) -> None:
    pieces = await heard_from(*(delta(tool_calls=[one]) for one in calls), end("tool_calls"))
    assert [one.call_index for one in pieces if isinstance(one, Delta)] == numbers


async def test_arguments_may_be_an_object_and_an_error_null() -> None:
    one = delta(tool_calls=[{"id": "a", "function": {"name": "f", "arguments": {"city": "Rome"}}}])
    pieces = await heard_from({**one, "error": None}, {**end("tool_calls"), "error": None})
    assert pieces[0] == Delta(call_index=0, call_name="f", call_arguments='{"city": "Rome"}')


@given(
    st.sampled_from(
        [
            ("<think>\nHm. 1 < 2\n\nSo.\n</think>\n\nHello </think>.", "\nHm. 1 < 2\n\nSo."),
            ("\n <think>Hm.</think>", "Hm."),
            ("<think>Hm.\n</thin", "Hm.\n</thin"),
            ("<thinking>", ""),
            ("<th", ""),
            ("Use <think>x</think>.", ""),
        ]
    ),
    st.lists(st.integers(0, 50)),
)
def test_thoughts_in_the_text_are_found_wherever_it_is_cut(
    answer: tuple[str, str], cuts: list[int]
) -> None:
    text, thought = answer
    marks = _ThinkMarks()
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    deltas = [one for a, b in pairwise(places) for one in marks.split(text[a:b], ())]
    deltas += marks.close()
    assert "".join(one.reasoning for one in deltas) == thought
    said = "".join(one.text for one in deltas)
    assert said == (text.partition("</think>")[2] if thought else text)


async def test_refusal_for_another_reason_teaches_nothing() -> None:
    """Whoever asks decides what stands in a refusal that repeats the request: it counts only if the change helps."""
    fake = FakeChat(events=[end()], refuses=(400, "seed, verbosity, stop: must alternate, I say"))
    async with fake, upstream(fake.url) as address:
        dialect = MessagesDialect()
        engine = ChatEngine(address, "gpt", dialect)
        head = Head(text=TextConfig(verbosity="low"))
        with pytest.raises(InvalidRequest):
            await heard(engine, job(head, sampling=Sampling(seed=3)))
        fake.refuses = None
        await heard(engine, job(head, sampling=Sampling(seed=3)))
    assert fake.requests[-1]["verbosity"] == "low"
    assert fake.requests[-1]["seed"] == 3
    assert dialect.form == MessageForm()


async def test_endpoint_that_counts_nothing_leaves_the_counts_open() -> None:
    assert (await heard_from(delta(content="a"), end()))[-1] == Finish("stop")


async def test_limit_is_told_as_such() -> None:
    assert (await heard_from(delta(content="a"), end("length")))[-1] == Finish("length")


async def test_answer_may_end_without_the_word_done() -> None:
    assert (await heard_from(delta(content="a"), end(), has_done=False))[-1] == Finish("stop")


@pytest.mark.parametrize(
    "events",
    [
        [delta(content="a")],
        [delta(content="a"), {"error": {"message": "died", "code": 500}}],
        [delta(content=5)],
    ],
)
async def test_answer_that_breaks_off_is_a_failure(events: list[dict[str, object]]) -> None:
    with pytest.raises(ServerFault):
        await heard_from(*events)


async def test_answer_that_the_endpoints_own_filter_ends_says_so() -> None:
    pieces = await heard_from(delta(content="a"), end("content_filter"), usage(3, 1))
    assert pieces[-1] == Finish("content_filter", 0, 3, 1, 0)


async def test_only_the_first_answer_is_read() -> None:
    """Of two in one event it is the one with the index 0, wherever it stands."""
    one, other = {"index": 1, "delta": {"content": "ONE"}}, {"index": 0, "delta": {"content": "Z"}}
    pieces = await heard_from({"choices": [one, other]}, {"choices": [one]}, end())
    assert text_of(pieces) == "Z"


async def test_what_comes_after_the_end_is_dropped() -> None:
    late = delta(content=" LATE")
    pieces = await heard_from(delta(content="a"), end("length"), late, end(), usage(3, 1))
    assert text_of(pieces) == "a"
    assert pieces[-1] == Finish("length", 0, 3, 1, 0)


async def test_endpoint_may_name_a_reason_in_every_event() -> None:
    said = ("Hello ", "wor", "ld")
    chunks = [{"choices": [{"delta": {"content": one}, "finish_reason": "stop"}]} for one in said]
    pieces = await heard_from(*chunks, end())
    assert text_of(pieces) == "Hello world"


async def test_thoughts_that_are_counted_beside_the_answer_are_output() -> None:
    counted = {
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "completion_tokens_details": {"reasoning_tokens": 303},
    }
    pieces = await heard_from(delta(content="a"), end(), {"choices": [], "usage": counted})
    assert pieces[-1] == Finish("stop", None, 3, 312, 303)


@pytest.mark.parametrize(
    "counted",
    [{"prompt_tokens": 3.5}, {"completion_tokens": "7"}, {"prompt_tokens_details": []}, 5, [], "x"],
)
async def test_count_that_cannot_be_read_costs_no_answer(counted: object) -> None:
    pieces = await heard_from(delta(content="a"), end(), {"choices": [], "usage": counted})
    assert text_of(pieces) == "a"
    finish = pieces[-1]
    assert isinstance(finish, Finish)
    # No count is negative: whoever looks at it next knows that it cannot be true.
    assert (finish.reason, finish.input_tokens, finish.output_tokens) == ("stop", -1, -1)


@pytest.mark.parametrize("limit", [1, 20])
async def test_endpoint_that_ignores_its_limit_is_cut_off_far_beyond_it(limit: int) -> None:
    """How many tokens are in an event only the endpoint knows: what it may send is more than that can be."""
    most = limit * TOKEN_EVENTS_MAX + EVENTS_MIN
    wanted = job(output_tokens_max=limit)
    engine = ChatEngine(Played([event(delta(content="a"))] * (most + 100)), "gpt", DIALECT)
    noted: list[str] = []
    pieces = [piece async for piece in believed(engine, wanted, "a", noted.append)]
    assert finish_of(pieces) == Finish("length")
    assert len(text_of(one_by_one(pieces))) == most
    assert noted == ["length"]

    whole = Played([event(delta(content="a"))] * (most - 2) + [event(end()), DONE])
    pieces = await heard(ChatEngine(whole, "gpt", DIALECT), wanted)
    assert finish_of(pieces).reason == "stop"


@pytest.mark.parametrize(
    "status, message, kind, code",
    [
        (400, "maximum context length is 10 tokens", InvalidRequest, "context_length_exceeded"),
        (400, "image input is not supported", InvalidRequest, "invalid_request"),
        (429, "slow down", TooMany, "rate_limit_exceeded"),
        (500, "oops", EngineFailed, "server_error"),
    ],
)
async def test_refusal_becomes_our_own_error(
    status: int, message: str, kind: type[Exception], code: str
) -> None:
    async with FakeChat(refuses=(status, message)) as fake, upstream(fake.url) as address:
        with pytest.raises(kind) as raised:
            await heard(ChatEngine(address, "gpt", MessagesDialect()), job())
        assert raised.value.code == code  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "choice", ["required", ToolChoiceName(type="function", name="weather")], ids=str
)
async def test_endpoint_that_does_not_call_though_it_must_has_failed(choice: object) -> None:
    """Some endpoints take the wish and ignore it; that is said, not hidden."""
    head = msgspec.structs.replace(Head(tools=TOOLS), tool_choice=choice)
    fake = FakeChat(events=[delta(content="No."), end()])
    async with fake, upstream(fake.url) as address:
        engine = ChatEngine(address, "gpt", MessagesDialect())
        with pytest.raises(ServerFault, match="did not call"):
            await heard(engine, job(head))
        fake.events = [delta(content="No."), end("length")]
        assert finish_of(await heard(engine, job(head))).reason == "length"


async def test_warm_up_costs_nothing_where_nobody_says_that_prompts_are_kept() -> None:
    async with FakeChat(events=[end()]) as fake, upstream(fake.url) as address:
        engine = ChatEngine(address, "gpt", MessagesDialect())
        assert await engine.is_ready()
        pieces = await heard(engine, job(output_tokens_max=0))
        assert pieces == [Finish("length", input_tokens=0, output_tokens=0)]
        assert fake.requests == []


async def test_warm_up_of_an_own_server_is_one_token_that_nobody_hears() -> None:
    events = [delta(content="a"), end("length"), usage(9, 1, cached=3)]
    fake = FakeChat(events=events, owned_by="vllm")
    async with fake, upstream(fake.url) as address:
        engine = ChatEngine(address, "gpt", MessagesDialect())
        assert await engine.is_ready()
        assert await heard(engine, job(output_tokens_max=0)) == [Finish("length", 3, 9, 1, 0)]
        assert fake.requests[0]["max_tokens"] == 1
        fake.refuses = (400, "No user query found in messages.")
        nothing = Finish("length", input_tokens=0, output_tokens=0)
        assert await heard(engine, job(output_tokens_max=0)) == [nothing]


@pytest.mark.parametrize(
    "owned_by, values, effort, told",
    [
        ("", {}, "low", None),
        ("vllm", {}, None, None),
        ("vllm", {}, "none", {"enable_thinking": False, "thinking": False}),
        ("", {"a": 1}, None, {"a": 1}),
        ("llamacpp", {"enable_thinking": False}, None, {"enable_thinking": False}),
    ],
)
async def test_chat_template_is_told_what_operator_and_client_have_set(
    owned_by: str, values: dict[str, object], effort: Any, told: dict[str, object] | None
) -> None:
    fake = FakeChat(events=[end()], owned_by=owned_by)
    async with fake, upstream(fake.url) as address:
        engine = ChatEngine(address, "gpt", MessagesDialect(), values)
        assert await engine.is_ready()
        await heard(engine, job(Head(reasoning=ReasoningConfig(effort=effort))))
    wanted = told if told is None or effort is None else {**told, "reasoning_effort": effort}
    assert fake.requests[0].get("chat_template_kwargs") == wanted


async def test_effort_is_left_out_for_a_model_that_does_not_think() -> None:
    class Thoughtless(FakeChat):
        async def _completions(self, request: web.Request) -> web.StreamResponse:
            has_effort = "reasoning_effort" in json.loads(await request.read())
            self.refuses = (400, '"gpt" does not support thinking') if has_effort else None
            return await super()._completions(request)

    async with Thoughtless(events=[end()]) as fake, upstream(fake.url) as address:
        engine = ChatEngine(address, "gpt", MessagesDialect())
        for effort in ("minimal", "high"):
            await heard(engine, job(Head(reasoning=ReasoningConfig(effort=effort))))  # type: ignore[arg-type]
    assert [one.get("reasoning_effort") for one in fake.requests] == ["minimal", None, None]


async def test_limit_that_does_not_fit_is_left_to_the_endpoint() -> None:
    class Full(FakeChat):
        async def _completions(self, request: web.Request) -> web.StreamResponse:
            is_limited = "max_tokens" in json.loads(await request.read())
            self.refuses = (400, "maximum context length is 4096 tokens") if is_limited else None
            return await super()._completions(request)

    async with Full(events=[end()]) as fake, upstream(fake.url) as address:
        engine = ChatEngine(address, "gpt", MessagesDialect())
        assert finish_of(await heard(engine, job(output_tokens_max=9000))).reason == "stop"
        assert [one.get("max_tokens") for one in fake.requests] == [9000, None]
        assert engine.facts.context_tokens == 4096


async def test_what_is_learned_while_a_job_waits_for_its_answer_stays() -> None:
    """An answer begins when the prompt is read, which may take minutes; meanwhile the list of models is read again."""

    class Slow(FakeChat):
        async def _completions(self, request: web.Request) -> web.StreamResponse:
            engine.facts = EngineFacts(context_tokens=4096)
            return await super()._completions(request)

    async with Slow(events=[end()]) as fake, upstream(fake.url) as address:
        engine = ChatEngine(address, "gpt", MessagesDialect())
        await heard(engine, job())
        assert engine.facts.context_tokens == 4096


async def test_cancelled_turn_closes_the_connection_at_once() -> None:
    fake = FakeChat(events=[delta(content="a"), end()], hold_at=1)
    async with fake, upstream(fake.url) as address:
        asking = asyncio.create_task(heard(ChatEngine(address, "gpt", MessagesDialect()), job()))
        async with asyncio.timeout(WAIT_S):
            await fake.held.wait()
        asking.cancel()
        async with asyncio.timeout(WAIT_S):
            await fake.left.wait()
        await asyncio.wait([asking])


# --- a real endpoint ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    with llama_server() as found:
        yield found


@pytest.fixture
async def engine(listener: Listener) -> AsyncIterator[ChatEngine[MessageForm]]:
    async with upstream(listener.url + "/v1", KEY) as address:
        yield ChatEngine(address, "smollm2", MessagesDialect())


async def test_real_endpoint_answers_in_deltas_and_counts(engine: ChatEngine[MessageForm]) -> None:
    assert await engine.is_ready()
    wanted = job(Head(instructions="Answer with one word."), 6, sampling=Sampling(temperature=0))
    first = await heard(engine, wanted)
    assert "".join(one.text for one in one_by_one(first) if isinstance(one, Delta))
    counted = finish_of(first)
    assert counted.input_tokens is not None
    assert counted.output_tokens is not None
    assert 0 < counted.output_tokens <= 6
    again = finish_of(await heard(engine, wanted))
    assert again.cached_tokens == counted.input_tokens - 1


async def test_real_endpoint_is_warm_after_a_warm_up(engine: ChatEngine[MessageForm]) -> None:
    assert await engine.is_ready()
    head = Head(instructions="You know much about bees.")
    warm_up = finish_of(await heard(engine, job(head, 0)))
    assert warm_up.input_tokens is not None
    assert finish_of(await heard(engine, job(head, 2))).cached_tokens == warm_up.input_tokens - 1


async def test_real_endpoint_counts_before_as_it_counts_afterwards(
    engine: ChatEngine[MessageForm],
) -> None:
    assert await engine.is_ready()
    tools = tools_of(FunctionTool(name="get_weather", parameters=msgspec.Raw(SCHEMA)))
    for head in (Head(instructions="You know much about bees."), Head(tools=tools)):
        wanted = job(head, 1)
        counted = await engine.count_tokens(wanted.scene)
        assert counted == finish_of(await heard(engine, wanted)).input_tokens
    assert engine.facts.context_tokens == CONTEXT_TOKENS
    assert engine.facts.sees_images is False
    assert engine._writer.form.roles.system == "anywhere"


async def test_real_endpoint_calls_a_tool(engine: ChatEngine[MessageForm]) -> None:
    """Even where a call is required llama.cpp lets the model talk first, and this one would talk on."""
    tools = tools_of(FunctionTool(name="get_weather", parameters=msgspec.Raw(SCHEMA)))
    head = Head(tools=tools, tool_choice="required", parallel_tool_calls=False)
    scene = Scene(head, None, (said("Repeat: <tool_call>"),))
    wanted = job(head, 40, sampling=Sampling(temperature=0))
    wanted = msgspec.structs.replace(wanted, scene=scene, prompt=DIALECT.render(scene).prompt)
    reader = DIALECT.reader(scene)
    spoken = []
    for piece in await heard(engine, wanted):
        if isinstance(piece, Deltas):
            spoken += reader.feed(piece)
    spoken += reader.close(is_cut=True)
    assert spoken[0] == ItemOpened("function", "get_weather")
    until = next(n for n, one in enumerate(spoken) if isinstance(one, ItemClosed))
    arguments = "".join(one.text for one in spoken[:until] if isinstance(one, ItemText))
    assert isinstance(json.loads(arguments)["city"], str)


async def test_real_endpoint_says_when_the_prompt_does_not_fit(
    engine: ChatEngine[MessageForm],
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await heard(engine, job(Head(instructions="word " * CONTEXT_TOKENS), 5))
    assert raised.value.code == "context_length_exceeded"


async def test_logprobs_are_those_of_the_endpoint() -> None:
    """Also from an endpoint that leaves the bytes out, and none for what it thought."""
    likely = {"token": "Hé", "logprob": -0.25, "bytes": None, "top_logprobs": []}
    top = [{"token": "x", "logprob": -2.0, "bytes": [120]}]
    thought = delta(reasoning_content="Hm")
    thought["choices"][0]["logprobs"] = {"content": [likely]}  # type: ignore[index]
    spoken = delta(content="Hé!")
    spoken["choices"][0]["logprobs"] = {  # type: ignore[index]
        "content": [likely, {"token": "!", "logprob": -1, "bytes": [33], "top_logprobs": top}]
    }
    fake = FakeChat(events=[thought, spoken, end()])
    async with fake, upstream(fake.url) as address:
        engine = ChatEngine(address, "gpt", MessagesDialect())
        wanted = job(sampling=Sampling(top_logprobs=2, wants_logprobs=True))
        pieces = await heard(engine, wanted)
        await heard(engine, job(sampling=Sampling(wants_logprobs=True)))
        await heard(engine, job(sampling=Sampling(top_logprobs=2)))
    assert one_by_one(pieces)[:2] == [
        Delta(reasoning="Hm"),
        Delta(
            text="Hé!",
            logprobs=(
                Logprob("Hé", [72, 195, 169], -0.25, []),
                Logprob("!", [33], -1.0, [TopLogprob("x", [120], -2.0)]),
            ),
        ),
    ]
    asked = [(one.get("logprobs"), one.get("top_logprobs")) for one in fake.requests]
    assert asked == [(True, 2), (True, None), (None, None)]
