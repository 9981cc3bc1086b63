"""Does the vLLM engine speak with a REAL vLLM? `make test-vllm`: it is too heavy to be started in every run.

SEGUE_TEST_VLLM_URL is the address of a vLLM that serves SmolLM2-135M-Instruct as `smollm2`, started with
`--enable-prompt-tokens-details --enable-scale-out --max-model-len 2048`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator

import pytest

from segue.engines.token_engine import TokenEngine
from segue.engines.vllm import VLLM, VllmOffer
from segue.errors import InvalidRequest
from segue.seams.model import Finish, Grammar, Ids, ItemText, Sampling, Scene
from segue.seams.prompt import Head, Tokens, id_array
from tests.contracts.dialect import smollm2
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
    logprobs_of,
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
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[TokenEngine[VllmOffer]]:
    async with upstream(URL) as address:
        made = TokenEngine(VLLM, address, "smollm2")
        if request.param == "completions":
            made._known = VllmOffer(has_generate=False, has_structured=True)
        yield made


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_engine_keeps_its_promise(promise: Promise, engine: TokenEngine[VllmOffer]) -> None:
    await promise(Greedy(engine, chatml()))


async def test_server_offers_the_way_of_ids() -> None:
    async with upstream(URL) as address:
        made = TokenEngine(VLLM, address, "smollm2")
        await heard(made, job(tokens([1]), 1))
        assert made._known is not None
        assert (made._known.has_generate, made._known.has_structured) == (True, True)


async def test_next_turn_finds_its_prefix_kept(engine: TokenEngine[VllmOffer]) -> None:
    """In whole blocks, which are of 128 tokens on a CPU."""
    first = (
        Greedy(engine, chatml()).job(said("Name a colour and say why you like it. " * 20)).prompt
    )
    assert isinstance(first, Tokens)
    ids = ids_of(await heard(engine, job(first, 4)))
    again = finish_of(await heard(engine, job(first.plus(id_array([*ids, 28, 28])), 2)))
    assert again.cached_tokens == first.length // 128 * 128 > 0


async def test_warm_up_prefills_and_says_nothing(engine: TokenEngine[VllmOffer]) -> None:
    prompt = Greedy(engine, chatml()).job(said("What do bees do in winter? " * 20)).prompt
    assert isinstance(prompt, Tokens)
    assert [type(piece) for piece in await heard(engine, job(prompt, 0))] == [Finish]
    assert finish_of(await heard(engine, job(prompt, 2))).cached_tokens >= 128


async def test_answer_follows_the_schema(engine: TokenEngine[VllmOffer]) -> None:
    prompt = Greedy(engine, chatml()).job(said("Paris in summer, as JSON.")).prompt
    reader = chatml().reader(Scene(Head(), None, ()))
    text = ""
    assert isinstance(prompt, Tokens)
    for piece in await heard(engine, job(prompt, 60, schema=SCHEMA)):
        if isinstance(piece, Ids):
            text += "".join(one.text for one in reader.feed(piece) if isinstance(one, ItemText))
    assert set(json.loads(text)) == {"city"}


async def test_engine_says_how_likely_its_tokens_were(engine: TokenEngine[VllmOffer]) -> None:
    prompt = Greedy(engine, chatml()).job(said("What is 2+2?")).prompt
    asked = Sampling(temperature=0, top_logprobs=3, wants_logprobs=True)
    pieces = await heard(engine, job(prompt, 6, sampling=asked))
    for id, one in zip(ids_of(pieces), logprobs_of(pieces), strict=True):
        assert one is not None
        assert one.top[0] == (id, one.logprob), "the greedy take the likeliest"
        assert len(one.top) == 3
    alone = Sampling(temperature=0, wants_logprobs=True)
    bare = await heard(engine, job(prompt, 6, sampling=alone))
    assert all(one is not None and not one.top for one in logprobs_of(bare))


@pytest.mark.parametrize(
    "grammar, pattern",
    [
        (Grammar("lark", 'start: "n=" NUMBER\nNUMBER: /[0-9]{3}/'), "n=[0-9]{3}"),
        (Grammar("regex", r'[a-z]{2}/"\d"'), r'[a-z]{2}/"\d"'),
    ],
    ids=["lark", "regex"],
)
async def test_answer_follows_the_grammar(
    engine: TokenEngine[VllmOffer], grammar: Grammar, pattern: str
) -> None:
    prompt = Greedy(engine, chatml()).job(said("Name a number.")).prompt
    pieces = await heard(engine, job(prompt, 20, schema=grammar, sampling=Sampling()))
    words = b"".join(smollm2().bytes_of(id) for id in ids_of(pieces)).decode()
    assert re.fullmatch(pattern, words)


@pytest.mark.parametrize(
    "grammar", [Grammar("lark", "start: nowhere"), Grammar("regex", "(unbalanced")]
)
async def test_grammar_that_cannot_be_read_is_the_clients_error(
    engine: TokenEngine[VllmOffer], grammar: Grammar
) -> None:
    with pytest.raises(InvalidRequest):
        await heard(engine, job(tokens([1, 28]), 5, schema=grammar))


async def test_prompt_that_does_not_fit_is_the_clients_error(
    engine: TokenEngine[VllmOffer],
) -> None:
    assert await engine.is_ready()
    room = engine.facts.context_tokens or 2_048
    with pytest.raises(InvalidRequest) as raised:
        await heard(engine, job(tokens([28] * (room + 50))))
    assert raised.value.code == "context_length_exceeded"
