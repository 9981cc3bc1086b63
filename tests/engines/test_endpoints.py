"""Do whole turns work with every kind of chat endpoint? The real pipeline in front of FAKE endpoints, each with the
habits of a real one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from segue.dialects.messages import MessagesDialect
from segue.engines.chat import ChatEngine
from segue.turn.plan import Arrival, Caller, Receipt
from segue.wire.codec import decode_create
from tests.engines.asking import upstream
from tests.engines.fakes import endpoints
from tests.engines.fakes.endpoints import PROFILES, THOUGHT, FakeEndpoint, Profile
from tests.pipeline import OWNER, Stage
from tests.scenarios.test_upstream_engines import output, staged

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


@pytest.fixture(params=PROFILES, ids=lambda one: one.name)
def profile(request: pytest.FixtureRequest) -> Profile:
    found: Profile = request.param
    return found


@pytest.fixture
async def fake(profile: Profile) -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint(profile=profile) as found:
        assert isinstance(found, FakeEndpoint)
        yield found


@pytest.fixture
async def stage(fake: FakeEndpoint) -> AsyncIterator[Stage]:
    async with upstream(fake.url) as address:
        dialect = MessagesDialect()
        engine = ChatEngine(address, "m", dialect)
        async with staged(engine, dialect, count_tokens=engine.count_tokens) as found:
            assert await found.engine.is_ready()
            yield found


async def ask(stage: Stage, **fields: Any) -> dict[str, Any]:
    """A turn that must succeed."""
    told = await stage.turn(stage.connect(), **fields)
    response: dict[str, Any] = told.response
    assert response["status"] == "completed", response["error"]
    return response


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def thoughts_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "reasoning"
        for part in item["content"]
    )


def calls_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in response["output"] if item["type"] == "function_call"]


async def test_plain_turn(stage: Stage, profile: Profile, fake: FakeEndpoint) -> None:
    for _ in range(2):
        before = len(fake.requests)
        response = await ask(stage, input="Hi")
        assert text_of(response) == "Hello."
        assert thoughts_of(response) == ("" if profile.thoughts == "none" else THOUGHT)
        assert response["usage"]["input_tokens"] > 0 or profile is endpoints.MISTRAL
    assert len(fake.requests) == before + 1, "what was learned holds"
    assert not {"temperature", "top_p", "presence_penalty", "max_tokens"} & fake.requests[-1].keys()


async def test_what_an_endpoint_says_of_its_model(stage: Stage, profile: Profile) -> None:
    wanted = {
        "ollama": (8_192, True),
        "lm_studio": (8_192, True),
        "llama_server": (16_384, False),
        "vllm": (32_768, None),
        "groq": (131_072, None),
        "cerebras": (None, None),
        "mistral": (131_072, None),
        "openrouter": (200_000, True),
        "gemini": (None, None),
        "deepseek": (None, None),
    }
    facts = stage.engine.facts
    assert (facts.context_tokens, facts.sees_images) == wanted[profile.name]


@pytest.mark.parametrize(
    "name, sees",
    [
        ("qwen/qwen2.5-vl-72b-instruct", True),
        ("Qwen3-VL-8B", True),
        ("qwen3.6-35b-a3b", True),
        ("gemma3:27b", True),
        ("meta-llama/llama-4-scout-17b", True),
        ("gpt-4o-mini", True),
        ("pixtral-12b", True),
        ("gpt-oss-120b", None),
        ("qwen3-coder-next", None),
        ("deepseek-v3.2", None),
        ("zai-glm-4.7", None),
    ],
)
async def test_models_that_see_by_their_name(name: str, sees: bool | None) -> None:
    fake = FakeEndpoint(profile=Profile("plain", about={"id": name}))
    async with fake, upstream(fake.url) as address:
        engine = ChatEngine(address, name, MessagesDialect())
        assert await engine.is_ready()
        assert engine.facts.sees_images is sees


async def test_calls_beside_each_other(stage: Stage) -> None:
    response = await ask(stage, input="How is the weather in Paris and Rome?", tools=TOOLS)
    assert [one["arguments"] for one in calls_of(response)] == [
        '{"city": "Paris"}',
        '{"city": "Rome"}',
    ]


async def test_second_turn_with_thoughts(
    stage: Stage, profile: Profile, fake: FakeEndpoint
) -> None:
    """Thoughts go back as they came, and not at all where they are refused; either way nobody sees a refusal."""
    first = await ask(stage, input="How is the weather in Paris?", tools=TOOLS)
    (call,) = calls_of(first)
    second = await ask(
        stage, previous_response_id=first["id"], input=output(call, "18 C"), tools=TOOLS
    )
    assert text_of(second) == "It is 18 C."
    before = len(fake.requests)
    third = await ask(stage, previous_response_id=second["id"], input="Thanks", tools=TOOLS)
    assert text_of(third) == "Hello."
    assert len(fake.requests) == before + 1
    sent: Any = fake.requests[-1]["messages"]
    back = {
        "ollama": {"reasoning": THOUGHT},
        "lm_studio": {"content": f"<think>\n{THOUGHT}\n</think>\n\n"},
        "llama_server": {"reasoning_content": THOUGHT},
        "vllm": {"reasoning": THOUGHT},
        "deepseek": {"reasoning_content": THOUGHT},
        "cerebras": {"reasoning": THOUGHT},
        "mistral": {
            "content": [{"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]}]
        },
        "openrouter": {"reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}]},
    }.get(profile.name, {})
    wanted = {"role": "assistant", "content": None, **back}
    assert {name: value for name, value in sent[1].items() if name != "tool_calls"} == wanted


async def test_history_that_is_resent_without_thoughts(stage: Stage) -> None:
    """From a client that keeps neither thoughts nor what a provider has signed."""
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    asked = {"role": "user", "content": "How is the weather?"}
    response = await ask(stage, input=[asked, call, *output(call, "18 C")], tools=TOOLS)
    assert text_of(response) == "It is 18 C."


async def test_instructions_and_developers_in_the_order_of_codex(
    stage: Stage, fake: FakeEndpoint
) -> None:
    """A warm-up with a developer's message, then another one before the user's: all of it is the first message."""
    warm_up = await ask(
        stage,
        instructions="One.",
        input=[{"role": "developer", "content": "Two."}],
        generate=False,
    )
    developer = {"role": "developer", "content": "Three."}
    users = [{"role": "user", "content": "Here."}, {"role": "user", "content": "Hi"}]
    response = await ask(
        stage,
        instructions="One.",
        previous_response_id=warm_up["id"],
        input=[developer, *users],
    )
    assert text_of(response) == "Hello."
    sent: Any = fake.requests[-1]["messages"]
    assert sent[0] == {"role": "system", "content": "One.\n\nTwo.\n\nThree."}
    assert "\n\n".join(one["content"] for one in sent[1:]) == "Here.\n\nHi"


async def test_developer_who_speaks_later(stage: Stage, fake: FakeEndpoint) -> None:
    """Also between a tool's output and the user, in the words of nobody else."""
    first = await ask(stage, instructions="One.", input="How is the weather in Paris?", tools=TOOLS)
    (call,) = calls_of(first)
    later = [
        *output(call, "18 C"),
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Well?"},
    ]
    response = await ask(
        stage, instructions="One.", previous_response_id=first["id"], input=later, tools=TOOLS
    )
    assert text_of(response) == "Hello."
    sent: Any = fake.requests[-1]["messages"]
    (told,) = [one for one in sent if "Be brief." in str(one["content"])]
    assert told["role"] == "system" or "developer" in told["content"]
    assert [one["content"] for one in sent if one["role"] == "tool"] == ["18 C"]


@pytest.mark.parametrize("effort", ["minimal", "xhigh", "none"])
async def test_effort_that_an_endpoint_does_not_know(
    stage: Stage, profile: Profile, fake: FakeEndpoint, effort: str
) -> None:
    await ask(stage, input="Hi", reasoning={"effort": effort}, text={"verbosity": "low"})
    sent = fake.requests[-1].get("reasoning_effort")
    if profile.efforts is None:
        assert sent in (effort, None)
    elif effort in profile.efforts:
        assert sent == effort
    else:
        assert sent == ("high" if effort == "xhigh" else "low")


PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


async def test_pictures_are_seen_where_the_endpoint_says_so(
    stage: Stage, fake: FakeEndpoint
) -> None:
    content = [{"type": "input_text", "text": "What is this?"}, PICTURE]
    await ask(stage, input=[{"role": "user", "content": content}])
    sent: Any = fake.requests[-1]["messages"]
    is_sent = "AAAA" in str(sent)
    assert is_sent == bool(stage.engine.facts.sees_images)
    assert is_sent or "cannot see" in sent[-1]["content"]


async def test_picture_that_is_refused_after_all_is_told_in_words() -> None:
    """A name may promise what the endpoint does not hold."""

    def blind(messages: list[dict[str, object]]) -> endpoints.Refusal | None:
        hint = "image input is not supported - hint: you may need to provide the mmproj"
        is_shown = "image_url" in str(messages)
        return endpoints.openai_error(hint, 500, code=500) if is_shown else None

    profile = Profile("plain", about={"id": "gemma-3"}, order=blind)
    async with FakeEndpoint(profile=profile) as fake, upstream(fake.url) as address:
        dialect = MessagesDialect()
        engine = ChatEngine(address, "gemma-3", dialect)
        async with staged(engine, dialect) as stage:
            assert await engine.is_ready()
            for count in (2, 3):
                await ask(stage, input=[{"role": "user", "content": [PICTURE]}])
                assert len(fake.requests) == count


async def count(stage: Stage, **fields: Any) -> int:
    """As `POST /v1/responses/input_tokens` has it."""
    create = decode_create(json.dumps({"model": "m", **fields}).encode())
    arrival = Arrival(create, Caller(OWNER, stage.store), Receipt())
    return await stage.runner.count_tokens(arrival)


async def test_tokens_are_counted(stage: Stage, profile: Profile, fake: FakeEndpoint) -> None:
    """By the endpoint where it can, and then exactly; else from what it counted last, and an estimate of the rest."""
    words = "Bees fly far. " * 100
    counted = await count(stage, input=words)
    exact = profile.name in ("vllm", "llama_server")
    assert counted == 4321 if exact else 300 < counted < 500
    first = await ask(stage, input=words)
    used = first["usage"]["input_tokens"]
    more = await count(stage, input=words, previous_response_id=first["id"])
    assert more == 4321 if exact else used + 300 < more < used + 600


async def test_history_over_the_threshold_is_compacted(stage: Stage, fake: FakeEndpoint) -> None:
    first = await ask(stage, input="Bees fly far. " * 500)
    before = len(fake.requests)
    second = await ask(
        stage,
        input="And?",
        previous_response_id=first["id"],
        context_management=[{"type": "compaction", "compact_threshold": 1_200}],
    )
    assert second["output"][0]["type"] == "compaction"
    assert len(fake.requests) >= before + 2


@pytest.mark.parametrize("kind", [endpoints.VLLM, endpoints.LLAMA_SERVER], ids=lambda one: one.name)
@pytest.mark.parametrize("loses", [False, True])
async def test_template_that_loses_a_later_system_message_is_found_out(
    kind: Profile, loses: bool
) -> None:
    """MiniMax, SmolLM3 and others: what a template drops is said as a user's message, though nothing is refused."""
    profile = replace(kind, order=lambda messages: None, loses_later_system=loses)
    async with FakeEndpoint(profile=profile) as fake, upstream(fake.url) as address:
        dialect = MessagesDialect()
        assert await ChatEngine(address, "m", dialect).is_ready()
        assert fake.requests == []
    assert dialect.form.roles.system == ("first" if loses else "anywhere")
