"""Does the vLLM engine speak with all of a real vLLM but its model? `make test-hollow-vllm` runs one.

Everything but the model is vLLM's own (`bench/hollow`): what is asked, checked, scheduled, cached, counted and refused.
What a model would say is drawn at random. `test_vllm_real.py` runs against it too.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from bench.peer import server
from bench.replay import load
from bench.wires import play
from segue.engines.token_engine import TokenEngine
from segue.engines.upstream import Upstream
from segue.engines.vllm import GENERATE, VLLM, VllmOffer
from segue.errors import ApiError, InvalidRequest
from segue.seams.model import Grammar, Sampling
from segue_bench.client import local, open_websocket
from segue_bench.trace import VOCABULARY
from segue_bench.ways import Stopwatch, frame, socket_turn
from tests.clients.recordings import recordings
from tests.contracts.dialect import smollm2
from tests.engines.asking import finish_of, heard, ids_of, job, logprobs_of, tokens, upstream

URL = os.environ.get("SEGUE_TEST_VLLM_URL", "")
MODEL = "smollm2"
BLOCK = 128
# A prompt that ends with this token is answered without an end.
ENDLESS = 0
PROMPT = [*range(100, 400)]

pytestmark = pytest.mark.vllm


@pytest.fixture
async def address() -> AsyncIterator[Upstream]:
    async with upstream(URL) as found:
        yield found


@pytest.fixture(params=["generate", "completions"])
async def engine(request: pytest.FixtureRequest, address: Upstream) -> TokenEngine[VllmOffer]:
    made = TokenEngine(VLLM, address, MODEL)
    if request.param == "completions":
        made._known = VllmOffer(has_generate=False, has_structured=True)
    return made


async def until_running(address: Upstream, count: int) -> None:
    """Wait until vLLM computes so many requests."""
    async with asyncio.timeout(20):
        while True:
            _, page = await address.call("GET", "/metrics")
            found = re.search(rb"^vllm:num_requests_running{[^}]*} (\S+)$", page, re.M)
            if found and float(found[1]) == count:
                return
            await asyncio.sleep(0.05)


def page_of(start: int) -> list[int]:
    """A prompt that no other test has."""
    return [start + number for number in range(300)]


async def test_sampled_ids_come_back_as_they_were_and_stops_last(
    engine: TokenEngine[VllmOffer],
) -> None:
    pieces = await heard(engine, job(tokens(PROMPT)))
    ids = ids_of(pieces)
    assert finish_of(pieces).reason == "stop"
    assert ids[-1] == 2
    assert ids == ids_of(await heard(engine, job(tokens(PROMPT))))
    other = await heard(engine, job(tokens(PROMPT), stops=frozenset({2, 7, 1_000})))
    assert ids_of(other)[-1] in (2, 7, 1_000)
    cut = await heard(engine, job(tokens(PROMPT), output_tokens_max=2))
    assert (ids_of(cut), finish_of(cut).reason) == (ids[:2], "length")


async def test_cached_tokens_are_exact_over_a_chain_and_a_fork(
    engine: TokenEngine[VllmOffer],
) -> None:
    """Whole blocks of prompt and answer; the last token that was sampled is not in the cache yet."""
    start = 2_000 if engine._known is None else 3_000
    first = [*page_of(start), *page_of(start + 10_000), ENDLESS]
    found = await heard(engine, job(tokens(first), output_tokens_max=60))
    assert finish_of(found).cached_tokens == 0
    answer = ids_of(found)
    assert len(answer) == 60
    for new in (page_of(start + 20_000), page_of(start + 30_000)):
        again = finish_of(await heard(engine, job(tokens(first, answer, new), 3)))
        assert again.cached_tokens == (len(first) + len(answer) - 1) // BLOCK * BLOCK


async def test_closing_aborts_the_request_in_the_engine(
    engine: TokenEngine[VllmOffer], address: Upstream
) -> None:
    """100,000 tokens would take minutes."""
    endless = job(tokens([*PROMPT, ENDLESS]), output_tokens_max=100_000)
    async with aclosing(engine.sample(endless)) as pieces:
        await anext(pieces)
        await until_running(address, 1)
    await until_running(address, 0)


async def test_logprobs_are_those_of_the_sampled_tokens(engine: TokenEngine[VllmOffer]) -> None:
    asked = Sampling(top_logprobs=3, wants_logprobs=True)
    pieces = await heard(engine, job(tokens(PROMPT), 6, sampling=asked))
    found = [one for one in logprobs_of(pieces) if one is not None]
    assert len(found) == len(ids_of(pieces)) > 0
    for id, one in zip(ids_of(pieces), found, strict=True):
        assert one.logprob == pytest.approx(-0.5)
        assert [top for top, _ in one.top] == [id, id + 1, id + 2]


@pytest.mark.parametrize(
    "schema, pattern",
    [
        (
            b'{"type":"object","properties":{"n":{"enum":["a","b"]}},"required":["n"],"additionalProperties":false}',
            r'\{\s*"n"\s*:\s*"[ab]"\s*\}',
        ),
        (Grammar("lark", 'start: "n=" NUMBER\nNUMBER: /[0-9]{3}/'), "n=[0-9]{3}"),
        (Grammar("regex", r'[a-z]{2}/"\d"'), r'[a-z]{2}/"\d"'),
    ],
    ids=["json", "lark", "regex"],
)
async def test_structured_outputs_are_followed(
    engine: TokenEngine[VllmOffer], schema: bytes | Grammar, pattern: str
) -> None:
    pieces = await heard(engine, job(tokens(PROMPT), 80, schema=schema, sampling=Sampling()))
    ids = [id for id in ids_of(pieces) if id != 2]
    assert re.fullmatch(pattern, b"".join(map(smollm2().bytes_of, ids)).decode())


async def test_what_cannot_be_done_is_refused_in_words(
    engine: TokenEngine[VllmOffer], address: Upstream
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await heard(engine, job(tokens([28] * 131_100)))
    assert raised.value.code == "context_length_exceeded"
    for grammar in (Grammar("lark", "start: nowhere"), Grammar("regex", "(unbalanced")):
        with pytest.raises(InvalidRequest):
            await heard(engine, job(tokens([1, 28]), 5, schema=grammar))
    stranger = TokenEngine(VLLM, address, "another-model")
    stranger._known = engine._known
    with pytest.raises(ApiError, match="does not know this model"):
        await heard(stranger, job(tokens(PROMPT)))


async def test_text_model_refuses_images(address: Upstream) -> None:
    engine = TokenEngine(VLLM, address, MODEL)
    assert await engine.is_ready()
    assert engine.facts.context_tokens == 131_072
    assert not engine.facts.sees_images
    asked = {
        "model": MODEL,
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 2},
        "content_parts": [{"type": "image_url", "url": "data:image/png;base64,"}],
    }
    status, refusal = await address.call("POST", GENERATE, msgspec.json.encode(asked))
    assert 400 <= status < 500, refusal


async def test_lower_numbers_come_first_where_the_scheduler_has_priorities(
    address: Upstream,
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 2},
    }
    for priority in (-3, 0, 9):
        body = msgspec.json.encode({**asked, "priority": priority})
        status, _ = await address.call("POST", GENERATE, body)
        assert status == 200


async def test_many_streams_beside_each_other_get_their_own_ids(
    engine: TokenEngine[VllmOffer],
) -> None:
    prompts = [tokens([*PROMPT, number]) for number in range(500, 532)]
    alone = [ids_of(await heard(engine, job(prompt))) for prompt in prompts]
    beside = await asyncio.gather(*(heard(engine, job(prompt)) for prompt in prompts))
    assert [ids_of(pieces) for pieces in beside] == alone


def test_turn_of_100k_tokens_through_segue_finds_all_of_its_prompt() -> None:
    """On a socket, the whole way: Segue renders, vLLM answers, and the next turn computes what is new."""
    flags = ("--engine", "vllm", "--engine-url", URL, "--model", MODEL)
    with server(None, *flags, "--tokenizer", str(VOCABULARY), is_pinned=False) as process:
        connection = open_websocket(local(process.port))
        parent, found = None, []
        for text in (" the" * 100_000, "Go on.", "And on."):
            event = {"type": "response.create", "model": MODEL, "store": False, "input": text}
            data = json.dumps({**event, **({"previous_response_id": parent} if parent else {})})
            watch = Stopwatch()
            watch.ready()
            response = socket_turn(connection, watch, frame(data.encode())).last.response
            assert response is not None
            assert response.usage is not None
            parent = response.id
            found.append((response.usage, response.usage.input_tokens_details.cached_tokens))
        connection.close()
    assert found[0][0].input_tokens > 100_000
    assert found[0][1] == 0
    for (before, _), (_, cached) in pairwise(found):
        known = before.input_tokens + before.output_tokens
        assert cached == (known - 1) // BLOCK * BLOCK


def test_recorded_clients_find_every_block_of_their_prompts() -> None:
    """By vLLM's own count, on Messages and Chat: reminders and tools that join lose nothing."""
    flags = ("--engine", "vllm", "--engine-url", URL, "--model", MODEL)
    with server(None, *flags, "--tokenizer", str(VOCABULARY), is_pinned=False) as process:
        played = [one for name in recordings() for one in play(load(name), process, "hollow")]
    assert len(played) > 100
    assert [one for one in played if one.reused < one.known] == []
