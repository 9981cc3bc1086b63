"""Does the vLLM engine speak with a REAL vLLM? `make test-vllm`: it is too heavy to be started in every run.

SEGUE_TEST_VLLM_URL is the address of a vLLM that serves SmolLM2-135M-Instruct as `smollm2`, started with
`--enable-prompt-tokens-details --enable-scale-out --max-model-len 2048`.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator

import pytest

from segue.engines.vllm import VllmEngine, Ways
from segue.errors import InvalidRequest
from segue.turn.values import Finish, Head, Ids, Scene, Tokens, Wrote, id_array
from tests.contracts.engine import chatml
from tests.contracts.turns import said
from tests.engines.asking import (
    PROMISES,
    Greedy,
    Promise,
    finish_of,
    heard,
    ids_of,
    job,
    tokens,
    upstream,
)

URL = os.environ.get("SEGUE_TEST_VLLM_URL", "")

pytestmark = pytest.mark.vllm

SCHEMA = (
    b'{"type":"object","properties":{"city":{"type":"string","maxLength":10}},'
    b'"required":["city"],"additionalProperties":false}'
)


@pytest.fixture(params=["generate", "completions"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[VllmEngine]:
    async with upstream(URL) as address:
        made = VllmEngine(address, "smollm2")
        if request.param == "completions":
            made._ways = Ways(has_generate=False, has_structured=True)
        yield made


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_engine_keeps_its_promise(promise: Promise, engine: VllmEngine) -> None:
    await promise(Greedy(engine, chatml()))


async def test_server_offers_the_way_of_ids() -> None:
    async with upstream(URL) as address:
        made = VllmEngine(address, "smollm2")
        await heard(made, job(tokens([1]), 1))
        assert made._ways == Ways(has_generate=True, has_structured=True)


async def test_next_turn_finds_its_prefix_kept(engine: VllmEngine) -> None:
    """In whole blocks, which are of 128 tokens on a CPU."""
    first = (
        Greedy(engine, chatml()).job(said("Name a colour and say why you like it. " * 20)).prompt
    )
    assert isinstance(first, Tokens)
    ids = ids_of(await heard(engine, job(first, 4)))
    again = finish_of(await heard(engine, job(first.plus(id_array([*ids, 28, 28])), 2)))
    assert again.cached_tokens == first.length // 128 * 128 > 0


async def test_warm_up_prefills_and_says_nothing(engine: VllmEngine) -> None:
    prompt = Greedy(engine, chatml()).job(said("What do bees do in winter? " * 20)).prompt
    assert isinstance(prompt, Tokens)
    assert [type(piece) for piece in await heard(engine, job(prompt, 0))] == [Finish]
    assert finish_of(await heard(engine, job(prompt, 2))).cached_tokens >= 128


async def test_answer_follows_the_schema(engine: VllmEngine) -> None:
    prompt = Greedy(engine, chatml()).job(said("Paris in summer, as JSON.")).prompt
    reader = chatml().reader(Scene(Head(), None, ()))
    text = ""
    assert isinstance(prompt, Tokens)
    for piece in await heard(engine, job(prompt, 60, schema=SCHEMA)):
        if isinstance(piece, Ids):
            text += "".join(one.text for one in reader.feed(piece) if isinstance(one, Wrote))
    assert set(json.loads(text)) == {"city"}


async def test_prompt_that_does_not_fit_is_the_clients_error(engine: VllmEngine) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await heard(engine, job(tokens([28] * 2_100)))
    assert raised.value.code == "context_length_exceeded"
