"""Do whole turns work with an engine behind HTTP? The real pipeline in front of FAKE engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from segue.dialects.messages import MessagesDialect
from segue.engines.chat import ChatEngine
from segue.engines.queued import QueuedEngine
from segue.engines.sglang import SGLANG
from segue.engines.token_engine import TokenEngine
from segue.engines.vllm import VLLM
from segue.process.afterwards import Afterwards
from segue.process.runner import Records, Runner
from segue.replicas.router import RoutedEngine
from segue.reports.watch import ReuseWatch
from segue.resent.render_cache import RenderCache
from segue.seals.cipher import RingSeals, new_key
from segue.seams.model import Dialect, Engine
from segue.stores.memory import MemoryStore
from segue.turn.plan import Model
from segue.turn.prepare import decode_items
from segue.turn.resources import Resources
from segue.wire.codec import decode_create
from tests.contracts.engine import chatml
from tests.engines.asking import STOP, Played, assistant, reply, upstream
from tests.engines.fakes.chat import FakeChat, delta, end, usage
from tests.engines.fakes.server import event
from tests.engines.fakes.vllm import FakeVllm
from tests.pipeline import BUDGET, OWNER, RecordingEngine, Stage
from tests.support import fetch, metric, serving

TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
CONTEXT_TOKENS = 10_000
REVIEWS = "get_pull_request_reviews"


@asynccontextmanager
async def staged(
    engine: Engine, dialect: Dialect, watch: ReuseWatch | None = None, **fields: Any
) -> AsyncIterator[Stage]:
    """A process that serves this engine, without a disk."""
    recording = RecordingEngine(engine)
    model = Model("m", recording, dialect, CONTEXT_TOKENS, **fields)
    store = MemoryStore(BUDGET)
    records = Records(
        Afterwards(store.ledger, []),
        store.events,
        store.idempotency_keys,
        store.conversations,
    )
    report_prompt = None if watch is None else watch.add
    resources = Resources(
        {"m": model}, RingSeals([new_key()]), RenderCache(BUDGET), report_prompt=report_prompt
    )
    async with Runner(resources, records) as runner:
        yield Stage(runner, records, store.turns, recording, dialect, [])


def output(call: dict[str, Any], text: str) -> list[dict[str, Any]]:
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": text}]


async def test_tool_loop_through_a_chat_endpoint_sends_the_history_and_writes_only_the_new() -> (
    None
):
    fake, dialect = FakeChat(), MessagesDialect()
    async with (
        fake,
        upstream(fake.url) as address,
        staged(ChatEngine(address, "gpt", dialect), dialect) as stage,
    ):
        connection = stage.connect()
        fake.events = [
            delta(reasoning_content="Hm."),
            delta(tool_calls=[{"index": 0, "function": {"name": "look", "arguments": "{}"}}]),
            end("tool_calls"),
            usage(50, 7, cached=0, reasoning=2),
        ]
        first = await stage.turn(connection, input="Look!", tools=TOOLS, store=False)
        thought, call = first.response["output"]
        assert (thought["type"], call["type"]) == ("reasoning", "function_call")
        assert first.response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2

        fake.events = [delta(content="A bee"), delta(content="."), end(), usage(70, 3, cached=48)]
        second = await stage.turn(
            connection,
            previous_response_id=first.response["id"],
            input=output(call, "bzz"),
            tools=TOOLS,
            store=False,
        )
        assert second.response["status"] == "completed"
        assert second.response["output"][0]["content"][0]["text"] == "A bee."
        assert second.response["usage"]["input_tokens"] == 70
        assert second.response["usage"]["input_tokens_details"]["cached_tokens"] == 48

        await stage.turn(
            connection, previous_response_id=second.response["id"], input="And?", store=False
        )
        sent = fake.requests[-1]["messages"]
        assert sent == [
            {"role": "user", "content": "Look!"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {
                        "id": call["call_id"],
                        "type": "function",
                        "function": {"name": "look", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call["call_id"], "content": "bzz"},
            {"role": "assistant", "content": "A bee."},
            {"role": "user", "content": "And?"},
        ]
        kept = len(json.dumps(sent[:3], separators=(",", ":")))
        third = stage.engine.jobs[-1].prompt
        assert third.before is not None
        assert third.before.length == kept - len("[]") - len(",")


def resent(item: dict[str, Any]) -> dict[str, Any]:
    """An item as agents send it back: without what is not theirs, in another order, its text as plain text."""
    sent = {name: item[name] for name in sorted(item) if name not in ("id", "status")}
    if item["type"] == "message":
        sent["content"] = item["content"][0]["text"]
    return sent


async def test_answer_that_is_sent_back_as_it_was_is_known_by_the_ids_that_were_sampled() -> None:
    """The model spells its words letter by letter, as no tokenizer would; a client without a chain sends them back."""
    dialect, watch = chatml(), ReuseWatch(BUDGET, set())
    spelt = [dialect.write([assistant(letter)])[0] for letter in "Buzzing bees."]
    usual = dialect.write([assistant("Buzzing bees.")]).tolist()
    assert len(spelt) > 2 * len(usual)

    def spelt_in(prompt: list[int]) -> int:
        return sum(prompt[at : at + len(spelt)] == spelt for at in range(len(prompt)))

    async with (
        FakeVllm(lambda _: [*spelt, STOP], block=1) as fake,
        upstream(fake.url) as address,
        staged(TokenEngine(VLLM, address, "fake"), dialect, watch, checks_rendering=True) as stage,
    ):
        history: list[dict[str, Any]] = [{"role": "user", "content": "What is in the garden?"}]
        told = await stage.turn(input=history, tools=TOOLS, store=False)
        known = 0
        for number in range(6):
            known = len(stage.engine.prompt) + len(stage.engine.sampled[-1])
            said = told.response["output"]
            assert said[0]["content"][0]["text"] == "Buzzing bees."
            history += [*(said if number % 2 else map(resent, said))]
            history += [{"role": "user", "content": f"And number {number}?"}]
            told = await stage.turn(input=history, tools=TOOLS, store=number == 5)
            usage = told.response["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] == known
            # Of all items that were sent, the question is new, and the answer where it has an id of its own.
            is_new = bool(number % 2) or number == 0
            assert (told.tally.items_validated, told.tally.tool_decodes) == (1 + is_new, 0)
            report = await watch.find(OWNER, told.response["id"])
            assert report is not None
            # The newline after the answer was not sampled.
            assert (report.verdict, report.reusable_tokens) == ("hit", known + 1)

        # A turn of its own is whole in the store, and can be continued.
        chained = await stage.turn(previous_response_id=told.response["id"], input="So?")
        assert chained.response["status"] == "completed"

        # What the client has changed or left out of the last answer is what counts.
        for text in ("Buzzing bees.", "Buzzing  bees.", None, "Bees"):
            history += [] if text is None else [{"role": "assistant", "content": text}]
            history += [{"role": "user", "content": "Why?"}]
            await stage.turn(input=history, tools=TOOLS, store=False)
            assert spelt_in(stage.engine.prompt) == 7

        # Nothing is known of what another owner has sent.
        create = decode_create(
            json.dumps({"model": "m", "input": history, "tools": TOOLS}).encode()
        )
        for owner in (OWNER, "bob"):
            cache = stage.runner.resources.prompt_cache
            known = await cache.known_items(owner, create, 0)
            assert known is not None
            assert isinstance(create.input, list)
            items = await decode_items(create.input)
            found = await cache.recognise(owner, create, items, known)
            assert (found.beginning is not None) is any(known) is (owner == OWNER)


async def test_chain_through_two_replicas_stays_where_its_prefix_is() -> None:
    """The second turn goes back to the same replica, is told as cached, and adds only its own ids."""
    async with (
        FakeVllm(reply, block=1) as one,
        FakeVllm(reply, block=1) as other,
        upstream(one.url) as first,
        upstream(other.url) as second,
    ):
        engine = RoutedEngine(
            [
                QueuedEngine("one", TokenEngine(VLLM, first, "fake")),
                QueuedEngine("other", TokenEngine(VLLM, second, "fake")),
            ]
        )
        async with staged(engine, chatml()) as stage:
            connection = stage.connect()
            told = await stage.turn(connection, input="Hello", store=False)
            for _ in range(3):
                prompt = len(stage.engine.prompt)
                sampled = len(stage.engine.sampled[-1])
                told = await stage.turn(
                    connection,
                    previous_response_id=told.response["id"],
                    input="And then?",
                    store=False,
                )
                details = told.response["usage"]["input_tokens_details"]
                assert details["cached_tokens"] == prompt + sampled
            # The first turn goes to either.
            assert (one.requests == []) != (other.requests == [])


def namespaced(namespace: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "namespace", "name": namespace, "tools": tools}


async def test_call_of_a_tool_is_delivered_as_the_call_of_that_tool() -> None:
    """Chat endpoints know only the first 64 characters of a name, and no dots: both tools would be called alike."""
    fake, dialect = FakeChat(), MessagesDialect()
    pairs = [
        [
            namespaced(
                "github_enterprise_production_readonly", f"{REVIEWS}_list", f"{REVIEWS}_delete"
            )
        ],
        [namespaced("files", "read"), {"type": "function", "name": "files__read"}],
    ]
    async with (
        fake,
        upstream(fake.url) as address,
        staged(ChatEngine(address, "gpt", dialect), dialect) as stage,
    ):
        for tools in pairs:
            for number in range(2):
                fake.events = [end()]
                told = await stage.turn(input="Go", tools=tools)
                offered = fake.requests[-1]["tools"]
                name = offered[number]["function"]["name"]
                called = [{"index": 0, "function": {"name": name, "arguments": "{}"}}]
                fake.events = [delta(tool_calls=called), end("tool_calls")]
                told = await stage.turn(input="Go", tools=tools)
                (call,) = told.response["output"]
                meant = [
                    (tool.get("name") if "tools" in tool else None, inner["name"])
                    for tool in tools
                    for inner in tool.get("tools", [tool])
                ][number]
                assert (call.get("namespace"), call["name"]) == meant

                await stage.turn(
                    previous_response_id=told.response["id"], input=output(call, "x"), tools=tools
                )
                (again,) = fake.requests[-1]["messages"][1]["tool_calls"]
                assert again["function"]["name"] == name


async def test_answer_that_the_engines_own_filter_ends_is_incomplete() -> None:
    fake, dialect = (
        FakeChat(events=[delta(content="Well,"), end("content_filter")]),
        MessagesDialect(),
    )
    async with (
        fake,
        upstream(fake.url) as address,
        staged(ChatEngine(address, "gpt", dialect), dialect) as stage,
    ):
        told = await stage.turn(input="Go")
    assert told.response["status"] == "incomplete"
    assert told.response["incomplete_details"] == {"reason": "content_filter"}
    assert told.response["output"][0]["content"][0]["text"] == "Well,"
    assert told.response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("count", [-3, 2**63 - 1, 10**30])
async def test_engine_that_miscounts_costs_no_answer(count: int) -> None:
    """What it says is stored, added up and charged: our own count is."""
    fake, dialect = FakeChat(events=[delta(content="A"), delta(content=" bee")]), MessagesDialect()
    fake.events += [end(), usage(count, count, cached=count, reasoning=count)]
    async with (
        fake,
        upstream(fake.url) as address,
        staged(QueuedEngine("one", ChatEngine(address, "gpt", dialect)), dialect) as stage,
    ):
        told = await stage.turn(input="Go")
    assert told.response["status"] == "completed"
    counted = told.response["usage"]
    assert (counted["output_tokens"], counted["total_tokens"]) == (2, counted["input_tokens"] + 2)
    assert 0 < counted["input_tokens"] < 100
    assert 0 <= counted["input_tokens_details"]["cached_tokens"] <= counted["input_tokens"]


async def test_prompt_of_a_turn_that_breaks_off_was_not_cached_beyond_its_length() -> None:
    meta = {"completion_tokens": 1, "cached_tokens": 900_000}
    said = [event({"output_ids": [504], "meta_info": meta})]
    async with staged(TokenEngine(SGLANG, Played(said)), chatml()) as stage:
        told = await stage.turn(input="Go")
    counted = told.response["usage"]
    assert told.response["status"] == "failed"
    assert counted["input_tokens_details"]["cached_tokens"] == counted["input_tokens"] > 0


async def test_operator_sees_which_engine_miscounts() -> None:
    events = [delta(content="Hi"), end(), usage(10**30, 10**30)]
    async with (
        FakeChat(events=events) as fake,
        serving(engine="chat", engine_url=[fake.url], model=["gpt"]) as served,
    ):
        for _ in range(2):
            asked = {"model": "gpt", "input": "Hi"}
            answer = await fetch(served, "POST", "/v1/responses", asked)
            told = json.loads(answer.body)
            assert (told["status"], told["usage"]["output_tokens"]) == ("completed", 1)
        name = f'segue_engine_counts_corrected_total{{replica="{fake.url}"}}'
        assert await metric(served, name) == 2


async def test_engine_that_goes_on_is_stopped_at_the_clients_limit() -> None:
    """A vLLM, or what stands before it, that loses `max_tokens`."""
    ids = chatml().write([assistant("bees and " * 50)]).tolist()
    said = [event({"choices": [{"index": 0, "text": "", "token_ids": ids[:-1]}]})] * 20
    engine = QueuedEngine("one", TokenEngine(VLLM, Played(said), "fake"))
    async with staged(engine, chatml()) as stage:
        told = await stage.turn(input="Go", max_output_tokens=50)
    assert told.response["status"] == "incomplete"
    assert told.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told.response["usage"]["output_tokens"] == 50
